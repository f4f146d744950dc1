"""Models of other projects: golden files, which hold what the published code computes (its scans by an exact
recurrence), and other shapes against definitions written out here in float64.

From goombalab/hydra 55bef74: hydra_*. From LIONS-EPFL/LION 32a0136: lion_*. From mikayahlevi/mru-lm: mru_lm_a and
mru_lm_layers_attention c45d36d, mru_lm_first_a c99d6c6, mru_lm_blocks_cayley 7dcc8f2 (a block of the MRU, one of
attention), mru_lm_blocks_qr 92413f9, mru_lm_blocks_scaled 310a009.
"""

import pytest
import torch
import torch.nn.functional as F
from failures import each
from paths import GOLDEN
from safetensors import safe_open

from matmix.model.interop import from_reference


def _golden(name):
    with safe_open(GOLDEN / f"{name}.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        return tensors, _below(tensors, "state."), _below(tensors, "grad."), file.metadata()


def _below(tensors, prefix):
    return {key[len(prefix) :]: tensor for key, tensor in tensors.items() if key.startswith(prefix)}


def _compare_gradients(module, expected, tolerance=2e-5):
    gradients = module.reference_gradients()
    assert set(gradients) == set(expected)
    for name, gradient in gradients.items():
        error = (gradient - expected[name]).abs().max() / expected[name].abs().max().clamp(min=1e-6)
        assert error < tolerance, (name, error)


def _relative_error(actual, expected):
    return ((actual - expected).norm() / expected.norm()).item()


@each(
    "name, config",
    [
        ("hydra_block_a", {"d_model": 64, "d_state": 16, "headdim": 16, "d_conv": 7, "chunk_size": 32, "bias": False}),
        ("hydra_block_a", {"d_model": "64", "d_state": "16", "headdim": "16", "d_conv": "7", "bias": "False"}),
        ("hydra_groups", {}),  # biases and initial states
        ("hydra_limits", {}),  # of step sizes; no bias in the convolution
    ],
)
def test_golden_hydra_layers(name, config):
    golden, state, gradients, metadata = _golden(name)
    layer = from_reference("hydra-layer", state, **(config or metadata))
    assert not layer.training
    u = golden["input.u"].requires_grad_()
    y = layer(u)
    torch.testing.assert_close(y, golden["output"], rtol=1e-4, atol=1e-5)
    (y * golden["output_weight"]).sum().backward()
    _compare_gradients(layer, gradients)
    torch.testing.assert_close(u.grad, golden["input_grad.u"], rtol=1e-4, atol=1e-5)


@each("name", ["postnorm", "prenorm"])  # the latter with position embeddings, relu and another epsilon
def test_golden_hydra_encoders(name):
    golden, state, gradients, metadata = _golden(f"hydra_mlm_{name}")
    model = from_reference("hydra-mlm", state, **metadata)
    logits = model(golden["input_ids"], golden["attention_mask"])
    torch.testing.assert_close(logits, golden["logits"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model(golden["input_ids"]), golden["logits"], rtol=1e-4, atol=1e-5)
    loss = F.cross_entropy(logits.flatten(0, 1), golden["labels"].flatten())
    torch.testing.assert_close(loss, golden["loss"], rtol=1e-5, atol=1e-5)
    loss.backward()
    _compare_gradients(model, gradients)


@each(
    "name, tolerance",
    [
        ("a", 1e-4),
        ("first_a", 2e-5),
        ("layers_attention", 2e-5),
        ("blocks_cayley", 2e-5),
        ("blocks_qr", 2e-5),
        ("blocks_scaled", 2e-5),
    ],
)
def test_golden_mru_language_models(name, tolerance):
    golden, state, gradients, metadata = _golden(f"mru_lm_{name}")
    model = from_reference("mru-lm", state, **metadata)
    ids = golden["input_ids"]
    logits = model(ids)
    torch.testing.assert_close(logits, golden["logits"], rtol=1e-4, atol=1e-4)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(loss, golden["loss"], rtol=1e-5, atol=1e-5)
    loss.backward()
    _compare_gradients(model, gradients, tolerance)
    _, states = model.prefill(ids)
    finals = [state for state in states if state is not None]
    expected = _below(golden, "final_state.")
    assert bool(expected) == (name == "a")
    for index, final in expected.items():
        assert _relative_error(finals[int(index)], final) < 1e-4


@each("order", ["Normal", "S"])
@each("mask", ["Lit", "Decay", "Selective"])
def test_golden_lion_layers_in_every_format(mask, order):
    """Those formats that the published code can run at this length."""
    golden, _, _, metadata = _golden("lion_formats")
    golden = _below(golden, f"{order}.")
    of_mask = _below(golden, f"{mask}.")
    formats = [form for form in ("Attention", "RNN", "Chunk") if f"{form}.y" in of_mask]
    assert len(formats) == (2 if (mask, order) == ("Selective", "S") else 3)
    for form in formats:
        layer = from_reference(
            "lion-attention", _below(of_mask, "state."), mask_type=mask, format=form, order=order, **metadata
        )
        x = golden["x"].clone().requires_grad_()
        y = layer(x)
        assert _relative_error(y, of_mask[f"{form}.y"]) < 2e-6
        (y * golden["dy"]).sum().backward()
        assert _relative_error(x.grad, of_mask[f"{form}.dx"]) < 1e-5


def _scan(x, dt, decay, b, c, state):
    """h_t = exp(dt A) h_{t-1} + dt x b^T; y_t = h_t c, one document, (L, H, P), (L, H), (L, H), (L, H, N),
    (L, H, N)."""
    ys = []
    for t in range(x.shape[0]):
        state = state * (dt[t] * decay).exp()[:, None, None] + dt[t, :, None, None] * x[t, :, :, None] * b[t, :, None]
        ys.append((state * c[t, :, None]).sum(-1))
    return torch.stack(ys)


def _hydra_by_definition(state, u, *, d_state, headdim, ngroups):
    """The layer written out for one document u (L, d_model)."""
    s = {key: value.double() for key, value in state.items()}
    d_inner, nheads = s["norm.weight"].shape[0], s["A_log"].shape[0]
    z, xbc, dt = F.linear(u, s["in_proj.weight"], s.get("in_proj.bias")).split(
        [d_inner, d_inner + 4 * ngroups * d_state, 2 * nheads], -1
    )
    width = s["conv1d.weight"].shape[-1]
    xbc = F.conv1d(xbc.T[None], s["conv1d.weight"], s.get("conv1d.bias"), padding=width // 2, groups=xbc.shape[1])
    x, *bc = F.silu(xbc[0].T).split([d_inner] + 4 * [ngroups * d_state], -1)
    b_f, c_f, b_b, c_b = (
        part.unflatten(-1, (ngroups, d_state)).repeat_interleave(nheads // ngroups, dim=1) for part in bc
    )
    heads = x.unflatten(-1, (nheads, headdim))
    dt_f, dt_b = (F.softplus(part + s["dt_bias"]) for part in dt.split(nheads, -1))
    start = s.get("init_states", torch.zeros(nheads, headdim, d_state, dtype=torch.float64))
    decay = -s["A_log"].exp()
    forward = _scan(heads, dt_f, decay, b_f, c_f, start)
    backward = _scan(heads.flip(0), dt_b.flip(0), decay, b_b.flip(0), c_b.flip(0), start)
    zero = torch.zeros_like(forward[:1])
    y = torch.cat([zero, forward[:-1]]) + torch.cat([zero, backward[:-1]]).flip(0)
    y = (y + heads * (F.linear(x, s["fc_D.weight"]) + s["D"])[..., None]).flatten(1)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5) * s["norm.weight"] * F.silu(z)
    return F.linear(y, s["out_proj.weight"], s.get("out_proj.bias"))


def _random_hydra_state(d_model, d_state, headdim, ngroups, expand=2, d_conv=7, options=(), prefix=""):
    d_inner = expand * d_model
    nheads, conv = d_inner // headdim, d_inner + 4 * ngroups * d_state
    shapes = {
        "in_proj.weight": (d_inner + conv + 2 * nheads, d_model),
        "conv1d.weight": (conv, 1, d_conv),
        "conv1d.bias": (conv,),
        "dt_bias": (nheads,),
        "A_log": (nheads,),
        "D": (nheads,),
        "fc_D.weight": (nheads, d_inner),
        "norm.weight": (d_inner,),
        "out_proj.weight": (d_model, d_inner),
    }
    if "bias" in options:
        shapes |= {"in_proj.bias": (shapes["in_proj.weight"][0],), "out_proj.bias": (d_model,)}
    if "no conv bias" in options:
        del shapes["conv1d.bias"]
    if "initial states" in options:
        shapes["init_states"] = (nheads, headdim, d_state)
    return {prefix + name: torch.randn(shape) * 0.3 for name, shape in shapes.items()}


@each(
    "sizes, options",
    [
        ({"d_model": 24, "d_state": 5, "headdim": 8, "ngroups": 3}, ()),
        ({"d_model": 16, "d_state": 4, "headdim": 4, "ngroups": 2, "expand": 3, "d_conv": 5}, ("bias",)),
        ({"d_model": 16, "d_state": 4, "headdim": 16, "ngroups": 1, "d_conv": 3}, ("no conv bias",)),
        ({"d_model": 16, "d_state": 6, "headdim": 8, "ngroups": 2, "expand": 1}, ("initial states", "bias")),
    ],
)
def test_hydra_layers_of_other_shapes(sizes, options):
    state = _random_hydra_state(**sizes, options=options)
    flags = {
        "bias": "bias" in options,
        "conv_bias": "no conv bias" not in options,
        "learnable_init_states": "initial states" in options,
    }
    layer = from_reference("hydra-layer", state, **sizes, **flags)
    weights = {key: value.double().requires_grad_() for key, value in state.items()}
    u, cotangent = torch.randn(2, 21, sizes["d_model"]), torch.randn(2, 21, sizes["d_model"])
    keys = ("d_state", "headdim", "ngroups")
    expected = torch.stack([_hydra_by_definition(weights, row.double(), **{k: sizes[k] for k in keys}) for row in u])
    y = layer(u)
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-4)
    (y * cotangent).sum().backward()
    (expected * cotangent).sum().backward()
    _compare_gradients(layer, {key: value.grad for key, value in weights.items()}, tolerance=1e-4)


def test_hydra_encoder_with_pre_norm_positions_and_groups():
    d_model, vocab_size, sizes = 16, 23, {"d_state": 4, "headdim": 8, "ngroups": 2}
    state = {
        "bert.embeddings.word_embeddings.weight": torch.randn(vocab_size, d_model),
        "bert.embeddings.token_type_embeddings.weight": torch.randn(3, d_model),
        "bert.embeddings.position_embeddings.weight": torch.randn(12, d_model),
        "bert.embeddings.position_ids": torch.arange(12)[None],
        "cls.predictions.transform.dense.weight": torch.randn(d_model, d_model),
        "cls.predictions.transform.dense.bias": torch.randn(d_model),
        "cls.predictions.decoder.bias": torch.randn(vocab_size),
    }
    norms = ["bert.embeddings.LayerNorm", "bert.encoder.norm_f", "cls.predictions.transform.LayerNorm"]
    for index in range(2):
        prefix = f"bert.encoder.layer.{index}.layer."
        state |= _random_hydra_state(d_model, **sizes, options=("bias",), prefix=prefix + "mixer.")
        norms.append(prefix + "norm")
    state |= {f"{name}.{part}": torch.randn(d_model) for name in norms for part in ("weight", "bias")}
    model = from_reference(
        "hydra-mlm",
        state,
        vocab_size=vocab_size,
        hidden_size="16",
        num_hidden_layers=2,
        d_state=4,
        headdim=8,
        is_prenorm="True",
        use_position_embeddings=True,
        max_position_embeddings=12,
        type_vocab_size=3,
        ngroups=2,
        bias=True,
        hidden_act="relu",
        layer_norm_eps="1e-3",
        model_type="bert",
    )
    ids, types = torch.randint(vocab_size, (2, 9)), torch.randint(3, (2, 9))
    mask = torch.arange(9) < torch.tensor([[9], [6]])
    logits = model(ids, mask, token_type_ids=types)

    s = {key: value.double() if value.is_floating_point() else value for key, value in state.items()}

    def norm(x, name, eps):
        return F.layer_norm(x, (d_model,), s[f"{name}.weight"], s[f"{name}.bias"], eps)

    for row, length in enumerate((9, 6)):
        x = s["bert.embeddings.word_embeddings.weight"][ids[row, :length]]
        x = x + s["bert.embeddings.token_type_embeddings.weight"][types[row, :length]]
        x = norm(x + s["bert.embeddings.position_embeddings.weight"][:length], "bert.embeddings.LayerNorm", 1e-3)
        for index in range(2):
            prefix = f"bert.encoder.layer.{index}.layer."
            mixer = _below(state, prefix + "mixer.")
            x = x + _hydra_by_definition(mixer, norm(x, prefix + "norm", 1e-5), **sizes)
        x = norm(x, "bert.encoder.norm_f", 1e-3)
        head = "cls.predictions.transform."
        x = F.relu(F.linear(x, s[head + "dense.weight"], s[head + "dense.bias"]))
        x = norm(x, head + "LayerNorm", 1e-12)
        expected = F.linear(x, s["bert.embeddings.word_embeddings.weight"], s["cls.predictions.decoder.bias"])
        torch.testing.assert_close(logits[row, :length].double(), expected, rtol=1e-4, atol=1e-4)


def _mru_lm_by_definition(state, ids, kinds, *, heads, order, attention_heads, construction):
    """mru-lm's model for ids (L,), in its "layers" arrangement."""
    s = {key: value.double() for key, value in state.items()}
    x = s["wte.weight"][ids]
    for index, kind in enumerate(kinds):
        n = F.layer_norm(x, x.shape[-1:], s[f"pre_lns.{index}.weight"])
        w = _below(s, f"layers.{index}.")
        if kind == "mlp":
            y = F.gelu(n @ w["mlp.0.weight"].T) @ w["mlp.2.weight"].T
        elif kind == "attn":
            y = _xpos_attention(n, w, attention_heads)
        else:
            elements = (n @ w["state_matrices_up.weight"].T).unflatten(-1, (heads, -1))
            identity = torch.eye(order, dtype=torch.float64)
            if construction == "cayley":
                skew = torch.zeros(*elements.shape[:2], order, order, dtype=torch.float64)
                rows, columns = torch.tril_indices(order, order, -1)
                skew[..., rows, columns] = elements
                skew = skew - skew.mT
                matrices = torch.linalg.solve(identity - skew, identity + skew)
            elif construction == "identity_plus":
                matrices = elements.unflatten(-1, (order, order)) + identity
            else:
                m = elements.unflatten(-1, (order, order))
                diagonal = m.diagonal(dim1=-2, dim2=-1)
                scale = torch.diag_embed(((diagonal - diagonal.mean(-1, keepdim=True)) / 2).exp())
                matrices = (m.tril(-1) + scale) @ (m.triu(1) + scale)
            h, states = identity.expand(heads, order, order), []
            for matrix in matrices:
                h = h @ matrix
                states.append(h)
            y = (torch.stack(states) @ w["state_matrices_down"]).flatten(1) @ w["mru_out.weight"].T
        x = x + y
    return F.layer_norm(x, x.shape[-1:], s["final_ln.weight"]) @ s["wte.weight"].T


def _xpos_attention(n, w, heads):
    q, k, v = (
        (n @ w[f"{name}_layer.weight"].T).unflatten(-1, (heads, -1)).transpose(0, 1)
        for name in ("query", "key", "value")
    )
    length, width = q.shape[1:]
    twice = torch.arange(2, width + 2, 2, dtype=torch.float64)
    steps = (torch.arange(length, dtype=torch.float64)[:, None] - 7) / 512
    angle = steps * (1 / 10000) ** (twice / width)
    zeta = ((twice / (width / 2) + 0.4 * width) / (1 + 0.4 * width)) ** steps
    turn = torch.polar(torch.ones_like(angle), angle)
    q, k = (torch.view_as_complex(part.unflatten(-1, (-1, 2)).contiguous()) * turn for part in (q, k))
    scores = ((q * zeta)[:, :, None] * (k / zeta)[:, None].conj()).real.sum(-1) / width**0.5
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
    return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1) @ w["attention_down.weight"].T


def _random_mru_state(kinds, *, d_model, heads, order, elements, key_size, value_size, vocab_size=19):
    shapes = {"wte.weight": (vocab_size, d_model), "final_ln.weight": (d_model,)}
    per_kind = {
        "mru": {
            "state_matrices_up.weight": (heads * elements, d_model),
            "state_matrices_down": (heads, order, d_model // (heads * order)),
            "mru_out.weight": (d_model, d_model),
        },
        "mlp": {"mlp.0.weight": (4 * d_model, d_model), "mlp.2.weight": (d_model, 4 * d_model)},
        "attn": {
            "query_layer.weight": (key_size, d_model),
            "key_layer.weight": (key_size, d_model),
            "value_layer.weight": (value_size, d_model),
            "attention_down.weight": (d_model, value_size),
        },
    }
    for index, kind in enumerate(kinds):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in per_kind[kind].items()}
        shapes[f"pre_lns.{index}.weight"] = (d_model,)
    state = {name: torch.randn(shape) * 0.2 for name, shape in shapes.items()}
    return state | {"position_embedding.c": torch.zeros(4), "lm_head.weight": state["wte.weight"]}


@pytest.mark.parametrize(
    ("kinds", "heads", "order", "construction"),
    [
        (["mru", "mru", "mlp"], 3, 4, "ldu"),
        (["mru", "mlp", "attn", "mlp"], 2, 3, "cayley"),
        (["attn", "mru"], 6, 4, "identity_plus"),
    ],
)
def test_mru_language_models_of_other_shapes(kinds, heads, order, construction):
    elements = order * (order - 1) // 2 if construction == "cayley" else order**2
    sizes = {
        "d_model": 48,
        "heads": heads,
        "order": order,
        "elements": elements,
        "key_size": 24,
        "value_size": 36,
    }
    state = _random_mru_state(kinds, **sizes)
    named = {} if construction in ("ldu", "cayley") else {"state_construction": construction}
    model = from_reference(
        "mru-lm",
        state,
        vocab_size=19,
        embedding_size=48,
        dropout_rate="0.1",
        n_state_heads=heads,
        state_size=heads * order**2,
        n_attn_heads=3,
        key_size=24,
        value_size=36,
        layers=str(kinds),
        max_sequence_length=20,
        **named,
    )
    ids = torch.randint(19, (2, 14))
    options = {"heads": heads, "order": order, "attention_heads": 3, "construction": construction}
    weights = {
        name: tensor.double().requires_grad_()
        for name, tensor in state.items()
        if name not in ("position_embedding.c", "lm_head.weight")
    }
    expected = torch.stack([_mru_lm_by_definition(weights, row, kinds, **options) for row in ids])
    logits = model(ids)
    torch.testing.assert_close(logits.double(), expected, rtol=1e-4, atol=1e-4)
    cotangent = torch.randn_like(logits)
    (logits * cotangent).sum().backward()
    (expected * cotangent).sum().backward()
    _compare_gradients(model, {name: weight.grad for name, weight in weights.items()}, tolerance=1e-3)


def _first_mru_lm_by_definition(state, ids, *, heads, order, blocks):
    """mru-lm's network of December 2024 for ids (L,)."""
    embedding = state["lm_head_weights"]
    x = embedding[ids]
    d_model = x.shape[-1]
    d_chunk = d_model // (heads * order)
    for index in range(blocks):
        w = _below(state, f"blocks.{index}.")
        chunks = F.layer_norm(x, (d_model,), w["first_ln.weight"]).unflatten(-1, (heads, order, d_chunk))
        scale = 0.08 * (1 / order) * (d_model / d_chunk)
        h, states = torch.eye(order, dtype=torch.float64), []
        for token in chunks:
            h = h @ (torch.eye(order) + scale * (token @ w["state_matrices_up"]))
            states.append(h)
        y = (torch.stack(states) @ w["state_matrices_down"]) * (d_model / order)
        x = x + y.flatten(1) @ w["mru_out.weight"].T
        n = F.layer_norm(x, (d_model,), w["second_ln.weight"])
        x = x + F.gelu(n @ w["mlp.0.weight"].T) @ w["mlp.2.weight"].T
    return x @ embedding.T


@each("d_model, heads, order, blocks", [(48, 4, 4, 1), (24, 2, 3, 4), (32, 1, 8, 2), (30, 5, 2, 2)])
def test_first_mru_language_models_of_other_shapes(d_model, heads, order, blocks):
    """States are as wide as the model, narrower, and wider."""
    shapes = {"lm_head_weights": (19, d_model)}
    for index in range(blocks):
        shapes |= {
            f"blocks.{index}.state_matrices_up": (heads, d_model // (heads * order), order),
            f"blocks.{index}.state_matrices_down": (heads, order, d_model // (heads * order)),
            f"blocks.{index}.mru_out.weight": (d_model, d_model),
            f"blocks.{index}.first_ln.weight": (d_model,),
            f"blocks.{index}.second_ln.weight": (d_model,),
            f"blocks.{index}.mlp.0.weight": (4 * d_model, d_model),
            f"blocks.{index}.mlp.2.weight": (d_model, 4 * d_model),
        }
    state = {name: torch.randn(shape) * 0.1 for name, shape in shapes.items()}
    sizes = {"embedding_size": d_model, "n_state_heads": heads, "state_size": heads * order**2, "n_blocks": blocks}
    values = {name: str(value) for name, value in sizes.items()}
    full = state | {"wte.weight": state["lm_head_weights"]}
    model = from_reference("mru-lm", full, form="first", vocab_size=19, dropout_rate="0.1", **values)
    ids = torch.randint(19, (2, 14))
    weights = {name: tensor.double().requires_grad_() for name, tensor in state.items()}
    options = {"heads": heads, "order": order, "blocks": blocks}
    expected = torch.stack([_first_mru_lm_by_definition(weights, row, **options) for row in ids])
    logits = model(ids)
    torch.testing.assert_close(logits.double(), expected, rtol=1e-4, atol=1e-4)
    cotangent = torch.randn_like(logits)
    (logits * cotangent).sum().backward()
    (expected * cotangent).sum().backward()
    _compare_gradients(model, {name: weight.grad for name, weight in weights.items()}, tolerance=1e-3)


def _broken_layer(change):
    state = _random_hydra_state(16, 4, 8, 1)
    config = {"d_model": 16, "d_state": 4, "headdim": 8}
    change(state, config)
    return "hydra-layer", state, config


@each(
    "change, words",
    [
        (lambda s, c: s.pop("dt_bias"), ["lacks key 'dt_bias'", "(4)"]),
        (lambda s, c: s.update(extra=torch.zeros(2, 3)), ["'extra'", "(2, 3)"]),
        (lambda s, c: c.update(d_state=5), ["'in_proj.weight'", "(88, 16)", "(92, 16)"]),
        (lambda s, c: c.update(ngroups=2), ["'in_proj.weight'", "(88, 16)", "(104, 16)"]),
        (lambda s, c: c.update(headdim=7), ["headdim = 7"]),
        (lambda s, c: c.update(d_modle=16), ["'d_modle'", "did you mean 'd_model'"]),
        (lambda s, c: c.pop("d_model"), ["lacks d_model"]),
        (lambda s, c: c.update(d_state="sixteen"), ["d_state = 'sixteen'", "int"]),
        (lambda s, c: c.update(bias=1), ["bias = 1", "bool"]),
    ],
)
def test_mistakes_are_one_clear_line(change, words):
    kind, state, config = _broken_layer(change)
    with pytest.raises(ValueError, match=r"^\S") as caught:
        from_reference(kind, state, **config)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_unknown_kinds_and_options_are_named():
    with pytest.raises(ValueError, match="did you mean 'hydra-layer'"):
        from_reference("hydra_layer", {})
    with pytest.raises(ValueError, match="matrix_mixer_type = 'toeplitz'"):
        from_reference("hydra-mlm", {}, matrix_mixer_type="toeplitz")
    with pytest.raises(ValueError, match="layers names 'conv'"):
        from_reference("mru-lm", {}, embedding_size=32, n_state_heads=2, layers=["conv"])
    with pytest.raises(ValueError, match=r"form = 'second'; known: \"first\""):
        from_reference("mru-lm", {}, form="second")
    with pytest.raises(ValueError, match="state_construction = 'householder'; can be read: cayley, identity_plus, ldu"):
        from_reference(
            "mru-lm",
            {},
            vocab_size=7,
            embedding_size=32,
            layers=["mru"],
            n_state_heads=2,
            state_size=32,
            state_construction="householder",
        )
    with pytest.raises(ValueError, match=r"lacks key 'blocks\.0\.first_ln\.weight' of shape \(32\)"):
        from_reference("mru-lm", {}, form="first", vocab_size=7, embedding_size=32, n_state_heads=2, n_blocks=1)
    with pytest.raises(ValueError, match=r"nheads \* order = 2 \* 4 does not divide"):
        from_reference("mru-lm", {}, form="first", vocab_size=7, embedding_size=36, state_size=32, n_state_heads=2)
    with pytest.raises(ValueError, match="times the square"):
        from_reference("mru-lm", {}, embedding_size=32, n_state_heads=2, state_size=30)

"""LION: its three forms, its recurrences, and the published layer, against definitions written out in float64."""

import functools

import pytest
import torch
import torch.nn.functional as F
from nightly import each_value_once
from paths import GOLDEN
from safetensors import safe_open
from safetensors.torch import load_file

from matmix.launch.lab.measuring import tensor_bytes
from matmix.model.interop import from_reference
from matmix.model.mixers import MIXERS
from matmix.model.mixers.scans import lion

D_MODEL = 16
FORMS = ("attention", "chunked", "recurrent")
KINDS = [
    ("lion_lit", {}),
    ("lion_lit", {"feature_map": "silu", "nheads": 3}),
    ("lion_d", {}),
    ("lion_s", {}),
    ("lion_s", {"gate_offset": 0}),
    ("lion_s", {"forward_gate_offset": 1, "qkv_bias": True}),
    ("lion_s", {"gate_offset": 0, "forward_gate_offset": 1}),
]


@pytest.fixture
def make(randomize):
    def build(name, dtype=torch.float64, std=0.5, **options):
        kind = MIXERS[name]
        config = kind.Config(headdim=4, **options)
        kind.check(D_MODEL, config)
        return randomize(kind(D_MODEL, config, causal=False, max_seqlen=8, output_std=0.02), std, dtype)

    return build


def _results(mixer, x, *documents):
    """Output, gradient of the input and gradients of all parameters, for one fixed cotangent."""
    x = x.clone().requires_grad_()
    y = mixer(x, *documents)
    cotangent = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(y.dtype)
    gradients = torch.autograd.grad((y * cotangent).sum(), [x, *mixer.parameters()])
    return {"y": y, "x": gradients[0]} | dict(zip(dict(mixer.named_parameters()), gradients[1:], strict=True))


def _assert_close(got, wanted, tolerance):
    assert set(got) == set(wanted)
    for name in wanted:
        error = (got[name].double() - wanted[name].double()).abs().max() / wanted[name].abs().max().clamp(min=1e-3)
        assert error < tolerance, (name, error)


@pytest.mark.parametrize(("kind", "dtype"), each_value_once(KINDS, [torch.float64, torch.float32]))
def test_three_forms_agree(make, kind, dtype):
    """Forward and all gradients, for whole rows and for packed documents, one of them empty."""
    (name, options), tolerance = kind, {torch.float64: 1e-10, torch.float32: 2e-5}[dtype]
    x = torch.randn(1, 40, D_MODEL, dtype=dtype)
    cu_seqlens = torch.tensor([0, 1, 19, 19, 40], dtype=torch.int32)
    for documents in ((), (cu_seqlens, 21)):
        results = {form: _results(make(name, dtype, form=form, **options), x, *documents) for form in FORMS}
        for form in ("chunked", "recurrent"):
            _assert_close(results[form], results["attention"], tolerance)


@pytest.mark.parametrize(("name", "options"), KINDS)
def test_the_mask_is_a_product_of_gates(make, name, options):
    """M before its rows are normalised, from the bounds of the products as the options state them."""
    mixer, length = make(name, **options), 9
    x = torch.randn(1, length, D_MODEL, dtype=torch.float64)
    q, k, _ = (part[0] for part in mixer.project(x))
    assert q.min() > 0
    assert k.min() > 0
    nheads, backward, forward = q.shape[1], options.get("gate_offset", 1), options.get("forward_gate_offset", 0)
    gates = torch.ones(length, nheads, dtype=torch.float64)
    if name == "lion_d":
        gates = gates * torch.sigmoid(mixer.a_i)
    if name == "lion_s":
        gates = torch.sigmoid(x[0] @ mixer.a_i.weight.T + mixer.a_i.bias)
    wanted = torch.zeros(nheads, length, length, dtype=torch.float64)
    for i in range(length):
        for j in range(length):
            between = gates[j + 1 - forward : i + 1 - forward] if i > j else gates[i + backward : j + backward]
            wanted[:, i, j] = (q[i] * k[j]).sum(-1) * between.prod(0)
    wanted = wanted / (wanted.sum(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(mixer.matrix(x)[0], wanted, rtol=1e-10, atol=1e-14)


def test_gate_offset_0_is_the_recurrence_of_the_text(make):
    """S = lambda_i S + k v^T, z = lambda_i z + k, c = q z - q k / 2, y = q S - q k v / 2 in each direction, with
    features (silu + 0.5) / norm; its masks D are the default, and another matrix."""
    mixer, x = make("lion_s", gate_offset=0), torch.randn(1, 9, D_MODEL, dtype=torch.float64)
    qkv = mixer.qkv(x)[0].unflatten(-1, (3, 4, 4))
    q, k = (F.normalize(F.silu(qkv[:, part]) + 0.5, dim=-1) for part in (0, 1))
    q, v, gates = q / 2, qkv[:, 2], torch.sigmoid(mixer.a_i(x)[0])
    y, c = torch.zeros_like(v), torch.zeros_like(gates)
    for order in (range(9), reversed(range(9))):
        S, z = x.new_zeros(4, 4, 4), x.new_zeros(4, 4)
        for i in order:
            S = gates[i, :, None, None] * S + k[i, :, :, None] * v[i, :, None]
            z = gates[i, :, None] * z + k[i]
            half = (q[i] * k[i]).sum(-1) / 2
            c[i] += (q[i] * z).sum(-1) - half
            y[i] += torch.einsum("hn,hnp->hp", q[i], S) - half[:, None] * v[i]
    wanted = mixer.proj((y / (c + 1e-6)[..., None]).flatten(-2))
    torch.testing.assert_close(mixer(x)[0], wanted, rtol=1e-10, atol=1e-12)
    other = make("lion_s")
    other.load_state_dict(mixer.state_dict())
    assert (other.matrix(x) - mixer.matrix(x)).abs().max() > 0.02
    sums = gates.log().cumsum(0).T
    d = (sums[:, :, None] - sums[:, None]).tril()  # of gates j+1 .. i
    weights = torch.einsum("ihn,jhn->hij", q, k) * (d + d.mT).exp()
    torch.testing.assert_close(other.matrix(x)[0], weights / (weights.sum(-1, keepdim=True) + 1e-6))


def test_the_recurrence_keeps_o_of_l_d():
    """Double the length or the width, and what is kept for the backward pass doubles; without gradients only y and c
    are made, and steps need no more than themselves."""

    def of(length, headdim, grad):
        q, k, v = (torch.rand(1, length, 2, headdim, requires_grad=grad) for _ in range(3))
        gates = lion.LionGates(-torch.rand(1, length, 2), 1, 0)
        return tensor_bytes(lambda: lion.lion_recurrence(q, k, v, gates))

    def values(length, headdim):
        return 4 * length * 2 * headdim

    held = {sizes: of(*sizes, grad=True)[0] for sizes in ((16, 4), (32, 4), (16, 8))}
    assert held[32, 4] == pytest.approx(2 * held[16, 4], rel=0.02)
    assert held[16, 8] == pytest.approx(2 * held[16, 4], rel=0.2)
    assert held[16, 8] < 5 * values(16, 8)  # all states are 16 times the values
    with torch.no_grad():
        (held, peak), (twice, twice_peak) = (of(length, 8, grad=False) for length in (32, 64))
    assert (held, twice) == tuple(values(length, 8) * 9 // 8 for length in (32, 64))  # y and c
    assert twice_peak - peak < 1.1 * values(32, 8) * 2


@pytest.mark.parametrize(("form", "feature_map"), each_value_once(FORMS, ["elu", "silu_norm"]))
def test_gates_and_features_at_their_ends_stay_finite(make, form, feature_map):
    """Gates of sigmoid(-100), which is no float32 number's logarithm's argument, and of sigmoid(100); queries and keys
    that the feature map takes to 0, so that whole rows sum to nothing."""
    x = torch.randn(1, 24, D_MODEL) * 30
    for name in ("lion_d", "lion_s"):
        mixer = make(name, torch.float32, form=form, feature_map=feature_map)
        with torch.no_grad():
            gates = mixer.a_i.bias if name == "lion_s" else mixer.a_i
            gates.copy_(torch.tensor([-100.0, 100.0, -1000.0, 0.0]))
            if feature_map == "elu":
                mixer.qkv.weight[: 2 * D_MODEL] = -mixer.qkv.weight[: 2 * D_MODEL].abs()
        results = _results(mixer, x.abs() if feature_map == "elu" else x)
        assert all(result.isfinite().all() for result in results.values())


def test_closed_gates_do_not_blur_open_ones(make):
    """After many nearly closed gates the cumulative logarithms are large; those that follow must keep their digits."""
    x = torch.randn(1, 60, D_MODEL, dtype=torch.float64)
    results = []
    for dtype, form in ((torch.float64, "chunked"), *((torch.float32, form) for form in FORMS)):
        mixer = make("lion_s", dtype, form=form)
        with torch.no_grad():
            mixer.a_i.weight.zero_()[:, 0] = 1
        x[:, :50, 0], x[:, 50:, 0] = -1e4, 2
        results.append({"y": mixer(x.to(dtype))})
    for result in results[1:]:
        _assert_close(result, results[0], 1e-5)


# -- the published layer ---------------------------------------------------------------------------------------------


def _published(state, x, *, nheads, mask_type, eps_scale):
    """The layer in full attention: features, scores scaled by `eps_scale`, mask, row sums plus 1e-6, projection."""
    length, dim = x.shape[1:]
    q, k, v = (
        F.linear(x, state["qkv.weight"], state.get("qkv.bias")).unflatten(-1, (3, nheads, dim // nheads)).unbind(2)
    )
    if mask_type == "Lit":
        q, k = F.elu(q) + 1, F.elu(k) + 1
    else:
        q, k = (F.normalize(F.silu(part) + 0.5, dim=-1) for part in (q, k))
    mask = x.new_ones(x.shape[0], nheads, length, length)
    if mask_type != "Lit":
        if mask_type == "Decay":
            gates = torch.sigmoid(state["a_i"]).expand(x.shape[0], length, nheads)
        else:
            gates = 1 - torch.sigmoid(F.linear(x, state["a_i.weight"], state["a_i.bias"]).detach())
            gates = torch.cat([torch.ones_like(gates[:, :1]), gates[:, 1:]], 1)
        rows = [
            torch.stack([(gates[:, j:i] if i > j else gates[:, i + 1 : j + 1]).prod(1) for j in range(length)], -1)
            for i in range(length)
        ]
        mask = torch.stack(rows, 2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * eps_scale * mask
    scores = scores / (scores.sum(-1, keepdim=True) + 1e-6)
    y = torch.einsum("bhij,bjhd->bihd", scores, v).flatten(-2)
    return F.linear(y, state["proj.weight"], state["proj.bias"])


def _state(dim, nheads, mask_type, qkv_bias):
    shapes = {"qkv.weight": (3 * dim, dim), "proj.weight": (dim, dim), "proj.bias": (dim,)}
    shapes |= {"qkv.bias": (3 * dim,)} if qkv_bias else {}
    shapes |= {"a_i": (nheads,)} if mask_type == "Decay" else {}
    shapes |= {"a_i.weight": (nheads, dim), "a_i.bias": (nheads,)} if mask_type == "Selective" else {}
    return {name: torch.randn(shape) * (1.0 if "a_i" in name else 0.2) for name, shape in shapes.items()}


def _golden(name):
    """The tensors, the weights, their gradients and the configuration of a golden file."""
    path = GOLDEN / f"{name}.safetensors"
    data = load_file(path)
    with safe_open(path, "pt") as file:
        config = file.metadata() or {"dim": 48, "num_heads": 3, "qkv_bias": True}
    parts = (
        {name.removeprefix(prefix): tensor for name, tensor in data.items() if name.startswith(prefix)}
        for prefix in ("state.", "grad.")
    )
    return data, *parts, config


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        *each_value_once(["Attention", "RNN", "Chunk", "text"], ["lit", "decay"]),
        *each_value_once(["Chunk", "RNN", "Attention"], ["snake_selective", "snake_decay"]),
    ],
)
def test_golden_layers(kind, layout):
    data, state, gradients, config = _golden(f"lion_{kind}")
    config |= {"format": "Attention" if layout == "text" else layout}
    if "snake" not in kind:
        config |= {"mask_type": kind.capitalize()}
    if layout == "text":
        config = {name: str(value) for name, value in config.items()}
    layer = from_reference("lion-attention", state, **config)
    assert not layer.training
    x = data["x"].clone().requires_grad_()
    y = layer(x)
    y.backward(data["dy"])
    got = layer.reference_gradients() | {"y": y, "x": x.grad}
    _assert_close(got, gradients | {"y": data["y"], "x": data["dx"]}, 2e-5)
    dense = layer.combine(layer.mix(layer.matrix(x), layer.values(x)), x)
    _assert_close({"y": dense}, {"y": data["y"]}, 2e-5)
    if "snake" in kind:
        with pytest.raises(ValueError, match="the patches of a square, not 16 positions"):
            layer(x[:, 1:])


@pytest.fixture
def kernels(interpreter, monkeypatch):
    """LION's mixers run on Triton kernels; returns the device."""
    for name in ("lion_mixer", "lion_mixer_is_fused"):
        monkeypatch.setattr(lion, name, functools.partial(getattr(lion, name), backend="triton"))
    return interpreter


@pytest.mark.parametrize("snake", [False, True])
def test_published_gates_reach_the_kernels(kernels, launched, snake):
    """The kernels are given logits, which must be those of the published gates."""
    data, state, _, _ = _golden("lion_snake_selective")
    if not snake:
        state = {name: tensor for name, tensor in state.items() if "a2_i" not in name}
    options = {"dim": 48, "num_heads": 3, "qkv_bias": True, "order": "S" if snake else "Normal"}
    x, results = data["x"][:, :10], []
    for layout in ("Attention", "Chunk"):
        layer = from_reference("lion-attention", state, format=layout, **options).to(kernels)
        given = x.to(kernels).requires_grad_()
        y = layer(given)
        y.square().sum().backward()
        results.append({"y": y, "x": given.grad} | layer.reference_gradients())
    assert launched
    _assert_close(results[1], results[0], 2e-5)


@pytest.mark.parametrize(
    ("mask_type", "sizes"),
    each_value_once(
        ["Lit", "Decay", "Selective"],
        [
            (24, 2, 1, {}),
            (24, 3, 9, {"qk_scale": 0.5}),
            (40, 5, 17, {"qkv_bias": True, "format": "Chunk", "chunk_size": 4}),
        ],
    ),
)
def test_layers_of_other_sizes(mask_type, sizes):
    dim, nheads, length, options = sizes
    state = _state(dim, nheads, mask_type, options.get("qkv_bias", False))
    layer = from_reference("lion-attention", state, dim=dim, num_heads=nheads, mask_type=mask_type, **options)
    weights = {name: tensor.double().requires_grad_() for name, tensor in state.items()}
    x = torch.randn(2, length, dim)
    exact, x = x.double().requires_grad_(), x.requires_grad_()
    scale = options.get("qk_scale", (dim // nheads) ** -0.5)
    wanted = _published(weights, exact, nheads=nheads, mask_type=mask_type, eps_scale=scale)
    y = layer(x)
    cotangent = torch.randn_like(y)
    y.backward(cotangent)
    wanted.backward(cotangent.double())
    gradients = {name: weight.grad for name, weight in weights.items() if weight.grad is not None}
    assert set(weights) - set(gradients) == ({"a_i.weight", "a_i.bias"} if mask_type == "Selective" else set())
    got = layer.reference_gradients() | {"y": y, "x": x.grad}
    _assert_close(got, gradients | {"y": wanted, "x": exact.grad}, 1e-4)


@pytest.mark.parametrize("order", [None, "None", "Normal"])
def test_tokens_in_their_own_order_need_not_be_said_so(order):
    state, x = _state(16, 2, "Decay", False), torch.randn(1, 5, 16)
    plain, given = (
        from_reference("lion-attention", state, dim=16, num_heads=2, **more) for more in ({}, {"order": order})
    )
    assert torch.equal(plain(x), given(x))


def test_published_gates_restart_with_every_document():
    layer = from_reference("lion-attention", _state(16, 2, "Selective", False), dim=16, num_heads=2, format="Chunk")
    x = torch.randn(1, 14, 16)
    y = layer(x, torch.tensor([0, 6, 14], dtype=torch.int32), 8)
    torch.testing.assert_close(y, torch.cat([layer(x[:, :6]), layer(x[:, 6:])], 1), rtol=1e-5, atol=1e-6)


MISTAKES = [
    ({"dim": 20}, "num_heads = 3 does not divide dim = 20"),
    ({"mask_type": "Causal"}, "mask_type = 'Causal'; can be read: Lit, Decay, Selective"),
    ({"format": "Scan"}, "format = 'Scan'; can be read: Attention, RNN, Chunk"),
    ({"order": "Z"}, "order = 'Z'; can be read: Normal, S"),
    ({"order": "S", "mask_type": "Decay"}, "lacks key 'a_i'"),
    ({"mask_type": "Decay"}, "lacks key 'a_i' of shape \\(3\\)"),
    ({"qkv_bais": True}, "did you mean 'qkv_bias'"),
]


def test_mistakes_are_one_clear_line():
    for changes, words in MISTAKES:
        with pytest.raises(ValueError, match=words) as caught:
            from_reference("lion-attention", _state(24, 3, "Lit", False), **({"dim": 24, "num_heads": 3} | changes))
        assert "\n" not in str(caught.value)

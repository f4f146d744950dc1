"""The matrix mixers of the Hydra paper's code: golden files, which that code (goombalab/hydra 55bef74) computed, and
other shapes against definitions written out here in float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from failures import each
from paths import GOLDEN
from safetensors import safe_open

from matmix.model.interop import from_reference

GOLDEN_NAMES = sorted(path.stem.removeprefix("matrix_mixer_") for path in GOLDEN.glob("matrix_mixer_*.safetensors"))


def _error(actual, expected):
    return ((actual - expected).abs().max() / expected.abs().max()).item()


@each("name", GOLDEN_NAMES)
def test_golden_matrix_mixers(name):
    """Among them denominators of a Cauchy matrix on both sides of a pole, and attention of parameters with as many
    heads as positions, where alone the published code runs."""
    with safe_open(GOLDEN / f"matrix_mixer_{name}.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        config = file.metadata()
    state = {key.removeprefix("state."): tensor for key, tensor in tensors.items() if key.startswith("state.")}
    if config is None:
        kind, _, form = ("vandermonde_di" if name == "dft" else name).rpartition("_")
        config = {"d_model": 32, "qk_dim": 8, "max_seq_len": 24, "d_conv": 7, "chunk_size": 8, "expand": 2}
        config |= {"headdim": 32 if kind == "toeplitz" else 16}
        config |= {"matrix_mixer_type": kind, "is_data_dependent": form == "dd"}
    block = from_reference("hydra-matrix-mixer", state, **config)
    assert not block.training
    u = tensors["input.u"].requires_grad_()
    # Both sides are float32, with 2^-24 of rounding in each of up to some hundred sums and angles.
    y = block(u)
    assert _error(y, tensors["output"]) < 5e-5
    (y * tensors["output_weight"]).sum().backward()
    assert _error(u.grad, tensors["input_grad.u"]) < 5e-5
    gradients = block.reference_gradients()
    assert {f"grad.{key}" for key in gradients} == {key for key in tensors if key.startswith("grad.")}
    for key, gradient in gradients.items():
        assert gradient.shape == tensors[f"grad.{key}"].shape
        assert _error(gradient, tensors[f"grad.{key}"]) < 5e-5, key


def _matrix_by_definition(kind, s, v, q, k, dt, N, d):
    """M (H, L, L) of one document, entry by entry or nearly so, with the skip; v (L, H, P), q and k (L, width)."""
    length, nheads, _ = v.shape
    i, j = torch.meshgrid(*2 * (torch.arange(length, dtype=torch.float64),), indexing="ij")
    s = {key.removeprefix("matrix_mixer."): tensor for key, tensor in s.items() if key.startswith("matrix_mixer.")}
    skip = torch.eye(length, dtype=torch.float64)
    if kind == "dense":
        return s["M"] / math.sqrt(N) + skip
    if kind == "dft":
        return (torch.cos(2 * math.pi * i * j / length) / math.sqrt(length) + skip).expand(nheads, -1, -1)
    if kind == "toeplitz":
        # The values come after N - 1 zeros, and all of it is convolved in a circle of 2 N - 1 places.
        assert length == N, "the published code runs at this length only"
        circle = s["conv_params"] if q is None else torch.cat((k[1:].flip(0), q)).T
        return 0.5 / math.sqrt(N) * circle[:, ((i - (j + N - 1)) % (2 * N - 1)).long()] + skip
    if kind == "quasiseparable":
        B, C = s["BC"].chunk(2, -1) if q is None else (q, k)
        dt = torch.zeros(length, 2 * nheads, dtype=torch.float64) if dt is None else dt
        dt = F.softplus(dt.unflatten(-1, (2, nheads)) + s["dt_bias"])
        decay = dt * -s["A_log"].exp()
        matrix = torch.diag_embed((v.flatten(1) @ s["fc_D.weight"].T + s["D"]).T).clone()
        for row in range(length):
            for column in range(row):
                between = decay[column + 1 : row, 0].sum(0).exp()
                matrix[:, row, column] = (C[row - 1] @ B[column]) * between * dt[column, 0]
            for column in range(row + 1, length):
                between = decay[row + 1 : column, 1].sum(0).exp()
                matrix[:, row, column] = (C[row + 1] @ B[column]) * between * dt[column, 1]
        return matrix
    q, k = (s["q_matrix"], s["k_matrix"]) if q is None else (part.unflatten(-1, (nheads, d)) for part in (q, k))
    q, k = q.permute(1, 2, 0)[..., None], k.permute(1, 2, 0)[:, :, None]  # (H, d, L, 1) and (H, d, 1, L)
    if kind == "vandermonde":
        entries = torch.cos(2 * math.pi * 1e-3 * q * j) - torch.cos(2 * math.pi * 1e-3 * k * i)
        return entries.sum(1) / math.sqrt(2 * N * d) + skip
    if kind == "cauchy":
        return (1 / (q.exp() + k.exp() + 2 * s.get("bias", 0) + 1e-8)).sum(1) / math.sqrt(N * d) + skip
    if kind == "low_rank":
        return (q * k).sum(1) / math.sqrt(N * d) + skip
    assert kind == "attention"
    return ((q * k).sum(1) / math.sqrt(d)).softmax(-1) + skip


def _block_by_definition(kind, state, u, *, N, d, headdim):
    """The block for one document u (L, d_model)."""
    d_inner, conv = state["norm.weight"].shape[0], state["conv1d.weight"].shape[0]
    projected = F.linear(u, state["in_proj.weight"], state.get("in_proj.bias"))
    z, mixed, dt = projected.split([d_inner, conv, projected.shape[-1] - d_inner - conv], -1)
    width = state["conv1d.weight"].shape[-1]
    mixed = F.conv1d(mixed.T, state["conv1d.weight"], state.get("conv1d.bias"), padding=width // 2, groups=conv).T
    v, q, k = F.silu(mixed[:, :d_inner]).unflatten(-1, (-1, headdim)), None, None
    if conv > d_inner:
        q, k = mixed[:, d_inner:].chunk(2, -1)
        if kind in ("toeplitz", "low_rank", "quasiseparable"):
            q, k = F.silu(q), F.silu(k)
    matrix = _matrix_by_definition(kind, state, v, q, k, dt if dt.shape[-1] else None, N, d)
    y = torch.einsum("hts,shp->thp", matrix, v).flatten(1)
    y = y / torch.sqrt(y.square().mean(-1, keepdim=True) + 1e-5) * state["norm.weight"] * F.silu(z)
    return F.linear(y, state["out_proj.weight"], state.get("out_proj.bias"))


def _random_state(kind, data, *, d_model, d, headdim, expand, d_conv, bias, conv_bias, N):
    d_inner = expand * d_model
    nheads = d_inner // headdim
    inputs = 2 * nheads * (1 if kind == "toeplitz" else d) if data else 0
    steps = 2 * nheads if data and kind == "quasiseparable" else 0
    shapes = {
        "in_proj.weight": (2 * d_inner + inputs + steps, d_model),
        "conv1d.weight": (d_inner + inputs, 1, d_conv),
        "norm.weight": (d_inner,),
        "out_proj.weight": (d_model, d_inner),
    }
    if bias:
        shapes |= {"in_proj.bias": shapes["in_proj.weight"][:1], "out_proj.bias": (d_model,)}
    if conv_bias:
        shapes["conv1d.bias"] = (d_inner + inputs,)
    heads = (nheads,)
    own = {
        "quasiseparable": {"A_log": heads, "D": heads, "dt_bias": heads, "fc_D.weight": (nheads, d_inner)},
        "dense": {"M": (nheads, N, N)},
    }.get(kind, {})
    if kind == "quasiseparable" and not data:
        own["BC"] = (N, 2 * nheads * d)
    elif kind == "toeplitz" and not data:
        own["conv_params"] = (nheads, 2 * N - 1)
    elif kind in ("cauchy", "low_rank", "attention") and not data:
        own |= {"q_matrix": (N, nheads, d), "k_matrix": (N, nheads, d)}
    elif kind == "cauchy":
        own["bias"] = ()
    shapes |= {f"matrix_mixer.{name}": shape for name, shape in own.items()}
    state = {name: torch.randn(shape) * 0.5 for name, shape in shapes.items()}
    return state | ({"matrix_mixer.bias": torch.tensor(0.3)} if "bias" in own else {})


_PLAIN = {"d_model": 16, "d": 3, "headdim": 4, "expand": 1, "d_conv": 3, "bias": False, "conv_bias": True}
_OTHER = {"d_model": 12, "d": 5, "headdim": 12, "expand": 3, "d_conv": 5, "bias": True, "conv_bias": False}


@each("as_text", [False, True])
@each(
    "kind, data",
    [
        *((kind, True) for kind in ("attention", "cauchy", "low_rank", "quasiseparable", "toeplitz", "vandermonde")),
        *((kind, False) for kind in ("attention", "cauchy", "dense", "dft", "low_rank", "quasiseparable", "toeplitz")),
    ],
)
def test_matrix_mixers_of_other_shapes(kind, data, as_text):
    sizes, N = (_OTHER, 11) if as_text else (_PLAIN, 14)
    length = N - 3 if (data or kind == "dft") and kind != "toeplitz" else N
    state = _random_state(kind, data, **sizes, N=N)
    config = {key: value for key, value in sizes.items() if key != "d"}
    config |= {"matrix_mixer_type": kind, "is_data_dependent": data, "qk_dim": sizes["d"], "max_seq_len": N}
    if kind == "dft":
        config["matrix_mixer_type"] = "vandermonde" if as_text else "dft"
        state["matrix_mixer.dft_matrix"] = torch.zeros(N, N)
    config |= {"conv_init": None, "layer_idx": 3, "activation": "silu"}
    block = from_reference(
        "hydra-matrix-mixer", state, **{key: str(value) if as_text else value for key, value in config.items()}
    ).double()
    weights = {key: tensor.double().requires_grad_() for key, tensor in state.items() if "dft" not in key}
    u, cotangent = torch.randn(2, 2, length, sizes["d_model"], dtype=torch.float64)
    options = {"N": N, "d": sizes["d"], "headdim": sizes["headdim"]}
    expected = torch.stack([_block_by_definition(kind, weights, row, **options) for row in u])
    y = block(u)
    assert _error(y, expected) < 1e-10
    (y * cotangent).sum().backward()
    (expected * cotangent).sum().backward()
    gradients = block.reference_gradients()
    assert set(gradients) == set(weights)
    for key, gradient in gradients.items():
        assert gradient.shape == state[key].shape
        assert _error(gradient, weights[key].grad) < 1e-10, key


@each("d_conv", [1, 9, 11, 21])
@each("kind", ["cauchy", "quasiseparable"])
def test_convolutions_of_any_odd_width(kind, d_conv):
    """Alone and packed, and longer than the document; one kind activates its inputs and scans packed rows at once."""
    sizes, N = _PLAIN | {"d_conv": d_conv}, 14
    state = _random_state(kind, True, **sizes, N=N)
    config = {key: value for key, value in sizes.items() if key != "d"}
    config |= {"matrix_mixer_type": kind, "is_data_dependent": True, "qk_dim": sizes["d"], "max_seq_len": N}
    # In float64: some gradients are small differences, of which float32 leaves few digits.
    block = from_reference("hydra-matrix-mixer", state, **config).double()
    weights = {key: tensor.double().requires_grad_() for key, tensor in state.items()}
    u = torch.randn(1, 18, sizes["d_model"], dtype=torch.float64)
    options = {"N": N, "d": sizes["d"], "headdim": sizes["headdim"]}
    parts = [_block_by_definition(kind, weights, part, **options) for part in u[0].split([5, 1, 12])]
    expected = torch.cat(parts).unsqueeze(0)
    y = block(u, torch.tensor([0, 5, 6, 18], dtype=torch.int32), 12)
    assert _error(y, expected) < 1e-10
    assert _error(block(u[:, 6:]), expected[:, 6:]) < 1e-10
    cotangent = torch.randn_like(y)
    (y * cotangent).sum().backward()
    (expected * cotangent).sum().backward()
    for key, gradient in block.reference_gradients().items():
        assert _error(gradient, weights[key].grad) < 1e-10, key
    u, block = u[:, 6:].float(), block.float()
    assert _error(block(u), expected[:, 6:]) < 1e-4
    with torch.autocast("cpu", torch.bfloat16):
        half = block(u)
    assert half.dtype == torch.bfloat16
    assert _error(half.float(), block(u)) < 0.05


@each(
    "change, message",
    [
        ({"matrix_mixer_type": "hankel"}, "matrix_mixer_type = 'hankel'"),
        ({"is_data_dependent": True}, "no form that depends on the data"),
        ({"max_seq_len": None}, "lacks max_seq_len"),
        ({"activation": "gelu"}, "activation = 'gelu'"),
        ({"max_seq_len": 13}, "'matrix_mixer.M' has shape"),
        ({"maxseqlen": 14}, "did you mean 'max_seq_len'"),
        ({"headdim": 5}, "headdim = 5 does not divide expand \\* d_model = 1 \\* 16"),
        ({"d_conv": 4}, "d_conv = 4: must be odd"),
        ({"d_conv": -1}, "d_conv = -1: must be odd"),
        ({"d_model": 0}, "d_model = 0"),
        ({"matrix_mixer_type": "quasiseparable", "is_data_dependent": True, "qk_dim": 0}, "qk_dim = 0"),
    ],
)
def test_configurations_that_do_not_fit_are_refused_in_one_line(change, message):
    state = _random_state("dense", False, **_PLAIN, N=14)
    config = {"matrix_mixer_type": "dense", "d_model": 16, "qk_dim": 3, "headdim": 4, "expand": 1, "d_conv": 3}
    with pytest.raises(ValueError, match=f"^hydra-matrix-mixer: .*{message}") as caught:
        from_reference("hydra-matrix-mixer", state, **config | {"max_seq_len": 14} | change)
    assert "\n" not in str(caught.value)

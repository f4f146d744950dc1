"""Long convolutions and mixers of whole models against their equations, token by token in float64."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from layer_equations import assert_layer_equals
from storages import Storages

from matmix.model import initialize
from matmix.model.mixers.attention.linformer import Linformer, LinformerConfig
from matmix.model.mixers.convolutions.ckconv import CKConv, CKConvConfig
from matmix.model.mixers.convolutions.h3 import H3, H3Config
from matmix.model.mixers.convolutions.hyena import Hyena, HyenaConfig
from matmix.model.mixers.convolutions.long import half_octave
from matmix.model.mixers.convolutions.s4 import S4, S4Config
from matmix.model.mixers.convolutions.s4d import S4D, S4DConfig
from matmix.model.mixers.convolutions.tnn import TNN, TNNConfig
from matmix.model.mixers.structured.fnet import FNet, FNetConfig
from matmix.model.mixers.structured.m2 import M2, M2Config
from matmix.model.mixers.structured.mlp_mixer import MLPMixer, MLPMixerConfig
from matmix.model.positions import similar_documents

D_MODEL = 6


def _build(kind, config, causal=True, max_seqlen=20, noise=0.1, dtype=torch.float64):
    mixer = kind(D_MODEL, config, causal=causal, max_seqlen=max_seqlen, output_std=0.3)
    initialize(mixer, seed=0)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter += noise * torch.randn_like(parameter)
    return mixer.to(dtype).eval()


def _s4d(causal=True, noise=0.1, **options):
    return _build(S4D, S4DConfig(**{"d_state": 6, "dt_min": 0.05, "dt_max": 0.5} | options), causal, noise=noise)


def _s4(causal=True, noise=0.1):
    return _build(S4, S4Config(d_state=6, dt_min=0.05, dt_max=0.5), causal, noise=noise)


def _hyena(causal=True, noise=0.1, **options):
    return _build(Hyena, HyenaConfig(**{"filter_width": 5, "filter_features": 5} | options), causal, noise=noise)


def _mlp_mixer(max_seqlen=13, **options):
    return _build(MLPMixer, MLPMixerConfig(**options), causal=False, max_seqlen=max_seqlen)


def _s4d_scan(mixer, u, kernel):
    """Re of C times the states of x_t = exp(dt A) x_{t-1} + B u_t, doubled for the conjugates, with zero-order hold."""
    pairs = mixer.config.d_state // 2
    A = torch.complex(-mixer.A_log.exp(), mixer.A_imag).view(D_MODEL, pairs)
    dt = mixer.log_dt.exp().unsqueeze(1)
    transition = torch.exp(dt * A)
    B, C = (transition - 1) / A, torch.view_as_complex(mixer.C)[kernel]
    state, outputs = torch.zeros(u.shape[0], D_MODEL, pairs, dtype=A.dtype), []
    for t in range(u.shape[1]):
        state = transition * state + B * u[:, t].unsqueeze(-1)
        outputs.append(2 * (C * state).sum(-1).real)
    return torch.stack(outputs, 1)


def _pairs(mixer):
    """A (d_model, d_state, d_state) and B of S4 with both numbers of each conjugate pair, and its C."""
    rates = torch.complex(-mixer.A_log.exp(), mixer.A_imag).view(D_MODEL, -1)
    P, B, C = (torch.view_as_complex(part) for part in (mixer.P, mixer.B, mixer.C))
    rates, P, B, C = (torch.cat([part, part.conj()], -1) for part in (rates, P, B, C))
    return torch.diag_embed(rates) - P.unsqueeze(-1) * P.conj().unsqueeze(-2), B, C


def _s4_scan(mixer, u, kernel):
    """The bilinear rule with dense matrices."""
    (A, B, C), identity = _pairs(mixer), torch.eye(mixer.config.d_state)
    dt = mixer.log_dt.exp().view(-1, 1, 1)
    behind = torch.linalg.inv(identity - dt / 2 * A)
    transition, B = behind @ (identity + dt / 2 * A), (behind @ (dt * B.unsqueeze(-1))).squeeze(-1)
    state, outputs = torch.zeros(u.shape[0], *B.shape, dtype=B.dtype), []
    for t in range(u.shape[1]):
        state = torch.einsum("hmn,bhn->bhm", transition, state) + B * u[:, t].unsqueeze(-1)
        outputs.append((C[kernel] * state).sum(-1).real)
    return torch.stack(outputs, 1)


def _h3_layer(mixer, x):
    q, k, v = (x @ mixer.in_proj.weight.T + mixer.in_proj.bias).chunk(3, -1)
    padded, taps = F.pad(k, (0, 0, 3, 0)), mixer.conv1d.weight[:, 0]
    u = v * (mixer.conv1d.bias + sum(taps[:, j] * padded[:, j : j + x.shape[1]] for j in range(4)))
    y = q * (_s4d_scan(mixer, u, 0) + mixer.D * u)
    return y @ mixer.out_proj.weight.T + mixer.out_proj.bias


def _s4d_layer(mixer, x):
    scan = _s4_scan if isinstance(mixer, S4) else _s4d_scan
    y = scan(mixer, x, 0) + mixer.D * x
    if not mixer.causal:  # the scan from behind starts with the next token
        y = y + F.pad(scan(mixer, x.flip(1), 1).flip(1)[:, 1:], (0, 0, 0, 1))
    a, b = (F.gelu(y) @ mixer.out_proj.weight.T + mixer.out_proj.bias).chunk(2, -1)
    return a * torch.sigmoid(b)


def _hyena_filter(mixer, offset):
    """h (channels,) at one offset."""
    t = torch.tensor(offset / mixer.max_seqlen, dtype=torch.float64)
    bands = torch.linspace(1e-4, 1, 2, dtype=torch.float64)
    waves = torch.exp(-2j * math.pi * bands * t)
    h = torch.cat([t.view(1), waves.real, waves.imag])
    for layer in mixer.filter.layers:
        h = torch.sin(mixer.filter.freq * (layer.weight @ h + layer.bias))
    rates = torch.linspace(math.log(100) / 1.5, math.log(100) / 0.3, D_MODEL, dtype=torch.float64)
    rates = torch.cat([rates] * (1 + mixer.config.residual))
    return mixer.filter.out.weight @ h * torch.exp(-rates * abs(t))


def _hyena_layer(mixer, x):
    length = x.shape[1]
    p = x @ mixer.in_proj.weight.T + mixer.in_proj.bias
    padded = F.pad(p, (0, 0, 2, 0) if mixer.causal else (0, 0, 1, 1))
    taps = mixer.conv1d.weight[:, 0]
    p = mixer.conv1d.bias + sum(taps[:, j] * padded[:, j : j + length] for j in range(3))
    x0, x1, v = p.chunk(3, -1)
    u, rows = torch.cat([x1 * v, x], -1) if mixer.config.residual else x1 * v, []
    for t in range(length):
        seen = range(t + 1) if mixer.causal else range(length)
        rows.append(mixer.D * u[:, t] + sum(_hyena_filter(mixer, t - s) * u[:, s] for s in seen))
    y = torch.stack(rows, 1)
    y = x0 * y[..., :D_MODEL] + (y[..., D_MODEL:] if mixer.config.residual else 0)
    return y @ mixer.out_proj.weight.T + mixer.out_proj.bias


def _mlp_mixer_layer(mixer, x):
    h = torch.einsum("hs,bsc->bhc", mixer.up.weight, x) + mixer.up.bias.unsqueeze(-1)
    h = h * 0.5 * (1 + torch.erf(h / math.sqrt(2)))
    return torch.einsum("th,bhc->btc", mixer.down.weight, h) + mixer.down.bias.unsqueeze(-1)


def _tnn_filter(mixer, offset):
    h = torch.tensor([offset], dtype=torch.float64)
    for layer in mixer.filter.layers:
        h = layer.weight @ h + layer.bias
        h = torch.relu(h / (h.square().mean() + 1e-6).sqrt())
    return mixer.filter.out.weight @ h * mixer.config.decay ** abs(offset)


def _ckconv_filter(mixer, offset):
    h = torch.tensor([offset / mixer.max_seqlen], dtype=torch.float64)
    for layer in mixer.filter.layers:
        h = torch.sin(mixer.filter.freq * (layer.weight @ h + layer.bias))
    return mixer.filter.out.weight @ h


def _sums_over_offsets(mixer, v, of_offset):
    length = v.shape[1]
    seen = [range(t + 1) if mixer.causal else range(length) for t in range(length)]
    return torch.stack([sum(of_offset(mixer, t - s) * v[:, s] for s in seen[t]) for t in range(length)], 1)


def _tnn_layer(mixer, x):
    u, v = F.silu(x @ mixer.in_proj.weight.T + mixer.in_proj.bias).chunk(2, -1)
    y = u * _sums_over_offsets(mixer, v, _tnn_filter)
    return y @ mixer.out_proj.weight.T + mixer.out_proj.bias


def _ckconv_layer(mixer, x):
    y = F.gelu(_sums_over_offsets(mixer, x, _ckconv_filter) + mixer.conv_bias)
    return y @ mixer.out_proj.weight.T + mixer.out_proj.bias


def _fnet_layer(mixer, x):
    return torch.fft.fft2(x, norm="ortho" if mixer.config.scale == "unitary" else "backward").real


def _linformer_layer(mixer, x):
    q, k, v = (F.linear(x, layer.weight) for layer in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
    heads = []
    for head in range(mixer.nheads):
        own = slice(2 * head, 2 * head + 2)
        scores = q[..., own] @ (mixer.E @ k[..., own]).mT / math.sqrt(2)
        heads.append(scores.softmax(-1) @ (mixer.F @ v[..., own]))
    return torch.cat(heads, -1) @ mixer.out_proj.weight.T


def _monarch(part, length):
    """P^T L P R of block-diagonal L and R and the permutation P."""
    first, second = part.blkdiag1[0], part.blkdiag2[0]
    rows, columns = first.shape[:2]
    identity = torch.eye(rows * columns, dtype=torch.float64)
    permutation = identity.view(rows, columns, -1).transpose(0, 1).flatten(0, 1)
    return (permutation.T @ torch.block_diag(*second) @ permutation @ torch.block_diag(*first))[:length, :length]


def _m2_layer(mixer, x):
    m1, m2 = (_monarch(part, x.shape[1]) for part in (mixer.m1, mixer.m2))
    x = m2 @ torch.relu(mixer.n_kernel.T * (m1 @ x))
    m3, m4 = (_monarch(part, D_MODEL) for part in (mixer.m3, mixer.m4))
    return x + torch.relu(mixer.d_kernel * (x @ m3.T)) @ m4.T


LAYERS = {
    "s4d-causal": (lambda: _s4d(), _s4d_layer),
    "s4d": (lambda: _s4d(causal=False, spectrum="inv"), _s4d_layer),
    "s4-causal": (lambda: _s4(), _s4d_layer),
    "s4": (lambda: _s4(causal=False), _s4d_layer),
    "h3": (lambda: _build(H3, H3Config(d_state=6, dt_min=0.05, dt_max=0.5)), _h3_layer),
    "hyena-causal": (lambda: _hyena(), _hyena_layer),
    "hyena": (lambda: _hyena(causal=False), _hyena_layer),
    "hyena-residual": (lambda: _hyena(causal=False, residual=True), _hyena_layer),
    "mlp_mixer": (_mlp_mixer, _mlp_mixer_layer),
    "tnn": (lambda: _build(TNN, TNNConfig(filter_width=5, decay=0.9), causal=False), _tnn_layer),
    "ckconv-causal": (lambda: _build(CKConv, CKConvConfig(filter_width=5)), _ckconv_layer),
    "fnet": (lambda: FNet(D_MODEL, FNetConfig(), causal=False, max_seqlen=13, output_std=1.0), _fnet_layer),
    "linformer": (
        lambda: _build(Linformer, LinformerConfig(headdim=2, rank=4), causal=False, max_seqlen=13),
        _linformer_layer,
    ),
    "m2": (lambda: _build(M2, M2Config(), causal=False, max_seqlen=13), _m2_layer),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_equal_their_equations(name):
    make, reference = LAYERS[name]
    mixer = make()
    assert_layer_equals(mixer, reference, torch.randn(2, 13, D_MODEL, dtype=torch.float64))


@pytest.mark.parametrize("max_seqlen", [64, 4096])
def test_tnn_starts_with_entries_that_tell_neighbours_apart_and_not_far_tokens(max_seqlen):
    mixer = TNN(256, TNNConfig(decay=1.0), causal=False, max_seqlen=max_seqlen, output_std=0.3)
    initialize(mixer, seed=0)
    with torch.no_grad():
        before, own, after, far, farther = mixer.filter(torch.tensor([-1, 0, 1, 40, 41])).T
    for pair in ((before, own), (own, after), (before, after)):
        assert torch.cosine_similarity(*pair, dim=0) < 0.9
    assert torch.cosine_similarity(far, farther, dim=0) > 0.999


def test_empty_documents_alone_give_no_outputs():
    x = torch.randn(1, 0, D_MODEL, dtype=torch.float64)
    for make in (_s4d, _hyena):
        assert make()(x, _boundaries([0, 0]), 0).shape == (1, 0, D_MODEL)


def _boundaries(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("make", [_s4d, _hyena])
def test_packed_documents_share_one_kernel(make, monkeypatch):
    mixer, made = make(), []
    name = "kernels" if isinstance(mixer, S4D) else "filters"
    kernels = getattr(mixer, name)
    monkeypatch.setattr(mixer, name, lambda *arguments: (made.append(arguments[0]), kernels(*arguments))[1])
    lengths = [3, 9, 1, 8, 2]
    mixer(torch.randn(1, sum(lengths), D_MODEL, dtype=torch.float64), _boundaries(lengths), max(lengths))
    assert made == [9]


def test_documents_of_similar_length_are_filled_up_by_half_at_most():
    lengths = list(range(200))
    groups = similar_documents(_boundaries(lengths), half_octave)
    assert len(groups) <= 16
    assert sum(len(places) for places, _ in groups) == 199
    for places, real in groups:
        assert places.numel() <= 1.5 * real.sum()
    assert torch.cat([places[real] for places, real in groups]).sort().values.equal(torch.arange(sum(lengths)))


@pytest.mark.parametrize("make", [_s4d, _hyena])
def test_packed_outputs_have_the_dtype_of_others_under_autocast(make):
    mixer = make().float()
    x, cu_seqlens = torch.randn(1, 9, D_MODEL), _boundaries([4, 0, 5])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        outputs = [mixer(x), mixer(x, cu_seqlens, 5), mixer.forward_by_document(x, cu_seqlens)]
    assert [y.dtype for y in outputs] == [torch.bfloat16] * 3


def test_a_long_prompt_takes_pieces_of_it_at_a_time():
    """The result is that of the whole, and no tensor has a state for every token."""
    mixer = _s4d(d_state=64, noise=0.0)
    x = torch.randn(1, 1100, D_MODEL, dtype=torch.float64)
    with torch.no_grad():
        with Storages() as storages:
            y, state = mixer.forward_with_state(x, mixer.initial_state(1))
        torch.testing.assert_close(y, mixer(x), rtol=1e-9, atol=1e-11)
        _, begun = mixer.forward_with_state(x[:, :300], mixer.initial_state(1))
        torch.testing.assert_close(mixer.forward_with_state(x[:, 300:], begun)[1], state, rtol=1e-9, atol=1e-11)
    states = x.shape[1] * state.numel() * state.element_size()
    assert max(allocation.bytes for allocation in storages.allocations) < states / 4


def test_bfloat16_weights_do_not_round_the_positions_of_the_filter():
    mixer = _build(Hyena, HyenaConfig(), max_seqlen=2048, noise=0.0, dtype=torch.bfloat16)
    offsets = torch.arange(2048)
    with torch.no_grad():
        exact = copy.deepcopy(mixer.filter).double()(offsets.double())
        torch.testing.assert_close(mixer.filter(offsets).double(), exact, rtol=0, atol=0.01 * exact.abs().max().item())
        assert mixer(torch.randn(1, 9, D_MODEL, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("make", [_s4d, _hyena])
def test_long_documents_stay_close_to_float64(make, causal):
    """509 tokens, a prime number, in float32, with the initial weights; Hyena beyond its max_seqlen."""
    mixer = make(causal, noise=0.0)
    x = torch.randn(1, 509, D_MODEL, dtype=torch.float64)
    with torch.no_grad():
        exact, y = mixer(x), mixer.float()(x.float())
    assert (y.double() - exact).norm() < 1e-4 * exact.norm()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("make", [_s4d, _hyena])
def test_filters_stay_float32_under_autocast(make, causal):
    """Rounding of the projections is left, not of 300 summed tokens or of the kernels' arguments."""
    mixer = make(causal, noise=0.0).float()
    x = torch.randn(2, 300, D_MODEL)
    with torch.no_grad():
        exact = mixer(x)
        with torch.autocast("cpu", torch.bfloat16):
            y = mixer(x)
    assert (y.float() - exact).norm() < 0.02 * exact.norm()


def test_s4_starts_as_hippo_legs():
    """Its matrix has the eigenvalues -1, ..., -n, and the numbers B^* A B and B^* B are those of its A and B."""
    A, B, _ = (part.detach() for part in _pairs(_s4(noise=0.0)))
    n = torch.arange(6, dtype=torch.float64)
    b = (2 * n + 1).sqrt()
    hippo = -torch.outer(b, b).tril(-1) - torch.diag(n + 1)
    eigenvalues = torch.linalg.eigvals(A[1])
    torch.testing.assert_close(eigenvalues.real.sort().values, -n.flip(0) - 1, rtol=1e-4, atol=1e-4)
    for found, expected in ((B[1].conj() @ A[1] @ B[1], b @ hippo @ b), (B[1].conj() @ B[1], b @ b)):
        torch.testing.assert_close(found.real, expected, rtol=1e-5, atol=1e-5)


def test_s4d_starts_with_the_spectra_of_the_paper():
    lin, inv = (_s4d(spectrum=spectrum, noise=0.0) for spectrum in ("lin", "inv"))
    rates = lin.rates()[3] / lin.log_dt.exp()[3]
    # The parameters were made in float32, as logarithms.
    torch.testing.assert_close(rates.imag, math.pi * torch.arange(3.0).double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rates.real, torch.full((3,), -0.5).double(), rtol=1e-5, atol=1e-5)
    frequencies = [6 / math.pi * (6 / (2 * n + 1) - 1) for n in range(3)]
    assert inv.A_imag.view(D_MODEL, 3)[2].tolist() == pytest.approx(frequencies, rel=1e-5)

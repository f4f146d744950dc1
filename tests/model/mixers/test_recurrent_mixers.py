"""The gated delta rule and RWKV-7 against their equations, token by token in float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from layer_equations import assert_layer_equals

from matmix.model.initialization import initialize
from matmix.model.mixers.scans.delta_rule import delta_rule_step, diagonal_delta_rule, gated_delta_rule, unit_vectors
from matmix.model.mixers.scans.gated_delta import GatedDelta, GatedDeltaConfig
from matmix.model.mixers.scans.rwkv7 import RWKV7, RWKV7Config

D_MODEL = 16
HEADS, KEYS, VALUES = 2, 3, 4


def _build(kind, config, dtype=torch.float64, noise=0.3):
    mixer = kind(D_MODEL, config, causal=True, max_seqlen=64, output_std=0.1)
    initialize(mixer, seed=0)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter += noise * torch.randn_like(parameter)
    return mixer.to(dtype).eval()


def _delta(gate=True, **options):
    return _build(GatedDelta, GatedDeltaConfig(**{"headdim": 8, "qk_dim": 3, "gate": gate, "chunk_size": 4} | options))


def _rwkv7(**options):
    return _build(RWKV7, RWKV7Config(**{"headdim": 8, "chunk_size": 4} | options))


def _rule_inputs(length, batch=2, dtype=torch.float64):
    q, k = (torch.randn(batch, length, HEADS, KEYS, dtype=dtype) for _ in range(2))
    v = torch.randn(batch, length, HEADS, VALUES, dtype=dtype)
    beta = torch.rand(batch, length, HEADS, dtype=dtype)
    log_decay = -torch.rand(batch, length, HEADS, dtype=dtype)
    return [q, unit_vectors(k).to(dtype), v, beta, log_decay]


def _gated_delta_recurrence(q, k, v, beta, log_decay, state):
    """S_t = alpha_t S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T, o_t = S_t q_t, as the paper writes it."""
    S, outputs = state.mT, []
    identity = torch.eye(k.shape[-1], dtype=k.dtype)
    for t in range(q.shape[1]):
        alpha, b, key = log_decay[:, t].exp()[..., None, None], beta[:, t][..., None, None], k[:, t, :, None, :]
        S = alpha * S @ (identity - b * key.mT @ key) + b * v[:, t, :, :, None] @ key
        outputs.append((S @ q[:, t, :, :, None]).squeeze(-1))
    return torch.stack(outputs, 1), S.mT


def _rwkv7_recurrence(r, k, v, a, b, log_decay, state):
    """S_t = S_{t-1} (diag(w_t) + a_t^T b_t) + v_t^T k_t, o_t = S_t r_t^T with rows as vectors."""
    S, outputs = state.mT, []
    for t in range(r.shape[1]):
        row = [part[:, t, :, None, :] for part in (r, k, v, a, b)]
        S = S @ (torch.diag_embed(log_decay[:, t].exp()) + row[3].mT @ row[4]) + row[2].mT @ row[1]
        outputs.append((S @ row[0].mT).squeeze(-1))
    return torch.stack(outputs, 1), S.mT


def _compare_with_gradients(function, reference, inputs, tolerance=1e-9):
    """Outputs and gradients of all inputs agree."""
    results = []
    for call in (function, reference):
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        outputs = call(*leaves)
        generator = torch.Generator().manual_seed(3)
        cotangents = [torch.randn(y.shape, generator=generator, dtype=y.dtype) for y in outputs]
        torch.autograd.backward(outputs, cotangents)
        results.append([*outputs, *(x.grad for x in leaves)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * other.abs().max().item())


@pytest.mark.parametrize(("length", "chunk_size"), [(1, 4), (11, 4), (12, 4), (11, 1), (11, 64)])
def test_chunks_of_the_gated_delta_rule_equal_its_recurrence(length, chunk_size):
    inputs = [*_rule_inputs(length), torch.randn(2, HEADS, KEYS, VALUES, dtype=torch.float64)]
    _compare_with_gradients(lambda *x: gated_delta_rule(x[:-1], chunk_size, x[-1]), _gated_delta_recurrence, inputs)


@pytest.mark.parametrize(("length", "chunk_size"), [(1, 4), (11, 4), (12, 4), (11, 1), (11, 64)])
def test_chunks_of_the_diagonal_rule_equal_its_recurrence(length, chunk_size):
    r, k, v, _, _ = _rule_inputs(length)
    a, b, log_decay = (torch.rand_like(k) for _ in range(3))
    inputs = [r, k, v, a, -b, -log_decay, torch.randn(2, HEADS, KEYS, VALUES, dtype=torch.float64)]
    _compare_with_gradients(lambda *x: diagonal_delta_rule(x[:-1], chunk_size, x[-1]), _rwkv7_recurrence, inputs)


def _gated_delta_layer(mixer, x):
    """The layer of Gated DeltaNet with plain tensors."""
    config, heads = mixer.config, mixer.nheads
    z, qkv, b, *a = (x @ mixer.in_proj.weight.T).split(mixer.sections, -1)
    padded = F.pad(qkv, (0, 0, config.d_conv - 1, 0))
    taps = mixer.conv1d.weight[:, 0]
    qkv = F.silu(sum(taps[:, j] * padded[:, j : j + x.shape[1]] for j in range(config.d_conv)))
    q, k, v = qkv.split([heads * config.qk_dim] * 2 + [heads * config.headdim], -1)
    q, k, v = (part.unflatten(-1, (heads, -1)) for part in (q, k, v))
    q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
    log_decay = -mixer.A_log.exp() * F.softplus(a[0] + mixer.dt_bias) if a else torch.zeros_like(b)
    state = x.new_zeros(x.shape[0], heads, config.qk_dim, config.headdim)
    y, _ = _gated_delta_recurrence(q, k, v, torch.sigmoid(b), log_decay, state)
    y = y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return (y.flatten(-2) * mixer.norm.weight * F.silu(z)) @ mixer.out_proj.weight.T


def _rwkv7_layer(mixer, x):
    """RWKV-7's time mixing with plain tensors."""
    heads = mixer.nheads
    before = F.pad(x[:, :-1], (0, 0, 1, 0))
    mixed = {name: x + (before - x) * getattr(mixer, f"x_{name}") for name in "rwkvag"}
    layers = {"r": mixer.receptance, "k": mixer.key, "v": mixer.value}
    r, k, v = (mixed[name] @ layer.weight.T for name, layer in layers.items())
    w = torch.exp(-math.exp(-0.5) * torch.sigmoid(mixer.w0 + torch.tanh(mixed["w"] @ mixer.w1) @ mixer.w2))
    rate = torch.sigmoid(mixer.a0 + mixed["a"] @ mixer.a1 @ mixer.a2)
    gate = torch.sigmoid(mixed["g"] @ mixer.g1) @ mixer.g2
    removal = (k * mixer.k_k).unflatten(-1, (heads, -1))
    removal = removal / (removal.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    k = k * (1 + (rate - 1) * mixer.k_a)
    r, k, v, w, rate = (part.unflatten(-1, (heads, -1)) for part in (r, k, v, w, rate))
    state = x.new_zeros(x.shape[0], heads, r.shape[-1], r.shape[-1])
    y, _ = _rwkv7_recurrence(r, k, v, -removal, rate * removal, w.log(), state)
    y = (y - y.mean(-1, keepdim=True)) / (y.var(-1, unbiased=False, keepdim=True) + 1e-5 * r.shape[-1]).sqrt()
    y = y.flatten(-2) * mixer.ln_x.weight + mixer.ln_x.bias
    bonus = (r * k * mixer.r_k.unflatten(0, (heads, -1))).sum(-1, keepdim=True) * v
    return ((y + bonus.flatten(-2)) * gate) @ mixer.out_proj.weight.T


LAYERS = {
    "gated_delta": (_delta, _gated_delta_layer),
    "delta": (lambda **options: _delta(gate=False, **options), _gated_delta_layer),
    "rwkv7": (_rwkv7, _rwkv7_layer),
}


@pytest.fixture(params=LAYERS)
def layer(request):
    make, reference = LAYERS[request.param]
    return make(), reference


def test_layers_equal_their_equations(layer):
    mixer, reference = layer
    assert_layer_equals(mixer, reference, torch.randn(2, 13, D_MODEL, dtype=torch.float64))


def test_no_tokens_give_no_outputs():
    """Alone, as empty documents, and behind a state, which stays as it is."""
    mixer = _rwkv7()
    x = torch.randn(2, 3, D_MODEL, dtype=torch.float64)
    assert mixer(x[:, :0]).shape == (2, 0, D_MODEL)
    assert mixer(x[:1, :0], torch.zeros(3, dtype=torch.int32), 0).shape == (1, 0, D_MODEL)
    _, before = mixer.forward_with_state(x, mixer.initial_state(2))
    y, after = mixer.forward_with_state(x[:, :0], before)
    assert y.shape == (2, 0, D_MODEL)
    torch.testing.assert_close(after, before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("make", "changes"), [(_delta, {"A_log": 4.0}), (_delta, {"A_log": -9.0}), (_rwkv7, {"w0": 9.0})]
)
def test_long_documents_stay_close_to_float64(make, changes):
    """500 tokens in float32, with the fastest decays and with hardly any."""
    mixer = make(chunk_size=128)
    with torch.no_grad():
        for name, value in changes.items():
            mixer.get_parameter(name).fill_(value)
        x = 3 * torch.randn(1, 500, D_MODEL, dtype=torch.float64)
        exact, y = mixer(x), mixer.float()(x.float())
    torch.testing.assert_close(y.double(), exact, rtol=1e-3, atol=1e-4 * exact.abs().max().item())


def test_repeated_keys_do_not_cancel():
    """One key all the time: an inverse made from powers would lose all digits."""
    q, k, v, beta, log_decay = _rule_inputs(300, batch=1)
    arguments = [q, k[:, :1].expand_as(k), v, torch.full_like(beta, 0.99), torch.zeros_like(log_decay)]
    exact, _ = _gated_delta_recurrence(*arguments, torch.zeros(1, HEADS, KEYS, VALUES, dtype=torch.float64))
    y, _ = gated_delta_rule(tuple(x.float() for x in arguments), chunk_size=64)
    torch.testing.assert_close(y.double(), exact, rtol=1e-4, atol=1e-4)


def test_a_token_that_forgets_all_leaves_the_rest_exact():
    """Decays behind it are sums over few tokens, whatever came before."""
    arguments = [x.float() for x in _rule_inputs(16, batch=1)]
    arguments[4] = 0.01 * arguments[4]
    arguments[4][:, 5] = -1e5
    y, _ = gated_delta_rule(tuple(arguments), chunk_size=16)
    alone, _ = gated_delta_rule(tuple(x[:, 5:] for x in arguments), chunk_size=16)
    torch.testing.assert_close(y[:, 5:], alone, rtol=1e-5, atol=1e-6)


def test_writing_to_a_key_replaces_what_it_held():
    """beta = 1 and no decay: the state answers a key with the value last written to it."""
    state = torch.zeros(1, HEADS, KEYS, VALUES)
    one = torch.ones(1, HEADS, 1)
    key, other = torch.eye(KEYS)[:2].unsqueeze(1).expand(2, HEADS, KEYS).unsqueeze(1)
    values = torch.randn(3, 1, HEADS, VALUES)
    for k, v in zip((key, other, key), values, strict=True):
        y, state = delta_rule_step(state, one, k, -k, k, v, k)
        torch.testing.assert_close(y, v)
    y, _ = delta_rule_step(state, one, 0 * key, key, key, 0 * values[0], other)
    torch.testing.assert_close(y, values[1])

"""The bidirectional scan as LION (arXiv 2502.16249): its attention form, its recurrent form, its published layers."""

from __future__ import annotations

import pytest
import torch
from compare import packed, rmse_ratio
from paths import GOLDEN
from safetensors.torch import load_file
from torch.nn.functional import elu, linear, logsigmoid, silu

from matmix.kernels import quasiseparable_scan

LION = {"shift": False, "self_term": "mean", "normalize": "row_sum", "gate_offset": 1}


def lion(q, k, v, log_gate, **options):
    return quasiseparable_scan(v, q, k, q, k, log_gate, log_gate, **{**LION, **options})


def mask(log_gate: torch.Tensor, gate_offset: int) -> torch.Tensor:
    """M (batch, heads, L, L): products of gates between two tokens, 1 on the diagonal."""
    batch, length, heads = log_gate.shape
    m = torch.ones(batch, heads, length, length, dtype=log_gate.dtype)
    for i in range(length):
        for j in range(length):
            if i > j:
                m[:, :, i, j] = log_gate[:, j + 1 : i + 1].sum(1).exp()
            elif i < j:
                m[:, :, i, j] = log_gate[:, i + gate_offset : j + gate_offset].sum(1).exp()
    return m


def attention_form(q, k, v, log_gate, gate_offset, eps):
    scores = torch.einsum("bthn,bshn->bhts", q, k) * mask(log_gate, gate_offset)
    scores = scores / (scores.sum(-1, keepdim=True) + eps)
    return torch.einsum("bhts,bshp->bthp", scores, v)


def recurrent_form(q, k, v, log_gate, gate_offset):
    """(y^F + y^B) / (c^F + c^B), either direction with states S and z and half of its own term taken off."""
    length = v.shape[1]

    def direction(order, gate):
        state = v.new_zeros(*k[:, 0].shape, v.shape[-1])
        total = torch.zeros_like(k[:, 0])
        outputs, sums = {}, {}
        for t in order:
            decay = gate(t).exp()[..., None]
            state = decay[..., None] * state + k[:, t, :, :, None] * v[:, t, :, None, :]
            total = decay * total + k[:, t]
            own = (q[:, t] * k[:, t]).sum(-1)
            outputs[t] = (q[:, t, :, None, :] @ state).squeeze(-2) - 0.5 * own[..., None] * v[:, t]
            sums[t] = (q[:, t] * total).sum(-1) - 0.5 * own
        return torch.stack([outputs[t] for t in range(length)], 1), torch.stack([sums[t] for t in range(length)], 1)

    def backward_gate(t):
        return log_gate[:, t + gate_offset] if t + gate_offset < length else torch.zeros_like(log_gate[:, 0])

    y, c = direction(range(length), lambda t: log_gate[:, t])
    y_backward, c_backward = direction(range(length - 1, -1, -1), backward_gate)
    return (y + y_backward) / (c + c_backward)[..., None]


def draw(length: int, batch: int = 2, heads: int = 3):
    """Positive q and k, as LION's feature maps make them, values and selective gates, in float64."""
    q, k = torch.rand(2, batch, length, heads, 5, dtype=torch.float64).unbind(0)
    v = torch.randn(batch, length, heads, 4, dtype=torch.float64)
    return q, k, v, logsigmoid(torch.randn(batch, length, heads, dtype=torch.float64) + 2)


@pytest.mark.parametrize("length", [1, 2, 40, 70])
@pytest.mark.parametrize("gate_offset", [0, 1])
def test_attention_and_recurrent_forms(length, gate_offset):
    inputs = draw(length)
    wanted = attention_form(*inputs, gate_offset, eps=1e-6)
    assert rmse_ratio(recurrent_form(*inputs, gate_offset), attention_form(*inputs, gate_offset, eps=0)) < 1e-12
    got = lion(*inputs, gate_offset=gate_offset, chunk_size=16)
    assert rmse_ratio(got, wanted) < 1e-12
    single = lion(*(x.float() for x in inputs), gate_offset=gate_offset)
    assert rmse_ratio(single, wanted) < 1e-5


def test_gradients_of_the_attention_form():
    leaves = [x.requires_grad_() for x in draw(50)]
    cotangent = torch.randn(2, 50, 3, 4, dtype=torch.float64)
    wanted = torch.autograd.grad(attention_form(*leaves, 1, eps=1e-6), leaves, cotangent)
    got = torch.autograd.grad(lion(*leaves, chunk_size=16), leaves, cotangent)
    for a, b in zip(got, wanted, strict=True):
        assert rmse_ratio(a, b) < 1e-11


def test_documents_have_masks_of_their_own():
    lengths = [7, 1, 30, 12]
    inputs = draw(50, batch=1)
    got = lion(*inputs, cu_seqlens=packed(lengths), chunk_size=16)
    parts = [attention_form(*part, 1, eps=1e-6) for part in zip(*(x.split(lengths, 1) for x in inputs), strict=True)]
    assert rmse_ratio(got, torch.cat(parts, 1)) < 1e-12


def test_a_constant_gate_is_a_toeplitz_mask():
    q, k, v, _ = draw(33)
    gate = logsigmoid(torch.randn(3, dtype=torch.float64))
    distance = (torch.arange(33)[:, None] - torch.arange(33)).abs()
    scores = torch.einsum("bthn,bshn->bhts", q, k) * (gate[:, None, None] * distance).exp()
    wanted = torch.einsum("bhts,bshp->bthp", scores / (scores.sum(-1, keepdim=True) + 1e-6), v)
    assert rmse_ratio(lion(q, k, v, gate), wanted) < 1e-12


def test_no_gate_is_bidirectional_linear_attention():
    q, k, v, _ = draw(33)
    weights = torch.einsum("bthn,bshn->bhts", q, k)
    wanted = torch.einsum("bhts,bshp->bthp", weights / (weights.sum(-1, keepdim=True) + 1e-6), v)
    assert rmse_ratio(lion(q, k, v, None), wanted) < 1e-12


@pytest.mark.parametrize("kind", ["lit", "decay"])
def test_published_layers(kind):
    """Whole attention layers computed by the authors' code: output and gradients of input and weights."""
    data = load_file(GOLDEN / f"lion_{kind}.safetensors")
    weights = {
        name.removeprefix("state."): x.clone().requires_grad_() for name, x in data.items() if name.startswith("state.")
    }
    x = data["x"].clone().requires_grad_()
    q, k, v = linear(x, weights["qkv.weight"], weights["qkv.bias"]).unflatten(-1, (3, 3, 16)).unbind(2)
    if kind == "lit":
        q, k, gate = elu(q) + 1, elu(k) + 1, None
    else:
        q, k = (silu(part) + 0.5 for part in (q, k))
        q, k = (part / part.norm(dim=-1, keepdim=True) for part in (q, k))
        gate = logsigmoid(weights["a_i"])
    y = linear(lion(q * 16**-0.5, k, v, gate).flatten(-2), weights["proj.weight"], weights["proj.bias"])
    assert rmse_ratio(y, data["y"]) < 1e-5
    y.backward(data["dy"])
    assert rmse_ratio(x.grad, data["dx"]) < 1e-5
    for name, weight in weights.items():
        assert rmse_ratio(weight.grad, data[f"grad.{name}"]) < 1e-5, name

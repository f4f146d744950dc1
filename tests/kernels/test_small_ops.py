"""Short convolution and gated norm against their definitions."""

from __future__ import annotations

import pytest
import torch
from compare import assert_matches, packed, rmse_ratio
from nightly import each_value_once
from torch.utils.flop_counter import FlopCounterMode

from matmix.kernels import gated_norm, matrix_product_scan, quasiseparable_scan, short_conv
from matmix.kernels.gated_norm.chunked import gated_norm_torch
from matmix.kernels.gated_norm.definition import gated_norm_definition
from matmix.kernels.short_conv.chunked import short_conv_torch
from matmix.kernels.short_conv.definition import short_conv_definition


def conv_inputs(seqlen, width, *, batch=2, d=12, bias=True):
    inputs = {"x": torch.randn(batch, seqlen, d), "weight": torch.randn(d, width)}
    if bias:
        inputs["bias"] = torch.randn(d)
    return inputs


@pytest.mark.parametrize(
    ("seqlen", "form", "activation"),
    each_value_once([1, 2, 7, 129], [(7, False), (3, False), (9, True), (4, True), (2, True)], [None, "silu", "silu"]),
)
def test_conv(seqlen, form, activation):
    width, causal = form
    inputs = conv_inputs(seqlen, width, bias=activation is not None)
    for op in (short_conv, short_conv_torch):
        assert_matches(op, short_conv_definition, inputs, causal=causal, activation=activation)


@pytest.mark.parametrize("lengths", [[1, 7, 64, 29], [1] * 9, [0, 20, 0, 1, 0]])
@pytest.mark.parametrize(("width", "causal"), [(7, False), (4, True)])
def test_conv_of_packed_documents(lengths, width, causal):
    inputs = conv_inputs(sum(lengths), width, batch=1)
    assert_matches(
        short_conv,
        short_conv_definition,
        inputs,
        causal=causal,
        activation="silu",
        cu_seqlens=packed(lengths),
    )


def test_conv_documents_are_bit_independent():
    inputs = conv_inputs(60, 7, batch=1)
    cu_seqlens = packed([10, 20, 30])
    before = short_conv(**inputs, cu_seqlens=cu_seqlens)
    inputs["x"] = inputs["x"].clone()
    inputs["x"][:, 10:30] = torch.nan
    after = short_conv(**inputs, cu_seqlens=cu_seqlens)
    assert torch.equal(before[:, :10], after[:, :10])
    assert torch.equal(before[:, 30:], after[:, 30:])


def test_conv_of_strided_and_bfloat16_inputs():
    inputs = conv_inputs(50, 7)
    wide = torch.randn(2, 50, 30)
    wide[..., 5:17] = inputs["x"]
    wanted = short_conv(**inputs)
    assert rmse_ratio(short_conv(**{**inputs, "x": wide[..., 5:17]}), wanted) < 1e-5
    half = short_conv(**{**inputs, "x": inputs["x"].bfloat16()})
    assert half.dtype == torch.bfloat16
    assert rmse_ratio(half, wanted) < 1e-2


@pytest.mark.parametrize("seqlen", [1, 7, 129])
@pytest.mark.parametrize("group_size", [None, 4])
def test_gated_norm(seqlen, group_size):
    inputs = {"x": torch.randn(2, seqlen, 12), "weight": torch.randn(12), "gate": torch.randn(2, seqlen, 12)}
    for op in (gated_norm, gated_norm_torch):
        assert_matches(op, gated_norm_definition, inputs, group_size=group_size)


def test_gated_norm_over_several_blocks():
    inputs = {"x": torch.randn(300, 640), "weight": torch.randn(640), "gate": torch.randn(300, 640)}
    assert_matches(gated_norm, gated_norm_definition, inputs)


def test_gradchecks():
    x, gate = (torch.randn(1, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight, bias = (torch.randn(4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    taps = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *t: gated_norm(*t, group_size=2), (x, weight, gate))
    assert torch.autograd.gradcheck(lambda *t: short_conv(*t, activation="silu"), (x, taps, bias))


def test_flops_are_counted_forward_and_backward():
    inputs = {"x": torch.randn(2, 9, 12), "weight": torch.randn(12), "gate": torch.randn(2, 9, 12)}
    assert flops(gated_norm, inputs) == ((2 + 2 + 3 + 2) * 2 * 9 * 12, (3 + 3 + 3 + 2 + 2 + 3 + 7) * 2 * 9 * 12)
    # A multiply-add per tap; backward one for the gradient of x and one for the taps'.
    assert flops(short_conv, conv_inputs(9, 7)) == (2 * 7 * 2 * 9 * 12, 2 * 2 * 7 * 2 * 9 * 12)


def flops(op, inputs):
    """Of the forward and of the backward pass."""
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    with FlopCounterMode(display=False) as forward:
        y = op(**leaves)
    with FlopCounterMode(display=False) as backward:
        y.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("op", ["short_conv", "gated_norm", "quasiseparable", "matrix product"])
def test_autocast_does_not_reach_into_the_ops(op):
    """Products inside an op stay float32, forward and backward."""
    x = torch.randn(1, 40, 4, 6)
    calls = {
        "short_conv": (lambda t: short_conv(t.flatten(2), torch.linspace(-1, 1, 24 * 7).view(24, 7)), x),
        "gated_norm": (lambda t: gated_norm(t.flatten(2), torch.ones(24), t.flatten(2)), x),
        "quasiseparable": (lambda t: quasiseparable_scan(t, *[t[:, :, :2, :5] / 3] * 4, None, None), x),
        "matrix product": (lambda t: matrix_product_scan(t), torch.linalg.qr(torch.randn(1, 40, 3, 4, 4))[0]),
    }
    call, inputs = calls[op]
    found = []
    for enabled in (False, True):
        leaf = inputs.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            y = call(leaf)
            found.append((y, torch.autograd.grad(y.square().sum(), leaf)[0]))
    for plain, cast in zip(*found, strict=True):
        assert torch.equal(plain, cast)

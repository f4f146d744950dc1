"""Ops as PyTorch sees them: schemas, fake tensors, compile, checkpointing, FLOP counts; and bad arguments."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from compare import packed, rmse_ratio
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from matmix.kernels import (
    gated_norm,
    matrix_product_scan,
    quasiseparable_scan,
    semiseparable_scan,
    short_conv,
)


def draw(*shape):
    return torch.randn(*shape, requires_grad=True)


def samples():
    """One call of each op as (op, tensors)."""
    torch.manual_seed(0)
    v, q, k = draw(1, 40, 4, 6), draw(1, 40, 2, 5), draw(1, 40, 2, 5)
    decay = (-torch.rand(1, 40, 4)).requires_grad_()
    cu_seqlens = packed([15, 1, 24])
    x = torch.linalg.qr(torch.randn(1, 40, 3, 4, 4))[0].contiguous().requires_grad_()
    return {
        "semiseparable": (partial(semiseparable_scan, cu_seqlens=cu_seqlens), (v, q, k, decay)),
        "with states": (partial(semiseparable_scan, return_final_state=True), (v, q, k, decay)),
        "quasiseparable": (
            partial(quasiseparable_scan, cu_seqlens=cu_seqlens),
            (v, q, k, k, q, decay, decay),
        ),
        "matrix product": (
            partial(matrix_product_scan, return_final_state=True, cu_seqlens=cu_seqlens),
            (x,),
        ),
        "short conv": (
            partial(short_conv, activation="silu", cu_seqlens=cu_seqlens),
            (v.flatten(2), draw(24, 7)),
        ),
        "gated norm": (gated_norm, (v.flatten(2), draw(24), draw(1, 40, 24))),
    }


NAMES = ["semiseparable", "with states", "quasiseparable", "matrix product", "short conv", "gated norm"]


def first(output):
    return output[0] if isinstance(output, tuple) else output


@pytest.mark.parametrize("name", NAMES)
def test_schema_fake_and_autograd_registration(name):
    """PyTorch's own checks of a custom op, on the arguments that the public function passes down."""
    op, tensors = samples()[name]
    calls = []
    overloads = {
        packet: getattr(torch.ops.matmix, packet).default
        for packet in (
            "semiseparable_scan", "quasiseparable_scan", "matrix_product_scan", "short_conv", "gated_norm",
            "semiseparable_scan_backward", "quasiseparable_scan_backward", "matrix_product_scan_backward",
            "short_conv_backward", "gated_norm_backward",
        )
    }  # fmt: skip

    class Record(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func in overloads.values():
                calls.append((func, args))
            return func(*args, **(kwargs or {}))

    with Record():
        first(op(*tensors)).sum().backward()
    assert len(calls) == 2
    for func, args in calls:
        args = tuple(a.detach().requires_grad_(a.is_floating_point()) if torch.is_tensor(a) else a for a in args)
        utils = ("test_schema", "test_faketensor", "test_autograd_registration")
        if not func.name().endswith("_backward"):
            utils += ("test_aot_dispatch_static",)
        torch.library.opcheck(func, args, test_utils=utils)


@pytest.mark.parametrize("name", NAMES)
def test_compile_without_graph_breaks(name):
    """Traced whole, forward and backward; same numbers. (aot_eager: tracing without code generation.)"""
    op, tensors = samples()[name]
    wanted = first(op(*tensors))
    grads = torch.autograd.grad(wanted.square().sum(), tensors)
    compiled = torch.compile(lambda *t: first(op(*t)), fullgraph=True, backend="aot_eager")
    got = compiled(*tensors)
    assert torch.equal(got, wanted)
    for a, b in zip(torch.autograd.grad(got.square().sum(), tensors), grads, strict=True):
        assert rmse_ratio(a, b) < 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_activation_checkpointing(name):
    op, tensors = samples()[name]
    wanted = torch.autograd.grad(first(op(*tensors)).square().sum(), tensors)
    again = checkpoint(lambda *t: first(op(*t)), *tensors, use_reentrant=False)
    for a, b in zip(torch.autograd.grad(again.square().sum(), tensors), wanted, strict=True):
        assert torch.equal(a, b)


def test_meta_device_shapes():
    x = torch.empty(2, 100, 3, 8, 8, device="meta", dtype=torch.bfloat16)
    h, final = matrix_product_scan(x, return_final_state=True)
    assert (h.shape, h.dtype, final.dtype) == (x.shape, torch.bfloat16, torch.float32)


def test_flops_are_counted():
    op, tensors = samples()["quasiseparable"]
    with FlopCounterMode(display=False) as counter:
        op(*tensors)
    assert counter.get_total_flops() > 40 * 4 * 6 * 5 * 2 * 2


def test_memory_of_backward_is_lean():
    """Only the inputs are kept: no state per token, no matrix per chunk."""
    saved = []

    def keep(x):
        saved.append(x)
        return x

    torch.manual_seed(0)
    v, q, k = draw(1, 512, 4, 16), draw(1, 512, 1, 16), draw(1, 512, 1, 16)
    decay = (-torch.rand(1, 512, 4)).requires_grad_()
    inputs = {x.untyped_storage().data_ptr() for x in (v, q, k, decay)}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        y = quasiseparable_scan(v, q, k, q, k, decay, decay)
    assert y.requires_grad
    assert {x.untyped_storage().data_ptr() for x in saved} <= inputs


BAD = {
    "v has shape": lambda: semiseparable_scan(torch.ones(2, 3, 4), *[torch.ones(2, 3, 1, 4)] * 2, None),
    "cannot share": lambda: semiseparable_scan(torch.ones(2, 3, 4, 5), *[torch.ones(2, 3, 3, 4)] * 2, None),
    "k has shape": lambda: semiseparable_scan(
        torch.ones(2, 3, 4, 5), torch.ones(2, 3, 2, 4), torch.ones(2, 3, 1, 4), None
    ),
    "log_decay has shape": lambda: semiseparable_scan(
        torch.ones(2, 3, 4, 5), *[torch.ones(2, 3, 2, 4)] * 2, torch.ones(2, 3, 2)
    ),
    "chunk_size is 48": lambda: semiseparable_scan(
        torch.ones(2, 3, 4, 5), *[torch.ones(2, 3, 2, 4)] * 2, None, chunk_size=48
    ),
    "initial_state has shape": lambda: semiseparable_scan(
        torch.ones(2, 3, 4, 5), *[torch.ones(2, 3, 2, 4)] * 2, None, initial_state=torch.ones(2, 4, 5, 4)
    ),
    "cu_seqlens needs batch 1": lambda: matrix_product_scan(torch.ones(2, 3, 1, 4, 4), cu_seqlens=packed([3])),
    "must run from 0 to 3": lambda: matrix_product_scan(torch.ones(1, 3, 1, 4, 4), cu_seqlens=packed([2])),
    "decreases": lambda: matrix_product_scan(
        torch.ones(1, 3, 1, 4, 4), cu_seqlens=torch.tensor([0, 2, 1, 3], dtype=torch.int32)
    ),
    "expected (batch, seqlen, nheads, o, o)": lambda: matrix_product_scan(torch.ones(1, 3, 1, 4, 5)),
    "give a floating-point tensor": lambda: matrix_product_scan(torch.ones(1, 3, 1, 4, 4, dtype=torch.int64)),
    "needs CUDA tensors": lambda: matrix_product_scan(torch.ones(1, 3, 1, 4, 4), backend="triton"),
    "choose one of auto": lambda: matrix_product_scan(torch.ones(1, 3, 1, 4, 4), backend="cuda"),
    "odd number of taps": lambda: short_conv(torch.ones(1, 3, 4), torch.ones(4, 6)),
    "give 2 to 9": lambda: short_conv(torch.ones(1, 3, 4), torch.ones(4, 11)),
    "activation is": lambda: short_conv(torch.ones(1, 3, 4), torch.ones(4, 3), activation="gelu"),
    "divisor of the width 4": lambda: gated_norm(torch.ones(3, 4), torch.ones(4), torch.ones(3, 4), group_size=3),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_one_line_errors(message):
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the text is looked at below)
        BAD[message]()
    assert message in str(error.value)
    assert "\n" not in str(error.value)

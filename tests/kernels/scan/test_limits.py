"""What the scans do at the limits of their kernels: strides beyond 32 bits, wide states, decays above the bound."""

from __future__ import annotations

import warnings

import numpy
import pytest
import torch
from compare import FLOAT32, rmse_ratio
from nightly import each_value_once
from torch import Tensor

from matmix.kernels import backend, quasiseparable_scan, semiseparable_scan
from matmix.kernels.semiseparable.form import LARGEST_LOG_DECAY

STEP = 2**30 + 64
"""Elements from one head to the next: an int32 counts them, but not those to the third head."""


def far_apart(x: Tensor, folder) -> Tensor:
    """x (batch, seqlen, heads, width) with its heads in a file that is longer than it takes space on the disk."""
    batch, seqlen, heads, width = x.shape
    path = folder / f"{len(list(folder.iterdir()))}.bin"
    memory = numpy.memmap(path, dtype=numpy.float32, mode="w+", shape=(heads * STEP,))
    flat = torch.from_numpy(memory)
    view = flat.as_strided((batch, seqlen, heads, width), (seqlen * width, width, STEP, 1))
    return view.copy_(x)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="takes 50 GB of memory on a GPU")
def test_heads_may_lie_further_apart_than_32_bits_count(interpreter, tmp_path):
    v, q, k = torch.randn(3, 1, 40, 4, 16).unbind(0)
    decay, scale = -torch.rand(1, 40, 4), torch.rand(1, 40, 4)

    def run(v, q, k, how):
        leaves = [x.detach().requires_grad_() for x in (v, q, k)]
        y = semiseparable_scan(*leaves, decay, input_scale=scale, chunk_size=16, backend=how)
        return y.detach(), *torch.autograd.grad(y, leaves, torch.cos(y.detach()))

    found = run(*(far_apart(x, tmp_path) for x in (v, q, k)), "triton")
    for got, wanted in zip(found, run(v, q, k, "torch"), strict=True):
        assert rmse_ratio(got, wanted) < FLOAT32


@pytest.mark.parametrize(("how", "per"), each_value_once(["torch", "triton"], ["token", "head"]))
def test_a_decay_above_the_bound_is_taken_as_the_bound_and_gets_no_gradient(interpreter, how, per):
    """As on accelerators, where values are not looked at."""
    v, q, k = torch.randn(1, 40, 2, 16), torch.randn(1, 40, 1, 16), torch.randn(1, 40, 1, 16)
    decay = -torch.rand((1, 40, 2) if per == "token" else (2,))
    above = torch.zeros_like(decay, dtype=torch.bool)
    above.view(-1)[3 if per == "token" else 1 :: 3] = True  # the decay of a first token changes nothing

    def run(decay):
        leaf = decay.clone().requires_grad_()
        y, _ = torch.ops.matmix.semiseparable_scan(v, q, k, leaf, None, None, None, None, False, None, "", how)
        return y.detach(), torch.autograd.grad(y, leaf, torch.cos(y.detach()))[0]

    y, gradient = run(decay.masked_fill(above, 0.5))
    wanted, reference = run(decay.masked_fill(above, LARGEST_LOG_DECAY))
    assert rmse_ratio(y, wanted) < FLOAT32
    assert not gradient[above].any()
    assert reference[above].all()
    assert rmse_ratio(gradient[~above], reference[~above]) < FLOAT32


def wide(d_state: int, headdim: int) -> tuple[Tensor, ...]:
    return torch.randn(1, 5, 2, headdim), *(torch.randn(1, 5, 1, d_state) for _ in range(4)), None, None


@pytest.mark.parametrize(("d_state", "headdim"), [(257, 16), (16, 272)])
def test_states_that_no_kernel_takes_go_to_pytorch_and_one_warning_says_so(monkeypatch, d_state, headdim):
    inputs = wide(d_state, headdim)
    wanted = quasiseparable_scan(*inputs, backend="torch")
    monkeypatch.setattr(backend, "_no_triton", lambda like: "")
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)  # as "auto" would find it on a GPU
    backend._warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match=f"at most 256 x 256 a head, not {d_state} x {headdim}; its PyTorch form"):
        assert torch.equal(quasiseparable_scan(*inputs), wanted)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(quasiseparable_scan(*inputs), wanted)


def test_asked_for_states_that_no_kernel_takes_are_an_error(interpreter):
    with pytest.raises(ValueError, match='backend "triton" takes states of at most 256 x 256 a head, not 16 x 300'):
        quasiseparable_scan(*wide(16, 300), backend="triton")

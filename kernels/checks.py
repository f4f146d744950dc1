"""Argument checks that the ops share: a failed check is an error of one line that names the op, the argument and what
to do.

Shapes, dtypes and devices are always checked. Values are checked where that is cheap and does not wait for a device: on
the CPU, boundaries of documents and bounds of decays. With MATMIX_CHECK_VALUES=1 in the environment every
floating-point input, on any device, is also checked for NaN and infinity, and boundaries and decays are checked on
accelerators too. Each call then waits for the device, so use this only to find where a NaN comes from.
"""

import math
import os

import torch
from torch import Tensor
from torch.autograd import forward_ad

FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
CHUNK_SIZES = (16, 32, 64, 128, 256)


def check_floating(op: str, **tensors: Tensor | None) -> None:
    """All given tensors are floating point and on one device."""
    device = None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{op}: {name} is a {type(tensor).__name__}; give a floating-point tensor")
        if tensor.dtype not in FLOATING:
            raise ValueError(f"{op}: {name} has dtype {tensor.dtype}; give a floating-point tensor")
        if device is not None and tensor.device != device:
            raise ValueError(f"{op}: {name} is on {tensor.device}, other inputs on {device}; move them together")
        device = tensor.device


def check_given(op: str, **tensors: Tensor | None) -> None:
    """No tensor is None."""
    for name, tensor in tensors.items():
        if tensor is None:
            raise ValueError(f"{op}: {name} is None; give a floating-point tensor")


def check_eps(op: str, eps: float) -> None:
    """A finite number that is not negative."""
    if not isinstance(eps, int | float) or not (0 <= eps < math.inf):
        raise ValueError(f"{op}: eps is {eps!r}; give a finite number that is not negative")


def wants_gradients(*tensors: Tensor | None) -> bool:
    """Returns whether autograd would follow an op on these tensors."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def transformed() -> bool:
    """Returns whether a transform of torch.func, or forward-mode autograd, follows what runs now."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def check_no_gradients(op: str, in_place: bool, backend: str, *tensors: Tensor | None) -> None:
    """Nothing asks for derivatives, or for torch.vmap, where there is no rule: in place, and from the kernels of a
    single step."""
    if not in_place and backend != "triton":
        return
    what = "in_place=True" if in_place else 'backend "triton"'
    if transformed():
        raise ValueError(f"{op}: {what} has no rule for torch.func's transforms and forward mode; leave it out")
    if wants_gradients(*tensors):
        raise ValueError(f"{op}: an input requires a gradient, and {what} has none; call it under torch.no_grad()")


def check_own_memory(op: str, name: str, tensor: Tensor) -> None:
    """Each element of a tensor that is written to has memory of its own."""
    if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise ValueError(f"{op}: {name} is expanded, so that elements share memory; give a copy (.contiguous())")


def check_same_dtype(op: str, **tensors: Tensor) -> None:
    """All given tensors have the first one's dtype."""
    (first, like), *others = tensors.items()
    for name, tensor in others:
        if tensor.dtype != like.dtype:
            raise ValueError(f"{op}: {name} has dtype {tensor.dtype}, {first} {like.dtype}; give them one dtype")


def check_shape(op: str, name: str, tensor: Tensor, *expected: tuple[int, ...]) -> None:
    """The tensor has one of the expected shapes."""
    if tuple(tensor.shape) not in expected:
        wanted = " or ".join(str(tuple(shape)) for shape in expected)
        raise ValueError(f"{op}: {name} has shape {tuple(tensor.shape)}; expected {wanted}")


def check_choice(op: str, name: str, value: object, choices: tuple) -> None:
    """The option is one of a few."""
    if not any(value is choice or (type(value) is type(choice) and value == choice) for choice in choices):
        raise ValueError(f"{op}: {name} is {value!r}; use {' or '.join(map(repr, choices))}")


def check_cu_seqlens(
    op: str, cu_seqlens: Tensor | None, batch: int, seqlen: int, like: Tensor, *, part: bool = False
) -> None:
    """Boundaries of packed documents: int32 (ndocs + 1,), first 0, last seqlen, never decreasing, batch 1. Of a `part`
    of a sequence the first may be lower and the last higher."""
    if cu_seqlens is None:
        return
    if not isinstance(cu_seqlens, Tensor):
        raise ValueError(f"{op}: cu_seqlens is a {type(cu_seqlens).__name__}; give an int32 tensor (documents + 1,)")
    if batch != 1:
        raise ValueError(f"{op}: cu_seqlens needs batch 1, got {batch}; flatten the batch to (1, batch * length, ...)")
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"{op}: cu_seqlens is {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}; give int32 (documents + 1,)"
        )
    if cu_seqlens.device != like.device:
        raise ValueError(f"{op}: cu_seqlens is on {cu_seqlens.device}, inputs on {like.device}; move it there")
    if not can_look(cu_seqlens):
        return
    first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
    if part and first <= 0 and last >= seqlen:
        first, last = 0, seqlen
    if part and (first > 0 or last < seqlen):
        raise ValueError(
            f"{op}: cu_seqlens runs from {first} to {last}; of a part it must begin at 0 or below, and end at {seqlen} "
            "or above"
        )
    if first != 0 or last != seqlen:
        raise ValueError(f"{op}: cu_seqlens runs from {first} to {last}; it must run from 0 to {seqlen}")
    if bool((cu_seqlens[1:] < cu_seqlens[:-1]).any()):
        raise ValueError(f"{op}: cu_seqlens decreases somewhere; give the boundaries in order")


def check_chunk_size(op: str, chunk_size: int | None) -> None:
    """None, or a power of two between 16 and 256."""
    if chunk_size is not None and (type(chunk_size) is not int or chunk_size not in CHUNK_SIZES):
        raise ValueError(f"{op}: chunk_size is {chunk_size}; use None or one of {', '.join(map(str, CHUNK_SIZES))}")


def check_at_most(op: str, bound: float, **tensors: Tensor | None) -> None:
    """No value above `bound`. A NaN passes and makes the output NaN: it is a diverged run, not a bad argument."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.numel() and can_look(tensor):
            largest = float(tensor.detach().max())
            if largest > bound:
                raise ValueError(f"{op}: {name} reaches {largest:g}; it must be at most {bound:g} everywhere")


def check_finite(op: str, *, below: tuple[str, ...] = (), **tensors: Tensor | None) -> None:
    """With MATMIX_CHECK_VALUES=1: no NaN and no infinity, but -inf in those named in `below`."""
    if not values_wanted():
        return
    for name, tensor in tensors.items():
        if tensor is None or not can_look(tensor):
            continue
        bad = tensor.isnan() | tensor.isposinf() if name in below else ~tensor.isfinite()
        if bool(bad.any()):
            raise ValueError(f"{op}: {name} holds NaN or infinity at {int(bad.sum())} of {bad.numel()} places")


def values_wanted() -> bool:
    """Returns whether MATMIX_CHECK_VALUES=1 asks for checks of values on all devices."""
    return os.environ.get("MATMIX_CHECK_VALUES") == "1"


def can_look(tensor: Tensor) -> bool:
    """Returns whether the values of the tensor can be checked now.

    There are none while torch.compile traces, and those of all samples at once under torch.vmap. On an accelerator
    reading them waits for the device: only where `values_wanted`.
    """
    if torch.compiler.is_compiling() or type(tensor) not in (Tensor, torch.nn.Parameter) or _is_vmapped(tensor):
        return False
    return tensor.device.type == "cpu" or (values_wanted() and tensor.device.type != "meta")


def _is_vmapped(tensor: Tensor) -> bool:
    """Returns whether torch.vmap goes through the tensor, at any level of transforms."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        if torch._C._functorch.is_batchedtensor(tensor):
            return True
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return False

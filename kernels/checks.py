"""Argument checks shared by the ops: a failure is one line that names the op, the argument and the remedy."""

from __future__ import annotations

import torch
from torch import Tensor

FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_floating(op: str, **tensors: Tensor | None) -> None:
    """All given tensors are floating point and on one device."""
    device = None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.dtype not in FLOATING:
            raise ValueError(f"{op}: {name} has dtype {tensor.dtype}; give a floating-point tensor")
        if device is not None and tensor.device != device:
            raise ValueError(f"{op}: {name} is on {tensor.device}, other inputs on {device}; move them together")
        device = tensor.device


def check_shape(op: str, name: str, tensor: Tensor, *expected: tuple[int, ...]) -> None:
    """The tensor has one of the expected shapes."""
    if tuple(tensor.shape) not in expected:
        wanted = " or ".join(str(tuple(shape)) for shape in expected)
        raise ValueError(f"{op}: {name} has shape {tuple(tensor.shape)}; expected {wanted}")


def check_cu_seqlens(op: str, cu_seqlens: Tensor | None, batch: int, seqlen: int, like: Tensor) -> None:
    """Boundaries of packed documents: int32 (ndocs + 1,), first 0, last seqlen, never decreasing, batch 1.

    The values are looked at on the CPU only: on an accelerator that would wait for the device.
    """
    if cu_seqlens is None:
        return
    if batch != 1:
        raise ValueError(f"{op}: cu_seqlens needs batch 1, got {batch}; flatten the batch to (1, batch * length, ...)")
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"{op}: cu_seqlens is {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}; give int32 (documents + 1,)"
        )
    if cu_seqlens.device != like.device:
        raise ValueError(f"{op}: cu_seqlens is on {cu_seqlens.device}, inputs on {like.device}; move it there")
    # While torch.compile traces, there are no values to look at.
    if torch.compiler.is_compiling() or cu_seqlens.device.type != "cpu" or type(cu_seqlens) is not Tensor:
        return
    first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
    if first != 0 or last != seqlen:
        raise ValueError(f"{op}: cu_seqlens runs from {first} to {last}; it must run from 0 to {seqlen}")
    if bool((cu_seqlens[1:] < cu_seqlens[:-1]).any()):
        raise ValueError(f"{op}: cu_seqlens decreases somewhere; give the boundaries in order")


def check_chunk_size(op: str, chunk_size: int | None) -> None:
    """None, or a power of two between 16 and 256."""
    if chunk_size is not None and chunk_size not in (16, 32, 64, 128, 256):
        raise ValueError(f"{op}: chunk_size is {chunk_size}; use None or one of 16, 32, 64, 128, 256")

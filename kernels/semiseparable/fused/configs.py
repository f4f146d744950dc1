"""Tile sizes of the scan kernels, chosen from dtype and shapes alone.

There is no tuning at run time: another process could choose other tiles and round differently, and a resumed run would
not give the same losses. `force_configuration` tries others.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from matmix.kernels.launching import ForcedConfiguration


class ScanConfig(NamedTuple):
    """Tiles of all kernels of one scan; chunks and rows in tokens."""

    itemsize: int
    """Bytes per number of the inputs that it is for: 2 or 4."""
    forward_chunk: int
    """Tokens between two stored states in the forward pass: longer ones store fewer states, shorter ones
    multiply smaller matrices."""
    rows: int
    """Rows of the mixer matrix of a chunk that one program of the products makes, at most the chunk."""
    backward_chunk: int
    """Tokens between two stored states in the backward pass."""
    heads: int
    """Heads that share one program's scores in the products."""
    block: int
    """Elements of d_state and of headdim in a tile."""
    pair_block: int
    """The same in the gradients inside chunks."""
    state_gradient_block: int
    """The same in the gradients through states."""
    state_warps: int
    mix_warps: int
    pair_warps: int
    state_gradient_warps: int
    stages: int
    """Software pipelining of loops over chunks and heads."""


_HALF = ScanConfig(2, 128, 32, 64, 4, 64, 32, 64, 4, 8, 8, 8, 2)
_HALF_SHORT = ScanConfig(2, 64, 32, 64, 2, 64, 32, 64, 4, 8, 8, 8, 2)
_SINGLE = ScanConfig(4, 32, 16, 32, 1, 32, 16, 16, 8, 8, 8, 8, 1)

force_configuration = ForcedConfiguration()
"""Takes effect on scans whose inputs have the size that the configuration is for."""


def configurations() -> tuple[ScanConfig, ...]:
    """All configurations that `choose` can return."""
    return _HALF, _HALF_SHORT, _SINGLE


def choose(dtype: torch.dtype, seqlen: int, chunk_size: int | None) -> ScanConfig:
    """The configuration of a scan; `chunk_size` is the caller's wish for the tokens between stored states."""
    config = force_configuration.value
    if config is None or config.itemsize != dtype.itemsize:
        config = _SINGLE if dtype.itemsize == 4 else _HALF if seqlen > 64 else _HALF_SHORT
        if dtype == torch.float16:
            # Its states are float32 (launch.py), twice as many registers.
            config = config._replace(state_gradient_block=32)
        if chunk_size is not None:
            chunk = min(chunk_size, config.forward_chunk)
            config = config._replace(forward_chunk=chunk, backward_chunk=min(chunk_size, config.backward_chunk))
    # A chunk longer than the row would only be masked.
    row = max(16, 1 << (seqlen - 1).bit_length())
    forward, backward = min(config.forward_chunk, row), min(config.backward_chunk, row)
    return config._replace(forward_chunk=forward, backward_chunk=backward, rows=min(config.rows, forward))

"""Tile sizes of the scan kernels, chosen from dtype and shapes alone.

There is no tuning at run time: another process could choose other tiles and round differently, and a resumed run would
not give the same losses. `force_configuration` tries others.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from matmix.kernels.launching import ForcedConfiguration


class ScanConfig(NamedTuple):
    """Tiles of all kernels of one scan; chunks and tiles in tokens."""

    itemsize: int
    """Bytes per number of the inputs that it is for: 2 or 4."""
    forward_chunk: int
    """Tokens between two stored states in the forward pass, at most 256: longer ones move fewer states through
    memory, and let each program make more of the states between tiles again."""
    backward_chunk: int
    """The same in the backward pass."""
    tile: int
    """Tokens of which one program makes the pairs, at most the chunk."""
    heads: int
    """Heads that share one program's scores in the forward pass, at most."""
    state_tile: int
    """Tokens at a time while states are carried, at most the chunk."""
    block: int
    """Elements of d_state and of headdim in a tile of the forward pass and of the states."""
    pair_block: int
    """The same in the gradients inside tiles."""
    state_gradient_block: int
    """The same in the gradients through states."""
    state_warps: int
    mix_warps: int
    pair_warps: int
    state_gradient_warps: int
    mix_registers: int
    """Registers that a thread of the forward product may have: fewer leave room for more programs side by side."""
    pair_registers: int
    """The same for the gradients inside tiles."""
    state_gradient_registers: int
    """The same for the gradients through states."""
    stages: int
    """Software pipelining of the loop over tiles that carries states."""


_HALF = ScanConfig(2, 128, 128, 64, 24, 128, 64, 64, 64, 4, 4, 4, 4, 168, 255, 255, 1)
_SINGLE = ScanConfig(4, 64, 64, 32, 1, 32, 32, 32, 32, 4, 4, 4, 4, 255, 255, 255, 1)
_WHOLE = 256
"""Rows up to this length are one chunk: no states are carried."""

force_configuration = ForcedConfiguration()
"""Takes effect on scans whose inputs have the size that the configuration is for."""


def configurations() -> tuple[ScanConfig, ...]:
    """All configurations that `choose` can return."""
    return _HALF, _SINGLE


def choose(dtype: torch.dtype, seqlen: int, chunk_size: int | None) -> ScanConfig:
    """The configuration of a scan; `chunk_size` is the caller's wish for the tokens between stored states."""
    config = force_configuration.value
    if config is None or config.itemsize != dtype.itemsize:
        config = _SINGLE if dtype.itemsize == 4 else _HALF
        if chunk_size is None and seqlen <= _WHOLE and dtype.itemsize == 2:
            config = config._replace(forward_chunk=_WHOLE, backward_chunk=_WHOLE)
        if chunk_size is not None:
            chunks = min(chunk_size, config.forward_chunk), min(chunk_size, config.backward_chunk)
            config = config._replace(forward_chunk=chunks[0], backward_chunk=chunks[1])
    # A chunk longer than the row would only be masked.
    row = max(16, 1 << (seqlen - 1).bit_length())
    forward, backward = min(config.forward_chunk, row), min(config.backward_chunk, row)
    return config._replace(forward_chunk=forward, backward_chunk=backward, tile=min(config.tile, forward, backward))

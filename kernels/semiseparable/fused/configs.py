"""Tile sizes of the scan kernels, chosen from dtype and shapes alone.

There is no tuning at run time: another process could then take other tiles, round differently, and a resumed run
would leave the curve that it was on. `force_configuration` tries others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import NamedTuple

import torch

MOST_CHANNELS = 128
"""Largest d_state and headdim; tiles of a state beyond that do not fit a program's registers."""


class ScanConfig(NamedTuple):
    """Tiles of all kernels of one scan; chunks and rows in tokens."""

    forward_chunk: int
    """Tokens between two stored states in the forward pass: longer ones store fewer states, shorter ones
    multiply smaller matrices."""
    rows: int
    """Rows of the mixer matrix of a chunk that one program of the products makes, at most the chunk."""
    backward_chunk: int
    """Tokens between two stored states in the backward pass."""
    heads: int
    """Heads that share one program's scores in the products."""
    state_warps: int
    mix_warps: int
    gradient_warps: int
    stages: int
    """Software pipelining of loops over heads and chunks."""


_HALF = ScanConfig(128, 64, 64, 4, 4, 8, 8, 2)
_HALF_SHORT_CHUNKS = ScanConfig(64, 64, 64, 4, 4, 4, 8, 2)
_HALF_WIDE = ScanConfig(64, 64, 32, 2, 8, 8, 8, 1)
_SINGLE = ScanConfig(64, 64, 32, 2, 4, 8, 8, 1)
_SINGLE_WIDE = ScanConfig(32, 32, 32, 1, 8, 8, 8, 1)
_FORMS = {2: (_HALF, _HALF_SHORT_CHUNKS, _HALF_WIDE), 4: (_SINGLE, _SINGLE_WIDE)}

_forced: ContextVar[ScanConfig | None] = ContextVar("forced", default=None)


def configurations(dtype: torch.dtype) -> tuple[ScanConfig, ...]:
    """All that the rule can choose for inputs of `dtype`."""
    return _FORMS[dtype.itemsize]


@contextlib.contextmanager
def force_configuration(config: ScanConfig) -> Iterator[None]:
    """Within this block every scan uses `config`."""
    token = _forced.set(config)
    try:
        yield
    finally:
        _forced.reset(token)


def choose(dtype: torch.dtype, seqlen: int, d_state: int, headdim: int, chunk_size: int | None) -> ScanConfig:
    """The configuration of a scan; `chunk_size` is the caller's wish for the tokens between stored states."""
    config = _forced.get()
    if config is None:
        wide = max(d_state, headdim) > 64
        if dtype.itemsize == 4:
            config = _SINGLE_WIDE if wide else _SINGLE
        else:
            config = _HALF_WIDE if wide else _HALF if seqlen > 64 else _HALF_SHORT_CHUNKS
        if chunk_size is not None:
            chunk = min(chunk_size, config.forward_chunk)
            config = config._replace(forward_chunk=chunk, backward_chunk=min(chunk_size, config.backward_chunk))
    # A chunk longer than the row would only be masked.
    row = max(16, 1 << (seqlen - 1).bit_length())
    forward, backward = min(config.forward_chunk, row), min(config.backward_chunk, row)
    return config._replace(forward_chunk=forward, backward_chunk=backward, rows=min(config.rows, forward))

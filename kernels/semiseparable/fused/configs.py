"""Tile sizes of the scan kernels, chosen from dtype, shapes and the GPU's architecture alone.

Where sizes were measured on an architecture, they stand in its file in `kernels/tiles`, which is read once; elsewhere
those below are taken. There is no tuning at run time: another process could choose other tiles and round differently,
and a resumed run would not give the same losses. `force_configuration` tries others.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from matmix.kernels.launching import ForcedConfiguration
from matmix.kernels.tiles import table


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
    """Tokens of which one program makes the pairs, at most the chunk; backward at least half of it."""
    heads: int
    """Heads that share one program's scores in the forward pass, at most."""
    state_tile: int
    """Tokens at a time while states are carried, at most the chunk."""
    block: int
    """Elements of d_state and of headdim in a tile of the forward pass and of the states."""
    pair_block: int
    """The same in the gradients inside tiles."""
    vector_block: int
    """The same in the gradients through states."""
    state_warps: int
    mix_warps: int
    pair_warps: int
    vector_warps: int
    mix_registers: int
    """Registers that a thread of the forward product may have: fewer leave room for more programs side by side."""
    pair_registers: int
    """The same for the gradients inside tiles."""
    vector_registers: int
    """The same for the gradients through states."""
    stages: int
    """Software pipelining of the loop over tiles that carries states."""
    walk: bool
    """Where there are documents and heads enough for a GPU, the forward product carries the first direction's state
    from tile to tile in registers, instead of storing states."""


_HALF = ScanConfig(2, 128, 128, 64, 24, 128, 64, 64, 64, 4, 4, 4, 4, 168, 168, 168, 1, True)
_SINGLE = ScanConfig(4, 64, 64, 32, 1, 32, 32, 32, 32, 4, 4, 4, 4, 255, 255, 255, 1, False)
_WHOLE = 256
"""Rows up to this length are one chunk: no states are carried."""

OPERATION = "scan"
"""Its name in the files of measured tiles."""


_SIZES = (
    "forward_chunk", "backward_chunk", "tile", "state_tile", "block", "pair_block", "vector_block"
)  # fmt: skip
_WARPS = ("state_warps", "mix_warps", "pair_warps", "vector_warps")
_REGISTERS = ("mix_registers", "pair_registers", "vector_registers")


def checked(config: ScanConfig, where: str) -> ScanConfig:
    """The configuration. Raises ValueError, one line that begins with `where`, for one that no kernel can be made
    with."""
    if config.itemsize not in (2, 4):
        raise ValueError(f"{where}: itemsize is {config.itemsize}; it has to be 2 or 4")
    for name in (*_SIZES, *_WARPS):
        value, least = getattr(config, name), 16 if name in _SIZES else 1
        most = 256 if name in _SIZES else 32
        if value & (value - 1) or not least <= value <= most:
            raise ValueError(f"{where}: {name} is {value}; it has to be a power of two from {least} to {most}")
    if config.tile > min(config.forward_chunk, config.backward_chunk):
        raise ValueError(f"{where}: tile is {config.tile}, which is longer than a chunk")
    for name in _REGISTERS:
        if not 24 <= getattr(config, name) <= 255:
            raise ValueError(f"{where}: {name} is {getattr(config, name)}; it has to be from 24 to 255")
    return config


def measured(folder: Path = table.FOLDER) -> dict[str, dict[int, ScanConfig]]:
    """What was measured, by architecture and bytes per number. Raises ValueError for a file that cannot be used."""
    found = table.read_all(OPERATION, ScanConfig, folder)
    for architecture, configs in found.items():
        for config in configs.values():
            checked(config, f"{folder / architecture}.json: {OPERATION}")
    return found


MEASURED = measured()

force_configuration = ForcedConfiguration()
"""Takes effect on scans whose inputs have the size that the configuration is for."""


def configurations() -> tuple[ScanConfig, ...]:
    """All configurations that `choose` can return."""
    return tuple(dict.fromkeys((_HALF, _SINGLE, *(x for found in MEASURED.values() for x in found.values()))))


def usual(itemsize: int, architecture: str = "") -> ScanConfig:
    """The configuration for inputs of so many bytes per number: what was measured on the architecture, or the one that
    is built in."""
    built_in = _SINGLE if itemsize == 4 else _HALF
    return MEASURED.get(architecture, {}).get(itemsize, built_in)


def choose(dtype: torch.dtype, seqlen: int, chunk_size: int | None, architecture: str = "") -> ScanConfig:
    """The configuration of a scan; `chunk_size` is the caller's wish for the tokens between stored states, and
    `architecture` that of the GPU, such as "sm_90"."""
    config = force_configuration.value
    if config is None or config.itemsize != dtype.itemsize:
        config = usual(dtype.itemsize, architecture)
        if chunk_size is None and seqlen <= _WHOLE and dtype.itemsize == 2:
            config = config._replace(forward_chunk=_WHOLE, backward_chunk=_WHOLE)
        if chunk_size is not None:
            chunks = min(chunk_size, config.forward_chunk), min(chunk_size, config.backward_chunk)
            config = config._replace(forward_chunk=chunks[0], backward_chunk=chunks[1])
    # A chunk longer than the row would only be masked.
    row = max(16, 1 << (seqlen - 1).bit_length())
    forward, backward = min(config.forward_chunk, row), min(config.backward_chunk, row)
    return config._replace(forward_chunk=forward, backward_chunk=backward, tile=min(config.tile, forward, backward))

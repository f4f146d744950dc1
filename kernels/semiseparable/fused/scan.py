"""Tile sizes of the scan kernels, chosen from dtype, shapes and the GPU's architecture alone, the shapes of one pass,
and the arguments of its kernels.

Where sizes were measured on an architecture, they stand in its file in `kernels/tiles`, which is read once; elsewhere
those below are taken. There is no tuning at run time: another process could choose other tiles and round differently,
and a resumed run would not give the same losses. `force_configuration` tries others.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from matmix.kernels import tiles
from matmix.kernels.launching import ForcedConfiguration, dot_precision, launch, rows_in_place
from matmix.kernels.semiseparable.form import ScanCall, ScanForm, ScanSide
from matmix.kernels.semiseparable.fused.sums import decay_sums
from matmix.kernels.slots import count_documents, count_slots, slot_table


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


def measured(folder: Path = tiles.FOLDER) -> dict[str, dict[int, ScanConfig]]:
    """Returns the measured configurations, by architecture and bytes per number. Raises ValueError for a file that
    cannot be used."""
    by_architecture = tiles.read_all(OPERATION, ScanConfig, folder)
    for architecture, configs in by_architecture.items():
        for config in configs.values():
            checked(config, f"{folder / architecture}.json: {OPERATION}")
    return by_architecture


MEASURED = measured()

force_configuration = ForcedConfiguration()
"""Takes effect on scans whose inputs have the size that the configuration is for."""


def configurations() -> tuple[ScanConfig, ...]:
    """All configurations that `choose` can return."""
    return tuple(dict.fromkeys((_HALF, _SINGLE, *(x for by_size in MEASURED.values() for x in by_size.values()))))


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


PROGRAMS = 512
"""Programs that keep any present GPU busy; fewer are not cut any finer than needed to reach it."""


class Scan(NamedTuple):
    """Shapes and choices of one pass."""

    rows: int
    """Batch rows."""
    seqlen: int
    heads: int
    headdim: int
    groups: int
    d_state: int
    cu_seqlens: Tensor | None
    config: ScanConfig
    chunk: int
    precision: str
    programs: int
    """Programs to aim for (PROGRAMS)."""

    def blocks(self, block: str) -> tuple[int, int, int, int]:
        """Tiles of at most as many elements as this field of the configuration says: width and number over d_state,
        then over headdim."""
        most, widths = getattr(self.config, block), (self.d_state, self.headdim)
        n, p = (min(most, max(16, triton.next_power_of_2(width))) for width in widths)
        return n, -(-self.d_state // n), p, -(-self.headdim // p)

    @property
    def share(self) -> int:
        """Heads of a group."""
        return self.heads // self.groups

    @property
    def documents(self) -> int:
        return count_documents(self.rows, self.cu_seqlens)

    def per_row(self, span: int) -> int:
        return -(-self.seqlen // span)

    def slots(self, span: int) -> int:
        return count_slots(self.rows, self.seqlen, self.cu_seqlens, span)

    def table(self, span: int) -> Tensor | None:
        return slot_table(self.rows, self.seqlen, self.cu_seqlens, span)

    @property
    def tile(self) -> int:
        return self.config.tile

    @property
    def tiles(self) -> int:
        """Tiles of all chunks."""
        return self.slots(self.chunk) * (self.chunk // self.tile)

    def heads_at_once(self, most: int) -> int:
        """Heads of a group for one program: as many as may be that share evenly and leave enough programs."""
        most = min(most, max(1, self.tiles * self.heads // self.programs))
        return max(d for d in range(1, self.share + 1) if self.share % d == 0 and d <= most)

    @property
    def whole(self) -> bool:
        """Returns whether all chunks are full, so that no token has to be looked for."""
        return self.cu_seqlens is None and self.seqlen % self.chunk == 0

    @property
    def walks(self) -> bool:
        """Returns whether one program can make all tiles of a document for one head, and there are enough of those."""
        _, n_blocks, _, p_blocks = self.blocks("block")
        enough = self.documents * self.heads * p_blocks >= self.programs
        return self.config.walk and enough and n_blocks == 1 and self.seqlen > self.chunk

    @property
    def exact(self) -> bool:
        """Returns whether sums of decays are two floats."""
        return self.config.itemsize == 4

    def factors(self, sides: tuple[ScanSide, ...]) -> int:
        """Rows of the table of sums for each slot, head and direction."""
        gated = any(side.log_decay is not None for side in sides)
        return (2 if self.exact else 1) if gated else 0

    def constants(self, sides: tuple[ScanSide, ...], form: ScanForm, block: str) -> dict[str, Any]:
        """The constants that most kernels share; those of a second direction are False where there is one. `block`: as
        in `blocks`."""
        first, second, _ = one_or_two(sides, form)
        block_n, _, block_p, _ = self.blocks(block)
        return {
            "TWO": len(sides) == 2, "REVERSE": first.reverse, "SHIFT": form.shift,
            "GATED1": first.log_decay is not None, "GATED2": second.log_decay is not None,
            "SCALED1": first.input_scale is not None, "SCALED2": second.input_scale is not None,
            "PACKED": self.cu_seqlens is not None, "WHOLE": self.whole, "CHUNK": self.chunk, "TILE": self.tile,
            "FACTORS": self.factors(sides), "D_STATE": self.d_state, "HEADDIM": self.headdim, "BLOCK_N": block_n,
            "BLOCK_P": block_p, "PRECISION": self.precision, "EXACT": self.exact,
        }  # fmt: skip


def set_up(call: ScanCall, backward: bool) -> tuple[Scan, ScanCall]:
    """The shapes and choices of one pass, and the call with rows that kernels can read as they lie."""
    v, sides, cu_seqlens, chunk_size = call.v, call.sides, call.bounds, call.chunk_size
    rows, seqlen, heads, headdim = v.shape
    groups, d_state = sides[0].q.shape[2:]
    config = choose(v.dtype, seqlen, chunk_size, tiles.architecture(v.device))
    chunk = config.backward_chunk if backward else config.forward_chunk
    if backward and chunk > 2 * config.tile:
        # Gradients are found for one or two tiles of a chunk; one block of so many warps may have all registers.
        tile = chunk // 2
        config = config._replace(
            tile=tile, pair_warps=max(config.pair_warps, tile // 16), pair_registers=255,
            vector_warps=max(config.vector_warps, tile // 16), vector_registers=255,
        )  # fmt: skip
    scan = Scan(
        rows, seqlen, heads, headdim, groups, d_state, cu_seqlens, config, chunk, dot_precision(v.dtype), PROGRAMS
    )  # fmt: skip
    sides = tuple(side._replace(q=rows_in_place(side.q), k=rows_in_place(side.k)) for side in sides)
    return scan, call._replace(v=rows_in_place(v), sides=sides)


def sum_decays(scan: Scan, sides: tuple[ScanSide, ...], triangle: Tensor | None = None) -> Tensor | None:
    """(slots, nheads, directions, factors, chunk) float32, what `decay_sums` stores, with room around it; None without
    any decay. `triangle` (tile, tile), if given, becomes 1 below its diagonal and else 0."""
    factors = scan.factors(sides)
    if not factors:
        return None
    first, second = sides[0], sides[1] if len(sides) == 2 else sides[0]._replace(log_decay=None)
    device = sides[0].q.device
    slots = scan.slots(scan.chunk)
    room = 16
    size = slots * scan.heads * len(sides) * factors * scan.chunk
    sums = torch.empty(size + 2 * room, dtype=torch.float32, device=device)[room:]
    block = heads_of_warp(scan.heads, scan.chunk, 1024)
    tile = 0 if triangle is None else triangle.shape[0]
    launch(
        decay_sums, (slots + (triangle is not None), triton.cdiv(scan.heads, block)),
        sums, triangle, *per_token(first.log_decay), *per_token(second.log_decay),
        scan.table(scan.chunk), scan.seqlen, scan.per_row(scan.chunk), scan.heads, tile, num_warps=1, num_stages=1,
        TWO=len(sides) == 2, REVERSE=first.reverse, GATED1=first.log_decay is not None,
        GATED2=second.log_decay is not None, PACKED=scan.cu_seqlens is not None, CHUNK=scan.chunk, FACTORS=factors,
        BLOCK_H=block, EXACT=scan.exact, TILE=tile,
    )  # fmt: skip
    return sums


def heads_of_warp(heads: int, chunk: int, numbers: int) -> int:
    """Heads that a program of one warp takes together, which looks at so many numbers of each kind: of all tokens of a
    chunk."""
    return min(max(1, numbers // chunk), triton.next_power_of_2(heads))


def per_token(x: Tensor | None) -> tuple:
    """A (batch, seqlen, nheads) or (nheads,) factor as a pointer and three strides."""
    if x is None:
        return None, 0, 0, 0
    return (x, 0, 0, x.stride(0)) if x.dim() == 1 else (x, *x.stride())


def rows(x: Tensor) -> tuple:
    """A tensor (batch, seqlen, heads or groups, ...) as a pointer and three strides."""
    return x, *x.stride()[:3]


def one_or_two(sides: tuple[ScanSide, ...], form: ScanForm) -> tuple[ScanSide, ScanSide, float]:
    """Two directions for kernels that take two, the second empty where there is one, and the weight of their own
    terms."""
    if len(sides) == 1:
        return sides[0], sides[0]._replace(log_decay=None, input_scale=None), 1.0
    return *sides, 0.5 if form.self_term == "mean" else 1.0

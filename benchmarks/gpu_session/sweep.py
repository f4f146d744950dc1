"""Which tile sizes are the fastest on this GPU: about 40 for each heavy kernel of the scans, each checked first.

A kernel depends on a few fields of the scans' configuration; each of its candidates is a configuration with other
values in these fields. It runs both passes of Hydra's scan, which are compared with the PyTorch form, and only if they
are right the kernel's launches are timed. From all times follows the configuration whose kernels together take the
least time, fields that kernels share being the same for all of them. The best few are tried as a whole on other forms,
widths and dtypes; the first one that is right on all of them and faster than the present one is written into
`tiles/<architecture>.json`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from triton.runtime.errors import OutOfResources

from matmix.benchmarks.calls import calls, on_device
from matmix.benchmarks.gpu_session.record import Piece, Record
from matmix.benchmarks.measure import largest_error, median_seconds, tolerance
from matmix.kernels import tiles
from matmix.kernels.launching import Launch, launch, record_launches
from matmix.kernels.semiseparable.chunked.backward import scan_backward
from matmix.kernels.semiseparable.chunked.forward import scan_forward
from matmix.kernels.semiseparable.fused import launch as triton_scan
from matmix.kernels.semiseparable.fused.scan import OPERATION, ScanConfig, checked, force_configuration, usual

Fields = dict[str, int]
TOKENS, TOY_TOKENS = 65_536, 144
TRIED, TOY_CANDIDATES = 6, 2
"""Configurations as a whole that are tried at most, from the fastest on, until one is right everywhere."""
MAIN = "Hydra, one group"
ELSEWHERE = ("Hydra, packed", "Hydra, state 128 x 128", "Hydra, state 16 x 16", "Hydra, short rows",
             "Hydra, concat", "SSD from a state to a state, packed")  # fmt: skip
"""Titles of the calls in which a configuration has to be right as a whole, with so many tokens as above."""
TILES = {2: ((64, 32), (64, 64), (128, 32), (128, 64), (128, 128), (256, 64)),
         4: ((32, 32), (64, 16), (64, 32), (64, 64), (128, 32))}  # fmt: skip
"""By bytes per number, tokens of a chunk and of a tile."""


def _tiles(itemsize: int) -> Iterator[tuple[int, int, int]]:
    """Yields chunks, tiles and warps; 4 warps have too few registers for tiles of 128."""
    return ((*pair, warps) for pair, warps in product(TILES[itemsize], (4, 8)) if pair[1] < 128 or warps == 8)


def _mix(itemsize: int) -> Iterator[tuple[int, ...]]:
    for (chunk, tile, warps), registers, walk in product(_tiles(itemsize), (168, 255), (False, True)):
        yield chunk, tile, 24 if walk else 1, 64, warps, registers, walk


def _states(itemsize: int) -> Iterator[tuple[int, ...]]:
    chunks, tiles = ((64, 128, 256), (64, 128)) if itemsize == 2 else ((32, 64, 128), (32, 64))
    for chunk, tile, block, more in product(chunks, tiles, (64, 32), ((4, 1), (4, 2), (8, 1))):
        yield chunk, tile, block, *more


def _walked_states(itemsize: int) -> Iterator[tuple[int, ...]]:
    """Yields whole states, those of both directions and of the one that no program carries along."""
    return ((*row, walk) for row in _states(itemsize) if row[2] == 64 for walk in (False, True))


def _gradients(itemsize: int) -> Iterator[tuple[int, ...]]:
    """Yields those for chunks of one or two tiles, for which alone gradients are found."""
    half = itemsize == 2
    registers = (128, 168, 200, 232, 255) if half else (128, 168, 255)
    for (chunk, tile, warps), block, most in product(_tiles(itemsize), (64,) if half else (32, 64), registers):
        if chunk <= 2 * tile:
            yield chunk, tile, block, warps, most


class Group(NamedTuple):
    """Launches of one kernel that are timed together."""

    name: str
    kernel: str
    backward: bool
    """In which pass they are."""
    fields: str
    """Those of the configuration that they depend on."""
    rows: Callable[[int], Iterator[tuple[int, ...]]]
    """Yields values of these fields to try, for so many bytes per number."""

    def candidates(self, itemsize: int) -> list[Fields]:
        """Returns each once, the present configuration's first."""
        names = self.fields.split()
        rows = [operator.attrgetter(*names)(usual(itemsize)), *self.rows(itemsize)]
        return [dict(zip(names, row, strict=True)) for row in dict.fromkeys(rows)]


_CARRY = "state_tile block state_warps stages"
_GRADIENTS = "backward_chunk tile {0}_block {0}_warps {0}_registers"
GROUPS = (
    Group("mix", "mix", False, "forward_chunk tile heads block mix_warps mix_registers walk", _mix),
    Group("states forward", "state_pass", False, f"forward_chunk {_CARRY} walk", _walked_states),
    Group("states backward", "state_pass", True, f"backward_chunk {_CARRY}", _states),
    Group("pair_gradients", "pair_gradients", True, _GRADIENTS.format("pair"), _gradients),
    Group("vector_gradients", "vector_gradients", True, _GRADIENTS.format("vector"), _gradients),
)
"""What is swept."""


def fitting(fields: Fields, itemsize: int) -> ScanConfig:
    """Returns the present configuration with other values in some fields; a tile that is then longer than the other
    pass's chunk takes that chunk with it."""
    config = usual(itemsize)._replace(**fields)
    for chunk in ("forward_chunk", "backward_chunk"):
        if getattr(config, chunk) < config.tile and chunk not in fields:
            config = config._replace(**{chunk: config.tile})
    if "tile" not in fields:
        config = config._replace(tile=min(config.tile, config.forward_chunk, config.backward_chunk))
    return checked(config, "sweep")


def run_call(module: Any, title: str, dtype: torch.dtype, record: Record) -> list[Tensor]:
    """Runs both passes of a call of the scans by a module; returns output and gradients."""
    call = next(call for call in calls() if (call.title, call.dtype) == (title, dtype))
    with on_device(record.device, TOY_TOKENS if record.toy else TOKENS):
        return [x for x in tree_leaves(call.run(module)) if isinstance(x, Tensor)]


def run_kernels(title: str, dtype: torch.dtype, record: Record) -> tuple[list[Tensor], list[Launch], list[Launch]]:
    """Runs both passes by the kernels; returns output and gradients, and the launches of each pass."""
    forward: list[Launch] = []

    def backward(*arguments: Any) -> Any:
        forward.extend(launches)
        return triton_scan.backward(*arguments)

    with record_launches(run=True) as launches:
        results = run_call(SimpleNamespace(forward=triton_scan.forward, backward=backward), title, dtype, record)
    return results, forward, launches[len(forward) :]


def wanted(title: str, dtype: torch.dtype, record: Record) -> list[Tensor]:
    """Returns what the PyTorch form gives for the same rounded numbers in float32, or in float64 for float32."""
    exact = torch.float64 if dtype == torch.float32 else torch.float32

    def raised(run: Callable) -> Callable:
        return lambda *arguments: run(*tree_map_only(Tensor, raise_floats, arguments))

    def raise_floats(x: Tensor) -> Tensor:
        return x.to(exact) if x.is_floating_point() else x

    module = SimpleNamespace(forward=raised(scan_forward), backward=raised(scan_backward))
    return run_call(module, title, dtype, record)


def wrong(got: list[Tensor], wanted: list[Tensor], dtype: torch.dtype) -> str:
    """Returns what is wrong with the results of both passes, "" if nothing is."""
    error, bound = largest_error(tuple(got), tuple(wanted)), tolerance(str(dtype).removeprefix("torch."))
    return "" if error <= bound else f"WRONG: error {error:.1e}, allowed {bound:.0e}"


def again(launched: Launch) -> None:
    options = {"num_warps": launched.num_warps, "num_stages": launched.num_stages, **launched.constants}
    launch(launched.kernel, launched.grid, *launched.arguments, **options)


def seconds_of(launches: list[Launch], record: Record) -> float:
    """Returns the sum of the launches' median seconds, each from a cold cache."""
    return sum(median_seconds(partial(again, launched), record.device) for launched in launches)


class Sweep:
    def __init__(self, record: Record, dtype: torch.dtype):
        self.record, self.dtype = record, dtype
        self.name, self.itemsize = str(dtype).removeprefix("torch."), dtype.itemsize
        self.wanted: list[Tensor] = []
        """What the main call should give, computed when it is first needed."""

    def candidates(self, group: Group) -> dict[str, Fields]:
        """Returns a kernel's candidates by the names of their pieces."""
        candidates = group.candidates(self.itemsize)[: TOY_CANDIDATES if self.record.toy else None]
        words = (", ".join(f"{name} {value}" for name, value in fields.items()) for fields in candidates)
        return {f"{self.name}, {group.name}: {text}": fields for text, fields in zip(words, candidates, strict=True)}

    def pieces(self) -> Iterator[Piece]:
        for group in GROUPS:
            for name, fields in self.candidates(group).items():
                dry = partial(self.dry, fitting(fields, self.itemsize), (MAIN,))
                yield Piece(name, partial(self.measure, group, fields), dry)

    def dry(self, config: ScanConfig, titles: tuple[str, ...]) -> None:
        with force_configuration(config), on_device(torch.device("meta"), TOKENS):
            for call in calls():
                if call.title in titles and call.dtype == self.dtype:
                    call.run(triton_scan)

    def fault(self, got: list[Tensor]) -> str:
        self.wanted = self.wanted or wanted(MAIN, self.dtype, self.record)
        return wrong(got, self.wanted, self.dtype)

    def measure(self, group: Group, fields: Fields) -> dict[str, Any]:
        """Returns whether a candidate is right, and the seconds of its kernel's launches."""
        try:
            with force_configuration(fitting(fields, self.itemsize)):
                got, *launches = run_kernels(MAIN, self.dtype, self.record)
        except OutOfResources as error:  # to be expected of some
            return {"status": "left out", "why": str(error), "fields": fields}
        own = [x for x in launches[group.backward] if x.kernel.__name__ == group.kernel]
        if not own:
            return {"status": "left out", "why": f"no launch of {group.kernel} was made", "fields": fields}
        if fault := self.fault(got):
            return {"status": fault, "fields": fields}
        return {"fields": fields, "seconds": seconds_of(own, self.record)}

    def measured(self, group: Group) -> list[tuple[float, Fields]]:
        """Returns seconds and fields of the candidates that are right."""
        results = (self.record.pieces.get(name, {}) for name in self.candidates(group))
        return [(x["seconds"], x["fields"]) for x in results if x.get("status") == "ok"]

    def whole(self, config: ScanConfig, titles: tuple[str, ...]) -> dict[str, Any]:
        """Returns the seconds of both passes with a configuration, if it is right in these calls, too."""
        kept = {"config": config._asdict()}
        with force_configuration(config):
            got, forward, backward = run_kernels(MAIN, self.dtype, self.record)
            if fault := self.fault(got):
                return {"status": fault, **kept}
            for title, dtype in product(titles, {self.dtype, torch.float32 if self.itemsize == 4 else torch.float16}):
                got, *_ = run_kernels(title, dtype, self.record)
                if fault := wrong(got, wanted(title, dtype, self.record), dtype):
                    return {"status": f"{title}, {dtype}: {fault}", **kept}
            return {**kept, "total": seconds_of(forward + backward, self.record)}

    def whole_piece(self, what: str, config: ScanConfig, titles: tuple[str, ...]) -> Piece:
        dry = partial(self.dry, config, (MAIN, *titles))
        return Piece(f"{self.name}, as a whole: {what}", partial(self.whole, config, titles), dry)


def combined(measured: list[list[tuple[float, Fields]]]) -> list[tuple[float, Fields]]:
    """Returns choices of one candidate for each kernel that agree in the fields they share, the fastest together first.

    Of choices that a later kernel cannot tell apart only the fastest stays.
    """
    choices: list[tuple[float, Fields]] = [(0.0, {})]
    for number, candidates in enumerate(measured):
        later = {name for rest in measured[number + 1 :] for _, fields in rest for name in fields}
        best: dict[tuple, tuple[float, Fields]] = {}
        for seconds, fields in choices:
            for more, others in candidates:
                if any(fields.get(name, value) != value for name, value in others.items()):
                    continue
                joined, total = fields | others, seconds + more
                # Chunks and tiles stay apart to the end: others may do where the fastest fails.
                kept = later | {"forward_chunk", "backward_chunk", "tile"}
                key = tuple(sorted((name, value) for name, value in joined.items() if name in kept))
                if key not in best or total < best[key][0]:
                    best[key] = total, joined
        choices = list(best.values())
    whole = [
        x for x in choices if x[1].get("tile", 0) <= min(x[1].get("forward_chunk", 0), x[1].get("backward_chunk", 0))
    ]
    return sorted(whole, key=lambda x: x[0])


def run(record: Record) -> list[str]:
    """Sweeps both sizes of numbers and writes the table; returns what is left."""
    chosen: list[ScanConfig] = []
    # The interpreter does not round to bfloat16.
    for dtype in (torch.float16 if record.toy else torch.bfloat16, torch.float32):
        sweep = Sweep(record, dtype)
        if left := record.work(sweep.pieces(), lambda result: f"{result['seconds'] * 1e6:,.0f} us"):
            return left
        if record.only:
            continue  # the fastest of some candidates is no table
        tried = [sweep.whole_piece("present", usual(sweep.itemsize, tiles.architecture(record.device)), ())]
        for place, (_, fields) in enumerate(combined([sweep.measured(group) for group in GROUPS])[:TRIED], 1):
            titles = ELSEWHERE[:1] if record.toy else ELSEWHERE
            tried.append(sweep.whole_piece(f"place {place}", fitting(fields, sweep.itemsize), titles))
        right = []
        for number, piece in enumerate(tried):
            if left := record.work([piece], lambda result: f"{result['total'] * 1e6:,.0f} us"):
                return left
            if (result := record.pieces.get(piece.name, {})).get("status") == "ok":
                right.append(result)
                if number:
                    break
        if right:
            chosen.append(ScanConfig(**min(right, key=operator.itemgetter("total"))["config"]))
            write_table(record, chosen)
    return []


def write_table(record: Record, chosen: list[ScanConfig], folder: Path = tiles.FOLDER) -> None:
    """Writes the table of this architecture beside the records, and on a GPU also where the kernels read it."""
    name = tiles.architecture(record.device) or "interpreter"
    where = {key: record.content[key] for key in ("device", "date", "commit", "code", "versions")}
    content = tiles.text(name, where, {OPERATION: chosen})
    for place in [record.path.parent, *([folder] if record.device.type == "cuda" else [])]:
        path = place / f"{name}.json"
        path.write_text(content, encoding="utf-8")
        print(f"written to {path}", flush=True)

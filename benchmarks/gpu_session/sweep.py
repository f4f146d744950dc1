"""Which tile sizes are the fastest on this GPU: about 40 for each heavy kernel of the scans, each checked first.

A kernel depends on a few fields of the scans' configuration; each of its candidates is a configuration with other
values in these fields. It runs a forward or a backward pass of Hydra's scan, what this gives is compared with the
PyTorch form in float32, and only if it is right the kernel's launches are timed. From all times follows the
configuration whose kernels together take the least time, fields that kernels share being the same for all of them. The
best few are tried as a whole on other forms, widths and dtypes; the first one that is right on all of them and faster
than the present one is written into `tiles/<architecture>.json`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from matmix.benchmarks.gpu_session.correctness import EXACT, ROUNDED, Check, check, checks, dry, rms_error
from matmix.benchmarks.gpu_session.record import Piece, Record, Session
from matmix.benchmarks.measuring.suite import largest_error, tolerance
from matmix.benchmarks.measuring.timing import Clock, quartiles
from matmix.kernels import tiles
from matmix.kernels.launching import Launch, launch, record_launches
from matmix.kernels.semiseparable.chunked.backward import scan_backward
from matmix.kernels.semiseparable.chunked.forward import scan_forward
from matmix.kernels.semiseparable.form import ScanForm, ScanSide
from matmix.kernels.semiseparable.fused.scan import (
    OPERATION,
    ScanConfig,
    checked,
    force_configuration,
    usual,
)

Fields = dict[str, int]


class Group(NamedTuple):
    """Launches that are timed together."""

    name: str
    kernel: str
    backward: bool
    """In which pass they are."""
    fields: tuple[str, ...]
    """Those that they depend on."""
    half: Callable[[], Iterator[tuple[int, ...]]]
    """Values of these fields to try, for 2 bytes per number."""
    single: Callable[[], Iterator[tuple[int, ...]]]
    """The same for 4 bytes."""

    def candidates(self, itemsize: int) -> list[Fields]:
        """Each once, the present configuration's first."""
        now = usual(itemsize)
        rows = [tuple(getattr(now, name) for name in self.fields), *(self.half if itemsize == 2 else self.single)()]
        return [dict(zip(self.fields, row, strict=True)) for row in dict.fromkeys(rows)]


HALF_TILES = ((64, 32), (64, 64), (128, 32), (128, 64), (128, 128), (256, 64))
"""Tokens of a chunk and of a tile."""
SINGLE_TILES = ((32, 32), (64, 16), (64, 32), (64, 64), (128, 32))


def _half_tiles() -> Iterator[tuple[int, int, int]]:
    """Chunks, tiles and warps; 4 warps have too few registers for tiles of 128."""
    for chunk, tile in HALF_TILES:
        for warps in (8,) if tile == 128 else (4, 8):
            yield chunk, tile, warps
    yield 256, 32, 4


def _half_mix() -> Iterator[tuple[int, ...]]:
    for chunk, tile, warps in _half_tiles():
        for registers in (168, 255):
            yield chunk, tile, 1, 64, warps, registers, False
    for registers in (168, 255):
        yield 128, 64, 24, 64, 4, registers, False
        yield 128, 64, 2, 64, 4, registers, False
        yield 128, 64, 1, 32, 4, registers, False
        for chunk, tile in HALF_TILES:
            yield chunk, tile, 24, 64, 8 if tile == 128 else 4, registers, True


def _single_mix() -> Iterator[tuple[int, ...]]:
    for chunk, tile in SINGLE_TILES:
        for block in (32, 64):
            for warps in (4, 8):
                for registers in (168, 255):
                    yield chunk, tile, 1, block, warps, registers, False
    for chunk, tile in SINGLE_TILES[1:]:
        yield chunk, tile, 1, 64, 4, 255, True


def _half_states() -> Iterator[tuple[int, ...]]:
    for chunk in (64, 128, 256):
        for tile, block in ((64, 64), (128, 64), (64, 32), (128, 32)):
            for warps, stages in ((4, 1), (4, 2), (8, 1)):
                yield chunk, tile, block, warps, stages
        yield chunk, 64, 64, 4, 3


def _walked(states: Callable[[], Iterator[tuple[int, ...]]]) -> Callable[[], Iterator[tuple[int, ...]]]:
    """Whole states, those of both directions and of the one that no program carries along."""
    return lambda: ((*row, walk) for row in states() if row[2] == 64 for walk in (False, True))


def _single_states() -> Iterator[tuple[int, ...]]:
    for chunk in (32, 64, 128):
        for tile in (32, 64):
            for block in (32, 64):
                for warps, stages in ((4, 1), (4, 2), (8, 1)):
                    yield chunk, tile, block, warps, stages


def _half_gradients() -> Iterator[tuple[int, ...]]:
    """Gradients are found for chunks of one or two tiles."""
    for chunk, tile, warps in _half_tiles():
        if chunk <= 2 * tile:
            for registers in (128, 168, 200, 232, 255):
                yield chunk, tile, 64, warps, registers
    for registers in (168, 255):
        yield 128, 64, 32, 4, registers
        yield 64, 64, 32, 4, registers


def _single_gradients() -> Iterator[tuple[int, ...]]:
    for chunk, tile in SINGLE_TILES:
        if chunk <= 2 * tile:
            for block in (32, 64):
                for warps in (4, 8):
                    for registers in (128, 168, 255):
                        yield chunk, tile, block, warps, registers


_STATES = ("state_tile", "block", "state_warps", "stages")
GROUPS = (
    Group(
        "mix", "mix", False,
        ("forward_chunk", "tile", "heads", "block", "mix_warps", "mix_registers", "walk"), _half_mix, _single_mix,
    ),
    Group(
        "states forward", "state_pass", False, ("forward_chunk", *_STATES, "walk"),
        _walked(_half_states), _walked(_single_states),
    ),
    Group("states backward", "state_pass", True, ("backward_chunk", *_STATES), _half_states, _single_states),
    Group(
        "pair_gradients", "pair_gradients", True,
        ("backward_chunk", "tile", "pair_block", "pair_warps", "pair_registers"), _half_gradients, _single_gradients,
    ),
    Group(
        "vector_gradients", "vector_gradients", True,
        ("backward_chunk", "tile", "vector_block", "vector_warps", "vector_registers"),
        _half_gradients, _single_gradients,
    ),
)  # fmt: skip
"""What is swept."""
TRIED = 6
"""Configurations as a whole that are tried at most, from the fastest on, until one is right everywhere."""
ELSEWHERE = (
    "quasiseparable_scan, Hydra, packed, from states",
    "quasiseparable_scan, LION",
    "quasiseparable_scan, Hydra, odd widths",
    "quasiseparable_scan, Hydra, wide states",
    "quasiseparable_scan, Hydra, one chunk",
    "semiseparable_scan, from a state to a state",
)
"""Checks of `correctness` that a configuration has to pass as a whole."""
TOY_CANDIDATES = 2


def fitting(fields: Fields, itemsize: int) -> ScanConfig:
    """The present configuration with other values in some fields; a tile that is then longer than the other pass's
    chunk takes that chunk with it."""
    config = usual(itemsize)._replace(**fields)
    for chunk in ("forward_chunk", "backward_chunk"):
        if getattr(config, chunk) < config.tile and chunk not in fields:
            config = config._replace(**{chunk: config.tile})
    if "tile" not in fields:
        config = config._replace(tile=min(config.tile, config.forward_chunk, config.backward_chunk))
    return checked(config, "sweep")


class Scan(NamedTuple):
    """Hydra's scan, between its convolution and its norm, and what it should give."""

    v: Tensor
    sides: tuple[ScanSide, ...]
    diagonal: Tensor
    dy: Tensor
    wanted: dict[bool, tuple[Tensor, ...]]
    """By pass (whether it is backward): output, or all gradients."""

    def run(self, backward: bool) -> tuple[Tensor, ...]:
        """One pass by the kernels."""
        module = importlib.import_module("matmix.kernels.semiseparable.fused.launch")
        return self._by(module.backward if backward else module.forward, backward)

    def _by(self, function: Callable, backward: bool) -> tuple[Tensor, ...]:
        form = ScanForm(shift=True)
        if not backward:
            return (function(self.v, self.sides, self.diagonal, form, None, None, False).y,)
        dv, sides, ddiagonal = function(
            self.dy, None, None, self.v, self.sides, self.diagonal, form, None, None
        )  # fmt: skip
        return dv, *(x for side in sides for x in side if x is not None), ddiagonal

    def reference(self) -> Scan:
        """With what the PyTorch form gives for the same numbers, in float32; in float64 for float32."""
        exact = torch.float64 if self.v.dtype == torch.float32 else torch.float32
        v, diagonal, dy = (x.to(exact) for x in (self.v, self.diagonal, self.dy))
        sides = tuple(
            ScanSide(*(x if x is None or x is False or x is True else x.to(exact) for x in side)) for side in self.sides
        )
        precise = Scan(v, sides, diagonal, dy, {})
        wanted = {False: precise._by(scan_forward, False), True: precise._by(scan_backward, True)}
        return self._replace(wanted=wanted)


def make_scan(dtype: torch.dtype, device: torch.device, toy: bool) -> Scan:
    """The shapes of the Hydra encoder, at 65,536 tokens."""
    torch.manual_seed(0)
    rows, seqlen, heads, width = (1, 144, 1, 16) if toy else (32, 2048, 24, 64)
    like, exact = {"device": device, "dtype": dtype}, {"device": device}
    v, dy = (torch.randn(rows, seqlen, heads, width, **like) for _ in range(2))
    sides = []
    for reverse in (False, True):
        q, k = (torch.randn(rows, seqlen, 1, width, **like) * width**-0.25 for _ in range(2))
        # Step sizes as a layer begins with: between 0.001 and 0.1.
        steps = torch.exp(torch.rand(rows, seqlen, heads, **exact) * 4.6 - 6.9)
        sides.append(ScanSide(q, k, -1.5 * steps, steps, None, reverse))
    diagonal = 1 + 0.1 * torch.randn(rows, seqlen, heads, **exact)
    return Scan(v, tuple(sides), diagonal, dy, {})


def what_differs(got: tuple[Tensor, ...], wanted: tuple[Tensor, ...], dtype: torch.dtype) -> str:
    """What is wrong with the results of a pass; "" if nothing is."""
    bound = EXACT if dtype.itemsize == 4 else 2 * ROUNDED
    rms = max(rms_error(a, b) for a, b in zip(got, wanted, strict=True))
    largest = largest_error(got, wanted)
    if rms <= bound and largest <= tolerance(dtype):
        return ""
    return f"WRONG: error {rms:.1e} (allowed {bound:.0e}), the largest {largest:.1e} ({tolerance(dtype):.0e})"


def again(found: Launch) -> None:
    """The same launch once more."""
    launch(
        found.kernel, found.grid, *found.arguments, num_warps=found.num_warps, num_stages=found.num_stages,
        **found.constants,
    )  # fmt: skip


def seconds_of(launches: list[Launch], clock: Clock, rounds: int) -> float:
    """Of the launches one after the other, each from a cold cache: the sum of their medians."""
    for found in launches:
        again(found)
    return sum(quartiles([clock.seconds(partial(again, x))[0] for _ in range(rounds)]).median for x in launches)


class Sweep:
    """The sweep of one dtype."""

    def __init__(self, session: Session, record: Record, dtype: torch.dtype):
        self.session, self.record, self.dtype = session, record, dtype
        self.name = str(dtype).removeprefix("torch.")
        self.itemsize = dtype.itemsize
        self.rounds = 1 if session.toy else 15
        self._made: Scan | None = None
        self._clock: Clock | None = None

    @property
    def scan(self) -> Scan:
        """Made when it is first needed."""
        if self._made is None:
            self._made = make_scan(self.dtype, self.session.device, self.session.toy).reference()
        return self._made

    @property
    def clock(self) -> Clock:
        """Made when it is first needed."""
        self._clock = self._clock or Clock(self.session.device)
        return self._clock

    def candidates(self, group: Group) -> dict[str, Fields]:
        """By the name of their piece."""
        found = group.candidates(self.itemsize)
        if self.session.toy:
            found = found[:TOY_CANDIDATES]
        words = (", ".join(f"{name} {value}" for name, value in fields.items()) for fields in found)
        return {f"{self.name}, {group.name}: {text}": fields for text, fields in zip(words, found, strict=True)}

    def pieces(self) -> Iterator[Piece]:
        """All candidates of all kernels."""
        for group in GROUPS:
            for name, fields in self.candidates(group).items():
                yield Piece(name, partial(self.measure, group, fields), partial(self.dry, group, fields))

    def dry(self, group: Group, fields: Fields) -> None:
        """Only the launches."""
        with force_configuration(fitting(fields, self.itemsize)):
            self.scan.run(group.backward)

    def measure(self, group: Group, fields: Fields) -> dict[str, Any]:
        """One candidate: whether it is right, and the seconds of its kernel's launches."""
        try:
            with force_configuration(fitting(fields, self.itemsize)), record_launches(run=True) as launches:
                got = self.scan.run(group.backward)
        except OutOfResources as error:  # to be expected of some
            return {"status": "left out", "why": str(error), "fields": fields}
        own = [x for x in launches if x.kernel.__name__ == group.kernel]
        if not own:
            raise RuntimeError(f"no launch of {group.kernel} was made")
        if wrong := what_differs(got, self.scan.wanted[group.backward], self.dtype):
            return {"status": wrong, "fields": fields}
        return {"fields": fields, "seconds": seconds_of(own, self.clock, self.rounds)}

    def measured(self, group: Group) -> list[tuple[float, Fields]]:
        """Seconds and fields of the candidates that are right."""
        found = (self.record.pieces.get(name, {}) for name in self.candidates(group))
        return [(x["seconds"], x["fields"]) for x in found if x.get("status") == "ok"]

    def whole(self, config: ScanConfig, everywhere: bool) -> dict[str, Any]:
        """Seconds of all launches of both passes with a configuration; whether it is right there and, if asked for, on
        other forms."""
        seconds = {}
        for backward in (False, True):
            with force_configuration(config), record_launches(run=True) as launches:
                got = self.scan.run(backward)
            if wrong := what_differs(got, self.scan.wanted[backward], self.dtype):
                return {"status": wrong, "config": config._asdict()}
            seconds["backward" if backward else "forward"] = seconds_of(launches, self.clock, self.rounds)
        with force_configuration(config):
            for case, dtype in self.elsewhere() if everywhere else ():
                found = check(case, dtype, self.session.device)
                if (status := found.get("status", "ok")) != "ok":
                    return {"status": f"{case.name}, {dtype}: {status}", "config": config._asdict()}
        return {"config": config._asdict(), "seconds": seconds, "total": sum(seconds.values())}

    def dry_whole(self, config: ScanConfig, everywhere: bool) -> None:
        """Only the launches."""
        with force_configuration(config):
            for backward in (False, True):
                self.scan.run(backward)
            for case, dtype in self.elsewhere() if everywhere else ():
                dry(case, dtype, self.session.device)

    def whole_piece(self, what: str, config: ScanConfig, everywhere: bool) -> Piece:
        """Its measurement as a piece."""
        rest = config, everywhere
        return Piece(f"{self.name}, as a whole: {what}", partial(self.whole, *rest), partial(self.dry_whole, *rest))

    def elsewhere(self) -> Iterator[tuple[Check, torch.dtype]]:
        """Other forms and widths, in every dtype of this size."""
        dtypes = (torch.float32,) if self.itemsize == 4 else (torch.bfloat16, torch.float16)
        for case in checks(self.session.toy):
            if case.name in (ELSEWHERE[:1] if self.session.toy else ELSEWHERE):
                for dtype in dtypes[-1:] if self.session.toy else dtypes:
                    yield case, dtype


def combined(measured: list[list[tuple[float, Fields]]]) -> list[tuple[float, Fields]]:
    """Choices of one candidate for each kernel that agree in the fields they share, the fastest together first.

    Of choices that a later kernel cannot tell apart only the fastest stays.
    """
    found: list[tuple[float, Fields]] = [(0.0, {})]
    for number, candidates in enumerate(measured):
        later = {name for rest in measured[number + 1 :] for _, fields in rest for name in fields}
        best: dict[tuple, tuple[float, Fields]] = {}
        for seconds, fields in found:
            for more, others in candidates:
                if any(fields.get(name, value) != value for name, value in others.items()):
                    continue
                joined, total = fields | others, seconds + more
                # Chunks and tiles stay apart to the end: others may do where the fastest fails.
                kept = later | {"forward_chunk", "backward_chunk", "tile"}
                key = tuple(sorted((name, value) for name, value in joined.items() if name in kept))
                if key not in best or total < best[key][0]:
                    best[key] = total, joined
        found = list(best.values())
    whole = [
        x for x in found if x[1].get("tile", 0) <= min(x[1].get("forward_chunk", 0), x[1].get("backward_chunk", 0))
    ]
    return sorted(whole, key=lambda x: x[0])


def run(session: Session) -> list[str]:
    """The part; returns what is left."""
    record = session.record("sweep", tiles=False)
    chosen: list[ScanConfig] = []
    # The interpreter does not round to bfloat16.
    for dtype in (torch.float16 if session.toy else torch.bfloat16, torch.float32):
        sweep = Sweep(session, record, dtype)
        if left := session.work(record, sweep.pieces(), lambda found: f"{found['seconds'] * 1e6:,.0f} us"):
            return left
        if session.only:
            continue  # the fastest of some candidates is no table
        present = sweep.whole_piece("present", usual(sweep.itemsize, tiles.architecture(session.device)), False)
        ranked = combined([sweep.measured(group) for group in GROUPS])
        places = [
            sweep.whole_piece(f"place {place}", fitting(fields, sweep.itemsize), True)
            for place, (_, fields) in enumerate(ranked[:TRIED], 1)
        ]
        tried = []
        for piece in (present, *places):
            if left := session.work(record, [piece], lambda found: f"{found['total'] * 1e6:,.0f} us"):
                return left
            tried.append(record.pieces.get(piece.name, {}))
            if piece is not present and tried[-1].get("status") == "ok":
                break
        right = [x for x in tried if x.get("status") == "ok"]
        if right:
            chosen.append(ScanConfig(**min(right, key=lambda x: x["total"])["config"]))
            write_table(session, record, chosen)
    return []


def write_table(session: Session, record: Record, chosen: list[ScanConfig], folder: Path = tiles.FOLDER) -> None:
    """The table of this architecture: beside the records, and on a GPU also where the kernels read it."""
    name = tiles.architecture(session.device) or "interpreter"
    where = {key: record.content[key] for key in ("device", "date", "commit", "code", "versions")}
    content = tiles.text(name, where, {OPERATION: chosen})
    for place in [session.out, *([folder] if session.device.type == "cuda" else [])]:
        path = place / f"{name}.json"
        path.write_text(content, encoding="utf-8")
        print(f"written to {path}", flush=True)

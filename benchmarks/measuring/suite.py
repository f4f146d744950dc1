"""Measures the candidates of one case against each other: first whether they agree, then how long they take."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from matmix.benchmarks.measuring.floors import Floor, floor_of
from matmix.benchmarks.measuring.settings import Settings
from matmix.benchmarks.measuring.timing import Clock, quartiles

PASSES = ("forward", "backward", "both")
LEAST_ROUNDS = 5


@dataclass(kw_only=True, slots=True)
class Candidate:
    """One way to compute something, with gradients."""

    name: str
    run: Callable[[], Tensor] | None = None
    """The forward pass."""
    leaves: list[Tensor] = field(default_factory=list)
    """What it takes the gradients of."""
    cotangent: Tensor | None = None
    """Of what `run` returns; None for a scalar."""
    compared: bool = True
    """It should give the numbers that ours gives; if not, it is other mathematics at the same size."""
    floor: Floor | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    """What else the record says of it."""
    missing: str = ""
    """Why it cannot run here; it is then only named."""


@dataclass(kw_only=True, slots=True)
class Case:
    """One size at which candidates meet; the first candidate is ours."""

    label: str
    seqlen: int
    batch: int
    candidates: list[Candidate]
    kind: str = ""
    """Cases of one kind form a line in the picture."""
    note: str = ""
    """Said below the label."""
    dtype: torch.dtype | None = None
    """What it is computed in, if not in the settings' dtype."""


def on_leaves(
    name: str,
    op: Callable[..., Tensor],
    leaves: list[Tensor],
    cotangent: Tensor,
    *,
    compared: bool = True,
    output_read: bool = False,
) -> Candidate:
    """A candidate that is a function of tensors, all differentiated; `output_read` as for `floor_of`."""
    return Candidate(
        name=name,
        run=lambda: op(*leaves),
        leaves=leaves,
        cotangent=cotangent,
        compared=compared,
        floor=floor_of(leaves, cotangent, output_read=output_read),
    )


def both_passes(candidate: Candidate) -> tuple[Tensor, ...]:
    """Output and gradients."""
    y = candidate.run()
    return y.detach(), *gradients(candidate, y)


def gradients(candidate: Candidate, y: Tensor) -> tuple[Tensor, ...]:
    """The backward pass."""
    return torch.autograd.grad(y, candidate.leaves, candidate.cotangent)


def largest_error(got: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> float:
    """The largest difference in output or a gradient, over the largest value of that tensor."""

    def of(a: Tensor, b: Tensor) -> float:
        scale = b.abs().max().float().clamp(min=torch.finfo(torch.float32).tiny)
        error = ((a.float() - b.float()).abs().max() / scale).item()
        return error if error == error else float("inf")  # NaN must not pass for small

    return max(of(a, b) for a, b in zip(got, wanted, strict=True))


def tolerance(dtype: torch.dtype) -> float:
    """Beyond this a candidate is said to differ: peers round intermediate results to their inputs' dtype."""
    return 0.01 if dtype == torch.float32 else 0.05


def measure_case(case: Case, clock: Clock, settings: Settings) -> list[dict[str, Any]]:
    """One record per candidate, in their order. Ours must work; a peer that fails is said to have failed."""
    records = [{"candidate": c.name, "compared": c.compared, "status": "ok"} | c.facts for c in case.candidates]
    ready: list[tuple[Candidate, dict[str, Any]]] = []
    wanted = None
    for candidate, record in zip(case.candidates, records, strict=True):
        if candidate.missing:
            record["status"] = candidate.missing
            continue

        def first_look(candidate: Candidate = candidate, record: dict[str, Any] = record) -> None:
            nonlocal wanted
            found = both_passes(candidate)
            if candidate is case.candidates[0]:
                wanted = found
            elif candidate.compared and wanted is not None:
                error = largest_error(found, wanted)
                record["error"] = error if math.isfinite(error) else None
                record["agrees"] = error <= tolerance(case.dtype or settings.dtype)
            del found
            record["peak_bytes"] = clock.peak_bytes(lambda: both_passes(candidate))

        if survives(first_look, record, ours=candidate is case.candidates[0]):
            ready.append((candidate, record))
    wanted = None
    _take_turns(ready, clock, settings)
    for candidate, record in ready:
        if record["status"] == "ok" and candidate.floor is not None:
            record["floor_bytes"] = {name: getattr(candidate.floor, name) for name in PASSES}
    return records


def _take_turns(ready: list[tuple[Candidate, dict[str, Any]]], clock: Clock, settings: Settings) -> None:
    """Round by round, so that all meet the machine in the same condition."""
    times: dict[str, dict[str, list[float]]] = {c.name: {name: [] for name in PASSES} for c, _ in ready}
    spent = dict.fromkeys(times, 0.0)
    for turn in range(settings.rounds):
        for candidate, record in ready:
            if record["status"] != "ok" or (turn >= LEAST_ROUNDS and spent[candidate.name] > settings.budget):
                continue
            mine = times[candidate.name]

            def one_turn(candidate: Candidate = candidate, mine: dict[str, list[float]] = mine) -> None:
                forward, y = clock.seconds(candidate.run)
                backward = clock.seconds(lambda y=y: gradients(candidate, y))[0]
                del y
                both = clock.seconds(lambda: both_passes(candidate))[0]
                for name, seconds in zip(PASSES, (forward, backward, both), strict=True):
                    mine[name].append(seconds)
                spent[candidate.name] += forward + backward + both

            survives(one_turn, record, ours=candidate.name == ready[0][0].name)
    for candidate, record in ready:
        if record["status"] == "ok":
            record["seconds"] = {name: quartiles(values)._asdict() for name, values in times[candidate.name].items()}


def survives(step: Callable[[], None], record: dict[str, Any], *, ours: bool = False) -> bool:
    """Run a step; what a peer runs into is written down instead of ending the program."""
    try:
        step()
        return True
    except torch.OutOfMemoryError:
        record["status"] = "out of memory"
    except Exception as error:
        if ours:
            raise
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        record["status"] = f"failed: {first[:160]}"
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return False


def add_ratios(records: list[dict[str, Any]], copy_bandwidth: float, tokens: int) -> None:
    """For each pass of what was measured: achieved bandwidth and time over floor (tokens per second for what has no
    floor), and time over ours."""
    ours = records[0].get("seconds")
    for record in records:
        if "seconds" not in record:
            continue
        medians = {name: record["seconds"][name]["median"] for name in PASSES}
        if "floor_bytes" in record:
            floor = record["floor_bytes"]
            record["bandwidth"] = {name: floor[name] / medians[name] for name in PASSES}
            record["over_floor"] = {name: medians[name] * copy_bandwidth / floor[name] for name in PASSES}
        else:
            record["tokens_per_second"] = {name: tokens / medians[name] for name in PASSES}
        if ours:
            record["over_ours"] = {name: medians[name] / ours[name]["median"] for name in PASSES}


def run_cases(
    cases: Iterable[Case], settings: Settings, clock: Clock, bandwidth: float, show: Callable[[Case, list], None]
) -> list[dict[str, Any]]:
    """Measure case after case; `show` is called with each as soon as it is done."""
    done = []
    for case in cases:
        # Candidates made by torch.compile are for one shape each.
        torch.compiler.reset()
        case.candidates = [c for c in case.candidates if settings.wanted(c.name)]
        records = measure_case(case, clock, settings)
        add_ratios(records, bandwidth, case.batch * case.seqlen)
        show(case, records)
        dtype = str(case.dtype or settings.dtype).removeprefix("torch.")
        where = {"label": case.label, "kind": case.kind, "seqlen": case.seqlen, "batch": case.batch, "dtype": dtype}
        done.append(where | {"candidates": records})
    return done

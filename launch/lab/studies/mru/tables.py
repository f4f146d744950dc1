"""The study's tables, in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from matmix.kernels.mru.constructions import BOUNDED_CONSTRUCTIONS, state_elements
from matmix.launch.lab.studies.mru.grid import FOLLOWED, PART, Result, best_runs
from matmix.launch.lab.studies.mru.growth import LENGTH, ORDER
from matmix.launch.lab.studies.mru.variants import NONE, RATES


def tables(found: dict[str, Any]) -> str:
    """All for which there are results. found: part -> results by key."""
    texts = [f"**{data}**\n\n{table_of_grid(found, data)}" for data in datasets(found)]
    if found["growth"]:
        texts.append(f"**Growth**\n\n{table_of_growth(found)}")
    if found["speed"]:
        texts.append(f"**Speed**\n\n{table_of_speed(found)}")
    return "\n\n".join(texts)


def datasets(found: dict[str, Any]) -> list[str]:
    """Names of the datasets that there are runs on."""
    return sorted({result["data"] for result in found[PART].values()})


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """In Markdown."""
    return "\n".join("| " + " | ".join(row) + " |" for row in [columns, ["---"] * len(columns), *rows])


def number(value: float | None, digits: int = 3, missing: str = "") -> str:
    return missing if value is None else f"{value:.{digits}f}"


def seeds_of(found: dict[str, Any], best: Result) -> list[float | None]:
    """Losses of all seeds at the rate of a best run, None for those that are no number."""
    same = [
        result
        for result in found[PART].values()
        if all(result[name] == best[name] for name in ("data", "variant", "rate"))
    ]
    return [result["loss"] for result in sorted(same, key=lambda result: result["seed"])]


def mean(losses: Sequence[float | None]) -> float | None:
    """None where one is."""
    known = [loss for loss in losses if loss is not None]
    return sum(known) / len(known) if known and len(known) == len(losses) else None


def ranked(found: dict[str, Any], data: str) -> list[str]:
    """Variants with runs on a dataset, the lowest mean loss over seeds first."""
    best = {variant: result for (name, variant), result in best_runs(found[PART]).items() if name == data}

    def loss(variant: str) -> float:
        average = mean(seeds_of(found, best[variant])) if variant in best else None
        return float("inf") if average is None else average

    return sorted({result["variant"] for result in found[PART].values() if result["data"] == data}, key=loss)


def losses_text(losses: Sequence[float | None]) -> str:
    """Mean and sample standard deviation over seeds, and each."""
    if len(losses) < 2:
        return number(mean(losses), missing="NaN")
    each = ", ".join(number(loss, missing="NaN") for loss in losses)
    average = mean(losses)
    if average is None:
        return f"NaN ({each})"
    return f"{average:.3f} ± {statistics.stdev(losses):.3f} ({each})"


def table_of_grid(found: dict[str, Any], data: str) -> str:
    """What every variant learned on a dataset."""
    best = best_runs(found[PART])
    control = best.get((data, NONE))
    without = mean(seeds_of(found, control)) if control else None
    beyond = {result["variant"]: result for result in found["beyond"].values()} if data == FOLLOWED else {}
    rows = []
    for variant in ranked(found, data):
        first = sorted(
            (
                result
                for result in found[PART].values()
                if (result["data"], result["variant"], result["seed"]) == (data, variant, 0)
            ),
            key=lambda result: result["rate"],
        )
        chosen = best.get((data, variant))
        shown = chosen or first[0]
        losses = seeds_of(found, shown)
        average = mean(losses)
        row = [
            variant,
            f"{shown['parameters']:,}",
            f"{chosen['rate']:g}" if chosen else "none",
            losses_text(losses),
            number(without - average if without is not None and average is not None else None),
            number(shown["context_gain"]),
            number(shown["mixing_gain"]),
            ", ".join(f"step {run['first_nan']} at {run['rate']:g}" for run in first if run["first_nan"]) or "none",
            number(shown["log_norm_max"], 1),
            " / ".join(number(run["loss"], missing="NaN") for run in first),
        ]
        if beyond:
            row.append(beyond_text(beyond[variant]) if variant in beyond else "")
        rows.append(row)
    columns = ["variant", "parameters", "best rate", "validation loss", f"gain over {NONE}", "context gain"]
    columns += ["mixing gain", "first NaN (seed 0)", "largest log-norm in training"]
    columns.append(f"seed 0 at {' / '.join(f'{rate:g}' for rate in RATES)}")
    if beyond:
        columns.append("loss beyond training length (largest log-norm there)")
    return table(columns, rows)


def beyond_text(result: Result) -> str:
    """The loss of the last quarter, and the largest log-norm of any state on the way."""
    if result["overflow"] is not None:
        return f"NaN (overflow at token {result['overflow']:,})"
    norms = result["log_norm_max"]
    largest = None if None in norms else max(norms, default=None)
    return number(result["last_quarter"], missing="NaN") + (f" ({largest:.1f})" if largest is not None else "")


def table_of_growth(found: dict[str, Any]) -> str:
    """Norms along random tokens."""
    rows = []
    for name, result in found["growth"].items():
        construction = name.partition(",")[0]
        bounded = "yes" if construction in BOUNDED_CONSTRUCTIONS else "no"
        ends = [
            f"overflow at token {curve['overflow']:,}"
            if curve["overflow"] is not None
            else number(curve["mean"][-1], 2, "overflow of the norm")
            for curve in result["sizes"].values()
        ]
        rows.append([name, bounded, str(state_elements(construction, ORDER)), *ends])
    stds = next(iter(found["growth"].values()))["sizes"]
    columns = ["construction, input", "bounded", f"elements, order {ORDER}"]
    return table([*columns, *(f"mean log-norm at {LENGTH:,}, elements of std {std}" for std in stds)], rows)


def table_of_speed(found: dict[str, Any]) -> str:
    """Time of a layer."""
    fastest = min(result["together_ms"] for result in found["speed"].values())
    rows = []
    for name, result in sorted(found["speed"].items(), key=lambda item: item[1]["together_ms"]):
        times = [result[f"{part}_ms"] for part in ("forward", "backward", "together")]
        rows.append([name, *(f"{time:,.0f}" for time in times), f"{times[-1] / fastest:.2f}"])
    return table(["layer", "forward, ms", "backward, ms", "together, ms", "x the fastest"], rows)

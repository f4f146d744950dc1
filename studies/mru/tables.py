"""The study's tables, in Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matmix.kernels.mru.constructions import BOUNDED_CONSTRUCTIONS, state_elements
from matmix.launch.many.scores import spread
from matmix.studies.mru.grid import FOLLOWED, PART, Result, best_runs
from matmix.studies.mru.growth import LENGTH, ORDER
from matmix.studies.mru.variants import NONE, RATES


def tables(found: dict[str, Any]) -> str:
    """Returns all tables for which there are results. found: part -> results by key."""
    texts = [f"**{data}**\n\n{table_of_grid(found, data)}" for data in datasets(found)]
    parts = {"Growth": table_of_growth, "Speed": table_of_speed}
    texts += [f"**{part}**\n\n{make(found)}" for part, make in parts.items() if found[part.lower()]]
    return "\n\n".join(texts)


def datasets(found: dict[str, Any]) -> list[str]:
    """Returns names of the datasets that there are runs on."""
    return sorted({result["data"] for result in found[PART].values()})


def table(rows: Sequence[dict[str, str]]) -> str:
    """Returns a table in Markdown. rows: heading of each column -> text, with the same headings in all."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(row.values() for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def number(value: float | None, digits: int = 3) -> str:
    """Returns empty where there is no value; "NaN" for one that is no number."""
    return "" if value is None else "NaN" if math.isnan(value) else f"{value:.{digits}f}"


def runs_of(found: dict[str, Any], **facts: Any) -> list[Result]:
    """Runs of the grid with these facts, such as their variant, by rate and seed."""
    same = [result for result in found[PART].values() if facts.items() <= result.items()]
    return sorted(same, key=lambda result: (result["rate"], result["seed"]))


def loss_of(result: Result) -> float:
    """Returns the validation loss of a run, NaN of one that diverged."""
    return math.nan if result["loss"] is None else result["loss"]


def seeds_of(found: dict[str, Any], best: Result) -> list[float]:
    """Returns losses of all seeds at the rate of a best run."""
    return [loss_of(run) for run in runs_of(found, **{name: best[name] for name in ("data", "variant", "rate")})]


def ranked(found: dict[str, Any], data: str) -> list[str]:
    """Variants with runs on a dataset, the lowest mean loss over seeds first, those with a loss of NaN last."""
    best = best_runs(found[PART])

    def loss(variant: str) -> float:
        mean = spread(seeds_of(found, best[data, variant])).mean if (data, variant) in best else math.nan
        return math.inf if math.isnan(mean) else mean

    return sorted(dict.fromkeys(run["variant"] for run in runs_of(found, data=data)), key=loss)


def losses_text(losses: Sequence[float]) -> str:
    """Returns mean and sample standard deviation over seeds, and each."""
    over = spread(losses)
    text = number(over.mean) if over.deviation is None else f"{over.mean:.3f} ± {over.deviation:.3f}"
    return text if over.count == 1 else f"{text} ({', '.join(map(number, losses))})"


def table_of_grid(found: dict[str, Any], data: str) -> str:
    """Returns the table of the losses and gains of all variants on a dataset."""
    best = best_runs(found[PART])
    control = best.get((data, NONE))
    beyond = {result["variant"]: result for result in found["beyond"].values()} if data == FOLLOWED else {}
    rows = []
    for variant in ranked(found, data):
        first = runs_of(found, data=data, variant=variant, seed=0)
        chosen = best.get((data, variant))
        shown = chosen or first[0]
        losses = seeds_of(found, shown)
        gain = spread(seeds_of(found, control)).mean - spread(losses).mean if control else math.nan
        nans = [f"step {run['first_nan']} at {run['rate']:g}" for run in first if run["first_nan"]]
        row = {
            "variant": variant,
            "parameters": f"{shown['parameters']:,}",
            "best rate": f"{chosen['rate']:g}" if chosen else "none",
            "validation loss": losses_text(losses),
            f"gain over {NONE}": "" if math.isnan(gain) else number(gain),
            "context gain": number(shown["context_gain"]),
            "mixing gain": number(shown["mixing_gain"]),
            "first NaN (seed 0)": ", ".join(nans) or "none",
            "largest log-norm in training": number(shown["log_norm_max"], 1),
            f"seed 0 at {' / '.join(f'{rate:g}' for rate in RATES)}": " / ".join(number(loss_of(run)) for run in first),
        }
        if beyond:
            row["loss beyond training length (largest log-norm there)"] = beyond_text(beyond.get(variant))
        rows.append(row)
    return table(rows)


def beyond_text(result: Result | None) -> str:
    """Returns the loss of the last quarter, and the largest log-norm of any state on the way; empty without a
    result."""
    if result is None:
        return ""
    if result["overflow"] is not None:
        return f"NaN (overflow at token {result['overflow']:,})"
    norms, loss = result["log_norm_max"], result["last_quarter"]
    text = "NaN" if loss is None else number(loss)
    return text if not norms or None in norms else f"{text} ({max(norms):.1f})"


def table_of_growth(found: dict[str, Any]) -> str:
    """Returns the table of the norms along random tokens."""
    rows = []
    for name, result in found["growth"].items():
        construction = name.partition(",")[0]
        row = {
            "construction, input": name,
            "bounded": "yes" if construction in BOUNDED_CONSTRUCTIONS else "no",
            f"elements, order {ORDER}": str(state_elements(construction, ORDER)),
        }
        for std, curve in result["sizes"].items():
            last, overflow = curve["mean"][-1], curve["overflow"]
            text = "overflow of the norm" if last is None else number(last, 2)
            text = text if overflow is None else f"overflow at token {overflow:,}"
            row[f"mean log-norm at {LENGTH:,}, elements of std {std}"] = text
        rows.append(row)
    return table(rows)


def table_of_speed(found: dict[str, Any]) -> str:
    """Returns the table of the times of layers, the fastest first."""
    fastest = min(result["together_ms"] for result in found["speed"].values())
    rows = []
    for name, result in sorted(found["speed"].items(), key=lambda item: item[1]["together_ms"]):
        times = {f"{part}, ms": f"{result[f'{part}_ms']:,.0f}" for part in ("forward", "backward", "together")}
        rows.append({"layer": name, **times, "x the fastest": f"{result['together_ms'] / fastest:.2f}"})
    return table(rows)

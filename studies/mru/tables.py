"""The study's tables, in Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matmix.kernels.mru.constructions import BOUNDED_CONSTRUCTIONS, state_elements
from matmix.launch.many.scores import spread
from matmix.studies.mru.grid import FOLLOWED, PART, Grid, Result, loss_of
from matmix.studies.mru.growth import LENGTH, ORDER
from matmix.studies.mru.variants import NONE, RATES


def tables(parts: dict[str, dict[str, Result]]) -> str:
    """Returns all tables for which there are results. parts: part -> results by key."""
    grid, beyond = Grid(parts[PART]), {result["variant"]: result for result in parts["beyond"].values()}
    texts = {data: table_of_grid(grid, data, beyond if data == FOLLOWED else {}) for data in grid.datasets}
    makers = {"Growth": table_of_growth, "Speed": table_of_speed}
    texts |= {part: make(parts[part.lower()]) for part, make in makers.items() if parts[part.lower()]}
    return "\n\n".join(f"**{title}**\n\n{text}" for title, text in texts.items())


def table(rows: Sequence[dict[str, str]]) -> str:
    """Returns a table in Markdown. rows: heading of each column -> text, with the same headings in all."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(row.values() for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def number(value: float | None, digits: int = 3) -> str:
    """Returns empty where there is no value; "NaN" for one that is no number."""
    return "" if value is None else "NaN" if math.isnan(value) else f"{value:.{digits}f}"


def losses_text(losses: Sequence[float]) -> str:
    """Returns mean and sample standard deviation over seeds, and each."""
    over = spread(losses)
    text = number(over.mean) if over.deviation is None else f"{over.mean:.3f} ± {over.deviation:.3f}"
    return text if over.count == 1 else f"{text} ({', '.join(map(number, losses))})"


def table_of_grid(grid: Grid, data: str, beyond: dict[str, Result]) -> str:
    control = grid.best.get((data, NONE))
    rows = []
    for variant in grid.ranked(data):
        first = grid.runs(data=data, variant=variant, seed=0)
        chosen = grid.best.get((data, variant))
        shown = chosen or first[0]
        losses = grid.seeds(shown)
        gain = spread(grid.seeds(control)).mean - spread(losses).mean if control else math.nan
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


def table_of_growth(results: dict[str, Result]) -> str:
    rows = []
    for name, result in results.items():
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


def table_of_speed(results: dict[str, Result]) -> str:
    """Returns the table of the times of layers, the fastest first."""
    fastest = min(result["together_ms"] for result in results.values())
    rows = []
    for name, result in sorted(results.items(), key=lambda item: item[1]["together_ms"]):
        times = {f"{part}, ms": f"{result[f'{part}_ms']:,.0f}" for part in ("forward", "backward", "together")}
        rows.append({"layer": name, **times, "x the fastest": f"{result['together_ms'] / fastest:.2f}"})
    return table(rows)

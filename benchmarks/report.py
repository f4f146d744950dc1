"""Shows and keeps results: a table while they come, JSON and a picture at the end."""

from __future__ import annotations

import itertools
import json
import os
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from matmix.benchmarks.peers import HOW
from matmix.launch.lab.measuring import environment

RESULTS = Path(__file__).parent / "results"
ALLOWED = 1.2
"""A cost per token counts as constant if the dearest length costs at most this many times the cheapest."""
LEGEND = """\
  together    forward + backward, median of the rounds, and between which times the middle half of them lay
  floor       bytes that any algorithm must move: each input and output, and each gradient, once (together)
  x floor     time over floor / copy bandwidth: 1 is the speed of a copy; less is better
  x ours      the candidate's time over ours: above 1, ours is faster
  peak        memory allocated beyond the inputs; "-": not known without a GPU
  error       largest difference from ours in output and gradients, over the largest value; "-": other mathematics"""


def environment_of(device: torch.device, dtype: str = "float32") -> dict[str, Any]:
    """Returns hardware, versions (those of the peers, too), date and commit."""
    return environment(dtype, ("triton", *HOW)) | {"device": device_name(device)}


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def slug(name: str) -> str:
    """Returns lower-case words joined by dashes: a part of a file's name."""
    return "-".join(re.findall(r"[a-z0-9]+", name.lower()))


def columns(rows: Sequence[Sequence[object]], text: Sequence[int] = (0,)) -> str:
    """Lays rows out in columns, those numbered in `text` to the left and the others to the right."""
    widths = [max(len(str(cell)) for cell in column) for column in zip(*rows, strict=True)]
    left = {number % len(widths) for number in text}
    cells = [f"{{:{'<' if n in left else '>'}{width}}}" for n, width in enumerate(widths)]
    return "\n".join("  ".join(cells).format(*map(str, row)).rstrip() for row in rows)


def digits(value: float | None, unit: float = 1.0) -> str:
    """Returns a number in this unit with three significant digits; "-" for None."""
    if value is None:
        return "-"
    value = value / unit
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3}f}"


def opening(record: dict[str, Any]) -> str:
    where = record["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items() if version)
    head = f"{record['command']} on {where['device']}, {where['dtype']}, {record['tokens']:,} tokens a case"
    bandwidth = f"copy bandwidth {record['copy_bandwidth'] / 1e9:,.0f} GB/s, read + written"
    return f"{head}\n{versions}\n{bandwidth}\n{LEGEND}"


def case_text(case: dict[str, Any]) -> str:
    """Returns the table of a case; without a floor, tokens per second stand where bytes would."""
    floors = any("floor_bytes" in record for record in case["candidates"])
    head = [case["label"], "forward ms", "backward ms", "together ms", "middle half"]
    head += ["floor MB", "x floor"] if floors else ["Mtoken/s"]
    head += ["x ours", "peak MB", "error"]
    rows = [[*head, ""]]
    for record in case["candidates"]:
        row = [f"  {record['candidate']}"]
        if record["status"] != "ok":
            rows.append(row + [""] * (len(head) - 1) + [record["status"]])
            continue
        seconds, error = record["seconds"], record.get("error", "-")
        row += [digits(seconds[name]["median"], 1e-3) for name in ("forward", "backward", "both")]
        row.append(f"{digits(seconds['both']['low'], 1e-3)} - {digits(seconds['both']['high'], 1e-3)}")
        if floors:
            row += [digits(record["floor_bytes"]["both"], 1e6), f"{record['over_floor']['both']:.2f}"]
        else:
            row.append(digits(record["tokens_per_second"]["both"], 1e6))
        row.append(f"{record['over_ours']['both']:.2f}" if "over_ours" in record else "-")
        row.append(digits(record["peak_bytes"], 1e6))
        row.append("NaN" if error is None else error if error == "-" else f"{error:.1e}")
        rows.append([*row, "DIFFERS FROM OURS" if record.get("agrees") is False else ""])
    kind = f"\n{case['kind']}" if case["kind"] else ""
    return f"{kind}\n{columns(rows, (0, -1))}"


def small_text(small: dict[str, Any]) -> str:
    rows = [["", "one by one ms", "graph ms", "kernels ms", "graph / kernels", ""]]
    for record in small["candidates"]:
        cells = [digits(record.get(key), 1e-3) for key in ("one_by_one", "graph", "kernels")]
        status = record["status"].removeprefix("ok")
        rows.append([f"  {record['candidate']}", *cells, digits(record.get("graph_over_kernels")), status])
    what = "a training step as the host launches it, as a CUDA graph, and its kernels alone (on a GPU)"
    return f"\n{small['label']}: {what}\n{columns(rows, (0, -1))}"


def per_token(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns for each kind and candidate that ran at several lengths its seconds per token, forward and backward
    together, and whether they stay the same: an algorithm of linear cost must show it."""
    costs: dict[tuple[str, str], dict[int, float]] = {}
    for case in cases:
        for record in case["candidates"]:
            if "seconds" in record:
                seconds = record["seconds"]["both"]["median"] / (case["batch"] * case["seqlen"])
                costs.setdefault((case["kind"], record["candidate"]), {})[case["seqlen"]] = seconds
    results = []
    for (kind, candidate), at in costs.items():
        if len(at) > 1:
            ratio = max(at.values()) / min(at.values())
            row = {"kind": kind, "candidate": candidate, "seqlen": list(at), "seconds": list(at.values())}
            results.append(row | {"dearest_over_cheapest": ratio, "constant": ratio <= ALLOWED})
    return results


def per_token_text(costs: list[dict[str, Any]]) -> str:
    texts = [f"\nnanoseconds per token, forward and backward; constant: dearest / cheapest at most {ALLOWED:g}"]
    for kind, group in itertools.groupby(costs, key=lambda cost: cost["kind"]):
        mine = list(group)
        lengths = sorted({length for cost in mine for length in cost["seqlen"]})
        rows = [["  sequence length", *(f"{length:,}" for length in lengths), "dearest / cheapest", ""]]
        for cost in mine:
            at = dict(zip(cost["seqlen"], cost["seconds"], strict=True))
            cells = (digits(at.get(length), 1e-9) for length in lengths)
            verdict = f"{cost['dearest_over_cheapest']:.2f}", "constant" if cost["constant"] else "not constant"
            rows.append([f"  {cost['candidate']}", *cells, *verdict])
        texts.append(f"\n{kind}\n{columns(rows, (0, -1))}")
    return "\n".join(texts)


def save(record: dict[str, Any], out: Path) -> None:
    """Writes a record as JSON, and says where."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"\nwritten to {out}")


def write(record: dict[str, Any], out: Path | None, plot: Path | None, drawn: bool) -> None:
    out = out or RESULTS / f"{record['command']}-{slug(record['environment']['device'])}.json"
    save(record, out)
    if drawn:
        plot = plot or out.with_suffix(".png")
        draw(record, plot)
        print(f"drawn in {plot}")


def draw(record: dict[str, Any], path: Path) -> None:
    """Draws the time of forward and backward together over the length, and over ours, one line a candidate and one row
    a kind. Where the cost per token should stay the same, a band shows what would count as such."""
    os.environ.setdefault("MPLBACKEND", "agg")
    from matplotlib.figure import Figure  # only who draws waits for it

    kinds = list(dict.fromkeys(case["kind"] for case in record["cases"]))
    names = list(dict.fromkeys(x["candidate"] for case in record["cases"] for x in case["candidates"]))
    figure = Figure(figsize=(13, 0.6 + 4.8 * len(kinds)), layout="constrained", dpi=110)
    for (left, right), kind in zip(figure.subplots(len(kinds), 2, squeeze=False), kinds, strict=True):
        cases = [case for case in record["cases"] if case["kind"] == kind]
        for number, name in enumerate(names):
            points = [
                (case["seqlen"], x) for case in cases for x in case["candidates"]
                if x["candidate"] == name and "seconds" in x
            ]  # fmt: skip
            if not points:
                continue
            lengths, times = [at for at, _ in points], [x["seconds"]["both"]["median"] * 1e3 for _, x in points]
            style: dict[str, Any] = {"marker": "o", "color": f"C{number % 10}", "label": textwrap.fill(name, 32)}
            left.plot(lengths, times, linewidth=2.6 if name == "ours" else 1.5, **style)
            ratios = [(at, x["over_ours"]["both"]) for at, x in points if "over_ours" in x]
            right.plot([at for at, _ in ratios], [ratio for _, ratio in ratios], **style)
            if name == "ours" and "floor_bytes" in points[0][1]:
                floor = [x["floor_bytes"]["both"] / record["copy_bandwidth"] * 1e3 for _, x in points]
                left.plot(lengths, floor, "k--", linewidth=1, label="floor: least traffic at copy speed")
            if name == "ours" and "per_token" in record:
                left.axhspan(min(times), min(times) * ALLOWED, alpha=0.12, label=f"constant: within {ALLOWED - 1:.0%}")
        for axes, title in ((left, "milliseconds (less is better)"), (right, "time over ours (above 1: ours faster)")):
            axes.set(xscale="log", yscale="log", ylabel=title, title=kind)
            axes.set_xlabel("rows" if record["command"] == "norm" else "sequence length")
            axes.grid(True, which="both", axis="y", alpha=0.3)
        right.legend(*left.get_legend_handles_labels(), loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8)
    where = record["environment"]
    tokens = "" if record["command"] == "norm" else f", {record['tokens']:,} tokens a case"
    figure.suptitle(f"{record['command']}: {where['device']}, {where['dtype']}{tokens}, {where['date'][:10]}")
    figure.savefig(path)

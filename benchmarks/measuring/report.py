"""How results are shown and kept: a table while they come, JSON and a picture at the end."""

from __future__ import annotations

import json
from typing import Any

from matmix.benchmarks.measuring.settings import Settings, device_name
from matmix.benchmarks.measuring.suite import Case
from matmix.benchmarks.peers.packages import HOW
from matmix.launch.lab.measuring import environment

NAME_WIDTH = 34

TIMES = "  together    forward + backward, median of the rounds, and between which times the middle half of them lay"
FLOORS = """
  floor       bytes that any algorithm must move: each input and output, and each gradient, once (together)
  x floor     time over floor / copy bandwidth: 1 is the speed of a copy; less is better"""
RATIOS = """
  x ours      the candidate's time over ours: above 1, ours is faster
  peak        memory allocated beyond the inputs; "-": not known without a GPU
  error       largest difference from ours in output and gradients, over the largest value; "-": other mathematics"""


def milliseconds(seconds: float) -> str:
    """Three significant digits and the unit."""
    value = seconds * 1e3
    digits = 3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{digits}f}"


def size(count: float | None) -> str:
    """Bytes in MB, with as many digits as tell sizes apart."""
    if count is None:
        return "-"
    value = count / 1e6
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def opening(settings: Settings, bandwidth: float, where: dict[str, Any], floors: bool) -> str:
    """What the table is about and how it is read."""
    head = f"{settings.command} on {where['device']}, {where['dtype']}, {settings.tokens:,} tokens a case"
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items() if version)
    legend = f"{TIMES}{FLOORS if floors else ''}{RATIOS}"
    return f"{head}\n{versions}\ncopy bandwidth {bandwidth / 1e9:,.0f} GB/s, read + written\n{legend}"


def heading(case: Case) -> str:
    """The case's name and the columns; without a floor, tokens per second stand where bytes would."""
    moved, moved_units = f"{'Mtoken/s':>10}", f"{'':>10}"
    if case.candidates[0].floor is not None:
        moved = f"{'floor':>9}{'achieved':>10}{'x floor':>9}"
        moved_units = f"{'MB':>9}{'GB/s':>10}{'':>9}"
    times = f"{'forward':>9}{'backward':>10}{'together':>10}  {'middle half':<19}"
    units = f"{'ms':>9}{'ms':>10}{'ms':>10}  {'ms':<19}"
    rest, rest_units = f"{'x ours':>8}{'peak':>9}{'error':>10}", f"{'':>8}{'MB':>9}"
    note = f"\n{case.note}" if case.note else ""
    return f"{note}\n{case.label:<{NAME_WIDTH}}{times}{moved}{rest}\n{'':<{NAME_WIDTH}}{units}{moved_units}{rest_units}"


def row(case: Case, record: dict[str, Any]) -> str:
    """One candidate's line."""
    name = f"  {record['candidate']:<{NAME_WIDTH - 2}}"
    if record["status"] != "ok":
        return f"{name} {record['status']}"
    seconds = record["seconds"]
    both = seconds["both"]
    times = (
        f"{milliseconds(seconds['forward']['median']):>9}{milliseconds(seconds['backward']['median']):>10}"
        f"{milliseconds(both['median']):>10}"
    )
    spread = f"{milliseconds(both['low'])} - {milliseconds(both['high'])}"
    if "floor_bytes" in record:
        moved = (
            f"{size(record['floor_bytes']['both']):>9}{record['bandwidth']['both'] / 1e9:>10,.1f}"
            f"{record['over_floor']['both']:>9.2f}"
        )
    else:
        moved = f"{record['tokens_per_second']['both'] / 1e6:>10,.3g}"
    ours = f"{record['over_ours']['both']:.2f}" if "over_ours" in record else "-"
    error = "-"
    if "error" in record:
        error = "NaN" if record["error"] is None else f"{record['error']:.1e}"
    warning = "  DIFFERS FROM OURS" if record.get("agrees") is False else ""
    return f"{name}{times}  {spread:<19}{moved}{ours:>8}{size(record['peak_bytes']):>9}{error:>10}{warning}"


def show(case: Case, records: list[dict[str, Any]]) -> None:
    """Print a case."""
    print("\n".join([heading(case), *(row(case, record) for record in records)]), flush=True)


def where_and_with_what(settings: Settings) -> dict[str, Any]:
    """The record's environment."""
    dtype = str(settings.dtype).removeprefix("torch.")
    return environment(dtype, ("triton", *HOW)) | {"device": device_name(settings.device)}


def write(settings: Settings, record: dict[str, Any]) -> None:
    """JSON and, unless declined, the picture."""
    settings.out.parent.mkdir(parents=True, exist_ok=True)
    settings.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"\nwritten to {settings.out}")
    if settings.plot is not None:
        from matmix.benchmarks.measuring.plot import draw_lengths

        draw_lengths(record, settings.plot)
        print(f"drawn in {settings.plot}")

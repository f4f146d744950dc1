"""Whether the cost per token stays the same as sequences grow: what is linear in the length must show it.

All cases of a kind have the same number of tokens, so that a longer one has fewer sequences, and a candidate whose work
per token grows (levels of a scan, attention) or that runs out of parallel work shows by how much.
"""

from __future__ import annotations

from typing import Any

ALLOWED = 1.2
"""A cost per token counts as constant if the dearest length costs at most this many times the cheapest."""


def per_token(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """From `run_cases`' records: for each kind and candidate the seconds per token, forward and backward together, at
    each length where it ran; candidates that ran at one length only are left out."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for case in cases:
        tokens = case["batch"] * case["seqlen"]
        for record in case["candidates"]:
            if "seconds" in record:
                key = case["kind"], record["candidate"]
                found.setdefault(key, {})[case["seqlen"]] = record["seconds"]["both"]["median"] / tokens
    results = []
    for (kind, candidate), costs in found.items():
        if len(costs) > 1:
            ratio = max(costs.values()) / min(costs.values())
            results.append(
                {
                    "kind": kind,
                    "candidate": candidate,
                    "seqlen": list(costs),
                    "seconds": list(costs.values()),
                    "dearest_over_cheapest": ratio,
                    "constant": ratio <= ALLOWED,
                }
            )
    return results


def table(costs: list[dict[str, Any]], width: int) -> str:
    """`per_token`'s findings, one line a candidate whose name takes `width` columns."""
    lines = ["", f"nanoseconds per token, forward and backward; constant: dearest / cheapest at most {ALLOWED:g}"]
    for kind in dict.fromkeys(cost["kind"] for cost in costs):
        mine = [cost for cost in costs if cost["kind"] == kind]
        lengths = sorted({length for cost in mine for length in cost["seqlen"]})
        head = "".join(f"{length:>10,}" for length in lengths)
        lines += ["", kind, f"{'  sequence length':<{width}}{head}{'dearest / cheapest':>20}"]
        for cost in mine:
            at = {length: _three_digits(s * 1e9) for length, s in zip(cost["seqlen"], cost["seconds"], strict=True)}
            cells = "".join(f"{at.get(length, '-'):>10}" for length in lengths)
            verdict = "constant" if cost["constant"] else "not constant"
            lines.append(f"  {cost['candidate']:<{width - 2}}{cells}{cost['dearest_over_cheapest']:>20.2f}  {verdict}")
    return "\n".join(lines)


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"

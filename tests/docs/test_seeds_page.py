"""The list of what the papers' texts name: tests, files and words in its rows exist, and its counts are theirs."""

from __future__ import annotations

import functools
import re
from collections import Counter

import pytest
from paths import ROOT

STATES = ("shown", "built, not shown", "partial", "missing")
PAGE = (ROOT / "docs/seeds.md").read_text(encoding="utf-8")
ROWS = [tuple(row.split(" | ")) for row in re.findall(r"^\| (?!item|---)(.+) \|$", PAGE, re.M)]
_ROOMS = ("benchmarks", "kernels", "launch", "model", "train")


@functools.cache
def _words() -> set[str]:
    """Every word of the code, and the names of all recipes."""
    files = [file for room in _ROOMS for file in (ROOT / room).rglob("*") if file.suffix in (".py", ".toml")]
    return {file.stem for file in files}.union(*(re.findall(r"\w+", file.read_text()) for file in files))


def _lost(code: str) -> bool:
    file, _, test = code.partition("::")
    if test:
        return not re.search(rf"^def {test}\(", (ROOT / "tests" / file).read_text(), re.M)
    if "/" in code:
        return not any((at / code).exists() for at in (ROOT, ROOT / "tests"))
    return not set(re.findall(r"[A-Za-z]\w*", code)) <= _words() | {"python", "P", "m"}


def test_rows_name_what_exists():
    named = [(row[0], code) for row in ROWS for cell in row[1:3] for code in re.findall(r"`([^`]+)`", cell)]
    assert len(named) > 300
    assert [(item, code) for item, code in named if _lost(code)] == []


def test_every_row_says_what_shows_it_or_why_nothing_does():
    for row in ROWS:
        assert len(row) == 4, row
        _, where, reason, state = row
        assert state in STATES, row
        assert len(reason.strip()) > 5, row
        if state == "shown":
            assert where.strip(), row
            assert re.search(r"::test_|\]\(\S+\.md|\.png", reason), row
    assert len({row[0] for row in ROWS}) == len(ROWS)


def test_the_counts_are_those_of_the_rows():
    counts = Counter(row[3] for row in ROWS)
    wanted = "; ".join(f"{counts[state]} {state}" for state in STATES)
    assert f"**{len(ROWS)} items: {wanted}.**" in PAGE.replace("\n", " ")


@pytest.mark.parametrize("code", ["model/mixers/test_lion.py::test_nothing", "docs/no-page.md", "no_such_mixer"])
def test_what_does_not_exist_is_found(code):
    assert _lost(code)

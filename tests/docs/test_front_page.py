"""The front pages say what other pages have measured, and are short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from paths import ROOT

_MEASURED = re.compile(r"(\d+\.\d+) ± (\d+\.\d+)")
PAGES = [ROOT / "README.md", ROOT / "docs" / "index.md"]


def _text(page: Path) -> str:
    return page.read_text(encoding="utf-8").replace("&nbsp;", " ")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_every_number_stands_where_it_says_how_it_was_measured(page):
    names = ("comparisons.md", "vision.md", "long-range.md")
    sources = "".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in names)
    known = [(float(value), float(spread)) for value, spread in _MEASURED.findall(sources)]
    shown = _MEASURED.findall(_text(page))
    assert len(shown) >= 20
    for numbers in shown:
        off = [10 ** -len(number.partition(".")[2]) / 2 + 1e-9 for number in numbers]
        value, spread = map(float, numbers)
        assert any(abs(value - x) <= off[0] and abs(spread - y) <= off[1] for x, y in known), numbers


def test_both_show_the_same_table():
    tables = [[line for line in _text(page).splitlines() if "±" in line] for page in PAGES]
    assert tables[0] == tables[1]


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_what_has_not_run_on_a_gpu_is_said(page):
    """Until the page on kernels says something else."""
    kernels, shown = (
        " ".join(path.read_text(encoding="utf-8").split()).lower() for path in (ROOT / "docs" / "kernels.md", page)
    )
    assert "none of these kernels has run on a gpu so far" in kernels
    assert "none of the project's triton kernels has run on a gpu so far" in shown

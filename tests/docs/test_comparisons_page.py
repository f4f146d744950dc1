"""Pages with results of comparisons say, between the command and its table, the learning rates of the entries."""

import re

from failures import Failures
from paths import ROOT

from matmix.train.recipe_files import bundled_comparisons, read_toml

_COMMAND = re.compile(r"(?<!\w)matmix compare (\w+_small|quickstart) --parallel 2(?! --run-dir)")


def _results(page: str) -> list[tuple[str, str]]:
    """The names of the comparisons on a page, and what stands between each command and the next table of entries."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    text = text.partition("## Results")[2] or text
    return [(found[1], text[found.end() :].partition("\n| entry")[0]) for found in _COMMAND.finditer(text)]


RESULTS = [
    (name, words)
    for page in ("comparisons.md", "vision.md", "tables/state_tracking_small.md")
    for name, words in _results(page)
]


def test_all_small_comparisons_are_there():
    known = {name for name in bundled_comparisons() if name.endswith("_small") or name == "quickstart"}
    tuned = re.findall(r"\w+_small", (ROOT / "docs/long-range.md").read_text(encoding="utf-8"))  # each entry by itself
    assert {name for name, _ in RESULTS} == known - {"ladder_small"} - ({*tuned} - {"mnist_small"})


def test_every_small_comparison_is_tuned():
    """Entries that are compared at one common rate are rates that are compared."""
    small = [name for name in bundled_comparisons() if name.endswith(("_small", "_tiny"))]
    with Failures() as failures:
        for name in (*small, "quickstart", "hydra_diffusion_shakespeare"):
            with failures.of(name):
                comparison = read_toml(bundled_comparisons()[name])["comparison"]
                rates = comparison["tune"]["optimizer"]["lr"]
                assert len(rates) > 1
                assert comparison.get("tune_seed") not in comparison["seeds"]


def test_every_table_says_among_which_rates_its_entries_were_tuned():
    with Failures() as failures:
        for name, text in RESULTS:
            with failures.of(name):
                (said,) = re.findall(
                    r"Each entry at its own learning rate, chosen from ([\d., and]+\d)", " ".join(text.split())
                )
                tuned = read_toml(bundled_comparisons()[name])["comparison"]["tune"]["optimizer"]["lr"]
                assert [float(rate) for rate in re.split(", | and ", said)] == tuned

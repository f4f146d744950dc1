"""How many pairs of entries stand in a published order, and what the report says of it."""

import itertools
import math

import pytest
from comparisons import ENTRIES, TINY, finish

from matmix.launch.lab.compare.config import read_comparison, tasks_of
from matmix.launch.lab.compare.published import agreement
from matmix.launch.lab.compare.report import write_report
from matmix.launch.lab.compare.width import matched

SCORES = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0}


def _values(*means, apart=0.1):
    return {name: [mean - apart, mean + apart] for name, mean in zip(SCORES, means, strict=True)}


def test_the_whole_order_and_its_reverse():
    found = agreement(SCORES, _values(10, 20, 30, 40))
    assert found == (4, 6, 6, 1.0, pytest.approx(1 / 24), 6, 6)
    found = agreement(SCORES, _values(40, 30, 20, 10))
    assert found == (4, 6, 0, -1.0, pytest.approx(1.0), 6, 0)


def test_the_probability_is_that_of_all_orders():
    """Of all orders of four entries, those are counted that have as many pairs in the published one."""
    found = agreement(SCORES, _values(1, 3, 2, 4))
    orders = list(itertools.permutations(range(4)))
    pairs = [sum(a < b for a, b in itertools.combinations(order, 2)) for order in orders]
    assert found.chance == pytest.approx(sum(count >= found.in_order for count in pairs) / len(orders))


def test_pairs_within_their_spread_are_counted_apart():
    """The deviations are 0.1 sqrt(2) each: of the neighbours in 0, 0.25, 1, 0.5 the first two are not apart."""
    found = agreement(SCORES, _values(0, 0.25, 1, 0.5))
    assert (found.in_order, found.apart, found.apart_in_order) == (5, 4, 3)


def test_ties_have_no_order():
    found = agreement({**SCORES, "b": 1.0}, _values(1, 2, 3, 3))
    assert (found.pairs, found.in_order, found.tau) == (5, 4, 0.8)  # one is neither in the order nor against it
    assert agreement(dict.fromkeys(SCORES, 1.0), _values(1, 2, 3, 4)) is None
    alike = agreement(SCORES, _values(1, 1, 1, 1))
    assert (alike.in_order, alike.tau, alike.chance, alike.apart) == (0, 0.0, 1.0, 0)


def test_entries_without_a_number_do_not_count():
    values = _values(1, 2, 3, 4) | {"b": [], "c": [3.0, math.nan]}
    assert agreement(SCORES, values)[:3] == (2, 1, 1)
    assert agreement(SCORES, {"a": [1.0]}) is None


def test_one_seed_has_no_spread():
    found = agreement(SCORES, {name: [score] for name, score in SCORES.items()})
    assert (found.in_order, found.apart) == (6, None)


PUBLISHED = """
published_source = "a paper, accuracy"
published_metric = "masked_accuracy"
published = { attention = 62.5, "Hydra, 2 x" = 71 }
[[comparison.entry]]
"""


def _report(tmp_path, seeds):
    tmp_path.mkdir()
    path = tmp_path / "mine.toml"
    path.write_text(TINY + ENTRIES.replace("[[comparison.entry]]\n", PUBLISHED, 1))
    words = ["--model.vocab-size", "64", "--run-dir", str(tmp_path / "home"), "--comparison.seeds", *seeds]
    comparison = matched(read_comparison(str(path), words))
    for task in tasks_of(comparison):
        right = 0.5 if task.entry == "attention" else 0.75
        finish(task, {"loss": 2.0 * right, "masked_accuracy": right + 0.01 * task.seed})
    return write_report(comparison)


def test_the_report_says_how_the_orders_agree(tmp_path):
    said = (
        "Published order (a paper, accuracy), by masked accuracy: 1 of 1 pairs of 2 entries are in it, Kendall's tau "
        "1.00, as much or more by chance with probability 0.5; "
    )
    several = _report(tmp_path / "several", ["0", "1"])
    assert f"{said}of those that differ by more than the sum of their deviations, 1 of 1.\n" in several
    assert f"{said}with one seed no spread is known.\n" in _report(tmp_path / "one", ["0"])


def test_published_scores_are_of_entries(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(TINY + ENTRIES.replace("[[comparison.entry]]\n", PUBLISHED.replace("attention", "attenton"), 1))
    with pytest.raises(ValueError, match=r'published: no entry is called "attenton" \(did you mean "attention"\?\)'):
        read_comparison(str(path))

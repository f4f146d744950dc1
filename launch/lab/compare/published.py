"""How far the results of a comparison stand in the order that a publication found, by Kendall's tau."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matmix.launch.many.scores import Spread, spread


class Agreement(NamedTuple):
    """How many pairs of entries stand in the published order; pairs of equal published scores have none."""

    entries: int
    pairs: int
    in_order: int
    tau: float
    """1 where all pairs are in the published order, -1 where none is."""
    chance: float
    """The probability of such a tau or a larger one where the order of the results has nothing to do with it."""
    apart: int | None
    """Pairs whose means differ by more than the sum of both deviations; None where no pair has deviations."""
    apart_in_order: int


def agreement(published: Mapping[str, float], values: Mapping[str, Sequence[float]]) -> Agreement | None:
    """Compares published scores of entries with `values`, those of the seeds in the same measure, both by entry.

    Entries count that have both and whose mean is a number. Returns None where no two of them have different scores.
    """
    found = {name: spread(values.get(name, ())) for name in published}
    known = {name: one for name, one in found.items() if one is not None and math.isfinite(one.mean)}
    pairs = [pair for pair in itertools.combinations(known, 2) if published[pair[0]] != published[pair[1]]]
    if not pairs:
        return None
    from scipy.stats import kendalltau

    products = [(published[a] - published[b]) * (known[a].mean - known[b].mean) for a, b in pairs]
    in_order = [product > 0 for product in products]
    apart = [_are_apart(known[a], known[b]) for a, b in pairs]
    scores, means = [published[name] for name in known], [one.mean for one in known.values()]
    test = kendalltau(scores, means, alternative="greater")  # exact where no two are equal
    tau = (sum(in_order) - sum(product < 0 for product in products)) / len(pairs)
    chance = test.pvalue if math.isfinite(test.pvalue) else 1.0  # all results are equal
    count = None if set(apart) == {None} else apart.count(True)
    both = sum(ordered for ordered, far in zip(in_order, apart, strict=True) if far)
    return Agreement(len(known), len(pairs), sum(in_order), tau, float(chance), count, both)


def _are_apart(a: Spread, b: Spread) -> bool | None:
    """Returns None where a deviation is not known, as with one seed."""
    if a.deviation is None or b.deviation is None:
        return None
    return abs(a.mean - b.mean) > a.deviation + b.deviation


def agreement_words(source: str, measure: str, found: Agreement | None) -> str:
    """Says it in a line below a table; measure: what both orders are by, such as "validation loss"."""
    begin = f"Published order{f' ({source})' if source else ''}, by {measure}"
    if found is None:
        return f"{begin}: no two entries here have numbers and different published ones."
    words = (
        f"{begin}: {found.in_order} of {found.pairs} pairs of {found.entries} entries are in it, Kendall's tau "
        f"{found.tau:.2f}, as much or more by chance with probability {found.chance:.2g}"
    )
    if found.apart is None:
        return f"{words}; with one seed no spread is known."
    sure = f"{found.apart_in_order} of {found.apart}"
    return f"{words}; of those that differ by more than the sum of their deviations, {sure}."

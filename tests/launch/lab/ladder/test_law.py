"""The law of losses is found again in points that were made from one, and its uncertainty says how far it is known."""

import numpy as np
import pytest

from matmix.launch.lab.ladder import law
from matmix.launch.lab.ladder.law import fit_law

TRUE = {"E": 1.2, "A": 60.0, "a": 0.35}
SIZES = [3e4, 6e4, 1.2e5, 2.5e5, 5e5]


def _points(noise: float, seed: int = 0) -> tuple[list[float], list[float]]:
    """Two runs at each size, whose losses are off by this share."""
    sizes = np.repeat(SIZES, 2)
    errors = np.exp(noise * np.random.default_rng(seed).standard_normal(len(sizes)))
    return list(sizes), list((TRUE["E"] + TRUE["A"] * sizes ** -TRUE["a"]) * errors)


def test_exact_points_give_the_law():
    fit = fit_law(*_points(0.0))
    assert {name: getattr(fit, name) for name in TRUE} == pytest.approx(TRUE, rel=1e-3)
    assert fit.loss(4e6) == pytest.approx(TRUE["E"] + TRUE["A"] * 4e6 ** -TRUE["a"], rel=1e-4)


def test_the_law_lies_within_the_uncertainty_that_is_stated(monkeypatch):
    monkeypatch.setattr(law, "DRAWS", 40)
    fits = [fit_law(*_points(0.003, seed)) for seed in range(3)]
    for name, value in TRUE.items():
        inside = [low <= value <= high for low, high in (fit.interval(name, 0.95) for fit in fits)]
        assert sum(inside) >= 2
    low, high = fits[0].band(4e6, 0.95)
    assert low < TRUE["E"] + TRUE["A"] * 4e6 ** -TRUE["a"] < high
    assert (
        fits[0].band(4e6)[1] - fits[0].band(4e6)[0] > fits[0].band(1e5)[1] - fits[0].band(1e5)[0]
    )  # beyond all points


def test_one_run_that_went_wrong_moves_the_law_less_than_squares_would(monkeypatch):
    monkeypatch.setattr(law, "DRAWS", 1)
    sizes, losses = _points(0.0)
    losses[4] *= 1.2
    robust = abs(fit_law(sizes, losses).loss(1.2e5) - (TRUE["E"] + TRUE["A"] * 1.2e5 ** -TRUE["a"]))
    monkeypatch.setattr(law, "HUBER", 1e3)
    squares = abs(fit_law(sizes, losses).loss(1.2e5) - (TRUE["E"] + TRUE["A"] * 1.2e5 ** -TRUE["a"]))
    assert robust < squares / 3


@pytest.mark.parametrize(
    ("points", "message"),
    [
        (([1e4, 2e4, 2e4, 4e4], [3.0, 2.5, 2.5, 2.2]), "needs losses at 4 sizes, here are 3"),
        (([1e4, 2e4, 4e4, 8e4], [3.0, 2.5, float("nan"), 2.2]), "positive losses, got nan"),
    ],
)
def test_points_without_a_law_are_refused(points, message):
    with pytest.raises(ValueError, match=message):
        fit_law(*points)

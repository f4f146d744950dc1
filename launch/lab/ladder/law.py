"""The law L = E + A N^-a of the losses L of models with N parameters, fitted as in arXiv 2203.15556 (approach 3) to one
family of models, and how far its numbers can be known."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from scipy.optimize import least_squares

LEAST_SIZES = 4
"""A law of three numbers fits any three points."""
HUBER = 0.01
"""Residuals of the logarithm of the loss count by their squares up to here, and by their size beyond. The paper
has 0.001 for hundreds of runs; with the few of a ladder the curve would pass through three, and far from others."""
DRAWS = 200
SHARE = 0.68
"""Share of the draws within an interval: that of one standard deviation to either side."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """The law of an entry."""

    E: float
    A: float
    a: float
    error: float
    """Standard deviation of the relative residuals, with as many degrees of freedom as points beyond three."""
    freedom: int
    draws: np.ndarray
    """(draws, 3): E, A and a as fitted to losses that the law and this error could have given."""

    def loss(self, parameters: float) -> float:
        return float(_losses(np.array([[self.E, self.A, self.a]]), parameters)[0])

    def band(self, parameters: float, share: float = SHARE) -> tuple[float, float]:
        """Returns between which losses the law of this share of the draws lies at a number of parameters."""
        return _interval(_losses(self.draws, parameters), share)

    def interval(self, name: str, share: float = SHARE) -> tuple[float, float]:
        """Returns the same of "E", "A" or "a"."""
        return _interval(self.draws[:, "EAa".index(name)], share)


def fit_law(parameters: Sequence[float], losses: Sequence[float], *, seed: int = 0) -> Fit:
    """Fits the law to points, of which several may have equally many parameters.

    The sum of Huber's function of the residuals of log L is minimised from several starting points. The error is drawn
    anew for each draw, as it is known from as few points as there are: its square is the residual sum of squares over a
    chi-squared number.
    Raises ValueError (one line) for points at fewer than 4 sizes, and for losses that are no positive numbers.
    """
    x, y = np.asarray(parameters, dtype=float), np.asarray(losses, dtype=float)
    if (sizes := len(np.unique(x))) < LEAST_SIZES:
        raise ValueError(f"L = E + A N^-a has three unknowns and needs losses at {LEAST_SIZES} sizes, here are {sizes}")
    if not (np.isfinite(y) & (y > 0)).all():
        raise ValueError(f"the law is one of positive losses, got {y[~(np.isfinite(y) & (y > 0))][0]}")
    middle = float(np.exp(np.log(x).mean()))
    place, heights = np.log(x / middle), np.log(y)
    starts = [(np.log(y.min() * share), np.log(y.mean() * (1 - share)), a) for share in (0.3, 0.9) for a in (0.1, 0.5)]
    best = min((_minimised(place, heights, start) for start in starts), key=lambda found: found[0])[1]
    residuals = heights - _heights(best, place)
    freedom, squares = len(x) - 3, float(residuals @ residuals)
    random, draws = np.random.default_rng(seed), []
    for _ in range(DRAWS):
        error = np.sqrt(squares / random.chisquare(freedom))
        noise = np.clip(error * random.standard_normal(len(x)), -0.5, 0.5)
        draws.append(_minimised(place, _heights(best, place) + noise, best)[1])
    numbers = [_numbers(np.asarray(theta), middle) for theta in (best, *draws)]
    E, A, a = map(float, numbers[0])
    return Fit(E=E, A=A, a=a, error=float(np.sqrt(squares / freedom)), freedom=freedom, draws=np.array(numbers[1:]))


def _minimised(place: np.ndarray, heights: np.ndarray, start: Sequence[float]) -> tuple[float, np.ndarray]:
    """Returns the least cost and where it is: log E, log of the rest at the middle of the sizes, and a. place: log of
    the sizes over the middle one; heights: log of the losses."""
    low, high = np.array([heights.min() - 7, heights.min() - 7, 0.01]), np.array([heights.min(), heights.max() + 3, 3])
    inside = np.clip(start, low + 1e-6, high - 1e-6)
    found = least_squares(
        lambda theta: _heights(theta, place) - heights,
        inside,
        jac=lambda theta: _slopes(theta, place),
        bounds=(low, high),
        loss="huber",
        f_scale=HUBER,
        ftol=1e-6,
    )
    return float(found.cost), found.x


def _heights(theta: np.ndarray, place: np.ndarray) -> np.ndarray:
    return np.logaddexp(theta[0], theta[1] - theta[2] * place)


def _slopes(theta: np.ndarray, place: np.ndarray) -> np.ndarray:
    share = np.exp(theta[0] - _heights(theta, place))
    return np.stack([share, 1 - share, -(1 - share) * place], axis=1)


def _numbers(theta: np.ndarray, middle: float) -> np.ndarray:
    """Returns E, A and a."""
    return np.array([np.exp(theta[0]), np.exp(theta[1] + theta[2] * np.log(middle)), theta[2]])


def _losses(numbers: np.ndarray, parameters: float) -> np.ndarray:
    E, A, a = numbers.T
    return E + A * parameters**-a


def _interval(values: np.ndarray, share: float) -> tuple[float, float]:
    low, high = np.quantile(values, [(1 - share) / 2, (1 + share) / 2])
    return float(low), float(high)

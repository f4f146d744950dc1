"""Pathfinder (Linsley et al. 2018, arXiv 1805.08315; as sequences of pixels in arXiv 2011.04006): are two dots the ends
of one dashed path?

A picture of n x n pixels has two curved paths of equally many dashes, shorter ones that lead nowhere, and two dots. One
dot stands at an end of the first path. The other stands at the path's other end, or at an end of the second path that
is as far away, within half a pixel, as the crow flies. So neither the picture without the dots nor the distance
between them tells the answer. Where the dots lie, and where the dashes beside them point, tells some of it
(docs/long-range.md); the rest is told by following the dashes. Pixels come row by row, then = or the mask.
"""

import itertools
import math

import numpy as np

from matmix.data.config import SyntheticConfig
from matmix.data.synthetic.base import Puzzle

_DASH, _STEP = 2.6, 4.4  # pixels: of a dash, and from one to the next
_BEND = 0.35  # standard deviation of the change of direction from dash to dash, in radians
_CLEAR = 4.3  # pixels that lie between two paths at least
_MARGIN = 2  # pixels around the middles of all dashes
_TURNS, _PATHS = 6, 20  # attempts to find the next dash of a path, and a path; then the picture is begun again
APART, JOINED, EMPTY, DASH, DOT, EQUALS = range(6)

Path = list[tuple[float, float, float]]
"""The dashes of a path: x and y of the middle, direction in radians."""


class Pathfinder(Puzzle):
    """data.seqlen is n x n + 1. Half of the pictures are joined."""

    bidirectional_form = one_answer = True
    more_options = "dashes", "distractors"
    tokens = ("apart", "joined", ".", "-", "o", "=")
    answers = range(2)

    def __init__(self, config: SyntheticConfig) -> None:
        super().__init__(config)
        # In less room, where paths bend back or have too little space, nearly all attempts to draw a picture fail.
        of_all = 2 * config.dashes + config.distractors * _of_distractor(config.dashes)
        room = max(_STEP * config.dashes / 1.5, _STEP * math.sqrt(1.8 * of_all))
        self.shortest = (2 * _MARGIN + 1 + math.ceil(room)) ** 2 + 1

    def check(self, seqlen: int) -> None:
        super().check(seqlen)
        near = round(math.sqrt(seqlen - 1))
        if near**2 != seqlen - 1:
            raise ValueError(
                f"data.seqlen = {seqlen} is not a square picture and a mark: for {near} x {near} pixels set "
                f"{near**2 + 1}"
            )

    def fill(self, draw: np.random.Generator, ids: np.ndarray, labels: np.ndarray, mask: int | None) -> None:
        size = math.isqrt(len(ids) - 1)
        while (paths := self._paths(draw, size)) is None:
            pass
        picture = np.full((size, size), EMPTY, dtype=ids.dtype)
        x, y, heading = np.array([dash for path in paths for dash in path]).T[:, :, None]
        along = np.linspace(-_DASH / 2, _DASH / 2, 7)
        columns, rows = np.rint(x + along * np.cos(heading)), np.rint(y + along * np.sin(heading))
        picture[rows.astype(int), columns.astype(int)] = DASH
        joined = int(draw.integers(2))
        for dot in (paths[0][0], paths[0][-1] if joined else paths[1][0]):
            column, row = round(dot[0]), round(dot[1])
            picture[row - 1 : row + 2, column - 1 : column + 2] = DOT
        ids[:-1] = picture.ravel()
        ids[-1] = EQUALS if mask is None else mask
        labels[-1] = JOINED if joined else APART

    def _paths(self, draw: np.random.Generator, size: int) -> list[Path] | None:
        """Returns the paths of a picture, the two long ones first; None where one of them found no room."""
        dashes, paths = self.config.dashes, []
        for number in range(2 + self.config.distractors):
            for _ in range(_PATHS):
                angle = draw.uniform(0, 2 * math.pi)
                x, y = draw.uniform(_MARGIN, size - 1 - _MARGIN, 2).tolist()
                if number == 1:  # as far from the dot as the other end of its path
                    dot, end = paths[0][0][:2], paths[0][-1][:2]
                    reach, side = math.dist(dot, end) + draw.uniform(-0.5, 0.5), draw.uniform(0, 2 * math.pi)
                    x, y = dot[0] + reach * math.cos(side), dot[1] + reach * math.sin(side)
                path = _walk(draw, (x, y, angle), dashes if number < 2 else _of_distractor(dashes), paths, size)
                if path is not None:
                    paths.append(path)
                    break
            else:
                return None
        return paths


def _walk(
    draw: np.random.Generator, start: tuple[float, float, float], dashes: int, others: list[Path], size: int
) -> Path | None:
    """Returns a path that begins with the dash `start` and lies in the picture, away from itself and from others; None
    where it found no way."""
    taken = [place for other in others for place in _places(other)]

    def is_free(dash: tuple[float, float, float], path: Path) -> bool:
        x, y, _ = dash
        if min(x, y) < _MARGIN or max(x, y) > size - 1 - _MARGIN:
            return False
        before = path[-1] if path else dash
        middle = (x + before[0]) / 2, (y + before[1]) / 2
        if any(math.dist(place, (x, y)) < _CLEAR or math.dist(place, middle) < _CLEAR for place in taken):
            return False
        return all(math.dist((x, y), old[:2]) >= _STEP for old in path[:-1])

    path: Path = []
    if not is_free(start, path):
        return None
    path.append(start)
    turns = iter(draw.normal(0, _BEND, _TURNS * (dashes - 1)).tolist())
    while len(path) < dashes:
        x, y, heading = path[-1]
        for turn in turns:
            new = heading + turn
            dash = x + _STEP * math.cos(new), y + _STEP * math.sin(new), new
            if is_free(dash, path):
                path.append(dash)
                break
        else:
            return None
    return path


def _of_distractor(dashes: int) -> int:
    return max(1, dashes // 3)


def _places(path: Path) -> list[tuple[float, float]]:
    """Returns the middles of the dashes and of the gaps between them."""
    gaps = [((a[0] + b[0]) / 2, (a[1] + b[1]) / 2) for a, b in itertools.pairwise(path)]
    return [dash[:2] for dash in path] + gaps

"""ListOps (Nangia and Bowman 2018, arXiv 1804.06028): the value of nested operations on digits.

    . . [MAX 2 9 [MIN 4 7 ] 0 ] =        causal: 9 is predicted at the =
    . . [MAX 2 9 [MIN 4 7 ] 0 ] _        bidirectional: the mask _ at the end is to be filled in

Operators are MIN, MAX, MED (the median, rounded down) and SM (the sum modulo 10). An expression grows until it fills
the sample, or until `depth` and `arguments` allow no more; fillers stand before it.
"""

from collections.abc import Callable, Iterable

import numpy as np

from matmix.data.rng import GENERATED_ANSWERS, generator
from matmix.data.synthetic.base import Puzzle

OPERATORS: dict[str, Callable[[list[int]], int]] = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: (sorted(values)[(len(values) - 1) // 2] + sorted(values)[len(values) // 2]) // 2,
    "[SM": lambda values: sum(values) % 10,
}
END, FILLER, EQUALS = "]", ".", "="
_SHORTEST = 4  # tokens of an operation: operator, two digits, end
_COUNTED = 2000  # samples by which answers are counted


def evaluate(tokens: Iterable[str]) -> int:
    """Returns the value of an expression."""
    unfinished: list[tuple[str, list[int]]] = [("", [])]
    for token in tokens:
        if token in OPERATORS:
            unfinished.append((token, []))
        elif token == END:
            operator, values = unfinished.pop()
            unfinished[-1][1].append(OPERATORS[operator](values))
        else:
            unfinished[-1][1].append(int(token))
    [(_, [value])] = unfinished
    return value


def expression(draw: np.random.Generator, size: int, depth: int, arguments: int) -> list[str]:
    """Returns an operation of at most `size` tokens (4 or more), with up to `depth` operators inside one another."""
    names = list(OPERATORS)
    tokens: list[str] = []
    shares = iter(draw.random(3 * size).tolist())  # drawn at once: one by one costs more than all the rest

    def below(n: int) -> int:
        return int(next(shares) * n)

    def grow(room: int, depth: int) -> None:
        if depth == 0 or room < _SHORTEST:
            tokens.append(str(below(10)))
            return
        tokens.append(names[below(len(names))])
        count = 2 + below(min(arguments, room - 2) - 1)
        # What is left after one token for each argument is cut at random places.
        left = room - 2 - count
        cuts = sorted(below(left + 1) for _ in range(count - 1))
        for begin, end in zip([0, *cuts], [*cuts, left], strict=True):
            grow(1 + end - begin, depth - 1)
        tokens.append(END)

    grow(size, depth)
    return tokens


class ListOps(Puzzle):
    """Minima are often 0 and maxima often 9, so the best constant guess is right more often than once in ten times."""

    bidirectional_form = one_answer = True
    tokens = (*map(str, range(10)), *OPERATORS, END, FILLER, EQUALS)
    answers = range(10)
    shortest = _SHORTEST + 1

    def fill(self, draw: np.random.Generator, ids: np.ndarray, labels: np.ndarray, mask: int | None) -> None:
        names = expression(draw, len(ids) - 1, self.config.depth, self.config.arguments)
        ids[:] = _IDS[FILLER]
        ids[-1 - len(names) : -1] = [_IDS[name] for name in names]
        ids[-1] = _IDS[EQUALS] if mask is None else mask
        labels[-1] = evaluate(names)

    def answer_counts(self, seqlen: int) -> np.ndarray:
        last = [self.sample(generator(0, 0, GENERATED_ANSWERS, n), seqlen, None)[1][-1] for n in range(_COUNTED)]
        return np.bincount(last, minlength=len(self.tokens)).astype(np.int64)


_IDS = {name: index for index, name in enumerate(ListOps.tokens)}

"""Word problems of groups: after every element, the product of all elements so far.

State tracking as in "The Illusion of State in State-Space Models" (Merrill et al. 2024, arXiv 2404.08819): elements are
drawn uniformly, and the label of position t is x_1 x_2 ... x_t. S3 and S5 are all permutations of 3 and 5 things, A5
the even ones of 5. A5 and S5 are not solvable: constant-depth circuits cannot compute their products at any length.
"""

from functools import cache
from itertools import permutations
from typing import ClassVar

import numpy as np

from matmix.data.config import SyntheticConfig
from matmix.data.synthetic.base import Puzzle

Permutation = tuple[int, ...]


def is_even(permutation: Permutation) -> bool:
    """Returns whether the permutation is a product of an even number of swaps."""
    n = len(permutation)
    return sum(permutation[i] > permutation[j] for i in range(n) for j in range(i + 1, n)) % 2 == 0


def cycles(permutation: Permutation) -> str:
    """Returns the permutation in cycles: (1, 0, 2, 4, 3) -> "(12)(45)"; "()" moves nothing."""
    seen: set[int] = set()
    text = ""
    for start in range(len(permutation)):
        cycle = []
        while start not in seen:
            seen.add(start)
            cycle.append(str(start + 1))
            start = permutation[start]
        if len(cycle) > 1:
            text += f"({''.join(cycle)})"
    return text or "()"


@cache
def group(degree: int, even: bool) -> tuple[tuple[Permutation, ...], np.ndarray]:
    """Returns the elements of the group, the one that moves nothing first, and the products' numbers, int64 (n, n)."""
    elements = tuple(p for p in permutations(range(degree)) if not even or is_even(p))
    number = {element: index for index, element in enumerate(elements)}
    products = [[number[tuple(second[image] for image in first)] for second in elements] for first in elements]
    return elements, np.array(products, dtype=np.int64)


class WordProblem(Puzzle):
    """Any length; products of uniform elements are uniform, so a constant guess is right once in `order` times."""

    bidirectional_form = False
    degree: ClassVar[int]
    even: ClassVar[bool] = False

    def __init__(self, config: SyntheticConfig) -> None:
        super().__init__(config)
        elements, table = group(self.degree, self.even)
        self.tokens = tuple(cycles(element) for element in elements)
        self.answers = range(len(elements))
        self._products = table.tolist()

    def fill(self, draw: np.random.Generator, ids: np.ndarray, labels: np.ndarray, mask: int | None) -> None:
        ids[:] = draw.integers(len(self.tokens), size=len(ids))
        product, products = 0, []
        for element in ids.tolist():
            product = self._products[product][element]
            products.append(product)
        labels[:] = products


class S3(WordProblem):
    degree = 3


class A5(WordProblem):
    degree, even = 5, True


class S5(WordProblem):
    degree = 5


class Parity(Puzzle):
    """The word problem of the group with two elements, the least state there is. Half of the answers are 1."""

    bidirectional_form = False
    tokens = ("0", "1")
    answers = range(2)

    def fill(self, draw: np.random.Generator, ids: np.ndarray, labels: np.ndarray, mask: int | None) -> None:
        ids[:] = draw.integers(2, size=len(ids))
        labels[:] = np.cumsum(ids) % 2

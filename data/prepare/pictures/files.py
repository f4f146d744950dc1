"""Pictures in files: folders of classes, folders and .tar files with a table of labels, and WebDataset's .tar files."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import tarfile
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matmix.data.artifacts import artifact_name, check_utf8, errors_in_one_line, parse_json
from matmix.data.images.decode import UnreadablePicture
from matmix.data.prepare.base import ListedSource, WholeTar

SUFFIXES = frozenset({"jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm"})
"""Suffixes of files that are pictures, in lower case."""
Label = int | str

# Suffixes of the members with the label.
_LABELS = ("cls", "json")
# What a source holds of all of its pictures.
_LISTS = ("listed", "_sizes", "table", "number_of")
# A label is a few bytes, and the fields of a picture a few hundred.
_LARGEST_LABEL = 1 << 20


class Item(NamedTuple):
    """One picture of a source."""

    name: str
    """Name in messages."""
    label: Label
    """The label in the source's words."""
    where: Any
    """What the source needs to read it."""


def label_in(value: Any, where: str, field: str) -> Label:
    """Returns the label that stands in a field. Raises ValueError (one line) for what is none."""
    if value is None or value == "" or isinstance(value, bool | float | dict | list | bytes):
        raise ValueError(f"{where} has no label in {field!r} but {value!r:.40}; set --label-field")
    return value


class PictureSource(ListedSource):
    """Pictures that are read one after another. Other processes get a copy that can only `read`."""

    names: tuple[str, ...] | None = None
    """Classes in the order of the labels, where the source states them."""
    number_of: Callable[[Label, str], int]
    """`Classes.number` of the whole preparation."""

    def __init__(self, path: Path) -> None:
        self.name, self.path = str(path), path

    def __getstate__(self) -> dict[str, Any]:
        # It goes to a process with every chunk, and the list of all pictures would be large.
        return {key: value for key, value in self.__dict__.items() if key not in _LISTS}

    @property
    def bytes(self) -> int:
        return self.path.stat().st_size

    @abstractmethod
    def items(self) -> Sequence[Item]: ...

    def record(self, item: Item) -> tuple[Item, int]:
        return item, self.number_of(item.label, f"{self.name}: {item.name}")

    @abstractmethod
    def read(self, items: Sequence[Item]) -> Iterator[bytes | UnreadablePicture]:
        """Yields the bytes of the files of consecutive items, or why there are none."""


class Folder(PictureSource):
    """A folder of pictures, whose items' `where` is the path of a file."""

    def __init__(self, path: Path, listed: Sequence[Item], names: tuple[str, ...] | None = None) -> None:
        super().__init__(path)
        self.listed, self.names = listed, names
        self._sizes = [os.path.getsize(item.where) if os.path.exists(item.where) else -1 for item in listed]

    @classmethod
    def of_classes(cls, path: Path) -> Folder:
        """Returns a folder with a folder of pictures for each class, whose names in order are the classes
        (torchvision's ImageFolder). Raises ValueError (one line) for an empty class."""
        names = tuple(sorted(p.name for p in path.iterdir() if p.is_dir() and not p.name.startswith(".")))
        listed: list[Item] = []
        for folder in (path / name for name in names):
            pictures = [p for p in _walk(folder) if p.suffix.lower().removeprefix(".") in SUFFIXES]
            if not pictures:
                raise ValueError(f"the class folder {folder} is empty: there is no picture in it; remove it or fill it")
            listed += [Item(f"{folder.name}/{p.relative_to(folder)}", folder.name, str(p)) for p in pictures]
        return cls(path, listed, names)

    @classmethod
    def of_table(cls, path: Path, table: Mapping[str, Label], where: str) -> Folder:
        """Returns the pictures in a folder that a table of labels names; others are left out."""
        files = {artifact_name(file, where, nested=True): label for file, label in table.items()}
        return cls(path, [Item(file, label, str(path / file)) for file, label in files.items()])

    def items(self) -> Sequence[Item]:
        return self.listed

    def read(self, items: Sequence[Item]) -> Iterator[bytes | UnreadablePicture]:
        for item in items:
            try:
                yield Path(item.where).read_bytes()
            except FileNotFoundError:
                yield UnreadablePicture("the file is missing")
            except OSError as error:
                yield UnreadablePicture(f"the file cannot be read ({error.strerror or error})")

    @property
    def bytes(self) -> int:
        return sum(max(0, size) for size in self._sizes)

    def digest(self) -> str:
        hashed = hashlib.sha256()
        for item, size in zip(self.listed, self._sizes, strict=True):
            hashed.update(f"{item.name}\0{item.label}\0{size}\n".encode())
        return hashed.hexdigest()


def _walk(folder: Path) -> Iterator[Path]:
    """Yields the files below a folder in a fixed order, without hidden ones."""
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for path in (Path(root) / name for name in sorted(files) if not name.startswith(".")):
            check_utf8(str(path), "the file name {}", "rename it")
            yield path


@errors_in_one_line()
def read_table(text: bytes, where: str, image_field: str, label_field: str) -> dict[str, Label]:
    """Returns file name -> label of a .csv, .tsv or .json table; where: its name. Raises ValueError (one line)."""
    if where.lower().endswith(".json"):
        rows = parse_json(text, where)
        if isinstance(rows, dict):
            values = ((name, row.get(label_field) if isinstance(row, dict) else row) for name, row in rows.items())
            return {name: label_in(value, f"{where}: {name}", label_field) for name, value in values}
        if not isinstance(rows, list):
            raise ValueError(f"{where} is no object of file name -> label")
        numbered = {f"{where}: entry {n}": row for n, row in enumerate(rows)}
    else:
        try:
            lines = text.decode("utf-8-sig").splitlines()
            rows = list(csv.DictReader(lines, delimiter="\t" if where.lower().endswith(".tsv") else ","))
        except (UnicodeDecodeError, csv.Error) as error:
            raise ValueError(f"{where} cannot be read as a table ({error})") from None
        if not rows:
            raise ValueError(f"{where} holds no rows below its header")
        numbered = {f"{where}: line {n}": row for n, row in enumerate(rows, start=2)}
    table = {}
    for place, row in numbered.items():
        if not isinstance(row, dict) or not row.get(image_field):
            known = ", ".join(map(str, row)) if isinstance(row, dict) else "none"
            raise ValueError(f"{place} has no {image_field!r} (it has: {known}); set --image-field and --label-field")
        table[str(row[image_field])] = label_in(row.get(label_field), place, label_field)
    return table


class TarFile(PictureSource):
    """The samples of a .tar file, whose members share their name up to the first dot: KEY.jpg and KEY.cls or KEY.json.
    table: labels by the names of pictures, in place of members of labels."""

    def __init__(self, path: Path, label_field: str, table: dict[str, Label] | None = None) -> None:
        super().__init__(path)
        self.label_field, self.table = label_field, table

    def digest(self) -> str:
        table = json.dumps(self.table, sort_keys=True)
        return hashlib.sha256((super().digest() + table).encode()).hexdigest()

    @errors_in_one_line()
    def items(self) -> Sequence[Item]:
        try:
            with tarfile.open(self.path, "r:", tarinfo=WholeTar) as tar:
                members = [m for m in tar if m.isreg()]
            if self.table is None:
                return self._samples(members)
        except (tarfile.TarError, EOFError, OSError) as error:
            raise ValueError(f"{self.name} is damaged, truncated, or no uncompressed .tar file ({error})") from None
        places = {m.name.removeprefix("./"): (m.offset_data, m.size) for m in members}
        if missing := [name for name in self.table if name not in places]:
            raise ValueError(f"{self.name} lacks the member {missing[0]}, for which there is a label")
        return [Item(name, label, places[name]) for name, label in self.table.items()]

    def read(self, items: Sequence[Item]) -> Iterator[bytes | UnreadablePicture]:
        with self.path.open("rb") as file:
            for item in items:
                offset, size = item.where
                file.seek(offset)
                yield file.read(size)

    def _samples(self, members: Sequence[tarfile.TarInfo]) -> list[Item]:
        samples: dict[str, dict[str, tarfile.TarInfo]] = {}
        for member in members:
            folder, _, base = member.name.rpartition("/")
            key, _, suffix = base.partition(".")
            if key:  # hidden files have none
                parts = samples.setdefault(f"{folder}/{key}" if folder else key, {})
                if parts.setdefault(suffix.lower(), member) is not member:
                    raise ValueError(f"{self.name} holds {member.name} twice: two samples have one name")
        items = []
        with self.path.open("rb") as file:
            for key, parts in samples.items():
                pictures = [suffix for suffix in parts if suffix in SUFFIXES]
                labels = [suffix for suffix in _LABELS if suffix in parts]
                self._refuse_dots(key, parts, bool(pictures or labels))
                if not pictures and not labels:
                    continue
                if len(pictures) != 1 or not labels:
                    lacks = "picture (.jpg, .png, .webp)" if not pictures else "label (.cls or .json)"
                    what = f"{len(pictures)} pictures" if len(pictures) > 1 else f"no member with the {lacks}"
                    raise ValueError(f"{self.name}: sample {key} has {what}; it has: {', '.join(sorted(parts))}")
                picture, label = parts[pictures[0]], self._read_label(file, parts[labels[0]], labels[0])
                items.append(Item(key, label, (picture.offset_data, picture.size)))
        return items

    def _refuse_dots(self, key: str, parts: dict[str, tarfile.TarInfo], known: bool) -> None:
        """Raises ValueError where the name of a sample has a dot, so that its picture would be passed over.
        KEY.depth.png of a sample that is known is no such case."""
        for suffix, member in parts.items():
            middle, dot, kind = suffix.rpartition(".")
            if dot and kind in SUFFIXES and (not known or any(f"{middle}.{label}" in parts for label in _LABELS)):
                raise ValueError(
                    f"{self.name}: {member.name} would be a part of sample {key}, whose name ends at the first dot; "
                    "rename the members so that the names of samples have no dots"
                )

    def _read_label(self, file: Any, member: tarfile.TarInfo, kind: str) -> Label:
        where = f"{self.name}: member {member.name}"
        if member.size > _LARGEST_LABEL:
            raise ValueError(f"{where} is too large for a label ({member.size:,} bytes)")
        file.seek(member.offset_data)
        raw = file.read(member.size)
        if kind == "json":
            value = parse_json(raw, where)
            return label_in(value.get(self.label_field) if isinstance(value, dict) else value, where, self.label_field)
        try:
            return label_in(raw.decode("utf-8-sig").strip(), where, kind)
        except UnicodeDecodeError:
            raise ValueError(f"{where} is no text") from None


def read_member(path: Path, name: str) -> bytes | None:
    """Returns the bytes of a small member of a .tar file; None where there is none."""
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                if member.isreg() and member.name.removeprefix("./") == name:
                    return tar.extractfile(member).read()
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ValueError(f"{path} is damaged, truncated, or no uncompressed .tar file ({error})") from None
    return None

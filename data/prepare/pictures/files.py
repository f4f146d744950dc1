"""Pictures in files: folders with a folder for each class, any folder or .tar file with a table of labels, and
WebDataset's .tar files, with a member of the label beside each picture."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import tarfile
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matmix.data.artifacts import artifact_name, check_utf8, errors_in_one_line, parse_json
from matmix.data.images.decode import UnreadablePicture
from matmix.data.prepare.base import ListedSource

SUFFIXES = frozenset({"jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm"})
"""Suffixes of files that are pictures, in lower case."""
Label = int | str

# Suffixes of the members with the label.
_LABELS = ("cls", "json")
# A label is a few bytes, and the fields of a picture a few hundred.
_LARGEST_LABEL = 1 << 20


@dataclass(frozen=True, slots=True)
class Item:
    """One picture of a source."""

    name: str
    """Name in messages."""
    label: Label
    """The label in the source's words."""
    where: Any
    """What the source needs to read it."""


class PictureSource(ListedSource):
    """Pictures that are read one after another. Other processes get a copy that can only `read`."""

    names: tuple[str, ...] | None = None
    """Classes in the order of the labels, where the source states them."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.path = path

    def __getstate__(self) -> dict[str, Any]:
        # It goes to a process with every chunk, and the list of all pictures would be large.
        return {name: value for name, value in self.__dict__.items() if name not in ("listed", "table")}

    @property
    def bytes(self) -> int:
        return self.path.stat().st_size

    @abstractmethod
    def items(self) -> Sequence[Item]:
        """Returns the pictures in a fixed order. Raises ValueError (one line) for a source that cannot be used."""

    @abstractmethod
    def read(self, items: Sequence[Item]) -> Iterator[bytes | UnreadablePicture]:
        """Yields the bytes of the files of consecutive items, or why there are none."""


class _Files(PictureSource):
    """Items whose `where` is the path of a file."""

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
        return sum(os.path.getsize(item.where) for item in self.items() if os.path.exists(item.where))

    def digest(self) -> str:
        hashed = hashlib.sha256()
        for item in self.items():
            size = os.path.getsize(item.where) if os.path.exists(item.where) else -1
            hashed.update(f"{item.name}\0{item.label}\0{size}\n".encode())
        return hashed.hexdigest()


class ClassFolders(_Files):
    """A folder with a folder of pictures for each class (torchvision's ImageFolder), whose names in order are the
    classes. Raises ValueError (one line) for an empty class."""

    def __init__(self, name: str, path: Path) -> None:
        super().__init__(name, path)
        self.names = tuple(sorted(p.name for p in path.iterdir() if p.is_dir() and not p.name.startswith(".")))
        self.listed: list[Item] = []
        for folder in self.names:
            pictures = [p for p in _walk(path / folder) if p.suffix.lower().removeprefix(".") in SUFFIXES]
            if not pictures:
                raise ValueError(
                    f"the class folder {path / folder} is empty: there is no picture in it; remove it or fill it"
                )
            self.listed += [Item(f"{folder}/{p.relative_to(path / folder)}", folder, str(p)) for p in pictures]

    def items(self) -> Sequence[Item]:
        return self.listed


class TabledFolder(_Files):
    """A folder of pictures and a table of their labels; pictures that the table does not name are left out."""

    def __init__(self, name: str, path: Path, table: dict[str, Label], where: str) -> None:
        super().__init__(name, path)
        self.listed = []
        for file, label in table.items():
            artifact_name(file, where, nested=True)
            self.listed.append(Item(file, label, str(path / file)))

    def items(self) -> Sequence[Item]:
        return self.listed


@errors_in_one_line()
def read_table(text: bytes, where: str, image_field: str, label_field: str) -> dict[str, Label]:
    """Returns file name -> label of a .csv, .tsv or .json table; where: its name. Raises ValueError (one line)."""
    if where.lower().endswith(".json"):
        rows = parse_json(text, where)
        if isinstance(rows, list):
            return dict(_row(row, f"{where}: entry {n}", image_field, label_field) for n, row in enumerate(rows))
        if not isinstance(rows, dict):
            raise ValueError(f"{where} is no object of file name -> label")
        return {
            name: _label(row.get(label_field) if isinstance(row, dict) else row, f"{where}: {name}", label_field)
            for name, row in rows.items()
        }
    try:
        lines = text.decode("utf-8-sig").splitlines()
        rows = list(csv.DictReader(lines, delimiter="\t" if where.lower().endswith(".tsv") else ","))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{where} cannot be read as a table ({error})") from None
    if not rows:
        raise ValueError(f"{where} holds no rows below its header")
    return dict(_row(row, f"{where}: line {n}", image_field, label_field) for n, row in enumerate(rows, start=2))


def _row(row: Any, where: str, image_field: str, label_field: str) -> tuple[str, Label]:
    if not isinstance(row, dict) or not row.get(image_field):
        known = ", ".join(str(key) for key in row) if isinstance(row, dict) else "none"
        raise ValueError(f"{where} has no {image_field!r} (it has: {known}); set --image-field and --label-field")
    return str(row[image_field]), _label(row.get(label_field), where, label_field)


def _label(value: Any, where: str, field: str) -> Label:
    if value is None or value == "" or isinstance(value, bool | float | dict | list):
        raise ValueError(f"{where} has no label in {field!r}; set --label-field")
    return value


def _walk(folder: Path) -> Iterator[Path]:
    """Yields the files below a folder in a fixed order, without hidden ones."""
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for path in (Path(root) / name for name in sorted(files) if not name.startswith(".")):
            check_utf8(str(path), "the file name {}", "rename it")
            yield path


class TarFile(PictureSource):
    """The samples of a .tar file, whose members share their name up to the first dot: KEY.jpg and KEY.cls or KEY.json.

    table: labels of the pictures by the names of their members, in place of members of labels.
    """

    def __init__(self, name: str, path: Path, label_field: str, table: dict[str, Label] | None = None) -> None:
        super().__init__(name, path)
        self.label_field = label_field
        self.table = table

    def digest(self) -> str:
        table = json.dumps(self.table, sort_keys=True)
        return hashlib.sha256((super().digest() + table).encode()).hexdigest()

    @errors_in_one_line()
    def items(self) -> Sequence[Item]:
        try:
            with tarfile.open(self.path, "r:") as tar:
                members = [m for m in tar if m.isreg()]
                return self._tabled(members) if self.table is not None else self._samples(members)
        except (tarfile.TarError, EOFError, OSError) as error:
            raise ValueError(f"{self.name} is damaged, truncated, or no uncompressed .tar file ({error})") from None

    def read(self, items: Sequence[Item]) -> Iterator[bytes | UnreadablePicture]:
        with self.path.open("rb") as file:
            for item in items:
                offset, size = item.where
                file.seek(offset)
                yield file.read(size)

    def _tabled(self, members: Sequence[tarfile.TarInfo]) -> list[Item]:
        by_name = {m.name.removeprefix("./"): m for m in members}
        for name in self.table:
            if name not in by_name:
                raise ValueError(f"{self.name} lacks the member {name}, for which there is a label")
        return [_item(by_name[name], name, label) for name, label in self.table.items()]

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
                label = self._read_label(file, parts[labels[0]], labels[0], key)
                items.append(_item(parts[pictures[0]], key, label))
        return items

    def _refuse_dots(self, key: str, parts: dict[str, tarfile.TarInfo], known: bool) -> None:
        """Raises ValueError where the name of a sample has a dot, so that its picture would be passed over.

        A second picture of a sample, such as KEY.depth.png, is no such case. known: the key has a picture or a label.
        """
        for suffix, member in parts.items():
            middle, dot, kind = suffix.rpartition(".")
            if dot and kind in SUFFIXES and (not known or any(f"{middle}.{label}" in parts for label in _LABELS)):
                raise ValueError(
                    f"{self.name}: {member.name} would be a part of sample {key}, whose name ends at the first dot; "
                    "rename the members so that the names of samples have no dots"
                )

    def _read_label(self, file: Any, member: tarfile.TarInfo, kind: str, key: str) -> Label:
        where = f"{self.name}: member {member.name}"
        if member.size > _LARGEST_LABEL:
            raise ValueError(f"{where} is too large for a label ({member.size:,} bytes)")
        file.seek(member.offset_data)
        raw = file.read(member.size)
        if kind == "json":
            value = parse_json(raw, where)
            value = value.get(self.label_field) if isinstance(value, dict) else value
        else:
            try:
                value = raw.decode("utf-8-sig").strip()
            except UnicodeDecodeError:
                raise ValueError(f"{where} is no text") from None
        if value is None or value == "" or isinstance(value, bool | float | dict | list):
            raise ValueError(f"{where} holds no label{f' in {self.label_field!r}' if kind == 'json' else ''}")
        return value


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


def _item(member: tarfile.TarInfo, name: str, label: Label) -> Item:
    return Item(name, label, (member.offset_data, member.size))

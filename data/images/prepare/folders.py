"""Pictures in folders: one folder for each class, or any folder with a table of labels."""

from __future__ import annotations

import csv
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from matmix.data.artifacts import artifact_name, check_utf8, errors_in_one_line, parse_json
from matmix.data.images.decode import UnreadablePicture
from matmix.data.images.prepare.base import SUFFIXES, Item, Label, Source


class _Files(Source):
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
    """A folder with a folder of pictures for each class (torchvision's ImageFolder); their names in order are the
    classes. Raises ValueError (one line) for an empty one."""

    def __init__(self, name: str, path: Path) -> None:
        super().__init__(name, path)
        self.names = tuple(sorted(p.name for p in path.iterdir() if p.is_dir() and not p.name.startswith(".")))
        self.listed: list[Item] = []
        for folder in self.names:
            found = [p for p in _walk(path / folder) if _is_picture(p)]
            if not found:
                raise ValueError(
                    f"the class folder {path / folder} is empty: there is no picture in it; remove it or fill it"
                )
            self.listed += [Item(f"{folder}/{p.relative_to(path / folder)}", folder, str(p)) for p in found]

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
    """File name -> label of a .csv, .tsv or .json table; `where` is its name. Raises ValueError (one line)."""
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
    """Files below a folder, in a fixed order, none of them hidden."""
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for path in (Path(root) / name for name in sorted(files) if not name.startswith(".")):
            check_utf8(str(path), "the file name {}", "rename it")
            yield path


def _is_picture(path: Path) -> bool:
    return path.suffix.lower().removeprefix(".") in SUFFIXES

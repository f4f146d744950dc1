"""Pictures in .tar files: WebDataset's, with a member of the label beside each picture, or with a table of labels."""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from matmix.data.artifacts import errors_in_one_line, parse_json
from matmix.data.images.decode import UnreadablePicture
from matmix.data.images.prepare.base import SUFFIXES, Item, Label, Source

_LABELS = ("cls", "json")
# A label is a few bytes, and the fields of a picture a few hundred.
_LARGEST_LABEL = 1 << 20


class TarFile(Source):
    """The samples of a .tar file, whose members share their name up to the first dot: KEY.jpg and KEY.cls or
    KEY.json."""

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
        found = {m.name.removeprefix("./"): m for m in members}
        for name in self.table:
            if name not in found:
                raise ValueError(f"{self.name} lacks the member {name}, for which there is a label")
        return [_item(found[name], name, label) for name, label in self.table.items()]

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
                label = self._label(file, parts[labels[0]], labels[0], key)
                items.append(_item(parts[pictures[0]], key, label))
        return items

    def _refuse_dots(self, key: str, parts: dict[str, tarfile.TarInfo], known: bool) -> None:
        """Raises ValueError where members are a sample with a dot in its name, whose picture would be passed over; one
        more picture of a sample, as in KEY.depth.png, is none."""
        for suffix, member in parts.items():
            middle, dot, kind = suffix.rpartition(".")
            if dot and kind in SUFFIXES and (not known or any(f"{middle}.{label}" in parts for label in _LABELS)):
                raise ValueError(
                    f"{self.name}: {member.name} would be a part of sample {key}, whose name ends at the first dot; "
                    "rename the members so that the names of samples have no dots"
                )

    def _label(self, file: Any, member: tarfile.TarInfo, kind: str, key: str) -> Label:
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
    """The bytes of a small member of a .tar file; None where there is none."""
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

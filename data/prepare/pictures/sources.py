"""Finds the sources of pictures that the arguments name, and their classes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matmix.data.artifacts import errors_in_one_line, one_line
from matmix.data.prepare.base import paths_of
from matmix.data.prepare.pictures import PrepareImagesConfig
from matmix.data.prepare.pictures.files import Folder, Label, PictureSource, TarFile, read_member, read_table
from matmix.data.prepare.pictures.packed import PACKAGED, PackagedPictures, ParquetFile

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
        for path in paths_of(item, f"{{}} does not exist; give a folder, .tar or .parquet files, or {packages}"):
            shards = sorted(p for p in path.iterdir() if p.suffix in _SHARDS) if path.is_dir() else []
            for file in shards or [path]:
                if (key := str(file.resolve())) not in sources:
                    sources[key] = _source(file, config)
    return list(sources.values())


def _source(path: Path, config: PrepareImagesConfig) -> PictureSource:
    if path.is_dir():
        if config.labels:
            return Folder.of_table(path, _table(path, config), config.labels)
        if not any(p.is_dir() and not p.name.startswith(".") for p in path.iterdir()):
            raise ValueError(
                f"{path} has neither a folder of pictures for each class nor .tar or .parquet files; for a folder of "
                "pictures give a table of their labels with --labels"
            )
        return Folder.of_classes(path)
    if path.suffix == ".tar":
        return TarFile(str(path), path, config.label_field, _table(path, config) if config.labels else None)
    if path.suffix == ".parquet":
        return ParquetFile(str(path), path, config.image_field, config.label_field)
    raise ValueError(f"{path} has a suffix that cannot be read; give folders, .tar (not compressed) or .parquet files")


def _table(source: Path, config: PrepareImagesConfig) -> dict[str, Label]:
    """Returns the table of the labels, which is a file of its own or lies in the source."""
    paths = (Path(config.labels).expanduser(), source / config.labels)
    raw = next((path.read_bytes() for path in paths if path.is_file()), None)
    if raw is None and source.is_file():
        raw = read_member(source, config.labels)
    if raw is None:
        raise FileNotFoundError(f"there is no table of labels {config.labels}, also not in {source}")
    return read_table(raw, config.labels, config.image_field, config.label_field)


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

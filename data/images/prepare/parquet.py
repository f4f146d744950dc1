"""Pictures in .parquet files: a column with the bytes of the files (or with objects that hold them), and one with the
labels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from matmix.data.artifacts import errors_in_one_line, parse_json
from matmix.data.images.decode import UnreadablePicture
from matmix.data.images.prepare.base import Item, Source


class ParquetFile(Source):
    """The rows of a .parquet file, in its order: its groups of rows can only be read as a whole."""

    shuffled = False

    @errors_in_one_line()
    def __init__(self, name: str, path: Path, image_field: str, label_field: str) -> None:
        super().__init__(name, path)
        self.image_field, self.label_field = image_field, label_field
        schema = _open(str(path), name).schema_arrow
        for field in (image_field, label_field):
            if field not in schema.names:
                raise ValueError(
                    f"{name} has no column {field!r} (it has: {', '.join(schema.names)}); set --image-field and "
                    "--label-field"
                )
        self.names = _stated_names(schema.metadata or {}, label_field)

    @errors_in_one_line()
    def items(self) -> Sequence[Item]:
        import pyarrow

        file, items = _open(str(self.path), self.name), []
        try:
            for group in range(file.num_row_groups):
                labels = file.read_row_group(group, [self.label_field]).column(0).to_pylist()
                for row, label in enumerate(labels):
                    name = f"row {len(items) + 1}"
                    if label is None or isinstance(label, bool | float | dict | list | bytes):
                        raise ValueError(f"{self.name}: {name} has no label in {self.label_field!r} but {label!r:.40}")
                    items.append(Item(name, label, (group, row)))
        except (pyarrow.ArrowException, OSError, MemoryError) as error:
            raise _damaged(self.name, error) from None
        return items

    def read(self, items: Sequence[Item]) -> Iterator[bytes | UnreadablePicture]:
        for item in items:
            group, row = item.where
            value = _pictures(str(self.path), self.name, group, self.image_field)[row].as_py()
            value = value.get("bytes") if isinstance(value, dict) else value
            yield (value if isinstance(value, bytes) else UnreadablePicture(f"no bytes in {self.image_field!r}"))


def _open(path: str, name: str) -> Any:
    import pyarrow
    from pyarrow import parquet

    try:
        return parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError, MemoryError) as error:
        raise _damaged(name, error) from None


@lru_cache(maxsize=1)
def _pictures(path: str, name: str, group: int, field: str) -> Any:
    """The column of one group of rows; several chunks in a row read it."""
    import pyarrow

    try:
        return _open(path, name).read_row_group(group, [field]).column(0)
    except (pyarrow.ArrowException, OSError, MemoryError) as error:
        raise _damaged(name, error) from None


def _damaged(name: str, error: Exception) -> ValueError:
    reason = str(error).partition("\n")[0][:200]
    return ValueError(f"{name} is damaged, or no .parquet file ({reason})")


def _stated_names(metadata: dict[bytes, bytes], label_field: str) -> tuple[str, ...] | None:
    """The names of the classes, as the library `datasets` writes them."""
    if b"huggingface" not in metadata:
        return None
    try:
        names = parse_json(metadata[b"huggingface"], "its metadata")["info"]["features"][label_field]["names"]
    except (ValueError, KeyError, TypeError):
        return None
    return tuple(str(name) for name in names) if isinstance(names, list) else None

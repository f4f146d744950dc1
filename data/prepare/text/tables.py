"""Tables on the disk: .parquet files, and .arrow files such as the library `datasets` keeps them.

`Dataset.save_to_disk` and the cache of `load_dataset` are folders of .arrow files in Arrow's stream format, which
pyarrow reads from a memory map; the library itself is not needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matmix.data.artifacts import artifact_name, one_line, read_json
from matmix.data.prepare.base import open_parquet
from matmix.data.prepare.text.sources import Table, place_of

if TYPE_CHECKING:
    import pyarrow

_MAGIC_OF_FILES = b"ARROW1"


class ParquetFile(Table):
    """A .parquet file."""

    @property
    def end(self) -> int:
        with open_parquet(self.path, self.name) as file:
            return file.metadata.num_rows

    def schema(self) -> pyarrow.Schema:
        with open_parquet(self.path, self.name) as file:
            return file.schema_arrow

    def texts(self) -> Iterator[str]:
        with open_parquet(self.path, self.name) as file:
            yield from self.texts_of(file.iter_batches(batch_size=1024))

    def portions(self, start: int, stop: int) -> Iterator[list[tuple[Any, ...]]]:
        self.check_columns()
        columns, row = list(self.options.fields), 0
        # As a dictionary, so that a long value that stands in many rows is in memory once until it is cut to size.
        with open_parquet(self.path, self.name, read_dictionary=columns) as file:
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                if row >= stop or row + rows <= start:
                    row += rows
                    continue
                for batch in file.iter_batches(batch_size=1024, row_groups=[group], columns=columns):
                    yield from self.rows_of(batch, row, start, stop)
                    row += batch.num_rows


class ArrowFile(Table):
    """An .arrow file in the stream format or the file format."""

    @contextmanager
    def _batches(self) -> Iterator[tuple[pyarrow.Schema, Iterator[pyarrow.RecordBatch]]]:
        import pyarrow

        try:
            with pyarrow.memory_map(self.path) as file:
                is_file = file.read(len(_MAGIC_OF_FILES)) == _MAGIC_OF_FILES
                file.seek(0)
                if is_file:
                    reader = pyarrow.ipc.open_file(file)
                    yield reader.schema, map(reader.get_batch, range(reader.num_record_batches))
                else:
                    reader = pyarrow.ipc.open_stream(file)
                    yield reader.schema, iter(reader)
        except FileNotFoundError:
            raise
        except (pyarrow.ArrowException, OSError, MemoryError) as error:
            raise ValueError(
                f"{self.name} is damaged, no .arrow file, or of a newer version of Arrow ({one_line(error)})"
            ) from error

    @property
    def end(self) -> int:
        with self._batches() as (_, batches):
            return sum(batch.num_rows for batch in batches)

    def schema(self) -> pyarrow.Schema:
        with self._batches() as (schema, _):
            return schema

    def texts(self) -> Iterator[str]:
        with self._batches() as (_, batches):
            yield from self.texts_of(batches)

    def portions(self, start: int, stop: int) -> Iterator[list[tuple[Any, ...]]]:
        self.check_columns()
        row = 0
        names = self.schema().names
        wanted = sorted({place_of(name, names)[0] for name in self.options.fields})
        with self._batches() as (_, batches):
            for batch in batches:
                if start < row + batch.num_rows and row < stop:
                    kept = batch.select(wanted)
                    kept.validate(full=True)  # offsets of a foreign file may lead anywhere
                    yield from self.rows_of(kept, row, start, stop)
                row += batch.num_rows


def arrow_files(folder: Path) -> list[Path] | None:
    """Returns the files of a folder that `datasets` wrote, in order; None for another folder. Raises ValueError (one
    line) for several splits, and for a folder of a version that is not known."""
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(path.parent.name for path in folder.glob("*/state.json"))
        raise ValueError(
            f"{folder} holds the splits {', '.join(splits)}; name one: {folder / (splits or ['train'])[0]}"
        )
    if (folder / "state.json").is_file():
        try:
            entries = read_json(folder / "state.json")["_data_files"]
            return [folder / artifact_name(entry["filename"], "a file") for entry in entries]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{folder} is damaged, or of a newer version of datasets: its state.json does not list _data_files "
                f"({one_line(repr(error))})"
            ) from None
    if not (folder / "dataset_info.json").is_file():
        return None
    # The cache of load_dataset: NAME-SPLIT.arrow or NAME-SPLIT-00000-of-00002.arrow, and cache-*.arrow of later steps.
    files = sorted(path for path in folder.glob("*.arrow") if not path.name.startswith("cache-"))
    try:
        splits = list(read_json(folder / "dataset_info.json").get("splits") or ())
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{folder / 'dataset_info.json'} is damaged ({one_line(error)})") from None
    found = [name for name in splits if any(f"-{name}" in path.stem for path in files)]
    if len(found) > 1:
        raise ValueError(
            f"{folder} holds the splits {one_line(', '.join(found))}; name the files of one: "
            f"'{folder}/*-{found[0]}*.arrow'"
        )
    return files or None

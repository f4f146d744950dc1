"""A kind of data from outside: series of floats in .npy files, prepared into shards, read in random order.

This file and the line `MODALITIES["series"] = Series()` are all that it takes, besides a task that learns from it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from matmix.data.config import DataConfig
from matmix.data.loading.order import Order
from matmix.data.loading.rows import Facts, Failure, errors_as_failures
from matmix.data.manifest import Manifest, SplitInfo
from matmix.data.modalities import Modality, Opened, Reading
from matmix.data.modalities.base import contents_digest, shard_options
from matmix.data.prepare.base import Chunk, Document, Documents, ListedSource, Malformed, Preparation, PrepareOptions
from matmix.data.splits.reader import TokenShards, open_split

if TYPE_CHECKING:
    from matmix.data.loading.batch import Batch


@dataclass(frozen=True, kw_only=True)
class PrepareSeries(PrepareOptions):
    """Files of series, one a row, to shards."""

    verb: ClassVar[str] = "matmix prepare-series"
    max_broken: float = 0.1
    """Share of the series that may hold NaN."""

    @classmethod
    def kind(cls) -> type[Preparation]:
        return SeriesPreparation


class SeriesFile(ListedSource):
    """An array (series, steps) of float32; a sample is a row."""

    chunk = 8

    def __init__(self, path: str) -> None:
        self.path, self.name, self.bytes = Path(path), Path(path).name, Path(path).stat().st_size

    def items(self) -> Sequence[np.ndarray]:
        return np.load(self.path, allow_pickle=False)


class SeriesPreparation(Preparation):
    name = "series"
    verb = PrepareSeries.verb
    unit = "series"
    record = "series"
    most_broken = "max_broken"
    dtype = "float32"

    def __init__(self, config: PrepareSeries) -> None:
        super().__init__(config, [SeriesFile(path) for path in config.inputs], kind=self.name)

    def worker(self) -> Callable[[Chunk], Documents]:
        return functools.partial(make_documents, self.config.validation_fraction)

    def new_sums(self) -> np.ndarray:
        return np.zeros(1, np.int64)

    @classmethod
    def finish(cls, out: Path, options: Mapping[str, Any], splits: Sequence[str], sums: np.ndarray) -> dict[str, Any]:
        return {"facts": {"steps": int(sums[0])}}


def make_documents(fraction: float, chunk: Chunk) -> Documents:
    """The series without NaN, each a document; the sum is their number of steps."""
    documents = Documents.of(
        chunk,
        [
            Malformed(line, "it holds NaN") if np.isnan(one).any() else Document(one, one.tobytes(), one.nbytes)
            for line, one in enumerate(chunk.records, start=chunk.start.line)
        ],
        "float32",
        fraction,
    )
    documents.sums = np.array([documents.lengths.sum()])
    return documents


@dataclass(frozen=True, slots=True)
class SeriesOptions:
    scale: float = 1.0
    """Factor of all values."""


class SeriesFacts(Facts):
    inputs = "values"


class Series(Modality):
    """Each sample is the beginning of a series; the label of a step is the next value."""

    unit = "values"
    Options = SeriesOptions
    prepared_by = PrepareSeries

    def packing(self, data: DataConfig) -> str:
        return "rows"

    def split_size(self, split: SplitInfo) -> int:
        return split.tokens

    def manifest_facts(self, data: DataConfig, manifests: Sequence[Manifest]) -> Facts:
        return SeriesFacts()

    def open(self, data: DataConfig, reading: Reading) -> Opened:
        [path] = self.datasets(data, reading.split)
        shards = open_split(path, reading.split, **shard_options(data))
        rows = SeriesRows(shards, data, reading, self.options(data).scale)
        fingerprint = {
            "data": contents_digest(shards),
            "split": reading.split,
            "seqlen": data.seqlen,
            "scale": rows.scale,
            "seed": reading.seed,
        }
        return Opened(rows, SeriesFacts(), fingerprint)


class SeriesRows:
    """Sample n is a series of epoch n div N, in the order of the documents of that epoch."""

    def __init__(self, shards: TokenShards, data: DataConfig, reading: Reading, scale: float) -> None:
        self.order = Order(shards, data, reading)
        self.seqlen, self.scale = data.seqlen, scale
        self.limit = self.samples_per_epoch if reading.one_pass else None

    @property
    def samples_per_epoch(self) -> int:
        return self.order.total_documents

    @errors_as_failures
    def __getitems__(self, samples: list[int]) -> Batch | Failure:
        from matmix.data.loading.batch import row_batch  # processes that prepare need no torch

        inputs = np.zeros((len(samples), self.seqlen, 1), np.float32)
        labels = np.full_like(inputs, np.nan)
        steps = 0
        for row, sample in enumerate(samples):
            if self.limit is None or sample < self.limit:
                series = self.read(sample)[: self.seqlen + 1, None] * np.float32(self.scale)
                inputs[row, : len(series) - 1], labels[row, : len(series) - 1] = series[:-1], series[1:]
                steps += len(series) - 1
        return row_batch(inputs, labels, n_tokens=steps, causal=True)

    def read(self, sample: int) -> np.ndarray:
        epoch, slot = divmod(sample, self.samples_per_epoch)
        block, place = self.order.place(epoch, slot)
        return self.order.shards.read(int(block.shard[place]), int(block.index[place]))

"""The base class of modalities. A modality is a kind of data, with all that is particular to it: where its samples come
from, how they are read and put into batches, and what a model needs to know of them.

It is one file with a subclass of `Modality`, and one line in `MODALITIES`. The loader, the config, estimates and
exports ask the modality, and no one asks which one it is.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from matmix.data.config import DataConfig, datasets_of
from matmix.data.formats import READ_ONLY
from matmix.data.loading.rows import Facts, Opened, Reading
from matmix.data.manifest import MANIFEST_NAME, Manifest, SplitInfo
from matmix.data.prepare.base import PrepareOptions
from matmix.data.splits.reader import TokenShards
from matmix.data.storage.remote import is_url

if TYPE_CHECKING:
    from matmix.data.loading.loader import Loader


def shard_options(data: DataConfig) -> dict[str, Any]:
    """Returns how the shards of prepared datasets are read: options of `TokenShards`."""
    same = {name: getattr(data, name) for name in ("cache_dir", "verify", "skip_damaged", "cache_bytes")}
    # A sequence may cross into the next block: keep two blocks open.
    return {**same, "keep_open": 2 * data.shuffle_block + 2}


def streams(shards: list[TokenShards], data: DataConfig, reading: Reading) -> tuple[list[TokenShards], dict[str, Any]]:
    """Returns what each reading process of each rank reads (`Streams`), and what of it a saved position belongs to; the
    shards as they are, and {}, where they are addressable or read in order. Raises as `TokenShards.streams`."""
    if not data.streams(one_pass=reading.one_pass):
        return shards, {}
    return shards[0].streams(reading.streams(data), data.reader), {"reader": reading.reader(data)}


def contents_digest(shards: TokenShards, *others: str) -> str:
    """Returns a digest of the contents of a split and of `others`, whatever path it lies at."""
    contents = [[shard.documents, shard.tokens, shard.sha256] for shard in shards.info.shards]
    if shards.manifest.format in READ_ONLY:  # those bytes do not say where documents lie
        others += tuple(shards.manifest.files[f"{shards.split}/{name}"] for name in ("lengths.npy", "starts.npy"))
    return hashlib.sha256(json.dumps([*contents, *others]).encode()).hexdigest()[:16]


class Modality:
    """A kind of data. A subclass must define `open`; the defaults are those of prepared datasets."""

    unit: ClassVar[str] = "tokens"
    """What `Batch.n_tokens` counts, and with it throughput, counters and utilisation."""
    agreeing: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Fields of [data] -> fields of [model] that must have the same value, by their dotted names."""
    cuts_rows: ClassVar[bool] = False
    """Its rows make batches of any part of a micro-batch (`Reading.part`), for ranks that share rows of tokens."""
    Options: ClassVar[type] | None = None
    """Frozen dataclass of the fields in [data.options], every one with a default; None = it has none."""
    prepared_by: ClassVar[type[PrepareOptions] | None] = None
    """The options of a preparation of such data, for `prepare`; None where none has to be prepared."""

    # -- the recipe ----------------------------------------------------------------------------------------------

    def options(self, data: DataConfig) -> Any:
        """Returns the `Options` in [data.options]. Raises ValueError (one line) for an unknown field."""
        known = [] if self.Options is None else [field.name for field in dataclasses.fields(self.Options)]
        for name in data.options:
            if name not in known:
                there = ", ".join(known) or "none"
                raise ValueError(f"data.options.{name}: the data of this run has no such option; it has {there}")
        return None if self.Options is None else self.Options(**data.options)

    def given(self, data: DataConfig) -> bool:
        """Returns whether a recipe names data of this kind."""
        return bool(self.datasets(data))

    def check(self, data: DataConfig, *, causal: bool) -> None:
        """Raises ValueError (one line) for a recipe that no data of this kind can have; looks at no file. causal:
        whether the model predicts what comes next."""

    def packing(self, data: DataConfig) -> str:
        """Returns how documents share the rows of a batch, in the words of `data.packing`."""
        return data.packing

    def units(self, seqlen: int) -> int:
        """Returns how many units a sample of data.seqlen = `seqlen` is."""
        return seqlen

    def stretched(self, data: DataConfig, multiple: int) -> DataConfig | None:
        """Returns the config of samples that are so many times as long; None where their length is fixed."""
        return None

    # -- the data, without reading it ----------------------------------------------------------------------------

    def datasets(self, data: DataConfig, split: str = "train") -> dict[str, float]:
        """Returns the prepared datasets that a split is read from, each with its weight; {} where there are none."""
        return datasets_of(data, split)

    def named(self, data: DataConfig) -> str:
        """Returns the data in a few words, for a line of progress; "" where none is given."""
        paths = list(self.datasets(data))
        return f"a mixture of {len(paths)} datasets" if len(paths) > 1 else ", ".join(paths)

    def names(self, data: DataConfig) -> list[str]:
        """Returns the names of the data for others: URLs, names of folders and files; shares of a mixture in %."""
        weights = self.datasets(data)
        total = sum(weights.values())
        shares = {path: f" ({weight / total:.0%})" if len(weights) > 1 else "" for path, weight in weights.items()}
        return [(path if is_url(path) else Path(path).name) + share for path, share in shares.items()]

    def is_here(self, data: DataConfig) -> bool:
        """Returns whether the training split can be read on this machine without fetching anything."""
        paths = self.datasets(data)
        return bool(paths) and all(not is_url(path) and (Path(path) / MANIFEST_NAME).is_file() for path in paths)

    def size(self, data: DataConfig) -> int | None:
        """Returns the units of the training split; None where it is not on this machine, or has no end. Raises
        ValueError (one line) for a damaged manifest."""
        if not self.is_here(data):
            return None
        return sum(self.split_size(Manifest.load(path).splits["train"]) for path in self.datasets(data))

    def split_size(self, split: SplitInfo) -> int:
        """Returns the units of a split by its manifest."""
        return split.documents

    def split_words(self, split: SplitInfo) -> str:
        """Returns what a split holds in words, such as "1,000 with 234,567 tokens"."""
        return f"{split.documents:,} {self.unit}"

    def facts_here(self, data: DataConfig) -> Facts:
        """Returns what is known of the data on this machine, without reading or fetching it. Raises ValueError (one
        line) for a damaged manifest."""
        if not self.is_here(data):
            return Facts()
        return self.manifest_facts(data, [Manifest.load(path) for path in self.datasets(data)])

    def manifest_facts(self, data: DataConfig, manifests: Sequence[Manifest]) -> Facts:
        """Returns the sizes that the manifests of the datasets tell: `vocab_size` and `outputs`."""
        return Facts()

    # -- the data itself -----------------------------------------------------------------------------------------

    def open(self, data: DataConfig, reading: Reading, **asked: Any) -> Opened:
        """Opens a split. asked: what a task wants besides, such as `masking`. Raises FileNotFoundError for missing
        files, ValueError (one line) where something is damaged, does not fit together, or there is too little of it."""
        raise NotImplementedError

    def facts(self, data: DataConfig, **asked: Any) -> Facts:
        """Returns the facts about the training split. Arguments and errors as of `open`."""
        return self.open(data, Reading(), **asked).facts

    def class_names(self, data: DataConfig, **asked: Any) -> tuple[str, ...]:
        """Returns the names of the classes in the order of a classifier's outputs. Arguments, errors: as of `open`."""
        return self.facts(data, **asked).classes

    def loader(
        self, data: DataConfig, *, micro_batch_size: int, data_rank: int = 0, data_size: int = 1, **options: Any
    ) -> Loader:
        """Returns the loader of one rank. micro_batch_size: samples in one `Batch`. options: the fields of `Reading`,
        of which `global_batch_size` always, and the arguments of `open`. Raises as `open`; ValueError also where the
        global batch is no whole number of micro-batches on each rank."""
        from matmix.data.loading.loader import Loader

        self.options(data)
        known = options.keys() & {field.name for field in dataclasses.fields(Reading)}
        sizes = {"micro_batch_size": micro_batch_size, "data_size": data_size}
        reading = Reading(**sizes, **{name: options.pop(name) for name in known})
        return Loader(self.open(data, reading, **options), data, reading, micro_batch_size, data_rank, data_size)

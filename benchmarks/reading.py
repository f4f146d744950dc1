"""`reading`, `images` and `packing`: how fast prepared data is read, and what unpadded batches save."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, ClassVar

import tyro

from matmix.benchmarks.measure import Clock
from matmix.benchmarks.report import columns
from matmix.data.config import DataConfig, ImagesConfig
from matmix.data.formats.base import unpack
from matmix.data.images.decode import decode
from matmix.data.loading.batch import Batch
from matmix.data.loading.masking import MaskingConfig
from matmix.data.modalities import build_loader
from matmix.data.splits.reader import open_split
from matmix.model import build_model, initialize
from matmix.train.arguments import parse_arguments
from matmix.train.config import RunConfig
from matmix.train.loaders import make_loader, with_data_facts
from matmix.train.process.distributed import choose_device
from matmix.use.finetuning import finetuning_config

IMAGENET = ImagesConfig(
    augment="rand-m9-mstd0.5-inc1", erasing=0.25, mixup=0.8, cutmix=1.0, smoothing=0.1, interpolation="bicubic"
)
"""What is done to pictures unless the options say otherwise."""


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """How a dataset is read."""

    data: DataConfig = field(default_factory=DataConfig)


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """A prepared dataset, and how long its reading is measured."""

    first: ClassVar = ("dataset", "DIR [--data.key value ...]")
    recipe: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DIR")] = ""
    """Dataset."""
    split: str = "train"
    """Which split."""
    batch: int = 8
    """Sequences, or pictures, in a micro-batch."""
    seconds: float = 5.0
    """How long to measure each."""

    def data(self, rest: list[str], usual: DataConfig) -> DataConfig:
        """Returns how the dataset is read, by the words that are left. Raises ValueError."""
        default = DataOptions(data=usual)
        return parse_arguments(DataOptions, rest, prog="python -P -m matmix.benchmarks", default=default).data

    def loader(self, data: DataConfig, **options: Any) -> Any:
        sizes = {"global_batch_size": self.batch, "micro_batch_size": self.batch}
        return build_loader(data, split=self.split, **sizes, **options)

    def rate(self, counts: Iterator[int], warm_up: int = 4) -> tuple[float, float]:
        """Returns what is made per second, and per second of this process's CPU time, by something that says with each
        step how much it made."""
        for _ in range(warm_up):
            next(counts)
        total, start, cpu = 0, time.perf_counter(), time.process_time()
        while (elapsed := time.perf_counter() - start) < self.seconds:
            total += next(counts)
        return total / elapsed, total / max(time.process_time() - cpu, 1e-9)


@dataclass(frozen=True, kw_only=True)
class Reading(Dataset):
    """How fast data is read: tokens (or pictures) per second, with nothing else going on.

    python -P -m matmix.benchmarks reading datasets/shakespeare --data.seqlen 1024 --data.workers 1
    python -P -m matmix.benchmarks reading 's3://bucket/train-{000..099}.tar' --data.reader webdataset
        --data.tokenizer tokenizer.json

    Prepared, or with another reader a directory that others made (MDS, .tar files).
    """

    masked: bool = False
    """Masked-LM batches instead of causal ones."""
    pictures: bool = False
    """It holds pictures, of which training is measured."""

    def run(self, rest: list[str], typed: list[str]) -> int:
        data = self.data(rest, DataConfig())
        if self.pictures:
            data = replace(data, images=replace(data.images, path=self.recipe))
            kind, asked, words = "pictures", {}, f"{data.images.size} pixels"
        else:
            data, asked = replace(data, path=self.recipe), {"masking": MaskingConfig() if self.masked else None}
            kind = "tokens"
            words = f"{data.packing}, sequences of {data.seqlen}, {'masked' if self.masked else 'causal'}"
        with contextlib.closing(self.loader(data, **asked)) as loader:
            speed, on_cpu = self.rate(batch.n_tokens for batch in loader)
        own = "" if data.workers else f"; {on_cpu:,.0f} per second of CPU time"
        print(
            f"{speed:,.0f} {kind}/s with {data.workers} worker(s): {self.recipe}, {data.reader}, {words}, "
            f"{self.batch} in a micro-batch{own}"
        )
        return 0


@dataclass(frozen=True, kw_only=True)
class Images(Dataset):
    """How fast prepared pictures are read: pictures per second of the loader, against decoding them alone.

    python -P -m matmix.benchmarks images datasets/imagenet --data.workers 8

    Four lines: reading the bytes, decoding them as well, the pictures of the evaluation, and those of training as the
    options ask for. The first two are one process without a loader; the loader has `--data.workers` processes. Where
    other programs share the cores, what a process made in a second of its CPU time tells more.
    """

    batch: int = 32
    """Pictures in a micro-batch."""

    def run(self, rest: list[str], typed: list[str]) -> int:
        data = self.data(rest, DataConfig(images=IMAGENET))
        images = replace(data.images, path=self.recipe)
        data = replace(data, images=images)
        alone = self.rate(self.decoded(data, partial(decode, channels=images.channels)))
        print(
            f"{self.recipe}: {images.size} pixels, {images.channels} channel(s), {self.batch} in a micro-batch, "
            f"{data.workers} worker(s)"
        )
        for name, (speed, on_cpu) in {"read": self.rate(self.decoded(data, bytes)), "read and decoded": alone}.items():
            print(f"{speed:>10,.0f} pictures/s {name}; {on_cpu:,.0f} per second of CPU time")
        for name in ("evaluation", "training"):
            speed, on_cpu = self.rate(self.loaded(data, one_pass=name == "evaluation"))
            # The time of other processes is not this one's.
            own = "" if data.workers else f"; {on_cpu:,.0f} per second of CPU time"
            print(f"{speed:>10,.0f} pictures/s {name}, {speed / alone[0]:.0%} of decoding alone{own}")
        return 0

    def decoded(self, data: DataConfig, work: Callable[[memoryview], object]) -> Iterator[int]:
        """Reads one picture after another in this process, over and over."""
        shards = open_split(self.recipe, self.split, cache_dir=data.cache_dir, verify=data.verify)
        while True:
            for shard in range(shards.n_shards):
                for index in range(len(shards.lengths(shard))):
                    work(unpack(shards.read(shard, index))[0])
                    yield 1

    def loaded(self, data: DataConfig, *, one_pass: bool) -> Iterator[int]:
        with contextlib.closing(self.loader(data, one_pass=one_pass)) as loader:
            while True:
                yield from (batch.n_tokens for batch in loader)


@dataclass(frozen=True, kw_only=True)
class Packing:
    """What unpadded batches save in fine-tuning: the same examples, one after the other and padded in two ways.

    python -P -m matmix.benchmarks packing RUN r8 --data.examples.train texts/r8/train.jsonl

    RUN and the task are those of `matmix finetune`, whose other options it takes, too. "concat" puts all texts of a
    micro-batch one after the other, "document" pads them to the longest one, "rows" to data.seqlen. A step is the
    forward and the backward pass of a micro-batch with weights from the seed. All three take the same examples in
    turns.
    """

    first: ClassVar = ("task", "RUN TASK [--key value ...]")
    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """Run or export."""
    recipe: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="TASK")]
    """Task or recipe, as for matmix finetune."""
    batches: int = 30
    """Micro-batches."""

    def run(self, rest: list[str], typed: list[str]) -> int:
        if self.batches < 1:
            raise ValueError(f"--batches must be 1 or more, got {self.batches}")
        config = finetuning_config(self.source, self.recipe, rest, from_scratch=True)
        packings = measure_packings(config, self.batches)
        print(f"{self.batches} micro-batches of {config.micro_batch_size or config.global_batch_size} examples")
        rows = [["  packing", "padding", "ms a step", "over concat"]]
        for name, row in packings.items():
            ratio = row["seconds"] / packings["concat"]["seconds"]
            rows.append([f"  {name}", f"{row['padding']:.1%}", f"{row['seconds'] * 1e3:.1f}", f"{ratio:.2f}"])
        print(columns(rows))
        return 0


def measure_packings(config: RunConfig, batches: int) -> dict[str, dict[str, float]]:
    """Returns by packing "padding", the share of positions that hold no token, and "seconds" of a step, the mean over
    `batches` micro-batches."""
    config = with_data_facts(config, make_loader(config, "train", 0, 1))
    task, device = config.task(), choose_device(config.device, 0)
    clock = Clock(device)
    model = build_model(config.model, device=device)
    initialize(model, config.seed)

    def loaded(packing: str) -> Iterator[Batch]:
        examples = replace(config.data.examples, truncate=True)
        data = replace(config.data, packing=packing, examples=examples, workers=0)
        return itertools.islice(make_loader(replace(config, data=data), "train", 0, 1), batches)

    def step(batch: Batch) -> None:
        task.loss(model, batch).total.backward()
        model.zero_grad()

    packings = ("concat", "document", "rows")
    rows: list[list[tuple[int, int, float]]] = [[] for _ in packings]
    for group in zip(*map(loaded, packings), strict=True):
        for own, batch in zip(rows, group, strict=True):
            run = partial(step, batch.to(device))
            if not own:
                run()  # warms up
            own.append((batch.n_tokens, batch.inputs.numel(), clock.seconds(run)[0]))
    tokens, positions, seconds = zip(*(map(sum, zip(*own, strict=True)) for own in rows), strict=True)
    assert len(set(tokens)) == 1, "all packings hold the same texts"
    return {
        name: {"padding": 1 - tokens[0] / positions[number], "seconds": seconds[number] / batches}
        for number, name in enumerate(packings)
    }

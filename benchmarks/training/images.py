"""How fast prepared pictures are read: pictures per second of the loader, against decoding them alone.

    python -P -m matmix.benchmarks images datasets/imagenet --data.workers 8
    python -P -m matmix.benchmarks images datasets/mnist --data.images.size 28 --data.images.channels 1

Four lines: reading the bytes, decoding them as well, the pictures of the evaluation, and those of training as the
options ask for. The first two are one process without a loader; the loader has `--data.workers` processes. Where other
programs share the cores, what a process made in a second of its CPU time tells more.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated

import tyro

from matmix.data.config import DataConfig, ImagesConfig
from matmix.data.formats.base import unpack
from matmix.data.images.decode import decode
from matmix.data.modalities import build_loader
from matmix.data.splits.reader import open_pictures

IMAGENET = ImagesConfig(
    augment="rand-m9-mstd0.5-inc1", erasing=0.25, mixup=0.8, cutmix=1.0, smoothing=0.1, interpolation="bicubic"
)
"""What is done to pictures unless the options say otherwise."""


@dataclass(frozen=True, kw_only=True)
class Options:
    path: Annotated[str, tyro.conf.Positional]
    """Prepared dataset of pictures."""
    data: DataConfig = field(default_factory=lambda: DataConfig(images=IMAGENET))
    """How it is read, augmented and mixed."""
    split: str = "train"
    """Which split."""
    batch: int = 32
    """Pictures in a micro-batch, and in a step."""
    seconds: float = 5.0
    """How long to measure each."""


def rate(counts: Iterator[int], seconds: float, warm_up: int = 4) -> tuple[float, float]:
    """Pictures per second, and per second of this process's CPU time, of something that says with each step how many it
    made; after `warm_up` steps."""
    for _ in range(warm_up):
        next(counts)
    total, start, cpu = 0, time.perf_counter(), time.process_time()
    while (elapsed := time.perf_counter() - start) < seconds:
        total += next(counts)
    return total / elapsed, total / max(time.process_time() - cpu, 1e-9)


def main(arguments: list[str]) -> None:
    """The command."""
    options = tyro.cli(Options, description=__doc__, args=arguments, prog="python -P -m matmix.benchmarks images")
    images = replace(options.data.images, path=options.path)
    data = replace(options.data, images=images)

    def decoded(picture: memoryview) -> object:
        return decode(picture, channels=images.channels)

    found = {
        "read": rate(_alone(options, bytes), options.seconds),
        "read and decoded": rate(_alone(options, decoded), options.seconds),
        "evaluation": rate(_loaded(options, data, one_pass=True), options.seconds),
        "training": rate(_loaded(options, data, one_pass=False), options.seconds),
    }
    print(
        f"{options.path}: {images.size} pixels, {images.channels} channel(s), {options.batch} in a micro-batch, "
        f"{data.workers} worker(s)"
    )
    decoding = found["read and decoded"]
    for name, (speed, on_cpu) in found.items():
        loaded = name in ("evaluation", "training")
        line = f"{speed:>10,.0f} pictures/s {name}"
        line += f", {speed / decoding[0]:.0%} of decoding alone" if loaded else ""
        # The time of other processes is not this one's.
        own = not (loaded and data.workers)
        print(line + (f"; {on_cpu:,.0f} per second of CPU time" if own else ""))


def _alone(options: Options, work: Callable[[memoryview], object]) -> Iterator[int]:
    """One picture after another in this process, over and over."""
    shards = open_pictures(options.path, options.split, cache_dir=options.data.cache_dir, verify=options.data.verify)
    while True:
        for shard in range(shards.n_shards):
            for index in range(len(shards.lengths(shard))):
                work(unpack(shards.read(shard, index))[0])
                yield 1


def _loaded(options: Options, data: DataConfig, *, one_pass: bool) -> Iterator[int]:
    loader = build_loader(
        data,
        split=options.split,
        global_batch_size=options.batch,
        micro_batch_size=options.batch,
        one_pass=one_pass,
    )
    try:
        while True:
            for batch in loader:
                yield batch.n_tokens
    finally:
        loader.close()

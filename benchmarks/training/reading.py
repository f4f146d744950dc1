"""How fast a prepared dataset is read: tokens per second, with nothing else going on.

    python -P -m matmix.benchmarks reading datasets/shakespeare --data.seqlen 1024 --data.workers 1
    python -P -m matmix.benchmarks reading datasets/shakespeare --masked --seconds 10

One line per measurement, and how many tokens per second one reading process gives.
"""

import time
from dataclasses import dataclass, field, replace
from typing import Annotated

import tyro

from matmix.data.config import DataConfig
from matmix.data.loading.loader import Loader
from matmix.data.loading.masking import MaskingConfig
from matmix.data.modalities import build_loader


@dataclass(frozen=True, kw_only=True)
class Options:
    path: Annotated[str, tyro.conf.Positional]
    """Prepared dataset."""
    data: DataConfig = field(default_factory=DataConfig)
    """How it is read."""
    split: str = "train"
    """Which split."""
    batch: int = 8
    """Sequences in a micro-batch."""
    seconds: float = 5.0
    """How long to measure."""
    masked: bool = False
    """Masked-LM batches instead of causal ones."""


def measure(loader: Loader, seconds: float, warm_up: int = 4) -> float:
    """Tokens per second of a training loader, after `warm_up` micro-batches."""
    batches = iter(loader)
    for _ in range(warm_up):
        next(batches)
    tokens, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        tokens += next(batches).n_tokens
    return tokens / elapsed


def main(arguments: list[str]) -> None:
    """The command."""
    options = tyro.cli(Options, description=__doc__, args=arguments, prog="python -P -m matmix.benchmarks reading")
    loader = build_loader(
        replace(options.data, path=options.path),
        split=options.split,
        global_batch_size=options.batch,
        micro_batch_size=options.batch,
        masking=MaskingConfig() if options.masked else None,
    )
    rate = measure(loader, options.seconds)
    workers = options.data.workers
    print(
        f"{rate:,.0f} tokens/s with {workers} worker(s): {options.path}, {options.data.packing}, "
        f"sequences of {options.data.seqlen}, {options.batch} in a micro-batch, "
        f"{'masked' if options.masked else 'causal'}"
    )

"""From a `DataConfig` to micro-batches: the same sequence of global batches on any ranks and workers.

How sample n maps to tokens. Every training sample has a number n = 0, 1, 2, ... for ever. `mixture`
turns n into (dataset, epoch, slot), `packing` turns (epoch, slot) into a row of tokens, `order` says
which documents lie there, and `masking` draws from (seed, epoch, n). Each step is a function of the
data, the config and the seed, so

- global batch b is the samples [b G, (b + 1) G), G = global_batch_size;
- rank r of R takes the r-th contiguous piece of G / R of them, cut into micro-batches in order;
- a worker is handed the numbers of one whole micro-batch and reads, masks and collates it;
- the position in the data is one number, the samples that have been used. It is saved as `state_dict`
  and can be taken up by another number of ranks or workers, another micro-batch size, and also another G
  (the next global batch then begins at that number).

A training loader goes on for ever, epoch after epoch. A one-pass loader (evaluation) reads the split
once, in order: its last global batch is filled with rows of padding without labels, so that every rank
has the same number of micro-batches and every token counts once.
"""

import math
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader

from matmix.data.config import DataConfig
from matmix.data.loading.batch import Batch
from matmix.data.loading.facts import DataFacts, GeneratedFacts, PreparedFacts
from matmix.data.loading.generated_rows import GeneratedRows
from matmix.data.loading.loader_parts import (
    check_batch_sizes,
    check_same_tokenizer,
    data_digest,
    first_difference,
    make_masker,
    make_packing,
    manifest_facts,
)
from matmix.data.loading.masking import MaskingConfig
from matmix.data.loading.micro_batches import Failure, MicroBatches
from matmix.data.loading.mixture import Mixture
from matmix.data.loading.reading_processes import reading_context, worker_beginning
from matmix.data.splits.reader import open_dataset
from matmix.data.synthetic import make_task

if TYPE_CHECKING:
    from matmix.data.tokenizer import Tokenizer


class Rows(Protocol):
    """What makes micro-batches from the numbers of their samples."""

    limit: int | None
    """Samples of one pass; None = without end."""

    @property
    def samples_per_epoch(self) -> int: ...

    def __getitems__(self, samples: list[int]) -> Batch | Failure: ...


class _Plan:
    """Batch sampler: the sample numbers of one rank's micro-batches, from global sample `start` on.

    Knows nothing of its loader, so that the two make no cycle of references.
    """

    def __init__(self, limit: int | None, global_batch: int, micro_batch: int, data_rank: int, data_size: int) -> None:
        self.start = 0
        self.limit = limit
        self.global_batch = global_batch
        self.micro_batch = micro_batch
        self.rank_batch = global_batch // data_size
        self.data_rank = data_rank

    def __iter__(self) -> Iterator[list[int]]:
        start = self.start
        while self.limit is None or start < self.limit:
            first = start + self.data_rank * self.rank_batch
            for begin in range(first, first + self.rank_batch, self.micro_batch):
                yield list(range(begin, begin + self.micro_batch))
            start += self.global_batch


class _Readers(DataLoader):
    """PyTorch's own, without its two warnings of four lines where there are more reading processes than cores: most of
    the time they wait, and a recipe for eight GPUs is also tried on a laptop."""

    def check_worker_number_rationality(self) -> None:
        pass


class Loader:
    """Iterates micro-batches of one rank; made by `build_loader`.

    `samples` counts the samples, over all ranks, of the global batches handed out in full (batches that
    workers have prepared ahead do not count). A new iteration goes on from there; that of a one-pass
    loader begins anew, unless a position was just loaded. One iteration at a time.
    """

    def __init__(
        self,
        dataset: Rows,
        facts: DataFacts,
        config: DataConfig,
        *,
        fingerprint: dict[str, Any],
        global_batch_size: int,
        micro_batch_size: int,
        data_rank: int,
        data_size: int,
    ) -> None:
        self.dataset = dataset
        self.facts = facts
        self.config = config
        self.fingerprint = fingerprint
        self.global_batch_size = global_batch_size
        self.micro_batch_size = micro_batch_size
        self.data_rank = data_rank
        self.data_size = data_size
        self.samples = 0
        self._loaded = False
        self._plan = _Plan(self.limit, global_batch_size, micro_batch_size, data_rank, data_size)
        # Holds the DataLoader, out of reach of the garbage collector: if that found it together with a loader
        # in a cycle of references, it would close the queues before asking the workers to end, and wait 5 s.
        self._readers: dict[str, DataLoader] = {}
        weakref.finalize(self, self._readers.clear)

    @property
    def limit(self) -> int | None:
        """Samples of a one-pass loader; None for one without end."""
        return self.dataset.limit

    @property
    def samples_per_epoch(self) -> int:
        return self.dataset.samples_per_epoch

    @property
    def micro_batches_per_step(self) -> int:
        """Micro-batches of this rank in one global batch."""
        return self.global_batch_size // (self.micro_batch_size * self.data_size)

    @property
    def batches_per_epoch(self) -> int:
        """Global batches in an epoch: of a one-pass loader all of them, else the whole ones (at least 1)."""
        if self.limit is not None:
            return math.ceil(self.samples_per_epoch / self.global_batch_size)
        return max(1, self.samples_per_epoch // self.global_batch_size)

    @property
    def vocab_size(self) -> int:
        return self.facts.vocab_size

    @property
    def bytes_per_target(self) -> float | None:
        """See `PreparedFacts`; None for generated samples, which are no text."""
        return self.facts.bytes_per_target

    @property
    def token_histogram(self) -> np.ndarray | None:
        """int64 (vocab_size,): how often each id is a target in the training split; None without tokens."""
        return self.facts.token_histogram

    @property
    def tokenizer(self) -> "Tokenizer | None":
        """None where the inputs are no tokens."""
        return self.facts.tokenizer

    def __iter__(self) -> Iterator[Batch]:
        if self.limit is not None and not self._loaded:
            self.samples = 0
        self._loaded = False
        if not self._readers:
            self._readers["torch"] = self._make_loader()
        self._plan.start = self.samples
        done = 0
        for batch in self._readers["torch"]:
            if isinstance(batch, Failure):
                raise batch.kind(batch.message)
            done += 1
            if done == self.micro_batches_per_step:
                self.samples += self.global_batch_size
                done = 0
            yield batch

    def _make_loader(self) -> DataLoader:
        workers = self.config.workers
        options = {}
        if workers:
            options = {
                "multiprocessing_context": reading_context(self.config.worker_start),
                "worker_init_fn": worker_beginning(self.config.worker_start),
                "persistent_workers": True,
                "prefetch_factor": self.config.prefetch,
            }
        return _Readers(
            self.dataset,
            batch_sampler=self._plan,
            collate_fn=_as_is,
            num_workers=workers,
            pin_memory=torch.cuda.is_available(),
            # Each iterator draws a seed for its workers. Nothing here uses it, and drawn from the global
            # generator it would shift the dropout of a resumed run against that of a run that went on.
            generator=torch.Generator(),
            **options,
        )

    def state_dict(self) -> dict[str, Any]:
        """Position in the data, JSON-serialisable: {"samples": number of the next sample, "fingerprint": {...}}."""
        return {"samples": self.samples, "fingerprint": self.fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up a saved position; the next iteration begins there.

        Raises ValueError if it was saved with other data, or with settings that make other sequences.
        """
        saved = state.get("fingerprint")
        if not isinstance(saved, dict) or not isinstance(state.get("samples"), int) or state["samples"] < 0:
            raise ValueError("the saved data position is damaged: it needs samples and a fingerprint")
        for key in sorted(self.fingerprint.keys() | saved.keys()):
            # Positions saved by earlier versions do not say it.
            if key == _MANIFEST and key not in saved:
                continue
            if difference := first_difference(saved.get(key), self.fingerprint.get(key), key):
                name, was, now = difference
                raise ValueError(
                    f"the saved data position belongs to other data: {name} was {was!r} and is now {now!r}; "
                    "go back to the old setting or start a new run"
                )
        self.samples = state["samples"]
        self._loaded = True

    def close(self) -> None:
        """Ends the reading processes; a later iteration starts new ones."""
        self._readers.clear()


def _as_is(batch: Batch | Failure) -> Batch | Failure:
    return batch


def build_loader(
    config: DataConfig,
    *,
    split: str = "train",
    global_batch_size: int,
    micro_batch_size: int,
    data_rank: int = 0,
    data_size: int = 1,
    seed: int = 0,
    masking: MaskingConfig | None = None,
    one_pass: bool = False,
    tokenizer_sha256: str | None = None,
) -> Loader:
    """Opens the data, or readies the task that generates them, and makes the loader of one rank.

    global_batch_size: sequences in one optimizer step over all ranks; micro_batch_size: sequences in one
    `Batch`. masking: masked-LM batches (a generated task puts its own masks); None = causal ones. one_pass:
    read the split once, in order. tokenizer_sha256: refuse data prepared with another tokenizer than this.

    Raises FileNotFoundError where files are missing, ValueError where something is damaged, does not fit
    together, or there are too few tokens for one sequence.
    """
    check_batch_sizes(global_batch_size, micro_batch_size, data_size)
    assert 0 <= data_rank < data_size
    if config.synthetic.task:
        parts = _generated(config, split, seed, masking is None, one_pass)
    else:
        parts = _prepared(config, split, seed, masking, one_pass, tokenizer_sha256)
    dataset, facts, fingerprint = parts
    return Loader(
        dataset,
        facts,
        config,
        fingerprint=fingerprint,
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        data_rank=data_rank,
        data_size=data_size,
    )


_MANIFEST = "manifest"

_Parts = tuple[MicroBatches | GeneratedRows, DataFacts, dict[str, Any]]
"""What makes rows, what is known about them, and what a saved position belongs to."""


def _generated(config: DataConfig, split: str, seed: int, causal: bool, one_pass: bool) -> _Parts:
    options, task = config.synthetic, make_task(config.synthetic)
    task.check(config.seqlen)
    if not (task.causal_form if causal else task.bidirectional_form):
        raise ValueError(
            f'data.synthetic.task = "{options.task}" has no form for models that '
            f"{'predict what comes next' if causal else 'read the whole sequence'}"
        )
    facts = GeneratedFacts(task, config.seqlen)
    dataset = GeneratedRows(
        task,
        config.seqlen,
        seed=seed,
        split=split,
        causal=causal,
        limit=options.validation_samples if one_pass else None,
    )
    fingerprint = {
        "task": options.task,
        **{name: getattr(options, name) for name in ("symbols", "items", "depth", "arguments")},
        "split": split,
        "seqlen": config.seqlen,
        "seed": seed,
        "objective": "causal" if causal else "masked",
    }
    return dataset, facts, fingerprint


def _prepared(
    config: DataConfig,
    split: str,
    seed: int,
    masking: MaskingConfig | None,
    one_pass: bool,
    tokenizer_sha256: str | None,
) -> _Parts:
    sources = dict(config.mixture) or {config.path: 1.0}
    if split == "validation" and config.validation_path:
        sources = {config.validation_path: 1.0}
    if "" in sources:
        raise ValueError("no data given: set data.path to a prepared dataset, or data.mixture, or data.synthetic.task")
    shards = [
        open_dataset(
            path,
            split,
            cache_dir=config.cache_dir,
            verify=config.verify,
            # A sequence may cross into the next block: keep two blocks open.
            keep_open=2 * config.shuffle_block + 2,
            tokenizer_sha256=tokenizer_sha256,
            skip_damaged=config.skip_damaged,
            cache_bytes=config.cache_bytes,
        )
        for path in sources
    ]
    check_same_tokenizer(shards)
    shuffle = config.shuffle and not one_pass
    packings = [make_packing(s, config, shuffle, seed, masking is None, one_pass) for s in shards]
    mixture = Mixture([len(p) for p in packings], None if one_pass else list(sources.values()))
    masker = None if masking is None else make_masker(shards[0], masking, seed)
    pad_id = shards[0].manifest.tokenizer.special.get("pad")
    dataset = MicroBatches(
        packings,
        mixture,
        masker,
        packing=config.packing,
        pad_id=0 if pad_id is None else pad_id,
        limit=mixture.samples_per_epoch if one_pass else None,
        skip_damaged=config.skip_damaged,
    )
    fingerprint = {
        "data": [data_digest(s) for s in shards],
        _MANIFEST: [manifest_facts(s) for s in shards],
        "weights": list(sources.values()),
        "split": split,
        "seqlen": config.seqlen,
        "packing": config.packing,
        "prefix": config.prefix,
        "suffix": config.suffix,
        "shuffle": shuffle,
        "shuffle_block": config.shuffle_block,
        "seed": seed,
        "objective": "causal" if masking is None else "masked",
    }
    return dataset, PreparedFacts(shards, config), fingerprint

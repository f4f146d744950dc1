"""From a `DataConfig` to micro-batches: the same sequence of global batches on any ranks and workers.

Every training sample has a number n = 0, 1, 2, ... for ever. `mixture` turns n into (dataset, epoch, slot), `packing`
turns (epoch, slot) into a row of tokens, `order` says which documents lie there, and `masking` draws from (seed, epoch,
n): functions of the data, the config and the seed. So

    - global batch b is the samples [b G, (b + 1) G), G = global_batch_size;
    - rank r of R takes the r-th contiguous piece of G / R of them, cut into micro-batches in order;
    - a worker is handed the numbers of one whole micro-batch and reads, masks and collates it;
    - the position in the data is one number, the samples that have been used, which can be taken up by another number
      of ranks or workers, another micro-batch size, and also another G; with `data.window` by samples of another length
      as well, from the first of them that begins at or behind it.

A one-pass loader (evaluation) reads the split once, in order: its last global batch is filled with rows of padding
without labels, so that every rank has the same number of micro-batches and every token counts once.
"""

import hashlib
import json
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader

from matmix.data.artifacts import fits
from matmix.data.config import DataConfig
from matmix.data.loading.batch import Batch
from matmix.data.loading.reading_processes import reading_context, worker_beginning
from matmix.data.loading.rows import Cursor, Failure, Numbers, Opened, Reading

_CONTENTS = "data", "manifest", "examples", "classes"
"""What of a fingerprint is the data itself; the rest says how it is read."""


@dataclass
class _Plan:
    """Batch sampler: the sample numbers of one rank's micro-batches, from global sample `start` on. Knows nothing of
    its loader, so that the two make no cycle of references."""

    limit: int | None
    global_batch: int
    rank_batch: int
    micro_batch: int
    data_rank: int
    start: int = 0
    streams: list[tuple[int, Cursor]] = field(default_factory=list)
    """This rank's streams that have cursors: of each its number and where it goes on from `start`."""

    def __iter__(self) -> Iterator[list[int]]:
        start, told = self.start, 0
        while self.limit is None or start < self.limit:
            first = start + self.data_rank * self.rank_batch
            for begin in range(first, first + self.rank_batch, self.micro_batch):
                numbers = Numbers(range(begin, begin + self.micro_batch))
                if told < len(self.streams):
                    numbers.begin = self.streams[self.turn(start, begin - first)]
                    told += 1
                yield numbers
            start += self.global_batch

    def turn(self, start: int, within: int = 0) -> int:
        """Returns which of the streams is read from at `within` samples after global sample `start`."""
        micro_batches = start // self.global_batch * (self.rank_batch // self.micro_batch) + within // self.micro_batch
        return micro_batches % len(self.streams)


class _Readers(DataLoader):
    """PyTorch's own, without its warnings of more reading processes than cores: most of the time they wait."""

    def check_worker_number_rationality(self) -> None:
        pass


class Loader:
    """Iterates micro-batches of one rank; made by `Modality.loader`. One iteration at a time.

    `samples` counts the samples, over all ranks, of the global batches handed out in full. A new iteration goes on from
    there; that of a one-pass loader begins anew, unless a position was just loaded.
    """

    def __init__(
        self,
        opened: Opened,
        config: DataConfig,
        reading: Reading,
        micro_batch_size: int,
        data_rank: int,
        data_size: int,
    ) -> None:
        check_batch_sizes(reading.global_batch_size, micro_batch_size, data_size)
        assert 0 <= data_rank < data_size
        self.dataset, self.facts, self.fingerprint = opened
        self.config = config
        self.global_batch_size, self.micro_batch_size = reading.global_batch_size, micro_batch_size
        self.data_rank, self.data_size = data_rank, data_size
        self.samples = 0
        self._loaded = False
        share = self.global_batch_size // data_size
        self._plan = _Plan(self.limit, self.global_batch_size, share, micro_batch_size, data_rank)
        own = 0 if self.limit is not None else getattr(self.dataset, "streams", 0) // data_size
        self._cursors: list[Cursor] = [(0, 0, 0, 0)] * own
        # Holds the DataLoader, out of reach of the garbage collector: if that found it together with a loader
        # in a cycle of references, it would close the queues before asking the workers to end, and wait 5 s.
        self._readers: dict[str, DataLoader] = {}
        weakref.finalize(self, self._readers.clear)

    @property
    def limit(self) -> int | None:
        """Samples of a one-pass loader; None for one without end."""
        return self.dataset.limit

    @property
    def samples_per_epoch(self) -> int | None:
        return self.dataset.samples_per_epoch

    @property
    def contents(self) -> str:
        """A digest of what the data holds, wherever it lies and however it is read; that of nothing where samples are
        generated."""
        held = {key: self.fingerprint[key] for key in _CONTENTS if key in self.fingerprint}
        return hashlib.sha256(json.dumps(held, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def micro_batches_per_step(self) -> int:
        """Micro-batches of this rank in one global batch."""
        return self.global_batch_size // (self.micro_batch_size * self.data_size)

    def __iter__(self) -> Iterator[Batch]:
        if self.limit is not None and not self._loaded:
            self.samples = 0
        self._loaded = False
        if not self._readers:
            self._readers["torch"] = self._make_loader()
        self._plan.start = self.samples
        self._plan.streams = list(enumerate(self._cursors, start=self.data_rank * len(self._cursors)))
        done, cursors = 0, list(self._cursors)
        for batch in self._readers["torch"]:
            if isinstance(batch, Failure):
                raise batch.kind(batch.message)
            if cursors:
                cursors[self._plan.turn(self.samples, done * self.micro_batch_size)] = batch.cursor
            done += 1
            if done == self.micro_batches_per_step:
                self.samples += self.global_batch_size
                done, self._cursors = 0, list(cursors)
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

    def state_dict(self, gather: Callable[[Any], list[Any]] = lambda own: [own]) -> dict[str, Any]:
        """Returns the position in the data as JSON values: {"samples": the next sample, "fingerprint": {...}}, and of
        streams without numbers "cursors", those of each rank. gather: returns what all ranks have, in their order."""
        state = {"samples": self.samples, "fingerprint": self.fingerprint}
        if self._cursors:
            of_ranks = dict(gather((self.data_rank, self._cursors)))
            state["cursors"] = [[list(cursor) for cursor in of_ranks[rank]] for rank in sorted(of_ranks)]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up a saved position; the next iteration begins there. Raises ValueError if it was saved with other
        data, or with settings that make other sequences."""
        saved = state.get("fingerprint")
        if not isinstance(saved, dict) or not isinstance(state.get("samples"), int) or state["samples"] < 0:
            raise ValueError("the saved data position is damaged: it needs samples and a fingerprint")
        samples = state["samples"]
        if saved.get("window") and saved["window"] == self.fingerprint.get("window"):
            was, now = saved.get("seqlen"), self.fingerprint["seqlen"]
            if isinstance(was, int) and was > 0:
                samples, saved = -(-samples * was // now), {**saved, "seqlen": now}
        for key in sorted(self.fingerprint.keys() | saved.keys()):
            if difference := _first_difference(saved.get(key), self.fingerprint.get(key), key):
                name, was, now = difference
                raise ValueError(
                    f"the saved data position belongs to other data: {name} was {was!r} and is now {now!r}; "
                    "go back to the old setting or start a new run"
                )
        if self._cursors:
            form = [[(int,) * 4] * len(self._cursors)] * self.data_size
            if not fits(cursors := state.get("cursors"), tuple(map(tuple, form))):
                raise ValueError("the saved data position is damaged: it needs a cursor for each reading process")
            self._cursors = [tuple(cursor) for cursor in cursors[self.data_rank]]
        self.samples = samples
        self._loaded = True

    def close(self) -> None:
        """Ends the reading processes; a later iteration starts new ones."""
        self._readers.clear()


def _as_is(batch: Batch | Failure) -> Batch | Failure:
    return batch


def check_batch_sizes(global_batch_size: int, micro_batch_size: int, data_size: int) -> None:
    """Raises ValueError unless the global batch is a whole number of micro-batches on every rank."""
    for name, value in (("global batch", global_batch_size), ("micro-batch", micro_batch_size)):
        if value < 1:
            raise ValueError(f"the {name} must hold at least 1 sequence, got {value}")
    unit = micro_batch_size * data_size
    if global_batch_size % unit:
        below, above = global_batch_size // unit * unit, -(-global_batch_size // unit) * unit
        nearest = f"{below} or {above}" if below else f"{above}"
        raise ValueError(
            f"a global batch of {global_batch_size} cannot be divided into micro-batches of {micro_batch_size} on "
            f"{data_size} rank(s): it must be a multiple of {unit}, the nearest are {nearest}"
        )


def _first_difference(saved: Any, current: Any, name: str) -> tuple[str, Any, Any] | None:
    """Returns where two values of JSON first differ: dotted name, the one value and the other; None for equal ones."""
    if saved == current:
        return None
    pairs: list[tuple[str, Any, Any]] = []
    if isinstance(saved, dict) and isinstance(current, dict):
        pairs = [(f"{name}.{key}", saved.get(key), current.get(key)) for key in sorted(saved.keys() | current.keys())]
    elif isinstance(saved, list) and isinstance(current, list) and len(saved) == len(current) == 1:
        pairs = [(name, saved[0], current[0])]
    elif isinstance(saved, list) and isinstance(current, list) and len(saved) == len(current):
        pairs = [(f"{name}[{i}]", *pair) for i, pair in enumerate(zip(saved, current, strict=True))]
    differences = (_first_difference(a, b, where) for where, a, b in pairs)
    return next((difference for difference in differences if difference), (name, saved, current))

"""Micro-batches from the numbers of their samples; reading processes make them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol, TypeVar

import numpy as np

from matmix.data.artifacts import panics_as_errors
from matmix.data.formats.base import DamagedShard
from matmix.data.loading.batch import Batch, causal_batch, masked_batch
from matmix.data.loading.masking import Masker
from matmix.data.loading.mixture import Mixture
from matmix.data.loading.packing import Packing
from matmix.data.storage.remote import RemoteError


class Failure:
    """An error of the data on its way from a worker: torch would wrap it into a page of traceback."""

    def __init__(self, error: Exception) -> None:
        kinds = (FileNotFoundError, RemoteError, ValueError)
        self.kind = next((kind for kind in kinds if isinstance(error, kind)), OSError)
        self.message = str(error)


class Rows(Protocol):
    """Makes micro-batches from the numbers of their samples, which count up over all epochs."""

    limit: int | None
    """Samples of one pass; None = without end. Higher numbers give rows of padding without targets."""

    @property
    def samples_per_epoch(self) -> int | None:
        """Samples in an epoch; None = there are no epochs."""

    def __getitems__(self, samples: list[int]) -> Batch | Failure: ...


_Rows = TypeVar("_Rows")


def errors_as_failures(
    read: Callable[[_Rows, list[int]], Batch | Failure],
) -> Callable[[_Rows, list[int]], Batch | Failure]:
    """For a data set's `__getitems__`: what is wrong with the data comes as a Failure."""

    @functools.wraps(read)
    def wrapped(rows: _Rows, samples: list[int]) -> Batch | Failure:
        try:
            with panics_as_errors():
                return read(rows, samples)
        except (ValueError, OSError) as error:
            return Failure(error)

    return wrapped


class TokenRows:
    """`Rows` of prepared text. With `skip_damaged`, samples that need a damaged shard are rows of padding, too."""

    def __init__(
        self,
        packings: list[Packing],
        mixture: Mixture,
        masker: Masker | None,
        *,
        packing: str,
        pad_id: int,
        limit: int | None,
        skip_damaged: bool = False,
    ) -> None:
        self.packings = packings
        self.mixture = mixture
        self.masker = masker
        self.packing = packing
        self.pad_id = pad_id
        self.limit = limit
        self.skip_damaged = skip_damaged

    @property
    def samples_per_epoch(self) -> int:
        return self.mixture.samples_per_epoch

    @errors_as_failures
    def __getitems__(self, samples: list[int]) -> Batch | Failure:
        return self.batch(np.asarray(samples, dtype=np.int64))

    def batch(self, samples: np.ndarray) -> Batch:
        """The micro-batch of sample numbers int64 (B,)."""
        width = self.packings[0].width
        tokens = np.full((len(samples), width), self.pad_id, dtype=np.int64)
        begins = np.zeros((len(samples), width), dtype=bool)
        counts = np.zeros(len(samples), dtype=np.int64)
        n_damaged, damaged = 0, {}
        dataset, epoch, slot = (part.tolist() for part in self.mixture.locate(samples))
        for row, sample in enumerate(samples.tolist()):
            if self.limit is None or sample < self.limit:
                packing = self.packings[dataset[row]]
                try:
                    counts[row] = packing.fill(epoch[row], slot[row], tokens[row], begins[row])
                except DamagedShard as error:
                    if not self.skip_damaged:
                        raise
                    tokens[row], begins[row] = self.pad_id, False
                    n_damaged += 1
                    damaged.setdefault(error.where, str(error))
        if self.masker is None:
            batch = causal_batch(tokens, begins, counts, packing=self.packing)
        else:
            input_ids, labels = self.masker.apply(tokens, counts, self.mixture.epoch(samples), samples)
            batch = masked_batch(input_ids, labels, begins, counts, packing=self.packing)
        batch.n_damaged, batch.damaged = n_damaged, damaged
        return batch

"""Maps the number of a sample to its dataset, epoch and slot: `Mixture` for several datasets, and for one.

One dataset of N sequences: sample n is slot n mod N of epoch n div N.

Several datasets with weights: samples come in periods of P = 65,536. Within a period dataset d has c_d
places, its share of P by largest remainders (at least one), spread evenly: its k-th place is the one at
(k + 1/2) / c_d of the period, all places of all datasets sorted. So sample n belongs to the dataset d
that has place n mod P, and it is number i = (n div P) c_d + (places of d before it in the period) of
that dataset's own samples, that is slot i mod N_d of its epoch i div N_d. Every stretch of samples, a
global batch too, holds the datasets in the right proportion, and each of them is read in its own epochs,
each sequence once an epoch, however large the others are. An epoch of the mixture is, by convention, as
many samples as the datasets have sequences together.

Reading once over (evaluation) takes the datasets one after another, each sequence once; weights play no
part.

All of it is arithmetic on n: there is no state but the number of the next sample.
"""

from collections.abc import Sequence

import numpy as np

PERIOD = 1 << 16


class Mixture:
    """sizes: sequences in one epoch of each dataset. weights: positive, any scale; None reads all once
    over."""

    def __init__(self, sizes: Sequence[int], weights: Sequence[float] | None) -> None:
        self.sizes = np.asarray(sizes, dtype=np.int64)
        self.samples_per_epoch = int(self.sizes.sum())
        self._ends = np.cumsum(self.sizes)
        self.counts = None
        if weights is not None and len(sizes) > 1:
            self.counts = quotas(weights, PERIOD)
            self._dataset, self._rank = interleave(self.counts)

    def epoch(self, samples: np.ndarray) -> np.ndarray:
        """Epoch of the mixture for each sample number."""
        return samples // self.samples_per_epoch

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(dataset, epoch of that dataset, slot in that epoch), each int64 (n,), of sample numbers int64
        (n,)."""
        if self.counts is not None:
            period, place = np.divmod(samples, PERIOD)
            dataset = self._dataset[place]
            number = period * self.counts[dataset] + self._rank[place]
            return dataset, *np.divmod(number, self.sizes[dataset])
        epoch, place = np.divmod(samples, self.samples_per_epoch)
        dataset = np.searchsorted(self._ends, place, side="right")
        return dataset, epoch, place - (self._ends - self.sizes)[dataset]


def quotas(weights: Sequence[float], period: int) -> np.ndarray:
    """int64 (n,): shares of `period` in proportion to weights, by largest remainders, each at least 1."""
    shares = np.asarray(weights, dtype=np.float64)
    if len(shares) > period:
        raise ValueError(f"a mixture may have at most {period} datasets, got {len(shares)}")
    exact = shares / shares.sum() * period
    counts = np.maximum(np.floor(exact).astype(np.int64), 1)
    while (missing := period - int(counts.sum())) != 0:
        step = int(np.sign(missing))
        # Give to the one furthest below its share, or take from the one furthest above that can spare one.
        error = np.where(counts + step >= 1, (exact - counts) * step, -np.inf)
        counts[np.argmax(error)] += step
    return counts


def interleave(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Spreads counts[d] places of each dataset d evenly: (dataset at each place, places of it before),
    int64."""
    dataset = np.repeat(np.arange(len(counts)), counts)
    rank = np.concatenate([np.arange(c) for c in counts])
    order = np.lexsort((dataset, (2 * rank + 1) / (2 * counts[dataset])))
    return dataset[order], rank[order]

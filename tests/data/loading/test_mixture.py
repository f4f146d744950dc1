import numpy as np
import pytest
from failures import each

from matmix.data.loading.order import PERIOD, Mixture, interleave, quotas


def test_one_dataset_is_its_own_order():
    dataset, epoch, slot = Mixture([5], [2.0]).locate(np.arange(12))
    assert dataset.tolist() == [0] * 12
    assert epoch.tolist() == [0] * 5 + [1] * 5 + [2] * 2
    assert slot.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]


def test_each_dataset_is_read_in_its_own_epochs():
    sizes = [7, 1000, 13]
    mixture = Mixture(sizes, [1, 2, 5])
    dataset, epoch, slot = mixture.locate(np.arange(3 * PERIOD))
    for d, size in enumerate(sizes):
        mine = dataset == d
        assert np.array_equal(epoch[mine] * size + slot[mine], np.arange(mine.sum()))
    assert mixture.samples_per_epoch == 1020
    assert mixture.epoch(np.array([0, 1019, 1020])).tolist() == [0, 0, 1]


def test_every_stretch_holds_the_wanted_shares():
    weights = np.array([0.5, 0.3, 0.15, 0.05])
    dataset, _, _ = Mixture([10] * 4, weights).locate(np.arange(2 * PERIOD))
    taken = np.cumsum(dataset[:, None] == np.arange(4), axis=0)
    wanted = (1 + np.arange(len(taken)))[:, None] * weights
    assert np.abs(taken - wanted).max() < 2


def test_samples_are_addressable():
    mixture = Mixture([30, 50], [1, 3])
    whole = np.stack(mixture.locate(np.arange(1000)))
    some = np.array([999, 3, 500])
    assert np.array_equal(np.stack(mixture.locate(some)), whole[:, some])


def test_reading_once_over_takes_each_sequence_once():
    dataset, epoch, slot = Mixture([3, 1, 2], None).locate(np.arange(6))
    assert list(zip(dataset.tolist(), slot.tolist(), strict=True)) == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
        (2, 0),
        (2, 1),
    ]
    assert not epoch.any()


@each("weights", [[1, 1, 1], [1e-9, 1], [0.7, 0.2, 0.1], [1] * 1000, [1e-12] * 50 + [1.0]])
def test_quotas_fill_the_period_and_leave_no_dataset_out(weights):
    counts = quotas(weights, PERIOD)
    assert counts.sum() == PERIOD
    assert counts.min() >= 1
    share = np.array(weights) / np.sum(weights)
    assert np.abs(counts / PERIOD - share).max() <= max(1, (share * PERIOD < 1).sum()) / PERIOD
    dataset, rank = interleave(counts)
    assert np.array_equal(np.bincount(dataset), counts)
    assert all(np.array_equal(rank[dataset == d], np.arange(c)) for d, c in enumerate(counts[:3]))


def test_too_many_datasets():
    with pytest.raises(ValueError, match="at most 4 datasets, got 5"):
        quotas([1.0] * 5, 4)

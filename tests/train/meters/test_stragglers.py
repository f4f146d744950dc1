"""The rank that the others wait for is named, once, with what it spends its time on; ranks that wait are not."""

import pytest
import torch

from matmix.train.meters import collectives
from matmix.train.meters.collectives import RECORDS, CollectiveClock, Stragglers, Times, numbers

EVEN = [Times(0.1, 0.001, 0.01)] * 4


class _Engine:
    world_size = 4


def _judge(*records):
    found = Stragglers(_Engine(), workers=1)
    return [found.judge(step, times) for step, times in enumerate(records, start=1)]


def with_rank_2(step: float, data: float, collectives: float):
    """The others wait in collectives for what rank 2 needs longer."""
    others = Times(step, 0.001, step - 0.09)
    return [others, others, Times(step, data, collectives), others]


def test_a_rank_that_computes_slowly_is_named_once_and_taken_back_once():
    slow = with_rank_2(0.3, 0.001, 0.01)
    lines = _judge(EVEN, *[slow] * 6, *[EVEN] * 5, *[slow] * 3)
    told = {step: line for step, line in enumerate(lines, start=1) if line}
    assert list(told) == [1 + RECORDS, 7 + RECORDS, 12 + RECORDS]
    [line] = told[1 + RECORDS]
    assert line == (
        "step 4: the other ranks wait for rank 2, which needs 289 ms a step for its own work (the median rank 89 ms): "
        "look at its node and device"
    )
    assert told[7 + RECORDS] == ["step 10: rank 2 keeps up again"]


def test_a_rank_that_waits_for_its_data_is_told_from_one_that_computes():
    lines = _judge(*[with_rank_2(0.3, 0.21, 0.01)] * 3)
    [line] = lines[-1]
    assert "wait for rank 2, which waits 210 ms a step for its data (the median rank 1 ms)" in line
    assert "data.workers (now 1)" in line


def test_moments_and_small_differences_are_not_worth_a_line():
    slow = with_rank_2(0.3, 0.001, 0.01)
    assert not any(_judge(EVEN, slow, slow, EVEN, slow, slow, EVEN, slow, EVEN))
    assert not any(_judge(*[with_rank_2(0.12, 0.001, 0.01)] * 9))
    everyone = [Times(0.3, 0.2, 0.01)] * 4  # all wait for data alike: `DataWait` says so
    assert not any(_judge(*[everyone] * 9))


def test_of_two_ranks_the_slower_is_named():
    found = Stragglers(_Engine(), workers=1)
    times = [Times(0.3, 0.0, 0.2), Times(0.3, 0.0, 0.01)]
    lines = [found.judge(step, times) for step in range(1, 5)]
    assert [len(line) for line in lines] == [0, 0, 1, 0]
    assert "wait for rank 1, which needs 290 ms" in lines[2][0]


def test_numbers_of_a_record():
    found = numbers(with_rank_2(0.3, 0.1, 0.01))
    assert found["slowest"] == 2
    assert found["own_max"] == pytest.approx(0.29)
    assert found["own_median"] == pytest.approx(0.09)
    assert (found["data_wait_max"], found["collectives_min"]) == (0.1, 0.01)
    assert found["collectives_max"] == pytest.approx(0.21)
    assert Times(0.1, 0.02, 0.3).own == 0.02  # on a GPU exchanges run beside the computation


def test_collectives_of_one_process_are_counted_and_timed(tmp_path):
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        collectives.watch()
        collectives.watch()
        clock, before = CollectiveClock(torch.device("cpu")), collectives.count.begun
        with clock.measure(sample=False):
            torch.distributed.all_reduce(torch.ones(3))
            torch.distributed.barrier()
        assert collectives.count.begun == before + 2
        assert not collectives.count.inside
        assert 0 < clock.per_step() < 5
    finally:
        torch.distributed.destroy_process_group()

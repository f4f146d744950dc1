"""A hang's message names the rank that stopped."""

from matmix.train.process.hang_report import Whereabouts, explain, find_stopped


def at(begun: int, rank: int) -> Whereabouts:
    return Whereabouts(begun, f"rank {rank} made no progress")


def test_the_rank_with_the_fewest_collectives_stopped():
    found = {rank: at(41, rank) for rank in (0, 1, 3)} | {2: at(40, 2)}
    assert find_stopped(found, 4) == [2]
    for rank in found:
        assert explain(found, rank, 4) == "rank 2 made no progress; ranks 0-1, 3 wait for it"


def test_a_rank_that_does_not_tell_stopped_unless_another_is_behind():
    waiting = {rank: at(41, rank) for rank in (0, 1)}
    assert find_stopped(waiting, 3) == [2]
    told = "rank 2 stopped and does not answer any more; ranks 0-1 wait for it (rank 1 made no progress)"
    assert explain(waiting, 1, 3) == told
    assert find_stopped(waiting | {3: at(40, 3)}, 4) == [3]


def test_nobody_is_blamed_where_all_are_at_the_same_place():
    found = {rank: at(41, rank) for rank in range(2)}
    assert explain(found, 0, 2) == "rank 0 made no progress; so did all other ranks, at the same place"
    assert explain({0: at(3, 0)}, 0, 1) == "rank 0 made no progress"

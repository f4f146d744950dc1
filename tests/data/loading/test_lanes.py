"""Lanes: the rows of a global batch that each read on where they ended in the batch before (`data.carry`)."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_shards import MemoryShards

from matmix.data.config import DataConfig, SyntheticConfig
from matmix.data.loading.packing import ConcatPacking
from matmix.data.loading.rows import Reading
from matmix.data.modalities import MODALITIES

EOS = 3
SHARDS = MemoryShards([[3, 0, 1, 7], [0, 0], [12, 1], [], [5, 2, 2, 9, 1], [4]])


def packing_of(shards, lanes, *, seqlen, one_pass=False, carry=True) -> ConcatPacking:
    data = DataConfig(seqlen=seqlen, shuffle=False, carry=carry)
    return ConcatPacking(shards, data, Reading(one_pass=one_pass, global_batch_size=lanes), True, (None, EOS))


def tokens_of(packing: ConcatPacking, slot: int) -> np.ndarray:
    row = packing.row(0, slot)
    tokens = np.empty(row.count, dtype=np.int64)
    packing.read(row, 0, tokens)
    return tokens


@given(
    lengths=st.lists(st.lists(st.integers(0, 9), max_size=5), min_size=1, max_size=4),
    seqlen=st.integers(1, 6), lanes=st.integers(1, 5), one_pass=st.booleans(),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_each_lane_reads_on(lengths, seqlen, lanes, one_pass):
    """A row begins with what the same row of the batch before predicted last; the windows are those without lanes, all
    of them in one pass."""
    packing, plain = (
        packing_of(MemoryShards(lengths), lanes, seqlen=seqlen, one_pass=one_pass, carry=c) for c in (1, 0)
    )
    batches, rest = divmod(len(packing), lanes)
    assert rest == 0
    kept = []
    for lane in range(lanes):
        line = [tokens_of(packing, batch * lanes + lane) for batch in range(batches)]
        for before, row in itertools.pairwise(line):
            if len(row):
                assert before[-1] == row[0]
        kept += [row.tolist() for row in line if len(row)]
    expected = [tokens_of(plain, slot).tolist() for slot in range(len(plain))]
    assert kept == expected[: len(kept)]
    assert len(expected) - len(kept) < (1 if one_pass else lanes)


def test_one_lane_is_the_order_of_the_files():
    packing, plain = packing_of(SHARDS, 1, seqlen=5), packing_of(SHARDS, 1, seqlen=5, carry=False)
    assert all((tokens_of(packing, slot) == tokens_of(plain, slot)).all() for slot in range(len(plain)))


def loader_of(dataset, **options):
    sizes = {"global_batch_size": 6, "micro_batch_size": 3} | options
    data = DataConfig(path=dataset, seqlen=16, shuffle=False, carry=True, workers=0)
    return MODALITIES["text"].loader(data, **sizes)


def test_a_batch_says_which_rows_go_on(dataset):
    """None in the first batch of an epoch, and none that begin with a document; on two ranks as on one."""
    loader = loader_of(dataset)
    ranks = [loader_of(dataset, data_rank=rank, data_size=2) for rank in range(2)]
    streams, halves = iter(loader), [iter(rank) for rank in ranks]
    batches = loader.samples_per_epoch // 6
    gone_on, before = 0, np.zeros(6)
    for number in range(batches + 2):
        parts = [next(streams) for _ in range(2)]
        for part, other in zip(parts, map(next, halves), strict=True):
            assert (part.inputs == other.inputs).all()
            assert (part.continues == other.continues).all()
        first = number % batches == 0
        continues = np.concatenate([part.continues for part in parts])
        last = np.concatenate([part.labels[:, -1] for part in parts])
        gone_on += continues.sum()
        if first:
            assert not continues.any()
        else:  # nothing predicts the first token of a document
            assert (continues == (before != -100)).all()
        before = last
    assert 0 < gone_on < 6 * batches


def test_rows_without_tokens_go_on_with_nothing(dataset):
    loader = loader_of(dataset, split="validation", one_pass=True)
    batches = list(loader)
    padding = np.concatenate([(batch.labels == -100).all(1) for batch in batches])
    assert padding.any()
    assert not np.concatenate([batch.continues for batch in batches])[padding].any()
    plain = MODALITIES["text"].loader(
        DataConfig(path=dataset, seqlen=16, shuffle=False, workers=0), split="validation", one_pass=True,
        global_batch_size=6, micro_batch_size=3,
    )  # fmt: skip
    targets = [
        sorted(t for b in batches for t in b.labels.flatten().tolist() if t >= 0) for batches in (batches, plain)
    ]
    assert targets[0] == targets[1]


def test_a_position_belongs_to_its_number_of_lanes(dataset):
    state = loader_of(dataset).state_dict()
    loader_of(dataset, micro_batch_size=1, data_size=3).load_state_dict(state)
    with pytest.raises(ValueError, match=r"global_batch_size was 6 and is now 12; go back to the old setting"):
        loader_of(dataset, global_batch_size=12).load_state_dict(state)
    plain = MODALITIES["text"].loader(
        DataConfig(path=dataset, seqlen=16, shuffle=False), global_batch_size=6, micro_batch_size=3
    )
    with pytest.raises(ValueError, match="carry was True and is now None"):
        plain.load_state_dict(state)


def test_more_lanes_than_windows_are_refused(dataset):
    with pytest.raises(
        ValueError, match=r"^the train split of .* of one sequence in each of 1000000 lanes \(data\.carry\) .*$"
    ):
        loader_of(dataset, global_batch_size=10**6, micro_batch_size=1)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"shuffle": True}, r"data\.shuffle = true: .*set it to false"),
        ({"packing": "document"}, r'data\.packing = "document": .*set it to "concat"'),
        ({"path": "", "mixture": {"a": 1.0, "b": 1.0}}, r"data\.mixture: .*set data\.path"),
        ({"skip_damaged": True}, r"data\.skip_damaged = true: .*set it to false"),
        ({"path": "", "synthetic": SyntheticConfig(task="s3")}, r"data\.synthetic\.task: .*set data\.path"),
    ],
)
def test_data_that_does_not_read_on_is_refused_in_one_line(changes, problem):
    with pytest.raises(ValueError, match=rf"^data\.carry cannot be used with {problem}$"):
        DataConfig(**{"path": "somewhere", "shuffle": False, "carry": True} | changes)

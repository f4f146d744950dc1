"""Order and packing against a plain reconstruction, on shards held in memory."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_shards import MemoryShards

from matmix.data.config import DataConfig
from matmix.data.loading.order import Order
from matmix.data.loading.packing import ConcatPacking, DocumentPacking
from matmix.data.loading.rows import Reading

BOS, EOS = 2, 3


SHARDS = MemoryShards([[3, 0, 1, 7], [0, 0], [12, 1], [], [5, 2, 2, 9, 1], [4]])


def order_of(shards, seed=1, shuffle=True, shuffle_block=2, extra=1) -> Order:
    data = DataConfig(shuffle=shuffle, shuffle_block=shuffle_block)
    return Order(shards, data, Reading(seed=seed), extra)


def packing_of(kind, shards, *, seqlen, causal=True, prefix=None, suffix=None, seed=0, keep_last=False, **options):
    reading = Reading(seed=seed, one_pass=keep_last)
    return kind(shards, DataConfig(seqlen=seqlen, **options), reading, causal, (prefix, suffix))


def documents(order: Order, epoch: int) -> list[tuple[int, int]]:
    blocks = range(len(order.plan(epoch).token_starts) - 1)
    found = [order.block(epoch, b) for b in blocks]
    return [(int(s), int(i)) for b in found for s, i in zip(b.shard, b.index, strict=True)]


def line(order: Order, epoch: int, prefix: int | None, suffix: int | None) -> list[tuple[int, bool]]:
    """All tokens of an epoch in order, each with whether a document begins there."""
    tokens = []
    for shard, index in documents(order, epoch):
        text = order.shards.read(shard, index).tolist()
        whole = [prefix] * (prefix is not None) + text + [suffix] * (suffix is not None)
        tokens += [(token, i == 0) for i, token in enumerate(whole)]
    return tokens


def rows(packing, epoch: int) -> list[list[tuple[int, bool]]]:
    found = []
    for slot in range(len(packing)):
        row = packing.row(epoch, slot)
        tokens, begins = np.full(packing.width, -1), np.zeros(packing.width, dtype=bool)
        assert packing.read(row, 0, tokens) == row.count
        assert (tokens[row.count :] == -1).all()
        begins[row.begins] = True
        # Any stretch of it can be read by itself.
        start, length = slot % packing.width, packing.width // 2
        some = np.full(length, -1)
        assert packing.read(row, start, some) == max(min(length, row.count - start), 0)
        assert some.tolist()[: packing.width - start] == tokens[start : start + length].tolist()
        tokens, begins = tokens[: row.count], begins[: row.count]
        found.append(list(zip(tokens.tolist(), begins.tolist(), strict=True)))
    return found


def test_every_document_that_is_not_empty_comes_once_an_epoch():
    every = sorted((s, i) for s in range(6) for i, n in enumerate(SHARDS.lengths(s)) if n)
    order = order_of(SHARDS)
    for epoch in range(3):
        assert sorted(documents(order, epoch)) == every
    assert len({tuple(documents(order, epoch)) for epoch in range(3)}) == 3
    assert documents(order, 1) == documents(order_of(SHARDS), 1)
    assert documents(order, 1) != documents(order_of(SHARDS, seed=2), 1)


def test_blocks_keep_to_their_shards():
    order = order_of(SHARDS)
    plan = order.plan(5)
    for number in range(3):
        members = set(plan.shards[2 * number : 2 * number + 2].tolist())
        assert set(order.block(5, number).shard.tolist()) <= members
    assert plan.token_starts[-1] == order.total_tokens == 47 + 11


def test_without_shuffling_the_order_is_that_of_the_files():
    order = order_of(SHARDS, shuffle=False)
    assert documents(order, 0) == documents(order, 7) == sorted(documents(order, 0))


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.lists(st.integers(0, 15), max_size=6), min_size=1, max_size=6),
    seqlen=st.integers(1, 20),
    causal=st.booleans(),
    shuffle=st.booleans(),
    keep_last=st.booleans(),
    shuffle_block=st.integers(1, 4),
    prefix=st.sampled_from([None, BOS]),
    suffix=st.sampled_from([None, EOS]),
    epoch=st.integers(0, 3),
)
def test_concat_windows_are_the_line_cut_up(
    lengths, seqlen, causal, shuffle, keep_last, shuffle_block, prefix, suffix, epoch
):
    packing = packing_of(
        ConcatPacking,
        MemoryShards(lengths),
        seqlen=seqlen,
        causal=causal,
        keep_last=keep_last,
        prefix=prefix,
        suffix=suffix,
        shuffle=shuffle,
        shuffle_block=shuffle_block,
        seed=3,
    )
    tokens = line(packing.order, epoch, prefix, suffix)
    windows = [tokens[i : i + packing.width] for i in range(0, len(tokens), seqlen)]
    windows = [w for w in windows if len(w) == packing.width or (keep_last and len(w) > causal)]
    found = rows(packing, epoch)
    assert len(found) == len(windows)
    if packing.order.shuffle:  # each window once, those of a block together
        assert sorted(found) == sorted(windows)
        starts = packing.order.plan(epoch).token_starts
        per_block = np.histogram(np.arange(len(windows)) * seqlen, bins=np.unique(starts))[0] if windows else []
        at = 0
        for size in per_block:
            assert sorted(found[at : at + size]) == sorted(windows[at : at + size])
            at += size
    else:
        assert found == windows


def packed_document(causal: bool, seqlen: int, **specials) -> list[list[int]]:
    packing = packing_of(
        DocumentPacking,
        MemoryShards([[2, 0, 6], [1]]),
        seqlen=seqlen,
        causal=causal,
        shuffle=False,
        shuffle_block=1,
        seed=0,
        **{"prefix": None, "suffix": None, **specials},
    )
    for row in rows(packing, 0):
        assert [begin for _, begin in row] == [True] + [False] * (len(row) - 1)
    return [[token for token, _ in row] for row in rows(packing, 0)]


def test_documents_are_truncated_and_empty_ones_left_out():
    long = [10_200, 10_201, 10_202, 10_203, 10_204, 10_205]
    assert packed_document(True, 4) == [[10_000, 10_001], long[:5], [20_000]]
    assert packed_document(True, 6, suffix=EOS) == [[10_000, 10_001, EOS], [*long, EOS], [20_000, EOS]]
    assert packed_document(False, 4, prefix=BOS, suffix=EOS) == [
        [BOS, 10_000, 10_001, EOS],
        [BOS, *long[:2], EOS],
        [BOS, 20_000, EOS],
    ]
    assert packed_document(False, 8, prefix=BOS, suffix=EOS)[1] == [BOS, *long, EOS]


def test_shuffled_documents_come_once_each():
    packing = packing_of(
        DocumentPacking,
        SHARDS,
        seqlen=50,
        causal=False,
        prefix=None,
        suffix=None,
        shuffle=True,
        shuffle_block=2,
        seed=0,
    )
    first = [row[0][0] for row in rows(packing, 0)]
    assert len(set(first)) == len(first) == len(packing) == 11
    assert sorted(first) == sorted(row[0][0] for row in rows(packing, 1))
    assert first != [row[0][0] for row in rows(packing, 1)]


@pytest.mark.parametrize("shuffle_block", [1, 3, 100])
def test_an_epoch_has_the_same_number_of_windows_whatever_the_order(shuffle_block):
    packing = packing_of(
        ConcatPacking,
        SHARDS,
        seqlen=5,
        causal=True,
        prefix=None,
        suffix=EOS,
        shuffle=True,
        shuffle_block=shuffle_block,
        seed=0,
    )
    assert len(packing) == (47 + 11 - 1) // 5
    assert all(len(row) == 6 for epoch in range(3) for row in rows(packing, epoch))

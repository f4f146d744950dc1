"""The fingerprint of copied tensors sees every bit, every place and every order; differing ranks are named."""

import random

import pytest
import torch
from failures import each

from matmix.train.config import FaultsConfig
from matmix.train.guards import replicas
from matmix.train.guards.replicas import describe, fingerprint

CPU = torch.device("cpu")


def print_of(*tensors: torch.Tensor) -> list[int]:
    return fingerprint(tensors, CPU).tolist()


@pytest.mark.slow
@each("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_every_single_bit_counts(dtype):
    tensors = [torch.randn(3, 5).to(dtype), torch.randn(1).to(dtype)[0], torch.zeros(7).to(dtype)]
    before = print_of(*tensors)
    assert before == print_of(*(tensor.clone() for tensor in tensors))
    seen = {tuple(before)}
    for number, tensor in enumerate(tensors):
        for place in range(tensor.numel() * tensor.element_size()):
            for bit in range(8):
                changed = [each.clone() for each in tensors]
                raw = changed[number].reshape(-1).view(torch.uint8)
                raw[place] ^= 1 << bit
                seen.add(tuple(print_of(*changed)))
    assert len(seen) == 1 + 8 * sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.slow
def test_elements_that_change_places_are_seen(monkeypatch):
    monkeypatch.setattr(replicas, "_PIECE", 128)  # several pieces
    draw = random.Random(0)
    values = torch.randn(100)
    values[::2] = values[1::2].neg()  # pairs that differ in their sign alone
    before = print_of(values)
    for _ in range(2000):
        first, second = draw.sample(range(100), 2)
        if values[first] == values[second]:
            continue
        changed = values.clone()
        changed[first], changed[second] = values[second], values[first]
        assert print_of(changed) != before, (first, second)
    assert print_of(values[:50], values[50:]) == before
    assert print_of(values[50:], values[:50]) != before


@pytest.mark.slow
def test_a_large_tensor_is_seen_to_its_end():
    values = torch.zeros(9 << 20)  # of 36 MiB: three pieces
    before = print_of(values)
    for place in (0, (4 << 20) - 1, 4 << 20, (9 << 20) - 1):
        changed = values.clone()
        changed[place] = -0.0  # a sign bit alone
        assert print_of(changed) != before


def test_the_rank_that_most_others_contradict_is_named():
    same = {"0.model.a": (1, 2), "0.model.b": (3, 4), "all.step": (5, 6)}
    nodes = ["n0", "n1", "n2"]
    words = describe([same, {**same, "0.model.b": (9, 9)}, same], nodes)
    assert words == "rank 1 (node n1) differs from its copies in model.b"
    words = describe([same, {"0.model.a": (1, 2), "all.step": (5, 6)}, same], nodes)
    assert words == "rank 1 (node n1) differs from its copies in model.b"  # which it does not have
    two = describe([same, {**same, "0.model.a": (0, 0)}], nodes)
    assert two.startswith("ranks 0-1 (nodes n0, n1) differ from each other in model.a, and there are too few copies")
    # Shards are compared with the copies of the same shard only.
    shards = [{"0.w": (1,)}, {"1.w": (2,)}, {"0.w": (1,)}, {"1.w": (3,)}, {"0.w": (1,)}, {"1.w": (2,)}]
    assert describe(shards, ["n"] * 6) == "rank 3 (node n) differs from its copies in w"


def test_its_settings_are_checked():
    with pytest.raises(ValueError, match=r"faults\.replica_check_every must be >= 0, got -1"):
        FaultsConfig(replica_check_every=-1)

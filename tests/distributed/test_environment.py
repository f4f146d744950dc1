"""Ranks, devices, random generators, and the harness of these tests."""

import random

import numpy as np
import pytest
import scenarios
import torch
from harness import run_distributed

from matmix.train.checkpoint import save as generators
from matmix.train.process.distributed import (
    Distributed,
    agree,
    choose_device,
    complaint,
    ensure_group,
    from_rank_zero,
    gather_objects,
)


def test_one_process_without_torchrun(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    with Distributed.from_environment("cpu") as here:
        assert (here.rank, here.world_size, here.device.type) == (0, 1, "cpu")
        assert not torch.distributed.is_initialized()
    assert gather_objects("x") == ["x"]
    assert from_rank_zero("x") == "x"


def test_the_group_of_one_process_that_a_library_needs_ends_with_the_run():
    with Distributed.from_environment("cpu") as here:
        ensure_group(here.device)
        with Distributed.from_environment("cpu") as inner:
            ensure_group(inner.device)
        assert torch.distributed.is_initialized()  # it was there before
    assert not torch.distributed.is_initialized()


def test_cuda_asked_for_and_absent(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match='device = "cuda" was asked for, but torch finds no CUDA device'):
        Distributed.from_environment("cuda")
    assert choose_device("auto", 0) == torch.device("cpu")


def test_more_processes_than_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto", 1) == torch.device("cuda", 1)
    assert choose_device("cpu", 1) == torch.device("cpu")
    with pytest.raises(ValueError, match=r"process 2 on this machine has no CUDA device: there are 2; .*=2"):
        choose_device("cuda", 2)


def draw():
    return random.random(), np.random.rand(), torch.rand(()).item(), torch.randperm(5).tolist()


def test_generators_are_seeded_by_rank_and_restored():
    generators.seed_all(1, 0)
    first = draw()
    state = generators.generator_states()
    following = draw()
    generators.seed_all(1, 1)
    other = draw()
    assert all(a != b for a, b in zip(first[:3], other[:3], strict=True))
    generators.set_generators(state)
    assert draw() == following
    generators.seed_all(1, 0)
    assert draw() == first


def test_gaussian_pairs_are_restored():
    """Python and NumPy draw normal numbers in pairs and keep one back."""
    random.gauss(0, 1), np.random.randn()
    state = generators.generator_states()
    expected = random.gauss(0, 1), np.random.randn()
    generators.set_generators(state)
    assert (random.gauss(0, 1), np.random.randn()) == expected


def test_agreements_between_ranks():
    found = run_distributed(scenarios.agreements, 2)
    assert (
        found
        == [("from 0", [0, 1], "disk of rank 1 (rank 1)", "rank 1 failed: KeyError('a bug')", ["only 0", None], 3.0)]
        * 2
    )


def test_agreeing_alone():
    def fail():
        raise OSError("no disk")

    assert agree(lambda: 7) == [7]
    with pytest.raises(OSError, match=r"^no disk$") as caught:
        agree(fail)
    assert complaint(caught.value) == "no disk"


def test_the_harness_reports_the_childs_traceback():
    with pytest.raises(AssertionError, match=r"rank 1:\n(.*\n)+.*ValueError: only here"):
        run_distributed(scenarios.fail_on_rank_one, 2)

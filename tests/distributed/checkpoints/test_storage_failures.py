"""A disk that is full on one rank costs a checkpoint and nothing else."""

import errno
import os
from pathlib import Path

import pytest
import scenarios
from harness import run_distributed

from matmix.train.checkpoint import save as checkpoint_save
from matmix.train.checkpoint.manager import CheckpointManager
from matmix.train.engine.config import EngineConfig


@pytest.mark.slow
def test_one_rank_cannot_write(tmp_path):
    names = ["fsdp2", "zero0", "zero2", "zero3"]
    found = run_distributed(scenarios.full_disk_all, 2, arguments=(names, str(tmp_path)))
    for rank in found:
        for name, outcome in rank.items():
            assert outcome["saved"] == [True, False, False, True], name
            only_first = ["step-00000001"]
            assert outcome["listings"] == [
                only_first,
                only_first,
                only_first,
                ["step-00000001", "step-00000004"],
            ]
            rank_named = f"(rank {outcome['faulty_rank']})"
            end = "; training goes on, the last valid one is step-00000001"
            assert outcome["told"] == [
                f"warning: no checkpoint at step 2: {os.strerror(errno.ENOSPC)} {rank_named}{end}",
                f"warning: no checkpoint at step 3: {os.strerror(errno.EFBIG)} {rank_named}{end}",
            ]


def no_space(*_args, **_kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (checkpoint_save.json, "dumps"),
        (checkpoint_save, "describe_files"),
        (checkpoint_save, "write_manifest"),
        (os, "fsync"),
        (Path, "mkdir"),
        (Path, "rename"),
    ],
)
def test_every_stage_of_a_save_may_fail(tmp_path, monkeypatch, module, name, told):
    engine = scenarios.make_engine(EngineConfig())
    manager = CheckpointManager(tmp_path)
    assert manager.save(1, engine, {})
    with monkeypatch.context() as patch:
        patch.setattr(module, name, no_space)
        assert manager.save(2, engine, {}) is None
    assert told == [
        "warning: no checkpoint at step 2: No space left on device; training goes on, "
        "the last valid one is step-00000001"
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert manager.save(2, engine, {}) == tmp_path / "step-00000002"
    assert manager.latest_valid() == tmp_path / "step-00000002"


def test_first_save_fails(tmp_path, monkeypatch, told):
    engine = scenarios.make_engine(EngineConfig())
    manager = CheckpointManager(tmp_path / "new")
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_save, "write_manifest", no_space)
        assert manager.save(1, engine, {}) is None
    assert told == ["warning: no checkpoint at step 1: No space left on device; training goes on, there is none so far"]
    assert manager.latest_valid() is None


def test_a_mistake_is_not_taken_for_a_full_disk(tmp_path, monkeypatch):
    engine = scenarios.make_engine(EngineConfig())
    manager = CheckpointManager(tmp_path)

    def broken(*_args):
        raise KeyError("a bug")

    monkeypatch.setattr(checkpoint_save, "list_files", broken)
    with pytest.raises(KeyError, match="a bug"):
        manager.save(1, engine, {})


def test_old_checkpoints_that_cannot_be_removed(tmp_path, monkeypatch, told):
    engine = scenarios.make_engine(EngineConfig())
    manager = CheckpointManager(tmp_path, keep_last=1)
    manager.save(1, engine, {})
    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.unlink", no_space)
        assert manager.save(2, engine, {})
    assert len(told) == 1
    assert "could not be removed" in told[0]
    assert manager.steps() == [1, 2]

"""Checkpoints written in the background: what is in them, how they fail, and what a kill leaves."""

import errno
import os
import re
import shutil
import signal
import sys

import pytest
import saving_scenarios
import scenarios
import torch
from harness import run_distributed
from saved_weights import read_weights

from matmix.train.checkpoint.files import find_problem
from matmix.train.checkpoint.manager import CheckpointManager
from matmix.train.checkpoint.manifest import list_checkpoints
from matmix.train.engine.base import HostMemory
from matmix.train.engine.config import EngineConfig

SLOW = (
    "warning: at step 4 the checkpoint of step 2 is still being written, and training waits for it: "
    "raise checkpoint.every, or use faster storage (said once)"
)


def check(found):
    """A checkpoint holds its step, whatever happened while it was written; one at a time; none stays in memory."""
    assert found["same"] == [True] * 9
    assert found["told"] == [SLOW]
    assert found["at_once"] == 1
    assert found["alive"] == 0
    check_damage(found["damaged"])


def check_damage(told):
    """Truncated, missing, changed: named, and the one before is used; none left is an error."""
    truncated, missing, changed = (
        "step-00000006 is damaged: .* is truncated",
        "step-00000004 is damaged: .* is missing",
        "step-00000002 is damaged: .* does not match its checksum",
    )
    expected = [truncated, "used: step-00000004", truncated, missing, "used: step-00000002"]
    expected += [truncated, missing, changed, f"{truncated}.*; no checkpoint in .* is valid: restore one"]
    assert len(told) == len(expected)
    for text, pattern in zip(told, expected, strict=True):
        assert re.search(pattern, text), (text, pattern)
        assert "\n" not in text


def files_of(ranks: int) -> list[str]:
    """What so many ranks write: each its share of the weights and of the moments."""
    return sorted(f"{kind}__{rank}_0.distcp" for kind in ("", "moments") for rank in range(ranks))


@pytest.mark.slow
def test_training_goes_on_while_it_is_written(tmp_path):
    names = list(scenarios.ENGINES)
    ranks = run_distributed(saving_scenarios.in_background_all, 2, arguments=(names, str(tmp_path)), timeout=300)
    for found in ranks:
        for name, outcome in found.items():
            check(outcome)
            assert outcome["failed"] == [None, 2, None], name
            faulty_rank = 0 if name == "zero0" else 1  # at stage 0 only rank 0 has something to write
            assert outcome["complaints"] == [
                f"warning: no checkpoint at step 2: {os.strerror(errno.ENOSPC)} (rank {faulty_rank}); "
                f"training goes on, the last valid one is step-00000001"
            ], name
            assert outcome["left"] == ["step-00000003"], name
        assert found["ddp"]["files"] == found["fsdp2"]["files"] == files_of(2)
    # Ranks that hold copies of the model share the work, and the memory.
    assert sum(found["ddp"]["held"] for found in ranks) == sum(found["fsdp2"]["held"] for found in ranks)
    held = [found["ddp"]["held"] for found in ranks]
    assert max(held) < 1.5 * min(held)


@pytest.mark.slow
def test_copies_of_shards(tmp_path):
    for found in run_distributed(
        saving_scenarios.in_background_all, 4, arguments=(["hsdp"], str(tmp_path)), timeout=300
    ):
        check(found["hsdp"])
        assert found["hsdp"]["files"] == files_of(4)


def test_one_process(tmp_path):
    found = saving_scenarios.in_background_all(["fsdp2"], str(tmp_path))["fsdp2"]
    check(found)
    assert found["failed"] == [None, 2, None]


def test_no_memory_for_a_copy(tmp_path, monkeypatch, told):
    """Saved all the same, while training waits; the next one tries again."""
    engine = scenarios.make_engine(EngineConfig())
    manager = CheckpointManager(tmp_path)
    scenarios.train_step(engine, 1, accumulation=1)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", out_of_memory)
        manager.begin_save(1, engine, {})
    assert manager.has(1)
    assert manager.wait() is None
    assert len(told) == 1
    assert told[0].startswith("warning: there is no host memory for a copy of the state")
    assert engine.host.size == 0
    manager.begin_save(2, engine, {})
    assert manager.wait() is None
    assert engine.host.size > 0
    assert manager.latest_valid() == tmp_path / "step-00000002"
    assert len(told) == 1


def test_copies_from_a_gpu_are_pinned_and_made_once(monkeypatch):
    class OnGpu(torch.Tensor):
        is_cuda = True

    made, pinned = torch.empty, []

    def empty(*sizes, pin_memory, **options):
        pinned.append(pin_memory)
        return made(*sizes, **options)

    monkeypatch.setattr(torch, "empty", empty)
    host, state = HostMemory(), {"moment": torch.ones(3).as_subclass(OnGpu), "step": torch.ones(())}
    first = host.copy(state)["moment"]
    state["moment"].mul_(2)
    assert host.copy(state)["moment"].data_ptr() == first.data_ptr()
    assert first.tolist() == [2, 2, 2]
    assert pinned == [True, False]


def out_of_memory(*_args, **_kwargs):
    raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.")


class Killed:
    """Kills this process at its `number`-th operation on files below `directory`."""

    def __init__(self, directory, number):
        self.directory, self.left = str(directory), number
        sys.addaudithook(self)

    def __call__(self, event, arguments):
        if event in ("os.remove", "os.rmdir"):
            inside = str(arguments[0]).startswith(self.directory) or arguments[1] != -1  # as rmtree does it
        else:
            watched = ("open", "os.mkdir", "os.rename", "os.scandir", "os.listdir")
            inside = event in watched and str(arguments[0]).startswith(self.directory)
        self.left -= inside
        if inside and self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("background", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_killed_at_each_of_its_file_operations(tmp_path, background):
    """Whenever a process dies, the newest checkpoint is valid: the one before, or the one being written."""
    engine = scenarios.make_engine(EngineConfig())

    def save_second(directory):
        manager = CheckpointManager(directory, keep_last=1)
        if background:
            manager.begin_save(2, engine, {})
            scenarios.train_step(engine, 2, accumulation=1)
            assert manager.wait() is None
        else:
            assert manager.save(2, engine, {})

    states = {}
    for step in (1, 2):
        scenarios.train_step(engine, step, accumulation=1)
        states[f"step-0000000{step}"] = scenarios.weights(engine)
        if step == 1:
            CheckpointManager(tmp_path / "first").save(1, engine, {})
    found = []
    while not found or found[-1] != "survived":
        directory = shutil.copytree(tmp_path / "first", tmp_path / f"killed-{len(found):03d}")
        child = os.fork()
        if child == 0:
            code = 1
            try:
                torch.set_num_threads(1)  # those of OpenMP do not come along into a fork
                Killed(directory, len(found) + 1)
                save_second(directory)
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        newest = CheckpointManager(directory).latest_valid()
        assert newest == list_checkpoints(directory, verify=find_problem).resumed.path
        assert {name: w.flatten().tolist() for name, w in read_weights(newest)} == states[newest.name]
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            assert [path.name for path in directory.iterdir()] == ["step-00000002"]
            found.append("survived")
        else:
            assert os.WTERMSIG(status) == signal.SIGKILL
            found.append(newest.name)
    # Before the rename it is the old one, from then on the new one.
    turn = found.index("step-00000002")
    assert set(found[:turn]) == {"step-00000001"}
    assert set(found[turn:-1]) == {"step-00000002"}
    assert turn > 10
    assert len(found) - turn > 5

"""Checkpoints written in the background: what is in them, how they fail, and what a kill leaves."""

import errno
import os
import shutil
import signal
import sys

import pytest
import saving_scenarios
import scenarios
from harness import run_distributed

from matmix.train.checkpoint import CheckpointManager, read_portable
from matmix.train.checkpoint_listing import list_checkpoints
from matmix.train.engine import EngineConfig

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


def test_training_goes_on_while_it_is_written(tmp_path):
    names = list(scenarios.ENGINES)
    for found in run_distributed(saving_scenarios.in_background_all, 2, arguments=(names, str(tmp_path))):
        for name, outcome in found.items():
            check(outcome)
            assert outcome["failed"] == [None, 2, None], name
            faulty_rank = 0 if name == "zero0" else 1  # at stage 0 only rank 0 has something to write
            assert outcome["complaints"] == [
                f"warning: no checkpoint at step 2: {os.strerror(errno.ENOSPC)} (rank {faulty_rank}); "
                f"training goes on, the last valid one is step-00000001"
            ], name
            assert outcome["left"] == ["step-00000003"], name
        # Copies of the model share the work of writing it.
        assert found["ddp"]["files"] == found["fsdp2"]["files"] == ["__0_0.distcp", "__1_0.distcp"]
    sizes = {
        name: sum(path.stat().st_size for path in (tmp_path / name / "step-00000002").rglob("*.distcp"))
        for name in ("ddp", "fsdp2")
    }
    assert sizes["ddp"] < 1.2 * sizes["fsdp2"]


def test_copies_of_shards(tmp_path):
    for found in run_distributed(saving_scenarios.in_background_all, 4, arguments=(["hsdp"], str(tmp_path))):
        check(found["hsdp"])
        assert found["hsdp"]["files"] == [f"__{rank}_0.distcp" for rank in range(4)]


def test_one_process(tmp_path):
    check(saving_scenarios.save_while_training("fsdp2", str(tmp_path)))
    assert saving_scenarios.fail_in_background("fsdp2", str(tmp_path))["failed"] == [None, 2, None]


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
                Killed(directory, len(found) + 1)
                save_second(directory)
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        newest = CheckpointManager(directory).latest_valid()
        assert newest == list_checkpoints(directory, verify=True).resumed.path
        assert {name: w.flatten().tolist() for name, w in read_portable(newest)} == states[newest.name]
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

"""The loop while a checkpoint is being written: same numbers, nothing lost at its end, whatever ends it."""

import errno
import os
import signal
import threading

import pytest
from nightly import nightly
from runs import losses, run_recipe

from matmix.train.checkpoint import save as checkpoint_save
from matmix.train.checkpoint.manager import CheckpointManager
from matmix.train.errors import NonFiniteError
from matmix.train.guards.steps import NanGuard

EACH_STEP = ("--checkpoint.every", "1", "--checkpoint.keep-last", "9")


@pytest.fixture
def held(monkeypatch):
    """Until this event is set, checkpoints are not finished. `threads`: who wrote each of them."""
    event, threads = threading.Event(), []
    write = checkpoint_save.write_manifest

    def hold(directory, manifest):
        threads.append(threading.current_thread().name)
        assert event.wait(60)
        write(directory, manifest)

    monkeypatch.setattr(checkpoint_save, "write_manifest", hold)
    event.threads = threads
    return event


def kept(run):
    return CheckpointManager(run / "checkpoints").steps()


def at_step(monkeypatch, step, action):
    """Calls `action` after the optimizer step `step`."""
    on_step = NanGuard.after_step

    def extended(self, trainer):
        on_step(self, trainer)
        if trainer.state.step == step:
            action()

    monkeypatch.setattr(NanGuard, "after_step", extended)


@pytest.mark.slow
def test_the_numbers_are_the_same(dataset, tmp_path, monkeypatch, held, capsys, told):
    """Steps and an evaluation go on while the save of step 2 is held up; that of step 4 waits for it."""
    told.then = lambda: "is still being written" in told[-1] and held.set()
    often = ("--evaluation.every", "1", "--checkpoint.every", "2", "--checkpoint.keep-last", "9")
    run_recipe("debug_mru", dataset, tmp_path / "background", *often)
    assert held.threads == [f"save of step {step}" for step in (2, 4, 6, 8)]
    shown = " ".join(capsys.readouterr().err.split())
    assert shown.count("is still being written") == shown.count("the checkpoint of step 2 is still being written") == 1
    run_recipe("debug_mru", dataset, tmp_path / "waiting", *often, "--checkpoint.asynchronous", "False")
    assert held.threads[4:] == ["MainThread"] * 4
    assert losses(tmp_path / "background") == losses(tmp_path / "waiting")
    assert kept(tmp_path / "background") == kept(tmp_path / "waiting") == [2, 4, 6, 8]


def test_a_signal_while_saving(dataset, tmp_path, monkeypatch, held):
    def stop():
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Timer(0.2, held.set).start()

    at_step(monkeypatch, 4, stop)
    result = run_recipe("debug_mru", dataset, tmp_path / "run", "--checkpoint.every", "3")
    assert (result.signal, result.saved, result.finished) == (signal.SIGTERM, True, False)
    assert kept(tmp_path / "run") == [3, result.step]
    assert result.step < 6
    assert held.threads == ["save of step 3", "MainThread"]


def test_an_error_while_saving(dataset, tmp_path, monkeypatch, held):
    """The save is finished before the error leaves the loop."""

    def fail():
        threading.Timer(0.2, held.set).start()
        raise NonFiniteError("for good")

    at_step(monkeypatch, 3, fail)
    with pytest.raises(NonFiniteError, match="for good"):
        run_recipe("debug_mru", dataset, tmp_path / "run", "--checkpoint.every", "2")
    assert CheckpointManager(tmp_path / "run" / "checkpoints").latest_valid().name == "step-00000002"
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))


@pytest.mark.parametrize("failing", [3, nightly(4)])
def test_a_full_disk_while_saving(failing, dataset, tmp_path, monkeypatch, capsys):
    """Said once, and when the last step could not be saved the run says so instead of trying again at once."""
    write = checkpoint_save.write_manifest

    def full(directory, manifest):
        if manifest["step"] == failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(directory, manifest)

    monkeypatch.setattr(checkpoint_save, "write_manifest", full)
    result = run_recipe("debug_mru", dataset, tmp_path / "run", *EACH_STEP, "--stop-step", "4")
    assert result.saved == (failing != 4)
    assert kept(tmp_path / "run") == [step for step in (1, 2, 3, 4) if step != failing]
    told = " ".join(capsys.readouterr().err.split())
    assert told.count("warning: no checkpoint at step") == 1
    assert f"no checkpoint at step {failing}: No space left on device; training goes on" in told
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))
    monkeypatch.setattr(checkpoint_save, "write_manifest", write)
    again = run_recipe("debug_mru", dataset, tmp_path / "run", *EACH_STEP, "--stop-step", "4")
    assert (again.saved, again.steps_done) == (True, failing == 4)

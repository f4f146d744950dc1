"""Copies of the state that stay with the node: what a run goes on from after a kill, and what it never goes on from."""

import errno
import functools
import json
import os
import shutil
import threading

import pytest
from folders import flip_a_bit
from object_store import running_store
from runs import losses, records, run_recipe, weights

from matmix.train.checkpoint import local_copies
from matmix.train.checkpoint import save as checkpoint_save
from matmix.train.checkpoint.manager import CheckpointManager
from matmix.train.checkpoint.manifest import list_checkpoints, read_manifest
from matmix.train.guards.steps import NanGuard, SpikeGuard
from matmix.train.run import lock as lease
from matmix.train.run.outcome import local_folder, newest_saved

STEPS = 8  # of the recipe


class Killed(Exception):
    """Stands for the end of the process."""


@pytest.fixture(scope="module")
def straight(dataset, tmp_path_factory):
    """A run that nothing happened to, and that made no copies."""
    run = tmp_path_factory.mktemp("straight") / "run"
    run_recipe("debug_mru", dataset, run, "--logging.every", "1")
    return run


@pytest.fixture
def at_once(monkeypatch):
    """Copies are complete before the next step, so that none is left out."""
    begin = CheckpointManager.begin_copy

    def begin_and_wait(self, *arguments):
        self.wait()
        begin(self, *arguments)
        self.wait()

    monkeypatch.setattr(CheckpointManager, "begin_copy", begin_and_wait)


def starting(dataset, run, copies, monkeypatch, capsys, *overrides, kill=None):
    """One start of the run, killed after the step `kill`; what it said."""
    on_step = NanGuard.after_step

    def extended(self, trainer):
        on_step(self, trainer)
        if trainer.state.step == kill:
            raise Killed

    options = ("--checkpoint.every", "4", "--checkpoint.local-every", "1", "--logging.every", "1")
    options += ("--checkpoint.local-dir", str(copies), *overrides)
    with monkeypatch.context() as patch:
        patch.setattr(NanGuard, "after_step", extended)
        if kill is None:
            run_recipe("debug_mru", dataset, run, *options)
        else:
            with pytest.raises(Killed):
                run_recipe("debug_mru", dataset, run, *options)
    return " ".join(capsys.readouterr().err.split())


@pytest.fixture
def start(dataset, tmp_path, monkeypatch, capsys):
    """`start(*overrides, kill=None)`, as above, of the run that the test is about."""
    return functools.partial(starting, dataset, tmp_path / "run", tmp_path / "node", monkeypatch, capsys)


def kept(tmp_path):
    return sorted(tmp_path.glob("node/matmix-*/run-*/*/*"))


def assert_same(run, straight):
    assert losses(run) == losses(straight)
    assert [r["step"] for r in records(run)] == list(range(1, STEPS + 1))
    expected = weights(straight)
    assert all((tensor == expected[name]).all() for name, tensor in weights(run).items())


def test_a_kill_costs_the_steps_since_the_copy(start, straight, at_once, tmp_path):
    start(kill=7)
    assert [path.name for path in kept(tmp_path)] == ["step-00000006"]
    assert newest_saved(tmp_path / "run") == 4
    assert [facts.step for facts in list_checkpoints(tmp_path / "run" / "checkpoints").checkpoints] == [4]
    told = start()
    assert "going on from the node-local copy of step 6: the newest checkpoint is step-00000004" in told
    assert "resumed from step-00000006: 2 steps to go" in told
    assert_same(tmp_path / "run", straight)
    assert kept(tmp_path) == []
    assert not (tmp_path / "run" / local_copies.RECORD).exists()


@pytest.mark.slow
def test_kills_before_the_first_checkpoint_and_before_the_next_copy(start, straight, at_once, tmp_path):
    assert "node-local" not in start(kill=3)
    for _ in range(2):
        assert "going on from the node-local copy of step 2: there is no checkpoint yet" in start(kill=3)
    start()
    assert_same(tmp_path / "run", straight)


def test_a_newer_checkpoint_is_used(start, straight, at_once, tmp_path):
    start("--checkpoint.local-every", "3", kill=5)
    told = start()
    assert "resumed from step-00000004" in told
    assert "node-local" not in told
    assert_same(tmp_path / "run", straight)


@pytest.mark.slow
@pytest.mark.parametrize("damage", [flip_a_bit, os.unlink, lambda path: os.truncate(path, 10)])
def test_damaged_copies_are_not_used(damage, start, straight, at_once, tmp_path):
    """Each of its files in turn; the checkpoint before it is."""
    start(kill=7)
    (copy,) = kept(tmp_path)
    names = [path.relative_to(copy) for path in copy.rglob("*") if path.is_file()]
    assert len(names) == 6
    for number, name in enumerate(names):
        if number:
            start(kill=7)
        damage(copy / name)
        told = start(kill=5)
        assert "resumed from step-00000004" in told
        if name.name != "checkpoint.json":
            assert told.count("warning: the node-local copy of step 6 is not used: 1 of its 5 files are damaged") == 1
        assert not copy.exists()
    start()
    assert_same(tmp_path / "run", straight)


@pytest.mark.slow
def test_copies_of_another_run_are_not_used(start, straight, at_once, tmp_path):
    """The folder was removed, and the same command begun again."""
    start(kill=7)
    shutil.rmtree(tmp_path / "run")
    assert "node-local" not in start(kill=1)
    assert kept(tmp_path) == []
    start()
    assert_same(tmp_path / "run", straight)


@pytest.mark.slow
@pytest.mark.parametrize("without", [("--checkpoint.local-every", "0"), ()])
def test_copies_of_another_course_are_not_used(without, start, straight, at_once, tmp_path):
    """A start that did not find the copy, because it was on another node or makes none, has gone on from elsewhere."""
    start(kill=7)
    aside = tmp_path / "aside"
    shutil.move(tmp_path / "node", aside)
    assert "resumed from step-00000004" in start(*without, kill=5)
    shutil.rmtree(tmp_path / "node", ignore_errors=True)
    shutil.move(aside, tmp_path / "node")
    told = start()
    assert "resumed from step-00000004" in told
    assert "node-local" not in told
    assert_same(tmp_path / "run", straight)


def test_a_start_without_copies_removes_them(start, at_once, tmp_path):
    start(kill=7)
    start("--checkpoint.local-every", "0", kill=5)
    assert kept(tmp_path) == []
    assert not (tmp_path / "run" / local_copies.RECORD).exists()


@pytest.mark.slow
def test_going_back_forgets_copies(start, at_once, monkeypatch, tmp_path):
    """Those of the steps before a rewind are of a course that the run has left."""
    sees_spike = SpikeGuard.sees_spike

    def sees(self, trainer):
        return sees_spike(self, trainer) or (trainer.state.step == 7 and not trainer.state.rewinds)

    monkeypatch.setattr(SpikeGuard, "sees_spike", sees)
    start(kill=6)
    record = tmp_path / "run" / local_copies.RECORD
    before = json.loads(record.read_text())
    told = start("--faults.spike-factor", "100", "--faults.spike-window", "1", kill=8)
    assert "going on from the node-local copy of step 5" in told
    assert "back to step-00000004" in told
    after = json.loads(record.read_text())
    assert after["name"] != before["name"]
    assert (before["origin"], after["origin"]) == (None, None)
    assert [path.name for path in kept(tmp_path)] == ["step-00000007"]
    assert all(read_manifest(path)["extra"][local_copies.START] == after["name"] for path in kept(tmp_path))


def test_no_room(start, straight, monkeypatch, tmp_path):
    """One line, and training goes on; checkpoints are saved all the same."""
    monkeypatch.setattr(local_copies, "free_bytes", lambda folder: 1000)
    told = start()
    assert told.count("warning: no node-local copies: ") == told.count("has room for 1e-06 GB") == 1
    assert "checkpoint.local_dir names another place; training goes on without them" in told
    assert_same(tmp_path / "run", straight)
    assert kept(tmp_path) == []


def test_a_folder_that_others_may_write_to(start, straight, tmp_path):
    (tmp_path / "node" / f"matmix-{os.geteuid()}").mkdir(parents=True)
    (tmp_path / "node" / f"matmix-{os.geteuid()}").chmod(0o777)
    told = start()
    assert told.count("warning: no node-local copies: ") == told.count("others may write to") == 1
    assert_same(tmp_path / "run", straight)


def test_a_full_disk_while_copying(start, straight, at_once, monkeypatch, tmp_path):
    """One line; the copy before it stays, and so do checkpoints."""
    write = checkpoint_save.write_manifest

    def full(directory, manifest):
        if local_copies.START in manifest["extra"] and manifest["step"] == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(directory, manifest)

    monkeypatch.setattr(checkpoint_save, "write_manifest", full)
    told = start(kill=4)
    assert told.count("warning") == told.count("no node-local copy of step 3: No space left on device") == 1
    assert [path.name for path in kept(tmp_path)] == ["step-00000002"]
    monkeypatch.undo()
    assert "going on from the node-local copy of step 2" in start()
    assert_same(tmp_path / "run", straight)


@pytest.mark.slow
def test_one_save_at_a_time(start, straight, monkeypatch, tmp_path):
    """While one is being written no copy is begun, and nothing is said; a checkpoint waits for a copy."""
    held, writing = threading.Event(), []
    write = checkpoint_save.write_manifest

    def hold(directory, manifest):
        writing.append((manifest["step"], local_copies.START in manifest["extra"]))
        assert held.wait(60)
        write(directory, manifest)

    wait = CheckpointManager.wait

    def release(self, *arguments):
        held.set()
        return wait(self, *arguments)

    monkeypatch.setattr(checkpoint_save, "write_manifest", hold)
    begin = CheckpointManager.begin_save

    def begin_save(self, *arguments):
        with monkeypatch.context() as patch:
            patch.setattr(CheckpointManager, "wait", release)
            begin(self, *arguments)

    monkeypatch.setattr(CheckpointManager, "begin_save", begin_save)
    told = start()
    assert writing[:2] == [(1, True), (4, False)]
    assert "warning" not in told
    assert_same(tmp_path / "run", straight)


@pytest.mark.slow
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_run_at_a_url(elsewhere, dataset, tmp_path, straight, monkeypatch, capsys):
    """A copy is used where the records of the steps since the last checkpoint are, which no store has yet."""
    monkeypatch.setenv("MATMIX_SCRATCH", str(tmp_path / "scratch"))
    monkeypatch.setattr(lease, "SETTLE_SECONDS", 0.0)
    with running_store(monkeypatch) as store:
        url = f"{store.url}/runs/a"
        start = functools.partial(starting, dataset, url, tmp_path / "node", monkeypatch, capsys)
        begin = CheckpointManager.begin_copy

        def begin_and_wait(self, *arguments):
            self.wait()
            begin(self, *arguments)

        monkeypatch.setattr(CheckpointManager, "begin_copy", begin_and_wait)
        start(kill=7)
        if elsewhere:
            shutil.rmtree(tmp_path / "scratch")
        told = start()
        assert ("resumed from step-00000004" in told) == elsewhere
        assert ("going on from the node-local copy of step 6" in told) != elsewhere
        assert not [name for name in store.names("runs/a/") if local_copies.RECORD in name]
        assert_same(local_folder(url), straight)

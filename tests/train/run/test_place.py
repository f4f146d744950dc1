"""A run directory that is moved away, replaced or removed under a running job: the job notices, saves where the folder
is now, and ends with an error; nothing is written to what lies at the path instead."""

import os
import shutil
from pathlib import Path

import pytest
from nightly import nightly
from runs import records

from matmix.train import entry, loop
from matmix.train.process.exits import EXIT_OK, EXIT_USER
from matmix.train.run.directory import Place
from matmix.train.run.outcome import read_outcomes


@pytest.fixture
def start(dataset, tmp_path, monkeypatch):
    """`start(action, *overrides, at=4, event=...)`: runs the command; the action comes before a method of the trainer
    is called at a step."""
    monkeypatch.setenv("MATMIX_ATTEMPT", "the-attempt")
    options = ["--data.path", dataset, "--device", "cpu", "--logging.every", "1", "--evaluation.every", "4"]
    options += ["--logging.tensorboard", "True"]

    def start(action=None, *overrides: str, at: int = 4, event: str = "compute_step", run="run") -> int:
        with monkeypatch.context() as patch:
            true = getattr(loop.Trainer, event)

            def acting(trainer, *arguments, **named):
                if action is not None and trainer.state.step == at and not done:
                    done.append(action())
                return true(trainer, *arguments, **named)

            done = []
            patch.setattr(loop.Trainer, event, acting)
            code = entry.main(["debug_mru", "--run-dir", str(tmp_path / run), *options, *overrides])
        assert done or action is None
        return code

    return start


def contents(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


@pytest.fixture
def move(tmp_path):
    """Moves the run away, and puts another folder or run in its place if so wanted."""

    def move(*, replaced: bool) -> None:
        (tmp_path / "run").rename(tmp_path / "elsewhere")
        if replaced:
            shutil.copytree(tmp_path / "other", tmp_path / "run")

    return move


@pytest.mark.parametrize(
    ("event", "at", "replaced"),
    [
        nightly("compute_step", 4, False),
        nightly("compute_step", 4, True),
        nightly("evaluate", 4, True),
        ("save", 3, True),
    ],
)
def test_a_run_that_is_moved_ends_with_all_it_has_in_one_folder(start, move, tmp_path, capsys, event, at, replaced):
    (tmp_path / "other" / "checkpoints").mkdir(parents=True)
    (tmp_path / "other" / "tensorboard").mkdir()
    (tmp_path / "other" / "config.toml").touch()
    code = start(lambda: move(replaced=replaced), "--checkpoint.every", "3", event=event, at=at)
    assert code == EXIT_USER
    step = at + (event == "compute_step")
    moved = tmp_path / "elsewhere"
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("matmix: error")]
    what = f"{moved} and replaced by another one" if replaced else str(moved)
    assert line == (
        f"matmix: error: run_dir {tmp_path / 'run'} was moved to {what} while the run wrote to it; "
        f"step {step} is saved there: matmix train {moved} goes on"
    )
    if replaced:
        assert contents(tmp_path / "run") == {"checkpoints", "tensorboard", "config.toml"}
    else:
        assert not (tmp_path / "run").exists()
    assert [record["step"] for record in records(moved)] == list(range(1, step + 1))
    (outcome,) = read_outcomes(moved, "the-attempt").values()
    assert (outcome.code, outcome.step, outcome.saved_step) == (EXIT_USER, step, step)
    assert sorted((moved / "logs").glob("*/*")) == [], "no stacks, as nothing hung"
    # What it wrote is whole, and the run goes on there.
    assert start(run="elsewhere") == EXIT_OK
    assert [record["step"] for record in records(moved)] == scalars(moved) == list(range(1, 9))
    assert [record["step"] for record in records(moved, "validation")] == [4, 8]


def scalars(run: Path) -> list[int]:
    """The steps whose loss TensorBoard shows."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run / "tensorboard"))
    found.Reload()
    return [event.step for event in found.Scalars("train/loss")]


def test_a_run_that_is_removed_ends(start, tmp_path, capsys):
    assert start(lambda: shutil.rmtree(tmp_path / "run"), "--checkpoint.every", "0") == EXIT_USER
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("matmix: error")]
    assert line == (
        f"matmix: error: run_dir {tmp_path / 'run'} was removed while the run wrote to it; "
        "nothing more can be saved there"
    )
    assert not (tmp_path / "run").exists()


def test_a_link_that_leads_elsewhere_is_noticed(start, tmp_path, capsys):
    (tmp_path / "first").mkdir()
    (tmp_path / "run").symlink_to("first")

    def lead_elsewhere():
        (tmp_path / "second").mkdir()
        (tmp_path / "new").symlink_to("second")
        (tmp_path / "new").replace(tmp_path / "run")

    assert start(lead_elsewhere) == EXIT_USER
    assert f"was moved to {tmp_path / 'first'} and replaced by another one" in capsys.readouterr().err
    assert contents(tmp_path / "second") == set()


def test_what_a_place_notices(tmp_path, monkeypatch):
    (folder := tmp_path / "a").mkdir()
    place = Place(folder)
    assert (place.moved(), place.path, place.steady) == (None, folder, folder)
    place.hold()
    assert place.moved() is None
    assert os.path.samefile(place.steady, folder)
    folder.rename(tmp_path / "b")
    assert (place.path, place.moved().to) == (tmp_path / "b", str(tmp_path / "b"))
    (tmp_path / "b").rename(folder)
    assert place.moved() is None
    monkeypatch.setattr(os, "stat", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
    assert place.moved() is None, "a file system that is away says nothing about its folders"
    monkeypatch.undo()
    place.release()
    folder.rename(tmp_path / "b")
    assert place.path == folder

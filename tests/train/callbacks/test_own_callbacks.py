"""Callbacks of one's own, named in the recipe, and callbacks that fail: training goes on without them."""

import errno
import os
import textwrap
from types import SimpleNamespace

import pytest
from failures import each
from runs import losses, records, run_recipe

from matmix.train import callbacks
from matmix.train.callbacks import Callback
from matmix.train.recipe import load_config

TOY = '''
from dataclasses import dataclass
from pathlib import Path

from matmix.train.callbacks import Callback


@dataclass(frozen=True)
class NotesOptions:
    every: int
    title: str = "notes"


class Notes(Callback):
    """Notes the loss of every n-th step in a file of the run directory."""

    Options = NotesOptions

    def __init__(self, every, title):
        self.every, self.title, self.lines = every, title, []

    def on_step(self, run):
        if run.state.step % self.every == 0:
            self.lines.append(f"{run.state.step} {run.last_loss!r}")

    def on_evaluation(self, run, metrics):
        self.lines.append(f"validation {metrics['loss']!r}")

    def on_end(self, run):
        (run.path / f"{self.title}.txt").write_text("\\n".join(self.lines))


@dataclass(frozen=True)
class FailingOptions:
    event: str


class Failing(Callback):
    """Fails in one of its events."""

    Options = FailingOptions

    def __init__(self, event):
        if event == "making":
            raise RuntimeError("no luck")
        setattr(self, event, self.fail)

    def fail(self, *_arguments):
        raise RuntimeError("no luck")
'''


@pytest.fixture(autouse=True)
def own_module(tmp_path, monkeypatch):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "my_callbacks.py").write_text(textwrap.dedent(TOY))
    monkeypatch.syspath_prepend(str(tmp_path / "code"))


@pytest.fixture(scope="module")
def whole(dataset, tmp_path_factory):
    """The losses of a run without any of this."""
    run = tmp_path_factory.mktemp("whole") / "run"
    run_recipe("debug_mru", dataset, run)
    return losses(run)


def notes(every: int) -> str:
    return f"{{name = 'my_callbacks:Notes', options = {{every = {every}}}}}"


def test_a_callback_from_outside_sees_the_run(dataset, tmp_path, whole):
    run_recipe("debug_mru", dataset, tmp_path / "run", "--callback", notes(3), "--stop-step", "4")
    lines = (tmp_path / "run" / "notes.txt").read_text().splitlines()
    assert lines[0] == f"3 {whole[2]!r}"
    assert lines[1] == f"validation {records(tmp_path / 'run', 'validation')[0]['loss']!r}"
    # It may change from start to start, and the run's own config.toml is a recipe that has it.
    own = load_config(str(tmp_path / "run")).callback
    assert [(callback.name, callback.options) for callback in own] == [("my_callbacks:Notes", {"every": 3})]
    run_recipe("debug_mru", dataset, tmp_path / "run", "--callback", notes(8))
    assert (tmp_path / "run" / "notes.txt").read_text().splitlines()[0] == f"8 {whole[7]!r}"
    assert losses(tmp_path / "run") == whole


def test_tables_of_a_recipe_with_options(dataset, tmp_path):
    recipe = tmp_path / "mine.toml"
    run_recipe("debug_mru", dataset, tmp_path / "run", "--stop-step", "1")
    text = (tmp_path / "run" / "config.toml").read_text().replace("callback = []\n", "")
    options = 'every = 1\ntitle = "said \\"so\\""\n'
    recipe.write_text(f'{text}\n[[callback]]\nname = "my_callbacks:Notes"\n[callback.options]\n{options}')
    [found] = load_config(str(recipe)).callback
    assert found.options == {"every": 1, "title": 'said "so"'}
    assert load_config(str(recipe), ["--seed", "3"]).callback == (found,)


@each(
    "table, words",
    [
        ("{name = 'no_such_module:Notes'}", "Python cannot import no_such_module"),
        ("{name = 'my_callbacks:Missing'}", "my_callbacks has no Missing"),
        ("{name = 'my_callbacks:Path'}", "is not a subclass of matmix.train.callbacks.Callback"),
        ("{name = 'my_callbacks:Notes'}", 'callback "my_callbacks:Notes" has no every'),
        ("{name = 'my_callbacks:Notes', options = {evry = 1}}", 'unknown key "evry"; the nearest known key is "every"'),
        ("{name = 'my_callbacks:Notes', options = {every = 'often'}}", '"every" should be int'),
        ("{name = 'notes'}", "unknown callback 'notes'"),
        ("{options = {every = 1}}", "has no name"),
    ],
)
def test_a_mistake_in_the_recipe_is_one_line(table, words, dataset, tmp_path):
    with pytest.raises(ValueError, match=words) as error:
        run_recipe("debug_mru", dataset, tmp_path / "run", "--callback", table)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("event", ["making", "on_start", "on_step", "on_record", "on_evaluation", "on_end"])
def test_a_callback_that_fails_is_left_out(event, dataset, tmp_path, whole, capsys):
    table = f"{{name = 'my_callbacks:Failing', options = {{event = '{event}'}}}}"
    options = ["--data.workers", "0", "--checkpoint.every", "0"]
    run_recipe("debug_mru", dataset, tmp_path / "run", "--callback", table, *options)
    said = [line for line in capsys.readouterr().err.splitlines() if "Failing" in line]
    assert len(said) == 1, said
    assert all("RuntimeError: no luck" in line and line.endswith("training goes on without") for line in said)
    assert losses(tmp_path / "run") == whole


OWN = ["MetricsFile", "DataWait", "Watchdog", "Progress", "TensorBoard", "Curves", "Profiler", "GarbageCollection"]


@pytest.mark.parametrize("event", ["__init__", "on_start", "on_end"])
def test_each_of_ours_may_fail(event, dataset, tmp_path, whole, monkeypatch, capfd):
    """All of them at once, at the beginning and at the end of a run."""

    def failing(method):
        def fail(*arguments, **options):
            if event == "on_end":  # a profiler that is never ended takes its process down when that exits
                method(*arguments, **options)
            raise ValueError("no luck")

        return fail

    for name in OWN:
        kind = getattr(callbacks, name)
        monkeypatch.setattr(kind, event, failing(getattr(kind, event)))
    options = ["--logging.tensorboard", "True", "--logging.picture", "True", "--logging.profile-start", "2"]
    result = run_recipe("debug_mru", dataset, tmp_path / "run", *options)
    assert (result.finished, result.saved) == (True, True)
    assert result.metrics["loss"] < 10
    printed = capfd.readouterr()
    said = printed.err + printed.out
    for name in OWN:
        assert said.count(f"warning: {name} ") == 1, name
    if event == "on_end":
        assert losses(tmp_path / "run") == whole


def test_a_disk_that_is_full_when_tensorboard_starts(dataset, tmp_path, monkeypatch, whole, capsys):
    """This once ended the run at its first record, with an AttributeError."""
    import torch.utils.tensorboard

    def full(*_arguments, **_options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(torch.utils.tensorboard, "SummaryWriter", full)
    result = run_recipe("debug_mru", dataset, tmp_path / "run", "--logging.tensorboard", "True")
    assert result.finished
    assert losses(tmp_path / "run") == whole
    assert capsys.readouterr().err.count("warning: TensorBoard failed in on_start ([Errno 28] No space left") == 1


def test_what_fails_is_ended_once_and_never_called_again(told):
    class Half(Callback):
        def __init__(self):
            self.calls = []

        def on_step(self, run):
            self.calls.append("on_step")
            raise ValueError("no luck")

        def on_end(self, run):
            self.calls.append("on_end")
            raise ValueError("again")

    found, run = callbacks.Callbacks(), SimpleNamespace(engine=SimpleNamespace(rank=0))
    found.make(Half)
    [half] = found
    for event in ("on_step", "on_step", "on_end"):
        found.call(run, event)
    assert half.calls == ["on_step", "on_end"]
    assert told == ["warning: Half failed in on_step (ValueError: no luck); training goes on without"]

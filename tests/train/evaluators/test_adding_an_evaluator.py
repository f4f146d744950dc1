"""Evaluators from outside, and intervals of ours: when they have their turn, and that a resumed run catches up."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from failures import each
from runs import records, run_recipe
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from matmix.train.recipe import load_config

FILE = '''
import os
import signal
from dataclasses import dataclass

from matmix.train.evaluators import Evaluator
from matmix.train.tasks import Metric


@dataclass(frozen=True, slots=True)
class Options:
    batches: int = 1
    interrupt: str = ""


class Rows(Evaluator):
    """Counts the sequences of the split, as the pass of the validation loss sees them."""

    Options = Options
    metrics = (Metric(name="rows", title="rows seen", digits=0),)

    def begin(self, evaluation):
        self.rows = 0

    def observe(self, batch, costs, targets):
        assert costs.loss.sum() > 0 and targets > 0
        self.rows += len(batch.labels)

    def finish(self, evaluation):
        if self.options.interrupt and not os.path.exists(self.options.interrupt):
            open(self.options.interrupt, "w").close()
            os.kill(os.getpid(), signal.SIGTERM)
        own = sum(len(batch.labels) for batch in evaluation.batches(self.options.batches))
        return {"rows": self.rows, "own_rows": own}
'''


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The name of a module that is one file from outside."""
    (tmp_path / "own_evaluator.py").write_text(FILE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_evaluator", raising=False)
    return "own_evaluator"


@pytest.mark.slow
def test_each_has_its_interval_and_all_the_last_step(module, dataset, tmp_path, capsys):
    run = tmp_path / "run"
    tables = [f"{{name = '{module}:Rows', every = 3, options = {{batches = 1}}}}", "{name = 'mixing', every = 0}"]
    options = ["--evaluation.evaluator", *tables, "--logging.tensorboard", "True", "--logging.progress", "True"]
    run_recipe("debug_hydra", dataset, run, *options)
    by_step = {record["step"]: record for record in records(run, "validation")}
    assert list(by_step) == [3, 4, 6, 8]
    assert by_step[3] == {"kind": "validation", "step": 3, "rows": 16, "own_rows": 8}
    assert {"loss", "context_gain"} <= by_step[4].keys()
    assert not {"rows", "mixing_gain"} & by_step[4].keys()
    assert {"loss", "rows", "mixing_gain", "context_gain"} <= by_step[8].keys()
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("validation/rows")] == [(3, 16), (6, 16), (8, 16)]
    assert json.loads((run / "summary.json").read_text())["validation"]["rows"] == 16
    assert "step 3: rows seen 16\n" in capsys.readouterr().err


def test_they_change_nothing_of_what_is_trained_and_measured(module, dataset, tmp_path):
    def numbers(run):
        names = ("step", "loss", "grad_norm", "masked_accuracy", "context_gain", "mixing_gain")
        found = records(run) + [record for record in records(run, "validation") if "loss" in record]
        return [{name: record.get(name) for name in names} for record in found]

    run_recipe("debug_hydra", dataset, tmp_path / "plain")
    run_recipe(
        "debug_hydra", dataset, tmp_path / "own", "--evaluation.evaluator", f"{{name = '{module}:Rows', every = 1}}"
    )
    assert numbers(tmp_path / "own") == numbers(tmp_path / "plain")


def test_a_resumed_run_evaluates_what_is_due(module, dataset, tmp_path):
    """A signal comes in the middle of the evaluation after step 3."""
    run, marker = tmp_path / "run", tmp_path / "marker"
    table = f"{{name = '{module}:Rows', every = 3, options = {{interrupt = '{marker}'}}}}"
    stopped = run_recipe("debug_mru", dataset, run, "--evaluation.evaluator", table)
    assert (stopped.step, stopped.stopped) == (3, True)
    assert records(run, "validation") == []
    assert run_recipe("debug_mru", dataset, run, "--evaluation.evaluator", table).finished
    assert [record["step"] for record in records(run, "validation")] == [3, 4, 6, 8]


@pytest.mark.slow
def test_a_run_may_take_up_an_evaluator_later(module, dataset, tmp_path):
    run = tmp_path / "run"
    run_recipe("debug_mru", dataset, run, "--stop-step", "4")
    run_recipe("debug_mru", dataset, run, "--evaluation.evaluator", f"{{name = '{module}:Rows', every = 6}}")
    assert [record["step"] for record in records(run, "validation") if "rows" in record] == [6, 8]
    assert load_config(str(run)).evaluation.evaluator[0].name == f"{module}:Rows"


@each(
    "table, words",
    [
        ("{name = 'lengths'}", "has nothing to measure in this run"),
        ("{name = 'mixing', every = -1}", "every must be >= 0"),
        ("{name = 'mixing', options = {a = 1}}", 'unknown key "a": there are no options'),
        ("{every = 3}", "has no name"),
    ],
)
def test_what_cannot_be_is_refused(table, words, dataset, tmp_path):
    with pytest.raises(ValueError, match=words):
        run_recipe("debug_mru", dataset, tmp_path / "run", "--evaluation.evaluator", table)
    assert not (Path(tmp_path) / "run").exists()

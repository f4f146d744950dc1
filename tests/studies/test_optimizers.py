"""The study of optimizers."""

import json
import math

import pytest

from matmix.studies.optimizers import Study


@pytest.mark.parametrize(("best", "tried"), [(3e-3, 3), (9e-3, 4), (0.081, 6), (1.11e-4, 6)])
def test_rates_go_on_until_the_best_lies_between_two(tmp_path, monkeypatch, best, tried):
    monkeypatch.setattr(Study, "loss", lambda self, task, way, rate, seed: abs(math.log(rate / best)))
    losses, found = Study(out=tmp_path).tuned("mru", "adamw")
    assert found == best
    assert len(losses) == tried


def test_runs_that_are_kept_are_not_made_again(tmp_path, capsys):
    losses = {"rate 0.001, seed 0": 2.0, "rate 0.003, seed 0": 1.0, "rate 0.009, seed 0": None}
    losses |= {"rate 0.003, seed 1": 3.0}
    (tmp_path / "mru, adamw.json").write_text(json.dumps(losses), encoding="utf-8")
    Study(out=tmp_path, tasks=("mru",), ways=("adamw",), seeds=(0, 1)).run()
    row = "| mru | adamw | 2.000 at 0.001, 1.000 at 0.003, inf at 0.009 | 0.003 | 1.000, 3.000 | 2.000 |"
    assert capsys.readouterr().out.splitlines()[-1] == row

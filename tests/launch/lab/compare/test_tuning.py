"""Every entry is tuned by itself, and the table says at which values."""

from __future__ import annotations

import json
import math
import re

import pytest
from comparisons import TINY, csv_rows, finish

from matmix.launch.cli import main
from matmix.launch.lab.compare import report
from matmix.launch.lab.compare.config import read_comparison, tasks_of
from matmix.launch.lab.compare.tuning import FURTHER, lowest, tuned, wanted
from matmix.launch.lab.compare.width import matched
from matmix.launch.many import runs
from matmix.train.guards.steps import DIVERGED
from matmix.train.run.outcome import Outcome, write_outcome


@pytest.mark.parametrize(
    ("best", "count"),
    [({"lr": 3e-3, "betas": "b"}, 6), ({"lr": 27e-3, "betas": "b"}, 8), ({"lr": 1e9, "betas": "a"}, 6 + FURTHER)],
)
def test_a_grid_goes_on_where_its_best_value_is_at_an_end(best, count):
    """Numbers do, along the best of the other keys, and not for ever; other values do not."""
    tried = {}
    while points := wanted({"lr": (1e-3, 3e-3, 9e-3), "betas": ("a", "b")}, tried):
        assert not set(points) & set(tried)
        for point in points:
            values = dict(point)
            tried[point] = abs(math.log(values["lr"] / best["lr"])) + 9 * (values["betas"] != best["betas"])
    assert len(tried) == count
    chosen = dict(min(tried, key=tried.__getitem__))
    assert chosen == best or best["lr"] == 1e9
    assert max(dict(point)["lr"] for point in tried) == pytest.approx(9e-3 * 3 ** max(0, count - 6), rel=0.01)


def test_two_keys_are_tuned_together_and_integers_stay_such():
    tried, grid = {}, {"steps": (2, 4), "lr": (0.1, 0.2)}
    while points := wanted(grid, tried):
        for point in points:
            values = dict(point)
            tried[point] = abs(values["steps"] - 8) + abs(math.log2(values["lr"] / 0.8))
    best = min(tried, key=tried.__getitem__)
    assert best == (("steps", 8), ("lr", 0.8))
    beside = {(16, 0.8), (4, 0.8), (8, 1.6), (8, 0.4)}
    assert {tuple(value for _, value in point) for point in tried} >= beside
    assert all(type(dict(point)["steps"]) is int for point in tried)


def test_integers_go_on_exactly():
    tried = {}
    while points := wanted({"global_batch_size": (512, 1024)}, tried):
        tried |= {point: abs(point[0][1] - 8192) for point in points}
    assert sorted(point[0][1] for point in tried) == [512, 1024, 2048, 4096, 8192, 16384]


def test_a_grid_whose_values_all_diverge_goes_on_to_lower_ones():
    tried = {}
    while points := wanted({"lr": (0.1, 0.3, 0.9)}, tried):
        tried |= {point: math.inf if point[0][1] > 0.02 else 1 + point[0][1] for point in points}
    assert lowest(tried) == (("lr", 1.37e-4),)  # as far as a grid goes on
    assert len(tried) == 3 + FURTHER
    nowhere = {}
    while points := wanted({"lr": (0.1, 0.3)}, nowhere):
        nowhere |= dict.fromkeys(points, math.inf)
    assert len(nowhere) == 2 + FURTHER


TUNED = """
[comparison]
seeds = [1, 2]
tolerance = 0.1
tune = {"optimizer.lr" = [1e-3, 3e-3, 9e-3]}
[[comparison.entry]]
name = "Hydra"
model.layers = ["hydra"]
"""
BEST = {"Hydra": 2e-4, "no mixer": 0.02, "convolution only": 3e-3}


class _Machine:
    """Takes the place of processes: each run has a loss by its distance from the best rate of its entry."""

    def __init__(self) -> None:
        self.left, self.ran, self.broken, self.idle, self.diverging = 10**6, [], "", "", ""

    def run_tasks(self, tasks, parallel):
        failures = []
        for task in tasks:
            name, rate = task.entry.split(", optimizer")[0], task.config.optimizer.lr
            if task.is_finished():
                continue
            if not self.left:
                return runs.Ended(failures, stopped=True)
            self.left -= 1
            self.ran.append((name, rate, task.seed))
            if name == self.idle:
                continue  # ends well before its last step
            if name == self.broken:
                failures.append(runs.Failure(task, 1, ["no disk"]))
            elif name == self.diverging or (name == "convolution only" and rate > 5e-3):
                task.run.path.mkdir(parents=True)
                (task.run.path / "launch").mkdir()
                reason = f"10 {DIVERGED} (last: step 12)"
                write_outcome(task.run.path, Outcome(code=1, reason=reason, step=12, saved_step=None))
                failures.append(runs.Failure(task, 1, [reason]))
            else:
                loss = 2 + abs(math.log(rate / BEST[name])) + task.seed / 8
                finish(task, {"loss": loss, "masked_accuracy": 1 / loss})
        return runs.Ended(failures, stopped=False)


@pytest.fixture
def machine(monkeypatch):
    machine = _Machine()
    monkeypatch.setattr(runs, "run_tasks", machine.run_tasks)
    return machine


def test_every_entry_is_tuned_by_itself_and_then_trained_with_fresh_seeds(
    recipe, dataset, machine, tmp_path, monkeypatch, capsys
):
    home = tmp_path / "home"
    command = ["compare", recipe(TINY + TUNED), "--data.path", dataset, "--run-dir", str(home), "--no-speed"]
    monkeypatch.setattr(report, "picture", lambda parts: b"")

    def said(*words: str, code: int = 0) -> str:
        assert main([*command, *words]) == code
        return capsys.readouterr().out

    plan = said("--dry-run")
    assert "tuned by itself with seed 0, optimizer.lr 0.001, 0.003, 0.009: 9 runs, and more" in plan
    assert "in all at least 15 runs: " in plan
    assert "tuned for none" not in plan
    monkeypatch.setenv("MATMIX_CLUSTERS", str(tmp_path / "clusters.toml"))
    (tmp_path / "clusters.toml").write_text("")
    assert "#SBATCH --array=0-8\n" in said("--slurm", "--tasks-per-node", "1", "--dry-run")

    machine.left = 5
    said(code=75)
    assert {seed for *_, seed in machine.ran} == {0}
    assert "tuned with other settings: steps: 4 there, 5 here" in said("--report", "--steps", "5")
    half = said("--report")
    assert "no mixer seeds 1, 2 (not tuned yet)" in half
    assert "| not yet " in half
    assert "0.000333: not finished, 0.001: 3.6094, 0.003: 4.7081, 0.009: 5.8067" in half

    machine.left, machine.broken = 10**6, "no mixer"
    assert "no mixer, optimizer.lr = 0.009, seed 0: no disk" in said(code=1)
    assert ("Hydra", 3.33e-4, 1) in machine.ran  # that one failed keeps no other from going on
    machine.broken = ""
    text = said()
    assert len(machine.ran) == len(set(machine.ran)) + 1  # the one that failed
    chosen = {name: rate for name, rate, seed in machine.ran if seed}
    assert chosen == {"Hydra": 3.33e-4, "no mixer": 0.027, "convolution only": 3e-3}
    assert {seed for *_, seed in machine.ran} == {0, 1, 2}

    assert "Tuned for each entry by itself: optimizer.lr." in text
    assert "tuned for none" not in text
    assert "Not alike" not in text
    assert "0.001: 3.0986, 0.003: 2.0000, 0.009: diverged" in text
    rows = csv_rows(home)
    assert {name: float(row["tuned/optimizer.lr"]) for name, row in rows.items()} == chosen
    assert float(rows["convolution only"]["loss_mean"]) == pytest.approx(2 + 1.5 / 8)
    assert said("--slurm", "--tasks-per-node", "1").startswith("Nothing to submit")


@pytest.mark.slow
def test_an_entry_that_cannot_be_tuned_is_not_trained(recipe, dataset, machine, tmp_path, monkeypatch, capsys):
    """As its runs end before their last step, or all diverge; neither goes on for ever."""
    monkeypatch.setattr(report, "picture", lambda parts: b"")
    machine.idle, machine.diverging = "no mixer", "Hydra"
    command = ["compare", recipe(TINY + TUNED), "--data.path", dataset, "--run-dir", str(tmp_path / "home")]
    assert main([*command, "--no-speed"]) == 0
    assert sum(name == "no mixer" for name, *_ in machine.ran) == 3
    assert sum(name == "Hydra" for name, *_ in machine.ran) == 3 + FURTHER
    text = capsys.readouterr().out
    assert "Not begun: no mixer." in text
    assert "Hydra seeds 1, 2 (diverged at all values that were tried)" in text
    assert re.search(r"\| Hydra +\| none ", text)
    assert {name for name, _, seed in machine.ran if seed} == {"convolution only"}
    monkeypatch.setenv("MATMIX_CLUSTERS", str(tmp_path / "clusters.toml"))
    (tmp_path / "clusters.toml").write_text("")
    assert main([*command, "--slurm", "--tasks-per-node", "1", "--dry-run"]) == 0
    script = capsys.readouterr().out
    assert "no-mixer/tune" in script
    assert "Hydra/seed-1" not in script


@pytest.mark.slow
def test_a_wider_grid_says_which_runs_it_would_make_anew(recipe, dataset, machine, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "picture", lambda parts: b"")
    command = ["compare", recipe(TINY + TUNED), "--data.path", dataset, "--run-dir", str(tmp_path / "home")]
    assert main([*command, "--no-speed"]) == 0
    grid = ["--comparison.tune", '{"optimizer.lr" = [1e-3, 2e-3, 3e-3, 4e-3, 9e-3]}']
    assert main([*command, *grid, "--no-speed"]) == 2
    assert "where a wider grid chose another value for it, delete it" in capsys.readouterr().err


@pytest.mark.slow
def test_other_seeds_are_tuned_by_the_runs_that_there_are(recipe, dataset, machine, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "picture", lambda parts: b"")
    text = TUNED.replace("seeds = [1, 2]", "seeds = [0, 1, 2]")
    command = [
        "compare",
        recipe(TINY + text),
        "--data.path",
        dataset,
        "--run-dir",
        str(tmp_path / "home"),
        "--no-speed",
    ]
    assert main(command) == 0
    assert {seed for _, _, seed in machine.ran} == {0, 1, 2, 3}
    machine.ran.clear()
    assert main([*command, "--comparison.seeds", "0", "1", "4"]) == 0
    assert {seed for _, _, seed in machine.ran} == {4}
    assert "validation loss with seed 3 at" in capsys.readouterr().out
    assert main([*command, "--comparison.seeds", "0", "3"]) == 2
    assert "home is tuned with seed 3, which is among comparison.seeds: leave it out" in capsys.readouterr().err


def test_what_the_command_line_says_of_tuning(recipe):
    path, words = recipe(TINY + TUNED), ["--model.vocab-size", "64"]
    with pytest.raises(ValueError, match=r"--optimizer\.lr: comparison\.tune chooses it"):
        read_comparison(path, [*words, "--optimizer.lr", "0.1"])
    none = ["--comparison.tune", "{}", "--comparison.tune-seed", "1", "--comparison.seeds", "0", "1"]
    assert read_comparison(path, [*words, *none]).settings.seeds == (0, 1)  # the seed that would tune is free
    off = read_comparison(path, [*words, "--comparison.tune", "{}", "--optimizer.lr", "0.1"])
    assert tuned(matched(off)).entries[0].config.optimizer.lr == 0.1
    other = ["--comparison.tune", '{"optimizer.weight_decay" = [0, 0.1]}', "--comparison.tune-seed", "7"]
    settings = read_comparison(path, [*words, *other]).settings
    assert (settings.tune, settings.tuned_with) == ({"optimizer.weight_decay": (0, 0.1)}, 7)
    for tune, message in (
        ('{"optimizer.lr" = [-1]}', r'entry "Hydra" with optimizer\.lr = -1 of comparison\.tune'),
        ('{"model.mlp_ratio" = [1]}', "another number of parameters"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            tuned(matched(read_comparison(path, [*words, "--comparison.tune", tune])))
        assert "\n" not in str(error.value)


@pytest.mark.slow
def test_runs_that_tune_are_runs(recipe, dataset, tmp_path, capsys):
    """One rate of the grid diverges, which is remembered."""
    text = TUNED.replace("9e-3]", "1e30]").replace("[1, 2]", "[1]")
    home, path = tmp_path / "home", recipe("max_bad_steps = 2\n" + TINY.replace("steps = 4", "steps = 8") + text)
    command = [
        "compare",
        path,
        "--data.path",
        dataset,
        "--run-dir",
        str(home),
        "--only",
        "no mixer",
        "--parallel",
        "2",
    ]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert ": diverged" in said
    assert "Not begun: Hydra" in said
    comparison = tuned(matched(read_comparison(path, command[2:6])))
    entry, task = comparison.entries[1], tasks_of(comparison)[1]
    ((_, rate),) = entry.chosen
    assert task.run.read_config().optimizer.lr == rate
    found = home / entry.folder / "tune" / f"optimizer.lr={rate}" / "seed-0" / "summary.json"
    assert json.loads(found.read_text())["validation"]["loss"] == entry.tried[entry.chosen]
    assert main(command) == 0
    assert ": started" not in capsys.readouterr().out

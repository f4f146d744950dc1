"""The loop in one process: what is written, exact resumption, the guard, and the run directory's contract."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from nightly import each_value_once, nightly
from runs import losses, records, run_recipe, weights

from matmix.train import loop
from matmix.train.callbacks.records import MetricsFile
from matmix.train.checkpoint import save as checkpoint_save
from matmix.train.errors import NonFiniteError
from matmix.train.loop import train
from matmix.train.recipe import load_config
from matmix.train.tasks import Loss
from matmix.train.tasks.token_prediction import TokenPrediction


@pytest.mark.parametrize("recipe", ["debug_mru", "debug_hydra"])
def test_a_run_learns_and_leaves_everything_behind(recipe, dataset, tmp_path):
    result = run_recipe(recipe, dataset, tmp_path / "run", "--logging.tensorboard", "True", "--steps", "30")
    assert result.finished
    assert losses(tmp_path / "run")[-1] < losses(tmp_path / "run")[0] - 0.5
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["step"] == 30
    assert summary["validation"]["loss"] == result.metrics["loss"]
    assert summary["unigram_entropy"] == pytest.approx(result.unigram_entropy)
    assert list((tmp_path / "run" / "tensorboard").iterdir())
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["step-00000028", "step-00000030"]
    validation = records(tmp_path / "run", "validation")
    assert [record["step"] for record in validation] == [4, 8, 12, 16, 20, 24, 28, 30]
    assert ("masked_accuracy" if recipe == "debug_hydra" else "bits_per_byte") in validation[-1]


@pytest.mark.parametrize(("recipe", "workers"), each_value_once(["debug_mru", "debug_hydra"], ["0", "2"]))
def test_resuming_in_the_middle_is_bit_identical(recipe, workers, dataset, tmp_path):
    run_recipe(recipe, dataset, tmp_path / "whole", "--data.workers", workers)
    first = run_recipe(recipe, dataset, tmp_path / "parts", "--data.workers", workers, "--stop-step", "3")
    assert (first.step, first.finished) == (3, False)
    second = run_recipe(recipe, dataset, tmp_path / "parts")
    assert (second.step, second.steps_done, second.finished) == (8, 5, True)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert len(losses(tmp_path / "whole")) == 8
    expected = weights(tmp_path / "whole")
    for name, tensor in weights(tmp_path / "parts").items():
        assert torch.equal(tensor, expected[name]), name


def test_a_finished_run_is_not_done_again(dataset, tmp_path):
    first = run_recipe("debug_mru", dataset, tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run" / "checkpoints").rglob("*")}
    again = run_recipe("debug_mru", dataset, tmp_path / "run")
    assert (again.steps_done, again.finished) == (0, True)
    assert again.metrics == first.metrics
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run" / "checkpoints").rglob("*")} == before
    assert len(losses(tmp_path / "run")) == 8


def test_a_finished_run_that_is_started_again_keeps_every_checkpoint(dataset, tmp_path):
    """Also where it is asked for fewer than it was trained with."""
    kept = ["--checkpoint.every", "2", "--checkpoint.keep-last", "1", "--checkpoint.keep-every", "2"]
    run_recipe("debug_mru", dataset, tmp_path / "run", *kept)
    checkpoints = sorted((tmp_path / "run" / "checkpoints").iterdir())
    assert len(checkpoints) == 4
    assert run_recipe("debug_mru", dataset, tmp_path / "run", "--checkpoint.keep-last", "1").steps_done == 0
    assert sorted((tmp_path / "run" / "checkpoints").iterdir()) == checkpoints


def test_a_validation_split_without_a_target_is_told_before_the_first_step(dataset, tmp_path):
    options = "--objective.evaluation-masking.probability", "1e-9", "--evaluation.every", "0"
    with pytest.raises(ValueError, match=r"^the validation split holds no target to evaluate"):
        run_recipe("debug_hydra", dataset, tmp_path / "run", *options)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_no_step_lies_behind_the_epochs(dataset, tmp_path):
    options = "--epochs", "0.0001", "--stop-step", "2"
    with pytest.raises(ValueError, match=r"^stop_step = 2 lies beyond step 1, with which epochs = 0\.0001 end$"):
        run_recipe("debug_mru", dataset, tmp_path / "run", *options)


@pytest.mark.parametrize("recipe", [nightly("debug_mru"), "debug_hydra"])
def test_micro_batches_do_not_change_the_numbers(recipe, dataset, tmp_path):
    for micro in ("1", "2", "8"):
        run_recipe(recipe, dataset, tmp_path / micro, "--micro-batch-size", micro, "--model.dropout", "0")
    for micro in ("1", "2"):
        assert losses(tmp_path / micro) == pytest.approx(losses(tmp_path / "8"), rel=1e-4)
    one, eight = weights(tmp_path / "1"), weights(tmp_path / "8")
    for name in eight:
        # AdamW takes steps of lr whatever the size of a gradient: where that is only rounding, so is the sign.
        assert (one[name] - eight[name]).abs().mean() < 1e-5, name


def test_validation_counts_every_token_once(dataset, tmp_path):
    results = [
        run_recipe(
            "debug_mru", dataset, tmp_path / str(size), "--steps", "1", "--evaluation.batches", "0",
            "--global-batch-size", str(size), "--micro-batch-size", "1", "--optimizer.lr", "1e-30",
        ).metrics["loss"]
        for size in (1, 3, 8)
    ]  # fmt: skip
    assert results[1:] == pytest.approx(results[:1] * 2, rel=1e-5)


def test_a_run_says_at_once_what_it_is(dataset, told, tmp_path):
    """Long before the first record: a wrong data set or a forgotten run directory is seen then."""
    sizes = ["--global-batch-size", "6", "--micro-batch-size", "4"]
    run_recipe("debug_mru", dataset, tmp_path / "run", *sizes, "--stop-step", "2")
    first, passes = told[0], told[1]
    for word in (str(tmp_path / "run"), " parameters, cpu, ", dataset, "8 steps, from the first"):
        assert word in first
    assert passes.startswith("passes have 3 sequences")
    before = len(told)
    run_recipe("debug_mru", dataset, tmp_path / "run", *sizes)
    assert "from the newest checkpoint, step 2" in told[before]


def _poison(monkeypatch, steps: set[int]) -> None:
    """Makes the loss NaN in these steps."""
    true_loss, calls = TokenPrediction.loss, []

    def poisoned(task, model, batch):
        loss = true_loss(task, model, batch)
        if not model.training:
            return loss
        calls.append(None)
        step = 1 + (len(calls) - 1) // 2  # two micro-batches each
        return Loss(loss.total * torch.nan, *loss[1:]) if step in steps else loss

    monkeypatch.setattr(TokenPrediction, "loss", poisoned)


def test_a_nan_step_is_skipped_and_counted(monkeypatch, dataset, tmp_path):
    _poison(monkeypatch, {3})
    result = run_recipe("debug_mru", dataset, tmp_path / "run")
    assert result.finished
    assert records(tmp_path / "run")[-1]["skipped"] == 1
    assert all(bool(tensor.isfinite().all()) for tensor in weights(tmp_path / "run").values())


def test_many_nan_steps_in_a_row_stop_the_run_with_a_message(monkeypatch, dataset, tmp_path):
    _poison(monkeypatch, {5, 6, 7})
    with pytest.raises(NonFiniteError, match=r"3 steps in a row .* step 7\).*optimizer.lr"):
        run_recipe("debug_mru", dataset, tmp_path / "run", "--max-bad-steps", "3")
    assert (tmp_path / "run" / "checkpoints" / "step-00000004").is_dir()


def test_an_interval_of_skipped_steps_has_no_loss(monkeypatch, dataset, tmp_path):
    """It is null in metrics.jsonl, which any reader of JSON takes, a gap elsewhere, and in words for people."""

    def refuse(name: str):
        raise AssertionError(f"{name} is not JSON")

    _poison(monkeypatch, {3, 4})
    options = ["--logging.every", "2", "--steps", "6", "--evaluation.every", "0", "--checkpoint.every", "0"]
    run, drawn = tmp_path / "run", ["--logging.tensorboard", "True", "--logging.picture", "True"]
    assert run_recipe("debug_mru", dataset, run, *options, *drawn).finished
    lines = (run / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line, parse_constant=refuse) for line in lines]
    by_step = {record["step"]: record["loss"] for record in found if record["kind"] == "train"}
    assert by_step[4] is None
    assert all(by_step[step] > 1 for step in (2, 6))
    assert (run / "curves.png").is_file()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [2, 6]
    _poison(monkeypatch, {1, 2, 3})
    with pytest.raises(NonFiniteError, match="there is no checkpoint; "):
        run_recipe("debug_mru", dataset, tmp_path / "other", *options, "--max-bad-steps", "3")


def _full_disk(*_: object, **__: object):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_that_fills_up_costs_records_and_checkpoints_but_not_the_run(monkeypatch, capsys, dataset, tmp_path):
    run_recipe("debug_mru", dataset, tmp_path / "whole")
    capsys.readouterr()
    true_step = loop.Trainer.train_step

    def step(trainer, batches):
        if trainer.state.step == 4:  # the checkpoint of step 4 stands
            monkeypatch.setattr(MetricsFile, "_write", _full_disk)
            monkeypatch.setattr(checkpoint_save, "write_manifest", _full_disk)
        true_step(trainer, batches)

    monkeypatch.setattr(loop.Trainer, "train_step", step)
    result = run_recipe("debug_mru", dataset, tmp_path / "run", "--checkpoint.asynchronous", "False")
    assert (result.step, result.saved) == (8, False)
    warnings = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert len(warnings) == 2
    assert "No space left on device" in warnings[0]
    assert "the last valid one is step-00000004" in warnings[1]
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000004"]
    assert not (tmp_path / "run" / "summary.json").exists()

    monkeypatch.undo()
    again = run_recipe("debug_mru", dataset, tmp_path / "run")
    assert (again.steps_done, again.saved, again.finished) == (4, True, True)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_a_run_directory_is_a_recipe_that_goes_on_where_it_lies(dataset, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_recipe("debug_mru", dataset, "run", "--stop-step", "3")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").rename(tmp_path / "elsewhere" / "moved")
    monkeypatch.chdir(tmp_path / "elsewhere")
    result = train(load_config("moved"))
    assert (result.steps_done, result.finished) == (5, True)
    assert [path.name for path in Path().iterdir()] == ["moved"]


def test_a_folder_that_is_no_run_is_left_alone(dataset, tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="not empty and not a run"):
        run_recipe("debug_mru", dataset, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_the_resolved_config_runs_again_as_it_is(dataset, tmp_path):
    run_recipe("debug_mru", dataset, tmp_path / "run")
    run_recipe(str(tmp_path / "run" / "config.toml"), dataset, tmp_path / "again")
    assert losses(tmp_path / "again") == losses(tmp_path / "run")


@pytest.mark.parametrize("recipe", [nightly("hydra_base_c4"), nightly("mru_tinystories"), "mru_shakespeare"])
def test_a_dry_run_prints_the_plan_without_data(recipe, tmp_path):
    run = subprocess.run(
        [sys.executable, "-P", "-m", "matmix.train", recipe, "--dry-run"], cwd=tmp_path, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    for word in ("parameters", "FLOPs per token", "memory per rank", "steps", "tokens"):
        assert word in run.stdout
    if recipe == "hydra_base_c4":
        assert "112M" in run.stdout
        assert "70,000" in run.stdout
    assert not list(Path(tmp_path).iterdir())


def test_a_summary_that_a_power_cut_left_empty_is_written_again(dataset, tmp_path):
    run_recipe("debug_mru", dataset, tmp_path / "run", "--steps", "2")
    summary = tmp_path / "run" / "summary.json"
    before = summary.read_bytes()
    summary.write_bytes(b"")
    assert run_recipe("debug_mru", dataset, tmp_path / "run", "--steps", "2").finished
    assert summary.read_bytes() == before

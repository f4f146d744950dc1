"""What a run records: TensorBoard scalars, metrics.jsonl after a crash, a profiler trace, the closing words."""

import json
import math
import shutil
import time

import pytest
from runs import losses, records, run_recipe
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from matmix.train import loop


def test_tensorboard_holds_what_metrics_jsonl_holds(dataset, tmp_path):
    run_recipe("debug_hydra", dataset, tmp_path / "run", "--logging.tensorboard", "True")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    speed = {"speed/tokens_per_second", "speed/data_wait_share", "memory/peak_gib"}
    assert {"train/loss", "train/lr", "train/grad_norm", "validation/loss", "validation/masked_accuracy"} <= tags
    assert speed <= tags
    assert [event.value for event in events.Scalars("train/loss")] == pytest.approx(losses(tmp_path / "run"))
    assert [event.step for event in events.Scalars("validation/loss")] == [4, 8]
    evaluated = records(tmp_path / "run", "validation")[-1]
    context = [name for name in evaluated if name.startswith("position_loss/")]
    assert len(context) > 2
    for name in (*context, "context_gain", "loss_without_mixing", "mixing_gain"):
        assert events.Scalars(f"validation/{name}")[-1].value == pytest.approx(evaluated[name]), name


def test_tensorboard_has_the_gradient_norm_of_every_clipping_group(dataset, tmp_path):
    rule = "{match = '*.in_proj.weight', clip = 2.0}"
    run_recipe("debug_mru", dataset, tmp_path / "run", "--logging.tensorboard", "True", "--optimizer.rule", rule)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    found = records(tmp_path / "run")
    groups = [name for name in found[-1] if name.startswith("grad_norm/")]
    assert len(groups) > 1
    for name in groups:
        values = [event.value for event in events.Scalars(name)]
        assert values == pytest.approx([record[name] for record in found]), name


def test_tensorboard_shows_each_step_once_though_a_resumed_run_s_clock_is_behind(dataset, tmp_path, monkeypatch):
    for stop_step in ("4", "6"):
        run_recipe("debug_mru", dataset, tmp_path / "run", "--logging.tensorboard", "True", "--stop-step", stop_step)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000006")  # as if it had been killed at step 6
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() - 3600)
    run_recipe("debug_mru", dataset, tmp_path / "run", "--logging.tensorboard", "True")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 9))
    assert [event.value for event in events.Scalars("train/loss")] == pytest.approx(losses(tmp_path / "run"))


def test_records_have_the_numbers_people_ask_for(dataset, tmp_path):
    run_recipe("debug_mru", dataset, tmp_path / "run")
    record = records(tmp_path / "run")[-1]
    assert record["step"] == 8
    assert record["tokens"] == 8 * 8 * 32
    assert record["lr"] == pytest.approx(1e-2 * 0.1)
    assert 0 <= record["data_wait"] <= 1
    assert record["memory"] > 0
    assert "mfu" not in record  # no device here whose peak is known


def test_metrics_of_steps_that_are_done_again_appear_once(dataset, tmp_path):
    run_recipe("debug_mru", dataset, tmp_path / "run", "--stop-step", "4")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "train", "step": 5, "loss": 99.0}) + "\n")
        file.write('{"kind": "train", "st')  # killed while writing
    run_recipe("debug_mru", dataset, tmp_path / "run")
    assert [record["step"] for record in records(tmp_path / "run")] == list(range(1, 9))
    assert max(losses(tmp_path / "run")) < 50


@pytest.mark.slow
def test_a_profiler_trace_covers_its_window(dataset, tmp_path):
    options = ["--logging.profile-start", "2", "--logging.profile-steps", "2"]
    run_recipe("debug_mru", dataset, tmp_path / "run", "--steps", "4", "--evaluation.every", "0", *options)
    (trace,) = (tmp_path / "run" / "profile").iterdir()
    assert trace.name == "step-00000002.json"
    names = [event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]]
    assert sum(name.startswith("Optimizer.step") for name in names) == 2


def test_a_validation_loss_that_is_no_number_is_said_with_advice(dataset, tmp_path, monkeypatch, capsys):
    evaluate = loop.evaluate
    monkeypatch.setattr(loop, "evaluate", lambda *given, **options: evaluate(*given, **options) | {"loss": math.nan})
    run_recipe("debug_mru", dataset, tmp_path / "run", "--model.mixers.mru.construction", "ldu", "--stop-step", "4")
    printed = capsys.readouterr()
    [warning] = [line for line in (printed.out + printed.err).splitlines() if "warning: the validation loss" in line]
    assert "of step 4 is nan" in warning
    assert 'use construction "affine"' in warning

"""Norms of MRU states as a training metric, and the guard's words when they overflow."""

import math
from types import SimpleNamespace

import pytest
import torch
from failures import each
from nightly import nightly
from runs import records, run_recipe
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from matmix.model import build_model
from matmix.train import loop
from matmix.train.errors import NonFiniteError
from matmix.train.guards.steps import find_overflow
from matmix.train.meters.speed import Monitor
from matmix.train.recipe import load_config
from matmix.train.tasks.token_prediction import TokenPrediction

NAMES = {f"monitor/blocks.{index}.log_norm_{kind}" for index in (0, 1) for kind in ("max", "mean")}
LDU = ["--model.mixers.mru.construction", "ldu", "--model.dropout", "0", "--evaluation.every", "0"]


def monitored(record):
    return {name: value for name, value in record.items() if name.startswith("monitor/")}


def note_what_the_model_says(monkeypatch):
    """Per forward pass of training: what the model's monitors give when they are asked directly."""
    true_loss, said = TokenPrediction.loss, []

    def noting(task, model, batch):
        loss = true_loss(task, model, batch)
        if model.training:
            said.append({f"monitor/{name}": value.item() for name, value in model.monitor().items()})
        return loss

    monkeypatch.setattr(TokenPrediction, "loss", noting)
    return said


@pytest.mark.parametrize(("recompute", "compiled"), [("none", False), ("full", False), nightly("full", True)])
def test_records_hold_what_the_model_says(recompute, compiled, monkeypatch, dataset, tmp_path):
    """Over the two micro-batches of each of the three steps between two records, and without the evaluations."""
    said = note_what_the_model_says(monkeypatch)
    if compiled:  # without the minutes of the code generator
        true_compile = torch.compile
        monkeypatch.setattr(torch, "compile", lambda function: true_compile(function, backend="aot_eager"))
    options = ["--steps", "6", "--logging.every", "3", "--evaluation.every", "1", "--logging.tensorboard", "True"]
    options += ["--engine.activation-checkpointing", recompute, "--engine.compile", str(compiled), *LDU[:2]]
    run_recipe("debug_mru", dataset, tmp_path / "run", *options)
    assert len(said) == 6 * 2
    found = records(tmp_path / "run")
    for record, forwards in zip(found, (said[:6], said[6:]), strict=True):
        values = monitored(record)
        assert set(values) == NAMES
        for name, value in values.items():
            every = [forward[name] for forward in forwards]
            assert len(set(every)) > 1
            expected = max(every) if name.endswith("_max") else sum(every) / len(every)
            assert value == pytest.approx(expected, rel=1e-6)
            assert math.isfinite(value)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    for name in NAMES:
        assert [event.value for event in events.Scalars(name)] == pytest.approx([record[name] for record in found])


def test_values_are_those_of_states(dataset, tmp_path):
    """Orthogonal states of order 4: every log-norm is log(2), and stays there."""
    run_recipe("debug_mru", dataset, tmp_path / "run")
    for record in records(tmp_path / "run"):
        assert list(monitored(record).values()) == pytest.approx([math.log(2)] * 4, abs=1e-4)


def test_a_model_without_states_has_none(monkeypatch, dataset, tmp_path):
    gathered = []
    monkeypatch.setattr(loop.Engine, "all_gather", lambda *_: gathered.append(None))
    run_recipe("debug_hydra", dataset, tmp_path / "run")
    assert not any(map(monitored, records(tmp_path / "run")))
    assert not gathered


def overflow_at(monkeypatch, steps, layer=1, micro_batches=(0, 1)):
    """Makes the matrices of a layer huge in these micro-batches of these steps, as a too large update would."""
    true_loss, calls = TokenPrediction.loss, []

    def huge(task, model, batch):
        step, micro_batch = 1 + len(calls) // 2, len(calls) % 2
        weight = model.blocks[layer].mixer.in_proj.weight
        if not model.training:
            return true_loss(task, model, batch)
        calls.append(None)
        if step not in steps or micro_batch not in micro_batches:
            return true_loss(task, model, batch)
        kept = weight.detach().clone()
        weight.data.fill_(1e8)
        loss = true_loss(task, model, batch)
        weight.data.copy_(kept)
        return loss

    monkeypatch.setattr(TokenPrediction, "loss", huge)


def test_the_first_layer_that_overflows_is_named_and_checkpoints_stay(monkeypatch, capsys, dataset, tmp_path):
    overflow_at(monkeypatch, {6, 7})
    with pytest.raises(NonFiniteError) as error:
        run_recipe("debug_mru", dataset, tmp_path / "run", "--max-bad-steps", "2", *LDU)
    where = "the states of layer 1 (mru, construction ldu) left the range of float32"
    advice = 'use construction "affine", which is bounded, or a lower optimizer.lr'
    text = str(error.value)
    assert text.startswith("2 steps in a row")
    assert f"(last: step 7, where {where})" in text
    assert text.endswith(advice)
    assert "\n" not in text
    told = [line for line in capsys.readouterr().err.splitlines() if "step skipped" in line]
    assert [line.split(";")[0] for line in told] == [f"step 6: {where}", f"step 7: {where}"]
    assert all("loss nan, gradient norm" in line and line.endswith(advice) for line in told)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000004"]
    # Between the broken steps nothing was lost: the same command goes on from the checkpoint.
    monkeypatch.undo()
    result = run_recipe("debug_mru", dataset, tmp_path / "run", "--max-bad-steps", "2", *LDU)
    assert (result.steps_done, result.finished) == (4, True)


@pytest.mark.parametrize("micro_batch", [0, 1])
def test_one_micro_batch_is_enough(micro_batch, monkeypatch, capsys, dataset, tmp_path):
    overflow_at(monkeypatch, {3}, layer=0, micro_batches={micro_batch})
    run_recipe("debug_mru", dataset, tmp_path / "run", "--logging.every", "2", *LDU)
    assert "step 3: the states of layer 0 (mru, construction ldu) left" in capsys.readouterr().err
    said = [monitored(record).values() for record in records(tmp_path / "run")]
    finite = [all(value is not None and math.isfinite(value) for value in values) for values in said]
    assert finite == [True, False, True, True]  # the failed step lies in the second interval, and only there
    assert records(tmp_path / "run")[-1]["skipped"] == 1


def test_an_absurd_learning_rate_overflows_by_itself(dataset, tmp_path):
    options = ["--optimizer.lr", "1e6", "--max-bad-steps", "3", "--checkpoint.every", "1", "--steps", "40", *LDU]
    with pytest.raises(NonFiniteError, match=r"step \d+, where the states of layer \d \(mru, construction ldu\)"):
        run_recipe("debug_mru", dataset, tmp_path / "run", *options)
    assert list((tmp_path / "run" / "checkpoints").iterdir())


def test_a_layer_whose_squares_overflow_comes_before_the_one_that_is_nan(small_run_config):
    """A layer norm makes NaN of what is still finite below it: the layer below is to blame."""
    model = build_model(small_run_config.model)
    names = [f"blocks.{layer}.{name}" for layer in (0, 1) for name in ("log_norm_max", "log_norm_mean")]
    trainer = SimpleNamespace(config=small_run_config, engine=SimpleNamespace(module=model))
    for values, wanted in (
        ([43.0, 40.0, math.nan, math.nan], "the states of layer 1 (mru, construction ldu) left the range of float32"),
        (
            [50.02, 40.0, math.nan, math.nan],
            "the states of layer 0 (mru, construction ldu) grew to a log-norm of 50, where their squares leave the "
            "range of float32",
        ),
        ([43.0, 40.0, -math.inf, -math.inf], ""),
    ):
        trainer.monitored = dict(zip(names, values, strict=True))
        assert find_overflow(trainer)[0] == wanted


@pytest.fixture
def small_run_config():
    return load_config("debug_mru", ["--model.vocab-size", "64", *LDU])


def test_a_nan_elsewhere_blames_no_layer(monkeypatch, capsys, dataset, tmp_path):
    true_loss = TokenPrediction.loss

    def poisoned(task, model, batch):
        loss = true_loss(task, model, batch)
        return loss._replace(total=loss.total * torch.nan) if model.training else loss

    monkeypatch.setattr(TokenPrediction, "loss", poisoned)
    with pytest.raises(NonFiniteError) as error:
        run_recipe("debug_mru", dataset, tmp_path / "run", "--max-bad-steps", "1", *LDU)
    assert "layer" not in capsys.readouterr().err + str(error.value)
    assert "engine.precision = fp32" in str(error.value)


def test_bounded_states_point_to_what_came_in(monkeypatch, dataset, tmp_path):
    true_loss = TokenPrediction.loss

    def poisoned(task, model, batch):
        model.embedding.weight.data[:] = math.nan
        return true_loss(task, model, batch)

    monkeypatch.setattr(TokenPrediction, "loss", poisoned)
    with pytest.raises(NonFiniteError, match=r"layer 0 \(mru, construction cayley\).*its input was not finite already"):
        run_recipe("debug_mru", dataset, tmp_path / "run", "--max-bad-steps", "1")


class Said:
    """An engine of two ranks whose model says what the test wants."""

    def __init__(self, *others):
        self.module, self.others, self.values = self, list(others), {}

    def monitor(self):
        return {name: torch.tensor(value) for name, value in self.values.items()}

    def all_gather(self, tensor):
        return torch.stack([tensor, *(torch.tensor(other, dtype=tensor.dtype) for other in self.others)])


@each("bad", [math.nan, math.inf])
@each("own", [True, False])
def test_nan_and_infinity_of_any_micro_batch_and_rank_stay(bad, own):
    engine = Said([[7.0 if own else bad, 0.0], [7.0 if own else bad, 2.0]])
    monitor, read = Monitor(engine), []
    for first, second in ((bad if own else 6.0, 3.0), (5.0, 5.0)):
        engine.values = {"blocks.0.a_max": first, "blocks.1.b_mean": second}
        read += monitor.read()
    monitor.collect(read)
    for values in (monitor.of_step(), monitor.of_interval()):
        assert str(values["blocks.0.a_max"]) == str(bad)
        assert values["blocks.1.b_mean"] == 3.0
    assert monitor.of_interval() == {}


def test_nothing_waits_for_the_device_until_it_is_asked(monkeypatch):
    engine = Said()
    monitor = Monitor(engine)
    engine.monitor = lambda: {"blocks.0.a_max": torch.empty((), device="meta")}  # has no value to wait for
    monitor.collect([*monitor.read(), *monitor.read(), *monitor.read()])
    assert len(monitor.step) == 3

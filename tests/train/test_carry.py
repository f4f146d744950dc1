"""Runs whose states go on from row to row (`data.carry`), in one process: what is refused, forgotten and saved."""

import math
import shutil

import pytest
import torch
from runs import records, run_recipe
from safetensors.torch import load_file, save_file
from small_checkpoints import rehash

from matmix.train.checkpoint.lanes import SUBDIRECTORY, Lanes
from matmix.train.estimate.plan import make_plan
from matmix.train.loaders import make_loader
from matmix.train.loop import Trainer
from matmix.train.recipe import load_config
from matmix.use.exporting import convert_run

OPTIONS = ["--data.shuffle", "False", "--data.carry", "True", "--data.seqlen", "16", "--logging.progress", "False"]
OPTIONS += ["--model.dropout", "0", "--evaluation.every", "0", "--checkpoint.every", "0", "--gc-every", "0"]


def losses(run_dir) -> list[float]:
    return [record["loss"] for record in records(run_dir)]


@pytest.fixture(scope="module")
def stopped(dataset, tmp_path_factory):
    """A run that stopped at step 3, and the losses of the same run without a stop."""
    folder = tmp_path_factory.mktemp("carried")
    run_recipe("debug_mru", dataset, folder / "whole", *OPTIONS, "--steps", "6")
    run_recipe("debug_mru", dataset, folder / "stopped", *OPTIONS, "--steps", "6", "--stop-step", "3")
    return folder / "stopped", losses(folder / "whole")


def again(stopped, folder):
    return shutil.copytree(stopped[0], folder)


def states_of(run_dir):
    [path] = (run_dir / "checkpoints").glob(f"step-*/{SUBDIRECTORY}/*.safetensors")
    return path


def test_a_converted_run_goes_on_with_its_states(stopped, dataset, tmp_path):
    source = again(stopped, tmp_path / "source")
    convert_run(source, tmp_path / "converted")
    run_recipe("debug_mru", dataset, tmp_path / "converted", *OPTIONS, "--steps", "6")
    assert losses(tmp_path / "converted")[3:] == stopped[1][3:]
    states_of(source).unlink()  # as of lanes that begin anew
    rehash(source / "checkpoints" / "step-00000003")
    run_recipe("debug_mru", dataset, source, *OPTIONS, "--steps", "6")
    assert losses(source)[:3] == stopped[1][:3]
    assert losses(source)[3] != stopped[1][3]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda states: {**states, "0.0": states["0.0"][:, :1]}, "does not hold the states of 8 lanes"),
        (lambda states: {"0.0": states["0.0"]} | {"7.0": torch.ones(8)}, "does not hold the states of 8 lanes"),
        (lambda states: {**states, "0.0": states["0.0"].double()}, "does not hold the states of 8 lanes"),
        (None, r"rank-00000\.safetensors: .*"),
    ],
)
def test_states_of_something_else_are_refused_in_one_line(stopped, dataset, tmp_path, change, problem):
    run = again(stopped, tmp_path / "run")
    path = states_of(run)
    if change is None:
        path.write_bytes(b"\xff" * 64)
    else:
        save_file({name: state.contiguous() for name, state in change(load_file(path)).items()}, path)
    rehash(path.parent.parent)
    with pytest.raises(ValueError, match=rf"^checkpoint .*step-00000003 is damaged: .*{problem}$"):
        run_recipe("debug_mru", dataset, run, *OPTIONS, "--steps", "6")


def test_another_number_of_lanes_is_refused_in_one_line(stopped, dataset, tmp_path):
    run = again(stopped, tmp_path / "run")
    with pytest.raises(ValueError, match=r"^run_dir .*global_batch_size: 8 there, 4 here.*$"):
        run_recipe("debug_mru", dataset, run, *OPTIONS, "--steps", "6", "--global-batch-size", "4")


def test_a_state_that_is_not_finite_costs_one_step(dataset, tmp_path, monkeypatch):
    """The step that meets it is skipped, and all lanes begin anew."""
    true_step = Trainer.compute_step

    def compute_step(trainer, batches):
        if trainer.state.step == 2:
            trainer.lanes.rows[1].states[0].fill_(math.nan)
        true_step(trainer, batches)

    monkeypatch.setattr(Trainer, "compute_step", compute_step)
    options = [*OPTIONS, "--steps", "6", "--model.layers", "mru", "--micro-batch-size", "2"]
    run_recipe("debug_mru", dataset, tmp_path, *options)
    assert [record["skipped"] for record in records(tmp_path)] == [0, 0, 1, 1, 1, 1]


def test_states_of_rows_that_were_left_out_are_forgotten(dataset):
    """As after a rewind, which goes on with other data."""
    config = load_config("debug_mru", [*OPTIONS, "--data.path", dataset, "--run-dir", "x"])
    loader = make_loader(config, "train", 0, 1)
    lanes, batches = Lanes(loader), iter(loader)
    for _ in range(2):
        lanes.begin_step()
        for number in range(len(lanes.rows)):
            batch = lanes.attach(number, next(batches))
            assert batch.carried is lanes.rows[number]
            batch.carried.states = [torch.zeros(1)]
    loader.samples += config.global_batch_size
    lanes.begin_step()
    assert all(rows.states is None for rows in lanes.rows)
    assert lanes.tensors() == {}


def test_the_plan_knows_the_states(stopped, dataset):
    config = load_config("debug_mru", [*OPTIONS, "--data.path", dataset, "--run-dir", "x"])
    size = sum(state.nbytes for state in load_file(states_of(stopped[0])).values())
    assert make_plan(config, 1).parts["carried states"] == size
    assert make_plan(config, 4).parts["carried states"] == size / 4


@pytest.mark.parametrize(
    ("recipe", "options", "problem"),
    [
        ("debug_hydra", [], r"data\.carry: a model of encoder reads rows from both ends, .*"),
        ("debug_mru", ["--model.layers", "mru", "hyena"], r"data\.carry: hyena has no state of fixed size .*"),
        ("debug_mru", ["--data.shuffle", "True"], r"data\.carry cannot be used with data\.shuffle = true: .*"),
    ],
)
def test_what_cannot_carry_is_refused_in_one_line(recipe, options, problem):
    with pytest.raises(ValueError, match=rf"^command line: {problem}$"):
        load_config(recipe, [*OPTIONS, "--run-dir", "x", *options])

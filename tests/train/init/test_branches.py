"""Runs that go on from a checkpoint of another run: with its optimizer, step and position in the data."""

import re
import shutil

import pytest
import torch
from failures import each
from runs import losses, records, weights

from matmix.train.entry import main
from matmix.train.optim.config import rate_share
from matmix.train.recipe import load_config

TEXT = """
seed = 3
steps = 6
global_batch_size = 4
device = "cpu"
[model]
d_model = 16
n_layers = 1
layers = ["attention"]
mixers.attention = { nheads = 2, headdim = 8 }
[data]
path = "{data}"
seqlen = 16
workers = 0
[schedule]
name = "wsd"
warmup = 2
decay = 2
decay_shape = "1-sqrt"
final = 0.0
[evaluation]
batches = 1
ablation_batches = 0
[checkpoint]
every = 1
keep_last = 9
[logging]
every = 1
tensorboard = false
picture = false
progress = false
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory, dataset):
    path = tmp_path_factory.mktemp("recipe") / "mine.toml"
    path.write_text(TEXT.replace("{data}", dataset))
    return str(path)


@pytest.fixture(scope="module")
def stable(recipe, tmp_path_factory):
    """A run with a warm-up to step 2 and a decay from step 4 to step 6, and a checkpoint of every step."""
    run = tmp_path_factory.mktemp("source") / "stable"
    assert main([recipe, "--run-dir", str(run)]) == 0
    return run


def same(found, expected):
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def test_a_long_decay_begins_at_the_peak_rate(recipe):
    """A share of its steps would be a longer warm-up than the source's."""
    words = ["--schedule.warmup", "0.2", "--init.from", "runs/x/checkpoints/step-00000003", "--init.decay", "30"]
    config = load_config(recipe, words)
    rates = [rate_share(step, config.steps, config.schedule) for step in range(3, 34)]
    assert rates[0] == 1
    assert rates == sorted(rates, reverse=True)


def test_a_step_that_differs_from_the_checkpoints_is_refused(recipe):
    words = ["--init.from", "runs/x/checkpoints/step-00000003", "--init.resume", "True"]
    assert load_config(recipe, [*words, "--init.step", "3"]).init.step == 3
    with pytest.raises(ValueError, match=r"init\.step = 2, but init\.from names step-00000003: leave init\.step out"):
        load_config(recipe, [*words, "--init.step", "2"])


@pytest.mark.slow
def test_a_decay_goes_on_as_one_run_would_have(recipe, stable, tmp_path, capsys, told):
    """Bit for bit the run that decayed there in the first place, also after a stop, when the source is gone."""
    whole, branch, source = (tmp_path / name for name in ("whole", "branch", "source"))
    assert main([recipe, "--run-dir", str(whole), "--steps", "5", "--schedule.decay", "2"]) == 0
    shutil.copytree(stable, source)
    before = {path: path.read_bytes() for path in source.rglob("*") if path.is_file()}
    words = [str(source), "--init.from", f"{source}/checkpoints/step-00000003", "--init.decay", "2"]
    words += ["--run-dir", str(branch)]

    assert main([*words, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert f"all of step-00000003 of {source}: weights, optimizer, step and position in the data" in shown
    assert "stable to step 3, 1-sqrt to 0 at step 5" in shown
    assert not branch.exists()
    assert main([*words, "--stop-step", "4"]) == 0
    assert {path: path.read_bytes() for path in source.rglob("*") if path.is_file()} == before
    assert f"branched from step-00000003 of {source}: 1 steps to go" in told
    shutil.rmtree(source)
    assert main([str(branch)]) == 0
    assert [(record["step"], record["tokens"]) for record in records(branch)] == [
        (record["step"], record["tokens"]) for record in records(whole)[3:]
    ]
    assert [record["lr"] for record in records(branch)] == [record["lr"] for record in records(whole)[3:]]
    assert losses(branch) == losses(whole)[3:]
    same(weights(branch), weights(whole))


@each(
    "options, message",
    [
        (
            "--init.step 5 --init.decay 2",
            r"step-00000005 of .* is inside of a decay \(wsd falls from step 4 on\): take a",
        ),
        ("--init.step 1 --init.decay 2", "step-00000001 of .* is inside of the warm-up, which lasts to step 2$"),
        ("--init.decay 2", r"init\.decay = 2 needs the checkpoint that the decay begins with: init\.from = RUN/check"),
        (
            "--init.step 3 --init.resume True --model.d-model 32",
            "trained with another config .model.d_model: 16 there, 32",
        ),
        ("--init.step 3 --init.resume True --steps 3", "steps = 3 does not lie behind step-00000003 of"),
        (
            "--init.step 3 --init.decay 2 --init.weights ema",
            "init.decay takes all of a checkpoint: leave init.weights out",
        ),
        (
            "--init.step 3 --init.decay 2 --run-dir {stable}",
            r"run_dir .* belongs to a run with another config \(init\.",
        ),
    ],
)
def test_what_cannot_go_on_is_refused_in_a_line(recipe, stable, tmp_path, capsys, options, message):
    words = [recipe, "--run-dir", str(tmp_path / "branch"), "--init.from", str(stable)]
    assert main([*words, *options.format(stable=stable).split()]) == 2
    assert re.search(message, capsys.readouterr().err.strip().splitlines()[-1])
    assert not (tmp_path / "branch" / "config.toml").exists()

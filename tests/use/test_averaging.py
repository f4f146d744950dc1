"""Means of the last checkpoints of a run."""

import re
import shutil

import pytest
import torch
from runs import records, run_recipe, weights
from saved_weights import read_weights

from matmix.launch.cli import main
from matmix.train.init import source_of
from matmix.train.recipe import load_config
from matmix.use.exporting import export_run
from matmix.use.opening import open_model


@pytest.fixture(scope="module")
def run(dataset, tmp_path_factory):
    """A run with the checkpoints of steps 1 to 4."""
    run = tmp_path_factory.mktemp("runs") / "mine"
    every = ("--checkpoint.every", "1", "--checkpoint.keep-last", "9", "--evaluation.batches", "1")
    run_recipe("debug_hydra", dataset, run, "--steps", "4", "--evaluation.every", "0", *every)
    return run


def test_the_mean_of_the_last_checkpoints_is_exact_and_a_run(run, tmp_path, capsys):
    averaged, steps = tmp_path / "averaged", [2, 3, 4]
    assert main(["average", str(run), "--last", "3", "--out", str(averaged)]) == 0
    states = [dict(read_weights(run / f"checkpoints/step-{step:08d}")) for step in steps]
    expected = {name: torch.stack([one[name].double() for one in states]).mean(0).float() for name in states[0]}
    found = weights(averaged)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name
    assert not torch.equal(found["embeddings.word.weight"], states[-1]["embeddings.word.weight"])

    head, *rows, [last] = (re.split("  +", line) for line in capsys.readouterr().out.splitlines())
    assert last == f"The mean is the run {averaged}. Next: matmix export {averaged} --out DIR"
    (validation,) = records(run, "validation")
    opened = open_model(averaged)
    evaluation = opened.run.manifest["extra"]["evaluation"]
    assert head == ["weights", "loss", "masked accuracy"]
    assert [row[:2] for row in rows] == [
        ["step-00000004", f"{validation['loss']:.4f} nats per token"],
        ["mean of 3, from step 2", f"{evaluation['loss']:.4f} nats per token"],
    ]
    assert 0 < abs(evaluation["loss"] - validation["loss"]) < 0.5
    assert opened.run.manifest["extra"]["averaged_steps"] == steps

    export_run(averaged, tmp_path / "export")
    assert "mean of the checkpoints of steps 2, 3, 4" in (tmp_path / "export" / "README.md").read_text()
    init = load_config("debug_hydra", {"init.from": str(averaged)}).init
    name = "model.embeddings.word.weight"
    assert torch.equal(source_of(init).state.read_whole(name), expected["embeddings.word.weight"])


def test_what_cannot_be_averaged_is_refused_in_a_line(run, tmp_path, capsys):
    out = tmp_path / "averaged"
    damaged = shutil.copytree(run, tmp_path / "damaged")
    file = next((damaged / "checkpoints/step-00000003").rglob("__0_0.distcp"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    for source, last, message in (
        (run, 5, "has fewer than 5 checkpoints (of steps: 1, 2, 3, 4): lower --last"),
        (run, 1, "--last must be 2 or more, got 1"),
        (damaged, 2, "step-00000003"),
        (tmp_path, 2, "is not a run directory"),
    ):
        assert main(["average", str(source), "--last", str(last), "--out", str(out)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
    assert not out.exists()
    out.mkdir()
    (out / "mine").touch()
    assert main(["average", str(run), "--last", "2", "--out", str(out)]) == 2
    assert "exists and is not an empty directory" in capsys.readouterr().err

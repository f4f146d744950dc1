"""`matmix finetune` on several ranks: by torchrun, and by a launcher that is given the recipe which it writes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from failures import each
from labelled import texts, write_jsonl
from runs import losses, records, run_recipe

from matmix.launch.cli import main

SCORES = ("accuracy", "f1", "matthews")


@pytest.fixture(scope="module")
def command(dataset, tmp_path_factory):
    """A fine-tuning whose numbers of examples no number of ranks divides, but for its run directory."""
    folder = tmp_path_factory.mktemp("ranks")
    run_recipe("debug_hydra", dataset, folder / "encoder", "--steps", "2", "--evaluation.every", "0")
    files = ["--data.examples.train", write_jsonl(folder / "train.jsonl", texts(23))]
    files += ["--data.examples.validation", write_jsonl(folder / "validation.jsonl", texts(31, seed=1))]
    words = ["--device", "cpu", "--global-batch-size", "8", "--epochs", "2", "--logging.every", "1"]
    words += ["--logging.picture", "False", "--logging.tensorboard", "False", "--optimizer.lr", "1e-3"]
    # Masks of dropout depend on the place in the batch; Adam's step for almost no gradient on its rounding.
    words += ["--model.dropout", "0", "--model.head.dropout", "0", "--optimizer.eps", "1e-4"]
    return [str(folder / "encoder"), "sequence_classification", *files, *words]


@pytest.fixture(scope="module")
def alone(command, tmp_path_factory):
    """The run of one process."""
    run = tmp_path_factory.mktemp("alone") / "run"
    assert main(["finetune", *command, "--run-dir", str(run)]) == 0
    return run


def _ranks(*words: str) -> subprocess.CompletedProcess:
    start = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*start, "-m", "matmix.launch.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


def _assert_equal(run, alone) -> None:
    assert len(losses(run)) == len(losses(alone)) == 6
    assert losses(run) == pytest.approx(losses(alone), rel=2e-4)
    ours, theirs = records(run, "validation")[-1], records(alone, "validation")[-1]
    assert [ours[score] for score in SCORES] == pytest.approx([theirs[score] for score in SCORES], abs=1e-9)
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=2e-4)


@pytest.mark.slow
def test_two_ranks_of_torchrun_do_what_one_process_does(command, alone, tmp_path, capsys):
    run = tmp_path / "run"
    ended = _ranks("finetune", *command, "--run-dir", str(run))
    assert ended.returncode == 0, ended.stderr
    _assert_equal(run, alone)
    assert ended.stdout.count("Finished at step 6") == 1
    assert (ended.stdout + ended.stderr).count("weights from step-00000002") == 1
    # One process knows that run for its own.
    assert main(["finetune", *command, "--run-dir", str(run)]) == 0
    assert "Nothing to do, the run finished at step 6" in capsys.readouterr().out


@pytest.mark.slow
def test_a_launcher_runs_the_recipe_that_is_written(command, alone, tmp_path, capsys):
    run, recipe = tmp_path / "run", tmp_path / "recipe.toml"
    words = ["finetune", *command, "--run-dir", str(run)]
    assert main([*words, "--write-recipe", str(recipe)]) == 0
    assert f"matmix launch local {recipe} --nproc N" in capsys.readouterr().out
    assert not run.exists()
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "matmix.launch.cli", "launch", "local", str(recipe), "--nproc", "2"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    _assert_equal(run, alone)
    assert main(words) == 0
    assert "Nothing to do" in capsys.readouterr().out
    # A file that is there stays.
    before = recipe.read_text()
    assert main([*words, "--write-recipe", str(recipe)]) == 2
    assert "give the name of a new file" in capsys.readouterr().err
    assert recipe.read_text() == before


def test_a_dry_run_knows_the_steps_of_epochs(command, tmp_path, capsys):
    assert main(["finetune", *command, "--run-dir", str(tmp_path / "run"), "--dry-run"]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("steps")]
    assert line.split(maxsplit=2) == ["steps", "6", "(epochs = 2)"]


@each(
    "words, message",
    [
        (["finetune", "COMMAND", "--seeds", "0", "1"], "--seeds starts a process for each run"),
        (["finetune", "COMMAND", "--write-recipe", "NEW"], "--write-recipe writes a file and trains nothing"),
        (["glue", "runs/no", "GLUE"], "matmix glue starts a process for each run"),
        (["compare", "lion_small"], "matmix compare starts a process for each run"),
    ],
)
def test_what_starts_processes_itself_is_refused_on_several_ranks(
    command, words, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("WORLD_SIZE", "2")
    names = {"COMMAND": [*command, "--run-dir", str(tmp_path / "runs")], "NEW": [str(tmp_path / "new.toml")]}
    assert main([word for name in words for word in names.get(name, [name])]) == 2
    said = capsys.readouterr().err.strip()
    assert message in said
    assert len(said.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_of_several_ranks_the_first_says_what_is_wrong(command, tmp_path):
    """However fast the others end, on which their launcher ends it."""
    for words in (["--seeds", "0", "1"], ["--data.examples.train", "nowhere.jsonl"]):
        ended = _ranks("finetune", *command, *words, "--run-dir", str(tmp_path / "run"))
        assert ended.returncode != 0
        assert sum(line.startswith("matmix: error: ") for line in ended.stderr.splitlines()) == 1, ended.stderr
    assert not (tmp_path / "run").exists()

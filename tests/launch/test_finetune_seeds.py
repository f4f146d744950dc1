"""One fine-tuning with several seeds in one command."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from failures import each
from labelled import texts, write_jsonl
from runs import losses, run_recipe, weights

from matmix.data.processes import cores
from matmix.launch.cli import main
from matmix.train.loop import train
from matmix.train.process.exits import EXIT_STOPPED
from matmix.use.finetuning import finetuning_config


@pytest.fixture(scope="module")
def command(dataset, tmp_path_factory):
    folder = tmp_path_factory.mktemp("seeds")
    run_recipe("debug_hydra", dataset, folder / "encoder", "--steps", "2", "--evaluation.every", "0")
    files = ["--data.examples.train", write_jsonl(folder / "train.jsonl", texts(21))]
    files += ["--data.examples.validation", write_jsonl(folder / "validation.jsonl", texts(15, seed=1))]
    fast = ["--device", "cpu", "--global-batch-size", "8", "--epochs", "2", "--logging.picture", "False"]
    fast += ["--evaluation.every", "2", "--evaluation.best", "accuracy", "--logging.tensorboard", "False"]
    return [str(folder / "encoder"), "sequence_classification", *files, *fast]


@pytest.mark.slow
def test_each_seed_is_a_run_and_together_they_are_a_table(command, tmp_path, capsys):
    home = tmp_path / "runs"
    words = [*command, "--run-dir", str(home)]
    # The run of seed 0 is there already, by a command without --seeds.
    train(finetuning_config(words[0], words[1], [*words[2:-1], str(home / "seed-0"), "--seed", "0"]))
    weights = (home / "seed-0" / "summary.json").stat().st_mtime_ns
    capsys.readouterr()
    assert main(["finetune", *words, "--seeds", "0", "1"]) == 0
    out = capsys.readouterr()
    assert "1 of 2 runs are finished already" in out.out + out.err
    assert (home / "seed-0" / "summary.json").stat().st_mtime_ns == weights
    said = json.loads((home / "seeds.json").read_text())
    assert said["evaluation"] == "best accuracy"
    bests = [json.loads((home / f"seed-{seed}" / "summary.json").read_text())["best"] for seed in (0, 1)]
    values = [best["value"] for best in bests]
    mean, deviation = statistics.fmean(values), statistics.stdev(values)
    assert said["metrics"]["accuracy"]["seeds"] == dict(zip("01", values, strict=True))
    assert (said["metrics"]["accuracy"]["mean"], said["metrics"]["accuracy"]["deviation"]) == (mean, deviation)
    assert f"{100 * mean:.1f} ± {100 * deviation:.1f}" in out.out
    control = said["metrics"]["accuracy"]["control"]
    assert f"| {control:.1%} (the most frequent class) " in out.out
    assert f"the best evaluation of each seed by accuracy (step {bests[0]['step']}, {bests[1]['step']})" in out.out

    # The same command again trains nothing, and says the same.
    assert main(["finetune", *words, "--seeds", "0", "1"]) == 0
    again = capsys.readouterr()
    assert "2 of 2 runs are finished already" in again.out + again.err
    assert json.loads((home / "seeds.json").read_text()) == said

    # Its numbers are not taken for those of other settings.
    assert main(["finetune", *words, "--seeds", "0", "1", "--optimizer.lr", "1e-2"]) == 2
    assert "optimizer.lr: 0.002 there, 0.01 here" in capsys.readouterr().err

    # Nor for those of other examples in the same file.
    write_jsonl(Path(words[3]), texts(9))
    assert main(["finetune", *words, "--seeds", "0", "1", "2"]) == 2
    write_jsonl(Path(words[3]), texts(21))
    assert "was trained on other data than lie there now (train split)" in capsys.readouterr().err


@each(
    "words, message",
    [
        (["--seeds", "0", "1", "0"], "--seeds: 0 is given twice"),
        (["--seeds", "0", "-1"], "--seeds: seeds are integers >= 0, got -1"),
        (["--seeds"], "--seeds is given without a seed"),
        (["--parallel", "2"], "--parallel belongs to --seeds"),
        (["--seeds", "0", "--parallel", "0"], "--parallel must lie between 1 and the"),
        (["--seeds", "0", "--seed", "3"], "--seed and --seeds are both given"),
        (["--seeds", "0", "--run-dir", "ENCODER"], "is a run, and not a folder for the runs of several seeds"),
        (["--seeds", "0", "--run-dir", "FILE"], "is a file; choose another --run-dir"),
    ],
)
def test_mistakes_are_one_line(command, words, message, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    names = {"ENCODER": command[0], "FILE": str(tmp_path / "file")}
    words = [*command, "--run-dir", str(tmp_path / "runs"), *(names.get(word, word) for word in words)]
    assert main(["finetune", *words]) == 2
    said = capsys.readouterr().err.strip()
    assert message in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_shows_one_plan_and_trains_nothing(command, tmp_path, capsys):
    words = [*command, "--run-dir", str(tmp_path / "runs"), "--seeds", "0", "1", "--dry-run"]
    assert main(["finetune", *words]) == 0
    assert capsys.readouterr().out.count("parameters") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.skipif(cores() < 2, reason="two runs at a time need two cores")
def test_two_seeds_at_a_time_are_stopped_and_go_on(command, tmp_path):
    """Each becomes the run that it would have been alone."""
    steps = 150
    words = [*command, "--steps", str(steps), "--epochs", "0", "--evaluation.every", "100", "--logging.every", "1"]
    home = tmp_path / "runs"
    start = [sys.executable, "-P", "-m", "matmix.launch.cli", "finetune", *words, "--run-dir", str(home)]
    start += ["--seeds", "0", "1", "--parallel", "2"]
    options = {"env": {**os.environ, "OMP_NUM_THREADS": "1"}, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    runs = [home / f"seed-{seed}" for seed in (0, 1)]
    with subprocess.Popen(start, text=True, **options) as process:
        deadline = time.monotonic() + 120
        while not all((run / "metrics.jsonl").is_file() and len(losses_of(run)) > 2 for run in runs):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=120)
    assert process.returncode == EXIT_STOPPED, said
    assert "Stopped; what was running is saved." in said
    assert not (home / "seeds.json").exists()
    before = [len(losses_of(run)) for run in runs]
    assert all(2 < count < steps for count in before)

    said = subprocess.run(start, text=True, check=True, timeout=300, **options).stdout
    assert "Mean ± sample standard deviation over 2 seeds" in said
    assert set(json.loads((home / "seeds.json").read_text())["metrics"]["accuracy"]["seeds"]) == {"0", "1"}
    for seed, run in enumerate(runs):
        alone = tmp_path / f"alone-{seed}"
        train(finetuning_config(words[0], words[1], [*words[2:], "--run-dir", str(alone), "--seed", str(seed)]))
        assert losses(run) == losses(alone)
        ours, theirs = weights(run), weights(alone)
        assert all(ours[name].equal(theirs[name]) for name in theirs)


def losses_of(run) -> list[str]:
    """The whole lines of training steps, while others may be written."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [line for line in lines if '"train"' in line and line.endswith("}")]

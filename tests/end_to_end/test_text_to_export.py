"""The README's path with its own commands: text in, a directory that transformers loads out."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from nightly import nightly
from runs import losses, run_recipe

from matmix.launch.cli import main

MATMIX = Path(sys.executable).with_name("matmix")
TORCHRUN = Path(sys.executable).with_name("torchrun")


def _run(folder: Path, *words: str, code: int = 0) -> subprocess.CompletedProcess:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONSAFEPATH": "1"}
    run = subprocess.run([str(word) for word in words], cwd=folder, env=environment, capture_output=True, text=True)
    assert run.returncode == code, run.stdout + run.stderr
    assert "Traceback" not in run.stderr
    assert "Warning" not in run.stderr
    return run


@pytest.mark.parametrize(
    ("recipe", "shards"),
    [
        ("debug_hydra", "webdataset"),
        pytest.param("debug_mru", "mds", marks=pytest.mark.slow),
        pytest.param("debug_mru", "webdataset", marks=pytest.mark.slow),
        pytest.param("debug_hydra", "mds", marks=pytest.mark.slow),
    ],
)
def test_prepare_train_resume_generate_export(recipe, shards, tmp_path, monkeypatch, capsys, request):
    """By night each verb is a process of its own; by day two of them are, since imports take seconds each time."""
    monkeypatch.chdir(tmp_path)
    by_night = request.node.get_closest_marker("slow") is not None

    def here(*words: str) -> str:
        """What a verb says that a process has shown to work already."""
        return said(*words).out

    def said(*words: str):
        assert main(list(words)) == 0
        return capsys.readouterr()

    def verb(*words: str, process: bool = by_night) -> SimpleNamespace:
        if process:
            run = _run(tmp_path, MATMIX, *words)
            return SimpleNamespace(out=run.stdout, err=run.stderr)
        return said(*words)

    text = [{"text": f"Act {n}.\nThe king of line {n} speaks, and {n * 7919} voices answer him."} for n in range(400)]
    (tmp_path / "play.jsonl").write_text("\n".join(map(json.dumps, text)))
    prepare = ["prepare", "play.jsonl", "--out", "data", "--vocab-size", "400", "--format", shards]
    prepare += ["--validation-fraction", "0.1"]
    verb(*prepare)
    assert "nothing to do" in here(*prepare)

    train = ["train", recipe, "--data.path", "data", "--run-dir", "run"]
    stopped = verb(*train, "--stop-step", "4", process=True)
    assert "Stopped at step 4 of 8" in stopped.out
    resumed = verb(*train)
    assert "resumed from step-00000004" in resumed.err
    assert "Finished at step 8" in resumed.out
    assert "Unigram entropy" in resumed.out
    assert "Next: matmix generate" in resumed.out
    assert "Nothing to do, the run finished at step 8" in here(*train)

    prompt = "The king" if recipe == "debug_mru" else "The <mask> of line"
    sample = verb("generate", "run", "--prompt", prompt, "--max-new-tokens", "8")
    assert "king" in sample.out if recipe == "debug_mru" else sample.out.strip()
    verb("export", "run", "--out", "out", process=True)
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= written
    both = here("generate", "out", "--prompt", prompt, "--prompt", prompt, "--max-new-tokens", "8")
    assert [line for line in both.splitlines() if "---" in line] == [f"--- {n} of 2: {prompt}" for n in (1, 2)]


@pytest.mark.slow  # by day `matmix launch local` starts two ranks
def test_torchrun_on_two_processes_equals_one(dataset, tmp_path):
    options = ["--model.dropout", "0", "--steps", "4"]
    run_recipe("debug_hydra", dataset, tmp_path / "one", *options)
    launch = [TORCHRUN, "--nproc-per-node=2", "--master-port=0", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    train = ["-m", "matmix.train", "debug_hydra", "--data.path", dataset, "--run-dir", "two"]
    _run(tmp_path, *launch, *train, *options)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-3)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        nightly(["train", "no_such_recipe"], "recipe not found: no_such_recipe"),
        (["train", "debug_mru", "--data.path", "nowhere"], "nowhere"),
        nightly(["export", "nowhere", "--out", "out"], "nowhere"),
        nightly(["generate", "nowhere"], "nowhere"),
        nightly(["import", "--from", "hydra", "nowhere.safetensors", "out"], "nowhere.safetensors"),
        nightly(["prepare", "nowhere.txt", "--out", "data"], "nowhere.txt"),
    ],
)
def test_what_is_missing_is_named_in_one_line(words, expected, tmp_path):
    run = _run(tmp_path, MATMIX, *words, code=2)
    assert expected in run.stderr
    assert len(run.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())

"""The quickstart's model uses what came before: beside the same model without mixers, in a third of its steps."""

import json
import subprocess
import sys

import pytest

MATMIX = (sys.executable, "-P", "-m", "matmix.launch.cli")


def matmix(folder, *arguments: str) -> None:
    subprocess.run([*MATMIX, *arguments], cwd=folder, check=True, stdout=subprocess.DEVNULL)


@pytest.mark.slow
def test_the_quickstart_beats_the_same_model_without_mixers(tmp_path):
    options = ("--model-type", "char", "--byte-fallback", "False", "--max-document-chars", "4000")
    matmix(tmp_path, "prepare", "bundled:shakespeare", "--out", "data", *options, "--validation-fraction", "0.03")
    found = {}
    for name in ("mru", "none"):
        run = ("--data.path", "data", "--run-dir", name, "--model.layers", name, "--steps", "160")
        matmix(tmp_path, "train", "mru_shakespeare", *run, "--logging.progress", "False")
        found[name] = json.loads((tmp_path / name / "summary.json").read_text(encoding="utf-8"))["validation"]
    assert found["mru"]["loss"] < found["none"]["loss"] - 0.25
    assert found["mru"]["mixing_gain"] > 0.25
    assert found["mru"]["context_gain"] > 0.1
    assert "mixing_gain" not in found["none"]

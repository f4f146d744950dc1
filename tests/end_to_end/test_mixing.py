"""The quickstart's model uses what came before: beside attention and no mixers of its size, in a third of its steps."""

import json
import subprocess
import sys

import pytest

MATMIX = (sys.executable, "-P", "-m", "matmix.launch.cli")


def matmix(folder, *arguments: str) -> None:
    subprocess.run([*MATMIX, *arguments], cwd=folder, check=True, stdout=subprocess.DEVNULL)


@pytest.mark.slow
def test_the_quickstart_beats_no_mixers_and_keeps_up_with_attention(tmp_path):
    options = ("--model-type", "char", "--byte-fallback", "False", "--max-document-chars", "4000")
    matmix(tmp_path, "prepare", "bundled:shakespeare", "--out", "data", *options, "--validation-fraction", "0.03")
    recipe = ("quickstart", "--data.path", "data", "--comparison.seeds", "0", "--run-dir", "runs")
    matmix(tmp_path, "compare", *recipe, "--steps", "160", "--no-speed")
    mru, attention, none = (
        json.loads((tmp_path / "runs" / name / "seed-0" / "summary.json").read_text(encoding="utf-8"))["validation"]
        for name in ("MRU", "attention", "no-mixer")
    )
    assert mru["loss"] < none["loss"] - 0.25
    assert mru["loss"] < attention["loss"] + 0.05
    assert mru["mixing_gain"] > 0.25
    assert mru["context_gain"] > 0.1
    assert "mixing_gain" not in none

"""Simple models beside image classifiers."""

from __future__ import annotations

import pytest
from example_scripts import example_script

pytest.importorskip("timm")
pytest.importorskip("torchvision")
Image = pytest.importorskip("PIL.Image")

from matmix.launch.cli import main as matmix  # noqa: E402

main = example_script("image_baselines").main


def test_pixels_tell_classes_that_the_most_frequent_one_does_not(tmp_path, capsys):
    for split in ("train", "held-out"):
        for name, brightness in (("dark", 40), ("light", 200)):
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            for number in range(4):
                Image.new("L", (8, 8), brightness + number).save(folder / f"{number}.png")
    out = str(tmp_path / "dataset")
    words = ["--out", out, "--validation", str(tmp_path / "held-out"), "--processes", "1"]
    assert matmix(["prepare-images", str(tmp_path / "train"), *words]) == 0
    capsys.readouterr()
    assert main([out, "--size", "8"]) == 0
    frequent, learned = capsys.readouterr().out.splitlines()
    assert "50.00% of 8 pictures" in frequent
    assert "100.00% of 8 pictures" in learned


def test_a_missing_dataset_is_said_in_one_line(tmp_path, capsys):
    assert main([str(tmp_path / "none")]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1

"""The study of MRU constructions, cut down: its parts run, keep their results and make a report."""

import json

import pytest

from matmix.train import study_mru_measures, study_mru_report
from matmix.train.study_mru import VARIANTS, Results, main, options_of


def _study(part, work, dataset, *options):
    arguments = ["--data", dataset, "--plays", dataset, "--work", str(work), "--out", str(work / "out")]
    return main([part, *arguments, "--steps", "2", *options])


def test_results_are_kept_and_reported(tmp_path, dataset, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(study_mru_measures, "LENGTH", 256)
    for module in (study_mru_measures, study_mru_report):
        monkeypatch.setattr(module, "FROM_1", (1, 16, 256))
        monkeypatch.setattr(module, "EVERY_64", (64, 128, 192, 256))
    assert _study("growth", tmp_path, dataset, "--variants", "ldu") == 0
    assert _study("train", tmp_path, dataset, "--variants", "householder") == 0
    assert _study("beyond", tmp_path, dataset, "--variants", "householder") == 0
    results = Results(tmp_path)
    assert results.read("growth")["ldu"]["0.1"]["overflow"] < 256
    assert results.read("growth")["ldu"]["0"]["mean"] == pytest.approx([1.04] * 3, abs=0.01)
    (householder, none) = results.read("train").values()
    assert [step["log_norm_max"] for step in householder["steps"]] == pytest.approx([1.04] * 2, abs=0.01)
    assert [step["log_norm_max"] for step in none["steps"]] == [None] * 2
    assert [len(layer["mean"]) for layer in results.read("beyond")["householder@0.003"]["layers"]] == [4] * 4
    capsys.readouterr()
    assert _study("growth", tmp_path, dataset, "--variants", "ldu") == 0
    assert capsys.readouterr().out == ""
    assert _study("report", tmp_path, dataset) == 0
    assert "| `householder` | 0.003 |" in capsys.readouterr().out
    record = json.loads((tmp_path / "out/mru_study.json").read_text())
    assert record["train"]["householder@0.003"] == {**householder, "steps": householder["steps"][:1]}
    assert len(list((tmp_path / "out").glob("mru_*.png"))) == 3


def test_unknown_variants_are_named(tmp_path, capsys):
    assert main(["growth", "--work", str(tmp_path), "--variants", "ldu,lu"]) != 0
    assert "lu; known: cayley" in capsys.readouterr().err


def test_variants_are_options_of_the_mixer():
    assert options_of("ldu+decay") == {"construction": "ldu", "decay": True}
    assert [options_of(name)["decay"] for name in VARIANTS].count(True) == 3

"""The study of the MRU, cut down: variants are equal, runs are shared out and kept, and make a report."""

import json

import pytest

from matmix.model.build import build_model, count_parameters
from matmix.model.parameter_rules import stated_rules
from matmix.studies.mru import growth, speed
from matmix.studies.mru.__main__ import main
from matmix.studies.mru.grid import FOLLOWED, Results, best_runs, run_key, share
from matmix.studies.mru.variants import MRU_VARIANTS, RATES, VARIANTS, configs

TWO = ("no mixer", "affine, chunked, gate and shift")


@pytest.fixture
def study(tmp_path, dataset):
    def start(part, *options):
        folders = ["--plays", dataset, "--work", str(tmp_path / "work"), "--out", str(tmp_path / "out")]
        return main([part, "--data", f"{FOLLOWED}={dataset}", *folders, "--steps", "3", *options])

    start.results = lambda: Results(tmp_path / "work")
    start.out = tmp_path / "out"
    return start


def test_variants_have_equal_parameters(dataset):
    found = configs(dataset, {})
    assert list(found) == list(VARIANTS)
    counts = {name: count_parameters(config.model) for name, config in found.items()}
    assert max(counts.values()) <= 1.005 * min(counts.values()), counts


def test_the_rule_is_the_one_that_the_mru_states(dataset):
    found = configs(dataset, {})
    ruled = {name for name, config in found.items() if config.optimizer.rule}
    assert ruled == {name for name in MRU_VARIANTS if name.endswith("dense, rule")}
    for name in ruled - {"affine, dense, rule"}:  # which has none by itself
        config = found[name]
        model = build_model(config.model, device="meta")
        stated = {(rule.lr, rule.clip) for _, rule in stated_rules(model, config.data.seqlen).values()}
        assert stated == {(config.optimizer.rule[0].lr, config.optimizer.rule[0].clip)}


@pytest.mark.slow
def test_a_grid_is_run_once_and_reported(study, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(growth, "LENGTH", 128)
    monkeypatch.setattr(growth, "BIN", 64)
    monkeypatch.setattr(growth, "documents", lambda data, sha256: _documents(data, sha256))
    monkeypatch.setattr(growth, "CASES", {name: growth.CASES[name] for name in ("ldu, dense", "affine, chunked")})
    monkeypatch.setattr(speed, "CASES", {"affine, dense": speed.CASES["affine, dense"]})
    for name, value in {"BATCH": 1, "SEQLEN": 16, "WIDTH": 64}.items():
        monkeypatch.setattr(speed, name, value)

    assert study("grid", "--variants", *TWO, "--seeds", "2") == 0
    runs = study.results().read("grid")
    assert len(runs) == 2 * (len(RATES) + 1)
    best = best_runs(runs)[FOLLOWED, TWO[1]]
    assert best["loss"] == min(run["loss"] for run in runs.values() if run["variant"] == TWO[1] and run["seed"] == 0)
    assert run_key(FOLLOWED, TWO[1], best["rate"], 1) in runs
    assert best["log_norm_max"] > 0
    assert best["mixing_gain"] is not None
    assert {run["mixing_gain"] for run in runs.values() if run["variant"] == TWO[0]} == {None}
    capsys.readouterr()
    assert study("grid", "--variants", *TWO, "--seeds", "2") == 0
    assert "loss" not in capsys.readouterr().out, "what is there is not run again"
    assert study("grid", "--variants", *TWO, "--steps", "4") == 2
    assert "with steps = 3, and not 4" in capsys.readouterr().err
    assert study("grid", "--variants", *TWO, "--init-std", "0.1") == 2
    assert "with init_std = 0.02, and not 0.1" in capsys.readouterr().err

    for part in ("growth", "beyond", "speed"):
        assert study(part, "--variants", *TWO) == 0
    assert study("report") == 0
    text = capsys.readouterr().out
    assert f"| {TWO[1]} | {best['parameters']:,} | {best['rate']:g} | " in text
    record = json.loads((study.out / "mru_study.json").read_text())
    assert sum("curve" in run for run in record["grid"]) == 2
    assert len(record["beyond"]) == 2
    names = ("beyond", "growth", "losses", "training")
    assert sorted(path.name for path in study.out.glob("*.png")) == [f"mru_{name}.png" for name in names]


def _documents(data, sha256):
    """Those of the tests' dataset are short; the first 128 tokens in a row."""
    import torch

    assert len(sha256) == 64
    ids = torch.arange(129).unsqueeze(0)
    return [(ids[:, :-1], ids[:, 1:])]


def test_a_run_that_is_nan_is_worse_than_any():
    def run(rate, loss, seed=0):
        return {"data": "d", "variant": "v", "rate": rate, "loss": loss, "seed": seed}

    assert best_runs({"a": run(1e-3, 4.0), "b": run(1e-2, None), "c": run(3e-3, 1.0, seed=1)})["d", "v"]["loss"] == 4.0
    assert best_runs({"b": run(1e-2, None)}) == {}


def test_shards_are_disjoint_and_complete():
    items = list(range(17))
    shards = [share(items, (i, 3)) for i in (1, 2, 3)]
    assert sorted(item for shard in shards for item in shard) == items


def test_file_names_tell_runs_apart(tmp_path):
    results = Results(tmp_path)
    keys = [run_key(FOLLOWED, name, rate, seed) for name in VARIANTS for rate in RATES for seed in (0, 1)]
    assert len({results.path("grid", key) for key in keys}) == len(keys)


def test_long_stretches_lie_within_one_document(dataset, monkeypatch):
    from matmix.data.tokenizer import Tokenizer

    sha256 = Tokenizer.load(f"{dataset}/tokenizer").sha256
    monkeypatch.setattr(growth, "LENGTH", 16)
    found = growth.documents(dataset, sha256)
    assert all(ids.shape == labels.shape == (1, 16) for ids, labels in found)
    monkeypatch.setattr(growth, "LENGTH", 500)
    with pytest.raises(ValueError, match="no document"):
        growth.documents(dataset, sha256)


@pytest.mark.parametrize(
    ("options", "message"),
    [(("--variants", "ldu"), "unknown ldu; known: no mixer"), (("--seeds", "0"), "1 or more")],
)
def test_mistakes_are_one_line(study, options, message, capsys):
    assert study("grid", *options) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_report_of_nothing_says_so(study, capsys):
    assert study("report") == 2
    assert "holds no results" in capsys.readouterr().err

"""Costs against the length of rows."""

import json

import pytest

from matmix.benchmarks import lengths
from matmix.train.recipe import load_config


@pytest.mark.parametrize("group", lengths.GROUPS)
def test_every_length_has_as_many_tokens_until_a_form_is_too_slow(monkeypatch, group):
    seen = []

    def found(recipe):
        config = load_config(str(recipe))
        seen.append((config.micro_batch(1), config.data.seqlen))
        return {"tokens_per_second": 1e6 / config.data.seqlen, "peak_bytes": 2**20}

    monkeypatch.setattr(lengths, "in_a_process", found)
    objective, models = lengths.GROUPS[group]
    for changes in models.values():
        seen.clear()
        benchmark = lengths.Lengths(lengths=(64, 256, 1024), tokens=1024, slowest=0.2)
        cells = benchmark.measured(objective, changes)
        assert seen == [(16, 64), (4, 256)]
        assert list(cells) == [64, 256]


def test_a_process_that_fails_is_named(monkeypatch):
    monkeypatch.setattr(lengths, "in_a_process", lambda recipe: "no memory")
    with pytest.raises(RuntimeError, match=r"hydra.* at 128 tokens: no memory"):
        lengths.Lengths().measured("masked_lm", {"model.layers": ["hydra"]})


@pytest.mark.slow
def test_it_measures_and_draws(monkeypatch, tmp_path, capsys):
    models = {"Hydra": {"model.layers": ["hydra"]}, "attention": {"model.layers": ["attention"]}}
    monkeypatch.setattr(lengths, "GROUPS", {"encoders": ("masked_lm", models)})
    out = tmp_path / "lengths.json"
    assert lengths.Lengths(lengths=(16, 32), tokens=64, out=out).run([], []) == 0
    cells = json.loads(out.read_text())["groups"]["encoders"]
    assert all(cells[name][length]["tokens_per_second"] > 0 for name in models for length in ("16", "32"))
    assert out.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
    assert "thousand tokens a second" in capsys.readouterr().out

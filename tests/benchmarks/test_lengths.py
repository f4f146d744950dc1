"""Costs against the length of rows."""

import json

import pytest
import torch

from matmix.benchmarks import lengths
from matmix.launch.lab.measuring import tensor_bytes
from matmix.train.recipe import load_config

FORMS = ("attention", "recurrent")


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


def test_bytes_of_tensors_are_counted():
    def run():
        kept = torch.ones(1000)
        return kept, [torch.ones(500) * kept[:500].sum()]

    held, peak = tensor_bytes(run)
    assert held == 4 * 1500
    assert 4 * 2000 < peak < 4 * 2100


@pytest.mark.slow
def test_inference_of_lions_recurrence_is_linear_and_its_attention_quadratic():
    models = lengths.GROUPS["encoders"][1]
    cells = {form: lengths.Inference(lengths=(64, 128, 256)).measured(models[f"LION-S, {form}"]) for form in FORMS}
    assert lengths.exponent(cells["attention"]) > 1.5
    assert lengths.exponent(cells["recurrent"]) < 1
    assert cells["recurrent"][256]["peak_bytes"] < cells["attention"][256]["peak_bytes"] / 2


def test_both_directions_of_the_recurrence_share_a_cell_for_each_token():
    kept = lengths.kept_by_step(5, nheads=1, headdim=4)
    assert kept["tokens"] == [[0, 4], [1, 3], [2, 2], [3, 1], [4, 0]]
    assert kept["cells"] == [2 * 5, 4 * 5, 5 * 5, 5 * 5, 5 * 5]
    assert kept["states"] == [2 * (4 * 4 + 4 + 1)] * 5
    assert kept["all_states"] == [42, 84, 126, 168, 210]


@pytest.mark.slow
def test_the_picture_of_memory_is_drawn():
    cells = {length: {"peak_bytes": 1000.0 * length, "tokens_per_second": 1.0} for length in (16, 32)}
    assert lengths.exponent(cells) == pytest.approx(1)
    assert lengths.memory_picture({"one": cells})[:4] == b"\x89PNG"

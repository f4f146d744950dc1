"""The study of recall: its own form of the models is theirs, and what it keeps is not made again."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from matmix.data.config import SyntheticConfig
from matmix.data.synthetic.recall import MultiQueryRecall
from matmix.model.build import build_model
from matmix.model.initialization import initialize
from matmix.studies.recall import FORMS, Model, Study, hydra, row, samples, stacked, started, train


@pytest.mark.parametrize(
    ("name", "mixer"),
    [
        ("Hydra", "hydra"),
        ("SSD, added", "bidirectional_add"),
        ("SSD, added, shifted", "bidirectional_add_shift"),
        ("SSD, added, the diagonal once", "bidirectional_add_diagonal"),
    ],
)
def test_forms_are_the_mixers_that_they_are_named_after(name, mixer):
    config = hydra().config
    mixers = dataclasses.replace(config.mixers, **{mixer: type(getattr(config.mixers, mixer))(headdim=16, d_state=16)})
    model = build_model(dataclasses.replace(config, layers=(mixer,), mixers=mixers))
    initialize(model, 0)
    parameters = started(FORMS[name], 0)
    for own, value in model.named_parameters():
        parameters[own] = value.detach().expand_as(parameters[own])
    ids, places, _ = samples(np.random.default_rng(0), 4, 32)
    expected = model(ids).take_along_dim(places.unsqueeze(-1), 1)
    torch.testing.assert_close(Model(FORMS[name]).logits(parameters, ids, places), expected, rtol=1e-4, atol=1e-5)


def test_samples_are_those_of_the_recipe():
    """A sample's answers follow from its pairs, and its parts stand where the recipe's generator puts them."""
    puzzle = MultiQueryRecall(SyntheticConfig(task="mqar", symbols=16, items=4))
    theirs, _ = puzzle.sample(np.random.default_rng(0), 16, puzzle.mask_id)
    ids, places, values = samples(np.random.default_rng(0), 8, 64)
    for sample, at, answers in zip(ids.tolist(), places.tolist(), values.tolist(), strict=True):
        pairs = dict(zip(sample[:8:2], sample[1:8:2], strict=True))
        assert [pairs[sample[place - 1]] for place in at] == answers
        assert [place for place, token in enumerate(sample) if token == puzzle.mask_id] == sorted(at)
    assert set(theirs) <= set(range(36))
    assert int(ids.max()) == puzzle.mask_id


def test_runs_that_are_trained_together_are_those_that_are_trained_alone(monkeypatch):
    monkeypatch.setattr("matmix.studies.recall.LENGTHS", (1,))
    form = FORMS["Hydra, D and fc_D from 0"]
    both, alone = (train(form, 0.003, seeds, 4, "") for seeds in ([0, 1], [1]))
    assert np.allclose(both[1]["D"], alone[0]["D"], atol=1e-5)
    assert not np.allclose(both[0]["D"], both[1]["D"], atol=1e-5)


def test_what_a_form_holds_stays(monkeypatch):
    monkeypatch.setattr("matmix.studies.recall.LENGTHS", (1,))
    start = stacked([started(FORMS["Hydra, no diagonal"], 0)])
    assert not start["blocks.0.mixer.D"].any()
    assert not start["blocks.0.mixer.fc_D.weight"].any()
    (result,) = train(FORMS["Hydra, no diagonal"], 0.01, [0], 3, "")
    assert not np.any(result["D"])


def test_results_that_are_kept_are_not_made_again(tmp_path, monkeypatch, capsys):
    kept = {"0": {"accuracy": [1.0, 0.5, 0.25, 0.125], "learned": 500, "seconds": 1.0, "losses": [], "D": []}}
    path = tmp_path / "Hydra, rate 0.006, 1000 steps.json"
    path.write_text(json.dumps(kept), encoding="utf-8")
    Study(forms=("Hydra",), rates=(0.006,), seeds=(0,), out=tmp_path).run()
    assert capsys.readouterr().out.splitlines()[-1] == row("Hydra", 0.006, [kept["0"]])
    with pytest.raises(ValueError, match='there is no "Hydro"'):
        Study(forms=("Hydro",), out=tmp_path).run()

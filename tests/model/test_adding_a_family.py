"""docs/adding-an-architecture.md works: its one file from outside is a model like those of this project."""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest
import torch
import torch.nn.functional as F
from failures import each
from mixer_cases import CASES, D_MODEL
from paths import ROOT
from series_model import SeriesModel
from torch.utils.flop_counter import FlopCounterMode

from matmix.model import MixerOptions, ModelConfig, build_model, flops_per_token, initialize, register_architecture
from matmix.model.interop import read_export
from matmix.model.interop.export.directory import export_model

BORDERS = [0, 7, 8, 24]
PACKED = [name for name, case in CASES.items() if not case.kind.fixed_length]


def series_config(*layers: str, causal: bool = True, **fields) -> ModelConfig:
    fields = {"d_model": D_MODEL, "n_layers": len(layers), "max_seqlen": 12, "options": {"channels": 3}} | fields
    name = "series_model:SeriesModel" if causal else "series_model:SeriesFiller"
    return ModelConfig(architecture=name, layers=layers, **fields)


def series_model(config: ModelConfig) -> SeriesModel:
    model = build_model(config)
    initialize(model, 0)
    return model.eval()


def test_the_page_shows_the_file_that_is_tested() -> None:
    page = (ROOT / "docs/adding-an-architecture.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert (ROOT / "tests/support/models/series_model.py").read_text(encoding="utf-8").endswith(f"\n\n{code}")


@each("name", CASES)
def test_a_regression_with_any_mixer_gives_every_parameter_a_gradient(name, randomize) -> None:
    case = CASES[name]
    config = series_config(case.mixer, causal=case.causal, mixers=MixerOptions(**{case.mixer: case.config}))
    model = randomize(build_model(config))
    values = torch.randn(2, 12, 3)
    predicted = model(values)
    assert predicted.shape == values.shape
    F.mse_loss(predicted, values).backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())
    assert model.embedding.weight.grad.abs().max() > 0


@pytest.mark.slow
@each("name", PACKED)
def test_packed_series_equal_those_alone(name, randomize) -> None:
    case = CASES[name]
    config = series_config(case.mixer, causal=case.causal, mixers=MixerOptions(**{case.mixer: case.config}))
    model = randomize(build_model(config)).eval()
    values = torch.randn(2, 12, 3)
    with torch.no_grad():
        together = model(values, cu_seqlens=torch.tensor(BORDERS, dtype=torch.int32), max_seqlen=16).flatten(0, 1)
        for start, end in itertools.pairwise(BORDERS):
            alone = model(values.flatten(0, 1)[None, start:end])[0]
            torch.testing.assert_close(together[start:end], alone, rtol=1e-4, atol=1e-4)
        select = torch.tensor([3, 20])
        torch.testing.assert_close(
            model(values, select=select), model(values).flatten(0, 1)[select], rtol=1e-4, atol=1e-4
        )


def test_a_loss_is_computed_from_features_and_projection() -> None:
    model = series_model(series_config("mru"))
    values, mask = torch.randn(2, 12, 3), torch.arange(12) < torch.tensor([[5], [12]])

    def readout(features, weight, bias):
        return ((F.linear(features, weight, bias) - values.flatten(0, 1))[mask.flatten()] ** 2).sum()

    expected = ((model(values, attention_mask=mask) - values)[mask] ** 2).sum()
    torch.testing.assert_close(model(values, attention_mask=mask, readout=readout), expected)


def test_cost_and_example_inputs_agree_with_torchs_counter() -> None:
    config = series_config("attention", causal=False, n_layers=2, d_model=64)
    with torch.device("meta"):
        inputs = config.model_class.example_inputs(config, 1, 48)
    with FlopCounterMode(display=False) as counter:
        build_model(config, device="meta")(inputs)
    assert flops_per_token(config, 48) * 48 == counter.get_total_flops()


def test_an_export_is_read_back_as_the_same_model(tmp_path) -> None:
    config = series_config("hydra", "lion_d", causal=False, d_model=64)
    model = series_model(config)
    directory = export_model(config, model.state_dict(), None, tmp_path / "export", notes="A toy.")
    assert not list(directory.glob("*.py"))
    again = read_export(directory).eval()
    assert again.config == config
    values = torch.randn(1, 9, 3)
    assert torch.equal(again(values), model(values))
    card = (directory / "README.md").read_text(encoding="utf-8")
    assert "read_export" in card
    assert "transformers" not in card


@each(
    "fields, words",
    [
        (
            {"options": {"chanels": 3}},
            "model.options.chanels: series_model:SeriesModel has no such option; it has channels",
        ),
        ({"options": {"channels": "three"}}, "model.options.channels = 'three': must be of type int"),
        ({"options": {"channels": True}}, "model.options.channels = True: must be of type int"),
        ({"architecture": "series_model:Other"}, "import the module that registers it first"),
        ({"architecture": "language_model"}, "language_model has no such option; it has none"),
        ({"layers": ("hydra",)}, "'hydra' sees tokens to come"),
    ],
)
def test_mistakes_are_one_clear_line(fields, words) -> None:
    with pytest.raises(ValueError, match=r"^model\.") as caught:
        dataclasses.replace(series_config("mru"), **fields)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_name_stands_for_one_architecture() -> None:
    with pytest.raises(ValueError, match=r"there is an architecture 'encoder' already: matmix\.model"):
        register_architecture("encoder")(SeriesModel)
    with pytest.raises(ValueError, match="is no architecture: make it a subclass of"):
        register_architecture("series_model:Options")(dict)

"""muP: the factors that a model wider than the base gets, what they make of a training, and what has none."""

import dataclasses

import pytest
import torch
from failures import each
from runs import records, run_recipe

from matmix.model import ModelConfig, build_model, initialize
from matmix.model.mixers import MIXERS
from matmix.studies.width import coordinates
from matmix.train.optim.config import OptimizerConfig, RuleConfig
from matmix.train.optim.groups import parameter_groups
from matmix.train.optim.width import WidthFactors, initial_factors, width_factors

HALF, QUARTER, HIDDEN = WidthFactors(0.5, 0.5), WidthFactors(0.25, 0.25), WidthFactors(0.25, 0.5)


def config_of(mixer: str, width: int = 256, **options) -> ModelConfig:
    kind = "encoder" if MIXERS[mixer].bidirectional_form else "language_model"
    return ModelConfig(
        **{"architecture": kind, "layers": (mixer,), "d_model": width, "n_layers": 1, "vocab_size": 50}
        | {"init_std": 0.02}
        | options
    )


def groups_of(config: ModelConfig, **options) -> dict[str, tuple[float, float]]:
    """Rate and weight decay of each parameter."""
    groups = parameter_groups(build_model(config, device="meta"), OptimizerConfig(**options), 64)
    return {name: (group.lr, group.weight_decay) for group in groups for name in group.names}


def test_the_mru_has_the_factors_of_its_matrices_and_of_the_factors_within_it():
    config = config_of("mru")
    found = width_factors(config, 64)
    assert found == {
        **{f"blocks.0.{name}.weight": HIDDEN for name in ("mixer.gate_proj", "mixer.out_proj", "mlp.up", "mlp.down")},
        "blocks.0.mixer.state_up": WidthFactors(0.25, 0.25),
        "blocks.0.mixer.state_down": HIDDEN,
        "norm.weight": QUARTER,
    }
    untied = width_factors(dataclasses.replace(config, tie_embeddings=False), 64)
    assert {name: untied[name] for name in untied.keys() ^ found.keys() if name in untied} == {"output.weight": QUARTER}
    # What is read from the states is as large as in the base model.
    sizes = []
    for width in (64, 256):
        model = build_model(config_of("mru", width))
        initialize(model, 0, initial_factors(model.config, 64))
        sizes.append(float(model.blocks[0].mixer.state_down.detach().std()) * model.blocks[0].mixer.output_scale)
    assert sizes[1] / sizes[0] == pytest.approx(1, rel=0.1)


def test_initial_values_that_follow_the_width_are_not_made_smaller_twice():
    base, config = (config_of("attention", width, init_std=0.0) for width in (64, 256))
    found = width_factors(config, 64)
    drawn = {name: one.init * config.matrix_std for name, one in found.items() if name.startswith("blocks.")}
    assert len(drawn) == 6
    assert drawn == pytest.approx(dict.fromkeys(drawn, base.matrix_std / 2))  # sums of four times as many terms


@each("kind", ["block_diagonal", "btt", "low_rank", "monarch"])
def test_factors_of_structured_mlps_count_by_their_own_sums(kind):
    """Rates are divided by the growth of each factor's sums, and outputs as large as at the base width times what a
    dense map's are."""
    config = dataclasses.replace(config_of("mru"), mlp=kind)
    found, names = (
        width_factors(config, 64),
        [name for name, _ in build_model(config, device="meta").named_parameters()],
    )
    growth = {"btt": (2, 2), "low_rank": (4, 2), "monarch": (4, 4), "block_diagonal": (4,)}[kind]
    for part in ("up", "down"):
        factors = [name for name in names if f".mlp.{part}." in name]
        assert [found[name].lr for name in factors] == [1 / times for times in growth]
    sizes = []
    for width in (64, 256):
        model = build_model(dataclasses.replace(config, d_model=width))
        initialize(model, 0, initial_factors(model.config, 64))
        sizes.append(float(model.blocks[0].mlp.up(torch.randn(500, width)).detach().std()))
    assert sizes[1] / sizes[0] == pytest.approx(1, rel=0.15)


@each("mixer", ["hydra", "lion_s", "attention"])
def test_linear_layers_of_a_mixer_are_hidden_matrices(mixer):
    config = config_of(mixer)
    model = build_model(config, device="meta")
    matrices = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    found = width_factors(config, 64)
    norm = {"head.norm.weight": QUARTER, "head.norm.bias": QUARTER}
    assert found == dict.fromkeys(matrices, HIDDEN) | norm


@each("mixer", MIXERS)
def test_each_mixer_has_factors_for_what_sums_over_the_width(mixer):
    config = config_of(mixer, 128)
    assert width_factors(config, 128) == {} == width_factors(config, 0)
    assert groups_of(config, mup_base_width=128) == groups_of(config)
    shapes, base = (
        {name: parameter.shape for name, parameter in build_model(one, device="meta").named_parameters()}
        for one in (config_of(mixer, 256), config)
    )
    found = width_factors(config_of(mixer, 256), 128)
    own = {name.removeprefix("blocks.0.mixer.") for name, one in found.items() if name.startswith("blocks.0.mixer")}
    wider = {
        name.removeprefix("blocks.0.mixer.")
        for name, shape in shapes.items()
        if name.startswith("blocks.0.mixer") and len(shape) == 2 and shape[1] == 2 * base[name][1]
    }
    wider -= set(MIXERS[mixer].not_decayed)  # rates with a row for each direction
    others = {"rwkv7": {"w1", "a1", "g1", "g2"}, "mru": {"state_up", "state_down"}}
    others["m2"] = {f"m{part}.blkdiag{factor}" for part in (3, 4) for factor in (1, 2)}  # sums over roots of the width
    assert own == (wider - {"w2", "a2", "g2"}) | others.get(mixer, set())
    assert all(one.lr in (0.5, 1) or mixer == "m2" for one in found.values())


def test_rates_are_multiplied_and_a_step_decays_as_in_the_base_model():
    rule = (RuleConfig(match="*.up.weight", lr=0.6, weight_decay=0.02),)
    with_, without = (groups_of(config_of("mru"), rule=rule, mup_base_width=base) for base in (64, 0))
    assert with_["blocks.0.mlp.up.weight"] == (pytest.approx(0.15), pytest.approx(0.08))
    for name, (rate, decay) in with_.items():
        assert rate * decay == pytest.approx(without[name][0] * without[name][1])
    assert with_["embedding.weight"] == without["embedding.weight"] == (1.0, 0.1)


@pytest.mark.slow
@each("mixer", ["attention", "mru", "hydra", "lion_s"])
def test_what_a_few_steps_change_has_one_size_at_all_widths(mixer):
    streams, narrow = ("stream 1", "stream 2"), coordinates(mixer, 64, 0, steps=2)
    with_, without = (
        {name: change / narrow[name] for name, change in coordinates(mixer, 256, base, steps=2).items()}
        for base in (64, 0)
    )
    assert all(0.3 < ratio < 1.6 for ratio in with_.values()), with_
    assert all(without[name] > 5 for name in streams), without
    assert without["logits"] > 1.8


@pytest.mark.slow
def test_a_run_has_the_factors(dataset, tmp_path):
    options = ("--steps", "2", "--model.d-model", "64", "--engine.activation-checkpointing", "full")
    run_recipe("debug_mru", dataset, tmp_path / "without", *options)
    for base in (64, 32):
        run_recipe("debug_mru", dataset, tmp_path / str(base), *options, "--optimizer.mup-base-width", str(base))
    without, same, narrower = ([one["loss"] for one in records(tmp_path / run)] for run in ("without", "64", "32"))
    assert same == without
    assert narrower[0] != without[0]  # the initial values


@each(
    "config, options, words",
    [
        (config_of("attention"), {"name": "muon"}, "not for muon; set it to 0"),
        (config_of("mru"), {"name": "adafactor"}, "not for adafactor; set it to 0"),
        (config_of("mru", final_norm=False), {}, "set model.tie_embeddings = false"),
        (config_of("attention"), {"mup_base_width": 40}, "no model has this width: .*headdim = 64 does not divide"),
        (config_of("attention"), {"mup_base_width": -1}, "optimizer.mup_base_width"),
    ],
)
def test_what_has_no_factors_is_refused_in_one_line(config, options, words):
    with pytest.raises(ValueError, match=words) as refused:
        groups_of(config, **{"mup_base_width": 64} | options)
    assert "\n" not in str(refused.value)

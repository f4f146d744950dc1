import dataclasses

import torch

from matmix.model import build_model, initialize
from matmix.train.config import OptimizerConfig
from matmix.train.optimizer import make_optimizer
from matmix.train.recipe import load_config


def _decay_by_name(recipe: str) -> dict[str, float]:
    config = load_config(recipe, ["--model.vocab-size", "64"])
    model = build_model(config.model)
    initialize(model, 0)
    return _decay_by_name_of(model)


def _decay_by_name_of(model: torch.nn.Module) -> dict[str, float]:
    optimizer = make_optimizer(model, OptimizerConfig(weight_decay=0.3))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(p)]: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}


def test_norms_biases_and_state_space_rates_are_not_decayed():
    decays = _decay_by_name("debug_hydra")
    assert len(decays) > 10
    for name, decay in decays.items():
        last = name.rsplit(".", 1)[-1]
        exempt = last in ("bias", "A_log", "dt_bias", "D") or "norm" in name.lower()
        assert decay == (0.0 if exempt else 0.3), name
    assert any(name.endswith("A_log") for name in decays)


def test_the_network_that_makes_a_filter_is_not_decayed():
    config = load_config("debug_hydra", ["--model.vocab-size", "64"]).model
    model = build_model(dataclasses.replace(config, layers=("hyena",), n_layers=1))
    decays = _decay_by_name_of(model)
    made = {name: decay for name, decay in decays.items() if ".filter." in name}
    assert any(name.endswith("layers.1.weight") for name in made)
    assert set(made.values()) == {0.0}
    assert [decay for name, decay in decays.items() if name.endswith("in_proj.weight")] == [0.3]


def test_every_parameter_is_optimised_once():
    config = load_config("debug_mru", ["--model.vocab-size", "64"])
    model = build_model(config.model)
    optimizer = make_optimizer(model, config.optimizer)
    listed = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(listed) == sorted(id(p) for p in model.parameters())


def test_fully_decoupled_decay_does_not_depend_on_the_peak_rate():
    shrunk = []
    for lr in (1e-2, 1e-3):
        layer = torch.nn.Linear(2, 2, bias=False)
        torch.nn.init.ones_(layer.weight)
        optimizer = make_optimizer(layer, OptimizerConfig(lr=lr, weight_decay=0.25, fully_decoupled=True))
        layer.weight.grad = torch.zeros_like(layer.weight)
        optimizer.step()
        shrunk.append(layer.weight.detach().clone())
    torch.testing.assert_close(shrunk[0], torch.full((2, 2), 0.75))
    torch.testing.assert_close(shrunk[0], shrunk[1])

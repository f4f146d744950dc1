"""Which parameters are updated how: by their shapes, by what mixers say, by rules of the recipe."""

import dataclasses
import importlib
import math
import sys

import pytest
import torch
from every_mixer import SEQLEN, encoder_of_all, language_model_of_all
from failures import each

from matmix.model import build_model
from matmix.model.config import ModelConfig
from matmix.model.mixers import MIXERS
from matmix.model.parameter_rules import ParameterRule, stated_rules
from matmix.train.optim import OPTIMIZERS
from matmix.train.optim.config import OptimizerConfig, RuleConfig
from matmix.train.optim.groups import changed_rules, make_optimizer, parameter_groups, rule_record
from matmix.train.recipe import load_config

DIRECTIONS = ["A_log", "dt_bias"]  # a row for each direction
NOT_DECAYED_MATRICES = {
    **{f"bidirectional_{kind}": DIRECTIONS for kind in ("add", "add_diagonal", "add_shift", "concat", "mult")},
    "hyena": [*(f"filter.layers.{layer}.weight" for layer in range(3)), "filter.out.weight"],
    "hydra": ["init_states"],
    "s4": ["P", "B"],
    "s6": ["A_log"],
    "two_s6": ["ssms.0.A_log", "ssms.1.A_log"],
    "ckconv": [*(f"filter.layers.{layer}.weight" for layer in range(2)), "filter.out.weight"],
    "tnn": [*(f"filter.layers.{layer}.weight" for layer in range(3)), "filter.out.weight"],
    "matrix_memory": ["key_rates", "turn_base"],
    "mru": ["state_base"],
    "vandermonde_di": ["matrix_mixer.q_bias", "matrix_mixer.k_bias"],
}
"""Of each mixer what is not decayed although it is no vector: rates, states, frequencies and functions."""


def every_model():
    encoder = encoder_of_all()
    hydra = dataclasses.replace(encoder.mixers.hydra, learnable_init_states=True)
    yield dataclasses.replace(encoder, mixers=dataclasses.replace(encoder.mixers, hydra=hydra))
    yield language_model_of_all()


def updates(model: torch.nn.Module, config: OptimizerConfig, seqlen: int = SEQLEN) -> dict[str, dict]:
    """Name -> the options of the optimizer's group that the parameter is in."""
    optimizer = make_optimizer(model, config, seqlen)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = [(names[id(p)], group) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(name for name, _ in found) == sorted(names.values())  # each of them, once
    return dict(found)


@pytest.mark.parametrize("mixer_rules", [True, False])
def test_decay_of_every_mixer(mixer_rules):
    """Matrices are decayed but for those listed above; vectors are not."""
    seen = set()
    for config in every_model():
        model = build_model(config, device="meta")
        found = updates(model, OptimizerConfig(weight_decay=0.3, mixer_rules=mixer_rules))
        for name, parameter in model.named_parameters():
            exempt = parameter.ndim < 2
            if name.startswith("blocks.") and ".mixer." in name:
                layer, own = name.removeprefix("blocks.").split(".mixer.")
                mixer = config.layers[int(layer)]
                exempt |= own in NOT_DECAYED_MATRICES.get(mixer, ())
                seen.add((mixer, own))
            assert found[name]["weight_decay"] == (0.0 if exempt else 0.3), name
    assert {mixer for mixer, _ in seen} == set(MIXERS) - {"fnet"}  # which has no parameters
    assert seen >= {(mixer, own) for mixer, names in NOT_DECAYED_MATRICES.items() for own in names}


def test_models_without_rules_of_their_own_have_two_groups():
    """The decayed and the others, each in the order of the model."""
    config = load_config("debug_hydra", ["--model.vocab-size", "64"])
    model = build_model(config.model, device="meta")
    groups = parameter_groups(model, config.optimizer, config.data.seqlen)
    assert [(g.lr, g.weight_decay, g.clip_group, g.clip, g.has_rule) for g in groups] == [
        (1.0, 0.1, "others", 1.0, False),
        (1.0, 0.0, "others", 1.0, False),
    ]
    order = [name for name, _ in model.named_parameters()]
    for group in groups:
        assert list(group.names) == sorted(group.names, key=order.index)
    assert rule_record(groups) == {}


def mru(*overrides: str, **options) -> tuple[torch.nn.Module, OptimizerConfig, int]:
    arguments = ["--model.vocab-size", "64", "--model.mixers.mru.bias", "True", *overrides]
    config = load_config("debug_mru", arguments)
    model = build_model(config.model, device="meta")
    return model, dataclasses.replace(config.optimizer, **options), config.data.seqlen


def test_the_mru_states_its_rule():
    """Of the projection that makes state matrices: rate x 1 / order x sqrt(2 / seqlen), clipped at sqrt(seqlen / 2)."""
    model, config, seqlen = mru("--data.seqlen", "128")
    found = updates(model, config, seqlen)
    for name, group in found.items():
        special = ".mixer.in_proj." in name
        assert group["lr_factor"] == pytest.approx(1 / 4 * math.sqrt(2 / 128) if special else 1, rel=1e-12)
        assert group["lr"] == config.lr * group["lr_factor"]
        assert (group["clip_group"], group["clip"]) == (("mru", math.sqrt(64)) if special else ("others", 1.0))
        if special:
            assert group["weight_decay"] == (0.1 if name.endswith("weight") else 0.0)
    assert sum(group["clip_group"] == "mru" for group in found.values()) == 4  # weights and biases of two layers
    fading, config, seqlen = mru("--model.mixers.mru.construction", "affine", "--model.mixers.mru.input", "dense")
    assert {(group["lr_factor"], group["clip_group"]) for group in updates(fading, config, seqlen).values()} == {
        (1.0, "others")
    }
    off = updates(model, dataclasses.replace(config, mixer_rules=False), seqlen)
    assert {(group["lr_factor"], group["clip_group"]) for group in off.values()} == {(1.0, "others")}


def test_rules_of_a_recipe_override_field_by_field_and_in_order():
    rules = (
        RuleConfig(match="*.in_proj.weight", clip=3.0),
        RuleConfig(match=["embedding.weight", "*norm*"], weight_decay=0.0, clip=1.0),
        RuleConfig(match="blocks.*.weight", lr=0.5),
        RuleConfig(match="blocks.1.*.in_proj.weight", lr=2.0, weight_decay=0.01),
    )
    model, config, seqlen = mru(rule=rules)
    found = updates(model, config, seqlen)

    def of(name: str) -> tuple:
        return tuple(found[name][key] for key in ("lr_factor", "weight_decay", "clip_group", "clip"))

    bias_rate = 1 / 4 * math.sqrt(2 / seqlen)
    assert of("blocks.0.mixer.in_proj.weight") == (0.5, 0.1, "in_proj.weight", 3.0)
    assert of("blocks.1.mixer.in_proj.weight") == (2.0, 0.01, "in_proj.weight", 3.0)
    assert of("blocks.0.mixer.in_proj.bias") == (pytest.approx(bias_rate), 0.0, "mru", math.sqrt(seqlen / 2))
    assert of("blocks.0.norm_mixer.weight") == (0.5, 0.0, "embedding.weight_norm", 1.0)
    assert of("embedding.weight") == (1.0, 0.0, "embedding.weight_norm", 1.0)
    assert of("blocks.0.mixer.state_down") == (1.0, 0.1, "others", 1.0)


def test_clipping_groups_have_different_names():
    """Also where patterns differ only in characters that have no place in a record."""
    rules = tuple(
        RuleConfig(match=pattern, clip=1.0) for pattern in ("*.in_proj.weight", "?mbedding.*", "*mbedding.weight*")
    )
    rules += (RuleConfig(match="*in_proj.weight*", clip=2.0), RuleConfig(match="blocks.0*.in_proj.weight", clip=1.0))
    rules += (RuleConfig(match="others*", clip=1.0),)
    model = torch.nn.ModuleDict({"others": torch.nn.Linear(2, 2), "embedding": torch.nn.Linear(2, 2)})
    model["blocks"] = torch.nn.ModuleList([torch.nn.ModuleDict({"in_proj": torch.nn.Linear(2, 2)}) for _ in range(2)])
    found = updates(model, OptimizerConfig(rule=rules))
    clipped = {}
    for name, group in found.items():
        clipped.setdefault(group["clip_group"], []).append(name)
    assert clipped == {
        "others-2": ["others.weight", "others.bias"],
        "mbedding": ["embedding.bias"],
        "mbedding.weight": ["embedding.weight"],
        "blocks.0_.in_proj.weight": ["blocks.0.in_proj.weight"],
        "in_proj.weight": ["blocks.1.in_proj.weight"],
        "others": ["blocks.0.in_proj.bias", "blocks.1.in_proj.bias"],
    }


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"match": "*.in_prj.weight", "lr": 1.0}, r"\*\.in_prj\.weight.* matches no .*: blocks\.0\.mixer\.in_proj\."),
        ({"match": ("*.in_proj.weight", "embeding*"), "lr": 1.0}, r'"embeding\*" matches no .*: embedding\.weight'),
        ({"match": "*norm*", "weight_decay": 0.1}, r"cannot apply to .*norm_mixer\.weight, a vector of shape \(32,\)"),
        ({"match": "*", "lr": -1.0}, r'rule "\*": lr = -1'),
        ({"match": "*", "lr": math.inf}, "lr = inf"),
        ({"match": "*", "clip": 0.0}, r'rule "\*": clip = 0'),
        ({"match": "*", "clip": math.nan}, "clip = nan"),
        ({"match": "*", "weight_decay": -0.1}, r'rule "\*": weight_decay = -0\.1'),
        ({"match": "*"}, "changes nothing: give lr, clip, weight_decay or optimizer"),
        ({"match": (), "lr": 1.0}, "match"),
        ({"match": "", "lr": 1.0}, "match"),
    ],
)  # fmt: skip
def test_rules_that_cannot_be_are_one_line(rule, message):
    with pytest.raises(ValueError, match=message) as error:
        parameter_groups(*mru(rule=(RuleConfig(**rule),)))
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("optimizer.rule")


def test_a_weight_decay_of_vectors_that_a_later_rule_takes_back_is_none():
    rules = RuleConfig(match="*.weight", weight_decay=0.2), RuleConfig(match="*norm*", weight_decay=0.0)
    found = updates(*mru(rule=rules))
    assert found["blocks.0.mlp.up.weight"]["weight_decay"] == 0.2
    assert found["blocks.0.norm_mlp.weight"]["weight_decay"] == 0.0


class Ruled(torch.nn.Module):
    """Two layers, of which each has a rule, and which has rules for both."""

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.rate = torch.nn.Parameter(torch.zeros(2, 2))
            self.weight = torch.nn.Parameter(torch.zeros(2, 2))

        def parameter_rules(self, seqlen):
            rule = ParameterRule(lr=1 / seqlen)
            return {"rate": rule, "weight": rule}

    def __init__(self):
        super().__init__()
        self.first, self.second = Ruled.Layer(), Ruled.Layer()

    def parameter_rules(self, seqlen):
        return {"second.rate": ParameterRule(weight_decay=0.0)}


def test_the_outermost_rule_wins():
    rules = stated_rules(Ruled(), 10)
    assert {name: (owner, rule.lr) for name, (owner, rule) in rules.items()} == {
        "first.rate": ("Layer", 0.1),
        "first.weight": ("Layer", 0.1),
        "second.rate": ("Ruled", 1.0),
        "second.weight": ("Layer", 0.1),
    }


def test_a_rule_for_a_parameter_that_there_is_not_is_refused():
    model = Ruled()
    del model.second.rate
    with pytest.raises(ValueError, match=r"parameter_rules of Ruled: there is no parameter second\.rate"):
        stated_rules(model, 10)


def test_what_changed_since_a_checkpoint_is_one_line():
    model, config, seqlen = mru()
    groups = parameter_groups(model, config, seqlen)
    line = changed_rules({}, groups)
    assert "blocks.*.mixer.in_proj.weight of 2 layers: learning rate x 0.0625, clipped apart (mru) at 4" in line
    assert changed_rules(rule_record(groups), groups) == ""
    off = parameter_groups(model, dataclasses.replace(config, mixer_rules=False), seqlen)
    assert changed_rules({}, off) == ""
    back = changed_rules(rule_record(groups), off)
    assert "in_proj.weight of 2 layers: learning rate x 1, clipped at 1 with the others" in back


def test_fully_decoupled_decay_does_not_depend_on_the_peak_rate():
    shrunk = []
    for lr in (1e-2, 1e-3):
        layer = torch.nn.Linear(2, 2, bias=False)
        torch.nn.init.ones_(layer.weight)
        optimizer = make_optimizer(layer, OptimizerConfig(lr=lr, weight_decay=0.25, fully_decoupled=True), 8)
        layer.weight.grad = torch.zeros_like(layer.weight)
        optimizer.step()
        shrunk.append(layer.weight.detach().clone())
    torch.testing.assert_close(shrunk[0], torch.full((2, 2), 0.75))
    torch.testing.assert_close(shrunk[0], shrunk[1])


def test_the_factor_of_a_rule_scales_the_whole_step():
    """That of the moments and that of weight decay."""
    steps = []
    for factor in (1.0, 0.25, 0.0):
        layer = torch.nn.Linear(2, 2, bias=False)
        torch.nn.init.ones_(layer.weight)
        rule = (RuleConfig(match="weight", lr=factor),)
        optimizer = make_optimizer(layer, OptimizerConfig(lr=1e-2, weight_decay=0.5, rule=rule), 8)
        layer.weight.grad = torch.full_like(layer.weight, 3.0)
        optimizer.step()
        steps.append(1 - layer.weight.detach())
    torch.testing.assert_close(steps[0], torch.full((2, 2), 1e-2 * 1.5), rtol=1e-4, atol=0)
    torch.testing.assert_close(steps[1], steps[0] / 4, rtol=1e-4, atol=0)
    assert not steps[2].any()


@pytest.mark.parametrize(("architecture", "tables"), [("encoder", 3), ("language_model", 1)])
def test_tables_of_embeddings_have_a_rate_of_their_own(architecture, tables):
    sizes = {"vocab_size": 64, "d_model": 64, "n_layers": 1}
    if architecture == "encoder":
        sizes |= {"position_embeddings": True, "max_seqlen": 16, "type_vocab_size": 2}
    config = ModelConfig(architecture=architecture, layers=("attention",), **sizes)
    model = build_model(config, device="meta")
    rate = {
        name: group.lr
        for group in parameter_groups(model, OptimizerConfig(embedding_lr=3.0, layer_decay=0.5), 32)
        for name in group.names
    }
    found = [name for name, lr in rate.items() if lr == 3.0 * 0.5**2]
    assert len(found) == tables
    assert all(dict(model.named_parameters())[name].shape[1] == 64 for name in found)
    assert rate["norm.weight"] == 1.0


def test_layer_decay_lowers_the_rate_from_layer_to_layer():
    config = ModelConfig(architecture="encoder", vocab_size=64, d_model=64, n_layers=2, layers=("attention",))
    model = build_model(config, device="meta")
    rate = {
        name: group.lr
        for group in parameter_groups(model, OptimizerConfig(layer_decay=0.5, mixer_rules=False), 32)
        for name in group.names
    }
    wanted = {"embeddings.": 0.125, "blocks.0.": 0.25, "blocks.1.": 0.5, "norm.": 1.0, "head.": 1.0, "output": 1.0}
    assert len(rate) == sum(1 for _ in model.parameters())
    for name, found in rate.items():
        assert found == next(lr for prefix, lr in wanted.items() if name.startswith(prefix)), name


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_say_what_they_keep(name):
    model = torch.nn.ModuleDict({"blocks": torch.nn.Linear(64, 64)})
    optimizer = make_optimizer(model, OptimizerConfig(name=name), 8)
    assert optimizer.part_of(optimizer.param_groups[0]) is optimizer.parts.get(name, optimizer)
    kept = optimizer.entries(dict(model.named_parameters()))
    model["blocks"](torch.ones(64)).sum().backward()
    optimizer.step()
    for name, parameter, group in optimizer.named_parameters():
        state = optimizer.state[parameter]
        assert state.keys() == kept[name].keys()
        assert all((state[e].shape, state[e].dtype) == (kept[name][e].shape, kept[name][e].dtype) for e in state)
        new = optimizer.whole_state(parameter, group)
        assert all(new[entry].device == state[entry].device for entry in state)


RATE, DECAY, EPS = 0.1, 0.3, 1e-8
"""Of the definitions below, which change a weight `w` at step `t`; `m`, `v` and `more` are kept from step to step."""


def adam_moments(g, t, m, v, b1=0.9, b2=0.95):
    m[:], v[:] = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
    return m / (1 - b1**t), v / (1 - b2**t)


def adamw(w, g, t, m, v, more):
    mean, square = adam_moments(g, t, m, v)
    return w * (1 - RATE * DECAY) - RATE * mean / (square.sqrt() + EPS)


def stable_adamw(w, g, t, m, v, more):
    mean, square = adam_moments(g, t, m, v)
    rate = RATE / max(1, (g**2 / square.clamp(min=EPS**2)).mean().sqrt())
    return w * (1 - rate * DECAY) - rate * mean / (square.sqrt() + EPS)


def lion(w, g, t, m, v, more):
    update = (0.9 * m + 0.1 * g).sign()
    m[:] = 0.99 * m + 0.01 * g
    return w * (1 - RATE * DECAY) - RATE * update


def adafactor(w, g, t, m, v, more):
    v[:] = v * (1 - t**-0.8) + g**2 * t**-0.8
    rows, columns = v.mean(-1, keepdim=True), v.mean(-2, keepdim=True)
    update = g / (rows * columns / rows.mean(-2, keepdim=True)).sqrt()
    rate = min(RATE, t**-0.5) * max(1e-3, (w**2).mean().sqrt()) / max(1, (update**2).mean().sqrt())
    return w * (1 - RATE * DECAY) - rate * update


def soap(w, g, t, m, v, more):
    """With new bases after every second update. The first gradient changes no weight."""
    for side, square in (("left", g @ g.T), ("right", g.T @ g)):
        more[side] = 0.95 * more.get(side, 0) + 0.05 * square
    if t > 1:
        left, right = more["left", "basis"], more["right", "basis"]
        m[:], v[:] = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * (left.T @ g @ right) ** 2
        mean, square = left.T @ m @ right / (1 - 0.9 ** (t - 1)), v / (1 - 0.95 ** (t - 1))
        w = w - RATE * left @ (mean / (square.sqrt() + EPS * (1 - 0.95 ** (t - 1)) ** -0.5)) @ right.T
        w = w * (1 - RATE * DECAY)
    for axis, side in enumerate(("left", "right")):
        if t == 1:
            more[side, "basis"] = torch.linalg.eigh(more[side])[1].flip(1)
        elif t % 2:
            basis, statistics = more[side, "basis"], more[side]
            order = (basis * (statistics @ basis)).sum(0).argsort(descending=True)
            v[:] = v.index_select(axis, order)
            more[side, "basis"] = torch.linalg.qr((statistics @ basis)[:, order])[0]
    return w


DEFINITIONS = {one.__name__: one for one in (adamw, stable_adamw, lion, adafactor, soap)}


@pytest.mark.parametrize("name", DEFINITIONS)
def test_steps_are_their_definitions(name):
    generator = torch.Generator().manual_seed(0)
    rows, columns = (4, 4) if name == "soap" else (5, 3)  # bases of what has no rank are any
    model = torch.nn.ModuleDict({"blocks": torch.nn.Linear(columns, rows, bias=False, dtype=torch.float64)})
    weight, options = model["blocks"].weight, {"precondition_frequency": 2} if name == "soap" else {}
    config = OptimizerConfig(name=name, lr=RATE, weight_decay=DECAY, options=options)
    optimizer = make_optimizer(model, config, 8)
    expected, more = weight.detach().clone(), {}
    m, v = torch.zeros_like(expected), torch.zeros_like(expected)
    for step in range(1, 7):
        weight.grad = torch.randn(rows, columns, generator=generator, dtype=torch.float64) * step
        expected = DEFINITIONS[name](expected, weight.grad.clone(), step, m, v, more)
        optimizer.step()
        tolerance = 1e-6 if name == "soap" else 1e-12  # new bases are made in float32
        torch.testing.assert_close(weight.detach(), expected, rtol=tolerance, atol=tolerance)


@each(
    "name, options, words",
    [
        ("lion", {"betas": [0.9, 1.0]}, r"optimizer.options.betas must be two numbers in \[0, 1\)"),
        ("adafactor", {"beta2_decay": 0.8}, "optimizer.options.beta2_decay must be at most 0, got 0.8"),
        ("adafactor", {"d": 0.5}, "optimizer.options.d must be >= 1"),
        ("soap", {"shampoo_beta": 1.0}, "optimizer.options.shampoo_beta must lie in"),
        ("soap", {"precondition_frequency": 0}, "optimizer.options.precondition_frequency must be >= 1"),
    ],
)
def test_options_that_cannot_be_are_one_line(name, options, words):
    with pytest.raises(ValueError, match=words) as error:
        make_optimizer(torch.nn.Linear(2, 2), OptimizerConfig(name=name, options=options), 8)
    assert "\n" not in str(error.value)


@pytest.fixture
def adamw_8bit():
    """The module, whose library takes seconds to import."""
    return importlib.import_module("matmix.train.optim.adamw_8bit")


@pytest.mark.parametrize("shape", [(30, 512), (16, 1, 256)])
def test_eight_bits_are_torchao_s(shape, adamw_8bit, monkeypatch):
    """Bit for bit, some rows at a time, where its blocks end with rows."""
    from torchao.optim import AdamW8bit

    monkeypatch.setattr(adamw_8bit, "AT_ONCE", 2000)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # which takes half a minute
    ours, theirs = (torch.nn.Parameter(torch.linspace(-1, 1, math.prod(shape)).view(shape)) for _ in range(2))
    config = OptimizerConfig(name="adamw_8bit", lr=0.01, betas=(0.9, 0.97), weight_decay=0.1)
    optimizer = make_optimizer(torch.nn.ParameterDict({"weight": ours}), config, 8)
    reference = AdamW8bit([theirs], 0.01, config.betas, weight_decay=0.1)
    for step in range(20):
        ours.grad = torch.randn(shape) * torch.rand(shape) ** 3 * 2**step
        theirs.grad = ours.grad.clone()
        for one in (optimizer, reference):
            one.step()
    assert torch.equal(ours, theirs)
    found, expected = optimizer.state[ours], reference.state[theirs]
    for name, scales in adamw_8bit.SCALES.items():
        assert torch.equal(found[name], expected[name].codes)
        assert torch.equal(found[scales].flatten(), expected[name].scale)
        assert found[name].dtype == torch.uint8


@pytest.mark.parametrize("is_signed", [True, False])
def test_codes_are_torchao_s(is_signed, adamw_8bit):
    """At each border between two codes, on both sides of it, and between."""
    from torchao.optim.quant_utils import quantize_8bit_with_qmap

    codes = adamw_8bit.Codes.of_map(is_signed, torch.device("cpu"))
    borders = torch.cat([codes.above[:-1], codes.values, torch.linspace(-1, 1, 1 << 17), torch.tensor([0.0, -0.0])])
    numbers = torch.cat([borders, *(torch.nextafter(borders, torch.tensor(end)) for end in (-1.0, 1.0))])
    expected = quantize_8bit_with_qmap(numbers, codes.values)
    assert torch.equal(codes.nearest(numbers), expected.int())
    assert len(expected.unique()) == 256


def test_eight_bits_are_for_what_has_blocks():
    """Within rows; a rule may leave more to AdamW, and give it no more."""
    shapes = {"heads": (64, 64), "short": (1000, 63), "small": (63, 64), "prime": (100, 257), "split": (20, 2, 160)}
    model = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()})
    rule = RuleConfig(match="heads", optimizer="adamw")
    for rules, taken in (((), ["heads", "split"]), ((rule,), ["split"])):
        groups = parameter_groups(model, OptimizerConfig(name="adamw_8bit", rule=rules), 8)
        assert [name for group in groups for name in group.names if group.optimizer == "adamw_8bit"] == taken
    kept = make_optimizer(model, OptimizerConfig(name="adamw_8bit"), 8).entries(dict(model.items()))
    assert kept["split"]["exp_avg_scale"].shape == (20, 2)  # of 160 elements each
    rule = RuleConfig(match="prime", optimizer="adamw_8bit")
    with pytest.raises(
        ValueError, match=r'rule "prime": the optimizer adamw_8bit cannot update prime, of shape \(100,'
    ):
        parameter_groups(model, OptimizerConfig(rule=(rule,)), 8)


def test_without_torchao_one_line_says_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "matmix.train.optim.adamw_8bit", raising=False)
    monkeypatch.setitem(sys.modules, "torchao.optim.adam", None)
    with pytest.raises(ValueError, match=r"^optimizer adamw_8bit needs torchao \(.*pip install -e '\.\[lowbit\]'$"):
        parameter_groups(torch.nn.Linear(2, 2), OptimizerConfig(name="adamw_8bit"), 8)


def test_adafactor_is_torch_s():
    """Of vectors, and of weights of convolutions, whose last two dimensions are the rows and the columns."""
    ours, theirs = (torch.nn.Conv1d(4, 6, 3) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    options = OptimizerConfig(name="adafactor", lr=0.1, weight_decay=0.0, options={"beta2_decay": -0.5, "d": 1.5})
    pair = make_optimizer(ours, options, 8), torch.optim.Adafactor(theirs.parameters(), 0.1, beta2_decay=-0.5, d=1.5)
    for step in range(4):
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            one.grad = torch.randn_like(one) * 3**step
            other.grad = one.grad.clone()
        for optimizer in pair:
            optimizer.step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)

"""Muon on one process: its steps are torch's, and what every mixer says of its matrices."""

from __future__ import annotations

import math

import pytest
import torch
from mixer_cases import CASES
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from matmix.model import build_model
from matmix.model.mixers import MIXERS
from matmix.model.parameter_rules import ParameterRule, stated_rules
from matmix.train.optim.config import OptimizerConfig, RuleConfig
from matmix.train.optim.groups import make_optimizer, parameter_groups
from matmix.train.optim.muon import Muon, orthogonal
from matmix.train.optim.owners import LinearMap, owners_of
from matmix.train.recipe import load_config

MUON = OptimizerConfig(name="muon", lr=1e-2)


def matrix(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "options", [{}, {"nesterov": False, "momentum": 0.8}, {"rate": "original", "iterations": 3}], ids=str
)
def test_steps_are_torch_s(options):
    """Bit for bit in bfloat16, which is torch's; in float32 to the rounding of bfloat16."""
    ours = [nn.Parameter(matrix(*shape)) for shape in ((6, 9), (9, 6), (5, 5))]
    exact, theirs = ([nn.Parameter(one.detach().clone()) for one in ours] for _ in range(2))
    group = {"lr": 0.02, "weight_decay": 0.1}
    optimizers = [
        Muon([{"params": ours, **group}], dtype="bfloat16", **group_options(options)),
        Muon([{"params": exact, **group}], **group_options(options)),
        torch.optim.Muon(theirs, **group, **torch_options(options)),
    ]
    for step in range(4):
        for parameters, optimizer in zip((ours, exact, theirs), optimizers, strict=True):
            for number, parameter in enumerate(parameters):
                parameter.grad = matrix(*parameter.shape, seed=10 * step + number)
            optimizer.step()
    for mine, fine, wanted in zip(ours, exact, theirs, strict=True):
        assert torch.equal(mine, wanted)
        torch.testing.assert_close(fine, wanted, rtol=0, atol=4 * 0.02 * 0.05)
        assert not torch.equal(fine, wanted)


def group_options(options):
    return {"lr": 0.02, **options}


def torch_options(options):
    renamed = {"rate": "adjust_lr_fn", "iterations": "ns_steps"}
    return {"adjust_lr_fn": "match_rms_adamw"} | {renamed.get(key, key): value for key, value in options.items()}


def test_blocks_are_orthogonal_each_by_itself():
    """The step of a fused projection is that of its blocks as parameters of their own, whatever their sizes."""
    rows = (6, 2, 9)
    gradients = [matrix(count, 8, seed=count) * 10.0**count for count in rows]
    fused, apart = nn.Parameter(torch.zeros(sum(rows), 8)), [nn.Parameter(torch.zeros(count, 8)) for count in rows]
    fused.grad = torch.cat(gradients)
    for parameter, gradient in zip(apart, gradients, strict=True):
        parameter.grad = gradient
    Muon([{"params": [fused], "blocks": [rows], "lr": 1.0, "weight_decay": 0.0}], lr=1.0).step()
    Muon([{"params": apart, "lr": 1.0, "weight_decay": 0.0}], lr=1.0).step()
    assert torch.equal(fused, torch.cat([one.detach() for one in apart]))
    for block in fused.detach().split(rows):
        values = torch.linalg.svdvals(block) / (0.2 * math.sqrt(max(block.shape)))
        assert ((values > 0.6) & (values < 1.3)).all(), values


def test_updates_have_the_root_mean_square_of_adamw_s():
    for shape in ((64, 64), (16, 256), (256, 16)):
        update = orthogonal(matrix(*shape), 5) * 0.2 * math.sqrt(max(shape))
        assert 0.15 < update.square().mean().sqrt() < 0.25, shape


def test_a_rate_of_nothing_moves_nothing_and_keeps_the_momentum():
    parameter = nn.Parameter(matrix(4, 3))
    before, parameter.grad = parameter.detach().clone(), matrix(4, 3, seed=1)
    optimizer = Muon([{"params": [parameter], "lr": 0.0, "weight_decay": 0.1}], lr=0.0)
    optimizer.step()
    assert torch.equal(parameter, before)
    assert torch.equal(optimizer.state[parameter]["momentum"], torch.zeros(4, 3).lerp_(parameter.grad, 0.05))


def test_owners_have_as_much_to_do():
    """Of layers with large and small maps, no rank of six has over a twentieth more than the mean."""
    sizes = [(512, 256), (512, 256), (64, 256), (64, 256), (8, 256), (256, 512), (1024, 256), (256, 1024)] * 12
    maps = sorted((LinearMap(0, 0, *size) for size in sizes), key=lambda one: -one.cost)
    busy = [0] * 6
    for one, owner in zip(maps, owners_of(maps, 6), strict=True):
        busy[owner] += one.cost
    assert max(busy) < 1.05 * sum(busy) / 6


def test_the_cost_of_a_step_is_what_torch_counts():
    config = load_config("debug_hydra", {"model.vocab_size": 50})
    model = build_model(config.model, device="cpu")
    optimizer = make_optimizer(model, MUON, config.positions)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with FlopCounterMode(display=False) as counter:
        optimizer.step()
    whole, third = (optimizer.step_cost(1, parts).flops for parts in (1, 3))
    assert whole == counter.get_total_flops()
    assert whole / 3 <= third < 0.6 * whole
    assert optimizer.step_cost(3, 1).flops == third  # whoever holds it, a map is made orthogonal once
    meta = make_optimizer(build_model(config.model, device="meta"), MUON, config.positions)
    assert meta.step_cost(1, 1).flops == whole
    assert make_optimizer(model, OptimizerConfig(), config.positions).step_cost(1, 3) == (0, 0, "fp32")


# -- what mixers say ---------------------------------------------------------------------------------------------------

FUSED = {
    "q k v": "h3 lion_d lion_lit lion_s",
    "x0 x1 v": "hyena",
    "u v": "tnn",
    "value gate": "s4 s4d",
    "z q k v beta alpha": "gated_delta",
    "z v": "attention_di butterfly cauchy_di convolution dense dft low_rank_di monarch quasiseparable_di toeplitz_di "
    "vandermonde_di",
    "z v q k": "attention_dd cauchy_dd low_rank_dd toeplitz_dd vandermonde_dd",
    "x z": "s6 two_s6",
    "low B C": "x_proj.weight",
    "z v B C dt": "semiseparable two_ssms",
    "z v B C B C dt dt": "hydra bidirectional_add bidirectional_add_diagonal bidirectional_add_shift "
    "bidirectional_concat bidirectional_mult",
    "z v B C dt dt": "quasiseparable_dd",
}
"""What the rows of a projection are, one after the other -> the mixers that have such a one, or its name."""
WORDS = {mixer: words.split() for words, mixers in FUSED.items() for mixer in mixers.split()}
AS_LARGE = {"z": "v", "q": "k", "B": "C", "x0": "v", "u": "v", "x1": "v", "value": "gate", "beta": "alpha"}
NOT_MAPS = {"n_kernel", "A_log", "dt_bias", "alpha", "state_base", "key_rates", "turn_base", "BC"}
NOT_MAPS |= {"conv_params", "q_bias", "k_bias"}


def test_every_mixer_says_what_its_matrices_hold():
    """A mixer without a line above has only matrices that are one linear map, or none."""
    fused = set()
    for title, case in CASES.items():
        mixer = case.build(device="meta")
        rules = {name: rule.blocks for name, (_, rule) in stated_rules(mixer, 8).items()}
        for name, parameter in mixer.named_parameters():
            if parameter.dim() != 2:
                continue
            blocks = rules.get(name)
            elements = name == "products.in_proj.weight" or (case.mixer == "mru" and name == "in_proj.weight")
            is_map = name.rsplit(".", 1)[-1] not in NOT_MAPS and "filter." not in name and not elements
            assert (blocks != ()) == is_map, (title, name)
            if blocks:
                key = own if (own := name.removeprefix("ssms.0.").removeprefix("ssms.1.")) in WORDS else case.mixer
                fused.add(key)
                assert sum(blocks) == len(parameter), (title, name)
                sizes = list(zip(WORDS[key], blocks, strict=title in MIXERS))
                assert all(dict(sizes)[word] == rows for word, rows in sizes), (title, sizes)  # both directions
                assert all(dict(sizes).get(AS_LARGE.get(word), rows) == rows for word, rows in sizes), (title, sizes)
                assert all(rows == mixer.nheads for word, rows in sizes if word in ("dt", "beta")), (title, sizes)
    assert fused == set(WORDS)


def test_what_is_no_matrix_of_a_layer_is_adamw_s():
    config = load_config("debug_mru", ["--model.vocab-size", "64"])
    for recipe_rule in (True, False):
        optimizer = make_optimizer(
            build_model(config.model, device="meta"), OptimizerConfig(name="muon", mixer_rules=recipe_rule), 32
        )
        chosen = {name: group["optimizer"] for name, _, group in optimizer.named_parameters()}
        muon = {name for name, own in chosen.items() if own == "muon"}
        assert {"blocks.0.mixer.out_proj.weight", "blocks.0.mlp.up.weight"} <= muon
        assert not any("embedding" in name or "norm" in name or name.endswith("bias") for name in muon)
        assert chosen["blocks.0.mixer.in_proj.weight"] == chosen["embedding.weight"] == "adamw"
    model, rule = build_model(config.model, device="meta"), RuleConfig(match="*in_proj.weight", optimizer="muon")
    with pytest.raises(ValueError, match=r"the optimizer muon cannot update blocks\.0\.mixer\.in_proj\.weight"):
        parameter_groups(model, OptimizerConfig(rule=(rule,)), 32)


def test_blocks_that_are_not_the_rows_are_refused():
    class Ruled(nn.Linear):
        def parameter_rules(self, seqlen):
            return {"weight": ParameterRule(blocks=(2, 3))}

    model = nn.ModuleDict({"blocks": nn.ModuleList([Ruled(4, 6)])})
    with pytest.raises(ValueError, match=r"of Ruled: blocks = \(2, 3\) are 5 rows .* blocks\.0\.weight, which has 6"):
        parameter_groups(model, MUON, 8)
    with pytest.raises(ValueError, match="every linear map has rows"):
        ParameterRule(blocks=(2, 0))

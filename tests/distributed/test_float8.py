"""Matrix products in fp8, emulated on a CPU: what is multiplied, what stays, and that nothing else changes."""

import dataclasses

import float8_scenario as scenario
import pytest
import torch
from failures import each
from harness import run_distributed
from torch import nn

from matmix.model import MixerOptions, build_model
from matmix.model.mixers.mru import MRUConfig
from matmix.model.mixers.scans.hydra import HydraConfig
from matmix.model.precision import rounded_parameters
from matmix.train.activation import (
    check_float8,
    checkpoint_activations,
    compile_blocks,
    compute_in_float8,
    float8_maps,
)
from matmix.train.engine.build import build_engine
from matmix.train.engine.config import EngineConfig
from matmix.train.estimate.plan import make_plan
from matmix.train.process.distributed import Distributed
from matmix.train.recipe import load_config

RECIPES = ["tensorwise", "rowwise"]
FORMATS = {"e4m3": (448.0, 3, -6), "e5m2": (57344.0, 2, -14)}
"""The largest number of each format, the bits of its mantissa, and its least exponent."""


def rounded(x, form, dim, recipe):
    """What stands for x (m, n) in float64, by the definition; dim: along which the numbers that share a scale stand."""
    largest, bits, least = FORMATS[form]
    amax = x.abs().amax(dim, keepdim=True) if recipe == "rowwise" else x.abs().amax()
    scale = largest / amax.clamp(min=1e-12)
    if recipe == "rowwise":  # a power of two
        scale = 2.0 ** scale.log2().floor()
    scaled = x * scale
    exponent = (torch.frexp(scaled).exponent - 1).clamp(min=least)
    unit = 2.0 ** (exponent - bits).double()
    return (scaled / unit).round() * unit / scale


def products(x, weight, gradient, recipe):
    """x W^T and its gradients for x and W, of numbers rounded to fp8: x (m, k), weight (n, k), gradient (m, n)."""
    x, weight, gradient = x.double(), weight.double(), gradient.double()
    back = "e5m2" if recipe == "tensorwise" else "e4m3"
    return (
        rounded(x, "e4m3", 1, recipe) @ rounded(weight, "e4m3", 1, recipe).T,
        rounded(gradient, back, 1, recipe) @ rounded(weight, "e4m3", 0, recipe),
        rounded(gradient, back, 0, recipe).T @ rounded(x, "e4m3", 0, recipe),
    )


def layer_of(linear, recipe):
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.Sequential(linear)])
    compute_in_float8(model, recipe, emulate=True)
    return model.blocks[0]


@each("what", ["drawn", "outliers", "zero inputs", "zero weights", "zero gradients", "tiny"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_scaled_numbers(recipe, dtype, what):
    x, gradient = torch.randn(3, 7, 32), torch.randn(3, 7, 48)  # 21 tokens: no multiple of 16
    linear = nn.Linear(32, 48)
    with torch.no_grad():
        if what == "outliers":
            x[1, 2, 3], x[0, 0, 0], gradient[2, 6, 5], linear.weight[4, 4] = 3e4, -1e8, 1e6, -1e3
        elif what == "tiny":
            x, gradient = x * 1e-30, gradient * 1e-9
        zeros = {"zero inputs": x, "zero weights": linear.weight, "zero gradients": gradient}
        zeros.get(what, torch.empty(0)).zero_()
        x[2, 3], gradient[0, 1] = 0, 0
    x, gradient = x.to(dtype).requires_grad_(), gradient.to(dtype)
    layer = layer_of(linear, recipe)
    y = layer(x)
    assert y.dtype == dtype
    assert torch.equal(layer(x.mT.contiguous().mT), y)
    y.backward(gradient)
    expected = products(x.detach().flatten(0, 1), linear.weight.detach(), gradient.flatten(0, 1), recipe)
    found = y - linear.bias.to(dtype) if dtype is torch.float32 else y
    expected = (expected[0] + (linear.bias.detach() if found is y else 0), *expected[1:])
    for got, want in zip((found.flatten(0, 1), x.grad.flatten(0, 1), linear.weight.grad), expected, strict=True):
        assert got.isfinite().all()
        exact = dtype is torch.float32
        assert (got - want).abs().max() <= (1e-6 if exact else 2**-7) * want.abs().max()
    torch.testing.assert_close(linear.bias.grad, gradient.float().sum((0, 1)), rtol=2**-7, atol=1e-5)


@each(
    "mixer, options, maps, others",
    [
        ("hydra", {"hydra": HydraConfig(headdim=16)}, ["in_proj", "out_proj"], ["fc_D"]),
        ("hydra", {}, ["out_proj"], ["in_proj", "fc_D"]),  # of 4 heads: 520 rows
        ("mru", {}, ["gate_proj", "out_proj"], []),
        ("mru", {"mru": MRUConfig(construction="cayley")}, ["out_proj"], ["in_proj"]),
        ("lion_s", {}, ["qkv", "proj"], ["a_i"]),
    ],
)
def test_which_products_are_in_fp8(mixer, options, maps, others):
    """Those of linear maps in blocks, but for odd sizes, gates, elements of state matrices, and what an operation takes
    without a call."""
    options = {"mixers": MixerOptions(**options), "layers": (mixer,), "n_layers": 1, "causal_mixers": True}
    model = build_model(dataclasses.replace(scenario.MODELS["hydra"], **options), device="meta")
    found = [[name.removeprefix("blocks.0.") for name in names] for names in float8_maps(model)]
    assert found == [[*(f"mixer.{name}" for name in maps), "mlp.up", "mlp.down"], [f"mixer.{name}" for name in others]]


@pytest.mark.parametrize("mixer", scenario.MODELS)
def test_parameters_stay_what_they_are(mixer):
    model = build_model(scenario.MODELS[mixer])
    before, rounded = dict(model.named_parameters()), rounded_parameters(model)
    kinds = {name: type(module) for name, module in model.named_modules()}
    compute_in_float8(model, "rowwise", emulate=True)
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert rounded_parameters(model) == rounded  # ranks send them in bf16 as before
    changed = [name for name, module in model.named_modules() if type(module) is not kinds[name]]
    assert changed == float8_maps(build_model(scenario.MODELS[mixer], device="meta"))[0]


@pytest.mark.slow
@pytest.mark.parametrize("mixer", scenario.MODELS)
def test_models_learn_as_in_bf16(mixer):
    plain, *others = scenario.losses_of_all(mixer, [{"fp8": recipe} for recipe in ("", *RECIPES)], 12)
    assert plain[-1] < plain[0] - 0.5
    for losses in others:
        assert losses != plain
        assert losses == pytest.approx(plain, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_recomputing_changes_nothing(recipe):
    modes = [
        {"activation_checkpointing": "none"},
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": "selective", "selective_by": "op"},
        {"activation_checkpointing": "offload"},
    ]
    first, *others = scenario.losses_of_all("hydra", [{"fp8": recipe, **mode} for mode in modes], 3)
    assert others == [first] * 3


def test_a_run_goes_on_with_fp8_and_without(tmp_path):
    for name, (before, after) in {"with": ("", "rowwise"), "without": ("rowwise", "")}.items():
        went_on, changed = scenario.change_over({"fp8": before}, {"fp8": after}, tmp_path / name)
        assert changed != went_on
        assert changed == pytest.approx(went_on, abs=0.02)


@pytest.mark.slow
def test_ranks_compute_the_same():
    """But for rounding: weights that ranks send are rounded to bf16 before, and some scales are those of a rank's
    tokens."""
    engines = [{"name": "fsdp2"}, {"name": "ddp"}, {"name": "deepspeed", "zero_stage": 2}]
    runs = [{"fp8": "rowwise", **engine} for engine in engines]
    one = scenario.losses_of("hydra", runs[0], 6)
    first, second = run_distributed(scenario.losses_of_all, 2, arguments=("hydra", runs, 6))
    assert first == second
    for losses in first:
        assert losses == pytest.approx(one, abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_blocks_are_compiled_whole(recipe):
    """And recomputed as such, with what was computed before."""
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))])
    compute_in_float8(model, recipe, emulate=True)
    block, x, found = model.blocks[0], torch.randn(3, 7, 32), []
    for changed in (False, True):
        if changed:
            checkpoint_activations(model, "full")
            compile_blocks(model, backend="aot_eager", fullgraph=True)
        y = block(x)
        y.square().sum().backward()
        found.append([y, *(parameter.grad for parameter in block.parameters())])
        block.zero_grad()
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)


BF16 = ["--engine.precision", "bf16"]


@each(
    "options, message",
    [
        ([], r'engine\.fp8 = "rowwise" needs engine\.precision = "bf16", got "fp32"'),
        (
            [*BF16, "--engine.name", "deepspeed", "--engine.zero-stage", "3"],
            r'engine\.fp8 = "rowwise" does not work with DeepSpeed at engine\.zero_stage = 3; use stage 2, or engine',
        ),
        (
            [*BF16, "--model.layers", "none", "--model.d-model", "24", "--model.mlp-ratio", "3"],
            r"engine\.fp8: no linear map in the layers of this model can be computed in fp8, which takes sizes",
        ),
    ],
)
def test_runs_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message) as error:
        make_plan(load_config("debug_mru", ["--engine.fp8", "rowwise", "--data.path", "x", *options]), 1)
    assert "\n" not in str(error.value)


def test_devices_that_do_not_fit(monkeypatch):
    """A CPU; a GPU without such products; torchao that is not installed."""
    with pytest.raises(ValueError, match=r'^engine\.fp8 = "rowwise" needs a GPU that .*, and this run is on a CPU; '):
        build_engine(EngineConfig(fp8="rowwise", precision="bf16"), Distributed())
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(ValueError, match=r"needs a GPU that .*, and this is NVIDIA A100; leave engine\.fp8 out$"):
        check_float8("tensorwise", gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    check_float8("tensorwise", gpu)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"needs torchao: install the extra with pip install -e '\.\[lowbit\]'$"):
        check_float8("tensorwise", gpu)

"""The choice of engine, ranks and accumulation changes no number of a run, also of one with rules for parameters."""

import math

import pytest
import scenarios
from harness import run_distributed
from scenarios import ENGINES, GLOBAL_BATCH, OFFLOADED

from matmix.train.engine.build import build_engine
from matmix.train.engine.config import EngineConfig
from matmix.train.optim import OPTIMIZERS
from matmix.train.process.distributed import Distributed

STEPS = 8
HSDP = {"name": "fsdp2", "replicate": 2}
OTHERS = [name for name in OPTIMIZERS if name not in ("adamw", "adamw_8bit", "muon")]  # muon has tests of its own
OTHERS.append("small_blocks:AdamW8bit")


@pytest.fixture(scope="module")
def reference():
    """One process, no sharding, the whole batch at once."""
    return scenarios.losses_of({"name": "fsdp2"}, STEPS, 1)


def assert_same_run(found, expected, tolerance=1e-5):
    (history, weights), (expected_history, expected_weights) = found, expected
    assert len(history) > 0
    for step, (got, want) in enumerate(zip(history, expected_history, strict=False)):
        assert got == pytest.approx(want, abs=tolerance), f"(loss, norm) of step {step}"
    if len(history) == len(expected_history):
        assert weights.keys() == expected_weights.keys()
        for name, values in weights.items():
            assert values == pytest.approx(expected_weights[name], abs=tolerance), name


def test_the_reference_learns_and_clips(reference):
    history, _ = reference
    assert history[-1][0] < history[0][0] - 0.3
    assert max(norm for _, norm in history) > 0.5  # above the limit, so that clipping is part of what is compared


@pytest.mark.parametrize("accumulation", [2, GLOBAL_BATCH])
def test_accumulation_in_one_process(reference, accumulation):
    assert_same_run(scenarios.losses_of({"name": "fsdp2"}, STEPS, accumulation), reference)


@pytest.fixture(scope="module")
def references():
    """The same by every other optimizer."""
    return {name: scenarios.losses_of({"name": "fsdp2"}, STEPS, 1, name) for name in OTHERS}


@pytest.mark.parametrize(
    ("ranks", "engines"),
    [
        (2, {"ddp": OTHERS, "fsdp2": OTHERS, "zero0": ["stable_adamw"], "zero2": ["lion"]}),
        pytest.param(3, {"fsdp2": OTHERS}, marks=pytest.mark.slow),
        pytest.param(4, {"hsdp": OTHERS}, marks=pytest.mark.slow),
    ],
)
def test_every_optimizer_on_shards(references, ranks, engines):
    """Sizes that no number of ranks divides: what is computed of whole tensors is that of whole tensors."""
    runs = [(name, one) for name, optimizers in engines.items() for one in optimizers]
    arguments = [({**ENGINES, "hsdp": HSDP}[name], STEPS, 1, one) for name, one in runs]
    for rank, found in enumerate(run_distributed(scenarios.losses_of_all, ranks, arguments=(arguments,))):
        for (name, one), run in zip(runs, found, strict=True):
            print(f"rank {rank}, {name}, {one}")
            if one == "soap":  # where the norm behind them takes all gradient from some weights, they follow rounding
                assert_same_run((run[0], {}), (references[one][0], {}))
            else:
                assert_same_run(run, references[one])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["soap", "small_blocks:AdamW8bit"])
def test_other_numbers_of_ranks_take_the_same_steps_from_the_same_gradients(name, tmp_path):
    """Matrices, and what is kept of them, bit for bit: on three ranks, and where one goes on from there."""
    three = run_distributed(scenarios.same_gradients, 3, arguments=({"name": "fsdp2"}, 0, 15, name, str(tmp_path)))
    one = scenarios.same_gradients({"name": "fsdp2"}, 15, 20, name, str(tmp_path))
    for found in [*three, one]:
        for key, (spread, whole) in found.items():
            matrix = key.startswith("blocks.") and ("up.weight" in key or "down.weight" in key)
            assert spread == (whole if matrix else pytest.approx(whole, abs=1e-6)), key
    assert ("blocks.0.up.weight.exp_avg_scale" in one) == (name != "soap")


def test_every_engine_on_two_ranks(reference):
    by_op = {"activation_checkpointing": "selective", "selective_by": "op"}
    engines = {**ENGINES, "zero3, recomputed by op": {**ENGINES["zero3"], **by_op}}
    for name in ("fsdp2", "ddp", "zero2"):
        engines[f"{name}, activations offloaded"] = {**ENGINES[name], "activation_checkpointing": "offload"}
    engines["zero2, offload"] = OFFLOADED["zero2, offload"]
    runs = [(options, 4 if "offload" in name else STEPS, 2) for name, options in engines.items()]
    for rank, found in enumerate(run_distributed(scenarios.losses_of_all, 2, arguments=(runs,))):
        for name, run in zip(engines, found, strict=True):
            print(f"rank {rank}, {name}")
            assert_same_run(run, reference)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_where_the_optimizer_runs_changes_nothing(ranks):
    """The same steps, in the sums of which ZeRO-Offload rounds otherwise, with bad ones that leave no trace."""
    runs = [
        ({**ENGINES, **OFFLOADED}[f"zero{n}{o}"], STEPS, a)
        for n in (1, 2, 3)
        for a in (1, 2)
        for o in ("", ", offload")
    ]
    for found in run_distributed(scenarios.losses_of_all, ranks, arguments=(runs,)):
        for plain, offloaded in zip(found[::2], found[1::2], strict=True):
            assert_same_run(offloaded, plain, 5e-6)
    for found in run_distributed(scenarios.poison_and_discard_all, ranks, arguments=(list(OFFLOADED),)):
        for name, (clean, history) in found.items():
            assert history == clean, name


@pytest.mark.slow
def test_four_ranks_and_hybrid_sharding(reference):
    runs = [(HSDP, STEPS, 2), *((ENGINES[name], 5, 1) for name in ("fsdp2", "zero1", "zero3"))]
    for found in run_distributed(scenarios.losses_of_all, 4, arguments=(runs,)):
        for run in found:
            assert_same_run(run, reference)


def test_bad_steps_and_dropped_gradients_leave_no_trace():
    found = run_distributed(scenarios.poison_and_discard_all, 2, arguments=(list(ENGINES),))
    for rank in [*found, {"one process": scenarios.poison_and_discard("fsdp2")}]:
        for name, (clean, history) in rank.items():
            assert history == clean, name


def test_bf16_is_the_same_on_every_engine(reference):
    options = [{**ENGINES[name], "precision": "bf16"} for name in ("fsdp2", "ddp", "zero0", "zero2", "zero3")]
    one = scenarios.losses_of(options[0], 5, 1)
    assert one[0] != reference[0][:5]
    for (loss, norm), (exact_loss, exact_norm) in zip(one[0], reference[0], strict=False):
        assert math.isclose(loss, exact_loss, rel_tol=2e-2)
        assert math.isclose(norm, exact_norm, rel_tol=5e-2)
    runs = [(option, 5, 1) for option in options]
    found = run_distributed(scenarios.losses_of_all, 2, arguments=(runs,))[0]
    for option, run in zip(options, found, strict=True):
        if option != options[-1]:  # ZeRO-3 has a linear layer of its own, which rounds before it adds the bias
            assert_same_run(run, found[0])
        for got, want in zip(run[0], one[0], strict=True):
            assert got == pytest.approx(want, rel=5e-3)  # products of another size are rounded otherwise


def test_norm_without_limit_is_not_clipped():
    free, clipped = (
        scenarios.train_step(scenarios.make_engine(EngineConfig()), 0, accumulation=1, max_norm=limit)
        for limit in (0.0, 0.5)
    )
    assert free == clipped  # loss and norm before the update are the same; the updates differ:
    engines = [scenarios.make_engine(EngineConfig()) for _ in range(2)]
    for engine, limit in zip(engines, (0.0, 1e-9), strict=True):
        scenarios.train_step(engine, 0, accumulation=1, max_norm=limit)
    assert scenarios.moments(engines[0]) != scenarios.moments(engines[1])


def test_a_model_with_weights_keeps_them():
    import torch

    model = scenarios.Toy()
    scenarios.initialize(model)
    with torch.no_grad():
        model.norm.bias.fill_(0.25)
    engine = build_engine(EngineConfig(), Distributed())
    engine.prepare(model, lambda _model: None, scenarios.make_optimizer)
    assert dict(scenarios.full_weights(engine))["norm.bias"].tolist() == [0.25] * scenarios.WIDTH


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replicate": 0}, r"engine\.replicate must be >= 1"),
        ({"selective_every": 0}, r"engine\.selective_every must be >= 1"),
        (
            {"name": "deepspeed", "compile": True, "zero_stage": 3},
            r"compile does not work with DeepSpeed",
        ),
        ({"context": 0}, r"engine\.context must be >= 1"),
        ({"name": "deepspeed", "context": 2}, r'engine\.context = 2 needs engine\.name = "fsdp2" or "ddp", got "deeps'),
        ({"name": "deepspeed", "replicate": 2}, r'engine\.replicate = 2 needs engine\.name = "fsdp2"'),
    ],
)
def test_config_errors(options, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**options)


def test_mesh_that_does_not_fit():
    with pytest.raises(ValueError, match=r"engine\.replicate = 2 does not divide the 3 ranks"):
        build_engine(EngineConfig(replicate=2), Distributed(world_size=3))

"""Weights and gradients are sent in bfloat16 where they may be, as seldom as can be, and before they are needed."""

import itertools

import pytest
import wire_scenario
from harness import run_distributed

from matmix.train.estimate.context import context_bytes

LAYERS = wire_scenario.LAYERS
TYPES = [
    {"precision": precision, "reduce_dtype": reduced}
    for precision, reduced in itertools.product(("fp32", "bf16"), ("fp32", "bf16"))
]
HSDP = {"name": "fsdp2", "replicate": 2}


def check_bytes(engines, ranks, counting=wire_scenario.bytes_of_steps, *more):
    runs = [{**engine, **types} for engine in engines for types in TYPES]
    for rank in run_distributed(counting, ranks, arguments=(runs, *more)):
        for options, (counted, planned) in zip(runs, rank, strict=True):
            for kind, count in counted.items():
                assert count == pytest.approx(planned.get(kind, 0), rel=0.05), (options, kind)
    return rank


@pytest.mark.slow
def test_bytes_of_a_step_are_halved_and_planned():
    counted = [one for one, _ in check_bytes([{"name": "fsdp2"}, {"name": "ddp"}], 2)]
    exact, sums, weights, both = counted[:4]
    assert sums == {**exact, "reduce-scatter": exact["reduce-scatter"] / 2}
    # What bf16 does not round is little beside the matrices, but for the embeddings.
    assert weights["all-gather"] == pytest.approx(exact["all-gather"] / 2, rel=0.15)
    assert both == {**weights, "reduce-scatter": exact["reduce-scatter"] / 2}
    exact, sums, weights, both = counted[4:]
    assert exact["all-gather"] == 0
    assert weights == exact
    assert sums == both == {**exact, "all-reduce": exact["all-reduce"] / 2}


@pytest.mark.slow
def test_bytes_of_hybrid_sharding():
    check_bytes([HSDP, {"name": "fsdp2", "reshard_after_forward": False}, {"name": "fsdp2"}], 4)


@pytest.mark.slow
def test_bytes_of_zero():
    """By stage and types, and as planned; without the few weights of stage 3 that stay gathered between the passes."""
    stages = [{"name": "deepspeed", "zero_stage": stage} for stage in range(4)]
    counted = [one for one, _ in check_bytes(stages, 2, wire_scenario.bytes_of_zero, 10**9)]
    size = 4 * sum(one.numel() for one in wire_scenario.model_of(stages[0]).parameters())
    for stage in range(3):
        exact, sums, weights, both = counted[4 * stage : 4 * stage + 4]
        micro_batches = wire_scenario.ACCUMULATION if stage == 2 else 1
        assert exact["all-reduce"] == pytest.approx(micro_batches * size, rel=0.01)
        assert exact["all-gather"] == pytest.approx(size / 2 if stage else 0, rel=0.01)
        assert weights == exact
        assert sums == both == {**exact, "all-reduce": exact["all-reduce"] / 2}
    exact, sums, weights, both = counted[12:]
    assert exact["reduce-scatter"] == pytest.approx(wire_scenario.ACCUMULATION * size / 2, rel=0.01)
    assert sums == {**exact, "reduce-scatter": exact["reduce-scatter"] / 2}
    assert weights["reduce-scatter"] == exact["reduce-scatter"]
    assert weights["all-gather"] == pytest.approx(exact["all-gather"] / 2, rel=0.15)
    assert both == {**weights, "reduce-scatter": sums["reduce-scatter"]}
    # Where weights do not stay gathered until the backward pass.
    again = [one for one, _ in check_bytes(stages[3:], 2, wire_scenario.bytes_of_zero, 500_000)]
    assert again[0]["all-gather"] > 1.3 * exact["all-gather"]


@pytest.mark.slow
def test_losses_are_those_of_weights_sent_in_float32(tmp_path):
    for found in run_distributed(wire_scenario.losses_and_checkpoints, 2, arguments=(str(tmp_path),)):
        for name in ("fsdp2", "ddp"):
            exact, rounded, sums = (found[name, case] for case in ("float32", "rounded", "sums"))
            assert len(exact) == 20
            assert exact[-1] < exact[0]
            assert rounded == exact  # rounding before the gather is rounding after it
            assert sums != exact
            assert sums == pytest.approx(exact, rel=2e-2)
            assert found[name, "types"] == {"torch.float32"}
            history, resumed = found[name, "resumed"]
            assert resumed == history[3:]


def test_blocks_are_gathered_before_they_are_needed_and_gradients_summed_once():
    """In the order of the collectives."""
    order = run_distributed(wire_scenario.order_of_collectives, 2, arguments=([{"name": "fsdp2"}],))[0][0]
    check_order(order, once=("reduce_scatter",))


@pytest.mark.slow
def test_order_of_hybrid_sharding():
    order = run_distributed(wire_scenario.order_of_collectives, 4, arguments=([HSDP],))[0][0]
    check_order(order, once=("reduce_scatter", "all_reduce"))


def check_order(order, once):
    forward = [f"forward {index}" for index in range(LAYERS)]
    backward = [f"backward {index}" for index in reversed(range(LAYERS))]
    assert [one for one in order if " " in one] == 2 * (forward + backward)
    gathered = 0
    for one in order:
        gathered += one == "all_gather"
        if one == "forward 0":
            gathered = 3  # of what is outside of blocks, of this one and of the next
        if one.startswith("forward"):
            assert gathered == 1 + min(int(one[-1]) + 2, LAYERS), one
        if one == forward[-1]:
            gathered = 0
        if one.startswith("backward"):
            assert gathered == min(LAYERS - int(one[-1]) + 1, LAYERS), one
    last = len(order) - order[::-1].index(backward[0])  # of the last micro-batch
    for kind in once:
        assert order.count(kind) == LAYERS + 1
        assert kind not in order[: last - 1]
    # Each block's gradients are summed while the one before it computes.
    reduced = [one for one in order if one.startswith("backward") or one == once[0]][-2 * LAYERS - 1 :]
    assert reduced == [*itertools.chain.from_iterable(zip(backward, [once[0]] * LAYERS, strict=True)), once[0]]


@pytest.mark.slow
def test_what_a_context_sends_is_planned():
    """Within 5 % of the bytes that layers send, which grow with the length for attention and long convolutions only."""
    constant = [["hydra"], ["lion_s"], ["semiseparable", "convolution", "mru"]]
    growing = [["attention"], ["s4d"], ["hyena"], ["hydra", "attention"]]
    runs = [(layers, tokens, "none") for layers in [*constant, *growing] for tokens in (128, 512)]
    runs += [(["hydra", "attention"], 256, mode) for mode in ("full", "selective")]
    runs += [(["semiseparable", "mru", "rwkv7"], 256, "full", True)]
    by_run = run_distributed(wire_scenario.bytes_of_contexts, 2, arguments=(runs,))[0]
    for run, counted in zip(runs, by_run, strict=True):
        assert counted > 0
        assert context_bytes(wire_scenario.in_context(*run)) == pytest.approx(counted, rel=0.05), run
    for number, layers in enumerate([*constant, *growing]):
        short, long = by_run[2 * number : 2 * number + 2]
        assert (long == short) if layers in constant else (long > short), layers

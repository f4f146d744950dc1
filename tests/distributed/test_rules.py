"""Rates and clipping by rules are the same on every engine, at any number of ranks, and survive a resume."""

import pytest
import rules_scenario
import scenarios
import torch
from convert_scenarios import contents
from harness import run_distributed
from rules_scenario import STEPS, STOP
from scenarios import CLIPS, ENGINES

from matmix.train.engine.clipping import clip_limits
from matmix.train.engine.config import EngineConfig
from matmix.train.optim.base import OTHERS

MAX_NORM = 0.5  # of scenarios.train_step
RESUMED = list(ENGINES)


@pytest.fixture(scope="module")
def reference():
    """One process, no sharding, the whole batch at once."""
    return rules_scenario.losses_of({"name": "fsdp2"}, STEPS, 1)


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    """What two ranks found, and where the checkpoints of their runs are."""
    directory = tmp_path_factory.mktemp("saved")
    arguments = (ENGINES, RESUMED, str(directory))
    return run_distributed(rules_scenario.everything, 2, arguments=arguments, timeout=300), directory


def clip_group(name: str) -> str:
    if ".up." in name:
        return "up"
    return "rates" if name.endswith("A_log") else "norms" if "norm" in name else OTHERS


def test_each_clipping_group_is_held_to_its_own_limit():
    """The first moments after one step are (1 - beta) times the gradients as they were clipped."""
    engine, free = (scenarios.make_engine(EngineConfig(), ruled=True) for _ in range(2))
    for group in free.optimizer.param_groups:
        group["clip"] = 0.0
    _, norm = scenarios.train_step(engine, 0, accumulation=1, max_norm=MAX_NORM)
    assert scenarios.train_step(free, 0, accumulation=1, max_norm=0.0)[1] == norm  # it is that before clipping
    before = {group: float(norm) for group, norm in free.clip_norms.items()}
    assert norm == pytest.approx(sum(part**2 for part in before.values()) ** 0.5, rel=1e-5)
    limits = {**CLIPS, OTHERS: MAX_NORM}
    assert set(before) == set(limits)
    after, unclipped = norms_of_moments(engine), norms_of_moments(free)
    for group, limit in limits.items():
        assert unclipped[group] == pytest.approx(before[group], rel=1e-4)
        assert limit == 0 or before[group] > 1.1 * limit, f"{group} would not be clipped"
        assert after[group] == pytest.approx(limit or before[group], rel=1e-4), group


def norms_of_moments(engine) -> dict[str, float]:
    names = {parameter: name for name, parameter in engine.module.named_parameters()}
    squares: dict[str, float] = {}
    for parameter, kept in engine.optimizer.state.items():
        group = clip_group(names[parameter])
        squares[group] = squares.get(group, 0.0) + (kept["exp_avg"] / 0.1).double().square().sum().item()
    return {group: square**0.5 for group, square in squares.items()}


def test_one_clipping_group_keeps_the_limit_of_its_rule():
    groups = [{"clip_group": "all", "clip": 2.0}, {"clip_group": "all", "clip": 2.0}]
    assert clip_limits(groups, 1.0) == {"all": 2.0}
    assert clip_limits([{}, {}], 1.0) == {OTHERS: 1.0}


def assert_same(found, expected, tolerance=1e-5):
    (history, weights, norms), (expected_history, expected_weights, expected_norms) = found, expected
    for step, (got, want) in enumerate(zip(history, expected_history, strict=False)):
        assert got == pytest.approx(want, abs=tolerance), f"(loss, norm) of step {step}"
    if len(history) == len(expected_history):
        assert norms == pytest.approx(expected_norms, abs=tolerance)
        for name, values in weights.items():
            assert values == pytest.approx(expected_weights[name], abs=tolerance), name


def test_sharded_engines_on_two_ranks(reference):
    names = ("fsdp2", "zero2", "zero3")
    runs = [(ENGINES[name], STEPS, 2) for name in names]
    for found in run_distributed(rules_scenario.losses_of_all, 2, arguments=(runs,)):
        for run in found:
            assert_same(run, reference)


@pytest.mark.slow
def test_every_engine_on_two_ranks(reference, on_two_ranks):
    assert reference[0] != scenarios.losses_of({"name": "fsdp2"}, STEPS, 1)[0]
    for rank, found in enumerate(on_two_ranks[0]):
        assert list(found["losses"]) == list(ENGINES)
        for name, run in found["losses"].items():
            print(f"rank {rank}, {name}")
            assert_same(run, reference)


@pytest.mark.slow
def test_four_ranks_and_hybrid_sharding(reference):
    runs = [({"name": "fsdp2", "replicate": 2}, 4, 1), (ENGINES["zero1"], 4, 1), (ENGINES["zero3"], 4, 1)]
    for found in run_distributed(rules_scenario.losses_of_all, 4, arguments=(runs,)):
        for run in found:
            assert_same(run, reference)


@pytest.mark.slow
def test_bad_steps_leave_no_trace(on_two_ranks):
    for rank in on_two_ranks[0]:
        for name, (clean, history) in rank["poisoned"].items():
            assert history == clean, name


@pytest.mark.slow
def test_resuming_on_fewer_ranks_without_rules_and_with_them_again(on_two_ranks, tmp_path):
    """From 2 ranks to 1: the run goes on; and the same moments come to engines whose groups are others, also where a
    checkpoint was written before there were rules."""
    [saved, _], directory = on_two_ranks
    arguments = (RESUMED, str(directory), str(tmp_path))
    [resumed] = run_distributed(rules_scenario.resume, 1, arguments=arguments)
    for name in RESUMED:
        history, again = saved["resumed"][name]
        assert again == history[STOP:], name
        for got, want in zip(resumed[name], history[STOP:], strict=True):
            assert got == pytest.approx(want, abs=2e-6), name
        expected = contents(directory / name / f"step-{STOP:08d}")
        for folder in ("without", "with"):
            held = contents(tmp_path / folder / name / f"step-{STOP:08d}")
            assert held.keys() == expected.keys()
            for key, tensor in expected.items():
                assert torch.equal(held[key], tensor), (name, folder, key)


@pytest.mark.slow
def test_resuming_on_more_ranks(on_two_ranks):
    [saved, _], directory = on_two_ranks
    for resumed in run_distributed(scenarios.resume_all, 4, arguments=(RESUMED, str(directory), STOP, 6, 1, True)):
        for name in RESUMED:
            for got, want in zip(resumed[name], saved["resumed"][name][0][STOP:], strict=True):
                assert got == pytest.approx(want, abs=2e-6), name


def test_options_of_the_optimizer_are_the_configs_after_a_load(tmp_path):
    """Not those of the checkpoint."""
    scenarios.stop_and_resume("fsdp2", str(tmp_path), dropout=0.0, stop=1, steps=1, accumulation=1)
    engine = scenarios.make_engine(EngineConfig(), ruled=True)
    before = options_of(engine)
    manager = scenarios.CheckpointManager(tmp_path / "fsdp2")
    manager.load(manager.latest_valid(), engine)
    assert options_of(engine) == before


def options_of(engine) -> list[dict]:
    return [{key: value for key, value in group.items() if key != "params"} for group in engine.optimizer.param_groups]

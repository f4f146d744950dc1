"""Clipping by rules, and rules through a resume. That they are the same on every engine is in test_engines.py."""

import pytest
import rules_scenario
import scenarios
import torch
from convert_scenarios import contents
from harness import run_distributed
from rules_scenario import STOP
from scenarios import CLIPS, ENGINES

from matmix.train.engine.clipping import clip_limits
from matmix.train.engine.config import EngineConfig
from matmix.train.optim.base import OTHERS

MAX_NORM = 0.5  # of scenarios.train_step


def clip_group(name: str) -> str:
    if ".up." in name:
        return "up"
    return "rates" if name.endswith("A_log") else "norms" if "norm" in name else OTHERS


def test_each_clipping_group_is_held_to_its_own_limit():
    """The first moments after one step are (1 - beta) times the gradients as they were clipped."""
    engine, free = (scenarios.make_engine(EngineConfig()) for _ in range(2))
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


@pytest.mark.slow
def test_resuming_without_rules_and_with_them_again(tmp_path):
    """The same moments come to engines whose groups are others, also where a checkpoint was written before there were
    rules."""
    options = {"dropout": 0.0, "stop": STOP, "steps": STOP + 1, "accumulation": 2}
    run_distributed(scenarios.stop_and_resume_all, 2, arguments=(list(ENGINES), str(tmp_path), options))
    run_distributed(rules_scenario.resume, 1, arguments=(list(ENGINES), str(tmp_path)))
    for name in ENGINES:
        expected = contents(tmp_path / name / f"step-{STOP:08d}")
        for folder in ("without", "with"):
            held = contents(tmp_path / folder / name / f"step-{STOP:08d}")
            assert held.keys() == expected.keys()
            for key, tensor in expected.items():
                assert torch.equal(held[key], tensor), (name, folder, key)


def test_options_of_the_optimizer_are_the_configs_after_a_load(tmp_path):
    """Not those of the checkpoint."""
    scenarios.stop_and_resume("fsdp2", str(tmp_path), dropout=0.0, stop=1, steps=1, accumulation=1)
    engine = scenarios.make_engine(EngineConfig())
    before = options_of(engine)
    manager = scenarios.CheckpointManager(tmp_path / "fsdp2")
    manager.load(manager.latest_valid(), engine)
    assert options_of(engine) == before


def options_of(engine) -> list[dict]:
    return [{key: value for key, value in group.items() if key != "params"} for group in engine.optimizer.param_groups]

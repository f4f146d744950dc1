"""A run that was stopped and resumed is the run that was not."""

import pytest
import scenarios
from harness import run_distributed
from scenarios import ENGINES, OFFLOADED

from matmix.train.optim import OPTIMIZERS

STOP, STEPS = 2, 4
OTHERS = [f"fsdp2 by {name}" for name in OPTIMIZERS if name not in ("adamw", "adamw_8bit", "muon")]
OTHERS += [f"{engine} by small_blocks:AdamW8bit" for engine in ("fsdp2", "zero0")]


def test_same_ranks_bit_for_bit(tmp_path):
    options = {"dropout": 0.3, "stop": STOP, "steps": STEPS, "accumulation": 2}
    arguments = ([*ENGINES, *OTHERS], str(tmp_path), options)
    found = run_distributed(scenarios.stop_and_resume_all, 2, arguments=arguments)
    found.append({"one process": scenarios.stop_and_resume("fsdp2", str(tmp_path / "one"), **options)})
    for rank in found:
        for name, (history, resumed) in rank.items():
            assert resumed == history[STOP:], name
            assert len(resumed) == STEPS - STOP


@pytest.mark.slow
def test_offloaded_states_bit_for_bit(tmp_path):
    options = {"dropout": 0.3, "stop": STOP, "steps": STEPS, "accumulation": 2}
    for rank in run_distributed(scenarios.stop_and_resume_all, 2, arguments=([*OFFLOADED], str(tmp_path), options)):
        for name, (history, resumed) in rank.items():
            assert resumed == history[STOP:], name


@pytest.mark.slow
def test_other_number_of_ranks(tmp_path):
    options = {"dropout": 0.0, "stop": STOP, "steps": STEPS, "accumulation": 2}
    resumed_on = {1: ["fsdp2", "zero0", "zero2", "zero3", *OTHERS], 4: ["fsdp2", "zero1", "zero3", *OTHERS]}
    names = sorted(set().union(*resumed_on.values()))
    saved = run_distributed(scenarios.stop_and_resume_all, 2, arguments=(names, str(tmp_path), options))
    for ranks, names in resumed_on.items():
        arguments = (names, str(tmp_path), STOP, STEPS, 1)
        for found in run_distributed(scenarios.resume_all, ranks, arguments=arguments):
            for name in names:
                for got, want in zip(found[name], saved[0][name][0][STOP:], strict=True):
                    assert got == pytest.approx(want, abs=2e-5), (name, ranks)


@pytest.mark.slow
def test_engine_may_change_within_its_kind(tmp_path):
    """Sharded or not, any stage of ZeRO: the same content."""
    found = run_distributed(scenarios.resume_with_another_layout, 2, arguments=(str(tmp_path),))
    for rank in found:
        for (saved, resumed), (expected, history) in rank.items():
            for got, want in zip(history, expected, strict=True):
                assert got == pytest.approx(want, abs=2e-5), (saved, resumed)

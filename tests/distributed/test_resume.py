"""A run that was stopped and resumed is the run that was not."""

import pytest
import scenarios
from harness import run_distributed
from scenarios import ENGINES

from matmix.train.checkpoint import read_portable

STOP, STEPS = 3, 6


def test_same_ranks_bit_for_bit(tmp_path):
    options = {"dropout": 0.3, "stop": STOP, "steps": STEPS, "accumulation": 2}
    arguments = (list(ENGINES), str(tmp_path), options)
    found = run_distributed(scenarios.stop_and_resume_all, 2, arguments=arguments)
    found.append({"one process": scenarios.stop_and_resume("fsdp2", str(tmp_path / "one"), **options)})
    for rank in found:
        for name, (history, resumed) in rank.items():
            assert resumed == history[STOP:], name
            assert len(resumed) == STEPS - STOP


@pytest.mark.parametrize(
    ("saved_on", "resumed_on"),
    [
        (2, {1: ["fsdp2", "zero0", "zero2", "zero3"], 4: ["fsdp2", "zero3"]}),
        (1, {2: ["fsdp2", "zero1", "zero3"]}),
    ],
)
def test_other_number_of_ranks(tmp_path, saved_on, resumed_on):
    options = {"dropout": 0.0, "stop": STOP, "steps": STEPS, "accumulation": 2}
    names = sorted(set().union(*resumed_on.values()))
    arguments = (names, str(tmp_path), options)
    saved = run_distributed(scenarios.stop_and_resume_all, saved_on, arguments=arguments)
    for ranks, names in resumed_on.items():
        arguments = (names, str(tmp_path), STOP, STEPS, 1)
        for found in run_distributed(scenarios.resume_all, ranks, arguments=arguments):
            for name in names:
                for got, want in zip(found[name], saved[0][name][0][STOP:], strict=True):
                    assert got == pytest.approx(want, abs=2e-6), (name, ranks)


def test_weights_are_read_without_ranks(tmp_path):
    names = ["ddp", "fsdp2", "zero1", "zero3"]
    found = run_distributed(scenarios.save_and_tell_weights, 2, arguments=(names, str(tmp_path)))
    for name in names:
        read = {key: tensor.flatten().tolist() for key, tensor in read_portable(tmp_path / name / "step-00000001")}
        assert read == found[0][name] == found[1][name], name


def test_engine_may_change_within_its_kind(tmp_path):
    """Sharded or not, any stage of ZeRO: the same content."""
    found = run_distributed(scenarios.resume_with_another_layout, 2, arguments=(str(tmp_path),))
    for rank in found:
        for (saved, resumed), (expected, history) in rank.items():
            for got, want in zip(history, expected, strict=True):
                assert got == pytest.approx(want, abs=2e-6), (saved, resumed)

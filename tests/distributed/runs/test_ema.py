"""The average of the weights under every engine: two ranks have that of one, evaluate it alike, and resume bit for bit,
also with another number of ranks and another engine."""

from pathlib import Path

import pytest
import run_scenarios
import torch
from convert_scenarios import contents
from harness import run_distributed
from runs import records

from matmix.use.exporting import convert_run

ENGINES = {
    "fsdp2": ["--engine.name", "fsdp2"],
    "ddp": ["--engine.name", "ddp"],
    **{f"zero{n}": ["--engine.name", "deepspeed", "--engine.zero-stage", str(n)] for n in (0, 1, 2, 3)},
}
STEPS = 4
COMMON = ["--device", "cpu", "--steps", str(STEPS), "--checkpoint.every", "2", "--logging.progress", "False"]
COMMON += ["--gc-every", "0", "--evaluation.every", "2", "--model.dropout", "0"]
COMMON += ["--ema.decay", "0.6", "--ema.every", "2", "--logging.tensorboard", "False"]
COMMON += ["--logging.picture", "False", "--evaluation.ablation-batches", "0", "--evaluation.batches", "1"]


def newest(run: Path) -> dict[str, torch.Tensor]:
    return contents(max((run / "checkpoints").glob("step-*")))


def evaluations(run: Path) -> list[list[float]]:
    return [[record["loss"], record["ema_loss"]] for record in records(run, "validation")]


def check_alike(run: Path, expected: Path) -> None:
    """Averages and evaluations are the same up to rounding."""
    want, found = newest(expected), newest(run)
    for key, tensor in found.items():
        if key.endswith(".ema"):
            torch.testing.assert_close(tensor, want[key], rtol=1e-3, atol=2e-4)
    assert sum(key.endswith(".ema") for key in found) == sum(key.endswith(".ema") for key in want) > 0
    for got, wanted in zip(evaluations(run), evaluations(expected)[-len(evaluations(run)) :], strict=True):
        assert got == pytest.approx(wanted, rel=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "engines", [("fsdp2",), pytest.param(("zero3", "zero2", "zero1", "zero0", "ddp"), marks=pytest.mark.slow)]
)
def test_every_engine(engines, dataset, tmp_path):
    def run_of(name: str, engine: str, *more: str, under: str = "") -> tuple[str, list[str]]:
        options = [*COMMON, "--data.path", dataset, *ENGINES[under or engine], *more]
        return "debug_hydra", [*options, "--run-dir", str(tmp_path / name / engine)]

    run_scenarios.train_all([run_of("one", "fsdp2")])
    expected = tmp_path / "one" / "fsdp2"
    runs = [run_of("whole", engine) for engine in engines]
    runs += [run_of("parts", engine, *more) for engine in engines for more in (("--stop-step", "3"), ())]
    run_distributed(run_scenarios.train_all, 2, arguments=(runs,), timeout=300)
    for engine in engines:
        whole, parts = tmp_path / "whole" / engine, tmp_path / "parts" / engine
        check_alike(whole, expected)
        resumed = newest(parts)
        assert all(torch.equal(tensor, resumed[key]) for key, tensor in newest(whole).items()), engine
        assert evaluations(parts) == evaluations(whole)
        # One rank of another engine goes on from the middle of it.
        convert_run(whole, tmp_path / "converted" / engine, step=2)
        before, found = contents(whole / "checkpoints" / "step-00000002"), newest(tmp_path / "converted" / engine)
        assert all(torch.equal(tensor, found[key]) for key, tensor in before.items()), engine
    run_scenarios.train_all([run_of("converted", engine, under="fsdp2") for engine in engines])
    for engine in engines:
        check_alike(tmp_path / "converted" / engine, expected)

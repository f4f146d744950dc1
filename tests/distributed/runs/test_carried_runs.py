"""Runs whose states go on from row to row (`data.carry`): the same with any number of ranks, after any stop."""

import shutil

import pytest
import run_scenarios
import torch
from harness import run_distributed
from runs import losses, records, weights

from matmix.train.checkpoint.lanes import Lanes

COMMON = ["--device", "cpu", "--checkpoint.every", "0", "--logging.progress", "False"]
COMMON += ["--gc-every", "0", "--data.workers", "0", "--data.shuffle", "False", "--data.carry", "True"]
COMMON += ["--data.seqlen", "16", "--model.layers", "semiseparable", "mru", "--model.mixers.semiseparable.headdim", "8"]
COMMON += ["--model.mixers.semiseparable.d-state", "4", "--evaluation.every", "4", "--micro-batch-size", "2"]


ENGINES = {
    "fsdp2": ["--engine.name", "fsdp2"],
    "ddp": ["--engine.name", "ddp"],
    "zero2": ["--engine.name", "deepspeed", "--engine.zero-stage", "2"],
}


def run_of(folder, *options: str) -> tuple[str, list[str]]:
    return "debug_mru", [*COMMON, *options, "--run-dir", str(folder)]


def evaluated(folder) -> list[float]:
    return [record["loss"] for record in records(folder, "validation")]


@pytest.mark.parametrize(
    ("steps", "engines"),
    [(8, ["ddp"]), pytest.param(20, ["fsdp2", "ddp", "zero2"], marks=pytest.mark.slow)],
)
def test_any_number_of_ranks(steps, engines, dataset, tmp_path, monkeypatch):
    """One process; two ranks with each engine; and a run that goes on from 4 ranks, of which two each share rows, to 2
    with whole rows, and to one with other micro-batches. Validation carries as well. Without states the same rows have
    other losses."""
    data = ["--data.path", dataset, "--model.dropout", "0", "--steps", str(steps)]
    first, second = (str(steps * part // 3) for part in (1, 2))
    elastic = tmp_path / "elastic"
    shared = run_of(elastic, *data, "--stop-step", first, "--engine.context", "2")
    run_distributed(run_scenarios.train_all, 4, arguments=([shared],))
    runs = [run_of(tmp_path / name, *data, *ENGINES[name]) for name in engines]
    runs.append(run_of(elastic, *data, "--stop-step", second, "--checkpoint.asynchronous", "False"))
    run_distributed(run_scenarios.train_all, 2, arguments=(runs,))
    run_scenarios.train_all([run_of(elastic, *data, "--micro-batch-size", "8"), run_of(tmp_path / "one", *data)])
    expected, validated = losses(tmp_path / "one"), evaluated(tmp_path / "one")
    for name in (*engines, "elastic"):
        assert losses(tmp_path / name) == pytest.approx(expected, rel=2e-5), name
        assert evaluated(tmp_path / name) == pytest.approx(validated, rel=2e-5), name
    monkeypatch.setattr(Lanes, "attach", lambda _lanes, _number, batch: batch)
    run_scenarios.train_all([run_of(tmp_path / "without", *data)])
    without = losses(tmp_path / "without")
    assert without[0] == expected[0]
    assert without[1:] != pytest.approx(expected[1:], rel=2e-4)


@pytest.mark.slow
def test_any_number_of_ranks_that_share_rows(dataset, tmp_path):
    """Three rows in 2 or 4 parts, so that rows begin and end inside of parts, and one in 4; a run that goes on with 4
    parts from 2, and with whole rows, and one that goes on with parts."""
    data = ["--data.path", dataset, "--model.dropout", "0", "--steps", "12", "--global-batch-size", "6"]
    layers = ["semiseparable", "mru", "retnet", "rwkv7", "gated_delta", "matrix_memory"]
    data += ["--micro-batch-size", "3", "--model.layers", *layers]
    data += ["--model.n-layers", "6", "--model.mixers.retnet.headdim", "8", "--model.mixers.rwkv7.headdim", "8"]
    data += ["--model.mixers.gated-delta.headdim", "8", "--engine.activation-checkpointing", "full"]

    def run(name: str, context: int, *options: str) -> tuple[str, list[str]]:
        return run_of(tmp_path / name, *data, "--engine.context", str(context), *options)

    run_scenarios.train_all([run("one", 1), run("whole first", 1, "--stop-step", "5")])
    runs = [run("two", 2), run("four to one", 2, "--stop-step", "4"), run("whole first", 2)]
    run_distributed(run_scenarios.train_all, 2, arguments=(runs,))
    runs = [
        run("four", 4, "--micro-batch-size", "1"),
        run("ddp", 2, "--engine.name", "ddp"),
        run("four to one", 4, "--stop-step", "8"),
    ]
    run_distributed(run_scenarios.train_all, 4, arguments=(runs,))
    run_scenarios.train_all([run("four to one", 1)])
    for name in ("two", "four", "ddp", "four to one", "whole first"):
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "one"), rel=2e-5), name
        assert evaluated(tmp_path / name) == pytest.approx(evaluated(tmp_path / "one"), rel=2e-5), name


@pytest.mark.slow
def test_a_kill_inside_of_documents_changes_no_bit(dataset, tmp_path):
    """The run goes on from a checkpoint that is two steps old; with rounded weights, too, whose states are not."""
    data = ["--data.path", dataset, "--data.workers", "1", "--steps", "8", "--model.layers", "semiseparable", "rwkv7"]
    data += ["--model.mixers.rwkv7.headdim", "8"]
    again, runs = [], []
    for precision in ("fp32", "bf16"):
        whole, parts = tmp_path / precision / "whole", tmp_path / precision / "parts"
        options = [*data, "--engine.precision", precision]
        again.append(run_of(parts, *options, "--checkpoint.every", "3"))
        runs += [run_of(whole, *options), run_of(parts, *options, "--checkpoint.every", "3", "--stop-step", "5")]
    run_distributed(run_scenarios.train_all, 2, arguments=(runs,), alone=True)
    for newest in tmp_path.glob("*/parts/checkpoints/step-00000005"):
        shutil.rmtree(newest)
    run_distributed(run_scenarios.train_all, 2, arguments=(again,), alone=True)
    for precision in ("fp32", "bf16"):
        whole, parts = tmp_path / precision / "whole", tmp_path / precision / "parts"
        curves = [[(record["loss"], record["grad_norm"]) for record in records(run)] for run in (whole, parts)]
        assert len(curves[0]) == 8
        assert curves[1] == curves[0], precision
        final = weights(whole)
        for key, tensor in weights(parts).items():
            assert torch.equal(tensor, final[key]), (precision, key)

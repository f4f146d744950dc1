"""Whole runs, data and all, that were stopped and started again: bit for bit with as many ranks, the same global
batches and losses with others."""

from pathlib import Path

import pytest
import run_scenarios
import torch
from harness import run_distributed
from runs import records, weights

from matmix.data.prepare.command import prepare
from matmix.data.prepare.text import PrepareConfig

STEPS = 6
ENGINES = {
    "fsdp2": ["--engine.name", "fsdp2"],
    "ddp": ["--engine.name", "ddp"],
    **{f"zero{n}": ["--engine.name", "deepspeed", "--engine.zero-stage", str(n)] for n in (1, 2, 3)},
}
COMMON = ["--device", "cpu", "--steps", str(STEPS), "--checkpoint.every", "0", "--logging.progress", "False"]
COMMON += ["--gc-every", "0"]  # many short runs in one process: its collections would cost more than the steps

# Recipe (an encoder with masked tokens; a language model), format of the shards, reading processes, packing: every
# pair of two of these values occurs. Dropout and accumulation are on in both recipes.
CASES = [
    ("debug_hydra", "webdataset", 1, "concat"),
    ("debug_hydra", "mds", 0, "document"),
    ("debug_mru", "webdataset", 0, "document"),
    ("debug_mru", "mds", 1, "document"),
    ("debug_mru", "mds", 0, "concat"),
]


@pytest.fixture(scope="module")
def datasets(dataset, tmp_path_factory):
    """The same documents in both formats."""
    out = str(tmp_path_factory.mktemp("dataset") / "webdataset")
    corpus = str(Path(dataset).parent / "verses.jsonl")
    options = {"vocab_size": 320, "validation_fraction": 0.1, "processes": 1, "shard_megabytes": 0.01}
    prepare(PrepareConfig(inputs=(corpus,), out=out, format="webdataset", **options))
    return {"mds": dataset, "webdataset": out}


def curve(run_dir):
    """(loss, gradient norm) of every step."""
    return [(record["loss"], record["grad_norm"]) for record in records(run_dir)]


@pytest.mark.parametrize("shift", [pytest.param(n, marks=pytest.mark.slow) for n in range(len(CASES))])
def test_as_many_ranks_bit_for_bit(shift, datasets, tmp_path):
    """Every engine with one of the cases; the slow tests bring all engines together with all cases."""
    cases = dict(zip(ENGINES, [*CASES[shift:], *CASES[:shift]], strict=True))
    whole, first, second = [], [], []
    for engine, (recipe, form, workers, packing) in cases.items():
        options = [*COMMON, *ENGINES[engine], "--data.path", datasets[form], "--data.packing", packing]
        options += ["--data.workers", str(workers), "--evaluation.every", "2"]
        whole.append((recipe, [*options, "--run-dir", str(tmp_path / "whole" / engine)]))
        parts = [*options, "--run-dir", str(tmp_path / "parts" / engine)]
        first.append((recipe, [*parts, "--stop-step", "3"]))
        second.append((recipe, parts))
    arguments = ([*whole, *first, *second],)
    found = run_distributed(run_scenarios.train_all, 2, arguments=arguments, alone=True, timeout=600)[0]
    for number, name in enumerate(cases):
        expected, stopped, resumed = found[number :: len(cases)]
        assert (list(stopped), list(resumed)) == ([1, 2, 3], [4, 5, 6]), name
        assert {**stopped, **resumed} == expected, name
        assert len(curve(tmp_path / "whole" / name)) == STEPS
        assert curve(tmp_path / "parts" / name) == curve(tmp_path / "whole" / name), name
        final = weights(tmp_path / "whole" / name)
        for key, tensor in weights(tmp_path / "parts" / name).items():
            assert torch.equal(tensor, final[key]), (name, key)


@pytest.mark.parametrize(
    ("ranks", "engines"),
    [
        ((4, 1), ("fsdp2",)),
        pytest.param((4, 2, 1, 8), ("fsdp2", "ddp", "zero1", "zero2", "zero3"), marks=pytest.mark.slow),
    ],
)
def test_other_numbers_of_ranks(ranks, engines, dataset, tmp_path):
    """An uninterrupted run of one process, and runs that went on with other numbers of ranks at every start."""
    options = [*COMMON, "--data.path", dataset, "--evaluation.every", "0", "--model.dropout", "0"]
    options += ["--data.workers", "0", "--micro-batch-size", "1"]
    [expected] = run_scenarios.train_all([("debug_hydra", [*options, "--run-dir", str(tmp_path / "whole")])])
    found = {engine: {} for engine in engines}
    for number, world_size in enumerate(ranks, start=1):
        stop = ["--stop-step", str(STEPS * number // len(ranks))]
        runs = [
            ("debug_hydra", [*options, *ENGINES[engine], *stop, "--run-dir", str(tmp_path / engine)])
            for engine in engines
        ]
        read = run_distributed(run_scenarios.train_all, world_size, arguments=(runs,), timeout=300)[0]
        for engine, batches in zip(engines, read, strict=True):
            assert not found[engine].keys() & batches.keys()
            found[engine] |= batches
    assert list(expected) == [1, 2, 3, 4, 5, 6]
    assert len({row for batch in expected.values() for row in batch}) > STEPS * 7  # the batches differ from each other
    for engine in engines:
        assert found[engine] == expected, engine
        for step, (got, want) in enumerate(zip(curve(tmp_path / engine), curve(tmp_path / "whole"), strict=True)):
            assert got == pytest.approx(want, rel=2e-4), (engine, step)

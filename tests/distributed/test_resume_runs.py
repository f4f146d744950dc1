"""Whole runs, data and all, that were stopped and started again: bit for bit with as many ranks, the same global
batches and losses with others."""

from pathlib import Path

import pytest
import run_scenarios
import torch
from harness import run_distributed
from runs import records, weights

from matmix.data.prepare import prepare
from matmix.data.prepare_config import PrepareConfig

STEPS = 6
ENGINES = {
    "fsdp2": ["--engine.name", "fsdp2"],
    "ddp": ["--engine.name", "ddp"],
    **{f"zero{n}": ["--engine.name", "deepspeed", "--engine.zero-stage", str(n)] for n in range(4)},
}
COMMON = ["--device", "cpu", "--steps", str(STEPS), "--checkpoint.every", "0", "--logging.progress", "False"]

# Engine, recipe (a language model; an encoder with masked tokens), format of the shards, reading processes, packing:
# every pair of two of these values occurs. Dropout and accumulation are on in both recipes.
RUNS = [
    ("fsdp2", "debug_hydra", "webdataset", 1, "concat"),
    ("fsdp2", "debug_mru", "mds", 0, "document"),
    ("ddp", "debug_hydra", "mds", 1, "document"),
    ("ddp", "debug_mru", "webdataset", 0, "concat"),
    ("zero1", "debug_mru", "webdataset", 1, "document"),
    ("zero1", "debug_hydra", "mds", 0, "concat"),
    ("zero2", "debug_hydra", "webdataset", 0, "document"),
    ("zero2", "debug_mru", "mds", 1, "concat"),
    ("zero3", "debug_mru", "webdataset", 1, "concat"),
    ("zero3", "debug_hydra", "mds", 0, "document"),
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


def test_as_many_ranks_bit_for_bit(datasets, tmp_path):
    whole, first, second = [], [], []
    for engine, recipe, form, workers, packing in RUNS:
        options = [*COMMON, *ENGINES[engine], "--data.path", datasets[form], "--data.packing", packing]
        options += ["--data.workers", str(workers), "--evaluation.every", "2"]
        whole.append((recipe, [*options, "--run-dir", str(tmp_path / "whole" / f"{engine}-{recipe}")]))
        parts = [*options, "--run-dir", str(tmp_path / "parts" / f"{engine}-{recipe}")]
        first.append((recipe, [*parts, "--stop-step", "3"]))
        second.append((recipe, parts))
    arguments = ([*whole, *first, *second],)
    found = run_distributed(run_scenarios.train_all, 2, arguments=arguments, with_children=True, timeout=600)[0]
    for number, (engine, recipe, *_) in enumerate(RUNS):
        name = f"{engine}-{recipe}"
        expected, stopped, resumed = found[number :: len(RUNS)]
        assert (list(stopped), list(resumed)) == ([1, 2, 3], [4, 5, 6]), name
        assert {**stopped, **resumed} == expected, name
        assert len(curve(tmp_path / "whole" / name)) == STEPS
        assert curve(tmp_path / "parts" / name) == curve(tmp_path / "whole" / name), name
        final = weights(tmp_path / "whole" / name)
        for key, tensor in weights(tmp_path / "parts" / name).items():
            assert torch.equal(tensor, final[key]), (name, key)


@pytest.mark.parametrize("ranks", [(4, 2, 1), pytest.param((4, 2, 1, 8), marks=pytest.mark.slow)])
def test_other_numbers_of_ranks(ranks, dataset, tmp_path):
    """An uninterrupted run of one process, and runs that went on with other numbers of ranks at every start."""
    options = [*COMMON, "--data.path", dataset, "--evaluation.every", "0", "--model.dropout", "0"]
    options += ["--data.workers", "0", "--micro-batch-size", "1"]
    [expected] = run_scenarios.train_all([("debug_hydra", [*options, "--run-dir", str(tmp_path / "whole")])])
    engines = ("fsdp2", "zero2", "zero3")
    found = {engine: {} for engine in engines}
    for number, world_size in enumerate(ranks, start=1):
        stop = ["--stop-step", str(STEPS * number // len(ranks))]
        runs = [
            ("debug_hydra", [*options, *ENGINES[engine], *stop, "--run-dir", str(tmp_path / engine)])
            for engine in engines
        ]
        read = run_distributed(run_scenarios.train_all, world_size, arguments=(runs,))[0]
        for engine, batches in zip(engines, read, strict=True):
            assert not found[engine].keys() & batches.keys()
            found[engine] |= batches
    assert list(expected) == [1, 2, 3, 4, 5, 6]
    assert len({row for batch in expected.values() for row in batch}) > STEPS * 7  # the batches differ from each other
    for engine in engines:
        assert found[engine] == expected, engine
        for step, (got, want) in enumerate(zip(curve(tmp_path / engine), curve(tmp_path / "whole"), strict=True)):
            assert got == pytest.approx(want, rel=2e-5), (engine, step)

"""A mesh with a dimension more: what a run computes and saves is what it is without."""

import json

import mesh_scenario
import pytest
from harness import run_distributed
from nightly import nightly
from runs import records, weights
from test_generated_tasks import RECIPE

from matmix.train.engine.config import EngineConfig
from matmix.train.engine.mesh import Dimension, MeshShape

NUMBERS = ("step", "loss", "grad_norm", "tokens", "skipped")


def test_places_of_ranks():
    """Copies and shards are given data of their own; ranks that share a context hold the same data."""
    shape = MeshShape([Dimension("replicate", 2), Dimension("shard", 2, shards=True), Dimension("context", 2, "part")])
    assert (shape.size, shape.data_size, shape.parts, shape.copies) == (8, 4, 2, 4)
    assert [shape.data_rank_of(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [shape.part_of(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    for name, parts in (("fsdp2", 4), ("ddp", 1)):
        shape = MeshShape.of(EngineConfig(name=name, context=2, replicate=2 if name == "fsdp2" else 1), 8)
        assert (shape.data_size, shape.parts, shape.copies) == (4, parts, 8 // parts)
        assert [shape.data_rank_of(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
        assert [shape.part_of(rank) for rank in range(8)] == [rank % parts for rank in range(8)]
    hybrid = MeshShape.of(EngineConfig(replicate=2), 6)
    assert [(hybrid.data_rank_of(rank), hybrid.part_of(rank)) for rank in range(6)] == [
        *((0, 0), (1, 1), (2, 2)),
        *((3, 0), (4, 1), (5, 2)),
    ]


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    recipe = tmp_path_factory.mktemp("recipe") / "recipe.toml"
    recipe.write_text(RECIPE.replace("steps = 3", "steps = 4"))
    kinds = {"fsdp2": [], "ddp": ["--engine.name", "ddp"], "dropout": ["--model.dropout", "0.2"]}

    def runs(folder, names, *overrides):
        common = ["--faults.replica-check-every", "1", "--micro-batch-size", "2", *overrides]
        return [(str(recipe), ["--run-dir", str(folder / name), *kinds[name], *common]) for name in names]

    return runs


@pytest.fixture(scope="module")
def expected(options, tmp_path_factory):
    """Makes uninterrupted runs on two ranks without the toy, once each."""
    folder = tmp_path_factory.mktemp("expected")

    def runs(names):
        missing = [name for name in names if not (folder / name).exists()]
        run_distributed(mesh_scenario.train_all, 2, arguments=(options(folder, missing), ""))
        return folder

    return runs


@pytest.mark.slow
@pytest.mark.parametrize(
    "toys",
    [("parts of batches and weights", ""), nightly(("", "parts of batches")), nightly(("parts of gradients", ""))],
)
def test_a_dimension_more_changes_no_number(toys, options, expected, tmp_path):
    """The first steps with the toy, on two data ranks times two, and the others without it, or the other way round."""
    # Ranks that compute parts of a batch drop other elements than one that computes it whole.
    names = ["fsdp2", "ddp", *["dropout"] * ("parts of gradients" in toys)]
    whole = expected(names)
    for toy, stop in zip(toys, (["--stop-step", "2"], []), strict=True):
        run_distributed(mesh_scenario.train_all, 4 if toy else 2, arguments=(options(tmp_path, names, *stop), toy))
    for name in names:
        folder = whole / name
        for got, want in zip(records(tmp_path / name), records(folder), strict=True):
            assert {key: got[key] for key in NUMBERS} == pytest.approx({key: want[key] for key in NUMBERS}, rel=1e-5)
        final = weights(folder)
        for key, tensor in weights(tmp_path / name).items():
            assert tensor.flatten().tolist() == pytest.approx(final[key].flatten().tolist(), abs=1e-6), (name, key)
        one, two = (json.loads((run / "summary.json").read_text())["validation"] for run in (folder, tmp_path / name))
        assert two == pytest.approx(one, rel=1e-4, abs=1e-5), name


def test_checkpoints_may_be_cut_along_any_dimension(tmp_path):
    assert run_distributed(mesh_scenario.saved_in_columns, 2, arguments=(str(tmp_path),)) == [[True] * 3] * 2

"""Ranks that share the rows of a micro-batch train and measure as those that have whole rows."""

import pytest
import scenarios
from harness import run_distributed
from runs import records

RECIPE = """
steps = 6
global_batch_size = 8
micro_batch_size = 2
device = "cpu"
[model]
architecture = "encoder"
d_model = 16
n_layers = 2
layers = ["none"]
position_embeddings = true
max_seqlen = 32
[data]
seqlen = 32
prefix = "cls"
suffix = "sep"
workers = 0
[objective]
name = "masked_lm"
[optimizer]
lr = 1e-2
[faults]
replica_check_every = 2
[evaluation]
every = 3
batches = 0
ablation_batches = 2
[checkpoint]
every = 0
[logging]
every = 1
tensorboard = false
picture = false
progress = false
"""
CAUSAL = ["--model.architecture", "language_model", "--model.position-embeddings", "False", "--data.prefix", "bos"]
CAUSAL += ["--data.suffix", "eos", "--objective.name", "causal_lm"]
RUNS = {
    "concat": [],
    "document": ["--data.packing", "document", "--ema.decay", "0.9"],
    "rows": ["--data.packing", "rows"],
    "causal": [*CAUSAL, "--micro-batch-size", "1"],
    "causal documents": [*CAUSAL, "--data.packing", "document"],
    "generated": [*CAUSAL, "--data.packing", "rows", "--data.synthetic.task", "mqar", "--data.synthetic.items", "3"],
}
FSDP2, DDP, HSDP = [], ["--engine.name", "ddp"], ["--engine.replicate", "2"]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    path = tmp_path_factory.mktemp("recipe") / "recipe.toml"
    path.write_text(RECIPE)
    return str(path)


@pytest.fixture(scope="module")
def planned(recipe, dataset):
    def run(folder, name, *options):
        data = [] if name == "generated" else ["--data.path", dataset]
        return recipe, [*data, "--run-dir", str(folder / name), *RUNS[name], *options]

    return run


@pytest.fixture(scope="module")
def expected(planned, tmp_path_factory):
    """Runs of one process."""
    folder = tmp_path_factory.mktemp("expected")
    scenarios.train_recipes([planned(folder, name) for name in RUNS])
    return folder


def assert_same_run(folder, expected):
    """All numbers of training and evaluations, but for those of time and memory."""
    for kind in ("train", "validation"):
        for got, wanted in zip(records(folder, kind), records(expected, kind), strict=True):
            same = [key for key in wanted if not key.startswith(("goodput/", "tokens_per", "seconds_", "data_wait"))]
            for key in set(same) - {"kind", "memory", "time"}:
                assert got[key] == pytest.approx(wanted[key], rel=1e-4, abs=1e-5), (folder.name, kind, key)


@pytest.mark.parametrize(
    ("ranks", "context", "engines"), [(2, 2, (FSDP2, DDP)), (4, 2, (HSDP, FSDP2)), (4, 4, (DDP, FSDP2))]
)
def test_numbers_are_those_of_one_rank(ranks, context, engines, planned, expected, tmp_path):
    runs = [
        planned(tmp_path, name, "--engine.context", str(context), *engines[number % 2])
        for number, name in enumerate(RUNS)
    ]
    run_distributed(scenarios.train_recipes, ranks, arguments=(runs,))
    for name in RUNS:
        assert_same_run(tmp_path / name, expected / name)

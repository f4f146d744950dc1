"""A run begins with the same weights on every engine and on any number of ranks."""

import init_scenario
import pytest
from beginnings import first_weights
from harness import run_distributed
from nightly import nightly
from runs import losses, run_recipe

ENGINES = {
    "fsdp2": ["--engine.name", "fsdp2"],
    "ddp": ["--engine.name", "ddp"],
    **{f"zero{n}": ["--engine.name", "deepspeed", "--engine.zero-stage", str(n)] for n in range(4)},
}


@pytest.mark.parametrize("engines", [("fsdp2", "zero3"), nightly(tuple(ENGINES))])
def test_every_engine_begins_with_the_same_weights(engines, dataset, tmp_path):
    """Part of the rows of the vocabulary and one layer are new; the source's rows end within what a rank holds."""
    source = tmp_path / "source"
    run_recipe("debug_hydra", dataset, source, "--steps", "1", "--evaluation.batches", "1")
    changes = ["--seed", "5", "--model.vocab-size", "384", "--init.from", str(source), "--init.ignore", "blocks.1.*"]
    common = ["--data.path", dataset, *changes, "--logging.progress", "False"]
    one = first_weights("debug_hydra", [*common, "--run-dir", str(tmp_path / "one")])
    expected = {name: tensor.tolist() for name, tensor in one.items()}
    runs = [(name, [*common, *ENGINES[name], "--run-dir", str(tmp_path / name)]) for name in engines]
    recipe = tmp_path / "phases.toml"
    recipe.write_text("steps = 1\nglobal_batch_size = 2\ndevice = 'cpu'\n[[phase]]\n[[phase]]\ndata.seqlen = 32\n")
    model = ["--model.layers", "attention", "--model.d-model", "16", "--model.n-layers", "1", "--data.seqlen", "16"]
    model += ["--model.mixers.attention.headdim", "8"]
    phases = [str(recipe), "--data.path", dataset, "--data.workers", "0", *model, "--run-dir", str(tmp_path / "phases")]
    for found, code in run_distributed(init_scenario.begin_all, 2, arguments=(runs, phases), timeout=200):
        assert list(found) == list(engines)
        assert [name for name, weights in found.items() if weights != expected] == []
        assert code == 0
    assert len(losses(tmp_path / "phases" / "phase-2")) == 1

"""A run begins with the same weights on every engine and on any number of ranks, of which each reads its own part."""

import init_scenario
import pytest
from beginnings import first_weights
from harness import run_distributed
from nightly import nightly
from paths import GOLDEN
from runs import losses, run_recipe
from safetensors import safe_open
from safetensors.torch import save_file

from matmix.train.config import InitConfig
from matmix.train.entry import main
from matmix.train.init import source_of
from matmix.use.exporting import export_run

ENGINES = {
    "fsdp2": ["--engine.name", "fsdp2"],
    "ddp": ["--engine.name", "ddp"],
    **{f"zero{n}": ["--engine.name", "deepspeed", "--engine.zero-stage", str(n)] for n in range(4)},
}
SHARDED = ("fsdp2", "zero3")
"""Of which each rank holds a part of the weights."""


def write_source(kind, dataset, folder) -> list[str]:
    """Writes a source and returns the options that begin with it: part of the rows of the vocabulary and one layer are
    new; the source's rows end within what a rank holds."""
    common = ["--seed", "5", "--model.vocab-size", "384", "--init.ignore", "blocks.1.*", "--init.from"]
    if kind == "checkpoint":  # of the papers' code, in half precision
        with safe_open(GOLDEN / "hydra_mlm_postnorm.safetensors", "pt") as file:
            keys = [key for key in file.keys() if key.startswith("state.")]  # noqa: SIM118
            state = {key.removeprefix("state."): file.get_tensor(key).bfloat16() for key in keys}
            save_file(state, folder / "weights.safetensors", metadata=file.metadata())
        sizes = ["--model.d-model", "64", "--model.n-layers", "3", "--model.layers", "hydra", "--model.mlp-ratio", "0"]
        sizes += ["--model.norm", "post", "--model.norm-bias", "True", "--model.mixers.hydra.d-state", "16"]
        return [*sizes, *common, str(folder / "weights.safetensors")]
    run_recipe("debug_hydra", dataset, folder / "source", "--steps", "1", "--evaluation.batches", "1")
    if kind == "export":
        export_run(folder / "source", folder / "export")
        return [*common, str(folder / "export")]
    return [*common, str(folder / "source")]


@pytest.mark.parametrize(
    ("kind", "engines"),
    [
        ("run", SHARDED),
        ("export", ("fsdp2",)),
        ("checkpoint", ("fsdp2",)),
        *(nightly(kind, tuple(ENGINES)) for kind in ("run", "export", "checkpoint")),
    ],
)
def test_every_engine_begins_with_the_same_weights(kind, engines, dataset, tmp_path):
    *options, source = write_source(kind, dataset, tmp_path)
    common = ["--data.path", dataset, *options, source, "--logging.progress", "False"]
    one = first_weights("debug_hydra", [*common, "--run-dir", str(tmp_path / "one")])
    expected = {name: tensor.tolist() for name, tensor in one.items()}
    runs = [(name, [*common, *ENGINES[name], "--run-dir", str(tmp_path / name)]) for name in engines]
    ranks = run_distributed(init_scenario.begin_all, 2, arguments=(runs,), timeout=200)
    for found, _ in ranks:
        assert list(found) == list(engines)
        assert [name for name, weights in found.items() if weights != expected] == []
    entries = source_of(InitConfig(from_=source)).state.entries
    taken = {f"model.{key}": entries[f"model.{key}"].numel for key in expected if not key.startswith("blocks.1.")}
    for name in engines:
        read = {key: sum(read[name][key] for _, read in ranks) for key in taken}
        assert read == {key: size if name in SHARDED else 2 * size for key, size in taken.items()}, name


@pytest.mark.slow
def test_phases_begin_on_several_ranks(dataset, tmp_path):
    recipe = tmp_path / "phases.toml"
    recipe.write_text("steps = 1\nglobal_batch_size = 2\ndevice = 'cpu'\n[[phase]]\n[[phase]]\ndata.seqlen = 32\n")
    model = ["--model.layers", "attention", "--model.d-model", "16", "--model.n-layers", "1", "--data.seqlen", "16"]
    model += ["--model.mixers.attention.headdim", "8"]
    phases = [str(recipe), "--data.path", dataset, "--data.workers", "0", *model, "--run-dir", str(tmp_path / "phases")]
    assert run_distributed(init_scenario.train_phases, 2, arguments=(phases,), timeout=200) == [0, 0]
    assert len(losses(tmp_path / "phases" / "phase-2")) == 1


@pytest.mark.slow
def test_a_ramp_that_one_rank_began_goes_on_on_several_in_the_middle(dataset, tmp_path):
    recipe = tmp_path / "ramp.toml"
    head = "steps = 4\nglobal_batch_size = 8\ndevice = 'cpu'\nlogging.every = 1\n"
    recipe.write_text(f"{head}[ramp]\ntokens = 96\nseqlen = [8]\nglobal_batch_size = [4]\n")
    model = ["--model.layers", "attention", "--model.d-model", "16", "--model.n-layers", "1", "--data.seqlen", "16"]
    model += [
        "--model.mixers.attention.headdim",
        "8",
        "--evaluation.batches",
        "1",
        "--evaluation.ablation-batches",
        "0",
    ]
    common = [str(recipe), "--data.path", dataset, "--data.workers", "0", *model, "--run-dir"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main([*common, str(whole)]) == 0
    assert main([*common, str(parts), "--stop-step", "2"]) == 0
    assert run_distributed(init_scenario.train_phases, 2, arguments=([*common, str(parts)],), timeout=200) == [0, 0]
    for phase, steps in (("phase-1", 3), ("phase-2", 1)):
        assert len(losses(parts / phase)) == steps
        assert losses(parts / phase) == pytest.approx(losses(whole / phase), rel=2e-4)


def test_a_rank_reads_those_parts_of_a_sharded_run_that_it_needs(dataset, tmp_path):
    """Of a run of two ranks each of two ranks reads what one of them wrote."""
    common = ["--data.path", dataset, "--logging.progress", "False"]
    source = [*common, "--steps", "1", "--evaluation.batches", "1", "--run-dir", str(tmp_path / "source")]
    begin = [*common, "--seed", "5", "--init.from", str(tmp_path / "source"), "--run-dir", str(tmp_path / "run")]
    ranks = run_distributed(init_scenario.train_and_begin, 2, arguments=(source, begin), timeout=200)
    for same, read, stored in ranks:
        assert same
        assert 0.4 * stored < read < 0.6 * stored

"""An optimizer is one file (toy_momentum.py) and one line in the table of train/optim (optimizer_scenario.register):
engines, checkpoints, conversions and estimates ask it for what it keeps, and AdamW updates what it cannot."""

from __future__ import annotations

import math
import re

import convert_scenarios
import optimizer_scenario
import pytest
import torch
from harness import run_distributed
from runs import losses

from matmix.model import build_model
from matmix.train.estimate.plan import make_plan, print_plan
from matmix.train.optim import OPTIMIZERS
from matmix.train.optim.config import OptimizerConfig, RuleConfig
from matmix.train.optim.groups import make_optimizer, parameter_groups
from matmix.train.recipe import load_config
from matmix.use.exporting import convert_run

ADAMW = {"exp_avg", "exp_avg_sq", "step"}


@pytest.fixture(autouse=True)
def toys():
    before = dict(OPTIMIZERS)
    optimizer_scenario.register()
    yield
    OPTIMIZERS.clear()
    OPTIMIZERS.update(before)


def kept(run) -> dict[str, set[str]]:
    """Name of each parameter -> what the newest checkpoint of a run holds of it."""
    contents = convert_scenarios.contents(max((run / "checkpoints").glob("step-*")))
    entries: dict[str, set[str]] = {}
    for key in contents:
        if key.startswith("optimizer."):
            name, entry = key.removeprefix("optimizer.").rsplit(".", 1)
            entries.setdefault(name, set()).add(entry)
    return entries


def options_of(run, dataset, *more: str) -> list[str]:
    common = ["--data.path", dataset, "--run-dir", str(run), "--device", "cpu", "--model.dropout", "0"]
    common += ["--micro-batch-size", "1", "--steps", "6", "--checkpoint.every", "0", "--evaluation.every", "0"]
    return [*common, "--logging.progress", "False", "--gc-every", "0", *more]


def travel(dataset, folder, name: str, engines: list[str], *, own: list[str] = ()) -> None:
    """Trains one run as a whole and, with each engine, one that goes from 2 ranks to 4 and, converted, to 1."""
    optimizer = ["--optimizer.name", name, *own]
    recipe = "debug_mru"
    optimizer_scenario.train_all([(recipe, options_of(folder / "whole", dataset, *optimizer))])
    for ranks, stop in ((2, "2"), (4, "4")):
        legs = [
            (recipe, options_of(folder / engine, dataset, *optimizer, "--engine.name", engine, "--stop-step", stop))
            for engine in engines
        ]
        run_distributed(optimizer_scenario.train_all, ranks, arguments=(legs,))
    for engine in engines:
        convert_run(folder / engine, folder / f"{engine}-converted")
        last = options_of(folder / f"{engine}-converted", dataset, *optimizer, "--engine.name", "fsdp2")
        optimizer_scenario.train_all([(str(folder / f"{engine}-converted"), last)])


@pytest.mark.slow
def test_it_is_sharded_saved_converted_and_resumed_at_other_numbers_of_ranks(dataset, tmp_path):
    travel(dataset, tmp_path, "momentum", ["fsdp2", "ddp"])
    whole = losses(tmp_path / "whole")
    assert whole[-1] < whole[0] - 0.1
    for engine in ("fsdp2", "ddp"):
        assert losses(tmp_path / f"{engine}-converted") == pytest.approx(whole, rel=1e-5)
        for run in (tmp_path / engine, tmp_path / f"{engine}-converted"):
            entries = kept(run)
            assert {frozenset(own) for own in entries.values()} == {frozenset({"momentum"}), frozenset(ADAMW)}
            assert entries["blocks.0.mlp.up.weight"] == {"momentum"}
            assert entries["embedding.weight"] == entries["norm.weight"] == ADAMW


def test_muon_resumes_bit_for_bit(dataset, tmp_path):
    muon = ["--optimizer.name", "muon", "--optimizer.lr", "5e-3", "--ema.decay", "0.9"]
    whole, parts = (options_of(tmp_path / name, dataset, *muon) for name in ("whole", "parts"))
    optimizer_scenario.train_all(
        [("debug_mru", whole), ("debug_mru", [*parts, "--stop-step", "3"]), ("debug_mru", parts)]
    )
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert losses(tmp_path / "whole")[-1] < losses(tmp_path / "whole")[0] - 0.1
    assert kept(tmp_path / "whole")["blocks.0.mlp.up.weight"] == {"momentum", "ema", "ema_step"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tolerance"),
    [("muon", 1e-5), ("adafactor", 1e-5), ("soap", 2e-3), ("small_blocks:AdamW8bit", 1e-5)],
)
def test_optimizers_of_matrices_travel_between_engines_and_numbers_of_ranks(name, tolerance, dataset, tmp_path):
    """SOAP enlarges rounding: by up to 1e-4 here, where eigenvalues are small or nearly alike."""
    travel(dataset, tmp_path, name, ["fsdp2", "ddp"])
    for engine in ("fsdp2", "ddp"):
        assert losses(tmp_path / f"{engine}-converted") == pytest.approx(losses(tmp_path / "whole"), rel=tolerance)


@pytest.mark.slow
def test_muon_in_a_context_ends_with_the_weights_of_one_process(dataset, tmp_path):
    """The parts of a context hold rows as other ranks do, or copies."""

    def run(name: str, *own: str) -> tuple[str, list[str]]:
        return "debug_mru", options_of(tmp_path / name, dataset, "--optimizer.name", "muon", "--steps", "20", *own)

    optimizer_scenario.train_all([run("whole")])
    engines = ("fsdp2", "ddp")
    runs = [run(engine, "--engine.name", engine, "--engine.context", "2") for engine in engines]
    run_distributed(optimizer_scenario.train_all, 4, arguments=(runs,))
    ends = {
        name: convert_scenarios.contents(max((tmp_path / name / "checkpoints").glob("step-*")))
        for name in ("whole", *engines)
    }
    for engine in engines:
        for name, tensor in ends["whole"].items():
            if name.startswith("model."):
                torch.testing.assert_close(ends[engine][name], tensor, rtol=0, atol=1e-5, msg=f"{engine} {name}")


@pytest.mark.slow
def test_deepspeed_takes_it_up(dataset, tmp_path):
    """From FSDP2 to ZeRO-2 and ZeRO-3 and back, on two ranks: the curve of an uninterrupted run."""
    optimizer, recipe = ["--optimizer.name", "momentum"], "debug_mru"
    optimizer_scenario.train_all([(recipe, options_of(tmp_path / "whole", dataset, *optimizer))])
    legs = [
        ("a", "fsdp2", "2", "2"),
        ("b", "deepspeed", "2", "3"),
        ("c", "deepspeed", "3", "5"),
        ("d", "ddp", "2", "6"),
    ]
    for number, (name, engine, stage, stop) in enumerate(legs):
        if number:
            convert_run(tmp_path / legs[number - 1][0], tmp_path / name)
            recipe = str(tmp_path / name)
        own = ["--engine.name", engine, "--engine.zero-stage", stage, "--stop-step", stop]
        runs = [(recipe, options_of(tmp_path / name, dataset, *optimizer, *own))]
        run_distributed(optimizer_scenario.train_all, 2, arguments=(runs,))
        assert kept(tmp_path / name)["blocks.0.mlp.up.weight"] == {"momentum"}
    assert losses(tmp_path / "d") == pytest.approx(losses(tmp_path / "whole"), rel=1e-4)


@pytest.mark.slow
def test_entries_may_have_other_shapes_and_types(dataset, tmp_path):
    travel(dataset, tmp_path, "whole", ["fsdp2", "ddp"])
    for engine in ("fsdp2", "ddp"):
        assert losses(tmp_path / f"{engine}-converted") == pytest.approx(losses(tmp_path / "whole"), rel=1e-2)
        contents = convert_scenarios.contents(max((tmp_path / engine / "checkpoints").glob("step-*")))
        name = "blocks.0.mlp.up.weight"
        rows, weight = contents[f"optimizer.{name}.rows"], contents[f"model.{name}"]
        assert (rows.shape, rows.dtype) == (weight.shape[:1], torch.bfloat16)


@pytest.mark.slow
def test_plans_count_what_it_keeps(capsys):
    recipe = ["--model.vocab-size", "300", "--optimizer.name"]
    config = load_config("debug_mru", [*recipe, "momentum"])
    adamw, momentum, lion, adafactor = (
        make_plan(load_config("debug_mru", [*recipe, name]), 2) for name in ("adamw", "momentum", "lion", "adafactor")
    )
    rows = make_plan(load_config("debug_mru", [*recipe, "whole"]), 1)
    shapes = {name: parameter.shape for name, parameter in build_model(config.model, device="meta").named_parameters()}
    matrices = [shape for name, shape in shapes.items() if len(shape) == 2 and not name.startswith("embedding")]
    taken = sum(map(math.prod, matrices))
    assert adamw.parts["moments"] == 4 * 2 * adamw.parameters / 2
    assert momentum.parts["moments"] == 4 * (2 * adamw.parameters - taken) / 2
    muon = load_config("debug_mru", [*recipe, "muon", "--optimizer.options", '{dtype = "bfloat16"}'])
    maps = [shape for name, shape in shapes.items() if re.match(r"blocks\..*(out_proj|up|down)\.weight", name)]
    assert make_plan(muon, 4).sizes.to_owners == sum(map(math.prod, maps)) / 2
    refused = [*recipe, "muon", "--engine.name", "deepspeed", "--engine.zero-stage", "3"]
    with pytest.raises(ValueError, match="Muon does not update each element by itself"):
        make_plan(load_config("debug_mru", refused), 2)
    assert rows.parts["moments"] == 4 * 2 * (adamw.parameters - taken) + 2 * sum(shape[0] for shape in matrices)
    assert lion.parts["moments"] == 4 * adamw.parameters / 2
    sums = [math.prod(shape[:-2]) * sum(shape[-2:]) for shape in shapes.values() if len(shape) > 1]
    vectors = sum(math.prod(shape) for shape in shapes.values() if len(shape) == 1)
    assert adafactor.parts["moments"] == 4 * (sum(sums) + vectors / 2)  # the sums are on both ranks
    wide = load_config("debug_mru", [*recipe, "adamw_8bit", "--model.d-model", "80"])
    model = build_model(wide.model, device="cpu")
    optimizer = make_optimizer(model, wide.optimizer, 32)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    held = [one.nbytes for _, entries in optimizer.named_state() for one in entries.values() if one.dim()]
    assert [make_plan(wide, ranks).parts["moments"] for ranks in (1, 2)] == [sum(held), sum(held) / 2]
    assert sum(held) < 0.4 * 4 * 2 * sum(parameter.numel() for parameter in model.parameters())
    refused = [*recipe, "adamw_8bit", "--model.d-model", "80", "--engine.name", "deepspeed", "--engine.zero-stage", "1"]
    with pytest.raises(ValueError, match="AdamW8bit does not update each element by itself"):
        make_plan(load_config("debug_mru", refused), 2)
    print_plan(config)
    said = capsys.readouterr().out
    assert "momentum, which keeps momentum, learning rate" in said
    assert "adamw, which keeps step, exp_avg, exp_avg_sq, learning rate" in said


def test_rules_choose_an_optimizer_by_name():
    config = load_config("debug_mru", ["--model.vocab-size", "64"])
    model = build_model(config.model, device="meta")
    rule = RuleConfig(match="blocks.*.mlp.*.weight", optimizer="momentum")
    optimizer = make_optimizer(model, OptimizerConfig(rule=(rule,)), 32)
    chosen = {name: group["optimizer"] for name, _, group in optimizer.named_parameters()}
    assert {name for name, own in chosen.items() if own == "momentum"} == {
        name for name in chosen if ".mlp." in name and name.endswith(".weight")
    }
    assert set(chosen.values()) == {"momentum", "adamw"}
    with pytest.raises(ValueError, match=r'rule "\*norm\*": the optimizer momentum cannot update .*norm.*\(32,\)'):
        parameter_groups(model, OptimizerConfig(rule=(RuleConfig(match="*norm*", optimizer="momentum"),)), 32)


def test_a_checkpoint_of_another_optimizer_is_refused(dataset, tmp_path):
    run = options_of(tmp_path / "run", dataset, "--stop-step", "1")
    optimizer_scenario.train_all([("debug_mru", run)])
    rule = '{match = "*.mlp.up.weight", optimizer = "momentum"}'
    with pytest.raises(ValueError, match=r"keeps exp_avg \[.*\], step of blocks.0.mlp.up.weight, .* keeps momentum \["):
        optimizer_scenario.train_all([("debug_mru", [*run, "--steps", "7", "--optimizer.rule", rule])])

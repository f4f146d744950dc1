"""docs/adding-an-optimizer.md works: its optimizer and its callback, each one file from outside, do what it says."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import convert_scenarios
import pytest
import run_scenarios
import torch
from harness import run_distributed
from runs import losses, run_recipe, weights

from matmix.train.estimate.plan import make_plan
from matmix.train.recipe import config_from_dict, load_config
from matmix.use.exporting import convert_run

PAGE = (Path(__file__).resolve().parents[2] / "docs/adding-an-optimizer.md").read_text(encoding="utf-8")
LION = ["--optimizer.name", "lion:Lion", "--optimizer.lr", "1e-3", "--optimizer.options", "{memory = 0.98}"]
WHOLE_MATRICES = """
from lion import Lion

class Whole(Lion):
    elementwise = False

class Silent(Lion.__base__):
    pass
"""


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.fixture(autouse=True)
def modules(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("outside")
    for name, text in zip(("lion", "notes"), code_blocks("python"), strict=True):
        (folder / f"{name}.py").write_text(text)
    (folder / "others.py").write_text(WHOLE_MATRICES)
    monkeypatch.syspath_prepend(str(folder))


def contents(run: Path) -> dict[str, torch.Tensor]:
    return convert_scenarios.contents(max((run / "checkpoints").glob("step-*")))


def test_the_recipe_s_tables_are_what_the_command_line_says():
    optimizer, callback = (tomllib.loads(text) for text in code_blocks("toml"))
    config = config_from_dict({**optimizer, **callback, "model": {"layers": ["mru"]}}, "the page")
    assert (config.optimizer.name, config.optimizer.options) == ("lion:Lion", {"memory": 0.98})
    assert (config.callback[0].name, config.callback[0].options) == ("notes:Notes", {"every": 2})
    assert load_config("debug_mru", LION).optimizer.options == {"memory": 0.98}


def test_it_learns_and_resumes_bit_for_bit(dataset, tmp_path):
    notes = "{name = 'notes:Notes', options = {every = 2}}"
    run_recipe("debug_mru", dataset, tmp_path / "whole", *LION, "--callback", notes)
    run_recipe("debug_mru", dataset, tmp_path / "parts", *LION, "--stop-step", "3")
    run_recipe("debug_mru", dataset, tmp_path / "parts", *LION)
    assert losses(tmp_path / "whole")[-1] < losses(tmp_path / "whole")[0] - 0.1
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    expected = contents(tmp_path / "whole")
    assert {key.rsplit(".", 1)[1] for key in expected if key.startswith("optimizer.")} == {"momentum"}
    assert all(torch.equal(tensor, expected[key]) for key, tensor in contents(tmp_path / "parts").items())
    assert (tmp_path / "whole" / "notes.txt").read_text().startswith("step 2: ")
    with pytest.raises(ValueError, match=r"another config .*optimizer\.name: "):
        run_recipe("debug_mru", dataset, tmp_path / "parts", "--steps", "12")


@pytest.mark.slow
def test_other_ranks_and_other_engines_take_it_up(dataset, tmp_path):
    """FSDP2 on one rank, then on two; converted to ZeRO-2, ZeRO-3 and back: the curve of an uninterrupted run."""
    common = [*LION, "--data.path", dataset, "--device", "cpu", "--model.dropout", "0", "--micro-batch-size", "1"]
    common += ["--checkpoint.every", "0", "--evaluation.every", "0", "--logging.progress", "False", "--gc-every", "0"]
    run_scenarios.train_all([("debug_mru", [*common, "--run-dir", str(tmp_path / "whole")])])
    run_scenarios.train_all([("debug_mru", [*common, "--run-dir", str(tmp_path / "a"), "--stop-step", "2"])])
    legs = [("a", "fsdp2", "2", 4), ("b", "deepspeed", "2", 5), ("c", "deepspeed", "3", 6), ("d", "fsdp2", "2", 8)]
    recipe = "debug_mru"
    for number, (name, engine, stage, stop) in enumerate(legs):
        if number:
            before = tmp_path / legs[number - 1][0]
            convert_run(before, tmp_path / name)
            converted, recipe = contents(tmp_path / name), str(tmp_path / name)
            assert all(torch.equal(tensor, converted[key]) for key, tensor in contents(before).items())
            assert any(key.endswith(".momentum") and tensor.any() for key, tensor in converted.items())
        options = [*common, "--engine.name", engine, "--engine.zero-stage", stage, "--run-dir", str(tmp_path / name)]
        runs = [(recipe, [*options, "--stop-step", str(stop)])]
        run_distributed(run_scenarios.train_all, 2, arguments=(runs,), timeout=300)
    # A sign turns where a gradient is no more than rounding, so that weights may be apart by a few steps of lr.
    assert losses(tmp_path / "d") == pytest.approx(losses(tmp_path / "whole"), rel=2e-3)
    whole = weights(tmp_path / "whole")
    apart = [(tensor - whole[name]).abs().max() for name, tensor in weights(tmp_path / "d").items()]
    assert max(apart) <= 2 * 8 * 1e-3


def test_the_estimate_of_memory_counts_what_it_keeps():
    config = ["--model.vocab-size", "300"]
    adamw, lion = (make_plan(load_config("debug_mru", [*config, *own]), 2) for own in ([], LION))
    assert lion.parts["moments"] == adamw.parts["moments"] / 2 > 0
    assert lion.parts["weights"] == adamw.parts["weights"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--optimizer.name", "adam"], "unknown optimizer 'adam'; did you mean 'adamw'"),
        (["--optimizer.name", "lion:Tiger"], "lion has no Tiger"),
        (["--optimizer.name", "lion:torch"], "is not a subclass of matmix.train.optim.Optimizer"),
        (["--optimizer.name", "others:Silent"], "does not say what it keeps"),
        (["--optimizer.name", "lion:Lion", "--optimizer.options", "{memry = 1}"], '"memry"; the nearest .* "memory"'),
        (["--optimizer.options", "{betas = 1}"], 'unknown key "betas"'),
        (["--optimizer.name", "others:Whole", "--engine.name", "deepspeed"], "cuts parameters into pieces"),
    ],
)
def test_what_cannot_be_is_one_line(options, words, dataset, tmp_path):
    with pytest.raises(ValueError, match=words) as error:
        run_recipe("debug_mru", dataset, tmp_path / "run", *options)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()

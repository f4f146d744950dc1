"""docs/adding-an-optimizer.md works: its optimizer and its callback, each one file from outside, do what it says."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import convert_scenarios
import pytest
import torch
from runs import losses, run_recipe

from matmix.train.recipe import config_from_dict, load_config

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
        (
            ["--optimizer.name", "muon", "--engine.name", "deepspeed", "--engine.zero-stage", "3"],
            r"Muon does not update each .* use stage 0, or engine\.name = \"fsdp2\"",
        ),
        (["--optimizer.name", "muon", "--optimizer.options", "{momentum = 1.0}"], r"options\.momentum must lie in"),
    ],
)
def test_what_cannot_be_is_one_line(options, words, dataset, tmp_path):
    with pytest.raises(ValueError, match=words) as error:
        run_recipe("debug_mru", dataset, tmp_path / "run", *options)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()

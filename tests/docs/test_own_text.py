"""The recipe of the page "Your own text, start to finish", and what the page makes of it."""

import re
import tomllib

import pytest
from paths import ROOT

from matmix.launch.lab.compare.config import read_comparison
from matmix.train.command import train_recipe
from matmix.train.recipe import load_config

RECIPE = ROOT / "docs/examples/own_text.toml"
PAGE = (ROOT / "docs/own-text.md").read_text()
SMALL = ["--model.d-model", "32", "--model.n-layers", "2", "--model.mixers.hydra.headdim", "16", "--data.seqlen", "32"]
SMALL += ["--global-batch-size", "4", "--data.workers", "0", "--engine.precision", "fp32", "--device", "cpu"]


def changes(run_dir: str) -> list[str]:
    """The options of the page's command that trains the recipe into this directory."""
    lines = PAGE.replace("\\\n", " ").splitlines()
    (line,) = [line for line in lines if re.search(rf"matmix train own_text.toml .*--run-dir {run_dir}( |$)", line)]
    return line.split()[3:]


def test_the_page_shows_the_file():
    assert '--8<-- "docs/examples/own_text.toml"' in PAGE
    assert "(examples/own_text.toml)" in PAGE


def test_every_line_of_the_recipe_is_explained():
    assert [line for line in RECIPE.read_text().splitlines() if re.match(r"\w+ = ", line) and "#" not in line] == []


def test_the_dry_run_counts_the_epochs(dataset, capsys):
    assert train_recipe(str(RECIPE), ["--data.path", dataset, "--model.n-layers", "1"], dry_run=True) == 0
    shown = capsys.readouterr().out
    assert "(epochs = 2)" in shown
    assert "256 sequences of 512 = 131k tokens; 1 rank(s) x 4 micro-batch(es) of 64" in shown


def test_eight_ranks_take_less_than_the_ceiling_as_the_page_says():
    config = load_config(str(RECIPE))
    assert config.micro_batch(8) == 32
    assert "takes 32 of the 256 sequences" in PAGE


def test_it_trains(dataset, tmp_path):
    steps = ["--epochs", "0", "--steps", "2", "--evaluation.every", "0", "--evaluation.batches", "1"]
    run = ["--data.path", dataset, "--run-dir", str(tmp_path / "run"), *SMALL, *steps]
    assert train_recipe(str(RECIPE), run) == 0
    assert (tmp_path / "run/checkpoints/step-00000002").is_dir()


@pytest.mark.parametrize(
    ("run_dir", "layers", "causal"),
    [
        ("runs/tiny", ("hydra",), False),
        ("runs/own_text_attention", ("attention",), False),
        ("runs/own_text_no_mixer", ("none",), False),
        ("runs/own_text_lm", ("matrix_memory",), True),
    ],
)
def test_what_the_page_changes_of_it_is_a_recipe(run_dir, layers, causal):
    config = load_config(str(RECIPE), changes(run_dir))
    assert (config.run_dir, config.model.layers, config.model.causal) == (run_dir, layers, causal)


def test_with_the_table_of_the_page_it_is_a_comparison(tmp_path):
    (table,) = [block for block in re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL) if "[comparison]" in block]
    assert tomllib.loads(table)
    recipe = tmp_path / "compared.toml"
    recipe.write_text(RECIPE.read_text() + "\n" + table)
    entries = [entry.name for entry in read_comparison(str(recipe)).entries]
    assert entries[:2] == ["Hydra", "attention"]
    assert "no mixer" in entries

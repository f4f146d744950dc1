"""The page of the bundled recipes lists all of them and no others, each where its verb is, with its true size."""

import dataclasses
import re

from failures import Failures
from paths import ROOT

from matmix.launch.listings import grouped
from matmix.model import count_parameters
from matmix.train.recipe import load_phases
from matmix.train.recipe_files import bundled_comparisons, bundled_recipes

PAGE = (ROOT / "docs/recipes.md").read_text()
ROWS = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", PAGE, re.MULTILINE))
VOCABULARY = {"mru_tinystories": 50257}
VOCABULARY |= dict.fromkeys(("mru_shakespeare", "mru_shakespeare_char", "distillation_shakespeare"), 69)
"""Of recipes that leave it to the data: ids of the tokenizer that the page names."""

PUBLISHED = {
    "hydra_base_c4": 112,
    "bert_base_c4": 110,
    "m2_base_c4": 116,
    "fnet_base_c4": 112,
    "mlp_mixer_base_c4": 112,
    "modernbert_like_base": 149,
    "bert_original_base": 110,
    "fnet_base": 83,
}
"""Millions of parameters that the papers give; the first five are the rows of Hydra's table."""


def test_every_recipe_has_a_row_and_every_row_is_a_recipe():
    assert set(ROWS) == {*bundled_recipes(), *bundled_comparisons()}
    assert len(re.findall(r"^\| `", PAGE, re.MULTILINE)) == len(ROWS)


def test_recipes_stand_below_the_verb_that_takes_them():
    sections = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
    for command, found in grouped().items():
        rows = {
            name
            for text in sections.values()
            if f"`{command}`" in text
            for name in re.findall(r"^\| `(\w+)`", text, re.M)
        }
        assert rows == set(found), command


def test_sizes_are_true():
    with Failures() as failures:
        for name in grouped()["matmix train NAME"]:
            with failures.of(name):
                model = load_phases(name)[-1].model
                if not model.vocab_size and model.model_class.inputs == "tokens":
                    model = dataclasses.replace(model, vocab_size=VOCABULARY.get(name, 2048))
                found = count_parameters(model) / 1e6
                assert ROWS[name].split(" | ")[1] == f"{found:.2f}M"
                if name in PUBLISHED:
                    assert f"published: {PUBLISHED[name]}M" in ROWS[name]
                    assert abs(found / PUBLISHED[name] - 1) < 0.01

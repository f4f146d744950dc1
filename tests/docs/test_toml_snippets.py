"""Every TOML snippet of the pages is part of a recipe, a comparison or a site profile that can be read."""

from __future__ import annotations

import importlib
import tomllib
from typing import Any

import pytest
import tomli_w
from failures import Failures
from pages import snippets

from matmix.launch.jobs.slurm.options import from_layers, load_profile
from matmix.launch.lab.compare.config import read_comparison
from matmix.launch.lab.ladder.sizes import LadderConfig
from matmix.model import build_model
from matmix.model.config import model_config_from_dict
from matmix.train.arguments import read_table
from matmix.train.recipe import find_recipe, load_phases, merged, read_toml

SNIPPETS = snippets("toml")
PAGES = sorted({snippet.page for snippet in SNIPPETS if not snippet.not_run})
# Table of a snippet -> the recipe that it is put into.
BASES = {
    "comparison": "bidirectional",
    "data.images": "hydra_vit_b_imagenet",
    "model.image": "hydra_vit_b_imagenet",
    "data.examples": "finetune",
    "": "debug_mru",
}


def base_of(values: dict[str, Any]) -> dict[str, Any]:
    """A recipe for what a snippet says; with variants that say all, or data of another kind, without its own."""
    tables = {"comparison" if "comparison" in values else "", *(f"{a}.{b}" for a in values for b in sub(values, a))}
    base = read_toml(find_recipe(BASES[next((table for table in BASES if table in tables), "")]))
    if "entry" in values.get("comparison", {}):
        del base["comparison"]
    if "data.synthetic" in tables:
        base["data"] = {}
    return base


def sub(values: dict[str, Any], name: str) -> dict[str, Any]:
    return values[name] if isinstance(values[name], dict) else {}


def test_there_are_reasons_where_snippets_are_not_read():
    left_out = {s.where: s.not_run for s in SNIPPETS if s.not_run}
    assert len(left_out) <= 1, left_out
    assert all(len(reason.split()) >= 4 for reason in left_out.values()), left_out


@pytest.mark.parametrize("page", PAGES)
def test_the_snippets_of_a_page_are_read(page, tmp_path, monkeypatch):
    with Failures() as failures:
        for snippet in SNIPPETS:
            if snippet.page == page and not snippet.not_run:
                with failures.of(snippet.where):
                    read(tomllib.loads(snippet.code), snippet.code, tmp_path, monkeypatch)


def read(values: dict[str, Any], code: str, tmp_path, monkeypatch) -> None:
    """Reads a snippet as the part of a file that it is. Raises what the reader of that file says."""
    if "default" in values:
        (tmp_path / "clusters.toml").write_text(code)
        monkeypatch.setenv("MATMIX_CLUSTERS", str(tmp_path / "clusters.toml"))
        assert from_layers(load_profile(None), {})
        return
    if ":" in values.get("model", {}).get("architecture", ""):
        importlib.import_module(values["model"]["architecture"].partition(":")[0])  # series_model.py
        build_model(model_config_from_dict({**values["model"], "d_model": 64}), device="meta")  # which task is not said
        return
    if "ladder" in values:
        assert read_table(LadderConfig, values["ladder"], "[ladder]").counts
        return
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(tomli_w.dumps(merged(base_of(values), values)))
    if "comparison" in values:
        assert read_comparison(str(recipe)).entries
    else:
        stages = [*sub(values, "ramp").get("global_batch_size", []), "the recipe's own"] if "ramp" in values else [1]
        assert len(load_phases(str(recipe))) == len(values.get("phase", stages))

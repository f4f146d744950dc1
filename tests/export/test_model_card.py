"""What the README of an export tells its reader."""

from __future__ import annotations

from pathlib import Path

from matmix.model.config import ModelConfig
from matmix.model.interop.export import directory
from matmix.model.interop.export.model_card import model_card


def test_a_fixed_length_is_stated_where_there_is_one():
    options = {"architecture": "encoder", "vocab_size": 64, "n_layers": 2, "max_seqlen": 48}
    card = model_card(ModelConfig(**options, layers=("dense", "hydra")), has_tokenizer=True, notes="")
    assert "sequences of exactly 48 tokens" in card
    assert "(dense)" in card
    assert "exactly" not in model_card(ModelConfig(**options, layers=("hydra",)), has_tokenizer=True, notes="")


def test_the_licence_is_found_where_a_build_without_it_comes_first(tmp_path, monkeypatch):
    """As in the folder of a clone, and as installed without one."""
    own = (Path(__file__).parents[2] / "LICENSE").read_text()
    assert directory.license_of_the_code() == own
    (tmp_path / "matmix.egg-info").mkdir()
    (tmp_path / "matmix.egg-info" / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: matmix\nVersion: 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(directory, "__file__", str(tmp_path / "a" / "b" / "c" / "d.py"))
    assert directory.license_of_the_code() == own

"""What the README of an export tells its reader."""

from __future__ import annotations

from matmix.model.config import ModelConfig
from matmix.model.interop.export.model_card import model_card


def test_a_fixed_length_is_stated_where_there_is_one():
    options = {"architecture": "encoder", "vocab_size": 64, "n_layers": 2, "max_seqlen": 48}
    card = model_card(ModelConfig(**options, layers=("dense", "hydra")), has_tokenizer=True, notes="")
    assert "sequences of exactly 48 tokens" in card
    assert "(dense)" in card
    assert "exactly" not in model_card(ModelConfig(**options, layers=("hydra",)), has_tokenizer=True, notes="")

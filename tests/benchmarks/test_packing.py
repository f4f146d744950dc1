"""What the benchmark of unpadded fine-tuning counts."""

import pytest
from labelled import texts, write_recipe

from matmix.benchmarks.reading import measure_packings
from matmix.train.recipe import load_config


def test_padding_is_what_the_lengths_of_the_texts_say(tmp_path):
    """Batches of 8 texts in the order of the file, each with two special tokens, and at most 32 tokens."""
    rows = texts(16)
    arguments = ["--device", "cpu", "--data.shuffle", "False"]
    found = measure_packings(load_config(write_recipe(tmp_path, rows, rows), arguments), batches=2)
    lengths = [len(row["text"].split()) + 2 for row in rows]
    widest = 8 * (max(lengths[:8]) + max(lengths[8:]))
    wanted = {"concat": 0.0, "document": 1 - sum(lengths) / widest, "rows": 1 - sum(lengths) / (16 * 32)}
    assert {name: row["padding"] for name, row in found.items()} == pytest.approx(wanted)
    assert all(row["seconds"] > 0 for row in found.values())

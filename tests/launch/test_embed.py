"""`matmix embed RUN FILE --out OUT`: one vector for every text."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from failures import each
from pyarrow import parquet
from runs import run_recipe
from transformers import AutoModel, AutoTokenizer

from matmix.launch.cli import main
from matmix.use.embedding import Embedder
from matmix.use.exporting import export_run
from matmix.use.opening import open_model

TEXTS = ["the king speaks", "soft", " ", "but death rises over the crown and the queen gives her sword " * 3]


@pytest.fixture(scope="module")
def run(dataset, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "hydra"
    run_recipe("debug_hydra", dataset, run_dir, "--steps", "2", "--evaluation.batches", "1")
    return run_dir


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


@pytest.fixture(scope="module")
def wanted(run, tmp_path_factory) -> dict[str, np.ndarray]:
    """What transformers makes of each text alone, in the export, by pooling."""
    folder = export_run(run, tmp_path_factory.mktemp("export") / "export")
    model = AutoModel.from_pretrained(folder, trust_remote_code=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = {"mean": [], "cls": []}
    for text in TEXTS:
        with torch.no_grad():
            given = tokenizer(text.strip(), return_tensors="pt", truncation=True, max_length=24)
            features = model(**given).last_hidden_state[0]
        found["mean"].append(features.mean(0))
        found["cls"].append(features[0])
    return {name: torch.stack(rows).numpy() for name, rows in found.items()}


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_vectors_are_those_of_each_text_alone(run, file, wanted, pooling, tmp_path, monkeypatch, capsys):
    """In the order of the texts, however many go through the model together."""
    out = tmp_path / "new" / "vectors.npy"
    words = ["embed", str(run), str(file), "--out", str(out), "--pooling", pooling, "--max-length", "24"]
    assert main(words) == 0
    found = np.load(out)
    assert found.dtype == np.float32
    assert np.abs(found - wanted[pooling]).max() < 1e-5
    assert f"{len(TEXTS)} vectors of {found.shape[1]}" in capsys.readouterr().out
    monkeypatch.setattr("matmix.use.embedding._PACK", 5)
    assert main([*words[:4], str(tmp_path / "again.npy"), *words[5:]]) == 0
    assert np.abs(np.load(tmp_path / "again.npy") - wanted[pooling]).max() < 1e-5


def test_a_text_that_spells_special_tokens_is_text(run, file, wanted, tmp_path):
    """As it was in training."""
    text, opened = "a </s> king<mask>", open_model(run, device="cpu")
    reader, embedder = opened.reader, Embedder(opened, max_length=24)
    ids = [reader.special["cls"], *reader.tokenizer.encode(text), reader.special["sep"]]
    ((_, vectors),) = embedder.batches([text])
    with torch.no_grad():
        assert torch.equal(vectors, embedder.model(torch.tensor([ids])))
    assert reader.marking.decode(ids) == text


def test_parquet_and_unit_length(run, file, wanted, tmp_path):
    out = tmp_path / "vectors.parquet"
    assert main(["embed", str(run), str(file), "--out", str(out), "--max-length", "24", "--normalize"]) == 0
    table = parquet.read_table(out)
    assert [text.strip() for text in table["text"].to_pylist()] == [text.strip() for text in TEXTS]
    found = np.array(table["embedding"].to_pylist())
    expected = wanted["mean"] / np.linalg.norm(wanted["mean"], axis=1, keepdims=True)
    assert np.abs(found - expected).max() < 1e-5


@each(
    "words, why",
    [
        (["FILE", "--out", "a.txt"], "name a file that ends in .npy or .parquet"),
        (["FILE", "--out", "THERE"], "exists; choose another file"),
        (["--out", "a.npy"], "name the files with the text"),
        (["FILE", "--out", "a.npy", "--text-field", "body"], "no field 'body'"),
    ],
)
def test_mistakes_are_said_in_one_line_and_leave_nothing(run, file, tmp_path, monkeypatch, capsys, words, why):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.npy").write_text("precious")
    places = {"FILE": str(file), "THERE": "there.npy"}
    assert main(["embed", str(run), *(places.get(word, word) for word in words)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(why, error)
    assert [path.name for path in tmp_path.iterdir()] == ["there.npy"]
    assert (tmp_path / "there.npy").read_text() == "precious"


def test_language_models_are_refused(dataset, file, tmp_path, capsys):
    run_recipe("debug_mru", dataset, tmp_path / "run", "--steps", "1")
    assert main(["embed", str(tmp_path / "run"), str(file), "--out", str(tmp_path / "a.npy")]) == 2
    assert "which sees no later tokens: give an encoder" in capsys.readouterr().err

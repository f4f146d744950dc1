"""`matmix evaluate` of image classifiers: the scores of the run's own evaluation, of each class, and of the average."""

import json

import numpy as np
import pictures
import pytest
from runs import records

from matmix.launch.cli import main
from matmix.train.recipe import load_config
from matmix.use.exporting import export_run
from matmix.use.opening import open_model
from matmix.use.pictures import ImageScores, score_images


def test_scores_are_those_of_the_run_s_last_evaluation(run, tmp_path, capsys):
    last = records(run, "validation")[-1]
    for weights, prefix in (("raw", ""), ("ema", "ema_")):
        out = {"--out": "scores.json", "--predictions": "rows.jsonl", "--confusion": "confusion.png"}
        files = [word for option, name in out.items() for word in (option, str(tmp_path / weights / name))]
        (tmp_path / weights).mkdir()
        assert main(["evaluate", str(run), "--weights", weights, *files]) == 0
        scores = json.loads((tmp_path / weights / "scores.json").read_text())
        for name in ("loss", "accuracy", "top5"):
            assert scores[name] == pytest.approx(last[prefix + name], rel=1e-5), (weights, name)
        rows = [json.loads(line) for line in (tmp_path / weights / "rows.jsonl").read_text().splitlines()]
        assert [row["example"] for row in rows] == list(range(scores["images"]))
        assert np.mean([row["predicted"] == row["label"] for row in rows]) == pytest.approx(scores["accuracy"])
        assert sum(row["accuracy"] * row["images"] for row in scores["classes"]) == pytest.approx(
            scores["accuracy"] * scores["images"]
        )
        assert (tmp_path / weights / "confusion.png").read_bytes().startswith(b"\x89PNG")
        assert scores["control_accuracy"] == last["control_accuracy"]
    said = capsys.readouterr().out
    assert "top-1 accuracy" in said
    assert f"Control without a model: top-1 accuracy {last['control_accuracy']:.2%} (the most frequent class)." in said


def test_another_dataset_of_the_same_classes(run, tmp_path):
    tree = pictures.write_tree(tmp_path / "tree", pictures.samples(4))
    dataset = pictures.prepare(tree, tmp_path / "others", validation_fraction=0.5)
    scores = score_images(open_model(run), str(dataset), split="train")
    assert sorted(set(scores.numbers)) == list(range(len(scores.numbers)))
    assert scores.pictures == f"{dataset}, train split"
    two = [(name, label, data) for name, label, data in pictures.samples(4) if label < 2]
    dataset = pictures.prepare(pictures.write_tree(tmp_path / "two", two), tmp_path / "fewer", validation_fraction=0.5)
    with pytest.raises(ValueError, match="has other classes than the model") as error:
        score_images(open_model(run), str(dataset))
    assert "\n" not in str(error.value)


def test_an_export_scores_as_its_run(run, tmp_path, capsys):
    export_run(run, tmp_path / "export")
    own = load_config(str(run)).data.images.path
    expected, found = score_images(open_model(run)), score_images(open_model(tmp_path / "export"), own)
    assert found.metrics() == pytest.approx(expected.metrics(), rel=1e-5)
    assert found.classes == expected.classes == ("cat", "dog", "owl")
    assert main(["evaluate", str(tmp_path / "export")]) == 2
    assert "name a dataset" in capsys.readouterr().err
    assert main(["evaluate", str(tmp_path / "export"), own, "--window", "8"]) == 2
    assert "export classifies images; leave out --window\n" in capsys.readouterr().err
    assert main(["evaluate", str(tmp_path / "export"), own, "--weights", "ema"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_what_a_class_is_taken_for():
    scores = ImageScores(
        where="a run",
        pictures="pictures",
        classes=("a", "b", "c", "none of it"),
        loss=1.0,
        numbers=np.arange(5),
        labels=np.array([0, 0, 0, 1, 2]),
        likeliest=np.array([[0, 1], [2, 0], [2, 1], [1, 0], [0, 2]]),
        probabilities=np.full((5, 2), 0.5, dtype=np.float32),
    )
    assert scores.metrics() == {"loss": 1.0, "accuracy": 0.4, "top5": 0.8}
    first, second, third = scores.by_class()
    assert (first["accuracy"], first["taken_for"], first["times"]) == (pytest.approx(1 / 3), "c", 2)
    assert (second["accuracy"], second["taken_for"]) == (1.0, None)
    assert (third["accuracy"], third["taken_for"], third["images"]) == (0.0, "a", 1)

"""`matmix evaluate RUN FILE` of a run that was fine-tuned on labelled examples."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from failures import each
from labelled import CLASSES, EXAMPLES, texts, write_jsonl, write_task
from runs import records, run_recipe
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score

from matmix.launch.cli import main
from matmix.model.interop.importing.exported import read_labels
from matmix.train.loop import train
from matmix.train.recipe import load_config
from matmix.use.exporting import export_run


@pytest.fixture(scope="module")
def tuned(dataset, tmp_path_factory) -> Path:
    """A classifier; beside it the examples that it was judged on."""
    folder = tmp_path_factory.mktemp("tuned")
    run_recipe("debug_hydra", dataset, folder / "encoder", "--steps", "1", "--evaluation.every", "0")
    files = ["--data.examples.train", write_jsonl(folder / "train.jsonl", texts(61))]
    files += ["--data.examples.validation", write_jsonl(folder / "validation.jsonl", texts(37, seed=1))]
    words = ["finetune", str(folder / "encoder"), "sequence_classification", *files, "--device", "cpu"]
    assert main([*words, "--global-batch-size", "8", "--epochs", "2", "--run-dir", str(folder / "run")]) == 0
    return folder / "run"


@pytest.mark.slow
def test_scores_of_a_file_are_those_of_training_and_of_its_predictions(tuned, tmp_path, capsys):
    """Also where the last batch is not full."""
    files = {name: tmp_path / "new" / f"{name}.{end}" for name, end in (("out", "json"), ("predictions", "jsonl"))}
    options = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    picture = ["--confusion", str(tmp_path / "picture.png")]
    assert main(["evaluate", str(tuned), str(tuned.parent / "validation.jsonl"), *options, *picture]) == 0
    found, wanted = json.loads(files["out"].read_text()), records(tuned, "validation")[-1]
    assert found["examples"] == 37
    assert {name: found[name] for name in ("accuracy", "f1", "matthews")} == {
        name: pytest.approx(wanted[name], abs=1e-12) for name in ("accuracy", "f1", "matthews")
    }
    rows = [json.loads(line) for line in files["predictions"].read_text().splitlines()]
    examples = [json.loads(line) for line in (tuned.parent / "validation.jsonl").read_text().splitlines()]
    assert [row["label"] for row in rows] == [example["label"] for example in examples]
    assert [row["example"] for row in rows] == list(range(37))
    assert found["accuracy"] == accuracy_score([row["label"] for row in rows], [row["predicted"] for row in rows])
    assert all(row["predicted"] == CLASSES[int(np.argmax(row["values"]))] for row in rows)
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert "37 examples in" in said
    assert said.splitlines()[-3:] == [f"Written: {path}" for path in (*files.values(), tmp_path / "picture.png")]
    same = Counter(row["label"] for row in rows).most_common(1)[0][1] / 37
    assert found["control_accuracy"] == wanted["control_accuracy"] == same
    assert f"Control without a model: accuracy {same:.1%} (the most frequent class), F1" in said
    assert f"{found['accuracy']:.1%}" in said


def test_examples_without_labels_are_predicted(tuned, tmp_path, capsys):
    rows = [{"text": row["text"]} for row in texts(5, seed=2)]
    file = write_jsonl(tmp_path / "new.jsonl", rows)
    assert main(["evaluate", str(tuned), file, "--predictions", str(tmp_path / "p.jsonl")]) == 0
    assert "no example has a label" in capsys.readouterr().out
    found = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    assert [row["label"] for row in found] == [None] * 5
    assert {row["predicted"] for row in found} <= set(CLASSES)
    assert main(["evaluate", str(tuned), file, "--confusion", str(tmp_path / "c.png")]) == 2
    assert "against its label" in capsys.readouterr().err


@each(
    "words, why",
    [
        ([], "give one file of examples"),
        (["a.jsonl", "--task", "regression"], "was fine-tuned for sequence_classification"),
        (["a.jsonl", "--labels", "a", "b"], "knows its columns, classes and lengths; leave out --labels"),
        (["a.jsonl", "--text-field", "body"], "is scored on labelled examples here; leave out --text-field"),
        (["a.jsonl", "--carry-state"], "leave out --carry-state"),
        (["a.jsonl", "--split", "test"], "is no image classifier; leave out --split"),
        (["a.jsonl", "b.jsonl"], "give one file"),
        (["no.jsonl"], "not found: no.jsonl"),
        (["no.jsonl", "--predictions", f"{__file__}/p.jsonl"], "/p.jsonl cannot be written: "),
        (["no.jsonl", "--confusion", str(Path(__file__).parent)], "is a folder"),
    ],
)
def test_mistakes_are_one_line(tuned, capsys, words, why):
    assert main(["evaluate", str(tuned), *words]) == 2
    error = capsys.readouterr().err
    assert why in error
    assert error.count("\n") == 1


def test_an_unseen_label_is_named(tuned, tmp_path, capsys):
    file = write_jsonl(tmp_path / "a.jsonl", [{"text": "word1", "label": "god"}])
    assert main(["evaluate", str(tuned), file]) == 2
    assert 'label "god" is not among the 3 classes of the training examples; did you mean "good"?' in (
        capsys.readouterr().err
    )


@pytest.fixture(scope="module")
def exported(tuned) -> Path:
    """Written without the examples that it was trained on."""
    train = tuned.parent / "train.jsonl"
    train.rename(tuned.parent / "away.jsonl")
    try:
        return export_run(tuned, tuned.parent / "export")
    finally:
        (tuned.parent / "away.jsonl").rename(train)


def test_the_model_card_of_a_fine_tuned_run_has_data_and_scores(tuned, exported):
    """Of the data the name of the file, not where it lay; the scores of the step that is exported."""
    card, wanted = (exported / "README.md").read_text(), records(tuned, "validation")[-1]
    assert "| data | train.jsonl (labelled examples) |" in card
    assert str(tuned.parent) not in card
    where = f"(validation, step {wanted['step']})"
    assert f"| accuracy {where} | {wanted['accuracy']:.1%} |" in card
    assert f"| accuracy of the most frequent class {where} | {wanted['control_accuracy']:.1%} |" in card
    assert f"| F1 {where} | {wanted['f1']:.1%} |" in card
    assert f"| Matthews correlation {where} | {wanted['matthews']:.3f} |" in card
    assert f"| expected calibration error {where} | {wanted['calibration_error']:.4f} |" in card


def test_classes_are_known_without_the_training_examples(tuned, exported, tmp_path, capsys):
    assert read_labels(exported) == CLASSES
    (tuned.parent / "train.jsonl").rename(tuned.parent / "away.jsonl")
    try:
        assert main(["evaluate", str(tuned), str(tuned.parent / "validation.jsonl")]) == 0
    finally:
        (tuned.parent / "away.jsonl").rename(tuned.parent / "train.jsonl")
    assert f"{records(tuned, 'validation')[-1]['accuracy']:.1%}" in capsys.readouterr().out


def test_an_export_is_scored_as_its_run(tuned, exported, tmp_path):
    """From other columns, too."""
    wanted = records(tuned, "validation")[-1]
    file = str(tuned.parent / "validation.jsonl")
    task = ["--task", "sequence_classification"]
    assert main(["evaluate", str(exported), file, *task, "--out", str(tmp_path / "a.json")]) == 0
    rows = [json.loads(line) for line in (tuned.parent / "validation.jsonl").read_text().splitlines()]
    other = write_jsonl(tmp_path / "other.jsonl", [{"sentence": row["text"], "topic": row["label"]} for row in rows])
    columns = ["--columns", "text", "sentence", "label", "topic", "--out", str(tmp_path / "b.json")]
    assert main(["evaluate", str(exported), other, *task, *columns]) == 0
    for name in ("a.json", "b.json"):
        found = json.loads((tmp_path / name).read_text())
        assert {key: found[key] for key in ("accuracy", "f1", "matthews")} == {
            key: pytest.approx(wanted[key], abs=1e-12) for key in ("accuracy", "f1", "matthews")
        }


@pytest.mark.parametrize("source", ["encoder", "encoder-export"])
def test_a_pretrained_encoder_is_scored_as_an_embedder(tuned, tmp_path, source):
    """Texts are nearest to themselves, by the vectors that `matmix embed` writes."""
    if source == "encoder-export":
        export_run(tuned.parent / "encoder", tuned.parent / source)
    pairs = [{"text": row["text"], "pair": row["text"]} for row in {row["text"]: row for row in texts(20)}.values()]
    file = write_jsonl(tmp_path / "pairs.jsonl", pairs)
    words = [str(tuned.parent / source), file, "--max-length", "48"]
    more = ["--task", "embedding", "--out", str(tmp_path / "scores.json")]
    assert main(["evaluate", *words, *more, "--predictions", str(tmp_path / "vectors.jsonl")]) == 0
    assert json.loads((tmp_path / "scores.json").read_text())["pair_accuracy"] == 1
    assert main(["embed", *words, "--out", str(tmp_path / "vectors.npy"), "--normalize"]) == 0
    found = [json.loads(line)["vectors"][0] for line in (tmp_path / "vectors.jsonl").read_text().splitlines()]
    np.testing.assert_allclose(np.array(found), np.load(tmp_path / "vectors.npy"), atol=1e-5)


@each(
    "source, words, why",
    [
        ("encoder", ["--task", "sequence_classification"], "a sequence_classifier; matmix finetune ENCODER sequence_"),
        ("encoder", ["--task", "masked_lm"], '"masked_lm" is no task on labelled examples'),
        (
            "encoder",
            ["--task", "causal_lm"],
            "has architecture encoder: matmix finetune takes sequence_classification, ",
        ),
        ("encoder", ["--labels", "a", "b"], "for labelled examples name --task; leave out --labels"),
        ("encoder", [], "gives no text a probability: name a task on labelled examples, --task"),
        ("export", ["--task", "regression"], "has 3 outputs, and"),
        ("export", ["--task", "token_classification"], "is scored with a token_classifier"),
        ("export", ["--task", "sequence_classification", "--labels", "a", "b"], "has 3 outputs, and"),
        ("language_model", ["--task", "sequence_classification"], "is a model of architecture language_model"),
    ],
)
def test_tasks_that_do_not_fit_are_one_line(tuned, exported, dataset, tmp_path, capsys, source, words, why):
    path = tuned.parent / source
    if source == "language_model" and not path.exists():
        run_recipe("debug_mru", dataset, path, "--steps", "1", "--evaluation.every", "0")
    numbers = "regression" in words
    label = 0.5 if numbers else words[-1] if "--labels" in words else "good"
    file = write_jsonl(tmp_path / "a.jsonl", [{"text": "word1", "label": label}])
    capsys.readouterr()
    assert main(["evaluate", str(path), file, *words]) == 2
    error = capsys.readouterr().err
    assert why in error
    assert error.count("\n") == 1


def _reproduced(task: str, rows: list[dict]) -> dict[str, float]:
    """Metrics of a task, computed from nothing but a file of predictions."""
    given, right = ([row[name] for row in rows] for name in ("predicted", "label"))
    if task == "multi_label":
        matrices = (np.array([[name in names for name in CLASSES] for names in each]) for each in (right, given))
        return {
            "f1_macro": f1_score(*matrices, average="macro"),
            "accuracy": np.mean([a == b for a, b in zip(given, right, strict=True)]),
        }
    if task == "regression":
        return {"pearson": pearsonr(given, right).statistic, "spearman": spearmanr(given, right).statistic}
    if task == "question_answering":
        return {"exact_match": np.mean([a in b for a, b in zip(given, right, strict=True)])}
    if task == "embedding":
        first, second = np.array([row["vectors"] for row in rows]).transpose(1, 0, 2)
        np.testing.assert_allclose(given, (first * second).sum(1), atol=1e-6)
        return {"pair_accuracy": np.mean((first @ second.T).argmax(1) == np.arange(len(first)))}
    if task == "token_classification":
        pairs = [
            pair for row in rows for pair in zip(row["label"], row["predicted"], strict=True) if pair[1] is not None
        ]
        right, given = zip(*pairs, strict=True)
    return {"accuracy": accuracy_score(right, given)}


@pytest.mark.slow
@each("task", EXAMPLES)
def test_the_metrics_of_every_task_can_be_computed_from_its_predictions(task, tmp_path):
    """What is predicted has the form of a label, one for each example of the file; without labels it is the same."""
    recipe, *options = write_task(tmp_path, task)
    train(
        load_config(recipe, [*options, "--run-dir", str(tmp_path / "run"), "--steps", "3", "--evaluation.every", "0"])
    )
    examples = [json.loads(line) for line in (tmp_path / "validation.jsonl").read_text().splitlines()]
    found = {}
    for name, left_out in (("labels", ()), ("none", ("label",))):
        file = write_jsonl(
            tmp_path / f"{name}.jsonl", [{k: v for k, v in row.items() if k not in left_out} for row in examples]
        )
        files = ["--out", str(tmp_path / f"{name}.json"), "--predictions", str(tmp_path / "predictions.jsonl")]
        assert main(["evaluate", str(tmp_path / "run"), file, *files]) == 0
        found[name] = [json.loads(line) for line in (tmp_path / "predictions.jsonl").read_text().splitlines()]
    metrics, rows = json.loads((tmp_path / "labels.json").read_text()), found["labels"]
    assert [(row["example"], row["row"]) for row in rows] == [(n, n + 1) for n in range(31)]
    assert metrics["examples"] == 31
    if task != "embedding":
        wanted = [example["label"] for example in examples]
        assert [row["label"] for row in rows] == (
            [[label] for label in wanted] if task == "question_answering" else wanted
        )
    if task == "question_answering":
        pairs = zip(rows, examples, strict=True)
        assert all(row["predicted"] and row["predicted"] in example["pair"] for row, example in pairs)
    for name, value in _reproduced(task, rows).items():
        assert value == pytest.approx(metrics[name], abs=1e-5), name
    assert [row["predicted"] for row in found["none"]] == [row["predicted"] for row in rows]
    assert all(row["label"] is None for row in found["none"])


def test_words_that_were_cut_off_have_no_prediction(tmp_path):
    recipe, *options = write_task(tmp_path, "token_classification")
    train(
        load_config(recipe, [*options, "--run-dir", str(tmp_path / "run"), "--steps", "1", "--evaluation.every", "0"])
    )
    texts = [["word1", "word2"], [f"word{number}" for number in range(40)], ["word3"]]
    rows = [{"text": texts[0], "label": ["I", "O"]}, {"text": texts[1], "label": ["B"] * 40}, {"text": texts[2]}]
    file = write_jsonl(tmp_path / "new.jsonl", rows)
    assert main(["evaluate", str(tmp_path / "run"), file, "--predictions", str(tmp_path / "p.jsonl")]) == 0
    short, long, unlabelled = (json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines())
    assert [row["words"] for row in (short, long, unlabelled)] == texts
    assert short["label"] == ["I", "O"]
    assert unlabelled["label"] is None
    for row, there in ((short, 2), (long, 30), (unlabelled, 1)):  # 32 tokens with the special ones
        assert set(row["predicted"][:there]) <= set("BIO")
        assert row["predicted"][there:] == [None] * (len(row["words"]) - there)
    assert long["label"] == ["B"] * 40

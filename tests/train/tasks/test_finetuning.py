"""Fine-tuning on labelled examples: every task trains and scores, exactly, however its batches are made."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from failures import each
from labelled import entities, write_jsonl, write_recipe, write_task
from runs import losses, records, weights
from sklearn import metrics

from matmix.data.examples.base import Classes
from matmix.data.loading.batch import Batch
from matmix.data.loading.masking import IGNORED
from matmix.train.evaluators.validation import in_order
from matmix.train.loaders import make_loader
from matmix.train.loop import train
from matmix.train.recipe import load_config
from matmix.train.tasks.base import Predicted
from matmix.train.tasks.config import ObjectiveConfig
from matmix.train.tasks.finetuning.base import ClassOptions, calibration_error, class_cost
from matmix.train.tasks.finetuning.classification import MultiLabel
from matmix.train.tasks.finetuning.question_answering import exact_match, overlap_f1
from matmix.train.tasks.finetuning.token_classification import TokenClassification, entity_scores

SCORES = {
    "sequence_classification": ("accuracy", 0.6),
    "multi_label": ("f1_micro", 0.8),
    "regression": ("pearson", 0.5),
    "token_classification": ("accuracy", 0.8),
    "question_answering": ("f1", 0.0),
    "multiple_choice": ("accuracy", 0.6),
    "embedding": ("pair_accuracy", 0.5),
}
"""Task -> a metric, and what it is at least after a short training."""


def _config(folder, task="sequence_classification", *arguments, run="run"):
    recipe, *options = write_task(folder, task)
    return load_config(recipe, [*options, "--run-dir", str(folder / run), *arguments])


@pytest.mark.parametrize(
    ("task", "packing"),
    [*((task, "concat") for task in SCORES), ("question_answering", "document"), ("embedding", "document")],
)
def test_every_task_trains_and_scores(task, packing, tmp_path):
    steps = "24" if packing == "concat" else "2"
    config = _config(tmp_path, task, "--data.packing", packing, "--steps", steps, "--evaluation.every", "0")
    result = train(config)
    metric, least = SCORES[task]
    assert result.finished
    known = config.task().metrics
    beside = {f"control_{one.name}" for one in known if one.control}
    assert result.metrics.keys() <= {"step", "loss", *(one.name for one in known), *beside}
    assert beside & result.metrics.keys()
    assert 0 <= result.metrics[metric] <= 1 or metric == "pearson"
    if packing == "concat":
        assert losses(tmp_path / "run")[-1] < losses(tmp_path / "run")[0]
        assert result.metrics[metric] >= least


@pytest.mark.parametrize("task", SCORES)
def test_a_model_that_has_diverged_has_no_scores(task, tmp_path, monkeypatch):
    """The run ends as others do, and says so."""
    config = _config(tmp_path, task, "--steps", "1", "--evaluation.every", "0")
    kind = type(config.task())
    forward = kind.forward

    def diverged(model, batch):
        return forward(model, batch) * (1 if model.training else torch.nan)

    monkeypatch.setattr(kind, "forward", staticmethod(diverged))
    result = train(config)
    assert result.finished
    assert np.isnan(result.metrics["loss"])
    if task != "token_classification":  # it predicts classes
        assert np.isnan(result.metrics[SCORES[task][0]])


def test_metrics_are_those_of_scikit_learn_on_the_whole_split(tmp_path):
    config = _config(tmp_path)
    result = train(config)
    task, seen = config.task(), []
    from matmix.model import build_model

    model = build_model(load_config(str(tmp_path / "run")).model)
    model.load_state_dict(weights(tmp_path / "run"))
    model.eval()
    with torch.no_grad():
        for batch in make_loader(config, "validation", 0, 1):
            seen.append(task.predictions(model(batch.inputs, cu_seqlens=batch.cu_seqlens), batch))
    kept = np.concatenate([part.numbers.numpy() for part in seen]) >= 0
    assert kept.sum() == 31
    found = np.concatenate([part.values.argmax(1).numpy() for part in seen])[kept]
    right = np.concatenate([part.labels.numpy() for part in seen])[kept]
    assert result.metrics["accuracy"] == metrics.accuracy_score(right, found)
    assert result.metrics["f1"] == metrics.f1_score(right, found, average="macro")
    assert result.metrics["matthews"] == metrics.matthews_corrcoef(right, found)
    assert result.metrics["loss"] == pytest.approx(
        metrics.log_loss(right, np.concatenate([part.values.numpy() for part in seen])[kept]), rel=1e-4
    )


def test_packing_and_micro_batches_do_not_change_the_numbers(tmp_path):
    dropout = ("--model.dropout", "0", "--model.head.dropout", "0", "--steps", "4")
    kinds = {"a": (), "b": ("--micro-batch-size", "2"), "c": ("--data.packing", "document", "--micro-batch-size", "4")}
    for run, options in kinds.items():
        train(_config(tmp_path, "sequence_classification", *dropout, *options, run=run))
    for run in "bc":
        assert losses(tmp_path / run) == pytest.approx(losses(tmp_path / "a"), rel=1e-4)
        ours, theirs = (records(tmp_path / each, "validation")[-1] for each in (run, "a"))
        assert ours["accuracy"] == theirs["accuracy"]


def test_resuming_in_the_middle_is_bit_identical(tmp_path):
    train(_config(tmp_path, run="whole"))
    assert train(_config(tmp_path, "sequence_classification", "--stop-step", "7", run="parts")).step == 7
    assert train(_config(tmp_path, run="parts")).steps_done == 5
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    expected = weights(tmp_path / "whole")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(tmp_path / "parts").items())
    assert records(tmp_path / "parts", "validation") == records(tmp_path / "whole", "validation")


def test_a_classifier_of_a_fixed_length_refuses_longer_texts(tmp_path):
    fixed = ("--model.layers", "dense", "--data.packing", "rows", "--data.seqlen", "8", "--model.max-seqlen", "8")
    with pytest.raises(ValueError, match=r"\.jsonl, row \d+: \d+ tokens with the special ones"):
        train(_config(tmp_path, "sequence_classification", *fixed))


@pytest.mark.parametrize(
    ("task", "outputs"), [("token_classification", 3), ("regression", 1), ("question_answering", 2)]
)
def test_outputs_that_are_not_given_are_those_of_the_examples(task, outputs, tmp_path):
    short = ["--steps", "1", "--evaluation.every", "0", "--model.head.outputs"]
    config = _config(tmp_path, task)
    assert config.model.head.outputs == outputs
    train(_config(tmp_path, task, *short, str(outputs), run="given"))
    train(_config(tmp_path, task, *short, "0"))
    assert load_config(str(tmp_path / "run")).model.head.outputs == outputs
    assert losses(tmp_path / "run") == losses(tmp_path / "given")


@each(
    "arguments, message",
    [
        (("--model.head.outputs", "2"), r"outputs = 2, but the training examples have 3 classes \(bad, fine, good\)"),
        (("--objective.name", "masked_lm"), 'trains model.architecture = "encoder"'),
        (("--objective.options", "{class_weights = [1.0]}"), "class_weights has 1 numbers for 3 classes"),
        (("--data.examples.columns", "label", "grade"), 'has no column "grade"'),
        (("--data.examples.labels", "bad", "good"), 'label "fine" is not among the 2 classes'),
        (("--data.examples.validation", ""), "set data.examples.validation"),
        (("--data.examples.tokenizer", ""), "set data.examples.tokenizer"),
    ],
)
def test_mistakes_are_told_in_one_line(arguments, message, tmp_path):
    with pytest.raises(ValueError, match=message) as error:
        train(_config(tmp_path, "sequence_classification", *arguments, "--steps", "1"))
    assert "\n" not in str(error.value)


def test_mistakes_in_the_validation_file_are_told_before_training(tmp_path):
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"text": "a word", "label": "unheard of"}])
    options = ("--data.examples.validation", rows, "--evaluation.every", "0")
    with pytest.raises(ValueError, match=r'rows\.jsonl, row 1: label "unheard of" is not among the 3 classes'):
        train(_config(tmp_path, "sequence_classification", *options))
    assert not list(tmp_path.rglob("metrics.jsonl"))


def test_the_cost_of_classes_is_torchs(tmp_path):
    logits, labels = torch.randn(9, 3, requires_grad=True), torch.tensor([0, 1, 2, 2, IGNORED, 0, 1, 1, 0])
    options = ClassOptions(label_smoothing=0.1, class_weights=(0.5, 1.0, 2.0))
    cost = class_cost(logits, labels, options)
    kept = labels != IGNORED
    smooth = 0.9 * torch.nn.functional.one_hot(labels[kept], 3) + 0.1 / 3
    expected = -(smooth * logits[kept].log_softmax(1) * torch.tensor(options.class_weights)).sum()
    assert cost.total.item() == pytest.approx(expected.item(), rel=1e-5)
    plain = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    assert cost.loss.item() == pytest.approx(plain.item())
    assert cost.sums["accuracy"] == (logits.argmax(1) == labels).sum()


def test_weights_of_several_labels_count_for_the_examples_that_have_them():
    counts, labels = torch.tensor([0.5, 1.0, 4.0]), torch.tensor([[1.0, 0, 1], [torch.nan] * 3, [0, 0, 1], [0, 1, 0]])
    logits = torch.randn(4, 3, requires_grad=True)
    task = MultiLabel(ObjectiveConfig(name="multi_label", options={"class_weights": counts.tolist()}))
    cost = task.cost(logits, SimpleNamespace(labels=labels))
    kept = [0, 2, 3]
    wanted, right = logits[kept], labels[kept]
    there, absent = (torch.nn.functional.logsigmoid(sign * wanted) for sign in (1, -1))
    expected = -(counts * right * there + (1 - right) * absent).sum()
    assert cost.total.item() == pytest.approx(expected.item(), rel=1e-5)
    plain = torch.nn.functional.binary_cross_entropy_with_logits(wanted, right, reduction="sum")
    assert cost.loss.item() == pytest.approx(plain.item(), rel=1e-5)
    task = MultiLabel(ObjectiveConfig(name="multi_label", options={"class_weights": [1.0]}))
    with pytest.raises(ValueError, match="class_weights has 1 numbers for 3 classes"):
        task.cost(logits, SimpleNamespace(labels=labels))
    with pytest.raises(ValueError, match="class_weights must be 0 or more"):
        MultiLabel(ObjectiveConfig(name="multi_label", options={"class_weights": [-1.0, 1.0, 1.0]}))


def test_predictions_are_put_in_order_and_fillers_left_out():
    parts = [
        Predicted(np.array([3, 3, -1]), np.array([30, 31, 0]), np.zeros(3)),
        Predicted(np.array([2]), np.array([20]), np.zeros(1)),
    ]
    assert in_order(parts).values.tolist() == [20, 30, 31]


def test_entities_are_counted_as_conlleval_does_or_strictly():
    # From the README of seqeval, and the difference between its modes.
    true = [["O", "O", "O", "B-MISC", "I-MISC", "I-MISC", "O"], ["B-PER", "I-PER", "O"]]
    guess = [["O", "O", "B-MISC", "I-MISC", "I-MISC", "I-MISC", "O"], ["B-PER", "I-PER", "O"]]
    assert entity_scores(true, guess)["entity_f1"] == 0.5
    true, guess = [["B-NP", "I-NP", "O"]], [["I-NP", "I-NP", "O"]]
    assert entity_scores(true, guess)["entity_f1"] == 1.0
    assert entity_scores(true, guess, strict=True)["entity_f1"] == 0.0
    other = entity_scores([["B-A", "I-B", "I-B", "O", "S-C"]], [["B-A", "I-B", "O", "O", "S-C"]])
    assert (other["entity_precision"], other["entity_recall"]) == (2 / 3, 2 / 3)
    nothing = {"entity_precision": 0, "entity_recall": 0, "entity_f1": 0}
    assert entity_scores([["O"]], [["O"]]) == entity_scores([["O"]], [["O"]], strict=True) == nothing


def test_words_without_a_label_are_no_part_of_entities():
    """Where a file has labels for some of its texts only."""
    task = TokenClassification(ObjectiveConfig(name="token_classification"))
    names = ("B-X", "I-X", "O")
    labels = np.array([0, 1, IGNORED, IGNORED, 0, 2])
    found = task.scores(
        Predicted(np.array([0, 0, 1, 1, 2, 2]), np.array([0, 1, 0, 0, 2, 2]), labels),
        SimpleNamespace(classes=Classes(names)),
    )
    assert found["accuracy"] == 3 / 4
    assert (found["entity_precision"], found["entity_recall"]) == (1, 1 / 2)


def test_token_classes_with_prefixes_are_scored_as_entities(tmp_path):
    folder = tmp_path / "words"
    folder.mkdir()
    recipe = write_recipe(folder, entities(53, 0), entities(31, 1))
    options = ["--model.architecture", "token_classifier", "--objective.name", "token_classification"]
    config = load_config(recipe, [*options, "--run-dir", str(folder / "run"), "--steps", "2", "--device", "cpu"])
    result = train(config)
    known = {metric.name: metric.higher_is_better for metric in config.task().metrics}
    beside = {"step", "loss", "control_accuracy", "control_entity_f1"}
    assert {"entity_f1", "entity_precision", "entity_recall", "accuracy"} == result.metrics.keys() - beside
    assert all(known[name] for name in ("entity_f1", "entity_precision", "entity_recall", "accuracy"))


@pytest.mark.parametrize(
    ("name", "strict", "message"),
    [("S-X", True, 'class "S-X" is no tag of IOB2'), ("", False, "a class has an empty name")],
)
def test_classes_that_spell_no_entities_are_told_before_training(name, strict, message, tmp_path):
    rows = [{"text": "word1 word2 word3", "label": ["B-X", "O", name]}]
    recipe = write_recipe(tmp_path, rows, rows)
    options = ["--model.architecture", "token_classifier", "--objective.name", "token_classification"]
    options += ["--objective.options", "{strict = true}"] if strict else []
    with pytest.raises(ValueError, match=message) as error:
        train(load_config(recipe, [*options, "--run-dir", str(tmp_path / "run"), "--steps", "1", "--device", "cpu"]))
    assert "\n" not in str(error.value)


def test_answers_are_compared_as_squad_does():
    assert exact_match("The  Norman's!", ["Paris", "norman s", "normans"]) == 1
    assert overlap_f1("in the city of Rouen", ["Rouen"]) == pytest.approx(2 / 5)
    assert (overlap_f1("", [""]), overlap_f1("x", [""])) == (1, 0)


def test_the_best_window_answers(tmp_path):
    config = _config(tmp_path, "question_answering", "--steps", "1")
    task, loader = config.task(), make_loader(config, "validation", 0, 1)
    examples, parts = loader.facts.examples, []
    assert len(examples) > len(examples.rows)
    for batch in loader:
        # An oracle, surer of windows that hold the answer.
        outputs = torch.zeros(len(batch.select), 2)
        starts = torch.nonzero(torch.diff(batch.examples, prepend=torch.tensor([-2])))[:, 0]
        for start, (first, last) in zip(starts, batch.labels[batch.labels[:, 0] != IGNORED], strict=True):
            outputs[start + first, 0] = outputs[start + last, 1] = 9.0 if first else 4.0
        parts.append(Predicted(*(values.numpy() for values in task.predictions(outputs, batch))))
    assert task.scores(in_order(parts), examples) == {"exact_match": 1.0, "f1": 1.0}
    nothing = task.example_batch(torch.zeros(1, 1, dtype=torch.long))  # a window without a place for an answer
    assert task.predictions(torch.zeros(1, 2), nothing).values.isfinite().all()


def test_pairs_come_close_and_others_do_not(tmp_path):
    config = _config(tmp_path, "embedding")
    task = config.task()
    vectors = torch.eye(4).repeat_interleave(2, 0)
    batch = next(itertools.islice(make_loader(config, "train", 0, 1), 1))
    batch = Batch(
        **{**{name: getattr(batch, name) for name in batch.__slots__}, "labels": torch.zeros(4, dtype=torch.long)}
    )
    right = task.cost(vectors, batch)
    wrong = task.cost(vectors.roll(1, 0), batch)
    assert right.sums["in_batch_accuracy"] == 4
    assert right.loss < 1e-3 < wrong.loss
    # Two rows that fill up the last batch are nobody's others, though they are as the first pair.
    filled = dataclasses.replace(batch, labels=torch.tensor([0, 0, IGNORED, IGNORED]))
    some = task.cost(torch.eye(4)[[0, 0, 1, 1, 0, 0, 0, 0]], filled)
    assert some.sums["in_batch_accuracy"] == 2
    assert some.loss < 1e-3
    nothing = task.cost(vectors, dataclasses.replace(batch, labels=torch.full((4,), IGNORED)))
    assert nothing.loss == 0


def test_calibration_error_is_the_gap_of_confidence_and_accuracy():
    """Half of the predictions say 0.9 and are right in 2 of 4 cases, the others say 0.6 and always are."""
    probabilities = np.array([[0.9, 0.1]] * 4 + [[0.4, 0.6]] * 4)
    labels = np.array([0, 0, 1, 1, 1, 1, 1, 1])
    assert calibration_error(probabilities, labels) == pytest.approx((0.4 + 0.4) / 2)
    assert calibration_error(np.array([[1.0, 0.0]] * 3), np.zeros(3, int)) == 0

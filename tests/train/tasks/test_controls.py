"""What trivial answers score beside a model: the values are those of scikit-learn's dummies, or counted by hand."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from failures import each
from sklearn import metrics
from sklearn.dummy import DummyClassifier, DummyRegressor

from matmix.data.examples.base import Classes
from matmix.data.loading.masking import IGNORED
from matmix.train.tasks import TASKS
from matmix.train.tasks.base import Metric, Predicted
from matmix.train.tasks.config import ObjectiveConfig
from matmix.train.tasks.finetuning.base import ExampleTask
from matmix.train.tasks.image_classification import image_controls
from matmix.train.tasks.metrics import control_lines


def control(task: str, values: np.ndarray, labels: np.ndarray, **examples) -> dict[str, float]:
    """Of examples that are numbered; the values are only a model's."""
    kind = TASKS[task](ObjectiveConfig(name=task))
    return kind.control(Predicted(np.arange(len(labels)), values, labels), SimpleNamespace(**examples))


def test_the_most_frequent_class_of_three():
    labels = np.array([2, 0, 2, 1, 2, 0, IGNORED])
    kept = labels[:-1]
    same = DummyClassifier(strategy="most_frequent").fit(kept, kept).predict(kept)
    found = control("sequence_classification", np.random.default_rng(0).random((7, 3)), labels)
    assert found == {
        "accuracy": metrics.accuracy_score(kept, same),
        "f1": pytest.approx(metrics.f1_score(kept, same, average="macro", zero_division=0)),
        "matthews": 0.0,
    }


def test_of_two_classes_f1_is_that_of_the_second_for_all():
    """That of the most frequent one would be 0, which says nothing."""
    found = control("sequence_classification", np.zeros((4, 2)), np.array([0, 0, 0, 1]))
    assert found == {"accuracy": 0.75, "f1": pytest.approx(2 / 5), "matthews": 0.0}


def test_examples_of_one_class_are_scored_without_a_warning(recwarn):
    found = control("sequence_classification", np.eye(2)[[0, 0, 0]], np.zeros(3, int))
    assert (found["accuracy"], found["matthews"]) == (1.0, 0.0)
    assert [str(warning.message) for warning in recwarn] == []


def test_no_other_answer_that_is_the_same_for_all_has_better_labels():
    labels = (np.random.default_rng(1).random((40, 4)) < [0.7, 0.4, 0.3, 0.05]).astype(float)
    found = control("multi_label", np.zeros((40, 4)), labels)
    every = [np.tile(answer, (40, 1)) for answer in itertools.product((0, 1), repeat=4)]
    scored = [
        TASKS["multi_label"](ObjectiveConfig(name="multi_label")).scores(Predicted(np.arange(40), answer, labels), None)
        for answer in every
    ]
    assert found == {name: max(one[name] for one in scored) for name in ("f1_micro", "f1_macro", "accuracy")}


def test_the_mean_of_values():
    labels = np.array([[1.0], [2.0], [6.0]], np.float32)
    mean = DummyRegressor().fit(labels, labels).predict(labels)
    assert control("regression", np.zeros((3, 1), np.float32), labels) == {
        "rmse": pytest.approx(metrics.root_mean_squared_error(labels, mean))
    }


def test_the_most_frequent_tag():
    labels = np.array([2, 2, 0, IGNORED, 2, 1])
    assert control("token_classification", np.zeros(6, int), labels, classes=Classes(("A", "N", "V"))) == {
        "accuracy": 3 / 5,
        "f1": pytest.approx((2 * 3 / (3 + 5)) / 3),
    }
    found = control("token_classification", np.zeros(6, int), labels, classes=Classes(("B-X", "I-X", "O")))
    assert found == {"accuracy": 3 / 5, "entity_f1": 0.0}


def test_the_choice_that_is_right_most_often():
    assert control("multiple_choice", np.zeros((4, 3)), np.array([1, 1, 0, 2])) == {"accuracy": 0.5}


def test_the_answer_that_most_questions_have(monkeypatch):
    answers = {0: ["The Rouen"], 1: ["rouen!", "Rouen"], 2: ["old Rouen"], 3: []}
    kind = TASKS["question_answering"]
    monkeypatch.setattr(kind, "answers", lambda self, predicted, examples: dict.fromkeys(answers, "x"))
    found = control("question_answering", np.zeros((4, 4)), np.zeros((4, 2), int), answers=answers.get)
    assert found == {"exact_match": 0.5, "f1": pytest.approx((1 + 1 + 2 / 3) / 4)}


def test_chance_among_the_second_texts():
    """The mean over all places that the right one can have."""
    vectors = np.zeros((3, 4))
    assert control("embedding", vectors, np.zeros(3, int), similarities=None) == {
        "pair_accuracy": pytest.approx(1 / 3),
        "reciprocal_rank": pytest.approx((1 + 1 / 2 + 1 / 3) / 3),
    }
    assert control("embedding", vectors, np.zeros(3, int), similarities=[0.1, 0.2, 0.3]) == {}


def test_the_most_frequent_classes_of_pictures():
    assert image_controls(np.array([1, 4, 0, 1, 1, 1, 0])) == {"accuracy": 0.5, "top5": 1.0}
    assert image_controls(np.array([2, 2, 2, 2, 2, 2, 4])) == {"accuracy": 0.25, "top5": 0.75}
    assert image_controls(np.array([3, 1])) == {"accuracy": 0.75}


def test_every_task_on_examples_has_a_control():
    for name, kind in TASKS.items():
        if issubclass(kind, ExampleTask) or name == "image_classification":
            assert any(metric.control for metric in kind.metrics), name


SHARE = {"unit": "%", "higher_is_better": True, "digits": 1}
KNOWN = (
    Metric(name="accuracy", title="accuracy", **SHARE, control="the most frequent class"),
    Metric(name="rmse", title="root mean squared error", digits=2, control="the mean for all"),
    Metric(name="matthews", title="Matthews correlation"),
)
BESIDE = {"control_accuracy": 0.389, "control_rmse": 1.0, "matthews": 0.2}


@each(
    "accuracy, rmse, verdict",
    [
        (0.4, 0.9, []),
        (0.389, 0.9, ["The model is not better than this control in: accuracy."]),
        (0.4, 1.1, ["The model is not better than this control in: root mean squared error."]),
        (0.3, 1.0, ["The model is not better than this control: it has learned nothing that helps here."]),
        (0.4, float("nan"), ["The model is not better than this control in: root mean squared error."]),
    ],
)
def test_a_model_that_is_not_better_is_told(accuracy, rmse, verdict):
    line, *more = control_lines(KNOWN, {"accuracy": accuracy, "rmse": rmse, **BESIDE})
    assert line == (
        "Control without a model: accuracy 38.9% (the most frequent class), "
        "root mean squared error 1.00 (the mean for all)."
    )
    assert more == verdict


def test_without_controls_nothing_is_said():
    assert control_lines(KNOWN, {"accuracy": 0.4, "matthews": 0.2}) == []

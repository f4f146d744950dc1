"""Fine-tuning on 1, 2 and 4 ranks: the same losses, and every one of a prime number of examples scored once."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
import scenarios
from harness import run_distributed
from labelled import WORDS, texts, write_recipe
from nightly import nightly
from runs import losses, records
from seqeval import metrics as entities
from sklearn import metrics

from matmix.use.opening import open_model
from matmix.use.scoring import score_examples

PAIRS = [{"text": row["text"], "pair": " ".join(reversed(row["text"].split()))} for row in texts(84)]
TAGS = ("B-X", "I-X", "O")
ENTITIES = [
    {"text": row["text"], "label": [TAGS[WORDS.index(word) % 3] for word in row["text"].split()]} for row in texts(84)
]


def _questions(count: int) -> list[dict[str, str]]:
    """The answer is a word and the one after it; some texts are longer than a window."""
    draw, found = random.Random(0), []
    for _ in range(count):
        words = draw.sample(WORDS, draw.randint(2, 50))
        place = draw.randrange(len(words) - 1)
        found.append({"text": words[place], "pair": " ".join(words), "label": " ".join(words[place : place + 2])})
    return found


QUESTIONS = _questions(84)


def _write_recipes(folder, **rows):
    """Recipes on 53 examples to train on and 31 to score."""
    recipes = {}
    for name, examples in rows.items():
        (folder / name).mkdir()
        more = "stride = 4\n" if name == "spans" else ""
        recipes[name] = write_recipe(folder / name, examples[:53], examples[53:], more=more)
    return recipes


def _runs(recipes, folder, *options):
    common = ["--device", "cpu", "--model.dropout", "0", "--model.head.dropout", "0", "--steps", "6", *options]
    # Adam's step for a gradient of almost nothing would turn a rounding of it into a difference of its own size.
    common += ["--optimizer.eps", "1e-4", "--model.init-std", "0.02"]
    tasks = {
        "classes": [],
        "pairs": ["--model.architecture", "text_embedder", "--objective.name", "embedding"],
        "tokens": ["--model.architecture", "token_classifier", "--objective.name", "token_classification"],
        "spans": ["--model.architecture", "span_classifier", "--objective.name", "question_answering"],
    }
    tasks["spans"] += ["--model.head.outputs", "2"]
    return [(recipe, [*common, *tasks[name], "--run-dir", str(folder / name)]) for name, recipe in recipes.items()]


@pytest.mark.parametrize("ranks", [2, nightly(4)])
def test_ranks_agree_on_losses_and_scores(ranks, tmp_path):
    recipes = _write_recipes(tmp_path, classes=texts(84), pairs=PAIRS)
    scenarios.train_recipes(_runs(recipes, tmp_path / "one"))
    run_distributed(scenarios.train_recipes, ranks, arguments=(_runs(recipes, tmp_path / "many"),))
    for name in recipes:
        # In-batch negatives are those of all ranks.
        assert losses(tmp_path / "many" / name) == pytest.approx(losses(tmp_path / "one" / name), rel=2e-4), name
        ours, theirs = (records(tmp_path / each / name, "validation")[-1] for each in ("many", "one"))
        scores = ("accuracy", "f1", "matthews") if name == "classes" else ("pair_accuracy", "reciprocal_rank")
        assert [ours[score] for score in scores] == pytest.approx([theirs[score] for score in scores], abs=1e-6), name


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_predictions_of_words_and_of_windows_come_together_from_all_ranks(ranks, tmp_path):
    """An example has several, of which each rank has other numbers: the scores are those of one process."""
    recipes = _write_recipes(tmp_path, tokens=ENTITIES, spans=QUESTIONS)
    scenarios.train_recipes(_runs(recipes, tmp_path / "one"))
    run_distributed(scenarios.train_recipes, ranks, arguments=(_runs(recipes, tmp_path / "many"),))
    for name in recipes:
        run = tmp_path / "many" / name
        assert losses(run) == pytest.approx(losses(tmp_path / "one" / name), rel=2e-4), name
        judged = score_examples(open_model(run), str(tmp_path / name / "validation.jsonl"))
        assert len(set(judged.predicted.numbers.tolist())) >= 31
        expected = (_scores_of_tags if name == "tokens" else _scores_of_answers)(judged)
        found = records(run, "validation")[-1]
        assert {score: found[score] for score in expected} == pytest.approx(expected, abs=1e-6), name


def _scores_of_tags(judged):
    numbers, values, labels = judged.predicted
    assert len(numbers) == sum(len(row["label"]) for row in ENTITIES[53:])
    tags = [[np.array(TAGS)[each[numbers == row]].tolist() for row in range(31)] for each in (labels, values)]
    assert tags[0] == [row["label"] for row in ENTITIES[53:]]
    return {
        "accuracy": metrics.accuracy_score(labels, values),
        "entity_f1": entities.f1_score(*tags),
        "entity_precision": entities.precision_score(*tags),
        "entity_recall": entities.recall_score(*tags),
    }


def _scores_of_answers(judged):
    """Those of SQuAD, for answers without articles and punctuation."""
    given = judged.task.answers(judged.predicted, judged.examples)
    assert len(judged.predicted.numbers) > len(given) == 31
    pairs = [(given[number].split(), row["label"].split()) for number, row in enumerate(QUESTIONS[53:])]
    shares = [2 * sum((Counter(a) & Counter(b)).values()) / (len(a) + len(b)) for a, b in pairs]
    assert max(shares) > 0, "no answer has a right word"
    return {"exact_match": float(np.mean([a == b for a, b in pairs])), "f1": float(np.mean(shares))}

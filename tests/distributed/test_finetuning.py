"""Fine-tuning on 1, 2 and 4 ranks: the same losses, and every one of a prime number of examples scored once."""

from __future__ import annotations

import pytest
import scenarios
from harness import run_distributed
from labelled import texts, write_recipe
from nightly import nightly
from runs import losses, records

PAIRS = [{"text": row["text"], "pair": " ".join(reversed(row["text"].split()))} for row in texts(84)]


def _runs(recipes, folder, *options):
    common = ["--device", "cpu", "--model.dropout", "0", "--model.head.dropout", "0", "--steps", "6", *options]
    # Adam's step for a gradient of almost nothing would turn a rounding of it into a difference of its own size.
    common += ["--optimizer.eps", "1e-4"]
    tasks = {
        "classes": [],
        "pairs": ["--model.architecture", "text_embedder", "--objective.name", "embedding"],
    }
    return [(recipes[name], [*common, *own, "--run-dir", str(folder / name)]) for name, own in tasks.items()]


@pytest.mark.parametrize("ranks", [2, nightly(4)])
def test_ranks_agree_on_losses_and_scores(ranks, tmp_path):
    recipes = {}
    for name, rows in (("classes", texts(84)), ("pairs", PAIRS)):
        (tmp_path / name).mkdir()
        recipes[name] = write_recipe(tmp_path / name, rows[:53], rows[53:])
    scenarios.train_recipes(_runs(recipes, tmp_path / "one"))
    run_distributed(scenarios.train_recipes, ranks, arguments=(_runs(recipes, tmp_path / "many"),))
    for name in recipes:
        # In-batch negatives are those of all ranks.
        assert losses(tmp_path / "many" / name) == pytest.approx(losses(tmp_path / "one" / name), rel=2e-4), name
        ours, theirs = (records(tmp_path / each / name, "validation")[-1] for each in ("many", "one"))
        scores = ("accuracy", "f1", "matthews") if name == "classes" else ("pair_accuracy", "reciprocal_rank")
        assert [ours[score] for score in scores] == pytest.approx([theirs[score] for score in scores], abs=1e-6), name

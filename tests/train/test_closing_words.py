"""What a run says at its end of evaluations that came before."""

import json

from matmix.train.command import earlier_best
from matmix.train.tasks.base import Metric

KNOWN = (
    Metric(name="loss", title="loss"),
    Metric(name="masked_accuracy", title="masked accuracy", unit="%", higher_is_better=True, digits=1),
)


def test_an_earlier_better_evaluation_is_named_whichever_direction_is_better(tmp_path):
    records = [
        {"kind": "train", "step": 1, "loss": 0.1},
        {"kind": "validation", "step": 2, "loss": 2.5, "masked_accuracy": 0.4},
        {"kind": "validation", "step": 4, "loss": 2.0, "masked_accuracy": 0.6},
        {"kind": "validation", "step": 6, "loss": 2.25, "masked_accuracy": 0.5},
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
    assert earlier_best(tmp_path, KNOWN, {"loss": 2.25, "masked_accuracy": 0.5}) == [
        "Better before: validation loss 2.0000 at step 4, masked accuracy 60.0% at step 4."
    ]
    assert earlier_best(tmp_path, KNOWN, {"loss": 1.5, "masked_accuracy": 0.5}) == [
        "Better before: validation masked accuracy 60.0% at step 4."
    ]
    assert earlier_best(tmp_path, KNOWN, {"loss": 1.5, "masked_accuracy": 0.75}) == []


def test_runs_without_records_or_with_other_metrics_say_nothing(tmp_path):
    assert earlier_best(tmp_path, KNOWN, {"loss": 2.0}) == []
    (tmp_path / "metrics.jsonl").write_text(
        '{"kind": "validation", "step": 2, "other": 1.0}\n{"kind": "validation", "loss": "x"}\n'
    )
    assert earlier_best(tmp_path, KNOWN, {"loss": 2.0}) == []

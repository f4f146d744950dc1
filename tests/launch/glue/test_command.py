"""`matmix glue` from files to the table."""

from __future__ import annotations

import csv
import json

import pytest
import torch
from runs import records, weights

from matmix.launch.cli import main
from matmix.launch.glue.plan import GlueSettings, Plan
from matmix.use.opening import open_model
from matmix.use.scoring import score_examples

FAST = ["--device", "cpu", "--global-batch-size", "4", "--epochs", "2", "--optimizer.lr", "1e-3"]
FAST += ["--logging.tensorboard", "False", "--logging.progress", "False", "--logging.picture", "False"]


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Between the weights that both have, but for classifiers."""
    names = [name for name in one if name in other and not name.startswith("classifier.")]
    assert len(names) > 10
    return sum((one[name].double() - other[name].double()).square().sum().item() for name in names) ** 0.5


def test_two_tasks_and_the_second_begins_with_the_weights_of_the_first(
    encoder, glue, tmp_path, in_this_process, capsys, monkeypatch
):
    out = tmp_path / "out"
    command = ["glue", str(encoder), str(glue), "--tasks", "rte", "MNLI", "--seeds", "5", "--out", str(out), *FAST]
    assert main([*command, "--dry-run"]) == 0
    assert not out.exists()
    said = capsys.readouterr().out
    assert "| MNLI | 60    | 13         | 0.001 | 5e-06        | 2      | 4     | 30    | source      |" in said
    assert "| RTE  | 4     | 13         | 0.001 | 1e-06        | 2      | 4     | 2     | MNLI        |" in said
    assert main(command) == 0
    assert in_this_process == ["MNLI, seed 5", "RTE, seed 5"]
    source, mnli, rte = (weights(run) for run in (encoder, out / "MNLI" / "seed-5", out / "RTE" / "seed-5"))
    assert distance(rte, mnli) < 0.5 * distance(rte, source)
    assert rte["classifier.output.weight"].shape == (2, 32)
    said = capsys.readouterr().out
    accuracy = records(out / "MNLI" / "seed-5", "validation")[-1]["accuracy"]
    mismatched = score_examples(
        open_model(out / "MNLI" / "seed-5"), str(glue / "MNLI" / "dev_mismatched.tsv")
    ).metrics()["accuracy"]
    rows = list(csv.DictReader((out / "table.csv").open()))
    assert [float(row["mean"]) for row in rows[:2]] == pytest.approx([accuracy, mismatched])
    assert f"{100 * mismatched:.1f}" in said
    assert "no finished run of QNLI, QQP, SST-2, MRPC, CoLA, STS-B" in said
    record = json.loads((out / "glue.json").read_text())
    assert record["tasks"]["RTE"]["runs"][0]["begins_with"] == str(out / "MNLI" / "seed-5")

    # That of another source is not taken.
    for start, folder in ((encoder, "RTE"), (out / "MNLI" / "seed-5", "RTE-without-MNLI")):
        asked = GlueSettings(folder=str(glue), tasks=("RTE",), seeds=(5,))
        plan = Plan(source=str(start), name="", out=out, asked=asked)
        assert plan.runs[0].config.run_dir == str(out / folder / "seed-5")

    # The same again trains and scores nothing, and neither does a report.
    monkeypatch.setattr("matmix.launch.glue.results.score_examples", None)
    for more in ([], ["--report"]):
        assert main([*command, *more]) == 0
        assert capsys.readouterr().out.strip() == said.strip()
    assert len(in_this_process) == 2
    assert main([*command, "--settings", "bert"]) == 2
    error = capsys.readouterr().err
    assert "was trained with other settings (optimizer.weight_decay" in error
    assert "give these, or another --out" in error


def test_the_control_is_the_most_frequent_class(encoder, glue, tmp_path, in_this_process):
    """Of the training examples, as the answer to the others: where that is the second class, F1 is not 0."""
    from sklearn.metrics import accuracy_score, f1_score

    tasks = ["MRPC", "QQP", "CoLA", "STS-B"]
    words = ["--tasks", *tasks, "--seeds", "0", "--out", str(tmp_path), "--report", *FAST]
    assert main(["glue", str(encoder), str(glue), *words]) == 0
    found = {row["task"] + " " + row["score"]: row for row in csv.DictReader((tmp_path / "table.csv").open())}
    for name, column, header in (("MRPC", 0, 1), ("QQP", 5, 1), ("CoLA", 1, 0)):
        lines = [(glue / name / f"{split}.tsv").read_text().splitlines()[header:] for split in ("train", "dev")]
        fields = [[line.split("\t") for line in part] for part in lines]
        trained, judged = ([row[column] for row in rows if len(row) > column] for rows in fields)
        assert trained.count("0") != trained.count("1")
        most = max("01", key=trained.count)
        answers = [most] * len(judged)
        key = "Matthews correlation" if name == "CoLA" else "accuracy"
        wanted = 0.0 if name == "CoLA" else accuracy_score(judged, answers)
        assert float(found[f"{name} {key}"]["most_frequent_class"]) == pytest.approx(wanted)
        if name != "CoLA":
            f1 = f1_score(judged, answers, pos_label="1", zero_division=0)
            assert float(found[f"{name} F1"]["most_frequent_class"]) == pytest.approx(f1)
    assert float(found["MRPC F1"]["most_frequent_class"]) > 0.5
    assert float(found["STS-B Pearson correlation"]["most_frequent_class"]) == 0


@pytest.mark.slow
def test_all_tasks_in_processes_of_their_own(encoder, glue, tmp_path, capsys):
    command = ["glue", str(encoder), str(glue), "--seeds", "0", "--parallel", "2", "--out", str(tmp_path / "out")]
    assert main([*command, *FAST]) == 0
    said = capsys.readouterr().out
    assert "Average: the mean over tasks" in said
    assert "Left out as malformed: 1 rows of QQP/train.tsv." in said
    record = json.loads((tmp_path / "out" / "glue.json").read_text())
    assert record["missing"] == []
    scores = [task["score"] for task in record["tasks"].values()]
    assert record["average"] == pytest.approx(sum(scores) / 8)

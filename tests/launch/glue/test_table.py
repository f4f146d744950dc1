"""The table's arithmetic."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from matmix.launch.glue.plan import GlueSettings, Plan
from matmix.launch.glue.results import (
    RunScores,
    TaskScores,
    averages,
    table_csv,
    table_text,
    write_table,
)
from matmix.launch.glue.tasks import TASKS

VALUES = {  # task -> scores of two seeds
    "MNLI": [(0.80, 0.82), (0.82, 0.84)],
    "QNLI": [(0.90,), (0.91,)],
    "QQP": [(0.90, 0.86), (0.92, 0.88)],
    "RTE": [(0.70,), (0.80,)],
    "SST-2": [(0.93,), (0.93,)],
    "MRPC": [(0.85, 0.89), (0.87, 0.91)],
    "CoLA": [(0.50,), (0.60,)],
    "STS-B": [(0.88, 0.87), (0.90, 0.89)],
}
SCORES = {"MNLI": 0.82, "QNLI": 0.905, "QQP": 0.89, "RTE": 0.75, "SST-2": 0.93, "MRPC": 0.88, "CoLA": 0.55}
SCORES["STS-B"] = 0.885


def results(names=tuple(TASKS), begins_with="runs/x/MNLI/seed-0") -> list[TaskScores]:
    found = []
    for name in names:
        titles = [score.title for score in TASKS[name].scores]
        runs = [
            RunScores(
                seed=seed,
                run_dir=f"runs/x/{name}/seed-{seed}",
                begins_with=begins_with,
                values=dict(zip(titles, values, strict=True)),
            )
            for seed, values in enumerate(VALUES[name])
        ]
        found.append(TaskScores(task=TASKS[name], runs=runs, control=dict.fromkeys(titles, 0.5)))
    return found


def plan(out: Path = Path("runs/x"), notes: tuple[str, ...] = ()) -> Plan:
    asked = GlueSettings(folder="GLUE", tasks=tuple(TASKS), seeds=(0, 1))
    return Plan(source="runs/tiny", name="tiny", out=out, asked=asked, notes=notes)


def rows_of(text: str) -> dict[tuple[str, str], list[str]]:
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    return {(row[0], row[1]): row[2:] for row in cells[2:]}


def test_the_average_is_over_tasks_of_the_means_over_scores_and_seeds():
    """Not over scores: tasks with two of them count once."""
    found = results()
    assert {result.task.name: result.score for result in found} == pytest.approx(SCORES)
    assert averages(found) == pytest.approx((sum(SCORES.values()) / 8, 0.5))
    assert averages(found)[0] == pytest.approx(0.82625)
    rows = rows_of(table_text(plan(), found))
    assert rows["average", ""][:2] == ["82.6", "50.0"]
    assert rows["MNLI", "accuracy, mismatched"] == ["83.0 ± 1.4", "50.0", "2"]
    assert rows["MNLI", "mean"][0] == "82.0 ± 1.4"
    assert rows["RTE", "accuracy"][0] == "75.0 ± 7.1"
    assert rows["STS-B", "Spearman correlation"][0] == "88.0 ± 1.4"
    assert len(rows) == 12 + 4 + 1  # scores, means of those tasks that have two, average


def test_without_all_tasks_there_is_no_average():
    found = results(["MNLI", "RTE"])
    assert averages(found) == (None, None)
    text = table_text(plan(), found)
    assert rows_of(text)["average", ""][0] == ""
    assert "there is no finished run of QNLI, QQP, SST-2, MRPC, CoLA, STS-B." in text


def test_the_table_says_which_runs_began_elsewhere_and_which_have_no_number():
    found = results(begins_with="runs/tiny")
    open_run = RunScores(seed=1, run_dir="", begins_with="", values={}, why="not finished")
    found[1] = TaskScores(task=found[1].task, runs=[found[1].runs[0], open_run], control=found[1].control)
    text = table_text(plan(notes=("Left out as malformed: 3 rows of QQP/train.tsv.",)), found)
    assert "RTE, MRPC, STS-B: begins with runs/tiny itself, as it has no run on MNLI here." in text
    assert "Without a number: QNLI seed 1 (not finished)." in text
    assert rows_of(text)["QNLI", "accuracy"] == ["90.0", "50.0", "1"]
    assert text.splitlines()[-1] == "Left out as malformed: 3 rows of QQP/train.tsv."


def test_the_files_hold_all_seeds(tmp_path):
    text = write_table(plan(tmp_path), results())
    assert (tmp_path / "table.md").read_text() in text + "\n"
    rows = list(csv.DictReader(io.StringIO((tmp_path / "table.csv").read_text())))
    assert len(rows) == 12
    assert [float(rows[0][key]) for key in ("mean", "seed_0", "seed_1", "runs")] == pytest.approx([0.81, 0.8, 0.82, 2])
    record = json.loads((tmp_path / "glue.json").read_text())
    assert record["average"] == pytest.approx(0.82625)
    assert record["seeds"] == [0, 1]
    assert record["tasks"]["CoLA"]["runs"][1]["scores"] == {"Matthews correlation": 0.6}
    assert table_csv(plan(tmp_path), results()) == (tmp_path / "table.csv").read_text()


def test_a_table_without_numbers_overwrites_none(tmp_path):
    write_table(plan(tmp_path), results())
    before = (tmp_path / "table.md").read_text()
    empty = [TaskScores(task=result.task, runs=[], control=result.control) for result in results()]
    assert "No run of this table is finished" in write_table(plan(tmp_path), empty)
    assert (tmp_path / "table.md").read_text() == before

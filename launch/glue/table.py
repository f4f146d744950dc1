"""The table of `matmix glue`, and its files: OUT/table.md, OUT/table.csv, OUT/glue.json."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence

from matmix.data.storage.files import write_atomic
from matmix.launch.glue.plan import Plan
from matmix.launch.glue.results import TaskScores, average, control_average, missing_tasks
from matmix.launch.many.spread import mean_in_words, spread
from matmix.launch.many.table import markdown

_CONTROL = "most frequent class"


def write_table(plan: Plan, results: Sequence[TaskScores], notes: Sequence[str]) -> str:
    """Writes the files; returns the text to be shown. A table that is there stays where no run is finished.

    notes: further lines for people.
    """
    text = table_text(plan, results, notes)
    files = [plan.out / name for name in ("table.md", "table.csv", "glue.json")]
    if not any(result.finished for result in results) and files[0].is_file():
        return f"{text}\n\nNo run of this table is finished: {plan.out} is left as it was."
    plan.out.mkdir(parents=True, exist_ok=True)
    for path, content in zip(files, (text + "\n", table_csv(plan, results), table_json(plan, results)), strict=True):
        write_atomic(path, content)
    return f"{text}\n\n{', '.join(map(str, files))}"


def table_text(plan: Plan, results: Sequence[TaskScores], notes: Sequence[str] = ()) -> str:
    """In Markdown, with what is to be known about its numbers."""
    rows = []
    for result in results:
        count = str(len(result.finished))
        for score in result.task.scores:
            own = _words(result.values(score.title))
            rows.append([result.task.name, score.title, own, _words([result.control[score.title]]), count])
        if len(result.task.scores) > 1:
            rows.append([result.task.name, "mean", _words(result.means), _words([result.control_score]), count])
    missing = missing_tasks(results)
    averages = [_words([] if value is None else [value]) for value in (average(results), control_average(results))]
    rows.append(["average", "", *averages, ""])
    columns = ["task", "score (x 100)", plan.name, _CONTROL, "runs"]
    lines = [markdown(columns, rows), ""]
    lines.append("Mean ± sample standard deviation over seeds; the last evaluation of a run counts.")
    if missing:
        lines.append(f"No average, which is over all eight tasks: there is no finished run of {', '.join(missing)}.")
    else:
        lines.append("Average: the mean over tasks of the mean over their scores and seeds.")
    return "\n".join([*lines, *_about_runs(plan, results), *notes])


def table_csv(plan: Plan, results: Sequence[TaskScores]) -> str:
    """The same unrounded, as shares of 1, with each seed's own values."""
    text = io.StringIO()
    own = [f"seed_{seed}" for seed in plan.seeds]
    writer = csv.DictWriter(
        text, ["task", "score", "mean", "deviation", "runs", "most_frequent_class", *own], lineterminator="\n"
    )
    writer.writeheader()
    for result in results:
        for score in result.task.scores:
            found = spread(result.values(score.title))
            mean, deviation = (found.mean, found.deviation) if found else (None, None)
            row = {"task": result.task.name, "score": score.title, "mean": mean, "deviation": deviation}
            row |= {"runs": len(result.finished), "most_frequent_class": result.control[score.title]}
            writer.writerow(row | {f"seed_{run.seed}": run.values[score.title] for run in result.finished})
    return text.getvalue()


def table_json(plan: Plan, results: Sequence[TaskScores]) -> str:
    """All that the table says, and where it is from."""
    tasks = {}
    for result in results:
        runs = [
            {"seed": run.seed, "run": run.run_dir, "begins_with": run.begins_with, "scores": run.values}
            for run in result.runs
        ]
        tasks[result.task.name] = {"score": result.score, "most_frequent_class": result.control, "runs": runs}
    record = {"source": plan.source, "settings": plan.settings, "other_settings": list(plan.others)}
    record |= {"seeds": list(plan.seeds), "tasks": tasks, "missing": missing_tasks(results)}
    record |= {"average": average(results), "most_frequent_class": control_average(results)}
    return json.dumps(record, indent=2) + "\n"


def _about_runs(plan: Plan, results: Sequence[TaskScores]) -> list[str]:
    lines = [f"Settings: {plan.settings}" + (f", and {' '.join(plan.others)}." if plan.others else ".")]
    runs = [(result.task, run) for result in results for run in result.runs]
    alone = {task.name: None for task, run in runs if task.from_mnli and run.values and run.begins_with == plan.source}
    if alone:
        lines.append(f"{', '.join(alone)}: begins with {plan.source} itself, as it has no run on MNLI here.")
    if open_runs := [f"{task.name} seed {run.seed} ({run.why})" for task, run in runs if not run.values]:
        lines.append(f"Without a number: {', '.join(open_runs)}.")
    return lines


def _words(values: Sequence[float]) -> str:
    return mean_in_words(values, 1, scale=100)

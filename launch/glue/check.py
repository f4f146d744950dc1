"""What is there of a public GLUE download, and what to do about what is not."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from matmix.data.artifacts import shell_line
from matmix.data.config import ExamplesConfig
from matmix.data.examples.base import Classes, read_number
from matmix.data.examples.readers import read_rows
from matmix.launch.glue.tasks import TASKS, GlueTask

_OF_MICROSOFT = "msr_paraphrase_train.txt"


@dataclasses.dataclass(frozen=True, slots=True)
class Count:
    """Of the rows of a file."""

    examples: int
    left_out: int
    """Malformed ones."""


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """The files of a task."""

    task: GlueTask
    folder: Path
    counts: Mapping[str, Count]
    """By the names of the files that can be read."""
    problems: Sequence[str]
    """What is missing or cannot be read, and what to do: a sentence each."""

    @property
    def begun(self) -> bool:
        """Whether the task has a folder."""
        return self.folder.is_dir()

    def words(self) -> str:
        """In one line for the files, and one for each problem."""
        files = [
            f"{name} {count.examples:,}" + (f" ({count.left_out:,} malformed left out)" if count.left_out else "")
            for name, count in self.counts.items()
        ]
        lines = [f"{self.task.name:<6}{', '.join(files)} examples"] if files else []
        return "\n".join([*lines, *(f"{self.task.name:<6}MISSING: {problem}" for problem in self.problems)])


def look(folder: Path, tasks: Sequence[GlueTask] = tuple(TASKS.values())) -> list[Found]:
    """Reads the files of these tasks. Raises FileNotFoundError (one line) where there is no `folder`."""
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}: give the one that holds CoLA, MNLI and the others")
    return [_look(folder / task.name, task) for task in tasks]


def whole(folder: Path, tasks: Sequence[GlueTask] = ()) -> list[Found]:
    """The files of these tasks, or of all that `folder` has. Raises FileNotFoundError or ValueError (one line) where
    some are missing or cannot be read."""
    found = look(folder, tasks or list(TASKS.values()))
    if not tasks:
        found = [task for task in found if task.begun]
    problems = [problem for task in found for problem in task.problems]
    if problems or not found:
        what = problems[0] if problems else f"{folder} has none of the folders {', '.join(TASKS)}"
        raise ValueError(f"{what} ({shell_line('matmix', 'glue', '--check', folder)} lists all that is missing)")
    return found


def notes_on(found: Sequence[Found]) -> list[str]:
    """What a table says of the files."""
    left_out = [
        f"{count.left_out:,} rows of {task.task.name}/{name}"
        for task in found
        for name, count in task.counts.items()
        if count.left_out
    ]
    return [f"Left out as malformed: {', '.join(left_out)}."] if left_out else []


def _look(folder: Path, task: GlueTask) -> Found:
    if not folder.is_dir():
        return Found(task, folder, {}, [f"there is no folder {folder}; unpack {task.name} of the GLUE download there"])
    form, counts, problems = task.form(), {}, []
    if missing := [name for name in task.files if not (folder / name).is_file()]:
        problems.append(f"{folder} lacks {', '.join(missing)}; {_advice(folder, task)}")
    for name in task.files:
        if name not in missing:
            try:
                counts[name] = _count(folder / name, form)
            except ValueError as error:
                problems.append(str(error))
    return Found(task, folder, counts, problems)


def _count(path: Path, form: ExamplesConfig) -> Count:
    """Raises ValueError (one line) for what a run would stumble over."""
    rows = read_rows(str(path), form, tuple(form.columns))
    classes = Classes(form.labels)
    for number, value in enumerate(rows.columns["label"]):
        if form.labels:
            classes.number(value, partial(rows.where, number))
        else:
            read_number(value, rows.where(number))
    return Count(len(rows), rows.left_out)


def _advice(folder: Path, task: GlueTask) -> str:
    if task.name == "MRPC" and (folder / _OF_MICROSOFT).is_file():
        return (
            f"they are made of {_OF_MICROSOFT}, which is there: the rows whose two ids stand in GLUE's dev_ids.tsv are "
            "dev.tsv, the others are train.tsv, each with the first line; the download script of GLUE does that"
        )
    return f"copy them from the folder {task.name} of the GLUE download"

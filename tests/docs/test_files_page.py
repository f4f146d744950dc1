"""docs/files.md names every file and every field that matmix writes, and no field that it does not."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
from paths import ROOT
from runs import run_recipe

from matmix.data.formats.base import ShardInfo
from matmix.data.manifest import ImagesInfo, Manifest, SplitInfo, TokenizerInfo
from matmix.launch.jobs.attempts import PastAttempt
from matmix.launch.jobs.launches import Job
from matmix.train.evaluators import EVALUATORS
from matmix.train.meters import collectives
from matmix.train.meters.speed import Goodput, StepRecord
from matmix.train.run.outcome import Outcome
from matmix.train.tasks import TASKS

PAGE = (ROOT / "docs/files.md").read_text(encoding="utf-8")
CODE = re.compile("`([^`]+)`")


def section(title: str) -> str:
    """From a heading to the next."""
    return re.split(r"^#+ ", PAGE.split(f"# {title}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def first_cells(text: str) -> set[str]:
    """The code in the first cells of the tables."""
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return {code for cell in cells for code in CODE.findall(cell)}


def is_named(path: str, patterns: set[str]) -> bool:
    """Whether a pattern such as `step-<step>/<name>` is that of a file."""
    found = [re.sub(r"<\w+>", "[^/]+", re.escape(p).replace(r"\<", "<").replace(r"\>", ">")) for p in patterns]
    return any(re.fullmatch(pattern, path) for pattern in found)


def files(folder: Path, *, without: str = "") -> list[str]:
    paths = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    return [path for path in paths if not (without and path.startswith(without))]


@pytest.fixture(scope="module")
def run(tmp_path_factory, dataset) -> Path:
    """A run with all that a small one writes."""
    folder = tmp_path_factory.mktemp("files") / "run"
    every = ["--steps", "4", "--logging.every", "2", "--evaluation.every", "2", "--checkpoint.every", "2"]
    run_recipe("debug_mru", dataset, folder, *every, "--ema.decay", "0.5", "--logging.picture", "True")
    return folder


def test_all_files_of_a_run_are_named(run):
    named = first_cells(section("The run directory"))
    assert [path for path in files(run, without="checkpoints/") if not is_named(path, named)] == []
    named = first_cells(section("Checkpoints"))
    checkpoint = run / "checkpoints/step-00000004"
    assert [path for path in files(checkpoint) if not is_named(path, named)] == []
    manifest = json.loads((checkpoint / "checkpoint.json").read_text())
    words = CODE.findall(section("Checkpoints"))
    assert [word for word in words if word in manifest][-len(manifest) :] == list(manifest)
    assert manifest["extra"].keys() <= set(words)
    assert json.loads((run / "summary.json").read_text()).keys() <= set(CODE.findall(section("summary.json")))


def general(field: str) -> str:
    """A field with what changes in angle brackets."""
    field = re.sub("^(?:ema_)", "", field)
    field = re.sub("^position_loss/.*", "position_loss/<positions>", field)
    field = re.sub("^monitor/blocks.*", "monitor/blocks.<i>.<name>", field)
    return re.sub("^grad_norm/.*", "grad_norm/<group>", field)


def test_all_fields_of_training_records_are_named_and_no_others(run):
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    of_steps, of_evaluations = first_cells(section("Training")), first_cells(section("Evaluations"))
    assert {general(name) for r in records if r["kind"] == "train" for name in r} <= of_steps
    assert {general(name) for r in records if r["kind"] == "validation" for name in r} <= of_evaluations

    values = {field.name: 1 for field in dataclasses.fields(StepRecord)}
    tables = {"means": dict.fromkeys((name for task in TASKS.values() for name in recorded(task)), 1.0)}
    tables |= {"clip_norms": {"mru": 1.0}, "monitored": {"blocks.0.log_norm_max": 1.0}}
    tables |= {"ranks": collectives.numbers([collectives.Times(2.0, 1.0, 1.0)] * 2), "goodput": Goodput().shares()}
    known = {"kind"}
    for unit in ("tokens", "images"):
        known |= {general(name) for name in StepRecord(**{**values, **tables, "unit": unit}).numbers()}
    assert of_steps == known


def recorded(task) -> tuple[str, ...]:
    """What a task records of its steps, by the names in records."""
    return tuple(getattr(task, "accuracy", name) if name == "accuracy" else name for name in task.recorded)


def test_all_metrics_of_evaluations_are_named_and_no_others():
    named = first_cells(section("Evaluations"))
    metrics = {metric.name for kind in (*TASKS.values(), *EVALUATORS.values()) for metric in kind.metrics}
    assert metrics <= named
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "train").rglob("*.py"))
    written = {name.partition("<")[0].removesuffix("_x") for name in named}
    assert [name for name in written if not re.search(rf'["`]{re.escape(name)}', source)] == []


def test_losses_have_their_units():
    rows = re.findall(r"^\| (`.+) \| (.+) \|$", section("Units of the loss"), flags=re.MULTILINE)
    units = {name: unit for names, unit in rows for name in CODE.findall(names)}
    assert units == {name: task.loss_metric.unit for name, task in TASKS.items()}


def test_all_files_and_members_of_datasets_are_named(dataset):
    named = first_cells(section("Datasets"))
    assert [path for path in files(Path(dataset), without=".cache/") if not is_named(path, named)] == []
    words = set(CODE.findall(section("Datasets")))
    kinds = (Manifest, SplitInfo, ShardInfo, TokenizerInfo, ImagesInfo)
    assert {field.name for kind in kinds for field in dataclasses.fields(kind)} <= words


def test_all_files_of_exports_are_named_and_no_others(exported):
    named, found = first_cells(section("Exports")), {name for path in exported.values() for name in files(path)}
    assert [name for name in found if not is_named(name, named)] == []
    assert named - {"LICENSE"} <= found


@pytest.mark.parametrize("kind", [Outcome, Job, PastAttempt])
def test_members_of_launchers_files_are_named(kind):
    words = set(CODE.findall(section("The run directory")))
    assert {field.name for field in dataclasses.fields(kind)} <= words

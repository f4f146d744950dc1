"""The GLUE column: encoders of a comparison are fine-tuned on GLUE's tasks, as `matmix glue` does it."""

from __future__ import annotations

import dataclasses
import json
from statistics import fmean

import pytest
from comparisons import ENTRIES, TINY, csv_rows, finish, printed_table
from glue_files import write_glue

from matmix.launch.cli import main
from matmix.launch.glue.plan import GlueSettings
from matmix.launch.glue.tasks import TASKS
from matmix.launch.lab.compare.config import keep_recipe, read_comparison, tasks_of
from matmix.launch.lab.compare.downstream import FinetunedGlue
from matmix.launch.lab.compare.width import matched
from matmix.use.finetuning import planned_config

ONE = ENTRIES.split('[[comparison.entry]]\nname = "Hydra')[0].replace("[0, 1]", "[3]")
FAST = ["--glue.device", "cpu", "--glue.global-batch-size", "4", "--glue.epochs", "1", "--glue.optimizer.lr", "1e-3"]
FAST += ["--glue.logging.tensorboard", "False", "--glue.logging.picture", "False"]


@pytest.mark.slow
def test_encoders_are_fine_tuned_as_by_matmix_glue(recipe, dataset, tmp_path, in_this_process, capsys):
    """MNLI first, whose weights RTE begins with; the same command again trains nothing."""
    write_glue(tmp_path / "GLUE", ["MNLI", "RTE"], train=12)
    home = tmp_path / "home"
    words = [recipe(TINY + ONE), "--data.path", dataset, "--run-dir", str(home), "--no-speed"]
    words += ["--finetune", f"glue:{tmp_path / 'GLUE'}", "--glue-tasks", "rte", "mnli", *FAST]
    assert main(["compare", *words, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "then each run is fine-tuned on GLUE (MNLI, RTE; settings hydra): 2 runs in" in said
    assert not home.exists()

    assert main(["compare", *words]) == 0
    said = capsys.readouterr().out
    assert in_this_process == ["attention, seed 3", "attention on MNLI, seed 3", "attention on RTE, seed 3"]
    own = home / "finetune" / "glue" / "attention" / "seed-3"
    record = json.loads((own / "glue.json").read_text())
    tasks = record["tasks"]
    assert tasks["MNLI"]["runs"][0]["begins_with"] == str(home / "attention" / "seed-3")
    assert tasks["RTE"]["runs"][0]["begins_with"] == str(own / "MNLI" / "seed-3")
    assert record["other_settings"][:2] == ["--device", "cpu"]
    assert "most frequent class" in (own / "table.md").read_text()
    found = printed_table(said)["attention"]
    scores = {name: tasks[name]["score"] for name in tasks}
    assert found["GLUE: MNLI (%)"] == f"{100 * scores['MNLI']:.1f}"
    assert found["GLUE: RTE (%)"] == f"{100 * scores['RTE']:.1f}"
    assert "GLUE: average (%)" not in found  # which is over eight tasks
    assert "Means: MNLI of accuracy, matched and accuracy, mismatched." in said
    row = csv_rows(home)["attention"]
    matched = tasks["MNLI"]["runs"][0]["scores"]["accuracy, matched"]
    assert float(row["finetune/glue/MNLI/accuracy_matched_mean"]) == pytest.approx(matched)

    before = csv_rows(home)
    for again in (words, words[:6], [str(home), "--report"]):
        assert main(["compare", *again]) == 0
        assert csv_rows(home) == before
    assert len(in_this_process) == 3
    capsys.readouterr()
    assert main(["compare", *words, "--glue-settings", "bert"]) == 2
    said = capsys.readouterr().err
    assert "was fine-tuned with other settings (" in said
    assert "optimizer.weight_decay: 1e-06 there, 1e-05 here" in said

    # A comparison that was moved is the same: what is finished stays so.
    home.rename(tmp_path / "moved")
    assert main(["compare", *(str(tmp_path / "moved") if word == str(home) else word for word in words)]) == 0
    assert csv_rows(tmp_path / "moved") == before
    assert len(in_this_process) == 3


def _score(glue: FinetunedGlue, pretrained, task, seed: int, value: float, *, alone: bool = False) -> None:
    """A fine-tuning of a run that is finished with this value of all metrics."""
    config = planned_config(task.recipe, pretrained.config.model, pretrained.title)
    folder = glue.folder_of(pretrained) / f"{task.name}{'-without-MNLI' if alone else ''}" / f"seed-{seed}"
    config = dataclasses.replace(config, seed=seed, run_dir=str(folder), epochs=0.0, steps=3)
    metrics = {score.metric: value for score in task.scores}
    finish(dataclasses.replace(pretrained, seed=seed, config=config), {"loss": 1.0, **metrics})
    if task.second:
        (folder / "second.json").write_text(json.dumps({score.metric: value + 0.1 for score in task.scores}))


def test_the_table_has_a_column_for_each_task_and_one_for_the_average(recipe, tmp_path, capsys):
    """Means over the scores of a task, its seeds, and all tasks; a run that lacks a task has no average."""
    home = tmp_path / "home"
    overrides = ["--model.vocab-size", "64", "--run-dir", str(home)]
    comparison = matched(read_comparison(recipe(TINY + ENTRIES.replace("[0, 1]", "[3]")), overrides))
    settings = GlueSettings(folder="GLUE", tasks=tuple(TASKS), seeds=(0, 1), options=())
    glue = FinetunedGlue(settings=settings, home=home)
    keep_recipe(comparison)
    glue.keep()
    values = dict(zip(TASKS, (0.8, 0.9, 0.7, 0.6, 0.95, 0.85, 0.5, 0.75), strict=True))
    for pretrained in tasks_of(comparison):
        finish(pretrained, {"loss": 2.0, "masked_accuracy": 0.25})
        for task in TASKS.values():
            lacks = pretrained.entry == "Hydra, 2 x" and task.name in ("CoLA", "QQP")
            alone = pretrained.entry == "Hydra, 2 x" and task.name == "RTE"
            for seed in () if lacks else (0, 1):
                _score(glue, pretrained, task, seed, values[task.name] + seed / 50, alone=alone)
    assert main(["compare", str(home), "--report"]) == 0
    said = capsys.readouterr().out
    rows = printed_table(said)
    assert rows["attention"]["GLUE: MNLI (%)"] == "86.0 ± 1.4"  # matched and mismatched
    assert rows["attention"]["GLUE: RTE (%)"] == "61.0 ± 1.4"
    average = fmean(values.values()) + 0.05 / 8 + 0.01  # of MNLI the mean with mismatched; of two seeds
    assert rows["attention"]["GLUE: average (%)"] == f"{100 * average:.1f} ± 1.4"
    assert rows["Hydra, 2 x"]["GLUE: RTE (%)"] == "61.0 ± 1.4"
    assert rows["Hydra, 2 x"]["GLUE: average (%)"] == ""
    assert rows["attention"]["n"] == "1"
    assert "Not fine-tuned on GLUE's QQP, GLUE's CoLA: Hydra, 2 x seed 3." in said
    assert "with the seeds 0, 1 for each run. Settings: hydra. Means: MNLI of" in said
    assert "GLUE's RTE: begins with the encoder itself where it has no run on MNLI." in said
    row = csv_rows(home)["attention"]
    assert float(row["finetune/glue/average_mean"]) == pytest.approx(average)
    assert float(row["finetune/glue/average_deviation"]) == pytest.approx(0.02 / 2**0.5)
    assert float(row["finetune/glue/MNLI/accuracy_mismatched_mean"]) == pytest.approx(0.91)


def test_what_is_fine_tuned_later_takes_no_scores_away(recipe, tmp_path):
    home = tmp_path / "home"
    comparison = matched(read_comparison(recipe(TINY + ONE), ["--model.vocab-size", "64", "--run-dir", str(home)]))
    first = FinetunedGlue(settings=GlueSettings(folder="GLUE", tasks=("RTE",), seeds=(0, 1)), home=home)
    first.keep()
    settings = dataclasses.replace(first.settings, tasks=("CoLA",), seeds=(1, 2))
    more = FinetunedGlue(settings=settings, home=home)
    more.check(comparison)
    more.keep()
    assert (more.kept().settings.tasks, more.kept_settings().tasks) == (("CoLA",), ("RTE", "CoLA"))
    assert more.kept_settings().seeds == (0, 1, 2)
    own = dataclasses.replace(more, settings=dataclasses.replace(settings, seeds=()))
    with pytest.raises(ValueError, match=r"was fine-tuned with --glue-seeds 0 1 2, and runs of a table are trained"):
        own.check(comparison)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--finetune", "glue:nowhere"], "no folder nowhere"),
        (["--finetune", "glue:EMPTY"], "has none of the folders MNLI"),
        (["--finetune", "glue:DIR", "--glue-tasks", "RET"], '--glue-tasks: GLUE has no task "RET" here'),
        (["--finetune", "glue:DIR", "--glue-tasks", "QQP"], "there is no folder"),
        (["--finetune", "glue:DIR", "glue:DIR"], "glue: is given twice"),
        (["--finetune", "glue:DIR", "--glue-seeds", "1", "1"], "seeds 1 1: one of them is given twice"),
        (["--finetune", "glue:DIR", "--glue.seed", "1"], "differs between the runs: give --glue-seeds"),
        (["--finetune", "glue:DIR", "--glue.optimizer.lrr", "1"], 'the nearest known key is "optimizer.lr"'),
        (["--finetune", "glue:DIR", "--glue.epochs", "many"], "--epochs"),
        (["--finetune", "glue:DIR", "--slurm"], "--finetune trains on this host"),
        (["--glue-settings", "bert"], "options of GLUE are given without --finetune glue:DIR"),
        (["--finetune", "NAMED"], "the name glue is that of GLUE's tasks"),
    ],
)
def test_mistakes_are_one_line_before_anything_is_trained(words, message, recipe, tmp_path, capsys):
    write_glue(tmp_path / "GLUE", ["RTE"])
    (tmp_path / "empty").mkdir()
    (tmp_path / "glue.toml").write_text('[objective]\nname = "sequence_classification"\n')
    names = {"glue:DIR": f"glue:{tmp_path / 'GLUE'}", "glue:EMPTY": f"glue:{tmp_path / 'empty'}"}
    names["NAMED"] = str(tmp_path / "glue.toml")
    start = [recipe(TINY + ONE), "--model.vocab-size", "64", "--run-dir", str(tmp_path / "home")]
    assert main(["compare", *start, *(names.get(word, word) for word in words)]) == 2
    said = capsys.readouterr().err.strip()
    assert message in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "home").exists()


def test_what_was_written_down_is_checked(recipe, tmp_path, capsys):
    home = tmp_path / "home"
    comparison = matched(read_comparison(recipe(TINY + ONE), ["--model.vocab-size", "64", "--run-dir", str(home)]))
    keep_recipe(comparison)
    (home / "finetune" / "glue").mkdir(parents=True)
    for text, message in (
        ('settings = "theirs"', "glue.toml: "),
        ('tasks = ["RET"]', 'GLUE has no task "RET"'),
        ("seeds = [1,", "glue.toml"),
        ("other = 1", "glue.toml: "),
    ):
        (home / "finetune" / "glue" / "glue.toml").write_text(text)
        assert main(["compare", str(home), "--report"]) == 2
        said = capsys.readouterr().err.strip()
        assert message in said
        assert len(said.splitlines()) == 1


@pytest.mark.slow
def test_all_tasks_of_all_entries_in_processes_of_their_own(recipe, dataset, tmp_path, capsys):
    """Also of the control; there is an average."""
    write_glue(tmp_path / "GLUE", train=8, dev=7)
    home = tmp_path / "home"
    words = [recipe(TINY + ONE), "--data.path", dataset, "--run-dir", str(home), "--no-speed"]
    words += ["--comparison.controls", "True", "--parallel", "2", "--finetune", f"glue:{tmp_path / 'GLUE'}", *FAST]
    assert main(["compare", *words]) == 0
    rows = printed_table(capsys.readouterr().out)
    assert set(rows) == {"attention", "no mixer (control)"}
    for label, folder in (("attention", "attention"), ("no mixer (control)", "no-mixer")):
        record = json.loads((home / "finetune" / "glue" / folder / "seed-3" / "glue.json").read_text())
        assert rows[label]["GLUE: average (%)"] == f"{100 * record['average']:.1f}"
        assert rows[label]["GLUE: STS-B (%)"] == f"{100 * record['tasks']['STS-B']['score']:.1f}"

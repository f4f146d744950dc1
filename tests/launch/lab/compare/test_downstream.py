"""Encoders of a comparison are fine-tuned on tasks, and the table says what they score."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest
from comparisons import ENTRIES, TINY, csv_rows, finish, printed_table
from labelled import texts, write_jsonl

from matmix.launch.cli import main
from matmix.launch.lab.compare.config import keep_recipe, read_comparison, tasks_of
from matmix.launch.lab.compare.downstream import read_downstream
from matmix.launch.lab.compare.report import write_report
from matmix.launch.lab.compare.width import matched
from matmix.launch.many.planned import other_settings
from matmix.train.loop import train
from matmix.train.recipe import write_config
from matmix.use.finetuning import planned_config

TASK = """
steps = 3
global_batch_size = 8
device = "cpu"
[data]
seqlen = 32
workers = 0
[data.examples]
train = {train}
validation = {validation}
[objective]
name = "{name}"
[evaluation]
every = 2
best = "{best}"
[logging]
picture = false
tensorboard = false
"""


@pytest.fixture
def task(tmp_path):
    """Writes the recipe of a task with examples of its own; returns its path."""

    def write(name: str, kind: str = "sequence_classification", best: str = "accuracy") -> str:
        train, validation = texts(21), texts(15, seed=1)
        for number, row in enumerate([*train, *validation]):
            row["label"] = row["label"] if kind == "sequence_classification" else number / 4
        paths = [write_jsonl(tmp_path / f"{name}-{split}.jsonl", rows) for split, rows in ((1, train), (2, validation))]
        train, validation = map(json.dumps, paths)
        text = TASK.format(train=train, validation=validation, name=kind, best=best)
        (tmp_path / f"{name}.toml").write_text(text)
        return str(tmp_path / f"{name}.toml")

    return write


def _comparison(path: str, tmp_path, *words: str):
    return matched(read_comparison(path, ["--model.vocab-size", "64", "--run-dir", str(tmp_path / "home"), *words]))


def _score(one, pretrained, values: dict[str, float]) -> None:
    """A fine-tuning of a run that is finished with these metrics."""
    planned = planned_config(str(one.recipe), pretrained.config.model, pretrained.title)
    finetuned = dataclasses.replace(planned, run_dir=str(one.folder_of(pretrained)))
    finish(dataclasses.replace(pretrained, config=finetuned), {"step": 3, "loss": 1.0, **values})


@pytest.fixture
def scored(recipe, task, tmp_path):
    """A finished comparison of two seeds whose runs have been fine-tuned on two tasks, but for one run on one."""
    path = recipe(TINY + ENTRIES.replace("controls = false", ""))
    comparison = _comparison(path, tmp_path)
    downstream = read_downstream([task("topic"), task("likeness", "regression", best="")], comparison)
    keep_recipe(comparison)
    for one in downstream:
        one.keep()
    topic, likeness = downstream
    for pretrained in tasks_of(comparison):
        finish(pretrained, {"loss": 2.0, "masked_accuracy": 0.25})
        base = 0.5 if pretrained.entry == "attention" else 0.75
        _score(topic, pretrained, {"accuracy": base + pretrained.seed / 8, "f1": 0.1, "control_accuracy": 0.4})
        if (pretrained.entry, pretrained.seed) != ("no mixer", 1):
            _score(likeness, pretrained, {"pearson": base, "spearman": 0.2})
    return comparison


def test_the_table_has_a_column_for_each_task_and_one_for_their_mean(scored, capsys):
    assert main(["compare", str(scored.home), "--report"]) == 0
    text = capsys.readouterr().out
    rows = printed_table(text)
    attention = rows["attention"]
    assert attention["topic: accuracy (%)"] == "56.2 ± 8.8"
    assert attention["likeness: Pearson correlation (%)"] == "50.0 ± 0.0"
    assert attention["mean over tasks (%)"] == "53.1 ± 4.4"
    assert attention["n"] == "2"
    assert rows["no mixer (control)"]["likeness: Pearson correlation (%)"] == "75.0"
    assert rows["no mixer (control)"]["mean over tasks (%)"] == "75.0"  # of the seed that has both
    assert "Not fine-tuned on likeness: no mixer seed 1." in text
    assert "topic: accuracy of the fine-tuned runs in their last evaluation." not in text
    best = "topic: accuracy of the fine-tuned runs in their best evaluation by accuracy"
    assert f"{best}; control without a model 40.0% (the most frequent class)." in text
    assert "likeness: Pearson correlation of the fine-tuned runs in their last evaluation." in text
    assert "Also in" not in text  # their folders are none of the comparison's entries
    row = csv_rows(scored.home)["attention"]
    assert float(row["finetune/topic/accuracy_mean"]) == 0.5625
    assert float(row["finetune/topic/accuracy_seed_1"]) == 0.625
    assert float(row["finetune/mean_mean"]) == 0.53125
    # And all other metrics of the tasks.
    assert float(row["finetune/topic/f1_mean"]) == pytest.approx(0.1)
    assert float(row["finetune/likeness/spearman_seed_0"]) == pytest.approx(0.2)
    assert float(row["finetune/likeness/loss_mean"]) == 1


def test_runs_that_are_left_out_have_no_scores_in_the_table(scored, tmp_path):
    run = scored.home / "attention" / "seed-1"
    config = tasks_of(scored)[0].config
    write_config(dataclasses.replace(config, steps=9), run / "config.toml")
    assert printed_table(write_report(scored))["attention"]["topic: accuracy (%)"] == "50.0"


def test_fine_tunings_on_other_examples_have_no_scores_in_the_table(scored):
    other = scored.home / "finetune" / "topic" / "attention" / "seed-1" / "summary.json"
    for path in other.parent.parent.parent.glob("*/seed-*/summary.json"):
        data = {"train": "old" if path == other else "new", "validation": "same"}
        path.write_text(json.dumps({**json.loads(path.read_text()), "data": data}))
    said = write_report(scored)
    assert printed_table(said)["attention"]["topic: accuracy (%)"] == "50.0"
    assert "topic: attention, seed 1 was fine-tuned on other examples than most." in said


def test_a_task_of_the_same_name_keeps_its_settings(scored, task, capsys):
    """What is watched otherwise is no other setting."""
    path = task("topic")
    with open(path, "a") as file:
        file.write("every = 7\n")
    assert main(["compare", str(scored.home), "--finetune", path, "--dry-run"]) == 0
    with open(path, "a") as file:
        file.write("[optimizer]\nlr = 0.5\n")
    capsys.readouterr()
    assert main(["compare", str(scored.home), "--finetune", path]) == 2
    said = capsys.readouterr().err
    assert "--finetune topic: " in said
    assert "optimizer.lr: 0.002 there, 0.5 here" in said


def test_the_plan_names_what_would_be_fine_tuned(recipe, task, tmp_path, capsys):
    words = ["--model.vocab-size", "64", "--run-dir", str(tmp_path / "home"), "--comparison.controls", "True"]
    command = ["compare", recipe(TINY + ENTRIES), *words, "--dry-run"]
    assert main([*command, "--finetune", task("topic"), task("likeness", "regression", best="pearson")]) == 0
    said = capsys.readouterr().out
    assert "then each run is fine-tuned on topic (accuracy), likeness (Pearson correlation): 16 runs in" in said
    assert "no mixer (control)" in said
    assert not (tmp_path / "home").exists()


CAUSAL = TINY.replace('"encoder"', '"language_model"').replace("masked_lm", "causal_lm")


@pytest.mark.parametrize(
    ("change", "tasks", "message"),
    [
        ({"text": CAUSAL}, ["topic"], 'entry "attention" is a language_model, which sees no later tokens'),
        ({}, ["topic", "other/topic"], "two tasks are called topic"),
        ({}, ["finetune"], "finetune: no examples given: set data.examples.train"),
        ({}, ["glue_rte"], "glue_rte: no examples given: set data.examples.train"),
        ({}, ["debug_hydra"], '"masked_lm" is no task on labelled examples'),
        ({}, ["absent.toml"], "recipe not found: absent.toml"),
        ({"lose": True}, ["topic"], "examples not found: "),
        ({"words": ["--slurm"]}, ["topic"], "--finetune trains on this host"),
    ],
)
def test_mistakes_are_one_line_before_anything_is_trained(recipe, task, tmp_path, change, tasks, message, capsys):
    topic = task("topic")
    (tmp_path / "other").mkdir()
    shutil.copy(topic, tmp_path / "other" / "topic.toml")
    if change.get("lose"):
        (tmp_path / "topic-2.jsonl").unlink()
    text = change.get("text", TINY) + (ENTRIES.split('[[comparison.entry]]\nname = "Hydra')[0])
    words = ["--model.vocab-size", "64", "--run-dir", str(tmp_path / "home"), *change.get("words", [])]
    files = {"topic": topic, "other/topic": str(tmp_path / "other" / "topic.toml")}
    assert main(["compare", recipe(text), *words, "--finetune", *(files.get(name, name) for name in tasks)]) == 2
    said = capsys.readouterr().err.strip()
    assert message in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "home").exists()


def test_a_run_is_fine_tuned_with_its_own_seed_and_goes_on_where_it_lies(recipe, task, dataset, tmp_path):
    path = recipe(TINY + ENTRIES)
    words = ["--data.path", dataset, "--run-dir", str(tmp_path / "home")]
    comparison = matched(read_comparison(path, words))
    (pretrained,) = [one for one in tasks_of(comparison) if (one.entry, one.seed) == ("attention", 1)]
    train(pretrained.config)
    downstream = read_downstream([task("topic")], comparison)
    for one in downstream:
        one.keep()
    (finetuning,) = downstream[0].tasks([pretrained])
    config = finetuning.config
    assert finetuning.title == "attention on topic, seed 1"
    assert (config.seed, config.run_dir) == (1, str(tmp_path / "home/finetune/topic/attention/seed-1"))
    assert config.init.from_ == str(pretrained.run.path)
    assert (config.model.layers, config.model.head.outputs) == (("attention",), 3)
    train(config)
    assert finetuning.is_finished()
    found = printed_table(write_report(comparison))["attention"]["topic: accuracy (%)"]
    best = json.loads((finetuning.run.path / "summary.json").read_text())["best"]["value"]
    assert found == f"{100 * best:.1f}"

    # A comparison that was moved is the same: what is finished stays so.
    (tmp_path / "home").rename(tmp_path / "moved")
    moved = matched(read_comparison(path, [*words[:-1], str(tmp_path / "moved")]))
    (pretrained,) = [one for one in tasks_of(moved) if (one.entry, one.seed) == ("attention", 1)]
    (again,) = read_downstream([task("topic")], moved)[0].tasks([pretrained])
    assert again.is_finished()
    assert other_settings(again) == ""


@pytest.mark.slow
def test_every_entry_is_fine_tuned_after_the_comparison(recipe, task, dataset, tmp_path, capsys):
    """Also the controls; the same command again trains nothing."""
    text = TINY + ENTRIES.split('[[comparison.entry]]\nname = "Hydra')[0].replace("[0, 1]", "[2]")
    words = ["--data.path", dataset, "--run-dir", str(tmp_path / "home"), "--comparison.controls", "True"]
    command = ["compare", recipe(text), *words, "--no-speed", "--finetune", task("topic")]
    assert main(command) == 0
    rows = printed_table(capsys.readouterr().out)
    assert set(rows) == {"attention", "no mixer (control)"}
    for entry, folder in (("attention", "attention"), ("no mixer (control)", "no-mixer")):
        run = tmp_path / "home" / "finetune" / "topic" / folder / "seed-2"
        best = json.loads((run / "summary.json").read_text())["best"]["value"]
        assert rows[entry]["topic: accuracy (%)"] == f"{100 * best:.1f}"
        assert f"{tmp_path}/home/{folder}/seed-2" in (run / "train.log").read_text()  # whose weights it began with
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "home").rglob("summary.json")}
    assert len(before) == 4
    assert main(command) == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "home").rglob("summary.json")} == before

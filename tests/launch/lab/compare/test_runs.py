"""Runs of a comparison go on and do not end each other; the report says what they say; speed; the job array."""

import contextlib
import dataclasses
import io
import json
import statistics
import threading
import time
from types import SimpleNamespace

import pytest
from comparisons import ENTRIES, TINY, VARIANTS, csv_rows
from runs import records

from matmix.launch.cli import main
from matmix.launch.jobs.control import runs_of
from matmix.launch.jobs.launches import Job
from matmix.launch.jobs.slurm.options import SlurmOptions
from matmix.launch.jobs.slurm.submit import plan_runs
from matmix.launch.lab.compare import speed
from matmix.launch.lab.compare.config import read_comparison, tasks_of
from matmix.launch.lab.compare.report import collect, write_report
from matmix.launch.lab.compare.width import matched
from matmix.launch.many.planned import PlannedRun, check_data, check_directories
from matmix.launch.many.runs import run_tasks
from matmix.model.build import count_parameters
from matmix.train.loop import train
from matmix.train.process import stop
from matmix.train.recipe import load_config

# -- runs and report ----------------------------------------------------------------------------------------------

BROKEN = ENTRIES + '[[comparison.entry]]\nname = "broken"\ndata.path = "nowhere"\n'


def _compare_with_a_stop_and_a_failure(folder, dataset) -> SimpleNamespace:
    """A comparison through a stop, a resume and a failure: attention with seed 0 is stopped on the way; Hydra's runs
    and attention with seed 1 are finished by hand; then the command trains what is open."""
    path, home = folder / "mine.toml", folder / "runs"
    path.write_text(TINY + BROKEN.replace("[0, 1]", "[0]"))
    arguments = ["--model.vocab-size", "320", "--run-dir", str(home), "--data.path"]

    steps = 150
    comparison = matched(read_comparison(str(path), [*arguments, dataset, "--steps", str(steps)]))
    tasks = {(task.entry, task.seed): task for task in tasks_of(comparison)}

    # Stopped by what a signal does, as soon as it has done steps.
    long = tasks["attention", 0]
    waiter = threading.Thread(target=_stop_after_records, args=(long.run.path / "metrics.jsonl",))
    waiter.start()
    ended = run_tasks([long], 1)
    waiter.join()
    stop.forget()
    stopped_at = records(long.run.path)[-1]["step"]

    finished = tasks["Hydra, 2 x", 0]
    train(finished.config)
    before = (finished.run.path / "summary.json").stat().st_mtime_ns
    # `broken` has a data path of its own, which the command line would replace: it stays in the recipe.
    path.write_text(TINY.replace("[data]", f'[data]\npath = "{dataset}"') + BROKEN.replace("[0, 1]", "[0]"))
    output: list[str] = []
    code = _captured(
        ["compare", str(path), *arguments[:-1], "--steps", str(steps), "--parallel", "2", "--no-speed"], output
    )
    return SimpleNamespace(
        path=path,
        home=home,
        code=code,
        output="\n".join(output),
        ended=ended,
        stopped_at=stopped_at,
        steps=steps,
        untouched=(finished.run.path / "summary.json").stat().st_mtime_ns == before,
        arguments=[*arguments[:-1], "--steps", str(steps)],
    )


def _stop_after_records(path) -> None:
    for _ in range(600):
        if path.is_file() and path.read_text().count("\n") >= 2:
            break
        time.sleep(0.05)
    stop.request()


def _captured(arguments: list[str], output: list[str]) -> int:
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        code = main(arguments)
    output.append(text.getvalue())
    return code


def check_a_stopped_run_is_saved_and_goes_on(compared) -> None:
    assert compared.ended.stopped
    assert not compared.ended.failures
    run = compared.home / "attention" / "seed-0"
    assert [record["step"] for record in records(run)] == list(range(1, compared.steps + 1))
    assert f"resumed from step-{compared.stopped_at:08d}" in (run / "train.log").read_text()


def check_finished_runs_are_not_touched(compared) -> None:
    assert compared.untouched
    assert "1 of 3 runs are finished already" in compared.output


def check_a_failed_run_is_reported_and_the_others_finish(compared) -> None:
    assert compared.code == 1
    assert "1 run failed" in compared.output
    assert "broken, seed 0: " in compared.output
    assert "nowhere" in compared.output.split("1 run failed")[1]
    assert "broken seed 0 (missing)" in compared.output


def check_the_table_says_what_the_runs_say(compared) -> None:
    comparison = matched(read_comparison(str(compared.path), compared.arguments))
    rows = csv_rows(compared.home)
    for entry in comparison.entries[:2]:
        validation = load_summary(compared.home / entry.folder / "seed-0")
        assert float(rows[entry.name]["loss_mean"]) == validation["loss"]
        assert float(rows[entry.name]["masked_accuracy_mean"]) == validation["masked_accuracy"]
        assert int(rows[entry.name]["parameters"]) == count_parameters(entry.config.model)
        assert f"{validation['loss']:.4f} " in compared.output  # one seed: no deviation
    assert "±" not in compared.output
    losses = [float(row["loss_mean"]) for row in rows.values() if row["loss_mean"]]
    assert losses == sorted(losses)
    assert list(rows)[-1] == "broken"
    assert (compared.home / "report" / "plot.png").stat().st_size > 10_000
    assert (compared.home / "report" / "table.md").read_text().strip() in compared.output


def load_summary(run) -> dict:
    return json.loads((run / "summary.json").read_text())["validation"]


def check_a_report_of_what_is_there_and_the_spread_over_seeds(compared, capsys) -> None:
    """With seed 1 in the recipe: the runs of seed 0 are there, those of seed 1 are marked; then they are there too."""
    compared.path.write_text(compared.path.read_text().replace("seeds = [0]", "seeds = [0, 1]"))
    comparison = matched(read_comparison(str(compared.path), compared.arguments))
    assert main(["compare", str(compared.path), *compared.arguments, "--report"]) == 0
    text = capsys.readouterr().out
    assert "attention seed 1 (missing)" in text
    assert "1 of 2" in text
    (second,) = [task for task in tasks_of(comparison) if (task.entry, task.seed) == ("attention", 1)]
    train(second.config)
    found = next(result for result in collect(comparison).results if result.entry.name == "attention")
    losses = [load_summary(compared.home / "attention" / f"seed-{seed}")["loss"] for seed in (0, 1)]
    assert found.values("loss") == losses
    mean, deviation = statistics.fmean(losses), abs(losses[0] - losses[1]) / 2**0.5
    assert f"{mean:.4f} ± {deviation:.4f}" in write_report(comparison)


def check_runs_with_other_settings_are_refused_and_not_averaged(compared, capsys) -> None:
    arguments = ["compare", str(compared.path), *compared.arguments]
    for key, value, text in (
        ("--optimizer.lr", "2e-2", "optimizer.lr: 0.01 there, 0.02 here"),
        ("--steps", "2", f"steps: {compared.steps} there, 2 here"),
        ("--model.n-layers", "1", "model.n_layers: 2 there, 1 here"),
    ):
        assert main([*arguments, key, value]) == 2
        errors = capsys.readouterr().err
        assert text in errors
        assert "attention, seed 0" in errors
    before = (compared.home / "report" / "table.md").read_text()
    assert main([*arguments, "--optimizer.lr", "2e-2", "--report"]) == 0
    text = capsys.readouterr().out
    assert "Without a number: attention seed 0 (trained with other settings: optimizer.lr: 0.01 there" in text
    assert (compared.home / "report" / "table.md").read_text() == before  # rather than one without any run
    # What is watched and read otherwise is no other setting; what was changed on the way is.
    comparison = matched(read_comparison(str(compared.path), [*compared.arguments, "--logging.every", "3"]))
    check_directories(tasks_of(comparison))
    (compared.home / "attention" / "seed-0" / "changes.jsonl").write_text(
        '{"step": 3, "key": "optimizer.lr", "old": 0.1, "new": 0.01}\n'
    )
    with pytest.raises(ValueError, match=r"optimizer\.lr: 0\.1 until step 3, then 0\.01"):
        check_directories(tasks_of(comparison))


def check_folders_that_the_recipe_does_not_name_are_told(compared, capsys) -> None:
    compared.path.write_text(compared.path.read_text().replace("seeds = [0, 1]", "seeds = [0]"))
    assert main(["compare", str(compared.path), *compared.arguments, "--report"]) == 0
    assert f"Also in {compared.home}, but not in the recipe: attention/seed-1." in capsys.readouterr().out


@pytest.mark.slow
def test_a_comparison_through_a_stop_a_resume_and_a_failure(tmp_path, dataset, capsys):
    """One test, since each would train the same runs again in a process of its own."""
    compared = _compare_with_a_stop_and_a_failure(tmp_path, dataset)
    check_a_stopped_run_is_saved_and_goes_on(compared)
    check_finished_runs_are_not_touched(compared)
    check_a_failed_run_is_reported_and_the_others_finish(compared)
    check_the_table_says_what_the_runs_say(compared)
    check_a_report_of_what_is_there_and_the_spread_over_seeds(compared, capsys)
    check_folders_that_the_recipe_does_not_name_are_told(compared, capsys)
    check_runs_with_other_settings_are_refused_and_not_averaged(compared, capsys)


def test_controls_are_trained_in_every_variant(recipe, dataset, tmp_path, capsys):
    """Also the one that is left with nothing but embeddings and readout."""
    text = TINY + ENTRIES.replace("controls = false", "").replace("[0, 1]", "[0]") + VARIANTS
    words = ["--data.path", dataset, "--run-dir", str(tmp_path / "home")]
    path = recipe(text)
    comparison = matched(read_comparison(path, words))
    tasks = {task.entry: task for task in tasks_of(comparison)}
    for title in ("no mixer, short rows", "convolution only, short rows", "no mixer, deep"):
        train(tasks[title].config)
        assert tasks[title].is_finished()
    assert (tmp_path / "home/no-mixer/short-rows/seed-0/summary.json").is_file()
    check_directories(list(tasks.values()))
    capsys.readouterr()
    assert main(["compare", path, *words, "--report"]) == 0
    text = capsys.readouterr().out
    assert "no mixer (control)" in text
    assert "Without a number: convolution only seed 0 (missing)" not in text.split("## deep")[0]
    assert "convolution only seed 0 (missing)" in text.split("## deep")[1]


def test_without_its_data_a_comparison_does_not_start(recipe, tmp_path, monkeypatch, capsys):
    words = ["--model.vocab-size", "64", "--data.path", str(tmp_path / "absent"), "--run-dir", str(tmp_path / "home")]
    assert main(["compare", recipe(TINY + ENTRIES), *words]) == 2
    captured = capsys.readouterr()
    assert "absent does not exist; make it with `matmix prepare`" in captured.err
    assert captured.out == ""
    assert not (tmp_path / "home").exists()
    monkeypatch.setattr(PlannedRun, "is_finished", lambda task: True)
    check_data(tasks_of(matched(read_comparison(str(tmp_path / "mine.toml"), words))))  # what is finished needs none


def test_runs_on_other_data_are_refused_and_not_averaged(recipe, dataset, tmp_path, capsys):
    """Data that was prepared again, in the same place: no setting differs."""
    words = ["--data.path", dataset, "--run-dir", str(tmp_path / "home")]
    path = recipe(TINY + ENTRIES.replace("[0, 1]", "[0, 1, 2]"))
    tasks = tasks_of(matched(read_comparison(path, words)))
    trained = [task for task in tasks if task.entry == "attention"]
    for task in trained:
        train(task.config)
    check_data(tasks)
    summary = json.loads((trained[1].run.path / "summary.json").read_text())
    assert set(summary["data"]) == {"train", "validation"}
    summary["data"]["validation"] = "of other data"
    (trained[1].run.path / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(ValueError, match=r"attention, seed 1: .* was trained on other data .*\(validation split\)"):
        check_data(tasks)
    assert main(["compare", path, *words, "--slurm", "--tasks-per-node", "1", "--dry-run"]) == 2
    assert "was trained on other data" in capsys.readouterr().err
    assert main(["compare", path, *words, "--report"]) == 0
    text = capsys.readouterr().out
    assert "attention seed 1 (trained on other data than most of the runs)" in text
    assert "| 2 of 3 |" in text


def test_runs_may_be_restricted_to_entries_and_variants(recipe, tmp_path, capsys):
    words = ["--model.vocab-size", "64", "--run-dir", str(tmp_path / "home"), "--comparison.tolerance", "0.2"]
    comparison = matched(read_comparison(recipe(TINY + ENTRIES + VARIANTS), words))
    every = {task.entry for task in tasks_of(comparison)}
    assert {task.entry for task in tasks_of(comparison, ["Hydra, 2 x"])} == {
        "Hydra, 2 x, short rows",
        "Hydra, 2 x, deep",
    }
    assert {task.entry for task in tasks_of(comparison, ["deep"])} == {name for name in every if name.endswith("deep")}
    one = tasks_of(comparison, ["attention", "deep"])
    assert [(task.entry, task.seed) for task in one] == [("attention, deep", 0), ("attention, deep", 1)]
    with pytest.raises(
        ValueError, match=r'--only: no entry and no variant is called "Hydra 2" \(did you mean "Hydra, 2 x"\?'
    ):
        tasks_of(comparison, ["Hydra 2"])
    assert main(["compare", str(tmp_path / "mine.toml"), *words, "--only", "none", "--dry-run"]) == 2
    assert "--only" in capsys.readouterr().err


# -- speed --------------------------------------------------------------------------------------------------------


def test_speed_is_the_median_of_rounds_that_take_turns(recipe, dataset, tmp_path, monkeypatch):
    comparison = matched(
        read_comparison(recipe(TINY + ENTRIES), ["--data.path", dataset, "--run-dir", str(tmp_path / "home")])
    )
    order, numbers = [], iter([10, 30, 20, 100, 12, 300])

    def measured(path):
        order.append(path.parent.name)
        assert load_config(str(path)).model.vocab_size == 320
        return {"tokens_per_second": next(numbers), "peak_bytes": 2**20}

    monkeypatch.setattr(speed, "in_a_process", measured)
    assert not speed.is_measured(comparison)
    speed.measure_all(comparison)
    assert order == ["attention", "Hydra-2-x"] * 3
    assert speed.is_measured(comparison)
    found = {result.entry.name: result.speed for result in collect(comparison).results}
    assert found["attention"]["tokens_per_second"] == 12
    assert found["Hydra, 2 x"]["tokens_per_second"] == 100
    assert found["attention"]["peak_bytes"] == 2**20
    assert "Speed: training steps of 4 x 32 tokens side by side" in "".join(speed.speed_words(comparison))

    # Rows of another model or machine are not shown; rows of entries that the recipe no longer has stay in the file.
    first, second = comparison.entries
    deeper = dataclasses.replace(first.config, model=dataclasses.replace(first.config.model, n_layers=3))
    other = dataclasses.replace(comparison, entries=(dataclasses.replace(first, config=deeper),))
    assert not speed.is_measured(other)
    assert collect(other).results[0].speed == {}
    monkeypatch.setattr(speed, "in_a_process", lambda path: {"tokens_per_second": 1, "peak_bytes": 1})
    assert speed.measure_all(other)
    assert set(speed.read_speed(comparison.home)) == {first.name, second.name}

    # A signal ends the measurement, and what was measured before stays.
    before = speed.speed_path(comparison.home).read_text()
    monkeypatch.setattr(speed, "in_a_process", lambda path: stop.request() or "stopped")
    try:
        assert not speed.measure_all(comparison)
    finally:
        stop.forget()
    assert speed.speed_path(comparison.home).read_text() == before


@pytest.mark.parametrize("packing", ["concat", "document", "rows"])
def test_a_measurement_counts_tokens_and_bytes_of_training_steps(recipe, packing):
    overrides = ["--model.vocab-size", "64", "--data.packing", packing]
    config = read_comparison(recipe(TINY + ENTRIES), overrides).entries[1].config
    found = speed.measure(config, seconds=0.0)
    assert found["steps"] == speed.STEPS
    assert found["tokens_per_second"] > 0
    assert isinstance(found["peak_bytes"], int)  # above 0 in a process of its own, which this one is not


# -- Slurm --------------------------------------------------------------------------------------------------------


def test_the_runs_of_all_variants_are_one_job_array(recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MATMIX_CLUSTERS", str(tmp_path / "clusters.toml"))
    (tmp_path / "clusters.toml").write_text("")
    words = ["--model.vocab-size", "64", "--run-dir", str(tmp_path / "home"), "--comparison.tolerance", "0.2"]
    path = recipe(TINY + ENTRIES + VARIANTS)
    assert main(["compare", path, *words, "--slurm", "--tasks-per-node", "1", "--dry-run"]) == 0
    script = capsys.readouterr().out
    tasks = tasks_of(matched(read_comparison(path, words)))
    assert f"#SBATCH --array=0-{len(tasks) - 1}\n" in script
    assert len(tasks) == 8
    assert all(f"  {task.run.path}\n" in script for task in tasks)


def test_the_runs_as_a_job_array(recipe, dataset, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MATMIX_CLUSTERS", str(tmp_path / "clusters.toml"))
    (tmp_path / "clusters.toml").write_text("")
    home = tmp_path / "home"
    command = ["compare", recipe(TINY + ENTRIES), "--data.path", dataset, "--run-dir", str(home)]
    options = ["--slurm", "--tasks-per-node", "2", "--array-limit", "3", "--partition", "gpu"]
    assert main([*command, *options, "--dry-run"]) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --array=0-3%3\n" in script
    assert "#SBATCH --partition=gpu\n" in script
    comparison = matched(read_comparison(command[1], command[2:]))
    tasks = tasks_of(comparison)
    positions = [script.index(f"  {task.run.path}\n") for task in tasks]  # where --report looks for them
    assert positions == sorted(positions)
    assert not home.exists()

    # What the tasks of the array are given, and where its status is looked for.
    plan = plan_runs(home, [[task.config] for task in tasks], SlurmOptions(tasks_per_node=2), command, is_sweep=True)
    plan.write()
    for number, task in enumerate(tasks):
        assert load_config(str(plan.folder / "tasks" / str(number) / "config.toml")) == task.config
    assert runs_of(home, Job(kind="slurm", launch=plan.job.launch, command=[], tasks=len(tasks))) == [
        task.run.path for task in tasks
    ]

"""A ladder is a comparison at several sizes: what grows with the size, where rates come from, what the report says."""

from __future__ import annotations

import csv
import dataclasses
from functools import partial

import pytest
from comparisons import ENTRIES, TINY, VARIANTS, finish

from matmix.launch.cli import main
from matmix.launch.lab.compare.config import tasks_of
from matmix.launch.lab.ladder.rates import check_rates, tuning_tasks, with_rates
from matmix.launch.lab.ladder.report import plan_text, write_report
from matmix.launch.lab.ladder.results import families_of
from matmix.launch.lab.ladder.sizes import Ladder, LadderConfig, read_ladder

MLPS = TINY.replace("mlp_ratio = 0.0", "mlp_ratio = 2.0")
FAMILY = ENTRIES.replace("controls = false\n", "").replace("[0, 1]", "[1]")
TUNED = FAMILY.replace("[comparison]", "[comparison]\ntune = { 'optimizer.lr' = [1e-3, 3e-3, 9e-3] }")
LADDER = "[ladder]\nsizes = '4k,8k,16k,32k'\ntokens_per_parameter = 5\n[schedule]\nwarmup = 2\n"
SIZES = {"0.004M": 4000, "0.008M": 8000, "0.016M": 16000, "0.032M": 32000}


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    """A ladder of four encoders at four sizes; its tokens are given over those of the recipe."""
    folder = tmp_path_factory.mktemp("ladder")
    path = folder / "mine.toml"
    path.write_text(MLPS + TUNED + LADDER)
    words = ["--model.vocab-size", "64", "--run-dir", str(folder / "home")]
    return read_ladder(str(path), words, {"tokens_per_parameter": 10.0})


@pytest.fixture
def ladder(read, tmp_path):
    """The same, of which no run is there."""
    return dataclasses.replace(read, comparison=dataclasses.replace(read.comparison, home=tmp_path / "home"))


def _tune(ladder):
    """All tuning runs are finished, the middle rate as the best."""
    for task in tuning_tasks(ladder):
        finish(task, {"loss": 2.0 + abs(task.config.optimizer.lr - 3e-3)})
    return with_rates(ladder)


def _law(entry: str, ladder: Ladder) -> float:
    """Hydra gains on the control as models grow, and attention does not."""
    a = {"attention": 0.3, "Hydra, 2 x": 0.4, "convolution only": 0.3, "no mixer": 0.2}[entry.rsplit(", ", 1)[0]]
    return 1.0 + 2.0 * (ladder.parameters[entry] / 4e3) ** -a


def test_depth_width_tokens_and_warm_up_grow_with_the_size(ladder):
    assert ladder.settings.counts == SIZES
    assert ladder.comparison.recipe["ladder"]["tokens_per_parameter"] == 10
    entries = ladder.comparison.entries
    assert [entry.variant for entry in entries] == [size for size in SIZES for _ in range(4)]
    own = [entry for entry in entries if entry.name == "attention"]
    for entry in own:
        config = entry.config
        assert config.steps == -(-10 * SIZES[entry.variant] // (4 * 32))
        assert config.schedule.warmup == round(2 * config.steps / 4)
        assert entry.folder == f"attention/{entry.variant}"
    assert own[-1].config.model.n_layers == 2 * own[0].config.model.n_layers  # eight times the parameters
    for size, count in SIZES.items():
        at = [entry for entry in entries if entry.variant == size]
        assert len({entry.config.model.n_layers for entry in at}) == len({entry.config.steps for entry in at}) == 1
        assert {entry.target for entry in at} == {count}
        assert all(entry.parameters > count + 64 * entry.config.model.d_model - 0.1 * count for entry in at)


def test_rates_are_tuned_at_the_smallest_size_and_follow_the_width(ladder):
    ladder = with_rates(ladder)
    assert not any(entry.is_ready for entry in ladder.comparison.entries)
    plan = plan_text(ladder, (), {entry.title: 0.5 for entry in ladder.comparison.entries}, 2)
    assert "4 entries x 4 sizes x 1 seed (1)" in plan
    assert "in all at least 28 runs" in plan
    assert "tuned for each entry by itself, at 0.004M; larger sizes take it over by muP" in plan
    tasks = tuning_tasks(ladder, ["attention", "0.032M"])
    first = ladder.comparison.entries[0].config.model
    assert [task.config.model for task in tasks] == [first] * 3
    ladder = _tune(ladder)
    assert {entry.config.optimizer.lr for entry in ladder.comparison.entries} == {3e-3}
    assert all(entry.is_ready for entry in ladder.comparison.entries)
    bases = [entry.config.optimizer.mup_base_width for entry in ladder.comparison.entries if entry.name == "attention"]
    assert bases == [0, *[first.d_model] * 3]
    each = dataclasses.replace(ladder, settings=dataclasses.replace(ladder.settings, tune_sizes=2))
    assert len(tuning_tasks(with_rates(each))) == 4 * 3  # the smallest size is done


def test_a_plan_tells_what_is_asked_for_and_what_tunes_it(ladder):
    plan = plan_text(with_rates(ladder), ["attention", "0.032M"])
    assert "1 entry x 1 size x 1 seed (1)" in plan
    assert "in all at least 4 runs" in plan  # three of them tune, at the smallest size
    assert [line.split("|")[1].strip() for line in plan.splitlines() if "| attention" in line] == ["0.004M", "0.032M"]
    assert "Hydra" not in plan


def test_rates_that_cannot_follow_the_width_are_refused(ladder):
    muon = [
        dataclasses.replace(
            entry,
            config=dataclasses.replace(
                entry.config, optimizer=dataclasses.replace(entry.config.optimizer, name="muon")
            ),
        )
        for entry in ladder.comparison.entries
    ]
    ladder = dataclasses.replace(ladder, comparison=dataclasses.replace(ladder.comparison, entries=tuple(muon)))
    with pytest.raises(ValueError, match=r"rate cannot follow the width: .*muon.*each of the 4 sizes") as error:
        check_rates(with_rates(ladder))
    assert "\n" not in str(error.value)


def test_the_report_has_losses_laws_and_the_gaps_to_the_controls(ladder, monkeypatch):
    """Attention lacks a size, and so has no law."""
    monkeypatch.setattr("matmix.launch.lab.ladder.law.DRAWS", 2)
    settings = dataclasses.replace(ladder.comparison.settings, tune={})
    ladder = dataclasses.replace(ladder, comparison=dataclasses.replace(ladder.comparison, settings=settings))
    ladder = with_rates(ladder)
    tasks = tasks_of(ladder.comparison)
    assert [task.entry.rsplit(", ", 1)[1] for task in tasks[::4]] == list(SIZES)  # the smallest first
    for task in tasks:
        if task.entry != "attention, 0.032M":
            finish(task, {"loss": _law(task.entry, ladder)})
    said = write_report(ladder)
    rows = {row.split("|")[1].strip(): row for row in said.splitlines() if row.startswith("|")}
    slopes = {
        name: float(rows[f"convolution only - {name}"].split("|")[-2].split()[0])
        for name in ("attention", "Hydra, 2 x")
    }
    assert slopes["attention"] == pytest.approx(0, abs=4e-3)
    gaps = [float(cell) for cell in rows["convolution only - attention"].split("|")[2:5]]
    own = [_law(f"{name}, 0.008M", ladder) for name in ("attention", "convolution only")]
    assert abs(own[0] - own[1]) > 0.05  # one law, and other parameters
    assert gaps == pytest.approx([0, 0, 0], abs=3e-3)
    assert slopes["Hydra, 2 x"] > 0.1
    assert "No law for attention: L = E + A N^-a has three unknowns and needs losses at 4 sizes, here are 3." in said
    assert "Without a number: attention, 0.032M seed 1 (missing)." in said
    report = ladder.comparison.home / "report"
    with (report / "table.csv").open() as file:
        table = {(row["entry"], row["size"]): row for row in csv.DictReader(file)}
    assert len(table) == 16
    assert float(table["attention", "0.016M"]["loss_seed_1"]) == _law("attention, 0.016M", ladder)
    assert float(table["Hydra, 2 x", "0.032M"]["under_convolution only_mean"]) > 0.1
    with (report / "laws.csv").open() as file:
        laws = {row["entry"]: row for row in csv.DictReader(file)}
    assert float(laws["Hydra, 2 x"]["a"]) == pytest.approx(0.4, abs=0.05)  # by the parameters that each really has
    assert "needs losses at 4 sizes" in laws["attention"]["why_none"]
    assert (report / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_entries_of_which_nothing_has_begun_are_named_and_not_tabulated(ladder):
    for task in tuning_tasks(with_rates(ladder), ["Hydra, 2 x"]):
        finish(task, {"loss": 2.0})
    said = write_report(ladder)
    assert "Not begun: attention; no mixer; convolution only." in said
    assert "| attention" not in said
    assert "| Hydra" in said


def test_a_size_may_be_written_in_any_unit():
    settings = LadderConfig(sizes="33k,264000,0.5M")
    written = "264k", "Hydra", "500k", ".033M", "1M"
    assert settings.named(written) == ["0.264M", "Hydra", "0.5M", "0.033M", "1M"]


def test_what_is_wrong_is_one_line(tmp_path):
    for table, message in (
        ({"sizes": "4k,four"}, r"'four' is no number of parameters such as 0\.5M"),
        ({"sizes": "1000,1k"}, "names a size twice"),
        ({}, "sizes are missing: give --sizes"),
        ({"sizes": "4k", "tokens_per_parameter": 0.0}, "tokens_per_parameter should be a number above 0"),
        ({"sizes": "4k", "tune_sizes": 0}, "tune_sizes should be 1 or more"),
    ):
        with pytest.raises(ValueError, match=message):
            LadderConfig(**table)
    path = tmp_path / "mine.toml"
    path.write_text(MLPS + FAMILY + VARIANTS)
    for words, message in (
        (["--steps", "5"], "--steps: tokens in proportion"),
        (["--comparison.parameters", "5"], "--sizes gives the parameters"),
        (["--model.vocab-size", "64"], "has variants, and the variants of a ladder are its sizes"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            read_ladder(str(path), words, {"sizes": "4k"})
        assert "\n" not in str(error.value)
    path.write_text(MLPS + FAMILY)
    for tune, message in (
        ('{"global_batch_size" = [1, 8]}', "global_batch_size: all entries of a size read as many tokens"),
        ('{"schedule.warmup" = [0.1, 20]}', r"schedule\.warmup in steps, which are others at each size"),
    ):
        with pytest.raises(ValueError, match=message):
            read_ladder(str(path), ["--model.vocab-size", "64", "--comparison.tune", tune], {"sizes": "4k"})


def test_an_entry_that_is_not_asked_for_needs_no_width(tmp_path):
    """No Hydra is within 2 % of 3,000 or 32,000 parameters here; attention is within 2 % of both."""
    path = tmp_path / "mine.toml"
    path.write_text(MLPS + FAMILY.replace("tolerance = 0.1", "tolerance = 0.02"))
    read = partial(read_ladder, str(path), ["--model.vocab-size", "64"], {"sizes": "3k,32k"})
    for only in ((), ["32k"], ["Hydra, 2 x"]):  # a rate for the larger size may come from the smaller one
        with pytest.raises(ValueError, match=r'entry "Hydra, 2 x, 0\.003M": no width '):
            read(only=only)
    kept = {entry.title for entry in read(only=["attention", "32k"]).comparison.entries}
    assert kept >= {"attention, 0.003M", "attention, 0.032M"}
    assert "Hydra, 2 x, 0.003M" not in kept


def test_a_ladder_keeps_the_seed_it_was_tuned_with_and_not_that_of_a_comparison(tmp_path, monkeypatch):
    """Both lie in folders of the recipe's name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(MLPS + TUNED)
    for home, seed in (("runs/mine", 7), ("runs/ladder/mine", 5)):
        (tmp_path / home).mkdir(parents=True)
        kept = f"[comparison]\ntune_seed = {seed}\ntune = {{ 'optimizer.lr' = [1e-3] }}\n"
        (tmp_path / home / "comparison.toml").write_text(kept)
    ladder = read_ladder("mine.toml", ["--model.vocab-size", "64"], {"sizes": "4k"})
    assert str(ladder.comparison.home) == "runs/ladder/mine"
    assert ladder.comparison.settings.tuned_with == 5


def test_sizes_on_other_data_are_left_out(ladder):
    settings = dataclasses.replace(ladder.comparison.settings, tune={})
    ladder = with_rates(
        dataclasses.replace(ladder, comparison=dataclasses.replace(ladder.comparison, settings=settings))
    )
    for task in tasks_of(ladder.comparison):
        data = {"train": "old" if "0.004M" in task.entry else "new", "validation": "same"}
        finish(task, {"loss": _law(task.entry, ladder)}, data=data)
    families = families_of(ladder)[1]
    assert {size for family in families for size, rung in family.rungs.items() if not rung.losses} == {"0.004M"}
    assert "seed 1 (trained on other data than most of the runs)" in write_report(ladder)


@pytest.mark.slow
def test_a_ladder_trains_and_goes_on_in_its_folder(dataset, tmp_path, capsys):
    path, home = tmp_path / "mine.toml", tmp_path / "home"
    one = TUNED.split('[[comparison.entry]]\nname = "Hydra')[0].replace(
        "[comparison]", "[comparison]\ncontrols = false"
    )
    path.write_text(MLPS + one.replace(", 3e-3, 9e-3]", "]"))
    words = ["--data.path", dataset, "--tokens-per-parameter", "0.1", "--parallel", "2"]
    command = ["ladder", str(path), "--sizes", "4k,8k,16k,32k", "--run-dir", str(home), *words]
    assert main([*command, "--dry-run"]) == 0
    assert "measured now" in capsys.readouterr().out
    assert main([*command, "--only", "8k"]) == 0
    assert "attention, 0.004M seed 1 (missing)" in capsys.readouterr().out
    assert main(["ladder", str(home)]) == 0
    said = capsys.readouterr().out
    assert "| attention" in said.split("L = E + A N^-a")[1]
    assert "Without a number" not in said
    assert main(["ladder", str(home), "--report"]) == 0

"""What a comparison's tables, CSV and picture say of controls, context, generated tasks and variants."""

import csv
import io

import pytest
from comparisons import ENTRIES, TINY, VARIANTS, finish

from matmix.launch.cli import main
from matmix.launch.lab.compare import report, speed
from matmix.launch.lab.compare.config import keep_recipe, read_comparison, tasks_of
from matmix.launch.lab.compare.report import (
    collect,
    looks,
    plan_text,
    table_csv,
    write_report,
)
from matmix.launch.lab.compare.width import matched

CONTROLLED = ENTRIES.replace("controls = false", "")


@pytest.fixture
def compared(tmp_path):
    """A comparison of which each run is finished with the validation metrics that `metrics(entry, seed)` gives."""

    def make(text, metrics, *words):
        path = tmp_path / "mine.toml"
        path.write_text(TINY + text)
        words = ["--model.vocab-size", "64", "--run-dir", str(tmp_path / "home"), *words]
        comparison = matched(read_comparison(str(path), words))
        for task in tasks_of(comparison):
            validation = metrics(task.entry, task.seed)
            if validation is not None:
                finish(task, validation)
        return comparison

    return make


LOSSES = {"attention": 2.0, "Hydra, 2 x": 1.5, "no mixer": 2.5, "convolution only": 1.75}


def _language(entry, seed):
    loss = LOSSES[entry.split(", short")[0].split(", deep")[0]] + 0.25 * seed
    bins = {"1": 3.0, "2-3": 2.5, "4-7": loss, "16-31": 1.0, "8-15": 1.25}
    return {"loss": loss, "masked_accuracy": 1 / loss, "context_gain": 3.0 - loss} | {
        f"position_loss/{name}": value for name, value in bins.items()
    }


def _task(entry, seed):
    """Attention is right at the training length only; Hydra a little worse there."""
    right = {"attention": 1.0, "Hydra, 2 x": 0.875, "no mixer": 0.5, "convolution only": 0.5}
    own = right[entry.split(", short")[0].split(", deep")[0]]
    longer = {f"accuracy_x{length}": own if entry.startswith("Hydra") else 0.5 for length in (8, 2, 4)}
    return {"loss": 2.0 - own, "accuracy": own, **longer, "chance_accuracy": 0.5}


def _cells(table: str) -> list[list[str]]:
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows if not row[0].strip().startswith("---")]


def test_what_context_bought_stands_beside_the_loss(compared):
    comparison = compared(CONTROLLED, _language)
    header, *rows = _cells(write_report(comparison))
    assert [row[0] for row in rows] == ["Hydra, 2 x", "convolution only (control)", "attention", "no mixer (control)"]
    gain, context = header.index("gain over no mixer (nats)"), header.index("context gain (nats)")
    assert [row[gain] for row in rows] == ["1.000", "0.750", "0.500", ""]
    assert rows[0][context] == "1.375 ± 0.177"
    part = collect(comparison)
    assert list(part.positions) == ["1", "2-3", "4-7", "8-15", "16-31"]
    assert part.accuracies == {}
    assert part.results[-1].gain == []


@pytest.mark.slow
def test_a_seed_whose_loss_is_no_number_makes_its_entry_the_last(compared):
    def metrics(entry, seed):
        found = _language(entry, seed)
        return found | {"loss": float("nan")} if entry.startswith("Hydra") and seed else found

    comparison = compared(CONTROLLED + VARIANTS, metrics)
    tables = write_report(comparison).split("\n## ")
    header, *rows = _cells(tables[1])
    assert rows[-1][0] == _cells(tables[0])[-1][0] == "Hydra, 2 x"
    assert rows[-1][header.index("validation loss")] == "nan"
    assert (comparison.home / "report" / "plot.png").stat().st_size > 0


def test_without_the_control_there_is_no_gain(compared):
    comparison = compared(CONTROLLED, lambda entry, seed: None if entry == "no mixer" else _language(entry, seed))
    assert "gain over no mixer" not in write_report(comparison)
    text = write_report(matched(read_comparison(str(keep(comparison)), ["--comparison.controls", "False"])))
    assert "gain over no mixer" not in text


@pytest.mark.parametrize("has_both", [True, False])
def test_gains_are_over_the_control_of_the_name_or_a_line_names_another(compared, has_both):
    entries = '[[comparison.entry]]\nname = "told"\nmodel.layers = ["none"]\nmodel.position_embeddings = true\n'
    entries += '[[comparison.entry]]\nname = "no mixer"\nmodel.layers = ["none"]\n' if has_both else ""
    losses = LOSSES | {"told": 2.25}
    text = write_report(compared(CONTROLLED + entries, lambda entry, seed: {"loss": losses[entry]}))
    header, *rows = _cells(text)
    gains = {row[0]: row[header.index("gain over no mixer (nats)")] for row in rows}
    assert (gains["attention"], gains["told (control)"]) == (("0.500", "0.250") if has_both else ("0.250", ""))
    assert ("Gains are over told." in text) is not has_both


def test_what_data_dependence_bought_stands_beside_the_loss(compared):
    """For matrices of one class; Cauchy's has no other to be compared with, and quasiseparable_dd's no finished run."""

    def metrics(entry, seed):
        if entry in losses:
            return {"loss": losses[entry] + seed, "finetune/mean": 1 - losses[entry] / 10 + seed / 4}
        return None

    losses = {"toeplitz_di": 2.5, "toeplitz_dd": 2.0, "cauchy_dd": 1.0, "quasiseparable_di": 3.0}
    comparison = compared(_matrices(*losses, "quasiseparable_dd"), metrics)
    header, *rows = _cells(write_report(comparison))
    gain = header.index("gain over DI (nats)")
    assert {row[0]: row[gain] for row in rows if row[gain]} == {"toeplitz_dd": "0.500"}
    better = next(place for place, heading in enumerate(header) if heading.endswith(", over DI (%)"))
    assert {row[0]: row[better] for row in rows if row[better]} == {"toeplitz_dd": "5.0"}
    csv_rows = csv.DictReader(io.StringIO(table_csv([collect(comparison)])))
    assert {row["entry"]: row["gain_over_di"] for row in csv_rows}["toeplitz_dd"] == "0.5"


def test_a_matrix_of_parameters_is_drawn_as_that_of_tokens_but_for_its_dashes(compared):
    names = ["cauchy_dd", "toeplitz_dd", "toeplitz_di"]
    part = collect(compared(_matrices(*names), lambda entry, seed: {"loss": 1.0}))
    drawn = {result.mixer: look for result, look in zip(part.results, looks(part, names), strict=True)}
    assert [drawn[name]["linestyle"] for name in names] == ["-", "-", "-."]
    cauchy, tokens, parameters = ((drawn[name]["color"], drawn[name]["marker"]) for name in names)
    assert tokens == parameters != cauchy


def _matrices(*names):
    settings = "[comparison]\nseeds = [0, 1]\ntolerance = 0.9\ncontrols = false\n"
    return settings + "".join(
        f'[[comparison.entry]]\nname = "{name}"\nmodel.layers = ["{name}"]\nmodel.mixers.{name}.headdim = 8\n'
        f'model.max_seqlen = 32\ndata.packing = "rows"\n'
        for name in names
    )


def keep(comparison):
    """The folder of a comparison, with its recipe."""
    keep_recipe(comparison)
    return comparison.home


def test_a_folder_from_before_the_controls_gains_them(compared):
    """Its comparison.toml says nothing of controls; what is finished is not trained again."""
    home = keep(compared(CONTROLLED, lambda entry, seed: _language(entry, seed) if entry in LOSSES else None))
    for folder in ("no-mixer", "convolution-only"):
        for path in sorted((home / folder).rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
    again = matched(read_comparison(str(home)))
    waiting = [task.entry for task in tasks_of(again) if not task.is_finished()]
    assert waiting == ["no mixer", "convolution only"] * 2


def test_the_csv_has_all_metrics_and_says_what_is_a_control(compared):
    comparison = compared(CONTROLLED, _language)
    rows = {row["entry"]: row for row in csv.DictReader(io.StringIO(table_csv([collect(comparison)])))}
    assert {name: row["control"] for name, row in rows.items()} == {
        "attention": "",
        "Hydra, 2 x": "",
        "no mixer": "no mixer",
        "convolution only": "convolution only",
    }
    row = rows["Hydra, 2 x"]
    assert float(row["loss_mean"]) == 1.625
    assert float(row["position_loss/4-7_mean"]) == 1.625
    assert float(row["position_loss/4-7_seed_1"]) == 1.75
    assert float(row["context_gain_seed_0"]) == 1.5
    assert float(row["gain_over_no_mixer"]) == 1.0
    assert row["n"] == "2"


def test_generated_tasks_are_sorted_by_accuracy_over_lengths(compared):
    comparison = compared(CONTROLLED, _task)
    text = write_report(comparison)
    header, *rows = _cells(text)
    columns = [f"accuracy {length}x (%)" for length in (1, 2, 4, 8)]
    first = header.index(columns[0])
    assert header[first : first + 4] == columns
    assert rows[0][0] == "attention"
    assert rows[0][first : first + 4] == ["100.0 ± 0.0", "50.0 ± 0.0", "50.0 ± 0.0", "50.0 ± 0.0"]
    assert rows[1][first : first + 4] == ["87.5 ± 0.0"] * 4
    assert "chance 50.0 %" in text
    assert "gain over no mixer" not in text
    assert "bits per byte" not in text


def test_variants_have_a_table_each_and_one_over_all(compared):
    comparison = compared(
        CONTROLLED + VARIANTS, lambda entry, seed: (_task if "deep" in entry else _language)(entry, seed)
    )
    text = write_report(comparison)
    summary, short, deep = text.split("## ")
    assert short.startswith("short rows\n")
    assert deep.startswith("deep\n")
    header, *rows = _cells(summary)
    assert header == [
        *("entry", "short rows: loss", "short rows: gain over no mixer (nats)"),
        *("deep: accuracy 1x (%)", "deep: accuracy 8x (%)"),
    ]
    by_name = {row[0]: row[1:] for row in rows}
    assert by_name["Hydra, 2 x"] == ["1.6250 ± 0.1768", "1.000", "87.5 ± 0.0", "87.5 ± 0.0"]
    assert by_name["no mixer (control)"][1] == ""
    assert "context gain" in _cells(short)[0][6]
    assert "accuracy 4x (%)" in _cells(deep)[0]
    rows = list(csv.DictReader((comparison.home / "report/table.csv").open()))
    assert [(row["variant"], row["accuracy_x8_mean"]) for row in rows if row["entry"] == "Hydra, 2 x"] == [
        ("short rows", ""),
        ("deep", "0.875"),
    ]
    assert (comparison.home / "report/plot.png").stat().st_size > 20_000


@pytest.mark.slow
def test_what_is_missing_in_a_variant_is_marked_there(compared):
    comparison = compared(
        CONTROLLED + VARIANTS, lambda entry, seed: None if entry == "attention, deep" else _language(entry, seed)
    )
    assert main(["compare", str(keep(comparison)), "--report"]) == 0
    summary, short, deep = write_report(comparison).split("## ")
    assert "attention seeds 0, 1 (missing)" in deep
    assert "Without a number" not in short
    assert _cells(summary)[-1][:2] == ["attention", "2.1250 ± 0.1768"]  # the last, for want of a variant
    assert "Also in" not in summary + short + deep


def test_entries_of_which_nothing_has_begun_stand_below_the_table(compared):
    comparison = compared(CONTROLLED, lambda entry, seed: None if entry == "attention" else _language(entry, seed))
    text = write_report(comparison)
    assert [row[0] for row in _cells(text)[1:]] == ["Hydra, 2 x", "convolution only (control)", "no mixer (control)"]
    assert "Not begun: attention." in text
    assert "attention" not in (comparison.home / "report/table.csv").read_text()


def test_variants_of_which_nothing_has_begun_have_no_table(compared):
    text = write_report(
        compared(CONTROLLED + VARIANTS, lambda entry, seed: None if "deep" in entry else _language(entry, seed))
    )
    assert "## short rows" in text
    assert "## deep" not in text
    assert "Not begun: deep." in text


def test_where_nothing_has_begun_all_entries_are_in_the_table(compared):
    text = write_report(compared(CONTROLLED, lambda entry, seed: None))
    assert len(_cells(text)) == 5
    assert "Not begun" not in text


def test_speed_is_measured_in_the_first_variant(compared, monkeypatch):
    comparison = compared(ENTRIES + VARIANTS, _language)
    measured = []

    def measure(recipe):
        measured.append(str(recipe.parent.relative_to(comparison.home)))
        return {"tokens_per_second": 7.0, "peak_bytes": 2**20}

    monkeypatch.setattr(speed, "in_a_process", measure)
    assert not speed.is_measured(comparison)
    assert speed.measure_all(comparison)
    assert speed.is_measured(comparison)
    assert measured == ["attention/short-rows", "Hydra-2-x/short-rows"] * 3
    _, short, deep = write_report(comparison).split("## ")
    assert "tokens/s" in short
    assert "Speed: training steps of 4 x 16 tokens" in short
    assert "tokens/s" not in deep
    assert "not measured" not in deep


def test_the_plan_has_a_table_for_each_variant(compared):
    text = plan_text(compared(CONTROLLED + VARIANTS, lambda entry, seed: None))
    assert text.index("short rows:\n") < text.index("3 steps of 4 sequences of 16 tokens") < text.index("deep:\n")
    assert text.count("no mixer (control)") == 2
    assert "4 entries x 2 variants x 2 seeds (0, 1)\n" in text


def test_controls_are_dashed_in_grey_and_black(compared):
    part = collect(compared(CONTROLLED, _language))
    drawn = looks(part, sorted(LOSSES))
    styles = {result.entry.control: look for result, look in zip(part.results, drawn, strict=True)}
    assert (styles["no mixer"]["linestyle"], styles["no mixer"]["color"]) == ("--", "0.5")
    assert (styles["convolution only"]["linestyle"], styles["convolution only"]["color"]) == ("--", "black")
    assert styles[None]["linestyle"] == "-"


IMAGES = """
[comparison]
seeds = [0, 1]
tolerance = 0.1
controls = false
[[comparison.entry]]
name = "attention"
"""


def test_images_are_what_losses_and_speeds_of_their_models_count(compared, monkeypatch):
    words = ["--model.architecture", "image_classifier", "--objective.name", "image_classification"]
    words += ["--model.vocab-size", "0", "--model.head.outputs", "3", "--model.head.hidden", "False"]
    words += ["--model.image.size", "8", "--model.image.patch", "4"]
    comparison = compared(IMAGES, lambda entry, seed: {"loss": 1.0, "accuracy": 0.5}, *words)
    figures = []
    monkeypatch.setattr(report, "png_of", figures.append)
    report.picture([collect(comparison)])
    losses, curves = figures[0].axes
    assert "validation loss (nats per image)" in losses.get_xlabel()
    assert "training loss (nats per image)" in curves.get_ylabel()
    monkeypatch.setattr(speed, "in_a_process", lambda recipe: {"tokens_per_second": 7.0, "peak_bytes": 2**20})
    assert speed.measure_all(comparison)
    assert "Speed: training steps of 4 images side by side" in speed.speed_words(comparison)[0]

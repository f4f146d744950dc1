"""GLUE's files as the recipes read them, and what `matmix glue --check` says of them."""

from __future__ import annotations

import pytest
from glue_files import BROKEN, write_glue
from labelled import write_tokenizer

from matmix.data.examples.readers import read_rows
from matmix.data.modalities.examples import open_examples
from matmix.launch.cli import main
from matmix.launch.glue.tasks import TASKS
from matmix.train.recipe import load_config
from matmix.train.tasks import TASKS as KINDS

COLUMNS = {  # where the layout has the texts and the label
    "CoLA": ((3,), 1),
    "SST-2": ((0,), 1),
    "MRPC": ((3, 4), 0),
    "QQP": ((3, 4), 5),
    "STS-B": ((7, 8), 9),
    "MNLI": ((8, 9), -1),
    "QNLI": ((1, 2), 3),
    "RTE": ((1, 2), 3),
}
ORDER = {
    "MNLI": ["entailment", "neutral", "contradiction"],
    "QNLI": ["entailment", "not_entailment"],
    "RTE": ["entailment", "not_entailment"],
}


@pytest.mark.parametrize("name", TASKS)
def test_texts_and_labels_are_those_of_the_files(name, tmp_path):
    written = write_glue(tmp_path, [name])
    task, (texts, label) = TASKS[name], COLUMNS[name]
    for file in task.files:
        rows = read_rows(str(tmp_path / name / file), task.form(), tuple(task.form().columns))
        wanted = written[f"{name}/{file}"]
        assert rows.columns["text"] == [fields[texts[0]] for fields in wanted]
        assert rows.columns.get("pair", []) == [fields[texts[1]] for fields in wanted if len(texts) > 1]
        assert rows.columns["label"] == [fields[label] for fields in wanted]
    assert any('"' in text for text in rows.columns["text"])


@pytest.mark.parametrize("name", TASKS)
def test_a_recipe_reads_them_alone(name, tmp_path):
    """With the labels in the order of its outputs."""
    written = write_glue(tmp_path, [name])
    words = [*TASKS[name].overrides(tmp_path), "--data.examples.tokenizer", write_tokenizer(tmp_path / "tokenizer")]
    config = load_config(TASKS[name].recipe, [*words, "--data.prefix", "cls", "--data.suffix", "sep"])
    for split, file in (("train", "train.tsv"), ("validation", TASKS[name].validation)):
        examples = open_examples(KINDS[config.objective.name].examples, config.data, split)
        labels = [fields[COLUMNS[name][1]] for fields in written[f"{name}/{file}"]]
        order = ORDER.get(name, ["0", "1"])
        wanted = [float(label) if name == "STS-B" else order.index(label) for label in labels]
        assert [examples.label(number).item() for number in range(len(examples))] == pytest.approx(wanted)


def test_broken_rows_of_qqp_are_left_out_and_counted(tmp_path, told):
    written = write_glue(tmp_path, ["QQP"])
    rows = read_rows(str(tmp_path / "QQP" / "train.tsv"), TASKS["QQP"].form(), ("text", "pair", "label"))
    assert len(rows) == len(written["QQP/train.tsv"]) == 24
    assert BROKEN[3] not in rows.columns["text"]
    [line] = [line for line in told if "left out" in line]
    assert "1 of 25 rows have another number of fields than the first and are left out" in line
    assert "row 6" in line


def test_broken_rows_of_other_tasks_are_refused(tmp_path):
    write_glue(tmp_path, ["RTE"])
    with (tmp_path / "RTE" / "train.tsv").open("a") as file:
        file.write("24\ta\tb\n")
    with pytest.raises(ValueError, match="row 26: 3 fields instead of 4"):
        read_rows(str(tmp_path / "RTE" / "train.tsv"), TASKS["RTE"].form(), ("text", "pair", "label"))


def test_check_counts_what_is_there(tmp_path, capsys):
    write_glue(tmp_path)
    assert main(["glue", "--check", str(tmp_path)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert "MNLI  train.tsv 24, dev_matched.tsv 13, dev_mismatched.tsv 13 examples" in said
    assert "QQP   train.tsv 24 (1 malformed left out), dev.tsv 13 examples" in said
    assert len(said) == 8


def test_check_says_what_is_missing_and_what_to_do(tmp_path, capsys):
    write_glue(tmp_path, ["RTE", "MRPC", "MNLI", "CoLA"])
    (tmp_path / "MNLI" / "dev_mismatched.tsv").unlink()
    for name in ("train", "dev"):
        (tmp_path / "MRPC" / f"{name}.tsv").unlink()
    (tmp_path / "MRPC" / "msr_paraphrase_train.txt").write_text("Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n")
    (tmp_path / "CoLA" / "dev.tsv").write_text("gj04\t2\t\ta sentence\n")
    assert main(["glue", "--check", str(tmp_path)]) == 2
    said = capsys.readouterr().out
    assert "RTE   train.tsv 24, dev.tsv 13 examples\n" in said
    assert f"MNLI  MISSING: {tmp_path / 'MNLI'} lacks dev_mismatched.tsv; copy" in said
    assert (
        f"MRPC  MISSING: {tmp_path / 'MRPC'} lacks train.tsv, dev.tsv; they are made of msr_paraphrase_train.txt"
        in said
    )
    assert "dev_ids.tsv" in said
    assert f"QQP   MISSING: there is no folder {tmp_path / 'QQP'}; unpack QQP of the GLUE download there" in said
    assert 'dev.tsv, row 1: label "2" is not among the 2 classes' in said


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--check", "nowhere"], "no folder nowhere"),
        (["runs/no"], "no DIR given: matmix glue SOURCE DIR"),
        (["runs/no", "DIR", "--tasks", "RET"], 'has no task "RET" here (did you mean "RTE"?)'),
        (["runs/no", "DIR", "--tasks", "QQP"], "there is no folder"),
        (["runs/no", "DIR", "--seed", "3"], "--seeds"),
        (["runs/no", "DIR", "--optimizer.lrr", "3"], "optimizer.lr"),
        (["runs/no", "DIR", "--tasks", "RTE", "--seeds", "1", "1"], "seeds 1 1: one of them is given twice"),
    ],
)
def test_mistakes_are_one_line(words, why, tmp_path, capsys):
    write_glue(tmp_path, ["RTE"])
    assert main(["glue", *(str(tmp_path) if word == "DIR" else word for word in words)]) == 2
    error = capsys.readouterr().err
    assert why in error
    assert error.count("\n") == 1

"""Files of examples in every form give the same rows, and bad ones an error of one line."""

from __future__ import annotations

import csv

import pyarrow
import pyarrow.parquet
import pytest
from failures import each
from labelled import texts, write_jsonl, write_tsv

from matmix.data.config import ExamplesConfig
from matmix.data.examples.readers import read_rows

ROWS = [{"sentence": 'He said "no', "grade": "bad"}, {"sentence": "a, b", "grade": "good"}]
COLUMNS = {"text": "sentence", "label": "grade"}


def _csv(path):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ("sentence", "grade"))
        writer.writeheader()
        writer.writerows(ROWS)
    return str(path)


def _parquet(path):
    sentences = pyarrow.array([row["sentence"] for row in ROWS]).cast(pyarrow.string_view())
    grades = pyarrow.array([row["grade"] for row in ROWS]).dictionary_encode()
    pyarrow.parquet.write_table(pyarrow.table({"sentence": sentences, "grade": grades}), path)
    return str(path)


@each(
    "suffix, write",
    [
        (".csv", _csv),
        (".tsv", lambda path: write_tsv(path, ROWS)),
        (".jsonl", lambda path: write_jsonl(path, ROWS)),
        (".parquet", _parquet),
    ],
)
def test_the_columns_of_every_form_are_the_same(suffix, write, tmp_path):
    config = ExamplesConfig(columns=COLUMNS)
    rows = read_rows(write(tmp_path / f"train{suffix}"), config, ("text", "label"), ("pair",))
    assert rows.columns == {"text": ['He said "no', "a, b"], "label": ["bad", "good"]}


def test_columns_without_a_header_are_numbers(tmp_path):
    path = tmp_path / "cola.tsv"
    path.write_text("gj04\t1\t\tA sentence.\ngj04\t0\t*\tSentence a.\n")
    rows = read_rows(str(path), ExamplesConfig(header=False, columns={"text": "3", "label": "1"}), ("text", "label"))
    assert rows.columns == {"text": ["A sentence.", "Sentence a."], "label": ["1", "0"]}


def test_other_columns_of_a_table_are_not_read(tmp_path):
    dates = pyarrow.array([8 * 10**18, 0], pyarrow.timestamp("us"))  # there is no such year in Python
    table = pyarrow.table({"text": ["a", "b"], "label": ["x", "y"], "when": dates})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert read_rows(str(tmp_path / "a.parquet"), ExamplesConfig(), ("text", "label")).columns["text"] == ["a", "b"]
    config = ExamplesConfig(columns={"text": "when"})
    with pytest.raises(ValueError, match=r"a\.parquet: "):
        read_rows(str(tmp_path / "a.parquet"), config, ("text", "label"))
    (tmp_path / "b.csv").write_text("text,text,label,,\na,b,x,1,2\n")
    with pytest.raises(ValueError, match=r'b\.csv has several columns "text", of which one is meant'):
        read_rows(str(tmp_path / "b.csv"), ExamplesConfig(), ("text", "label"))
    assert read_rows(str(tmp_path / "b.csv"), ExamplesConfig(), ("label",)).columns["label"] == ["x"]


def test_a_folder_that_changed_is_read_again(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "a.txt").write_text("a")
    assert read_rows(str(tmp_path), ExamplesConfig(), ("text",)).columns["text"] == ["a"]
    (tmp_path / "one" / "b.txt").write_text("b")
    assert read_rows(str(tmp_path), ExamplesConfig(), ("text",)).columns["text"] == ["a", "b"]


def test_a_folder_has_a_folder_for_each_class(tmp_path):
    for name, text in (("b/1.txt", "one"), ("a/2.txt", "two\nlines")):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    rows = read_rows(str(tmp_path), ExamplesConfig(), ("text", "label"))
    assert rows.columns == {"text": ["two\nlines", "one"], "label": ["a", "b"]}


@each(
    "content, message",
    [
        ("", "is empty"),
        ("text\tlabel\n", "holds no examples"),
        ("text\tgrade\na\tb\n", 'has no column "label" .it has text, grade.'),
        ("text\tlabel\na\tb\na\n", "row 3: 1 fields instead of 2"),
        ("text\tlabel\na\tb\nc\t \n", "row 3: no label"),
    ],
)
def test_bad_files_are_refused_in_one_line(content, message, tmp_path):
    path = tmp_path / "train.tsv"
    path.write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        read_rows(str(path), ExamplesConfig(), ("text", "label"), filled=("label",))
    assert "\n" not in str(error.value)


@each("rest", ['"c,d\ne,f\n', '"c"c,d\n', '"c,d\n"e",f\n'])
def test_a_quote_that_does_not_end_with_its_field_swallows_no_rows(rest, tmp_path):
    path = tmp_path / "train.csv"
    path.write_text(f'text,label\n"a\nb",x\n{rest}')
    with pytest.raises(ValueError, match=r"train\.csv, row 4: a quotation mark is not closed, or text follows it"):
        read_rows(str(path), ExamplesConfig(), ("text", "label"))


def test_malformed_lines_are_left_out_if_asked(tmp_path):
    path = tmp_path / "train.tsv"
    path.write_text("text\tlabel\na\tb\na\nc\td\ne\tf\tg\n")
    rows = read_rows(str(path), ExamplesConfig(skip_malformed=True), ("text", "label"))
    assert (rows.columns["text"], rows.left_out) == (["a", "c"], 2)
    rows = read_rows(str(path), ExamplesConfig(skip_malformed=True, more_fields=True), ("text", "label"))
    assert (rows.columns["label"], rows.left_out) == (["b", "d", "f"], 1)


def test_other_files_and_columns_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"give \.tsv, \.csv, \.jsonl, \.parquet, or a folder"):
        read_rows(write_jsonl(tmp_path / "train.txt", texts(1)), ExamplesConfig(), ("text",))
    with pytest.raises(FileNotFoundError, match="examples not found"):
        read_rows(str(tmp_path / "no.tsv"), ExamplesConfig(), ("text",))
    with pytest.raises(ValueError, match="columns names words, which this task does not read: text"):
        read_rows("no.tsv", ExamplesConfig(columns={"words": "w"}), ("text",))

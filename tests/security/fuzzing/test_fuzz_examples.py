"""Whatever a file of labelled examples holds: it is read, or refused in one line."""

from __future__ import annotations

import io

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from labelled import write_tokenizer
from mutations import fuzz, mutated, works_or_is_one_line

from matmix.data.config import DataConfig, ExamplesConfig
from matmix.data.examples.answers import Answers
from matmix.data.examples.texts import ClassTexts, MultiLabelTexts, ValueTexts, Words
from matmix.data.modalities.examples import open_examples


def _parquet() -> bytes:
    file = io.BytesIO()
    table = pyarrow.table({"text": ["word1 word2"] * 9, "label": ["1"] * 9})
    pyarrow.parquet.write_table(table, file, compression="none")
    return file.getvalue()


FILES = {
    "a.tsv": b"text\tpair\tlabel\n" + b"word1 word2\t\xc3\xa9 word2\tword2\n" * 5,
    "a.csv": b'text,pair,label\n"word1, word2",word2,word2\n' * 3,
    "a.jsonl": b'{"text": "word1", "pair": "word2 word3", "label": {"text": ["word3"], "answer_start": [6]}}\n' * 3
    + b'{"text": ["word1", "word2"], "pair": "x", "label": ["1", "2"]}\n',
    "a.parquet": _parquet(),
}


@pytest.mark.parametrize("name", FILES)
@fuzz(25)
@given(data=st.data())
def test_files_of_examples(tmp_path, name, data):
    file = tmp_path / name
    file.write_bytes(data.draw(mutated(FILES[name])))
    kind = data.draw(st.sampled_from([ClassTexts, MultiLabelTexts, ValueTexts, Words, Answers]))
    tokenizer = write_tokenizer(tmp_path)
    options = ExamplesConfig(train=str(file), tokenizer=tokenizer, stride=1)
    config = DataConfig(examples=options, seqlen=16, prefix="cls", suffix="sep", workers=0)

    def read():
        examples = open_examples(kind, config, "train")
        for number in range(len(examples)):
            examples[number]

    works_or_is_one_line(read)

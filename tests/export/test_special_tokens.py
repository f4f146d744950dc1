"""An export's tokenizer reads special tokens in a text as such, or with `split_special_tokens` as text."""

from __future__ import annotations

import pytest
from tokenizer_kinds import FRAGMENTS, KINDS, OTHERS, SPECIAL, built
from transformers import AutoTokenizer

from matmix.data.tokenizer import Tokenizer
from matmix.model.config import ModelConfig
from matmix.model.interop.export.tokenizer import load_fast_tokenizer, write_tokenizer

TEXTS = [*FRAGMENTS, "one </s> two<mask>", "a<s><s>a", "<s", "<<s>/s>", "one two"]
# A pre-tokenizer cannot cut what has one letter.
LEFT = {"bpe with a special letter and bytes", "unigram with a special letter"}


@pytest.fixture(params=[name for name in (*KINDS, *OTHERS) if name not in LEFT])
def pair(request, tmp_path):
    """The tokenizer of a run, and the folder of its export."""
    built(request.param).save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    (tmp_path / "export").mkdir()
    fast, model = load_fast_tokenizer(tokenizer.path, tokenizer.special), ModelConfig(vocab_size=64)
    around = {"special": tokenizer.special, "prefix": "none", "suffix": "none"}
    write_tokenizer(tmp_path / "export", fast, model, **around, max_length=64)
    return tokenizer, tmp_path / "export"


def test_transformers_reads_them_as_text_if_asked_to(pair):
    tokenizer, folder = pair
    plain = AutoTokenizer.from_pretrained(folder, split_special_tokens=True)
    for text in TEXTS:
        ids = plain(text, add_special_tokens=False).input_ids
        assert not set(ids) & set(tokenizer.special_ids), text
    found = AutoTokenizer.from_pretrained(folder)(" ".join(SPECIAL), add_special_tokens=False).input_ids
    assert {0, 1, 2, 3, 4} <= set(found)


def test_matmix_reads_the_export_as_the_run(pair):
    tokenizer, folder = pair
    assert Tokenizer.load(folder).encode_batch(TEXTS) == tokenizer.encode_batch(TEXTS)
    assert Tokenizer.load(folder).special_ids == tokenizer.special_ids
    again = load_fast_tokenizer(folder / "tokenizer.json", tokenizer.special)
    assert again.to_str(pretty=True) == (folder / "tokenizer.json").read_text()

"""No text gives a special token, whatever kind of tokenizer reads it, and a text that spells one comes back."""

from __future__ import annotations

import io
import json

import pytest
import sentencepiece
from failures import each
from hypothesis import given, settings
from tokenizer_kinds import BYTES, FRAGMENTS, KINDS, LETTERS, OTHERS, SPECIAL, TEXTS, built, numbered, specials
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from matmix.data.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    loaded: dict[str, Tokenizer] = {}

    def load(name: str) -> Tokenizer:
        if name not in loaded:
            path = tmp_path_factory.mktemp("kind") / "tokenizer.json"
            built(name).save(str(path))
            loaded[name] = Tokenizer.load(path)
        return loaded[name]

    return load


@each("name", KINDS)
@settings(max_examples=60, deadline=None)
@given(text=TEXTS)
def test_text_that_spells_special_tokens_comes_back(load, name, text):
    tokenizer = load(name)
    ids = tokenizer.encode(text)
    assert not set(ids) & set(tokenizer.special_ids)
    assert tokenizer.decode(ids) == text


@each("name", OTHERS)
@settings(max_examples=60, deadline=None)
@given(text=TEXTS.map(lambda text: text.replace("<", "＜")) | TEXTS | TEXTS.map(lambda text: text.replace("<", "[")))
def test_no_text_gives_special_tokens(load, name, text):
    tokenizer = load(name)
    ids = tokenizer.encode(text)
    assert not set(ids) & set(tokenizer.special_ids)
    if name == "wordpiece" and tokenizer.unknown_id not in ids:
        assert tokenizer.decode(ids) == " ".join(text.split())


@each("name", [*KINDS, *OTHERS])
def test_other_text_is_read_as_the_library_reads_it(load, name):
    tokenizer, backend = load(name), built(name)
    text = "one two  tone 9 a\u0301 <a> s> 0x41 unk mask </"
    assert tokenizer.encode(text) == backend.encode(text, add_special_tokens=False).ids
    names = {tokenizer.piece(index): index for index in range(tokenizer.vocab_size)}
    assert names == backend.get_vocab()


def test_the_special_tokens_of_every_kind_are_known(load):
    for name in (*KINDS, *OTHERS):
        special = load(name).special
        assert (special["bos"], special["pad"], special["eos"], special["unk"], special["mask"]) == (0, 1, 2, 3, 4)
        expected = {0, 1, 2, 4} if load(name).unknown_id is not None else {0, 1, 2, 3, 4}
        assert expected <= set(load(name).special_ids)


def test_merges_that_are_strings(load, tmp_path):
    """As in files of earlier versions of the library."""
    name = "bpe whose merges lead to one"
    file = json.loads(built(name).to_str())
    file["model"]["merges"] = [" ".join(merge) for merge in file["model"]["merges"]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    assert Tokenizer.load(tmp_path).encode_batch(FRAGMENTS) == load(name).encode_batch(FRAGMENTS)


def test_names_of_bytes_are_text_where_no_special_token_is_a_piece(tmp_path):
    unigram = models.Unigram([("?", 0.0), *((name, 0.0) for name in BYTES), ("a", -1.0)], unk_id=0, byte_fallback=True)
    merges = [("<", "0"), ("<0", "x"), ("<0x", "4"), ("<0x4", "1"), ("<0x41", ">")]
    vocabulary = numbered("?", *BYTES, *"<0x41>a", *("".join(merge) for merge in merges))
    bpe = models.BPE(vocabulary, merges, unk_token="?", byte_fallback=True)
    for model in (unigram, bpe):
        backend = Backend(model)
        backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
        backend.add_special_tokens(["</s>"])
        backend.save(str(tmp_path / "tokenizer.json"))
        tokenizer = Tokenizer.load(tmp_path)
        assert tokenizer.decode(tokenizer.encode("a<0x41>é</s>")) == "a<0x41>é</s>"


def test_an_unknown_token_that_is_also_special_stays_out_of_text(tmp_path):
    backend = Backend(models.BPE({"</s>": 0, "a": 1}, [], unk_token="</s>"))
    specials(backend).save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("aa") == [1, 1]
    with pytest.raises(ValueError, match="'ab': </s> stands for what the vocabulary lacks, and is a special"):
        tokenizer.encode("ab")


@each("model_type", ["bpe", "unigram", "char", "word"])
@each("byte_fallback", [False, True])
def test_sentencepiece(tmp_path, model_type, byte_fallback):
    """Its own controls, also one of a single letter."""
    writer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*SPECIAL, "".join(LETTERS), "one two </s> tone"] * 9),
        model_writer=writer,
        model_type=model_type,
        vocab_size=400,
        hard_vocab_limit=False,
        byte_fallback=byte_fallback,
        add_dummy_prefix=False,
        pad_id=5,
        control_symbols=["<mask>", "☃"],
        minloglevel=2,
    )
    (tmp_path / "tokenizer.model").write_bytes(writer.getvalue())
    tokenizer = Tokenizer.load(tmp_path)
    assert {tokenizer.piece(index) for index in tokenizer.special_ids} >= {"<s>", "<pad>", "</s>", "<mask>", "☃"}
    assert (tokenizer.unknown_id is None) == byte_fallback
    for text in [*FRAGMENTS, "one </s> two<mask>", "a <s>a", "☃ ☃one"]:
        ids = tokenizer.encode(text)
        assert not set(ids) & set(tokenizer.special_ids)
        if byte_fallback and model_type != "word":  # whose spaces come back as marks before unknown words
            assert tokenizer.decode(ids).strip() == text.strip()

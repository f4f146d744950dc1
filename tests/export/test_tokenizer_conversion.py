"""The fast tokenizer gives the ids of the sentencepiece model, for every kind of model and any text."""

from __future__ import annotations

import io
import random

import pytest
import sentencepiece
from failures import each
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import MULTILINGUAL, training_text
from tokenizers import Tokenizer as FastTokenizer

from matmix.data.tokenizer import train_sentencepiece
from matmix.model.interop.export.tokenizer import (
    PROBE_TEXTS,
    first_difference,
    load_fast_tokenizer,
    sentencepiece_to_fast,
)

_ALPHABET = "aabbcde  \n\t▁<>/s0x4Eé́😀👍🏽中あ゙한ﬁ½ "


def random_texts(count: int) -> list[str]:
    draw = random.Random(0)
    mixed = ["".join(draw.choice(_ALPHABET) for _ in range(draw.randint(1, 30))) for _ in range(count)]
    ranges = [(32, 127), (160, 0x3000), (0x3000, 0xD800), (0x1F300, 0x1FA00)]
    return mixed + ["".join(chr(draw.randrange(*draw.choice(ranges))) for _ in range(12)) for _ in range(count)]


def train(path, **options) -> str:
    """A sentencepiece model with options that `matmix prepare` does not offer, as one may bring along."""
    writer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in training_text() for line in text.split("\n") if line.strip()]),
        model_writer=writer,
        vocab_size=600,
        hard_vocab_limit=False,
        control_symbols=["<cls>", "<mask>"],
        minloglevel=2,
        num_threads=1,
        **options,
    )
    path.write_bytes(writer.getvalue())
    return str(path)


def mismatches(fast: FastTokenizer, path: str, texts: list[str]) -> list[str]:
    reference = sentencepiece.SentencePieceProcessor(model_file=path)
    fast.encode_special_tokens = True
    return [text for text in texts if fast.encode(text, add_special_tokens=False).ids != reference.encode(text)]


@pytest.fixture(scope="module", params=["bpe", "unigram", "char"])
def prepared(request, tmp_path_factory):
    """Tokenizers as `matmix prepare` trains them."""
    path = tmp_path_factory.mktemp("prepared") / "tokenizer.model"
    return train_sentencepiece(training_text(), path, vocab_size=440, model_type=request.param)


def test_prepared_tokenizers_agree_on_any_text(prepared):
    fast = sentencepiece_to_fast(prepared.path)
    texts = [*PROBE_TEXTS, *MULTILINGUAL, *training_text(), *random_texts(300)]
    assert mismatches(fast, str(prepared.path), texts) == []
    assert [text for text in texts if fast.decode(prepared.encode(text)) != text and "▁" not in text] == []


def test_characters_without_bytes_make_one_unknown_token_of_neighbours_that_are_unknown(tmp_path):
    """Also where the text spells a control symbol, as "</s>" with neither "<" nor "/" in the vocabulary."""
    options = {"vocab_size": 440, "model_type": "char", "byte_fallback": False}
    path = train_sentencepiece(["no such sign here", "nor here"], tmp_path / "tokenizer.model", **options).path
    texts = [*PROBE_TEXTS, *MULTILINGUAL, *random_texts(300), "</s></s>", "a</s>//"]
    assert mismatches(sentencepiece_to_fast(path), str(path), texts) == []


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=40))
def test_hypothesis_finds_no_text_with_other_ids(tokenizer, text):
    fast = sentencepiece_to_fast(tokenizer.path)
    assert mismatches(fast, str(tokenizer.path), [text]) == []


@each("model_type", ["bpe", "unigram"])
@each("byte_fallback", [True, False])
@each("user_symbols", [[], ["<sep>", "[X]"]])
def test_models_with_a_dummy_prefix(model_type, byte_fallback, user_symbols, tmp_path):
    options = {"model_type": model_type, "byte_fallback": byte_fallback, "user_defined_symbols": user_symbols}
    symbols = ["<sep>a", "a <sep> b", "a<sep>b [X]", "[X]", " [X] <sep><sep> a  "]
    for strip in (True, False):
        path = train(
            tmp_path / f"{strip}.model",
            normalization_rule_name="identity",
            remove_extra_whitespaces=strip,
            **options,
        )
        texts = [*PROBE_TEXTS, *MULTILINGUAL, *symbols, *random_texts(200)]
        assert mismatches(sentencepiece_to_fast(path), path, texts) == []


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_models_with_sentencepiece_defaults(model_type, tmp_path):
    """nmt_nfkc normalisation, extra spaces removed, a space in front, no bytes."""
    path = train(tmp_path / "default.model", model_type=model_type)
    assert mismatches(sentencepiece_to_fast(path), path, [*PROBE_TEXTS, *MULTILINGUAL, *training_text()]) == []


def test_special_tokens_are_found_in_text_or_not(tokenizer):
    fast = load_fast_tokenizer(tokenizer.path, tokenizer.special)
    text = "one <mask> three"
    fast.encode_special_tokens = True
    assert fast.encode(text).ids == tokenizer.encode(text)
    fast.encode_special_tokens = False
    # The mask stands for a word with the space before it.
    expected = [*tokenizer.encode("one"), tokenizer.special["mask"], *tokenizer.encode(" three")]
    assert fast.encode(text).ids == expected


def test_a_difference_is_found_and_refused(tokenizer, tmp_path, monkeypatch):
    fast = sentencepiece_to_fast(tokenizer.path)
    assert first_difference(fast, tokenizer.path) is None
    other = train(tmp_path / "other.model", model_type="bpe")
    assert first_difference(fast, other) == PROBE_TEXTS[0]
    monkeypatch.setattr("matmix.model.interop.export.tokenizer.sentencepiece_to_fast", lambda *a, **k: fast)
    with pytest.raises(ValueError, match="cannot be made a fast tokenizer with the same ids: they differ for 'To be"):
        load_fast_tokenizer(other, {})


def test_what_cannot_be_converted_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no sentencepiece model at"):
        sentencepiece_to_fast(tmp_path / "absent.model")
    (tmp_path / "text.model").write_text("this is no protobuf")
    with pytest.raises(ValueError, match="not a sentencepiece model"):
        sentencepiece_to_fast(tmp_path / "text.model")
    suffix = train(tmp_path / "suffix.model", treat_whitespace_as_suffix=True, model_type="unigram")
    with pytest.raises(ValueError, match="whitespace as suffix"):
        sentencepiece_to_fast(suffix)
    with pytest.raises(ValueError, match="a sentencepiece model of words"):
        sentencepiece_to_fast(train(tmp_path / "word.model", model_type="word"))
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ValueError, match=r"not a tokenizer\.json"):
        load_fast_tokenizer(tmp_path / "broken.json", {})

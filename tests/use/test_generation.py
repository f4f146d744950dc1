"""Tokens are drawn from the distribution that was asked for, and text appears in whole characters."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from failures import each
from small_models import training_text

from matmix.data.tokenizer import train_sentencepiece
from matmix.use.generation import Sampling, TextStream

PROBABILITIES = [0.4, 0.3, 0.2, 0.1]
LOGITS = torch.tensor(PROBABILITIES).log()


def frequencies(sampling: Sampling, logits=LOGITS, count: int = 1000) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    drawn = Counter(sampling.draw(logits, generator) for _ in range(count))
    return [drawn[index] / count for index in range(len(logits))]


def cut(*kept: float) -> list[float]:
    return [value / sum(kept) for value in kept] + [0.0] * (4 - len(kept))


@each(
    "options, expected",
    [
        ({}, PROBABILITIES),
        ({"top_k": 2}, cut(0.4, 0.3)),
        ({"top_k": 9}, PROBABILITIES),
        ({"top_p": 0.6}, cut(0.4, 0.3)),
        ({"top_p": 0.01}, [1.0, 0, 0, 0]),
        ({"top_k": 3, "top_p": 0.7}, cut(0.4, 0.3)),
        ({"temperature": 0.5}, [p * p / sum(q * q for q in PROBABILITIES) for p in PROBABILITIES]),
        ({"temperature": 0.0}, [1.0, 0, 0, 0]),
        ({"temperature": 1e-30}, [1.0, 0, 0, 0]),
    ],
)
def test_frequencies(options, expected):
    sampling = Sampling(**{"temperature": 1.0, "top_p": 1.0, **options})
    assert frequencies(sampling) == pytest.approx(expected, abs=0.04)


def test_tokens_that_are_ruled_out_are_never_drawn():
    logits = LOGITS.clone()
    logits[0] = -math.inf
    assert frequencies(Sampling(temperature=5.0, top_p=1.0), logits)[0] == 0
    assert frequencies(Sampling(temperature=0.0), logits, 1)[1] == 1


def decode_bytes(ids) -> str:
    return bytes(ids).decode("utf-8", errors="replace")


def pieces_of(tokens, decode=decode_bytes, before=(), stop=()) -> list[str]:
    """What each token adds to the text, and then what is left."""
    stream = TextStream(decode, list(before), stop)
    pieces = []
    for token in tokens:
        pieces.append(stream.push(token))
        if stream.stopped_by is not None:
            break
    return [*pieces, stream.close()]


@each("before", ["", "earlier text ", "é", "a long earlier text 👍🏽"])
@each("text", ["plain", "naïve café", "日本語", "👍🏽 x 👩‍👩‍👧", ""])
def test_pieces_are_whole_characters(text, before):
    pieces = pieces_of(text.encode(), before=before.encode())
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


def test_a_character_that_never_ends_is_shown_at_last():
    assert pieces_of("aé".encode()[:-1]) == ["a", "", "\ufffd"]


def test_pieces_come_as_soon_as_they_can():
    assert pieces_of(b"abc") == ["a", "b", "c", ""]
    assert pieces_of(b"abcabd", stop=["abd", "ca"]) == ["", "", "ab", "", ""]  # "ca" has come
    assert pieces_of(b"xabcab", stop=["abd"]) == ["x", "", "", "abc", "", "", "ab"]


@each(
    "text, stop, expected",
    [
        ("one. two", ["."], "one"),
        ("aab", ["ab"], "a"),
        ("日本語。次", ["。", "語。"], "日本"),
        ("never", ["x"], "never"),
        ("end", ["end"], ""),
    ],
)
def test_a_text_ends_before_the_first_stop_string(text, stop, expected):
    assert "".join(pieces_of(text.encode(), stop=stop)) == expected


def test_a_space_before_a_word_is_kept(tmp_path):
    """Decoders that strip a space at the start must not do so in the middle of a text."""
    tokenizer = train_sentencepiece(training_text(), tmp_path / "tokenizer.model", vocab_size=420)
    text = "the quick brown fox  jumps\n over"
    ids = tokenizer.encode(text)
    for cut_at in range(len(ids)):
        pieces = pieces_of(ids[cut_at:], tokenizer.decode, ids[:cut_at])
        assert tokenizer.decode(ids[:cut_at]) + "".join(pieces) == text

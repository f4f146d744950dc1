"""Tokens of texts, pairs, words and windows, and what they are to predict."""

from __future__ import annotations

import os

import numpy as np
import pytest
import sentencepiece
from failures import each
from labelled import CLASSES, FIRST, WORDS, texts, write_jsonl, write_tokenizer

from matmix.data.config import DataConfig, ExamplesConfig
from matmix.data.examples.answers import Answers
from matmix.data.examples.base import Encoder, longest_first
from matmix.data.examples.texts import Choices, ClassTexts, MultiLabelTexts, TextPairs, ValueTexts, Words
from matmix.data.loading.masking import IGNORED
from matmix.data.modalities.examples import open_examples
from matmix.data.tokenizer import Tokenizer

CLS, SEP = 4, 5


def _open(kind, tmp_path, rows, split="train", seqlen=32, packing="concat", **options):
    options |= {"tokenizer": write_tokenizer(tmp_path / "tokenizer"), "train": write_jsonl(tmp_path / "a.jsonl", rows)}
    config = DataConfig(
        examples=ExamplesConfig(**options), seqlen=seqlen, prefix="cls", suffix="sep", packing=packing, workers=0
    )
    return open_examples(kind, config, split)


def _ids(*words):
    return [FIRST + WORDS.index(word) for word in words]


@each("length", [8, 9, 12, 32])
def test_pairs_are_put_together_and_cut_as_transformers_does(length, tmp_path):
    from transformers import PreTrainedTokenizerFast  # takes a second, on each worker that collects this file

    words = [" ".join(WORDS[:9]), " ".join(WORDS[20:26])]
    examples = _open(ClassTexts, tmp_path, [{"text": words[0], "pair": words[1], "label": 1}], seqlen=length)
    [document] = examples[0].documents
    theirs = PreTrainedTokenizerFast(tokenizer_file=examples.config.tokenizer)
    first, second = (theirs(text)["input_ids"] for text in words)
    kept = theirs.truncate_sequences(first, second, num_tokens_to_remove=max(0, 15 + 3 - length))
    assert document.ids.tolist() == [CLS, *kept[0], SEP, *kept[1], SEP]
    assert document.types.tolist() == [0] * (2 + len(kept[0])) + [1] * (1 + len(kept[1]))


def test_longest_first():
    assert longest_first([5, 9, 3], 9) == [3, 3, 3]
    assert longest_first([5, 9], 100) == [5, 9]
    assert longest_first([4], 0) == [0]


def test_classes_are_those_of_the_training_examples_in_order(tmp_path):
    examples = _open(ClassTexts, tmp_path, [{"text": "word1", "label": label} for label in (10, 2, 2.0, "1")])
    assert examples.classes.names == ("1", "2", "10")
    assert [examples[number].labels.tolist() for number in range(4)] == [[2], [1], [1], [0]]
    validation = write_jsonl(tmp_path / "b.jsonl", [{"text": "word1", "label": "1"}, {"text": "word1", "label": "3"}])
    with pytest.raises(ValueError, match=r'b.jsonl, row 2: label "3" is not among the 3 classes'):
        _open(
            ClassTexts,
            tmp_path,
            [{"text": "word1", "label": label} for label in (10, 2, 1)],
            "validation",
            validation=validation,
        )


def test_several_classes_and_values(tmp_path):
    rows = [{"text": "word1", "label": ["b", "a"]}, {"text": "word1", "label": "c"}, {"text": "word1", "label": []}]
    several = _open(MultiLabelTexts, tmp_path, rows)
    assert [several[number].labels.tolist() for number in range(3)] == [[[1, 1, 0]], [[0, 0, 1]], [[0, 0, 0]]]
    values = _open(ValueTexts, tmp_path / "..", [{"text": "word1", "label": "2.5"}])
    assert values[0].labels.tolist() == [[2.5]]
    with pytest.raises(ValueError, match="label 'x' is not a number"):
        _open(ValueTexts, tmp_path, [{"text": "word1", "label": "x"}])


def test_the_first_token_of_a_word_has_its_label(tmp_path):
    words = _open(Words, tmp_path, [{"text": ["word1", "word2", "word3"], "label": ["N", "V", "N"]}])
    assert words[0].documents[0].ids.tolist() == [CLS, *_ids("word1", "word2", "word3"), SEP]
    assert (words[0].positions.tolist(), words[0].labels.tolist()) == ([1, 2, 3], [0, 1, 0])
    cut = _open(Words, tmp_path, [{"text": "word1 word2 word3", "label": "N V N"}], seqlen=4)
    assert (cut[0].positions.tolist(), cut[0].labels.tolist()) == ([1, 2], [0, 1])
    with pytest.raises(ValueError, match="row 1: 2 words and 1 labels"):
        _open(Words, tmp_path, [{"text": "word1 word2", "label": "N"}])


@pytest.mark.parametrize(("keeps_spaces", "begins"), [(True, True), (True, False), (False, True)])
def test_words_have_the_tokens_of_their_text(tmp_path, keeps_spaces, begins):
    """Also where the tokenizer puts a space in front of what it is given, as that of Llama does."""
    options = {"add_dummy_prefix": begins, "remove_extra_whitespaces": not keeps_spaces, "vocab_size": 60}
    lines, name = ["New York is big and New York is old", "the old man is big"] * 30, str(tmp_path / "own")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=name, model_type="bpe", minloglevel=2, num_threads=1, **options
    )
    tokenizer = Tokenizer.load(f"{name}.model")
    encoder = Encoder(tokenizer=tokenizer, prefix=None, suffix=None, max_length=50, truncate=True)
    text = "New York is old"
    assert [token for word in encoder.words(text.split()) for token in word] == tokenizer.encode(text)


@pytest.mark.parametrize(
    ("kind", "row", "column"),
    [
        (ClassTexts, {"text": ["New", "York"], "label": "a"}, "text"),
        (ClassTexts, {"text": "one", "pair": {"a": 1}, "label": "a"}, "pair"),
        (TextPairs, {"text": "one", "pair": True}, "pair"),
        (Choices, {"text": "one", "choices": ["two", ["three"]], "label": 1}, "choices"),
        (Words, {"text": ["one", None], "label": ["a", "b"]}, "text"),
        (Answers, {"text": "one", "pair": ["two"], "label": "two"}, "pair"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path, kind, row, column):
    good = {"text": 1984, "pair": "two", "choices": ["two", 3], "label": row.get("label")}
    rows = [{name: row[name] if number else good[name] for name in row} for number in range(2)]
    if kind is Words:
        rows[0] = {"text": ["one", 2], "label": ["a", "b"]}
    with pytest.raises(ValueError, match=f"row 2: {column} holds .*, which is no text"):
        _open(kind, tmp_path, rows)


def test_every_token_of_a_long_text_is_in_a_window_and_answers_come_back(tmp_path):
    text = " ".join(WORDS[:20])
    row = {
        "text": "word50 word51",
        "pair": text,
        "label": {"text": ["word7 word8"], "answer_start": [text.index("word7")]},
    }
    answers = _open(Answers, tmp_path, [row], seqlen=14, stride=4)
    seen, found = set(), []
    for number in range(len(answers)):
        example = answers[number]
        [document] = example.documents
        assert len(document.ids) <= 14
        seen |= set(document.ids[example.positions[1:]].tolist())
        first, last = example.labels[0].tolist()
        found.append(answers.answer(number, first, last))
        if first:
            assert document.ids[example.positions[first : last + 1]].tolist() == _ids("word7", "word8")
    assert seen == set(_ids(*WORDS[:20]))
    assert set(found) == {(0, ""), (0, "word7 word8")}


@pytest.mark.parametrize("start", [[14], 14, [None], [], None])
def test_an_answer_is_where_it_is_said_to_be(tmp_path, start):
    label = {"text": ["word2"], "answer_start": start}
    example = _open(Answers, tmp_path, [{"text": "word9", "pair": "word1 word3   word2", "label": label}])[0]
    first, last = example.labels[0].tolist()
    assert example.documents[0].ids[example.positions[first : last + 1]].tolist() == _ids("word2")


@pytest.mark.parametrize("start", [[-1], [0], [700], 0, ["x"]])
def test_an_answer_that_is_not_where_it_is_said_to_be_is_refused(tmp_path, start):
    row = {"text": "word9", "pair": "word1 word2", "label": {"text": ["word2"], "answer_start": start}}
    with pytest.raises(ValueError, match="row 1: the answer 'word2' is not in the text at answer_start"):
        _open(Answers, tmp_path, [row])


def test_each_choice_is_a_document(tmp_path):
    rows = [{"text": "word1", "choices": ["word2", "word3 word4"], "label": 1}]
    example = _open(Choices, tmp_path, rows)[0]
    assert [document.ids.tolist() for document in example.documents] == [
        [CLS, *_ids("word1"), SEP, *_ids("word2"), SEP],
        [CLS, *_ids("word1"), SEP, *_ids("word3", "word4"), SEP],
    ]
    assert example.labels.tolist() == [1]
    with pytest.raises(ValueError, match="label 2 is none of the choices 0 to 1"):
        _open(Choices, tmp_path, [{**rows[0], "label": 2}])
    with pytest.raises(ValueError, match="row 2: not a list of 2 choices"):
        _open(Choices, tmp_path, [*rows, {**rows[0], "choices": ["word2", None]}])


def test_a_text_too_long_for_a_model_of_a_fixed_length_is_refused(tmp_path):
    rows = [*texts(3), {"text": " ".join(WORDS[:20]), "label": CLASSES[0]}]
    examples = _open(ClassTexts, tmp_path, rows, seqlen=16, packing="rows")
    with pytest.raises(ValueError, match=r"row 4: 22 tokens with the special ones, but data.seqlen = 16"):
        examples[3]
    assert len(_open(ClassTexts, tmp_path, rows, seqlen=16, packing="rows", truncate=True)[3].documents[0].ids) == 16


def test_test_examples_may_lack_labels(tmp_path):
    test = write_jsonl(tmp_path / "test.jsonl", [{"text": "word1"}])
    assert _open(ClassTexts, tmp_path, texts(9), "test", test=test)[0].labels.tolist() == [IGNORED]
    assert np.isnan(_open(ValueTexts, tmp_path, [{"text": "word1", "label": 1}], "test", test=test)[0].labels).all()


def test_a_blank_label_is_a_missing_one_but_where_it_says_something(tmp_path):
    blank = [{"text": "word1", "pair": "word2", "label": " "}]
    test = write_jsonl(tmp_path / "test.jsonl", blank)
    for kind, label in ((ClassTexts, "1"), (ValueTexts, "1")):
        good = [{"text": "word1", "label": label}]
        for rows, split in ((good + blank, "train"), (good, "validation")):
            with pytest.raises(ValueError, match=r"(a.jsonl, row 2|test.jsonl, row 1): no label"):
                _open(kind, tmp_path, rows, split, validation=test)
        labels = _open(kind, tmp_path, good, "test", test=test)[0].labels.astype(float)
        assert np.isnan(labels).all() or labels.tolist() == [IGNORED]
    assert _open(MultiLabelTexts, tmp_path, [*blank, {"text": "word1", "label": "a"}])[0].labels.tolist() == [[0]]
    assert _open(Answers, tmp_path, [{**blank[0], "label": ""}])[0].labels.tolist() == [[0, 0]]


def test_examples_are_made_once_until_their_file_changes(tmp_path):
    rows = [{"text": "word1", "label": "1"}]
    first = _open(ClassTexts, tmp_path, rows)
    config = DataConfig(examples=first.config, seqlen=32, prefix="cls", suffix="sep", workers=0)
    assert open_examples(ClassTexts, config, "train") is first
    write_jsonl(tmp_path / "a.jsonl", rows * 2)
    os.utime(tmp_path / "a.jsonl", ns=(1, 1))
    assert len(open_examples(ClassTexts, config, "train")) == 2

"""Tokenizers: round trips, special ids, what cannot be read."""

import numpy as np
import pytest
import tokenizers
from failures import each
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from matmix.data.tokenizer import NEWLINE_ID, Tokenizer, train_sentencepiece
from matmix.model.interop.export.tokenizer import load_fast_tokenizer

TEXT = "To be, or not to be: that is the question.\nWhether 'tis nobler in the mind to suffer\n\n" * 20
HARD_TEXTS = [
    "",
    "\n",
    " ",
    "  two  spaces \n\n\n and lines \n",
    "emoji 😀 👩‍👩‍👧 ✓",
    "日本語、e\u0301 ﬁ ½ … ａ",
    "a\tb\r\nc",
    "<s></s><pad><mask><0x0A> [MASK]",
    "nul \0 byte",
]


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def trained(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("sp") / "tokenizer.model"
    return train_sentencepiece([TEXT], path, vocab_size=295, model_type=request.param)


@pytest.fixture(scope="module")
def fast(tmp_path_factory):
    """A byte-level tokenizer.json with BERT's special tokens, and truncation and padding switched on."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<|extra|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=names,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator([TEXT], trainer)
    backend.enable_truncation(8)
    backend.enable_padding(length=8)
    path = tmp_path_factory.mktemp("fast") / "tokenizer.json"
    backend.save(str(path))
    return Tokenizer.load(path)


@each("text", HARD_TEXTS)
def test_text_survives(trained, fast, text):
    assert trained.decode(trained.encode(text)) == text
    assert fast.decode(fast.encode(text)) == text


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=40))
def test_any_text_survives(trained, text):
    ids = trained.encode(text)
    assert trained.decode(ids) == text
    assert not set(ids) & set(trained.special_ids)


def test_ids_of_trained_tokenizer(trained):
    names = ["<pad>", "<unk>", "<s>", "</s>", "<cls>", "<sep>", "<mask>", "\n", "<0x00>"]
    assert [trained.piece(i) for i in range(9)] == names
    assert trained.piece(263) == "<0xFF>"
    assert trained.special == {"pad": 0, "unk": 1, "bos": 2, "eos": 3, "cls": 4, "sep": 5, "mask": 6}
    assert trained.special_ids == list(range(7))
    assert trained.vocab_size == 295
    np.testing.assert_array_equal(trained.ordinary_ids(), np.arange(7, 295))
    assert trained.encode("\n\n") == [NEWLINE_ID, NEWLINE_ID]
    assert trained.decode([2, *trained.encode("be"), 3, 0]) == "be"


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_training_is_reproducible(tmp_path, model_type):
    twice = [
        train_sentencepiece([TEXT], tmp_path / f"{i}.model", vocab_size=295, model_type=model_type) for i in range(2)
    ]
    assert twice[0].sha256 == twice[1].sha256


def test_unknown_characters_without_byte_fallback(tmp_path):
    path = tmp_path / "tokenizer.model"
    tokenizer = train_sentencepiece([TEXT], path, vocab_size=60, byte_fallback=False)
    assert tokenizer.special["unk"] in tokenizer.encode("😀")
    assert tokenizer.decode(tokenizer.encode("to be\nor")) == "to be\nor"


def test_normalization(tmp_path):
    path = tmp_path / "tokenizer.model"
    tokenizer = train_sentencepiece([TEXT], path, vocab_size=300, normalization="nmt_nfkc_cf")
    assert tokenizer.decode(tokenizer.encode("To BE\nﬁ")) == "to be\nfi"


def test_fast_tokenizer(fast):
    assert fast.kind == "tokenizers"
    assert fast.special == {"pad": 0, "unk": 1, "bos": None, "eos": None, "cls": 2, "sep": 3, "mask": 4}
    assert fast.special_ids == [0, 1, 2, 3, 4, 5]
    assert len(fast.encode(TEXT)) > 8
    assert not set(fast.encode("[CLS] [MASK] <|extra|>")) & set(fast.special_ids)
    assert fast.ordinary_ids().tolist() == list(range(6, fast.vocab_size))


def test_dropout_of_merges_is_left_out(tmp_path):
    """It belongs to the training of other projects: here a text has the same tokens whenever it is read."""
    model = models.BPE({"a": 0, "b": 1, "ab": 2, "abab": 3}, [("a", "b"), ("ab", "ab")], dropout=0.5)
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    text = "ab" * 40
    assert Tokenizer.load(tmp_path).encode(text) == [3] * 20
    assert load_fast_tokenizer(tmp_path / "tokenizer.json", {}).encode(text).ids == [3] * 20


def test_fast_tokenizer_with_holes_and_roberta_names(tmp_path):
    vocabulary = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "word": 4, "other": 9, "<mask>": 10}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.vocab_size == 11
    expected = {"pad": 1, "unk": 3, "bos": 0, "eos": 2, "cls": 0, "sep": 2, "mask": 10}
    assert tokenizer.special == expected
    assert tokenizer.ordinary_ids().tolist() == [4, 9]


def test_save_and_load(trained, fast, tmp_path):
    for tokenizer in (trained, fast):
        folder = tmp_path / tokenizer.kind
        copy = tokenizer.save(folder / "tokenizer")
        for path in (copy, copy.parent, folder):
            loaded = Tokenizer.load(path)
            assert loaded.sha256 == tokenizer.sha256
            assert loaded.encode(TEXT) == tokenizer.encode(TEXT)


@each(
    "name, content, error, message",
    [
        ("tokenizer.model", b"", ValueError, "not a sentencepiece model"),
        ("tokenizer.model", b"\x80\x04no model", ValueError, "not a sentencepiece model"),
        ("tokenizer.json", b"{}", ValueError, "not a tokenizer.json"),
        ("tokenizer.json", b"\xff", ValueError, "not a tokenizer.json"),
        ("tokenizer.txt", b"a", ValueError, "neither a sentencepiece .model nor"),
        ("folder/x", b"a", FileNotFoundError, "holds neither"),
        ("", b"", FileNotFoundError, "does not exist"),
    ],
)
def test_files_that_are_no_tokenizer(tmp_path, name, content, error, message):
    path = tmp_path / (name or "absent")
    if name:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    with pytest.raises(error, match=message) as caught:
        Tokenizer.load(path.parent if name.startswith("folder") else path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_vocabulary_that_the_text_does_not_support(tmp_path, model_type):
    path = tmp_path / "tokenizer.model"
    with pytest.raises(ValueError, match=r"larger than this text supports: the largest possible is ([\d,]+)") as e:
        train_sentencepiece([TEXT], path, vocab_size=9000, model_type=model_type)
    with pytest.raises(ValueError, match="too small for the characters"):
        train_sentencepiece([TEXT], path, vocab_size=264, model_type=model_type)
    with pytest.raises(ValueError, match="no text to train"):
        train_sentencepiece([" \n"], path, vocab_size=300, model_type=model_type)
    assert not path.exists()
    largest = int(str(e.value).split("possible is ")[1].split(";")[0].replace(",", ""))
    assert train_sentencepiece([TEXT], path, vocab_size=largest, model_type=model_type).vocab_size == largest


def test_characters_get_one_id_each(tmp_path):
    tokenizer = train_sentencepiece(
        [TEXT], tmp_path / "char.model", vocab_size=5000, model_type="char", byte_fallback=False
    )
    assert tokenizer.vocab_size < 5000
    text = TEXT[:40]
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text


def test_bytes_and_letters_of_dna_are_tokenizers_without_a_file(tmp_path):
    loaded = {name: Tokenizer.load(name) for name in ("bytes", "dna", "dna-cased")}
    assert {name: (one.vocab_size, one.unknown_id) for name, one in loaded.items()} == {
        "bytes": (263, None),
        "dna": (12, 6),
        "dna-cased": (17, 11),
    }
    for text in HARD_TEXTS:
        assert loaded["bytes"].encode(text) == list(text.encode())
        assert loaded["bytes"].decode(text.encode()) == text
    sequence = "ACGTNacgtnUuRYSWKMBDHVk"
    assert loaded["dna"].decode(loaded["dna"].encode(sequence)) == "ACGTNACGTNTTNNNNNNNNNNN"
    assert loaded["dna-cased"].decode(loaded["dna-cased"].encode(sequence)) == "ACGTNacgtnTtNNNNNNNNNNn"
    assert loaded["dna"].encode("AE<s>") == [0, 6, 6, 4, 6]
    for one in loaded.values():
        assert sorted(one.special.values()) == list(range(one.vocab_size - 7, one.vocab_size))
        one.save(tmp_path)
        assert Tokenizer.load(tmp_path).sha256 == one.sha256
        exported = load_fast_tokenizer(tmp_path / "tokenizer.json", one.special)
        assert exported.encode("ACGTN", add_special_tokens=False).ids == one.encode("ACGTN")

"""No text gives a special token, whatever kind of tokenizer reads it, and a text that spells one comes back."""

from __future__ import annotations

import io
import json

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from matmix.data.tokenizer import Tokenizer

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
LETTERS = sorted("abcdekmnopstuwx0123456789ABCDEF<>/|\u2581☃")
MARK = "\u2581"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
# What texts are made of: special tokens, parts of them, names of bytes, words that hold several.
FRAGMENTS = [
    *SPECIAL,
    *BYTES[64:70],
    "<<s>",
    "s>",
    "<",
    "a",
    "one",
    "two",
    " ",
    "<s><s>",
    "</s>a",
    "a<mask>",
    "☃",
    "<|>",
]
TEXTS = st.lists(st.sampled_from(FRAGMENTS), min_size=1, max_size=8).map("".join)


def specials(backend: Backend, *names: str) -> Backend:
    backend.add_special_tokens([AddedToken(name, special=True) for name in [*SPECIAL, *names]])
    return backend


def numbered(*pieces: str) -> dict[str, int]:
    return {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}


def unigram(letters: list[str] = LETTERS, more: tuple[str, ...] = (), **options) -> Backend:
    pieces = [(name, 0.0) for name in [*SPECIAL, *more]] + [(letter, -5.0) for letter in letters] + [("one", -6.0)]
    backend = Backend(models.Unigram(pieces, unk_id=3, **options))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="never")])
    return specials(backend)


def bpe(*merges: tuple[str, str], more: tuple[str, ...] = (), **options) -> Backend:
    made = ["".join(merge) for merge in merges]
    vocabulary = numbered(*SPECIAL, *more, *LETTERS, *made)
    backend = Backend(models.BPE(vocabulary, list(merges), unk_token="<unk>", **options))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="never")])
    return backend


def by_bytes(**options) -> Backend:
    """As GPT-2's, with a special token that its pattern leaves whole."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(numbered(*SPECIAL, "<|>", *alphabet), [], **options))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not options)
    backend.decoder = decoders.ByteLevel()
    return specials(backend, "<|>")


def wordpiece() -> Backend:
    pieces = numbered(*SPECIAL, *LETTERS, *(f"##{letter}" for letter in LETTERS), "one", "##one")
    backend = Backend(models.WordPiece(pieces, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.WordPiece(cleanup=False)
    return specials(backend)


def lowered() -> Backend:
    """Its text is special only when the normaliser has changed it."""
    backend = unigram()
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace("[", "<")])
    return backend


def unmarked() -> Backend:
    """Its mask is an added token that is not marked as special: nothing keeps the library from finding it."""
    backend = bpe(more=("<mask>",))
    specials(backend)
    file = json.loads(backend.to_str())
    for token in file["added_tokens"]:
        token["special"] = token["content"] != "<mask>"
    return Backend.from_str(json.dumps(file))


# Kinds that give every text of these letters back.
KINDS = {
    "unigram": unigram,
    "unigram with bytes": lambda: unigram(more=tuple(BYTES), byte_fallback=True),
    "unigram with bytes and few letters": lambda: unigram(["a", MARK], tuple(BYTES), byte_fallback=True),
    "bpe whose merges lead to one": lambda: specials(bpe(("<", "s"), ("<s", ">"), ("<s>", "a"))),
    "bpe that looks words up": lambda: specials(bpe(("<", "s"), ignore_merges=True)),
    "bpe with bytes that looks words up": lambda: specials(
        bpe(more=tuple(BYTES), byte_fallback=True, ignore_merges=True)
    ),
    "bpe with a special letter and bytes": lambda: specials(bpe(more=tuple(BYTES), byte_fallback=True), "☃"),
    "bytes": by_bytes,
    "bytes that look words up": lambda: by_bytes(ignore_merges=True),
    "unmarked": unmarked,
}
# Kinds that cannot: their words stand for themselves, they change the text, or they lack its letters.
OTHERS = {
    "words": lambda: specials(words()),
    "wordpiece": wordpiece,
    "lowered": lowered,
    "unigram with few letters": lambda: unigram(["a", "m", MARK]),
    "unigram with a special letter": lambda: specials(unigram(), "☃"),
}


def words() -> Backend:
    backend = Backend(models.WordLevel(numbered(*SPECIAL, "one", "two"), unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return backend


def built(name: str) -> Backend:
    return {**KINDS, **OTHERS}[name]()


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


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=60, deadline=None)
@given(text=TEXTS)
def test_text_that_spells_special_tokens_comes_back(load, name, text):
    tokenizer = load(name)
    ids = tokenizer.encode(text)
    assert not set(ids) & set(tokenizer.special_ids)
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("name", OTHERS)
@settings(max_examples=60, deadline=None)
@given(text=TEXTS.map(lambda text: text.replace("<", "＜")) | TEXTS | TEXTS.map(lambda text: text.replace("<", "[")))
def test_no_text_gives_special_tokens(load, name, text):
    tokenizer = load(name)
    ids = tokenizer.encode(text)
    assert not set(ids) & set(tokenizer.special_ids)
    if name == "wordpiece" and tokenizer.unknown_id not in ids:
        assert tokenizer.decode(ids) == " ".join(text.split())


@pytest.mark.parametrize("name", [*KINDS, *OTHERS])
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


def test_an_unknown_token_that_is_also_special_stays_out_of_text(tmp_path):
    backend = Backend(models.BPE({"</s>": 0, "a": 1}, [], unk_token="</s>"))
    specials(backend).save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("aa") == [1, 1]
    with pytest.raises(ValueError, match="'ab': </s> stands for what the vocabulary lacks, and is a special"):
        tokenizer.encode("ab")


@pytest.mark.parametrize("model_type", ["bpe", "unigram", "char", "word"])
@pytest.mark.parametrize("byte_fallback", [False, True])
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

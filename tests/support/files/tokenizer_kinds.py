"""A small tokenizer.json of every kind, with special tokens that its model could find in text."""

from __future__ import annotations

import json

from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

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

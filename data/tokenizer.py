"""One face for sentencepiece models and `tokenizers` files (tokenizer.json), and the training of the former. Tokenizers
of transformers become such files (`matmix.data.foreign_tokenizer`).

Models trained here give the ids 0 to 6 to ``<pad> <unk> <s> </s> <cls> <sep> <mask>``, 7 to the line break, 8 to 263 to
the 256 bytes (with byte fallback), the rest to pieces of text. They keep the text as it is: ``decode(encode(text)) ==
text`` for every text without U+2581, which sentencepiece itself uses for the space.
"""

from __future__ import annotations

import functools
import hashlib
import io
import itertools
import json
import re
import secrets
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import sentencepiece
from tokenizers import pre_tokenizers

from matmix.data.alphabets import ALPHABETS, alphabet
from matmix.data.artifacts import one_line, panics_as_errors, parse_json
from matmix.data.foreign_tokenizer import convert, is_transformers_folder, named_roles, with_roles
from matmix.data.storage.files import write_atomic

SPECIAL_NAMES = ("pad", "unk", "bos", "eos", "cls", "sep", "mask")
NEWLINE_ID = 7

# What the special tokens are called, best first, in the tokenizers one meets.
_COMMON_NAMES: dict[str, tuple[str, ...]] = {
    "pad": ("<pad>", "[PAD]", "<|pad|>", "<|finetune_right_pad_id|>", "<|padding|>"),
    "unk": ("<unk>", "[UNK]", "<|unk|>"),
    "bos": ("<s>", "[BOS]", "<bos>", "<|begin_of_text|>", "<|startoftext|>", "<|bos|>", "<|endoftext|>"),
    "eos": ("</s>", "[EOS]", "<eos>", "<|end_of_text|>", "<|endoftext|>", "<|eos|>"),
    "cls": ("<cls>", "[CLS]", "<|cls|>"),
    "sep": ("<sep>", "[SEP]", "<|sep|>"),
    "mask": ("<mask>", "[MASK]", "<|mask|>"),
}
Normalization = Literal["identity", "nfkc", "nfkc_cf", "nmt_nfkc", "nmt_nfkc_cf"]

# Sums of floats in the unigram trainer depend on the number of threads; fixed, every machine gets the same
# model.
_TRAINING_THREADS = 8
# Longer lines are cut for training only; the trainer would drop them.
_LONGEST_LINE = 16_384


class Tokenizer:
    """Text to ids and back. Special tokens are never produced from text, whatever the text says: one that is written
    out in it becomes what its letters become, and comes back as text as they do.

    Attributes:
        path, sha256: the file it was read from, and its digest in hexadecimal.
        vocab_size: largest id + 1.
        special: ids of pad, unk, bos, eos, cls, sep, mask; None where there is no such token.
        special_ids: every id that no text becomes (ascending).
        unknown_id: what text becomes that the vocabulary cannot spell; None where it can spell any, or leaves it out.
    """

    kind: Literal["sentencepiece", "tokenizers"]
    file_name: str

    def __init__(self, path: Path, raw: bytes) -> None:
        self.path, self.raw, self.sha256 = path, raw, hashlib.sha256(raw).hexdigest()
        self.vocab_size: int = 0
        self.special: dict[str, int | None] = {}
        self.special_ids: list[int] = []
        self.unknown_id: int | None = None
        self._unused: set[int] = set()

    @staticmethod
    def load(path: str | Path) -> Tokenizer:
        """Reads a sentencepiece model (.model), a tokenizer.json, or a folder that holds one of them: that of a
        tokenizer, of an export or of a prepared dataset, or the folder of a tokenizer of transformers, fast or slow; or
        makes one of `ALPHABETS`. Raises FileNotFoundError or ValueError, each with one line."""
        if path in ALPHABETS:
            return FastTokenizer(Path(path), alphabet(path))
        file = _find_file(Path(path))
        if file.suffix == ".model" and file.is_file():
            return SentencePieceTokenizer(file, file.read_bytes())
        folder, raw = (file, convert(file)) if file.is_dir() else (file.parent, file.read_bytes())
        tokenizer = FastTokenizer(file, raw)
        said = with_roles(raw, tokenizer.special, named_roles(folder))
        return tokenizer if said is raw else FastTokenizer(file, said)

    @functools.cached_property
    def marks_words(self) -> bool:
        """Whether a word alone has the tokens that it has behind another one."""
        return self.encode("a a") == 2 * self.encode("a")

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without any special token."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of many texts, in this thread only."""
        raise NotImplementedError

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of ids; special tokens give no text."""
        raise NotImplementedError

    def piece(self, index: int) -> str:
        """Returns the vocabulary's name of an id, to show to people."""
        raise NotImplementedError

    @cached_property
    def silent_ids(self) -> frozenset[int]:
        """Ids that give no text: the special ones and the unknown one."""
        return frozenset(self.special_ids if self.unknown_id is None else [*self.special_ids, self.unknown_id])

    def ordinary_ids(self) -> np.ndarray:
        """Returns the ids that stand for text (int64, ascending): what masking may draw from."""
        ordinary = np.ones(self.vocab_size, dtype=bool)
        ordinary[[*self.silent_ids, *self._unused]] = False
        return np.flatnonzero(ordinary)

    def save(self, directory: str | Path, *, alone: bool = True) -> Path:
        """Copies the file into a folder; returns the copy's path. alone: as for `write_atomic`."""
        target = Path(directory) / self.file_name
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(target, self.raw, alone=alone)
        return target

    def __reduce__(self) -> tuple:
        return type(self), (self.path, self.raw)

    def __repr__(self) -> str:
        return f"Tokenizer({self.kind}, {self.vocab_size:,} ids, {self.path})"


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece model; `processor` is the library's own object."""

    kind = "sentencepiece"
    file_name = "tokenizer.model"

    def __init__(self, path: Path, raw: bytes) -> None:
        super().__init__(path, raw)
        try:
            self.processor = sentencepiece.SentencePieceProcessor(model_proto=raw)
            self.vocab_size = self.processor.vocab_size()
        except (RuntimeError, TypeError):
            self.vocab_size = 0
        if self.vocab_size == 0:
            raise ValueError(f"{path} is not a sentencepiece model, or it is damaged")
        sp, every = self.processor, range(self.vocab_size)
        known = {"pad": sp.pad_id(), "unk": sp.unk_id(), "bos": sp.bos_id(), "eos": sp.eos_id()}
        for name in SPECIAL_NAMES:
            ids = (sp.piece_to_id(piece) for piece in _COMMON_NAMES[name])
            index = next((i for i in ids if i != sp.unk_id() and sp.is_control(i)), None)
            self.special[name] = known[name] if known.get(name, -1) != -1 else index
        if not any(map(sp.is_byte, every)):  # there is one for each byte, or none
            self.unknown_id = sp.unk_id()
        silent = (i for i in every if sp.is_control(i) or sp.is_unknown(i))
        self.special_ids = [i for i in silent if i != self.unknown_id]
        self._unused = set(filter(sp.is_unused, every))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self.processor.encode(list(texts), num_threads=1)

    def decode(self, ids: Iterable[int]) -> str:
        return self.processor.decode([int(i) for i in ids if int(i) not in self.silent_ids])

    def piece(self, index: int) -> str:
        return self.processor.id_to_piece(index)


class FastTokenizer(Tokenizer):
    """A tokenizer.json of the `tokenizers` library; `backend` is the library's own object, in which special tokens that
    its model lists among its pieces have other names."""

    kind = "tokenizers"
    file_name = "tokenizer.json"

    def __init__(self, path: Path, raw: bytes) -> None:
        super().__init__(path, raw)
        import tokenizers

        try:
            with panics_as_errors():
                file = parse_json(raw, path)
                if not isinstance(file, dict) or not isinstance(file.get("model"), dict):
                    raise ValueError("it has no model")
                added = file.get("added_tokens") or []
                names = pieces_of(file["model"]) | {token["content"] for token in added}
                roles = {role: next(filter(names.__contains__, _COMMON_NAMES[role]), None) for role in SPECIAL_NAMES}
                said = [(role, token) for token in added for role in token.get("roles", ())]
                roles |= {role: token["content"] for role, token in said if role in SPECIAL_NAMES}
                special = {token["content"] for token in added if token.get("special")}
                special |= {name for name in roles.values() if name is not None}
                new, changed = make_unspelled(file, special)
                content = json.dumps(file, ensure_ascii=False).encode() if changed else raw
                self.backend = tokenizers.Tokenizer.from_buffer(content)
                unknown = unknown_piece(file)
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"{path} is not a tokenizer.json that `tokenizers` can read: {one_line(error)}") from error
        # The file's own truncation and padding would silently change documents, and its dropout of merges would cut
        # them differently each time.
        self.backend.no_truncation()
        self.backend.no_padding()
        if getattr(self.backend.model, "dropout", None):
            self.backend.model.dropout = None
        self.backend.encode_special_tokens = True
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise ValueError(f"{path} has an empty vocabulary")
        self.vocab_size = max(vocabulary.values()) + 1
        ids = {name: vocabulary[new.get(name, name)] for name in special}
        self.special = {role: None if name is None else ids[name] for role, name in roles.items()}
        if self.special["mask"] is not None and self.special["cls"] is None and self.special["sep"] is None:
            # RoBERTa and its kin: the sentence marks serve as [CLS] and [SEP].
            self.special["cls"], self.special["sep"] = self.special["bos"], self.special["eos"]
        self._unused = set(range(self.vocab_size)) - set(vocabulary.values())
        self._renamed = {vocabulary[name]: old for old, name in new.items()}
        index = None if unknown is None else self.backend.token_to_id(unknown)
        # Files exist in which, for example, the end of a text stands for what is unknown as well.
        others = {index for role, index in self.special.items() if role != "unk"}
        self._ambiguous = index if index in others else None
        self.unknown_id = None if index in others else index
        self.special_ids = sorted({*ids.values()} - {self.unknown_id})

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        tokenised: list[list[int]] = []
        try:
            with panics_as_errors():
                for text in texts:
                    ids = self.backend.encode(text, add_special_tokens=False).ids
                    if self._ambiguous is not None and self._ambiguous in ids:
                        name = self.piece(self._ambiguous)
                        raise ValueError(f"{name} stands for what the vocabulary lacks, and is a special token as well")
                    tokenised.append(ids)
        except Exception as error:  # the library raises plain Exception
            which = f"the text that begins with {texts[len(tokenised)][:40]!a}"
            raise ValueError(f"{self.path} cannot tokenise {which}: {one_line(error)}") from error
        return tokenised

    def decode(self, ids: Iterable[int]) -> str:
        kept = [int(i) for i in ids if int(i) not in self.silent_ids]
        try:
            with panics_as_errors():
                return self.backend.decode(kept, skip_special_tokens=False)
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"{self.path} cannot turn tokens into text: {one_line(error)}") from error

    def piece(self, index: int) -> str:
        return self._renamed.get(index) or self.backend.id_to_token(index) or f"<unused {index}>"


def train_sentencepiece(
    texts: Iterable[str],
    out_path: str | Path,
    *,
    vocab_size: int,
    model_type: Literal["bpe", "unigram", "char"] = "bpe",
    byte_fallback: bool = True,
    normalization: Normalization = "identity",
    character_coverage: float = 0.9995,
) -> Tokenizer:
    """Trains a sentencepiece model on documents, each line of which is a sentence, and writes it to `out_path`.

    vocab_size counts special tokens and bytes; with "char" it is the most there may be. Without `byte_fallback`,
    characters outside the vocabulary become <unk>. Raises ValueError if `texts` is empty or cannot support `vocab_size`
    (the message names the bound).
    """
    lines = _lines(texts)
    first = next(lines, None)
    if first is None:
        raise ValueError("there is no text to train a tokenizer on")
    buffer = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=itertools.chain([first], lines),
            model_writer=buffer,
            vocab_size=vocab_size,
            model_type=model_type,
            byte_fallback=byte_fallback,
            character_coverage=character_coverage,
            # Characters are as many as the text has: there vocab_size is a bound.
            hard_vocab_limit=model_type != "char",
            normalization_rule_name=normalization,
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            max_sentence_length=8 * _LONGEST_LINE,
            pad_id=0,
            unk_id=1,
            bos_id=2,
            eos_id=3,
            control_symbols=["<cls>", "<sep>", "<mask>"],
            # Without a piece of its own a line break would be spelled as a byte, or become <unk>.
            user_defined_symbols=["\n"],
            num_threads=_TRAINING_THREADS,
            minloglevel=2,
        )
    except RuntimeError as error:
        if "KeyboardInterrupt" in str(error):  # raised where the trainer asked for text
            raise KeyboardInterrupt from None
        raise ValueError(_explain(str(error), vocab_size)) from error
    out_path = Path(out_path)
    out_path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out_path, buffer.getvalue())
    return Tokenizer.load(out_path)


def _lines(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        for line in text.split("\n"):
            for start in range(0, len(line), _LONGEST_LINE):
                # The trainer takes NUL for the end of the sentence.
                piece = line[start : start + _LONGEST_LINE].replace("\0", "")
                if piece.strip():
                    yield piece


def _explain(message: str, vocab_size: int) -> str:
    """Returns the trainer's complaint as a sentence."""
    if bound := re.search(r"set it to a value <= (\d+)", message):
        return (
            f"a vocabulary of {vocab_size:,} is larger than this text supports: the largest possible is "
            f"{int(bound[1]):,}; lower the vocabulary size or give more text"
        )
    if bound := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        return (
            f"a vocabulary of {vocab_size:,} is too small for the characters of this text: it needs at least "
            f"{int(bound[1]):,} with the special tokens and bytes; raise the vocabulary size or lower the "
            "character coverage"
        )
    return f"sentencepiece could not train a tokenizer: {message}"


def _find_file(path: Path) -> Path:
    if path.is_file():
        if path.suffix not in (".model", ".json"):
            raise ValueError(f"{path} is neither a sentencepiece .model nor a tokenizer.json")
        return path
    if not path.exists():
        raise FileNotFoundError(
            f"tokenizer {path} does not exist: give a .model or tokenizer.json file, or the folder of a tokenizer, or "
            f"{', '.join(ALPHABETS)} (only matmix prepare and index read names of the Hugging Face hub)"
        )
    for folder in (path / "tokenizer", path):
        # What transformers adds to a sentencepiece model, or moves its ids by, only its own class knows.
        foreign = is_transformers_folder(folder)
        models = ("tokenizer.model", "tokenizer.json", "spiece.model", "sentencepiece.bpe.model")
        for name in ("tokenizer.json",) if foreign else models:
            if (folder / name).is_file():
                return folder / name
        if foreign:
            return folder
    raise FileNotFoundError(f"{path} holds neither tokenizer.model nor tokenizer.json, nor a tokenizer of transformers")


# `tokenizers` keeps special tokens out of text only where it looks for added tokens. A model that lists them
# among its pieces finds them all the same: Unigram always, WordLevel, WordPiece and BPE with `ignore_merges` where they
# stand as a word, BPE where its merges lead to them, any of them where they are one character. So they are given names
# here that no text has, under their own ids. A text that spells one then becomes what its letters become.
#
# The pieces of single bytes keep their names, by which the model finds them for characters that it lacks. A text that
# spells one ("<0x41>") is cut behind its first letter instead.
_BYTES = frozenset(f"<0x{byte:02X}>" for byte in range(256))
# How the pattern of the step begins that exports put in (`matmix.model.interop.export.tokenizer`).
_EXPORTS_MARK = "(?#special tokens)"
_CUT = {"type": "Split", "pattern": {"Regex": "<(?=0x[0-9A-F]{2}>)"}, "behavior": "Isolated", "invert": False}


def make_unspelled(file: dict[str, Any], special: Collection[str]) -> tuple[dict[str, str], bool]:
    """Changes the contents of a tokenizer.json so that no text gives its special tokens (by name); ids stay as they
    are. Returns the new names of those that needed one, and whether anything was changed. Raises KeyError, TypeError,
    ValueError or AttributeError where `file` is no tokenizer.json."""
    model, added = file["model"], file.get("added_tokens") or []
    pieces = pieces_of(model)
    file["pre_tokenizer"] = _without_cuts(file.get("pre_tokenizer"))
    # Of added tokens, the library can be told to leave those alone that are marked as special.
    spelled = {name for name in special if name in pieces}
    spelled |= {token["content"] for token in added if not token.get("special")} & set(special)
    if isinstance(model["vocab"], dict):
        ids = {model["vocab"][name] for name in spelled & pieces}
        spelled |= {piece for piece, index in model["vocab"].items() if index in ids}
    # Who wants to spell such a name has to guess 128 bits, which are others each time.
    new = {name: f"{secrets.token_hex(16)}{name}" for name in sorted(spelled)}
    if isinstance(model["vocab"], dict):
        model["vocab"] = {new.get(piece, piece): index for piece, index in model["vocab"].items()}
    else:
        for entry in model["vocab"]:
            entry[0] = new.get(entry[0], entry[0])
    if model.get("unk_token") in new:
        model["unk_token"] = new[model["unk_token"]]
    for token in added:
        token["content"] = new.get(token["content"], token["content"])
    bytes_spelled = _BYTES & pieces if model.get("byte_fallback") else set()
    changed = bool(new)
    if "merges" in model:
        skipped = len(model.get("continuing_subword_prefix") or "")
        pairs = [(merge, merge.split(" ") if isinstance(merge, str) else merge) for merge in model["merges"]]
        kept = [
            merge
            for merge, (left, right) in pairs
            if not {left, right, left + right[skipped:]} & new.keys() and left + right[skipped:] not in bytes_spelled
        ]
        changed |= len(kept) < len(pairs)
        model["merges"] = kept
    if bytes_spelled and (model.get("ignore_merges") or "merges" not in model):
        changed = True
        steps = [file["pre_tokenizer"]] if file.get("pre_tokenizer") else []
        file["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*steps, _CUT]}
    return new, changed


def pieces_of(model: dict[str, Any]) -> set[str]:
    """Returns the names of the pieces of a tokenizer.json's model."""
    return set(model["vocab"]) if isinstance(model["vocab"], dict) else {piece for piece, _ in model["vocab"]}


def unknown_piece(file: dict[str, Any]) -> str | None:
    """Returns the piece of a tokenizer.json that stands for text which no others can spell; None: there is none."""
    model, pieces = file["model"], pieces_of(file["model"])
    if model.get("byte_fallback") and pieces >= _BYTES:
        return None
    whole = not ("merges" in model or isinstance(model["vocab"], list))
    affixes = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
    by_bytes = any(step.get("type") == "ByteLevel" for step in _steps(file.get("pre_tokenizer")))
    if by_bytes and not whole and not affixes and pieces >= set(pre_tokenizers.ByteLevel.alphabet()):
        return None
    return model["vocab"][model["unk_id"]][0] if model.get("unk_id") is not None else model.get("unk_token")


def _without_cuts(step: dict[str, Any] | None) -> dict[str, Any] | None:
    """Returns a pre-tokenizer without the step by which an export cuts special tokens in text."""
    *steps, last = (step or {}).get("pretokenizers") or [None]
    pattern = (last or {}).get("pattern")
    if not isinstance(pattern, dict) or not str(pattern.get("Regex")).startswith(_EXPORTS_MARK):
        return step
    return steps[0] if len(steps) == 1 else {**step, "pretokenizers": steps} if steps else None


def _steps(step: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Yields a pre-tokenizer and those in it."""
    if step is not None:
        yield step
        for inner in step.get("pretokenizers", ()):
            yield from _steps(inner)

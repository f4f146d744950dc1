"""The tokenizers that need no training: one id for each byte, or for each letter of DNA. They are tokenizer.json files
like any other, which datasets, runs and exports carry."""

import json
from typing import Any

SPECIALS = ("<pad>", "<unk>", "<s>", "</s>", "<cls>", "<sep>", "<mask>")
BASES = "ACGTN"
AMBIGUOUS = "RYSWKMBDHV"
"""The letters that stand for one of several bases (IUPAC); they are read as N."""
ALPHABETS = ("bytes", "dna", "dna-cased")


def alphabet(name: str) -> bytes:
    """Returns the tokenizer.json of a name of `ALPHABETS`; ids count from 0, the special tokens have the last seven.

    bytes: the id of a byte is the byte; text becomes the bytes of its UTF-8. dna: A C G T N, lower case read as upper
    case, U as T, and the letters for several bases as N. dna-cased: the same, but lower case (what repeats are marked
    with) has ids of its own, a c g t n. Other letters become <unk>.
    """
    model: dict[str, Any] = {"type": "BPE", "dropout": None, "unk_token": None, "byte_fallback": False, "merges": []}
    file: dict[str, Any] = {"version": "1.0", "truncation": None, "padding": None, "post_processor": None}
    if name == "bytes":
        pieces = _byte_pieces()
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        file |= {"normalizer": None, "pre_tokenizer": level, "decoder": level}
        model["vocab"] = {piece: index for index, piece in enumerate(pieces)}
    else:
        pieces = list(BASES if name == "dna" else BASES + BASES.lower())
        steps = [_replace("U", "T"), _replace(f"[{AMBIGUOUS}]", "N"), _replace("u", "t")]
        steps += [_replace(f"[{AMBIGUOUS.lower()}]", "n")]
        if name == "dna":
            steps += [_replace(letter.lower(), letter) for letter in BASES]
        file |= {
            "normalizer": {"type": "Sequence", "normalizers": steps},
            "pre_tokenizer": None,
            "decoder": {"type": "Fuse"},
        }
        model["vocab"] = {piece: index for index, piece in enumerate([*pieces, *SPECIALS])}
        model["unk_token"] = "<unk>"
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    special = [{"id": len(pieces) + n, "content": s, **flags, "special": True} for n, s in enumerate(SPECIALS)]
    return json.dumps(file | {"added_tokens": special, "model": model}, ensure_ascii=False, indent=1).encode()


def _replace(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}


def _byte_pieces() -> list[str]:
    """The character by which the step ByteLevel of `tokenizers` (and of GPT-2) writes each byte."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in shown else next(others)) for byte in range(256)]

"""Special tokens of a tokenizer.json that no text can spell.

The `tokenizers` library keeps special tokens out of text only where it looks for added tokens. A model that lists them
among its pieces finds them all the same: Unigram always, WordLevel, WordPiece and BPE with `ignore_merges` where they
stand as a word, BPE where its merges lead to them, any of them where they are one character. So they are given names
here that no text has, under their own ids. A text that spells one then becomes what its letters become.

The pieces of single bytes keep their names, by which the model finds them for characters that it lacks. A text that
spells one ("<0x41>") is cut behind its first letter instead.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterator
from typing import Any

from tokenizers import pre_tokenizers

_BYTES = frozenset(f"<0x{byte:02X}>" for byte in range(256))
# How the pattern of the step begins that exports put in (`matmix.model.interop.export.tokenizer`).
_EXPORTS_MARK = "(?#special tokens)"
_CUT = {"type": "Split", "pattern": {"Regex": "<(?=0x[0-9A-F]{2}>)"}, "behavior": "Isolated", "invert": False}


def make_unspelled(file: dict[str, Any], special: Collection[str]) -> tuple[dict[str, str], bool]:
    """Change the contents of a tokenizer.json so that no text gives its special tokens; ids stay as they are.

    special: the names of these tokens. Returns the new names of those that needed one, and whether anything was to
    be changed. Raises KeyError, TypeError, ValueError or AttributeError where `file` is no tokenizer.json.
    """
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
    """Names of the pieces of a tokenizer.json's model."""
    return set(model["vocab"]) if isinstance(model["vocab"], dict) else {piece for piece, _ in model["vocab"]}


def unknown_piece(file: dict[str, Any]) -> str | None:
    """The piece of a tokenizer.json that stands for text which no others can spell; None where there is none, or no
    such text, as each byte has a piece."""
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
    """A pre-tokenizer without the step by which an export cuts special tokens in text: here they are read as they were
    for training."""
    *steps, last = (step or {}).get("pretokenizers") or [None]
    pattern = (last or {}).get("pattern")
    if not isinstance(pattern, dict) or not str(pattern.get("Regex")).startswith(_EXPORTS_MARK):
        return step
    return steps[0] if len(steps) == 1 else {**step, "pretokenizers": steps} if steps else None


def _steps(step: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """A pre-tokenizer and those in it."""
    if step is not None:
        yield step
        for inner in step.get("pretokenizers", ()):
            yield from _steps(inner)

"""The tokenizer files of an export: one fast tokenizer that needs neither sentencepiece nor matmix."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, pre_tokenizers, processors

from matmix.model.interop.export.tokenizer_conversion import PROBE_TEXTS, first_difference, sentencepiece_to_fast

CUT_MARK = "(?#special tokens)"
"""How the pattern begins that cuts special tokens in text (a comment), by which `matmix.data.unspelled` knows it."""

# Our names of special tokens -> those of transformers.
_TOKEN_NAMES = {
    "pad": "pad_token",
    "unk": "unk_token",
    "bos": "bos_token",
    "eos": "eos_token",
    "cls": "cls_token",
    "sep": "sep_token",
    "mask": "mask_token",
}


def load_fast_tokenizer(path: str | Path, special: Mapping[str, int | None]) -> Tokenizer:
    """The `tokenizers.Tokenizer` of a sentencepiece model or a tokenizer.json.

    special: ids of pad, unk, bos, eos, cls, sep, mask, None (or left out) where there is no such token. With
    `encode_special_tokens` it reads a text that spells special tokens as text, also where a tokenizer.json lists them
    as pieces, but for special tokens of one letter.
    Raises FileNotFoundError or ValueError (one line), also if a sentencepiece model cannot be matched id by id.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no tokenizer at {path}")
    if path.suffix == ".json":
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"{path} is not a tokenizer.json that can be read: {error}") from None
        tokenizer.no_truncation()
        tokenizer.no_padding()
        if getattr(tokenizer.model, "dropout", None):  # with it, a text has other tokens each time
            tokenizer.model.dropout = None
        _cut_in_special_tokens(tokenizer, special)
        return tokenizer
    tokenizer = sentencepiece_to_fast(path)
    if special.get("mask") is not None:
        tokenizer = sentencepiece_to_fast(path, mask=tokenizer.id_to_token(special["mask"]))
    names = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    different = first_difference(tokenizer, path, [*PROBE_TEXTS, *names])
    if different is not None:
        raise ValueError(f"{path} cannot be made a fast tokenizer with the same ids: they differ for {different!r}")
    return tokenizer


def _cut_in_special_tokens(tokenizer: Tokenizer, special: Mapping[str, int | None]) -> None:
    """Cut the first letter off where a text spells a special token that the model lists as a piece, as it would find
    it there whatever the library is told about special tokens."""
    file = json.loads(tokenizer.to_str())
    if CUT_MARK in json.dumps(file["pre_tokenizer"]):  # that of an export
        return
    model = file["model"]
    pieces = set(model["vocab"]) if isinstance(model["vocab"], dict) else {piece for piece, _ in model["vocab"]}
    if "merges" in model and not model.get("ignore_merges"):  # those that its merges lead to
        pieces &= {"".join(merge.split(" ") if isinstance(merge, str) else merge) for merge in model["merges"]}
    names = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    names |= {tokenizer.id_to_token(index) for index in special.values() if index is not None}
    cuts = [f"{re.escape(name[0])}(?={re.escape(name[1:])})" for name in sorted(names & pieces) if len(name) > 1]
    if cuts:
        steps = [] if tokenizer.pre_tokenizer is None else [tokenizer.pre_tokenizer]
        cut = pre_tokenizers.Split(Regex(CUT_MARK + "|".join(cuts)), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, cut])


def write_tokenizer(
    directory: Path,
    tokenizer: Tokenizer,
    *,
    special: Mapping[str, int | None],
    prefix: int | None,
    suffix: int | None,
    max_length: int,
    padding_side: str,
    token_types: bool,
) -> None:
    """Write tokenizer.json, tokenizer_config.json and special_tokens_map.json.

    Args:
        special: as for `load_fast_tokenizer`.
        prefix, suffix: ids put around a text where special tokens are asked for; None = nothing there.
        max_length: longest document of the training.
        padding_side: "left" or "right".
        token_types: whether the model takes token types (for pairs of texts).
    """
    tokenizer.post_processor = special_tokens_around(tokenizer, prefix, suffix)
    tokenizer.encode_special_tokens = False
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {
        _TOKEN_NAMES[name]: tokenizer.id_to_token(index)
        for name, index in special.items()
        if name in _TOKEN_NAMES and index is not None
    }
    inputs = ["input_ids", "token_type_ids", "attention_mask"] if token_types else ["input_ids", "attention_mask"]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "padding_side": padding_side,
        "model_input_names": inputs,
        "clean_up_tokenization_spaces": False,
        **names,
    }
    for file, content in (("tokenizer_config.json", config), ("special_tokens_map.json", names)):
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        (directory / file).write_text(text, encoding="utf-8")


def special_tokens_around(
    tokenizer: Tokenizer, prefix: int | None, suffix: int | None
) -> processors.TemplateProcessing | None:
    """What puts the special tokens of the training around a text, or two texts with types 0 and 1."""
    if prefix is None and suffix is None:
        return None
    tokens = {index: tokenizer.id_to_token(index) for index in (prefix, suffix) if index is not None}
    before = f"{tokens[prefix]} " if prefix is not None else ""
    after = f" {tokens[suffix]}" if suffix is not None else ""
    second = f" $B:1{after}:1" if suffix is not None else " $B:1"
    return processors.TemplateProcessing(
        single=f"{before}$A{after}",
        pair=f"{before}$A{after}{second}",
        special_tokens=[(token, index) for index, token in tokens.items()],
    )

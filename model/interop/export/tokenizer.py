"""The tokenizer files of an export: one fast tokenizer that needs neither sentencepiece nor matmix."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, Unigram

from matmix.model.architectures.encoder import EncoderTrunk
from matmix.model.config import ModelConfig

CUT_MARK = "(?#special tokens)"
"""How the pattern begins that cuts special tokens in text (a comment), by which `matmix.data.tokenizer` knows it."""


def load_fast_tokenizer(path: str | Path, special: Mapping[str, int | None]) -> Tokenizer:
    """Reads a sentencepiece model or a tokenizer.json.

    special: ids of pad, unk, bos, eos, cls, sep, mask, None (or left out) where there is no such token. With
    `encode_special_tokens` it reads a text that spells special tokens as text, also where a tokenizer.json lists them
    as pieces, but for special tokens of one letter.
    Raises FileNotFoundError or ValueError (one line), also if a sentencepiece model cannot be matched id by id.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no tokenizer at {path}")
    if path.suffix != ".json":
        tokenizer = sentencepiece_to_fast(path)
        if special.get("mask") is not None:
            tokenizer = sentencepiece_to_fast(path, mask=tokenizer.id_to_token(special["mask"]))
        names = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
        if (different := first_difference(tokenizer, path, [*PROBE_TEXTS, *names])) is not None:
            raise ValueError(f"{path} cannot be made a fast tokenizer with the same ids: they differ for {different!r}")
        return tokenizer
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


def _cut_in_special_tokens(tokenizer: Tokenizer, special: Mapping[str, int | None]) -> None:
    """Cuts the first letter off where a text spells a special token that the model lists, and so finds, as a piece."""
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
    config: ModelConfig,
    *,
    special: Mapping[str, int | None],
    prefix: str,
    suffix: str,
    max_length: int,
) -> None:
    """Writes tokenizer.json, tokenizer_config.json and special_tokens_map.json for a model; arguments are as for
    `export_model`."""
    # A prompt is a document that has not ended.
    end = None if config.causal else special.get(suffix)
    tokenizer.post_processor = special_tokens_around(tokenizer, special.get(prefix), end)
    tokenizer.encode_special_tokens = False
    tokenizer.save(str(directory / "tokenizer.json"))
    token_types = issubclass(config.model_class, EncoderTrunk) and config.type_vocab_size > 1
    names = {f"{name}_token": tokenizer.id_to_token(index) for name, index in special.items() if index is not None}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        # New tokens are appended on the right, so a batch of prompts must end there.
        "padding_side": "left" if config.causal else "right",
        "model_input_names": ["input_ids", *(["token_type_ids"] if token_types else []), "attention_mask"],
        "clean_up_tokenization_spaces": False,
        **names,
    }
    for file, content in (("tokenizer_config.json", config), ("special_tokens_map.json", names)):
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        (directory / file).write_text(text, encoding="utf-8")


def special_tokens_around(
    tokenizer: Tokenizer, prefix: int | None, suffix: int | None
) -> processors.TemplateProcessing | None:
    """Returns a post-processor that puts these tokens around a text, or around two texts, of types 0 and 1."""
    if prefix is None and suffix is None:
        return None
    tokens = {index: tokenizer.id_to_token(index) for index in (prefix, suffix) if index is not None}
    before = f"{tokens[prefix]} " if prefix is not None else ""
    after = f" {tokens[suffix]}" if suffix is not None else ""
    return processors.TemplateProcessing(
        single=f"{before}$A{after}",
        pair=f"{before}$A{after} $B:1{after}{':1' if after else ''}",
        special_tokens=[(token, index) for index, token in tokens.items()],
    )


# -- a sentencepiece model as a fast tokenizer (the `tokenizers` library) that gives the same ids --------------------


SPACE_MARK = "▁"
# SentencePiece.Type of the protobuf.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

# What conversions get wrong: several scripts, combining marks, emoji with joiners and skin tones, runs of
# spaces, tabs, newlines of both kinds, leading and trailing blanks, the space mark itself, spelled-out
# special tokens.
PROBE_TEXTS = (
    "To be, or not to be: that is the question.",
    "  two leading spaces, two trailing  ",
    "tabs\tand\nnewlines\n\n\nand\r\ncarriage returns",
    "many      spaces   inside",
    "Größe, naïve café — “quotes” … ½ ℌ ﬁ",
    "Привет, мир! Γειά σου. שלום עולם مرحبا بالعالم",
    "नमस्ते दुनिया สวัสดีชาวโลก 你好,世界。こんにちは 안녕하세요",
    "emoji 😀😃 👩‍👩‍👧‍👦 👍🏽 🏳️‍🌈 🇫🇷 end",
    "e\u0301 a\u0308 か\u3099 \u1112\u1161\u11ab zero\u200bwidth\u00a0nbsp\u3000wide",
    "a ▁ literal▁mark 0x41 <0x41> <s> </s> <unk> [MASK]",
    "aaaaaaa aaaaaaaa zzzz 1234567890 3.14159",
    " ",
    "\n",
    "x",
    "",
)


def sentencepiece_to_fast(path: str | Path, *, mask: str | None = None) -> Tokenizer:
    """Returns a fast tokenizer whose ids equal those of the sentencepiece model at `path`.

    Control symbols become special tokens: they are found in text by default, and treated as plain text (as
    sentencepiece does) with `encode_special_tokens = True`. The one named `mask` takes the space before it along, as
    the word does that it stands for. Raises FileNotFoundError, and ValueError for a file that is no sentencepiece model
    or uses an option that has no counterpart (model type word, whitespace as suffix, unused pieces).
    """
    from sentencepiece import sentencepiece_model_pb2

    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no sentencepiece model at {path}")
    proto = sentencepiece_model_pb2.ModelProto()
    try:
        proto.ParseFromString(path.read_bytes())
    except Exception as error:  # protobuf's DecodeError; its class differs between protobuf's implementations
        raise ValueError(f"{path} is not a sentencepiece model: {error}") from None
    if not proto.pieces:
        raise ValueError(f"{path} is not a sentencepiece model: it holds no pieces")
    spec, without = proto.normalizer_spec, "has no fast tokenizer counterpart"
    if proto.trainer_spec.model_type not in (1, 2, 4):  # unigram, bpe, char: a bpe without merges
        raise ValueError(f"{path}: a sentencepiece model of words {without}")
    if proto.trainer_spec.treat_whitespace_as_suffix or not spec.escape_whitespaces:
        raise ValueError(f"{path}: whitespace as suffix or left unescaped {without}")
    if _of_type(proto, _UNUSED):
        raise ValueError(f"{path}: a sentencepiece model with unused pieces {without}")
    model = _unigram(proto) if proto.trainer_spec.model_type == 1 else _bpe(proto)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = _normalizer(spec)
    tokenizer.pre_tokenizer = _pre_tokenizer(proto, whole=isinstance(model, Unigram) or model.ignore_merges)
    tokenizer.decoder = _decoder(spec)
    symbols = _of_type(proto, _UNKNOWN, _CONTROL)
    added = [AddedToken(piece, special=True, normalized=False, lstrip=piece == mask) for piece in symbols]
    tokenizer.add_special_tokens(added)
    assert tokenizer.get_vocab_size() == len(proto.pieces), "adding the special tokens must not make new ids"
    return tokenizer


def _of_type(proto: Any, *types: int) -> list[str]:
    return [piece.piece for piece in proto.pieces if piece.type in types]


def first_difference(tokenizer: Tokenizer, path: str | Path, texts: Iterable[str] = PROBE_TEXTS) -> str | None:
    """The first of `texts` that has other ids in the sentencepiece model at `path`, if any; special tokens are text."""
    import sentencepiece

    reference = sentencepiece.SentencePieceProcessor(model_file=str(path))
    before = tokenizer.encode_special_tokens
    tokenizer.encode_special_tokens = True
    try:
        for text in texts:
            if tokenizer.encode(text, add_special_tokens=False).ids != reference.encode(text):
                return text
    finally:
        tokenizer.encode_special_tokens = before
    return None


def _bpe(proto: Any) -> BPE:
    """BPE with merges from the scores: sentencepiece joins any two neighbours that make a piece, best score first."""
    scores = {piece.piece: piece.score for piece in proto.pieces if piece.type == _NORMAL}
    ids = {piece.piece: index for index, piece in enumerate(proto.pieces)}
    merges = []
    for piece, score in scores.items():
        for left, right in ((piece[:cut], piece[cut:]) for cut in range(1, len(piece))):
            if left in scores and right in scores:
                merges.append((-score, ids[piece], ids[left], ids[right], (left, right)))
    return BPE(
        ids,
        [merge[-1] for merge in sorted(merges)],
        unk_token=next(iter(_of_type(proto, _UNKNOWN)), None),
        fuse_unk=True,
        byte_fallback=proto.trainer_spec.byte_fallback,
        # A user-defined symbol stands alone after the pre-tokenizer and no merges lead to it: looked up whole.
        ignore_merges=any(len(piece) > 1 for piece in _of_type(proto, _USER_DEFINED)),
    )


def _unigram(proto: Any) -> Unigram:
    """Unigram with the pieces that text must not produce (control, unknown, bytes) priced out of every path:
    in the fast tokenizer all pieces are candidates, in sentencepiece only normal and user-defined ones."""
    lowest = min((piece.score for piece in proto.pieces if piece.type == _NORMAL), default=0.0)
    # Sentencepiece never splits a user-defined symbol; at zero no sum of log-probabilities beats it.
    fixed = {_USER_DEFINED: 0.0, **dict.fromkeys((_UNKNOWN, _CONTROL, _BYTE), 1000.0 * (lowest - 10.0))}
    vocabulary = [(piece.piece, fixed.get(piece.type, piece.score)) for piece in proto.pieces]
    unknown = next((index for index, piece in enumerate(proto.pieces) if piece.type == _UNKNOWN), None)
    return Unigram(vocabulary, unk_id=unknown, byte_fallback=proto.trainer_spec.byte_fallback)


def _normalizer(spec: Any) -> normalizers.Normalizer:
    steps: list[normalizers.Normalizer] = []
    if spec.precompiled_charsmap:
        # The fast tokenizer applies the table to whole graphemes and takes the first entry that is a
        # prefix of one; sentencepiece takes the longest entry at each character. They part where a
        # grapheme has several characters: composing first leaves few of those, and \r\n (one grapheme) is
        # taken apart where its halves become spaces.
        if "nfkc" in spec.name:
            steps.append(normalizers.NFC())
        if spec.name.startswith("nmt"):
            steps.append(normalizers.Replace("\r", " "))
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        # Only spaces (and, at the end, marks) count, so no Strip(), which would take newlines along. With
        # a dummy prefix one leading space stays and stands for it; a literal mark at the start does not,
        # so it gets a space of its own.
        start = (rf"\A{SPACE_MARK}", f" {SPACE_MARK}") if spec.add_dummy_prefix else (r"\A ", "")
        for pattern, words in ((rf"[ {SPACE_MARK}]+\z", ""), (" {2,}", " "), start):
            steps.append(normalizers.Replace(Regex(pattern), words))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE_MARK)])


def _pre_tokenizer(proto: Any, *, whole: bool) -> pre_tokenizers.PreTokenizer:
    """whole: whether the model may look up several characters at once, and so find pieces that text must not give."""
    steps: list[pre_tokenizers.PreTokenizer] = []
    if proto.normalizer_spec.add_dummy_prefix:
        # "first" prepends its mark unless the text starts with it. Sentencepiece with whitespace kept
        # prepends always: hence a mark (a space) that the normaliser has removed, made the usual one by
        # the next step.
        mark = SPACE_MARK if proto.normalizer_spec.remove_extra_whitespaces else " "
        steps.append(pre_tokenizers.Metaspace(replacement=mark, prepend_scheme="first", split=False))
    normal, user_defined = _of_type(proto, _NORMAL), _of_type(proto, _USER_DEFINED)
    # Words are cut before each mark if no piece spans such a cut: then cutting changes nothing and is faster.
    split = not any(SPACE_MARK in piece[1:] for piece in normal + user_defined)
    steps.append(pre_tokenizers.Metaspace(replacement=SPACE_MARK, prepend_scheme="never", split=split))
    patterns = [re.escape(piece) for piece in sorted(user_defined, key=len, reverse=True)]
    if whole:
        patterns += _cuts_in_forbidden_pieces(proto, set("".join(normal)))
    if patterns:
        steps.append(pre_tokenizers.Split(Regex("|".join(patterns)), behavior="isolated"))
    return pre_tokenizers.Sequence(steps)


def _cuts_in_forbidden_pieces(proto: Any, known: set[str]) -> list[str]:
    """Patterns that cut one character out of text that spells a control, unknown or byte piece ("<0x41>").

    Only characters of no normal piece, so that the cut changes nothing else; other pieces `_unigram` prices out.
    """
    patterns = []
    for piece in _of_type(proto, _UNKNOWN, _CONTROL):
        at = next((index for index, character in enumerate(piece) if character not in known), None)
        if at is not None:
            before = f"(?<={re.escape(piece[:at])})" if at else ""
            after = f"(?={re.escape(piece[at + 1 :])})" if piece[at + 1 :] else ""
            patterns.append(before + re.escape(piece[at]) + after)
    if _of_type(proto, _BYTE):
        forms = {"<": "<(?=0x[0-9A-F]{2}>)", "x": "(?<=<0)x(?=[0-9A-F]{2}>)", ">": "(?<=<0x[0-9A-F]{2})>"}
        patterns += [form for character, form in forms.items() if character not in known][:1]
    return patterns


def _decoder(spec: Any) -> decoders.Decoder:
    steps = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if spec.remove_extra_whitespaces:
        steps.append(decoders.Replace(Regex(r"\A +"), ""))
    elif spec.add_dummy_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(steps)

"""Fits the parts of a loader together, and says in one line what does not fit."""

import hashlib
import json
from typing import TYPE_CHECKING, Any

from matmix.data.config import DataConfig
from matmix.data.loading.masking import Masker, MaskingConfig
from matmix.data.loading.packing import ConcatPacking, DocumentPacking, Packing
from matmix.data.splits.reader import TokenShards
from matmix.data.storage.files import sha256_of

if TYPE_CHECKING:
    from matmix.data.tokenizer import Tokenizer


def check_batch_sizes(global_batch_size: int, micro_batch_size: int, data_size: int) -> None:
    """Raises ValueError unless the global batch is a whole number of micro-batches on every rank."""
    for name, value in (("global batch", global_batch_size), ("micro-batch", micro_batch_size)):
        if value < 1:
            raise ValueError(f"the {name} must hold at least 1 sequence, got {value}")
    unit = micro_batch_size * data_size
    if global_batch_size % unit:
        below, above = global_batch_size // unit * unit, -(-global_batch_size // unit) * unit
        nearest = f"{below} or {above}" if below else f"{above}"
        raise ValueError(
            f"a global batch of {global_batch_size} cannot be divided into micro-batches of "
            f"{micro_batch_size} on {data_size} rank(s): it must be a multiple of {unit}, "
            f"the nearest are {nearest}"
        )


def make_packing(
    shards: TokenShards, config: DataConfig, shuffle: bool, seed: int, causal: bool, one_pass: bool
) -> Packing:
    options = {
        "seqlen": config.seqlen,
        "causal": causal,
        "prefix": _special_id(shards, "prefix", config.prefix),
        "suffix": _special_id(shards, "suffix", config.suffix),
        "shuffle": shuffle,
        "shuffle_block": config.shuffle_block,
        "seed": seed,
    }
    where = f"the {shards.split} split of {shards.storage.path}"
    if config.packing == "document":
        packing: Packing = DocumentPacking(shards, **options)
        if len(packing) == 0:
            raise ValueError(f"{where} holds no documents")
        return packing
    packing = ConcatPacking(shards, keep_last=one_pass, **options)
    if len(packing) == 0:
        need = 2 if one_pass else packing.width
        raise ValueError(
            f"{where} holds {packing.order.total_tokens} tokens (special ones included), fewer than the "
            f"{need} of one sequence (data.seqlen = {config.seqlen}); take a smaller data.seqlen or more text"
        )
    return packing


def _special_id(shards: TokenShards, which: str, name: str) -> int | None:
    if name == "none":
        return None
    token = shards.manifest.tokenizer.special.get(name)
    if token is None:
        raise ValueError(
            f"data.{which} = {name!r}, but the tokenizer of {shards.storage.path} has no {name} token; "
            f'set data.{which} = "none" or prepare the data with a tokenizer that has it'
        )
    return token


def make_masker(shards: TokenShards, masking: MaskingConfig, seed: int) -> Masker:
    info = shards.manifest.tokenizer
    if info.special.get("mask") is None:
        raise ValueError(
            f"masked-LM batches need a mask token, and the tokenizer of {shards.storage.path} has none; "
            "prepare the data with a tokenizer that has one"
        )
    tokenizer = load_tokenizer(shards)
    return Masker(
        masking,
        seed=seed,
        mask_id=info.special["mask"],
        special_ids=sorted(tokenizer.silent_ids),
        ordinary_ids=tokenizer.ordinary_ids(),
        vocab_size=info.vocab_size,
    )


def load_tokenizer(shards: TokenShards) -> "Tokenizer":
    from matmix.data.tokenizer import Tokenizer

    return Tokenizer.load(shards.storage.file(shards.manifest.tokenizer.file))


def check_same_tokenizer(shards: list[TokenShards]) -> None:
    first = shards[0]
    for other in shards[1:]:
        if other.manifest.tokenizer.sha256 != first.manifest.tokenizer.sha256:
            raise ValueError(
                f"the datasets of a mixture need one tokenizer, but {first.storage.path} and "
                f"{other.storage.path} were prepared with different ones"
            )


def manifest_facts(shards: TokenShards) -> dict[str, Any]:
    """What else the manifest of a dataset decides, of batches or of metrics, whatever the path it lies at."""
    manifest, info = shards.manifest, shards.info
    return {
        "bytes": info.bytes,
        "dtype": manifest.dtype,
        "special": dict(manifest.tokenizer.special),
        "token_histogram": sha256_of(shards.storage.file(manifest.token_histogram)),
        "vocab_size": manifest.tokenizer.vocab_size,
    }


def first_difference(saved: Any, found: Any, name: str) -> tuple[str, Any, Any] | None:
    """Where two values of JSON first differ: dotted name, the one value and the other; None where they are equal."""
    if saved == found:
        return None
    pairs: list[tuple[str, Any, Any]] = []
    if isinstance(saved, dict) and isinstance(found, dict):
        pairs = [(f"{name}.{key}", saved.get(key), found.get(key)) for key in sorted(saved.keys() | found.keys())]
    elif isinstance(saved, list) and isinstance(found, list) and len(saved) == len(found) == 1:
        pairs = [(name, saved[0], found[0])]
    elif isinstance(saved, list) and isinstance(found, list) and len(saved) == len(found):
        pairs = [(f"{name}[{i}]", *pair) for i, pair in enumerate(zip(saved, found, strict=True))]
    differences = (first_difference(a, b, where) for where, a, b in pairs)
    return next((difference for difference in differences if difference), (name, saved, found))


def data_digest(shards: TokenShards) -> str:
    """What the sequences of a split depend on, whatever the path it lies at."""
    content = [[s.documents, s.tokens, s.sha256] for s in shards.info.shards]
    content.append(shards.manifest.tokenizer.sha256)
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]

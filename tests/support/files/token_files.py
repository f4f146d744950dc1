"""Files of tokens as other programs write them; by hand, from the descriptions of their formats."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, models

END, VOCAB_SIZE = 3, 97
_CODES = {"uint8": 1, "int32": 4, "int64": 5, "uint16": 8}


def documents(count: int, seed: int = 0, longest: int = 60) -> list[list[int]]:
    """Documents of ordinary tokens, all different."""
    draw = np.random.default_rng(seed)
    return [
        [number % 80 + 7, *draw.integers(7, VOCAB_SIZE, draw.integers(1, longest)).tolist()] for number in range(count)
    ]


def write_tokenizer(folder: Path) -> Path:
    """tokenizer.json of a word a number; the token 3 ends a text."""
    names = ["<pad>", "<unk>", "<s>", "</s>", "[CLS]", "[SEP]", "[MASK]"]
    vocab = {name: number for number, name in enumerate([*names, *(f"w{number}" for number in range(7, VOCAB_SIZE))])}
    made = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    made.add_special_tokens([AddedToken(name, special=True) for name in names])
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def write_megatron(stem: Path, texts: Sequence[Sequence[Sequence[int]]], dtype: str = "uint16") -> Path:
    """NAME.bin and NAME.idx. texts: of each document its sequences."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    sequences = [sequence for text in texts for sequence in text]
    raw = [np.array(sequence, np.dtype(dtype).newbyteorder("<")).tobytes() for sequence in sequences]
    stem.with_suffix(".bin").write_bytes(b"".join(raw))
    index = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", _CODES[dtype])
    index += struct.pack("<QQ", len(sequences), len(texts) + 1)
    index += b"".join(struct.pack("<i", len(sequence)) for sequence in sequences)
    first = 0
    for one in raw:
        index += struct.pack("<q", first)
        first += len(one)
    number = 0
    for text in [[], *texts]:
        number += len(text)
        index += struct.pack("<q", number)
    stem.with_suffix(".idx").write_bytes(index)
    return stem.with_suffix(".bin")


def write_flat(path: Path, texts: Sequence[Sequence[int]], dtype: str = "<u2", *, header: bool = False) -> Path:
    """The ids of all texts, with the end token behind each. header: numpy's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ids = np.array([token for text in texts for token in [*text, END]], dtype)
    if header:
        np.save(path, ids)
    else:
        path.write_bytes(ids.tobytes())
    return path


def write_llm_c(path: Path, texts: Sequence[Sequence[int]], dtype: str = "<u2") -> Path:
    """The ids of all texts behind the header of llm.c, with the token that separates documents before each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ids = np.array([token for text in texts for token in [END, *text]], dtype)
    header = np.zeros(256, "<i4")
    header[:3] = *{"<u2": (20240520, 1), "<u4": (20240801, 7)}[dtype], len(ids)
    path.write_bytes(header.tobytes() + ids.tobytes())
    return path


def write_mds(folder: Path, texts: Sequence[Sequence[int]], encoding: str, dtype: str) -> None:
    """Shards of MDS with twenty texts each, and a name and a number beside the tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.dumps(
        {
            "column_encodings": ["str", "int", encoding],
            "column_names": ["name", "number", "tokens"],
            "column_sizes": [None, 8, None],
            "compression": None,
            "format": "mds",
            "hashes": [],
            "size_limit": 3000,
            "version": 2,
        },
        sort_keys=True,
    ).encode()
    for shard in range(-(-len(texts) // 20)):
        samples = []
        for number, text in enumerate(texts[20 * shard : 20 * shard + 20]):
            name, tokens = b"x" * (number % 5), np.array(text, dtype).tobytes()
            if encoding != "bytes":  # one axis, its length in a byte
                tokens = bytes([1 << 2, len(text)]) + tokens
            sizes = struct.pack("<II", len(name), len(tokens))
            samples.append(sizes + name + struct.pack("<q", number) + tokens)
        offsets = [4 + 4 * (len(samples) + 1) + len(config)]
        for sample in samples:
            offsets.append(offsets[-1] + len(sample))
        head = struct.pack(f"<{len(offsets) + 1}I", len(samples), *offsets)
        (folder / f"shard.{shard:05}.mds").write_bytes(head + config + b"".join(samples))


def write_litdata(folder: Path, texts: Sequence[Sequence[int]], dtype: str, number: str) -> None:
    """Chunks of twenty texts each, with the end token behind each text. number: what litdata calls the dtype."""
    folder.mkdir(parents=True, exist_ok=True)
    chunks = []
    for chunk in range(-(-len(texts) // 20)):
        items = [np.array([*text, END], dtype).tobytes() for text in texts[20 * chunk : 20 * chunk + 20]]
        offsets = 4 * (len(items) + 2) + np.cumsum([0, *map(len, items)])
        raw = np.array([len(items), *offsets], "<u4").tobytes() + b"".join(items)
        name, tokens = f"chunk-0-{chunk}.bin", sum(map(len, items)) // np.dtype(dtype).itemsize
        chunks.append({"chunk_bytes": len(raw), "chunk_size": len(items), "dim": tokens, "filename": name})
        (folder / name).write_bytes(raw)
    config = {"compression": None, "data_format": [number], "encryption": None, "item_loader": "TokensLoader"}
    (folder / "index.json").write_text(json.dumps({"chunks": chunks, "config": config, "updated_at": "0"}))

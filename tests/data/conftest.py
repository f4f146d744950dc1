"""Small prepared datasets, written with the formats' own writers (not with matmix.data.prepare.command)."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import zstandard
from tokenizers import AddedToken, Tokenizer, models

from matmix.data.formats.base import ShardInfo
from matmix.data.manifest import Manifest, SplitInfo, TokenizerInfo

SPECIALS = {
    "pad": "<pad>",
    "unk": "<unk>",
    "bos": "<s>",
    "eos": "</s>",
    "cls": "[CLS]",
    "sep": "[SEP]",
    "mask": "[MASK]",
}
FIRST_WORD = len(SPECIALS)
VOCAB_SIZE = 97


def random_documents(count: int, seed: int = 0, longest: int = 60) -> list[np.ndarray]:
    """Documents of 1 to `longest` ordinary tokens; the first three have 1, 1 and 5 * longest."""
    rng = np.random.default_rng(seed)
    lengths = [1, 1, 5 * longest, *rng.integers(1, longest + 1, max(count - 3, 0))][:count]
    return [rng.integers(FIRST_WORD, VOCAB_SIZE, n) for n in lengths]


def write_tokenizer(path: Path, without: tuple[str, ...] = (), vocab_size: int = VOCAB_SIZE) -> dict[str, int | None]:
    """tokenizer.json with a word a number, and its special ids; the specials in `without` become words."""
    names = [f"w{i}" if n in without else SPECIALS[n] for i, n in enumerate(SPECIALS)]
    vocab = {name: i for i, name in enumerate([*names, *(f"w{i}" for i in range(FIRST_WORD, vocab_size))])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=names[1]))
    tokenizer.add_special_tokens([AddedToken(t, special=True) for n, t in SPECIALS.items() if n not in without])
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
    return {name: None if name in without else i for i, name in enumerate(SPECIALS)}


def write_dataset(
    path: Path,
    documents: list[np.ndarray],
    *,
    validation: list[np.ndarray] | None = None,
    format: str = "mds",
    compression: str | None = None,
    shard_documents: int = 8,
    dtype: str = "uint16",
    without: tuple[str, ...] = (),
    vocab_size: int = VOCAB_SIZE,
) -> Path:
    special = write_tokenizer(path / "tokenizer" / "tokenizer.json", without, vocab_size)
    splits = {}
    histogram = np.zeros(vocab_size, dtype=np.int64)
    for name, docs in (("train", documents), ("validation", validation or documents[:3])):
        docs = [np.asarray(d, dtype=dtype) for d in docs]
        folder = path / name
        folder.mkdir()
        groups = [docs[i : i + shard_documents] for i in range(0, len(docs), shard_documents)]
        write = write_mds if format == "mds" else write_webdataset
        files = write(folder, groups, compression, dtype)
        np.save(folder / "lengths.npy", np.array([len(d) for d in docs], dtype=np.uint32))
        if name == "train":
            for d in docs:
                np.add.at(histogram, d[d < vocab_size], 1)
        shards = []
        for (file, raw), group in zip(files, groups, strict=True):
            stored = (folder / file).read_bytes()
            shards.append(
                ShardInfo(
                    file=file,
                    documents=len(group),
                    tokens=sum(map(len, group)),
                    bytes=len(stored),
                    sha256=hashlib.sha256(stored).hexdigest(),
                    raw_bytes=len(raw),
                    raw_sha256=hashlib.sha256(raw).hexdigest(),
                )
            )
        tokens = sum(map(len, docs))
        splits[name] = SplitInfo(documents=len(docs), tokens=tokens, bytes=3 * tokens, shards=tuple(shards))
    np.save(path / "token_histogram.npy", histogram)
    manifest = Manifest(
        format=format,
        compression=compression,
        dtype=dtype,
        tokenizer=TokenizerInfo(
            kind="tokenizers",
            file="tokenizer/tokenizer.json",
            sha256=hashlib.sha256((path / "tokenizer" / "tokenizer.json").read_bytes()).hexdigest(),
            vocab_size=vocab_size,
            special=special,
        ),
        splits=splits,
        token_histogram="token_histogram.npy",
        unigram_entropy=1.0,
        sources=(),
        malformed={},
        empty_documents=0,
    )
    (path / "manifest.json").write_text(manifest.to_json())
    return path


def write_mds(
    folder: Path, groups: list[list[np.ndarray]], compression: str | None, dtype: str
) -> list[tuple[str, bytes]]:
    """One shard a group, each written by MDSWriter on its own, and the index.json over all of them.

    Returns the name of each file and its bytes before compression.
    """
    from streaming import MDSWriter

    entries, files = [], []
    for number, group in enumerate(groups):
        part = folder / f"part{number}"
        with MDSWriter(columns={"tokens": f"ndarray:{dtype}"}, out=str(part), compression=compression) as writer:
            for tokens in group:
                writer.write({"tokens": tokens})
        (entry,) = json.loads((part / "index.json").read_text())["shards"]
        for key in ("raw_data", "zip_data"):
            if entry[key]:
                old = entry[key]["basename"]
                entry[key]["basename"] = old.replace("00000", f"{number:05}")
                if (part / old).exists():
                    (part / old).rename(folder / entry[key]["basename"])
        (part / "index.json").unlink()
        part.rmdir()
        entries.append(entry)
        name = (entry["zip_data"] or entry["raw_data"])["basename"]
        stored = (folder / name).read_bytes()
        files.append((name, zstandard.ZstdDecompressor().stream_reader(stored).read() if compression else stored))
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": entries}))
    return files


def write_webdataset(
    folder: Path, groups: list[list[np.ndarray]], compression: str | None, dtype: str
) -> list[tuple[str, bytes]]:
    import webdataset

    files = []
    for number, group in enumerate(groups):
        file = folder / f"shard-{number:05}.tar"
        with webdataset.TarWriter(str(file)) as writer:
            for i, tokens in enumerate(group):
                writer.write({"__key__": f"{number:05}{i:07}", "npy": tokens})
        raw = file.read_bytes()
        if compression:
            file.unlink()
            file = file.with_suffix(".tar.zst")
            file.write_bytes(zstandard.ZstdCompressor().compress(raw))
        files.append((file.name, raw))
    return files


class Datasets:
    """What the tests need from this file; `data` hands it to them."""

    write = staticmethod(write_dataset)
    documents = staticmethod(random_documents)
    special = staticmethod(list(SPECIALS).index)
    first_word = FIRST_WORD
    vocab_size = VOCAB_SIZE


@pytest.fixture(scope="session")
def data() -> Datasets:
    return Datasets()


@pytest.fixture(scope="session")
def small(tmp_path_factory, data) -> Path:
    """43 documents in 6 MDS shards."""
    return data.write(tmp_path_factory.mktemp("small") / "data", data.documents(43))


FORMATS = [("mds", None), ("mds", "zstd"), ("webdataset", None), ("webdataset", "zstd")]
NIGHTLY = [("mds", "zstd"), ("webdataset", None)]


@pytest.fixture(
    scope="session",
    params=[pytest.param(form, marks=pytest.mark.slow) if form in NIGHTLY else form for form in FORMATS],
    ids=lambda p: f"{p[0]}-{p[1] or 'plain'}",
)
def any_format(request, tmp_path_factory, data) -> Path:
    """The documents of `small`, in each way of storing them."""
    folder = tmp_path_factory.mktemp("any")
    kind, compression = request.param
    return data.write(folder / "data", data.documents(43), format=kind, compression=compression)

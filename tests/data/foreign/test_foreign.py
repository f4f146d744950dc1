"""Directories that others made: trained from as they are, by StreamingDataset and webdataset."""

import gc
import io
import itertools
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from failures import each
from nightly import nightly
from PIL import Image
from streaming import MDSWriter
from streaming.base.shared import memory, prefix
from webdataset import TarWriter

from matmix.data.config import DataConfig, ImagesConfig
from matmix.data.loading.masking import MaskingConfig
from matmix.data.modalities import build_loader

GLOBAL, SHARDS, EOS = 8, 6, 259
TEXTS = [f"document {number} " + "abc " * (number % 11) for number in range(43)]
TOKENS = [np.arange(3, 3 + number % 7 + 1, dtype=np.int32) for number in range(43)]


def write_mds(folder, samples, columns, **options):
    with MDSWriter(out=str(folder), columns=columns, size_limit=len(samples) // SHARDS * 60, **options) as writer:
        for sample in samples:
            writer.write(sample)
    return folder


def write_tars(folder, samples):
    folder.mkdir(parents=True)
    for shard in range(SHARDS):
        with TarWriter(str(folder / f"train-{shard:03}.tar"), encoder=False) as tar:
            for number, sample in enumerate(samples[shard::SHARDS]):
                tar.write({"__key__": f"{shard:03}-{number:04}", **sample})
    return folder


def picture(number):
    out = io.BytesIO()
    Image.new("RGB", (10, 12), (number, 255 - number, 3 * number)).save(out, "png")
    return out.getvalue()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Reader and kind -> a directory."""
    root = tmp_path_factory.mktemp("made")
    pictures = [(picture(number), number % 5) for number in range(43)]
    folders = {
        ("streaming", "text"): write_mds(
            root / "mds" / "train", [{"text": t, "n": 1} for t in TEXTS], {"text": "str", "n": "int"}, hashes=["sha1"]
        ).parent,
        ("streaming", "tokens"): write_mds(
            root / "ids", [{"tokens": ids} for ids in TOKENS], {"tokens": "ndarray:int32"}, compression="zstd"
        ),
        ("webdataset", "text"): write_tars(
            root / "tars", [{"txt": t.encode(), "pth": b"no one reads this"} for t in TEXTS]
        ),
        ("streaming", "pictures"): write_mds(
            root / "pictures", [{"image": p, "class": c} for p, c in pictures], {"image": "png", "class": "int"}
        ),
        ("webdataset", "pictures"): write_tars(
            root / "tarred", [{"png": p, "cls": str(c).encode()} for p, c in pictures]
        ),
    }
    yield {key: str(path) for key, path in folders.items()}
    gc.unfreeze()  # loaders may have been put aside with what was imported
    gc.collect()  # memory that they share is removed now, and not when the process ends


def loader_of(path, reader, kind="text", *, workers=0, world=1, rank=0, one_pass=False, masking=None, **options):
    if kind == "pictures":
        images = ImagesConfig(path=path, validation_path=path, size=8, class_count=5, train_crop="shift", smoothing=0.1)
        given, asked = {"images": images}, {}
    else:
        given, asked = {"path": path, "tokenizer": "bytes", "text_field": kind, "seqlen": 24}, {"masking": masking}
        given["validation_path"] = path
    config = DataConfig(**{**given, "reader": reader, "workers": workers, **options})
    sizes = {"global_batch_size": GLOBAL, "micro_batch_size": 2, "data_rank": rank, "data_size": world}
    split = "validation" if one_pass else "train"
    return build_loader(config, split=split, seed=3, one_pass=one_pass, **asked, **sizes)


def rows(loader, batches):
    taken = list(itertools.islice(loader, batches * loader.micro_batches_per_step))
    loader.close()
    names = ("inputs", "labels")
    return [torch.cat([getattr(batch, name) for batch in taken]) for name in names]


def test_an_epoch_has_each_document_once(made):
    for reader, rank in itertools.product(("streaming", "webdataset"), range(2)):
        options = {"packing": "document", "suffix": "none", "seqlen": 80, "world": 2}
        found = []
        for rank in range(2):
            inputs = rows(loader_of(made[reader, "text"], reader, rank=rank, **options), 12)[0]
            texts = [bytes(row[row < 256].tolist()).decode() for row in inputs]
            found.append(texts)
        for texts in found:
            own = set(texts)
            (length,) = {size for size in range(1, 43) if set(texts[:size]) == own and len(set(texts[:size])) == size}
            assert sorted(texts[length : 2 * length]) == sorted(texts[:length])
            assert texts[length : 2 * length] != texts[:length]
        assert sorted({*found[0], *found[1]}) == sorted(TEXTS)


@pytest.mark.parametrize("reader", ["streaming", "webdataset"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("text", {}),
        ("pictures", {}),
        nightly("text", {"packing": "document", "masking": MaskingConfig(), "shuffle": False}),
        nightly("text", {"workers": 2, "world": 2, "rank": 1}),
        nightly("pictures", {"workers": 2}),
    ],
)
def test_a_run_goes_on_exactly(made, reader, kind, options):
    """Stopped in the middle of shards and texts, and where another process has the next micro-batch."""
    path = made[reader, kind]
    expected = rows(loader_of(path, reader, kind, **options), 9)
    assert len({row.numpy().tobytes() for row in expected[0]}) > 9
    first = loader_of(path, reader, kind, **options)
    cut = 3 * GLOBAL // options.get("world", 1)
    assert all(torch.equal(a, b[:cut]) for a, b in zip(rows(first, 3), expected, strict=True))
    state = json.loads(json.dumps(first.state_dict(lambda own: [(0, own[1]), (1, own[1])][: options.get("world", 1)])))
    again = loader_of(path, reader, kind, **options)
    again.load_state_dict(state)
    assert all(torch.equal(a, b[cut:]) for a, b in zip(rows(again, 6), expected, strict=True))


def test_ids_are_taken_as_they_are(made):
    inputs, _ = rows(loader_of(made["streaming", "tokens"], "streaming", "tokens", shuffle=False), 2)
    line = np.concatenate([[*ids, EOS] for ids in TOKENS])
    assert inputs.flatten().tolist() == np.tile(line, 2)[: inputs.numel()].tolist()


def test_validation_is_read_once_in_order(made):
    for reader in ("streaming", "webdataset"):
        loaders = [loader_of(made[reader, "text"], reader, one_pass=True, world=2, rank=rank) for rank in range(2)]
        batches = [list(loader) for loader in loaders]
        assert len(batches[0]) == len(batches[1])
        assert sum(batch.n_tokens for own in batches for batch in own) >= sum(len(text) + 1 for text in TEXTS) - 24
    for reader in ("streaming", "webdataset"):
        loader = loader_of(made[reader, "pictures"], reader, "pictures", one_pass=True, validation_samples=12)
        assert sum(batch.n_tokens for batch in loader) == 12
        assert loader.facts.class_counts.sum() == 12


def fails(message, loader, batches=20):
    with pytest.raises((ValueError, FileNotFoundError), match=message) as raised:
        rows(loader(), batches)
    assert "\n" not in str(raised.value)


def test_what_is_refused(made, tmp_path):
    """Each in one line."""
    mds, tars = made["streaming", "text"], made["webdataset", "text"]
    pictures = made["streaming", "pictures"]
    odd = {
        "pickled": ({"text": "str", "x": "pkl"}, {"text": "a", "x": {}}),
        "json": ({"text": "json"}, {"text": {"a": 1}}),
        "bytes": ({"text": "bytes"}, {"text": b"\xff\xfe"}),
        "floats": ({"tokens": "ndarray:float32"}, {"tokens": np.ones(3, np.float32)}),
        "large": ({"tokens": "ndarray:int32"}, {"tokens": np.array([1, 700], np.int32)}),
        "broken": ({"image": "bytes", "label": "int"}, {"image": b"no picture", "label": 1}),
        "class": ({"image": "bytes", "label": "int"}, {"image": picture(1), "label": 5}),
    }
    made_now = {
        name: str(write_mds(tmp_path / name, [sample] * SHARDS, columns)) for name, (columns, sample) in odd.items()
    }
    (tmp_path / "lacking").mkdir()
    (tmp_path / "lacking" / "index.json").write_bytes((tmp_path / "large" / "index.json").read_bytes())
    short = write_tars(tmp_path / "short", [{"txt": text.encode()} for text in TEXTS])
    whole = (short / "train-000.tar").read_bytes()
    (short / "train-000.tar").write_bytes(whole[:3000])
    odd_tars = {
        "without": [{"pth": b""}] * SHARDS,
        "letters": [{"png": picture(1), "cls": b"cat"}] * SHARDS,
    }
    odd_tars = {name: str(write_tars(tmp_path / name, samples)) for name, samples in odd_tars.items()}
    some = f"{tars}/train-{{001..002}}.tar"
    cases = [
        ("holds no MDS shards, which data.reader = 'streaming' reads", str(tmp_path), "streaming", {}),
        ("holds no tar files, which", mds, "webdataset", {}),
        ("has no column body; its columns are n, text", mds, "streaming", {"text_field": "body"}),
        ("StreamingDataset: ValueError: Column x contains an unsafe type: pkl", made_now["pickled"], "streaming", {}),
        ("the column text is json, which is not read", made_now["json"], "streaming", {}),
        ("the column tokens is ndarray:float32, which", made_now["floats"], "streaming", {"text_field": "tokens"}),
        (r"sample 0 of shard\S+ cannot be read \(UnicodeDecodeError", made_now["bytes"], "streaming", {}),
        ("has the id 700, outside of the 263 of data.t", made_now["large"], "streaming", {"text_field": "tokens"}),
        ("lacks the shard shard.00000.mds, which", str(tmp_path / "lacking"), "streaming", {"text_field": "tokens"}),
        ("train-000.tar is damaged, or no tar file: ", str(short), "webdataset", {"shuffle": False}),
        ("has no member or field 'txt'", odd_tars["without"], "webdataset", {}),
        (r"each of 7 reading processes shards of its own, but \S+ has 6; take", tars, "webdataset", {"workers": 7}),
        ("no manifest.json, so it is read as others made it: set data.to", mds, "streaming", {"tokenizer": ""}),
        ("nobody.json does not exist", mds, "streaming", {"tokenizer": "nobody.json"}),
        ("the command of a pipe is run by `matmix prepare` only", "pipe:cat a.tar", "webdataset", {}),
        ("/no-000.tar does not exist", f"{tars}/no-{{000..002}}.tar", "webdataset", {}),
        ("holds train-001.tar, which is to train on, and", tars, "webdataset", {"validation_path": some}),
        ("and data.reverse_complement needs prepared data", mds, "streaming", {"reverse_complement": 0.5}),
    ]  # fmt: skip
    for message, path, reader, options in cases:
        fails(message, lambda: loader_of(path, reader, **options))  # noqa: B023
    for message, path, reader in [
        (r"sample 0 of \S+ cannot be decoded: it is no picture", made_now["broken"], "streaming"),
        ("has the class 5, but there are 5 ", made_now["class"], "streaming"),
        (r"lacks a picture .* or the number of its class .* it has cls, png", odd_tars["letters"], "webdataset"),
    ]:
        fails(message, lambda: loader_of(path, reader, "pictures"))  # noqa: B023
    images = ImagesConfig(path=pictures, size=8)
    config = DataConfig(reader="streaming", images=images)
    with pytest.raises(ValueError, match=r"set data\.images\.class_count to the number of its classes, or "):
        build_loader(config, global_batch_size=2, micro_batch_size=2)
    unnamed = DataConfig(path=tars, reader="webdataset", tokenizer="bytes", workers=0)
    with pytest.raises(ValueError, match="has no folder validation or val with tar files, to validate with: set data"):
        build_loader(unnamed, split="validation", one_pass=True, global_batch_size=2, micro_batch_size=2)
    with pytest.raises(ValueError, match=r'set data\.reader to "streaming" or "webdataset"'):
        DataConfig(path=tars, tokenizer="bytes")


@each("change, message", [
    ({"world": 2}, "reader.ranks was 1 and is now 2"),
    ({"text_field": "n"}, "the column n is int"),
    ({"tokenizer": "dna"}, "tokenizer was "),
])  # fmt: skip
def test_a_position_belongs_to_its_reading(made, change, message):
    state = loader_of(made["streaming", "text"], "streaming").state_dict()
    with pytest.raises(ValueError, match=message):
        loader_of(made["streaming", "text"], "streaming", **change).load_state_dict(state)
    with pytest.raises(ValueError, match="it needs a cursor for each reading process"):
        loader_of(made["streaming", "text"], "streaming").load_state_dict({**state, "cursors": [[[0, 0, -1, 0]]]})


def test_one_run_at_a_time_reads_through_a_cache(made, tmp_path):
    """What a killed one has left in shared memory is removed."""
    options = {"kind": "tokens", "cache_dir": str(tmp_path)}
    first = loader_of(made["streaming", "tokens"], "streaming", **options)
    with pytest.raises(ValueError, match=r"^another run of this machine reads \S+ by way of \S+: set data.cache_dir$"):
        loader_of(made["streaming", "tokens"], "streaming", **options)
    before = rows(first, 2)[0]
    del first
    (folder,) = tmp_path.glob("streaming-*")
    left = [Path("/dev/shm", f"{900_000 + os.getpid() % 90_000:06}_{name}") for name in ("locals", "next_epoch")]
    left[0].write_bytes(b"\0\0\0\0" + f"{folder}\0{0}".encode())
    left[1].write_bytes(b"12345678")
    again = loader_of(made["streaming", "tokens"], "streaming", **options)
    assert [path.exists() for path in left] == [False, False]
    assert torch.equal(rows(again, 2)[0], before)


def test_a_process_removes_shared_memory_once(made, monkeypatch):
    """What another run has named in the same way since then stays when the process ends."""
    at_exit, own = [], 800_000 + os.getpid() % 90_000
    # Numbers of its own: the first free ones are those that other tests take as soon as they are let go.
    monkeypatch.setattr(prefix, "_each_prefix_int", lambda: itertools.count(own))
    monkeypatch.setattr(memory.atexit, "register", at_exit.append)
    loader = loader_of(made["streaming", "text"], "streaming")
    names = _shared_memory_of(own)
    del loader
    gc.collect()
    assert at_exit
    assert names
    assert not _shared_memory_of(own)
    for name in names:
        name.write_bytes(b"of another")
    try:
        for clean_up in at_exit:
            clean_up()
        assert _shared_memory_of(own) == names
    finally:
        for name in names:
            name.unlink(missing_ok=True)


def _shared_memory_of(number):
    return sorted(Path("/dev/shm").glob(f"{number:06}_*"))

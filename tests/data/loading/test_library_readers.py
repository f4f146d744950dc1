"""`data.reader`: the libraries read the training split, each reading process through shards of its own."""

import itertools
import json
import pickle

import numpy as np
import pytest
import torch
from failures import each
from folders import contents
from nightly import nightly

from matmix.data.config import DataConfig, ExamplesConfig, ImagesConfig
from matmix.data.loading.masking import MaskingConfig
from matmix.data.modalities import build_loader
from matmix.data.splits.reader import open_dataset
from matmix.data.storage import storage

GLOBAL = 8
READERS = {"streaming": ("mds", "zstd"), "webdataset": ("webdataset", "zstd")}


@pytest.fixture(scope="module")
def stored(tmp_path_factory, data):
    """Reader -> a dataset for it: 43 documents in 6 shards."""
    folder = tmp_path_factory.mktemp("stored")
    return {
        reader: data.write(folder / reader, data.documents(43), format=form, compression=compression)
        for reader, (form, compression) in READERS.items()
    }


def loader_of(path, reader, *, workers=0, micro=2, world=1, rank=0, one_pass=False, masking=None, **options):
    config = DataConfig(**{"path": str(path), "reader": reader, "seqlen": 24, "workers": workers, **options})
    sizes = {"global_batch_size": GLOBAL, "micro_batch_size": micro, "data_rank": rank, "data_size": world}
    split = "validation" if one_pass else "train"
    return build_loader(config, split=split, seed=3, one_pass=one_pass, masking=masking, **sizes)


def rows(loader, batches):
    """The next rows of a rank: inputs and labels, in the order of the global batches."""
    taken = list(itertools.islice(loader, batches * loader.micro_batches_per_step))
    loader.close()
    return torch.stack([torch.cat([getattr(b, name) for b in taken]) for name in ("inputs", "labels")])


@pytest.mark.parametrize("place", ["local", "remote"])
@pytest.mark.parametrize("reader", READERS)
def test_streams_hold_the_documents(stored, tmp_path, reader, place):
    path = str(stored[reader]) if place == "local" else stored[reader].as_uri()
    whole = open_dataset(path, cache_dir=str(tmp_path / "cache"))
    for number, part in enumerate(pickle.loads(pickle.dumps(whole.streams(4, reader)))):
        assert part.n_shards == len(range(number, 6, 4))
        for shard in range(part.n_shards):
            for index, length in enumerate(part.lengths(shard)):
                document = part.read(shard, index)
                assert document.dtype == np.uint16
                assert len(document) == length
                assert document.tolist() == whole.read(number + 4 * shard, index).tolist()


def test_webdataset_writes_nothing(stored, tmp_path):
    (part,) = open_dataset(stored["webdataset"].as_uri(), cache_dir=str(tmp_path)).streams(1, "webdataset")
    before = contents(tmp_path)
    assert [len(part.read(shard, 0)) for shard in range(6)] == [part.lengths(shard)[0] for shard in range(6)]
    assert contents(tmp_path) == before
    assert len(part._open) == 2


def test_shards_are_fetched_by_streaming(tmp_path, monkeypatch):
    from streaming.base.storage import CloudDownloader  # takes a second, on each worker that collects this file
    from streaming.base.storage.download import LocalDownloader

    asked = []

    class Downloader(LocalDownloader):
        def download(self, remote, local, timeout=60):
            super().download(remote.removeprefix("s3:/"), local)

    monkeypatch.setattr(CloudDownloader, "get", classmethod(lambda cls, url: asked.append(url) or Downloader()))
    (tmp_path / "here").write_text("shard")
    storage.download(f"s3:/{tmp_path}/here", tmp_path / "there", 10, by_streaming=True)
    assert (tmp_path / "there").read_text() == "shard"
    assert asked == [f"s3:/{tmp_path}/here"]


@pytest.mark.parametrize("workers", [0, nightly(2)])
def test_each_reading_process_reads_its_own_shards_once_an_epoch(stored, workers):
    """Also those of other ranks: rank r and process w have the shards s with s mod (ranks processes) = r processes + w.
    With data.packing = "document" a row is a document."""
    streams = 2 * max(workers, 1)
    for reader, rank in itertools.product(READERS, range(2)):
        whole = open_dataset(str(stored[reader]))
        loader = loader_of(
            stored[reader], reader, workers=workers, world=2, rank=rank, packing="document", suffix="none", seqlen=400
        )
        inputs = rows(loader, 24)[0].reshape(-1, max(workers, 1), 2, 400)  # turns, processes, micro-batch
        for process in range(max(workers, 1)):
            own = range(rank * max(workers, 1) + process, 6, streams)
            texts = [whole.read(s, i).tolist()[:400] for s in own for i in range(len(whole.lengths(s)))]
            found = [row[row != 0].tolist() for row in inputs[:, process].reshape(-1, 400)]
            for epoch in range(2):
                piece = found[epoch * len(texts) : (epoch + 1) * len(texts)]
                assert sorted(piece) == sorted(texts)
            assert found[: len(texts)] != found[len(texts) : 2 * len(texts)]


@each(
    "options",
    [
        {"workers": 0},
        {"workers": 2, "world": 2, "rank": 1, "micro": 4},
        {"workers": 1, "masking": MaskingConfig(), "shuffle": False},
    ],
)
def test_a_run_goes_on_exactly_and_the_readers_agree(stored, options):
    """Stopped in the middle of shards, and where the second reading process has the next micro-batch."""
    expected = rows(loader_of(stored["streaming"], "streaming", **options), 9)
    assert len({row.numpy().tobytes() for row in expected[0]}) > 9
    for reader, path in stored.items():
        first = loader_of(path, reader, **options)
        assert torch.equal(rows(first, 3), expected[:, : 3 * GLOBAL // options.get("world", 1)])
        state = json.loads(json.dumps(first.state_dict()))
        assert state["samples"] == 3 * GLOBAL
        again = loader_of(path, reader, **options)
        again.load_state_dict(state)
        assert torch.equal(rows(again, 6), expected[:, 3 * GLOBAL // options.get("world", 1) :])


def test_evaluation_is_that_of_the_addressable_reader(stored):
    for reader, path in stored.items():
        expected = list(loader_of(path, "addressable", one_pass=True))
        found = list(loader_of(path, reader, one_pass=True))
        assert all(torch.equal(a.inputs, b.inputs) for a, b in zip(found, expected, strict=True))


@each(
    "change, message",
    [
        ({"world": 2}, r"reader.ranks was 1 and is now 2"),
        ({"workers": 2}, r"reader.workers was 1 and is now 2"),
        ({"micro": 4}, r"reader.micro_batch_size was 2 and is now 4"),
        ({"reader": "addressable"}, r"reader was \{.*\} and is now None"),
    ],
)
def test_a_position_belongs_to_ranks_and_processes(stored, change, message):
    state = loader_of(stored["streaming"], "streaming").state_dict()
    other = {"reader": "streaming", **change}
    with pytest.raises(ValueError, match=rf"^the saved data position belongs to other data: {message}; ") as raised:
        loader_of(stored["streaming"], **other).load_state_dict(state)
    assert "\n" not in str(raised.value)


def test_shards_that_a_library_does_not_read(stored):
    with pytest.raises(ValueError, match=r'"webdataset" reads shards of the format webdataset, but .* has mds; set'):
        loader_of(stored["streaming"], "webdataset")
    with pytest.raises(ValueError, match=r"gives each of 8 reading processes shards of its own, but .* has 6; take"):
        loader_of(stored["streaming"], "streaming", world=4, workers=2)


@each(
    "options, name",
    [
        ({"mixture": {"a": 1.0, "b": 1.0}}, "data.mixture"),
        ({"path": "a", "window": 48, "seqlen": 24}, "data.window"),
        ({"path": "a", "carry": True, "shuffle": False}, "data.carry"),
        ({"path": "a", "skip_damaged": True}, "data.skip_damaged"),
        ({"images": ImagesConfig(path="a", mixup=0.8)}, "data.images.mixup, cutmix or repeats"),
        ({"images": ImagesConfig(mixture={"a": 1.0})}, "data.mixture"),
        ({"examples": ExamplesConfig(train="a.jsonl")}, "data.examples.train"),
    ],
)
def test_what_a_reader_cannot_do(options, name):
    with pytest.raises(
        ValueError, match=rf'^data.reader = "streaming" cannot be used with {name}; take "addressable"$'
    ):
        DataConfig(reader="streaming", **options)

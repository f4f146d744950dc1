"""Damaged shards: an error that names the shard, or on request padding that is counted."""

import itertools
import json
import shutil

import numpy as np
import pytest
import torch
from failures import each

from matmix.data.config import DataConfig
from matmix.data.loading.masking import IGNORED, MaskingConfig
from matmix.data.loading.rows import WHOLE, Part
from matmix.data.modalities import build_loader
from matmix.data.splits.reader import open_dataset

GLOBAL = 16
STEPS = 12
DAMAGES = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "missing": lambda path: path.unlink(),
    "flipped": lambda path: path.write_bytes(flip(path.read_bytes())),
}


def flip(raw: bytes) -> bytes:
    middle = len(raw) // 2
    return raw[:middle] + bytes([raw[middle] ^ 0x10]) + raw[middle + 1 :]


def shards_of(path):
    manifest = json.loads((path / "manifest.json").read_text())
    return [path / "train" / shard["file"] for shard in manifest["splits"]["train"]["shards"]]


@pytest.fixture
def broken(any_format, tmp_path):
    """The documents of `small` with three of six shards damaged, each in its way."""
    path = tmp_path / "data"
    shutil.copytree(any_format, path, ignore=shutil.ignore_patterns(".cache"))
    for shard, harm in zip(shards_of(path)[1::2], DAMAGES.values(), strict=True):
        harm(shard)
    return path


def loader_of(path, *, world=1, rank=0, workers=0, micro=4, masking=None, part=WHOLE, **options):
    config = DataConfig(
        **{"path": str(path), "seqlen": 24, "workers": workers, "shuffle_block": 2, "skip_damaged": True, **options}
    )
    sizes = {"global_batch_size": GLOBAL, "micro_batch_size": micro, "data_rank": rank, "data_size": world}
    return build_loader(config, masking=masking, part=part, **sizes)


def rows(loaders, count):
    """The rows of the next `count` global batches: tokens and labels; and the rows left out in each."""
    steps = loaders[0].micro_batches_per_step
    taken = [list(itertools.islice(iter(loader), count * steps)) for loader in loaders]
    ordered = [b for i in range(count) for rank in taken for b in rank[i * steps : (i + 1) * steps]]
    per_step = [sum(b.n_damaged for rank in taken for b in rank[i * steps : (i + 1) * steps]) for i in range(count)]
    return torch.cat([b.input_ids for b in ordered]), torch.cat([b.labels for b in ordered]), per_step


@each("kind", DAMAGES)
@each("remote", [False, True])
def test_a_damaged_shard_is_named(any_format, tmp_path, kind, remote):
    path = tmp_path / "data"
    shutil.copytree(any_format, path, ignore=shutil.ignore_patterns(".cache"))
    shard = shards_of(path)[3]
    size = shard.stat().st_size
    DAMAGES[kind](shard)
    where = path.as_uri() if remote else str(path)
    words = {
        "truncated": "another SHA-256" if remote else f"has {size - 9} bytes instead of {size}",
        "missing": "it does not exist" if remote else "is missing",
        "flipped": "another SHA-256",
    }

    def read():
        shards = open_dataset(where, cache_dir=str(tmp_path / "cache"))
        for number in range(shards.n_shards):
            shards.read(number, 0)

    with pytest.raises((ValueError, FileNotFoundError), match=rf"train/{shard.name}.* {words[kind]}") as caught:
        read()
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.rglob("*.part-*"))
    # The reading process passes it on as it is.
    loader = loader_of(path, workers=1, skip_damaged=False) if kind == "flipped" else None
    if loader is not None:
        with pytest.raises(ValueError, match=rf"shard train/{shard.name} has another SHA-256"):
            list(itertools.islice(iter(loader), 20))
        loader.close()


@pytest.mark.parametrize("kind", ["truncated", "missing"])
def test_unverified_shards_still_have_to_be_whole(small, tmp_path, kind):
    shutil.copytree(small, tmp_path / "data")
    DAMAGES[kind](shards_of(tmp_path / "data")[0])
    with pytest.raises((ValueError, FileNotFoundError), match=r"shard train/shard\.00000\.mds"):
        open_dataset(str(tmp_path / "data"), verify=False)


@each("masking", [None, MaskingConfig()])
def test_sequences_of_damaged_shards_are_padding(small, broken, masking):
    whole_ids, whole_labels, none = rows([loader_of(small, masking=masking, skip_damaged=False)], STEPS)
    assert sum(none) == 0
    ids, labels, left_out = rows([loader_of(broken, masking=masking)], STEPS)
    empty = (labels == IGNORED).all(dim=1) & (ids == ids[0, 0].new_tensor(0)).all(dim=1)
    assert 0 < sum(left_out) == int(empty.sum()) < len(ids)
    assert torch.equal(ids[~empty], whole_ids[~empty])
    assert torch.equal(labels[~empty], whole_labels[~empty])


def test_what_is_left_out_does_not_depend_on_ranks_workers_or_stops(broken):
    expected = rows([loader_of(broken)], STEPS)
    assert sum(expected[2])
    for world, workers, micro in [(1, 2, 8), (2, 1, 4), (4, 0, 2)]:
        loaders = [loader_of(broken, world=world, rank=r, workers=workers, micro=micro) for r in range(world)]
        found = rows(loaders, STEPS)
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])
        assert found[2] == expected[2]
        for loader in loaders:
            loader.close()
    first = loader_of(broken, workers=1)
    rows([first], 5)
    resumed = loader_of(broken)
    resumed.load_state_dict(first.state_dict())
    assert rows([resumed], STEPS - 5)[2] == expected[2][5:]
    first.close()


def test_a_run_that_met_a_damaged_shard_goes_on_without_it(small, tmp_path):
    """The position saved before is taken up with skip_damaged set."""
    shutil.copytree(small, tmp_path / "data")
    strict = loader_of(tmp_path / "data", skip_damaged=False)
    rows([strict], 1)
    DAMAGES["flipped"](shards_of(tmp_path / "data")[2])
    lenient = loader_of(tmp_path / "data")
    lenient.load_state_dict(strict.state_dict())
    assert sum(rows([lenient], STEPS)[2]) > 0


def test_each_damaged_shard_is_said_with_its_reason(broken):
    batches = list(itertools.islice(iter(loader_of(broken)), 4 * STEPS))
    said = {where: why for batch in batches for where, why in batch.damaged.items()}
    names = [shard.name for shard in shards_of(broken)[1::2]]
    assert sorted(where.split("train/")[1] for where in said) == sorted(names)
    for name, reason in zip(names, ("truncated", "missing", "SHA-256"), strict=True):
        assert any(name in why and reason in why and "\n" not in why for why in said.values())


def test_documents_packing_leaves_out_only_the_documents_of_the_shard(broken, small):
    config = {"packing": "document", "shuffle": False}
    _, labels, left_out = rows([loader_of(broken, **config)], 3)
    shards = open_dataset(str(small))
    bad = [s % 2 == 1 for s in range(shards.n_shards) for _ in shards.lengths(s)]
    sequence = np.resize(bad, len(labels))
    assert left_out == [int(sequence[i * GLOBAL : (i + 1) * GLOBAL].sum()) for i in range(3)]


def test_nothing_is_skipped_where_everything_has_gone(small, tmp_path):
    """A folder that is no longer mounted is not a set of damaged shards; nor is a split without one whole shard."""
    shutil.copytree(small, tmp_path / "data")
    loader = loader_of(tmp_path / "data")
    rows([loader], 1)
    (tmp_path / "data").rename(tmp_path / "away")
    with pytest.raises(FileNotFoundError, match="is missing"):
        rows([loader], STEPS)
    (tmp_path / "away").rename(tmp_path / "data")
    for shard in shards_of(tmp_path / "data"):
        shard.unlink()
    with pytest.raises(ValueError, match=r"no shard of .* can be used: .*shard\.00000\.mds is missing"):
        loader_of(tmp_path / "data")


def test_a_download_that_fails_is_not_damage(any_format, tmp_path, monkeypatch):
    from matmix.data.storage.remote import RemoteError
    from matmix.data.storage.storage import Storage

    loader = loader_of(any_format.as_uri(), cache_dir=str(tmp_path / "cache"))

    def fail(*_):
        raise RemoteError("cannot download it: the network is down")

    monkeypatch.setattr(Storage, "_download", fail)
    with pytest.raises(RemoteError, match="the network is down"):
        rows([loader], 1)


@pytest.mark.parametrize("verify", [True, False])
def test_a_row_that_ranks_share_is_left_out_by_all_of_them(broken, verify):
    parts = [Part(number, 4) for number in range(4)]
    whole, *shared = (
        list(itertools.islice(loader_of(broken, part=part, verify=verify), 12)) for part in (WHOLE, *parts)
    )
    assert 0 < sum(batch.n_damaged for batch in whole) < 4 * 12
    for batch, *own in zip(whole, *shared, strict=True):
        assert torch.equal(torch.cat([part.inputs[0] for part in own]), batch.inputs.flatten())
        assert torch.equal(torch.cat([part.labels[0] for part in own]), batch.labels.flatten())
        assert sum(part.n_damaged for part in own) == batch.n_damaged
        assert {name for part in own for name in part.damaged} == set(batch.damaged)

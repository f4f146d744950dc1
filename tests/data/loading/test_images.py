"""The loader of pictures: one sequence of global batches, pixel by pixel, whatever reads it."""

import itertools
import json
import shutil

import numpy as np
import pytest
import torch
from failures import each
from pictures import encoded, pixels, prepare, samples, write_tree
from PIL import Image

from matmix.data.config import DataConfig, ImagesConfig
from matmix.data.images.decode import decode
from matmix.data.loading.masking import IGNORED
from matmix.data.manifest import Manifest
from matmix.data.modalities import MODALITIES, build_loader
from matmix.data.prepare import command
from matmix.data.prepare.pictures import PrepareImagesConfig
from matmix.data.splits.reader import open_split

GLOBAL = 16
FULL = {
    "augment": "rand-m9-mstd0.5-inc1",
    "erasing": 0.25,
    "mixup": 0.8,
    "cutmix": 1.0,
    "smoothing": 0.1,
    "interpolation": "random",
}
KINDS = {
    "recipe of ImageNet": FULL,
    "repeated, mixed in pairs": {**FULL, "repeats": 3, "mix_mode": "pair"},
    "shifted, jittered": {"train_crop": "shift", "shift": 2, "color_jitter": 0.4, "vflip": 0.5},
    "one channel": {"channels": 1, "augment": "rand-m9-mstd0.5-inc1", "erasing": 0.5},
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """42 pictures in several shards, and 6 held out."""
    folder = tmp_path_factory.mktemp("pictures")
    source = write_tree(folder / "tree", samples(14))
    held_out = write_tree(folder / "val", [(f"v{n}", n % 3, data) for n, (_, _, data) in enumerate(samples(2))])
    return prepare(source, folder / "data", shard_megabytes=0.004, validation=(str(held_out),))


def loader_of(
    path="",
    *,
    workers=0,
    micro=4,
    world=1,
    rank=0,
    total=GLOBAL,
    seed=3,
    skip_damaged=False,
    shuffle=True,
    reader="addressable",
    **options,
):
    images = {name: options.pop(name) for name in list(options) if name in ImagesConfig.__dataclass_fields__}
    config = DataConfig(
        images=ImagesConfig(**{"path": str(path), "size": 16, **images}),
        workers=workers,
        shuffle=shuffle,
        shuffle_block=2,
        skip_damaged=skip_damaged,
        reader=reader,
    )
    sizes = {"global_batch_size": total, "micro_batch_size": micro, "data_rank": rank, "data_size": world}
    return build_loader(config, **{"seed": 3, **sizes, **options})


def ranks(path="", world=1, **options):
    return [loader_of(path, world=world, rank=rank, **options) for rank in range(world)]


def take(loader, count):
    return list(itertools.islice(loader, count))


def global_batches(loaders, count):
    """The next global batches of loaders that are the ranks of one run: pictures, targets, numbers."""
    steps = loaders[0].micro_batches_per_step
    per_rank = [take(loader, count * steps) for loader in loaders]
    for loader in loaders:
        loader.close()
    return [
        [
            torch.cat([getattr(b, name) for rank in per_rank for b in rank[i * steps : (i + 1) * steps]])
            for name in ("inputs", "labels", "examples")
        ]
        for i in range(count)
    ]


def same(found, expected):
    return all(torch.equal(a, b) for one, other in zip(found, expected, strict=True) for a, b in zip(one, other))  # noqa: B905


@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes")
@pytest.mark.parametrize("kind", KINDS)
def test_pixels_do_not_depend_on_ranks_or_workers(prepared, kind):
    options = KINDS[kind]
    expected = global_batches([loader_of(prepared, micro=16, **options)], 4)  # beyond one epoch
    assert len({batch[0].numpy().tobytes() for batch in expected}) == 4
    splits = [(1, 1, 1), (2, 0, 8), (4, 1, 2)] if kind != "recipe of ImageNet" else [(1, 4, 2), (1, 1, 16), (2, 1, 1)]
    for world, workers, micro in splits:
        found = global_batches(ranks(prepared, world, workers=workers, micro=micro, **options), 4)
        assert same(found, expected), (world, workers, micro)


def test_resume_in_the_middle_of_an_epoch(prepared):
    whole = global_batches([loader_of(prepared, **FULL)], 5)
    first = ranks(prepared, 2, workers=1, **FULL)
    assert same(global_batches(first, 2), whole[:2])
    state = json.loads(json.dumps(first[0].state_dict()))
    assert state["samples"] == 2 * GLOBAL
    for world, workers, micro in [(1, 1, 8), (4, 0, 1)]:
        resumed = ranks(prepared, world, workers=workers, micro=micro, **FULL)
        for loader in resumed:
            loader.load_state_dict(state)
        assert same(global_batches(resumed, 3), whole[2:])


def test_resume_with_another_global_batch_augments_alike(prepared):
    options = {"augment": "rand-m9-mstd0.5-inc1", "erasing": 0.5}
    before = torch.cat([b[0] for b in global_batches([loader_of(prepared, **options)], 4)])
    loader = loader_of(prepared, total=8, **options)
    loader.load_state_dict({**loader.state_dict(), "samples": 32})
    assert torch.equal(torch.cat([b[0] for b in global_batches([loader], 4)]), before[32:])


def test_every_epoch_has_every_picture_in_another_order(prepared):
    batches = global_batches([loader_of(prepared, total=14, micro=14)], 6)
    epochs = [torch.cat([b[2] for b in batches[i : i + 3]]).tolist() for i in (0, 3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(42))] * 2
    assert epochs[0] != epochs[1]


def test_every_epoch_augments_anew(prepared):
    options = {"shuffle": False, "augment": "rand-m9-mstd0.5-inc1", "total": 42, "micro": 42}
    first, second = global_batches([loader_of(prepared, **options)], 2)
    assert torch.equal(first[2], second[2])
    assert sum(torch.equal(a, b) for a, b in zip(first[0], second[0], strict=True)) < 4


def test_repeats_come_together_and_differ(prepared):
    ((inputs, _, numbers),) = global_batches([loader_of(prepared, total=12, micro=12, repeats=3)], 1)
    assert numbers.reshape(4, 3).unique(dim=1).shape == (4, 1)
    assert len(set(numbers.tolist())) == 4
    assert all(not torch.equal(inputs[i], inputs[i + 1]) for i in range(0, 12, 3))


def test_labels_are_those_of_the_pictures(prepared):
    shards = open_split(str(prepared))
    known = [int(shards.read(s, i)[-8]) for s in range(shards.n_shards) for i in range(len(shards.lengths(s)))]
    for options in ({}, {"smoothing": 0.3}):
        _, labels, numbers = (torch.cat(parts) for parts in zip(*global_batches([loader_of(prepared, **options)], 3)))  # noqa: B905
        expected = torch.tensor(known)[numbers]
        if options:
            assert torch.allclose(labels, torch.nn.functional.one_hot(expected, 3) * 0.7 + 0.1)
            labels = labels.argmax(dim=1)
        assert torch.equal(labels, expected)


def test_evaluation_reads_every_picture_once_without_change(prepared):
    batches = list(loader_of(prepared, split="validation", one_pass=True, micro=4, total=4, size=8, **FULL))
    assert [b.n_tokens for b in batches] == [4, 2]
    inputs, labels, numbers = (
        torch.cat([getattr(b, name) for b in batches]) for name in ("inputs", "labels", "examples")
    )
    assert labels.dtype == torch.int64
    assert numbers.tolist() == [0, 1, 2, 3, 4, 5, -1, -1]
    assert labels[6:].tolist() == [IGNORED] * 2
    assert not inputs[6:].any()
    again = list(loader_of(prepared, split="validation", one_pass=True, micro=2, total=8, seed=9, size=8, workers=1))
    assert torch.equal(torch.cat([b.inputs for b in again]), inputs)


def test_evaluation_resizes_and_crops_the_middle(tmp_path):

    data = encoded(pixels(5, 60, 40))
    path = prepare(write_tree(tmp_path / "tree", [("a", 0, data)]), tmp_path / "data")
    (batch,) = loader_of(
        path, split="train", one_pass=True, total=1, micro=1, size=18, crop=0.9, mean=(0.5,) * 3, std=(0.25,) * 3
    )
    whole = decode(data).resize((30, 20), Image.Resampling.BICUBIC)
    middle = np.asarray(whole.crop((6, 1, 24, 19)), np.float32) / 255
    expected = torch.from_numpy((middle - 0.5) / 0.25).permute(2, 0, 1)
    assert (batch.inputs[0] - expected).abs().max() < 0.05


def test_pictures_are_normalised_by_the_training_split(prepared):
    facts = MODALITIES["pictures"].facts(DataConfig(images=ImagesConfig(path=str(prepared))))
    images = Manifest.load(prepared).images
    assert (facts.mean, facts.std) == (images.mean[:3], images.std[:3])
    options = {"train_crop": "none", "crop": 1.0, "hflip": 0.0, "total": 42, "micro": 42, "size": 10}
    ((inputs, _, _),) = global_batches([loader_of(prepared, **options)], 1)
    assert inputs.mean(dim=(0, 2, 3)).abs().max() < 0.2
    assert ((inputs.std(dim=(0, 2, 3)) - 1).abs() < 0.2).all()
    grey = MODALITIES["pictures"].facts(DataConfig(images=ImagesConfig(path=str(prepared), channels=1)))
    assert grey.mean == images.mean[3:]


def test_reading_leaves_the_generators_of_training_alone(prepared):
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    take(loader_of(prepared, **FULL), 2)
    assert torch.equal(torch.rand(3), expected)


def test_damaged_shards_can_be_skipped(prepared, tmp_path):
    path = shutil.copytree(prepared, tmp_path / "data")
    shard = Manifest.load(path).splits["train"].shards[0]
    (path / "train" / shard.file).write_bytes(b"x" * shard.bytes)
    with pytest.raises(ValueError, match=f"{shard.file} has another SHA-256"):
        take(loader_of(path, total=42, micro=42), 1)
    options = {"skip_damaged": True, "total": 42, **FULL}
    whole = take(loader_of(path, micro=42, **options), 1)[0]
    assert whole.n_damaged == shard.documents
    assert whole.n_tokens == 42 - shard.documents
    assert torch.equal(whole.labels.isnan().all(dim=1), whole.examples < 0)
    parts = [b for loader in ranks(path, 2, micro=7, **options) for b in take(loader, 3)]
    assert torch.equal(torch.cat([b.inputs for b in parts]), whole.inputs)


BAD = {
    "augment": ({"augment": "rand-x9-nonsense"}, "rand-x9-nonsense"),
    "missing": ({"path": "nowhere"}, "nowhere does not exist"),
    "crop": ({"crop": 1.5}, "crop must be in"),
    "mean": ({"mean": (0.5,)}, "mean must be one a channel"),
    "split": ({"split": "test"}, "no split 'test'"),
}


@each("case", BAD)
def test_what_does_not_fit_is_said_in_one_line(prepared, case):
    options, words = BAD[case]
    with pytest.raises((ValueError, FileNotFoundError), match=words) as error:
        loader_of(**{"path": prepared, **options})
    assert "\n" not in str(error.value)


@pytest.fixture(scope="module")
def two(prepared, tmp_path_factory):
    """A mixture of three parts of `prepared`, 42 pictures, and one of another set of the same classes, 15 pictures."""
    folder = tmp_path_factory.mktemp("other")
    given = [(f"o{n}", n % 3, encoded(pixels(900 + n) // 2)) for n in range(15)]
    held_out = write_tree(folder / "val", [(f"v{n}", n, encoded(pixels(990 + n))) for n in range(3)])
    other = prepare(write_tree(folder / "tree", given), folder / "data", validation=(str(held_out),))
    return {str(prepared): 3.0, str(other): 1.0}


def mixed(two, **options):
    return {"path": "", "mixture": two, **options}


@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes")
@pytest.mark.parametrize("kind", ["recipe of ImageNet", "repeated, mixed in pairs"])
def test_a_mixture_has_its_weights_whatever_reads_it(two, kind):
    options = mixed(two, **KINDS[kind])
    expected = global_batches([loader_of(micro=16, **options)], 6)
    for _, _, numbers in expected:
        assert abs(int((numbers >= 42).sum()) - 4) <= 2
    own = torch.cat([numbers for _, _, numbers in expected])
    if kind == "recipe of ImageNet":  # each dataset has epochs of its own, and takes each picture once in one
        assert sorted(own[own < 42][:42].tolist()) == list(range(42))
        assert sorted(own[own >= 42][:15].tolist()) == list(range(42, 57))
    else:
        assert (own.view(-1, 3) == own.view(-1, 3)[:, :1]).all()
    splits = [(2, 0, 8), (4, 1, 2)] if kind == "recipe of ImageNet" else [(2, 0, 4), (1, 2, 2)]
    for world, workers, micro in splits:
        assert same(global_batches(ranks(world=world, workers=workers, micro=micro, **options), 6), expected)
    loader = loader_of(**options)
    take(loader, 5 * loader.micro_batches_per_step)
    state = loader.state_dict()
    loader.close()
    resumed = ranks(world=2, micro=8, **options)
    for one in resumed:
        one.load_state_dict(state)
    assert same(global_batches(resumed, 1), expected[5:])


def test_a_mixture_of_one_is_the_dataset_itself(prepared):
    alone, mixture = (
        loader_of(path=path, mixture=m, repeats=3) for path, m in ((str(prepared), {}), ("", {str(prepared): 2.0}))
    )
    state = alone.state_dict()
    assert same(global_batches([mixture], 4), global_batches([alone], 4))
    loader_of(path="", mixture={str(prepared): 1.0}, repeats=3).load_state_dict(state)


def test_evaluation_reads_every_dataset_of_a_mixture_once(two):
    batches = take(loader_of(split="validation", one_pass=True, total=4, micro=4, **mixed(two)), 3)
    numbers = torch.cat([batch.examples for batch in batches])
    assert numbers[numbers >= 0].tolist() == list(range(9))
    assert sorted(torch.cat([batch.labels for batch in batches])[numbers >= 6].tolist()) == [0, 1, 2]


def test_mean_and_spread_of_a_mixture_are_those_of_its_pixels(two):
    facts = MODALITIES["pictures"].facts(DataConfig(images=ImagesConfig(mixture=two)))
    first, second = (Manifest.load(path).images for path in two)
    mean = 0.75 * np.array(first.mean[:3]) + 0.25 * np.array(second.mean[:3])
    squares = [np.array(one.std[:3]) ** 2 + np.array(one.mean[:3]) ** 2 for one in (first, second)]
    np.testing.assert_allclose(facts.mean, mean, atol=1e-6)
    np.testing.assert_allclose(np.square(facts.std), 0.75 * squares[0] + 0.25 * squares[1] - mean**2, atol=1e-5)
    assert facts.classes == first.classes


def test_what_does_not_fit_in_a_mixture_is_said_in_one_line(prepared, two, tmp_path):
    fewer = prepare(write_tree(tmp_path / "tree", [s for s in samples(2) if s[1] < 2]), tmp_path / "data")
    first, second = two
    cases = [
        ({"path": first, "mixture": two}, "path and data.images.mixture are both given"),
        (mixed({first: 1.0, second: -1.0}), "must be a positive number, got -1.0"),
        (mixed({first: 1.0, str(fewer): 1.0}), "has other classes than .*; prepare both with the same --classes"),
        (mixed({first: 1.0, "nowhere": 1.0}), "nowhere does not exist"),
    ]
    for options, words in cases:
        with pytest.raises((ValueError, FileNotFoundError), match=words) as error:
            loader_of(**options)
        assert "\n" not in str(error.value)
    state = loader_of(**mixed(two)).state_dict()
    with pytest.raises(ValueError, match=r"weights\[0\] was 3.0 and is now 1.0"):
        loader_of(**mixed({first: 1.0, second: 1.0})).load_state_dict(state)


def test_a_position_belongs_to_its_data(prepared):
    state = loader_of(prepared).state_dict()
    with pytest.raises(ValueError, match=r"repeats was 1 and is now 3"):
        loader_of(prepared, repeats=3).load_state_dict(state)


@pytest.mark.parametrize("form", ["mds", "webdataset"])
def test_pictures_at_a_url_and_packed_give_the_same_batches(tmp_path, monkeypatch, form):
    monkeypatch.setenv("MATMIX_SCRATCH", str(tmp_path / "scratch"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = write_tree(tmp_path / "tree", samples(6))
    options = {"format": form, "shard_megabytes": 0.02}
    plain = prepare(source, tmp_path / "plain", **options)
    url = (tmp_path / "mounted" / "set").as_uri()
    command.prepare(PrepareImagesConfig(inputs=(str(source),), out=url, processes=1, compression="zstd", **options))
    expected = global_batches([loader_of(plain, **FULL)], 2)
    assert same(global_batches([loader_of(url, workers=1, **FULL)], 2), expected)
    assert not (tmp_path / "scratch" / "prepare").exists() or not any((tmp_path / "scratch" / "prepare").iterdir())


@pytest.mark.slow
def test_pictures_are_read_by_the_libraries(tmp_path):
    """Each once an epoch by one process of one rank, and exactly on from the middle of a shard."""
    source, options = write_tree(tmp_path / "tree", samples(14)), {"train_crop": "none", "hflip": 0.0}
    for form, reader in (("mds", "streaming"), ("webdataset", "webdataset")):
        path = prepare(source, tmp_path / form, format=form, shard_megabytes=0.004)
        whole = loader_of(path, **options)
        expected = torch.cat([batch[0] for batch in global_batches([whole], 3)])[: whole.samples_per_epoch]
        loaders = ranks(path, 2, reader=reader, **options)
        batches, half = global_batches(loaders, 6), GLOBAL // 2
        found = [
            torch.cat([batch[0][rank * half : (rank + 1) * half] for batch in batches])[: one.dataset.sizes[rank]]
            for rank, one in enumerate(loaders)
        ]
        assert sorted(p.numpy().tobytes() for p in torch.cat(found)) == sorted(p.numpy().tobytes() for p in expected)
        first, again = (ranks(path, 2, reader=reader, **options) for _ in range(2))
        global_batches(first, 2)
        for loader in again:
            loader.load_state_dict(first[0].state_dict())
        assert same(global_batches(again, 4), batches[2:])

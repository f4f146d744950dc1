"""From every kind of source the same pictures; what comes out does not depend on processes or stops."""

import itertools
import json
import math
import random

import numpy as np
import pyarrow
import pytest
from failures import each
from folders import Interruption, contents, interrupt_at
from nightly import nightly
from pictures import CLASSES, encoded, pixels, prepare, samples, write_tar, write_tree
from pyarrow import parquet

from matmix.data.formats.base import unpack
from matmix.data.images.decode import decode
from matmix.data.manifest import Manifest
from matmix.data.prepare import command
from matmix.data.prepare.base import BrokenInputError
from matmix.data.splits.reader import open_dataset, open_split

SAMPLES = samples()


def held(path, split="train"):
    """Class and file of all pictures of a split."""
    shards = open_split(str(path), split)
    places = [(s, i) for s in range(shards.n_shards) for i in range(len(shards.lengths(s)))]
    found = [unpack(shards.read(*place)) for place in places]
    return [(label, bytes(data)) for data, label in found]


def everything(given=SAMPLES):
    return sorted((label, data) for _, label, data in given)


def tree(folder):
    names = folder / "classes.txt"
    names.write_text("\ufeff" + "\r\n".join(CLASSES), encoding="utf-8")  # as editors on Windows write it
    return write_tree(folder / "tree", SAMPLES), {"classes": str(names)}


def tar_of_numbers(folder):
    order = random.Random(0).sample(SAMPLES, len(SAMPLES))
    for part in range(2):
        members = []
        for name, label, data in order[part::2]:
            members += [
                (f"a/{name}.png", data),
                (f"a/{name}.cls", f"\ufeff{label}\r\n".encode()),
                (f"a/{name}.txt", b"else"),
            ]
        write_tar(folder / f"part-{part}.tar", members)
    return folder / "part-*.tar", {}


def tars_of_pipes(folder):
    tar_of_numbers(folder)
    return f"pipe:cat {folder}/part-{{0..1}}.tar", {}


def tar_of_names(folder):
    members = []
    for name, label, data in SAMPLES:
        members += [(f"{name}.json", json.dumps({"kind": CLASSES[label]}).encode()), (f"{name}.png", data)]
    return write_tar(folder / "named.tar", members), {"label_field": "kind"}


def parquet_file(folder):
    column = pyarrow.array([{"bytes": data, "path": name} for name, _, data in SAMPLES])
    table = pyarrow.table({"image": column, "label": [label for _, label, _ in SAMPLES]})
    features = {"info": {"features": {"label": {"names": list(CLASSES), "_type": "ClassLabel"}}}}
    table = table.replace_schema_metadata({"huggingface": json.dumps(features)})
    parquet.write_table(table, folder / "a.parquet", row_group_size=7)
    return folder / "a.parquet", {}


def folder_and_csv(folder):
    (folder / "flat").mkdir()
    for name, _, data in SAMPLES:
        (folder / "flat" / f"{name}.png").write_bytes(data)
    lines = ["file,kind", *(f"{name}.png,{CLASSES[label]}" for name, label, _ in SAMPLES)]
    (folder / "labels.csv").write_text("\n".join(lines))
    options = {"labels": str(folder / "labels.csv"), "image_field": "file", "label_field": "kind"}
    return folder / "flat", options


def tar_with_table(folder):
    table = json.dumps({f"{name}.png": {"kind": CLASSES[label]} for name, label, _ in SAMPLES})
    members = [("labels.json", table.encode()), *((f"{name}.png", data) for name, _, data in SAMPLES)]
    return write_tar(folder / "tabled.tar", members), {"labels": "labels.json", "label_field": "kind"}


SOURCES = [tree, tar_of_numbers, tars_of_pipes, tar_of_names, parquet_file, folder_and_csv, tar_with_table]


@each("make", SOURCES)
def test_every_kind_of_source(tmp_path, monkeypatch, make):
    monkeypatch.setenv("MATMIX_SCRATCH", str(tmp_path / "scratch"))
    source, options = make(tmp_path)
    out = prepare(source, tmp_path / "out", format="mds" if make in SOURCES[::2] else "webdataset", **options)
    assert sorted(held(out)) == everything()
    images = Manifest.load(out).images
    assert images.classes == (CLASSES if make not in (tar_of_numbers, tars_of_pipes) else ("0", "1", "2"))
    assert images.counts == {"train": (8, 8, 8)}


def test_statistics_are_those_of_the_training_pixels(tmp_path):
    source = write_tree(tmp_path / "tree", SAMPLES)
    out = prepare(source, tmp_path / "out", validation_fraction=0.3)
    manifest, train = Manifest.load(out), held(out)
    pictures = [np.asarray(decode(data)) for _, data in train]
    values = np.concatenate([p.reshape(-1, 3) for p in pictures]) / 255
    assert manifest.images.mean[:3] == pytest.approx(values.mean(axis=0), abs=1e-5)
    assert manifest.images.std[:3] == pytest.approx(values.std(axis=0), abs=1e-5)
    grey = np.concatenate([np.asarray(decode(data, channels=1)).ravel() for _, data in train]) / 255
    assert (manifest.images.mean[3], manifest.images.std[3]) == pytest.approx((grey.mean(), grey.std()), abs=1e-5)
    widths = [p.shape[1] for p in pictures]
    assert manifest.images.width == (min(widths), pytest.approx(np.mean(widths), abs=0.01), max(widths))
    counts = [[sum(label == c for label, _ in held(out, split)) for c in range(3)] for split in manifest.splits]
    assert [list(manifest.images.counts[split]) for split in manifest.splits] == counts


def test_equal_files_never_stand_on_both_sides(tmp_path):
    twice = [(f"{name}-{copy}", label, data) for name, label, data in SAMPLES for copy in range(2)]
    out = prepare(write_tree(tmp_path / "tree", twice), tmp_path / "out", validation_fraction=0.4)
    train, validation = held(out), held(out, "validation")
    assert sorted(train + validation) == everything(twice)
    assert not set(train) & set(validation)


def test_validation_in_a_folder_of_its_own(tmp_path):
    first, second = SAMPLES[::2], SAMPLES[1::2]
    source = write_tree(tmp_path / "train", first)
    other = write_tree(tmp_path / "val", second)
    out = prepare(source, tmp_path / "out", validation=(str(other),))
    assert sorted(held(out)) == everything(first)
    assert sorted(held(out, "validation")) == everything(second)


def test_classes_are_mixed_in_the_shards(tmp_path):
    labels = [label for label, _ in held(prepare(write_tree(tmp_path / "tree", SAMPLES), tmp_path / "out"))]
    assert labels != sorted(labels)
    assert sum(a != b for a, b in itertools.pairwise(labels)) > 8


def test_pictures_are_made_smaller_and_never_larger(tmp_path):
    given = [("a", 0, encoded(pixels(1, 64, 32), "JPEG")), ("b", 1, encoded(pixels(2, 40, 80))), SAMPLES[-1]]
    out = prepare(write_tree(tmp_path / "tree", given), tmp_path / "out", short_side=16, quality=80)
    found = dict(held(out))
    assert decode(found[0]).size == (32, 16)
    assert decode(found[1]).size == (16, 32)
    assert found[0][:3] == b"\xff\xd8\xff"
    assert found[1][:4] == b"\x89PNG"
    assert found[2] == SAMPLES[-1][2]
    whole = np.asarray(decode(given[0][2]).resize((32, 16)), float)
    assert np.abs(np.asarray(decode(found[0]), float) - whole).mean() < 8


def test_another_encoding(tmp_path):
    out = prepare(write_tree(tmp_path / "tree", SAMPLES), tmp_path / "out", encoding="webp", quality=50)
    assert {data[8:12] for _, data in held(out)} == {b"WEBP"}


def test_corrupt_pictures_are_left_out_counted_and_named(tmp_path, capfd):
    bad = [("bad-1", 0, SAMPLES[0][2][:-30]), ("bad-2", 2, b"")]
    source = write_tree(tmp_path / "tree", [*SAMPLES, *bad])
    with pytest.raises(BrokenInputError, match=r"2 of 26 pictures are corrupt.*cat/bad-1\.png: it is truncated"):
        prepare(source, tmp_path / "out")
    out = prepare(source, tmp_path / "out", max_corrupt=0.1)
    assert sorted(held(out)) == everything()
    malformed = Manifest.load(out).malformed
    assert (malformed["count"], malformed["records"]) == (2, 26)
    assert sorted(e["reason"].partition(":")[0] for e in malformed["examples"]) == ["cat/bad-1.png", "owl/bad-2.png"]
    assert "owl/bad-2.png: it is empty" in capfd.readouterr().out


@pytest.mark.parametrize("form", ["mds", nightly("webdataset")])
def test_stopped_at_any_write(tmp_path, monkeypatch, form):
    """Stopped before a rename, once more soon after, then left to run, also with more processes: the same bytes."""
    options = {"format": form, "shard_megabytes": 0.004 if form == "mds" else 0.02, "validation_fraction": 0.3}
    source = write_tree(tmp_path / "tree", SAMPLES)
    monkeypatch.setattr(command, "STATE_SECONDS", 0)
    monkeypatch.setattr(command, "STATE_SHARE", math.inf)
    monkeypatch.setattr("matmix.data.prepare.base.ListedSource.chunk", 3)
    with monkeypatch.context() as patch:
        count = interrupt_at(patch, 0)
        expected = contents(prepare(source, tmp_path / "whole", **options))
    assert sum("shard" in name for name in expected) > 3
    for number in range(1, count() + 1, 6):
        for at in (number, 4):
            with monkeypatch.context() as patch:
                interrupt_at(patch, at)
                with pytest.raises(Interruption):
                    prepare(source, tmp_path / f"{number}", **options)
        out = prepare(source, tmp_path / f"{number}", processes=2 if number == 7 else 1, **options)
        assert contents(out) == expected


def test_the_same_again_does_nothing_and_other_options_are_refused(tmp_path, capfd):
    source = write_tree(tmp_path / "tree", SAMPLES)
    before = contents(prepare(source, tmp_path / "out"))
    prepare(source, tmp_path / "out", max_corrupt=0.5)
    assert "nothing to do" in capfd.readouterr().out
    with pytest.raises(ValueError, match="short_side 0 there, 8 here"):
        prepare(source, tmp_path / "out", short_side=8)
    (source / "cat" / "cat-new.png").write_bytes(SAMPLES[0][2])
    with pytest.raises(ValueError, match="other inputs"):
        prepare(source, tmp_path / "out")
    assert contents(tmp_path / "out") == before


def test_other_libraries_read_the_shards(tmp_path):
    import webdataset
    from streaming import StreamingDataset

    source = write_tree(tmp_path / "tree", SAMPLES)
    out = prepare(source, tmp_path / "mds")
    read = StreamingDataset(local=str(out / "train"), shuffle=False, batch_size=1)
    assert sorted((int(s["label"]), s["image"]) for s in (read[i] for i in range(len(read)))) == everything()
    out = prepare(source, tmp_path / "wds", format="webdataset")
    read = webdataset.WebDataset(str(out / "train" / "shard-00000.tar"), shardshuffle=False)
    assert sorted((int(s["cls"]), s["png"]) for s in read) == everything()


def test_pictures_are_not_read_as_text(tmp_path):
    out = prepare(write_tree(tmp_path / "tree", SAMPLES), tmp_path / "out")
    with pytest.raises(ValueError, match=r"holds pictures, not text; name it as data\.images\.path"):
        open_dataset(str(out))


def test_digits_of_a_package(tmp_path):
    out = prepare("sklearn:digits", tmp_path / "out")
    assert Manifest.load(out).splits["train"].documents == 1797
    label, data = held(out)[0]
    assert decode(data, channels=1).size == (8, 8)
    assert 0 <= label <= 9

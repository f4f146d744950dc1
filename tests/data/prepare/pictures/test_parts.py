"""Pictures prepared in parts, as several machines make them, and joined: the same as in one go."""

import shlex

import numpy as np
import pytest
from nightly import nightly
from pictures import encoded, pixels, prepare, samples, write_tar, write_tree

from matmix.data.formats.base import unpack
from matmix.data.manifest import Manifest
from matmix.data.prepare.base import BrokenInputError
from matmix.data.prepare.merge import merge
from matmix.data.prepare.pictures.preparation import PicturePreparation
from matmix.data.splits.reader import open_split
from matmix.launch.cli import main

OPTIONS = {"validation_fraction": 0.3, "shard_megabytes": 0.004, "max_corrupt": 0.1}


def join(out, most_broken=0.1, **options):
    return merge(str(out), PicturePreparation, most_broken=most_broken, **options)


def in_order(path, split):
    """Class and file of all pictures of a split, in the order of the dataset."""
    shards = open_split(str(path), split)
    places = [(s, i) for s in range(shards.n_shards) for i in range(len(shards.lengths(s)))]
    return [(label, bytes(data)) for data, label in (unpack(shards.read(*place)) for place in places)]


def facts(path):
    """What the manifest says that must not depend on parts."""
    manifest = Manifest.load(path)
    return manifest.images, manifest.sources, manifest.malformed, manifest.options


@pytest.fixture
def source(tmp_path):
    """A folder of classes with a corrupt picture, and a .tar file of the same classes."""
    tree = write_tree(tmp_path / "tree", [*samples(), ("bad", 1, encoded(pixels(0))[:40])])
    named = [
        (f"{name}.{kind}", data)
        for name, label, png in samples(3)
        for kind, data in (("png", png[:-1] + b"\0"), ("cls", ("cat", "dog", "owl")[label].encode()))
    ]
    return f"{tree}", f"{write_tar(tmp_path / 'b.tar', named)}"


def make(source, out, *, part="", **options):
    return prepare(source[0], out, part=part, **{"validation": (), **OPTIONS, **options})


@pytest.mark.parametrize(
    ("of", "form", "held_out"), [(9, "mds", False), (3, "webdataset", True), nightly(27, "mds", False)]
)
def test_joined_parts_are_the_whole(source, tmp_path, of, form, held_out, capfd):
    """Also with parts without pictures for training (by night, more parts than pictures), and held-out sources."""
    options = {"format": form}
    if held_out:
        options |= {"validation": source[1:], "validation_fraction": 0.0}
    whole = make(source, tmp_path / "whole", **options)
    for number in [2, 1, *range(3, of + 1)]:
        make(source, tmp_path / "out", part=f"{number}/{of}", **options)
    assert main(["prepare-images", "--merge", "--out", str(tmp_path / "out"), "--max-corrupt", "0.1"]) == 0
    assert "corrupt     1 of " in capfd.readouterr().out
    assert facts(tmp_path / "out") == facts(whole)
    for split in ("train", "validation"):
        assert in_order(tmp_path / "out", split) == in_order(whole, split)
    assert not (tmp_path / "out" / "parts").exists()
    make(source, tmp_path / "out", part=f"1/{of}", **options)
    join(tmp_path / "out")
    assert capfd.readouterr().out.count("nothing to do") == 2


def test_missing_and_damaged_parts_are_named_with_a_command_that_makes_them(source, tmp_path):
    out = tmp_path / "out"
    make(source, out, part="2/3")
    with pytest.raises(ValueError, match=r"2 of 3 parts are not finished: 1, 3; make each with: ") as error:
        join(out)
    words = shlex.split(str(error.value).split("make each with: ")[1])
    assert words[:2] == ["matmix", "prepare-images"]
    assert main(words[1:]) == 0
    assert main([*words[1:-1], "3/3"]) == 0
    with pytest.raises(BrokenInputError, match="1 of 25 pictures are corrupt"):
        join(out, 0.01)
    np.save(out / "parts" / "part-00002-of-00003" / "sums.npy", np.zeros(2, np.int64))
    with pytest.raises(ValueError, match=r"part-00002-of-00003/sums.npy is missing, damaged or was changed; delete"):
        join(out)
    assert main(["prepare", "--merge", "--out", str(out)]) == 2


MISTAKES = [
    (["{tree}", "--out", "{out}", "--part", "4/3"], "part must be k/n with a k from 1 to n"),
    (["{tree}", "--out", "s3://bucket/x", "--part", "1/2"], "parts are made in a folder that all machines share"),
    (["--merge", "--out", "{out}/nothing"], "holds no parts; make each with matmix prepare-images"),
    (["--merge"], "no output folder given"),
    (["{tree}", "--merge", "--out", "{out}"], "the parts know their input"),
    (["--merge", "--out", "{out}", "--quality", "3"], "leave --quality out"),
    (["--dry-run", "--out", "{out}"], "--dry-run shows the parts"),
]


def test_mistakes_are_one_line(source, tmp_path, capsys):
    for words, said in MISTAKES:
        capsys.readouterr()
        filled = [word.format(tree=source[0], out=tmp_path / "out") for word in words]
        assert main(["prepare-images", *filled]) == 2, words
        error = capsys.readouterr().err
        assert error.count("\n") == 1, error
        assert said in error

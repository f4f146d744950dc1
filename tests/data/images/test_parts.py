"""Pictures prepared in parts, as several machines make them, and joined: the same as in one go."""

import json
import os
import shlex
import shutil

import numpy as np
import pytest
from pictures import encoded, pixels, prepare, samples, write_tar, write_tree

from matmix.data.formats.base import unpack
from matmix.data.images.prepare import command
from matmix.data.images.prepare.parts import merge_images
from matmix.data.images.prepare.report import CorruptError
from matmix.data.manifest import Manifest
from matmix.data.splits.reader import open_pictures
from matmix.launch.cli import main

OPTIONS = {"validation_fraction": 0.3, "shard_megabytes": 0.004, "max_corrupt": 0.1}


def in_order(path, split):
    """Class and file of all pictures of a split, in the order of the dataset."""
    shards = open_pictures(str(path), split)
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
    return prepare(source[0], out, part=part, validation=(), **{**OPTIONS, **options})


def parts_of(source, out, of, numbers=None, **options):
    for number in numbers or range(1, of + 1):
        make(source, out, part=f"{number}/{of}", **options)


@pytest.mark.parametrize(("of", "form"), [(3, "mds"), (4, "webdataset"), (27, "mds")])
def test_joined_parts_are_the_whole(source, tmp_path, of, form, capfd):
    """Also with more parts than pictures, some of them without any, or with none for training."""
    whole = make(source, tmp_path / "whole", format=form)
    numbers = [2, 1, *range(3, of + 1)]
    parts_of(source, tmp_path / "out", of, numbers, format=form)
    assert main(["prepare-images", "--merge", "--out", str(tmp_path / "out"), "--max-corrupt", "0.1"]) == 0
    assert "1 of 25 pictures were left out" in capfd.readouterr().out
    assert facts(tmp_path / "out") == facts(whole)
    for split in ("train", "validation"):
        assert in_order(tmp_path / "out", split) == in_order(whole, split)
    assert not (tmp_path / "out" / "parts").exists()
    make(source, tmp_path / "out", part=f"1/{of}", format=form)
    merge_images(str(tmp_path / "out"))
    assert capfd.readouterr().out.count("nothing to do") == 2


def test_parts_of_several_sources(source, tmp_path):
    def several(out, **options):
        return command.prepare_images(
            command.PrepareImagesConfig(
                sources=source[:1], validation=source[1:], out=str(out), processes=1, max_corrupt=0.1, **options
            )
        )

    several(tmp_path / "whole")
    for number in (3, 1, 2):
        several(tmp_path / "out", part=f"{number}/3")
    merge_images(str(tmp_path / "out"), max_corrupt=0.1)
    assert facts(tmp_path / "out") == facts(tmp_path / "whole")
    for split in ("train", "validation"):
        assert in_order(tmp_path / "out", split) == in_order(tmp_path / "whole", split)


class Interruption(BaseException):
    pass


def interrupt(monkeypatch, at):
    """Fails at a rename; what it returns counts them."""
    rename, calls = os.replace, []

    def failing(a, b):
        calls.append(a)
        if len(calls) == at:
            raise Interruption
        rename(a, b)

    monkeypatch.setattr(os, "replace", failing)
    return calls


def test_parts_and_merges_that_were_stopped_go_on(source, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "STATE_SECONDS", 0)
    monkeypatch.setattr(command, "STATE_SHARE", float("inf"))
    monkeypatch.setattr("matmix.data.images.prepare.base.Source.chunk", 3)
    parts_of(source, tmp_path / "made", 2)
    shutil.copytree(tmp_path / "made", tmp_path / "whole")
    with monkeypatch.context() as patch:
        renames = interrupt(patch, 0)
        merge_images(str(tmp_path / "whole"), max_corrupt=0.1)
    for at in range(1, len(renames) + 1, 4):
        out = tmp_path / f"merged-{at}"
        shutil.copytree(tmp_path / "made", out)
        with monkeypatch.context() as patch:
            interrupt(patch, at)
            with pytest.raises(Interruption):
                merge_images(str(out), max_corrupt=0.1)
        merge_images(str(out), max_corrupt=0.1)
        assert in_order(out, "train") == in_order(tmp_path / "whole", "train")
        assert facts(out) == facts(tmp_path / "whole")
    for at in (2, 5, 9):
        out = tmp_path / f"part-{at}"
        with monkeypatch.context() as patch:
            interrupt(patch, at)
            with pytest.raises(Interruption):
                make(source, out, part="2/2")
        parts_of(source, out, 2)
        merge_images(str(out), max_corrupt=0.1)
        assert facts(out) == facts(tmp_path / "whole")


def test_missing_parts_are_named_with_a_command_that_makes_them(source, tmp_path, capsys):
    out = tmp_path / "out"
    parts_of(source, out, 3, [2])
    capsys.readouterr()
    assert merge_images(str(out), dry_run=True) is None
    assert [line.split("  ")[1].split(",")[0] for line in capsys.readouterr().out.splitlines()] == [
        "not begun", "finished", "not begun",
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"2 of 3 parts are not finished: 1, 3; make each with: ") as error:
        merge_images(str(out))
    words = shlex.split(str(error.value).split("make each with: ")[1])
    assert words[:2] == ["matmix", "prepare-images"]
    assert main(words[1:]) == 0
    assert main([*words[1:-1], "3/3"]) == 0
    with pytest.raises(CorruptError, match="1 of 25 pictures are corrupt"):
        merge_images(str(out))
    assert merge_images(str(out), max_corrupt=0.1).images.classes == ("cat", "dog", "owl")


def change(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


HARM = {
    "shard": (lambda p: next(p.glob("train/shard*")).write_bytes(b"less"), "is missing or damaged; delete"),
    "lengths": (lambda p: np.save(p / "train/lengths.npy", np.zeros(2, np.uint32)), "lengths.npy is missing, damaged"),
    "no part.json": (lambda p: (p / "part.json").unlink(), "part.json is missing or damaged"),
    "other numbers": (lambda p: change(p / "part.json", statistics=[1, 2]), "part.json is missing or damaged"),
    "other place": (lambda p: change(p / "part.json", begin=9, end=17), "does not begin where the part before it ends"),
    "other count": (lambda p: change(p / "part.json", end=20), "does not agree with itself on its number of pictures"),
}


@pytest.mark.parametrize("case", HARM)
def test_parts_that_do_not_fit(case, source, tmp_path):
    harm, words = HARM[case]
    parts_of(source, tmp_path / "out", 3)
    harm(tmp_path / "out" / "parts" / "part-00002-of-00003")
    with pytest.raises(ValueError, match=words) as error:
        merge_images(str(tmp_path / "out"), max_corrupt=0.1)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out" / "train").exists()


def test_mistakes_are_one_line(source, tmp_path, capsys):
    out, other = str(tmp_path / "out"), str(tmp_path / "other")
    parts_of(source, tmp_path / "out", 3, [1])
    make(source, tmp_path / "other")
    tree = [source[0], "--out", out, "--validation-fraction", "0.3", "--shard-megabytes", "0.004"]
    cases = [
        ([*tree, "--part", "2/4"], "is prepared in 3 parts; give --part k/3"),
        ([*tree, "--part", "4/3"], "part must be k/n with a k from 1 to n"),
        ([*tree, "--part", "2/3", "--short-side", "8"], "holds another preparation (short_side 0 there, 8 here)"),
        (tree, "holds parts of a preparation"),
        ([source[0], "--out", other, "--part", "1/2", "--short-side", "8"], "holds another preparation"),
        ([source[0], "--out", "s3://bucket/x", "--part", "1/2"], "parts are made in a folder that all machines share"),
        (["--merge", "--out", str(tmp_path / "nothing")], "holds no parts; make each with matmix prepare-images"),
        (["--merge"], "no output folder given"),
        ([source[0], "--merge", "--out", out], "the parts know their sources"),
        (["--merge", "--out", out, "--quality", "3"], "leave --quality out"),
        (["--dry-run", "--out", out], "--dry-run shows the parts"),
    ]
    for words, said in cases:
        capsys.readouterr()
        assert main(["prepare-images", *words]) == 2, words
        error = capsys.readouterr().err
        assert error.count("\n") == 1, error
        assert said in error
    assert main(["prepare", "--merge", "--out", out]) == 2
    assert "holds parts of matmix prepare-images" in capsys.readouterr().err

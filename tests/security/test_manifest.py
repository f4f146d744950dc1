"""A manifest cannot name files outside of its dataset, nor say what nobody would prepare, nor be edited unnoticed."""

from __future__ import annotations

import itertools
import json
import shutil

import numpy as np
import pytest
from failures import each
from folders import contents
from hostile_data import edit_manifest, prepared
from manifests import set_value

from matmix.data.config import DataConfig
from matmix.data.manifest import Manifest
from matmix.data.modalities import build_loader
from matmix.data.splits.reader import open_dataset


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("manifest"))


@pytest.fixture
def path(original, tmp_path):
    return shutil.copytree(original, tmp_path / "home" / "set" / "data")


def loader_of(where, cache):
    config = DataConfig(path=str(where), seqlen=16, workers=0, cache_dir=str(cache))
    return build_loader(config, global_batch_size=2, micro_batch_size=2)


def rename(split, to):
    def change(manifest):
        manifest["splits"][to] = manifest["splits"].pop(split)

    return change


CLIMBING = ["../../../../x", "/tmp/x", "a/../../x", "..", "x\n", "x\0", ""]


@pytest.mark.parametrize("remote", [False, True])
@each("name", CLIMBING, fresh="path")
def test_no_name_in_it_leads_out_of_the_cache(path, tmp_path, name, remote):
    (path.parent / "x").write_text("planted")
    (path.parent.parent / "x").write_text("planted")
    changes = [
        set_value("token_histogram", name),
        set_value("tokenizer", "file", name),
        set_value("splits", "train", "shards", 0, "file", name),
        rename("train", name),
        set_value("files", {name: "0" * 64}),
    ]
    whole = path / "manifest.json"
    text = whole.read_text()
    for change in changes:
        whole.write_text(text)
        edit_manifest(path, change)
        before = contents(tmp_path)
        with pytest.raises(ValueError, match="names the file") as raised:
            loader_of(path.as_uri() if remote else path, tmp_path / "home" / "cache").token_histogram  # noqa: B018
        assert "\n" not in str(raised.value)
        assert contents(tmp_path) == before
        with pytest.raises(ValueError, match="names the file"):
            Manifest.load(path)


@each(
    "change",
    [
        set_value("splits", "train", "shards", 0, "tokens", -1),
        set_value("splits", "train", "shards", 0, "tokens", 1.5),
        set_value("splits", "train", "shards", 0, "tokens", True),
        set_value("splits", "train", "shards", 0, "documents", 10**30),
        set_value("splits", "train", "shards", 0, "sha256", "A" * 64),
        set_value("splits", "train", "shards", 0, "sha256", ["0" * 64]),
        set_value("splits", "train", "shards", 0, "raw_bytes", 1 << 40),
        set_value("splits", "train", "shards", {}),
        set_value("splits", "train", "shards", [5]),
        set_value("splits", []),
        set_value("splits", "train", "bytes", "many"),
        set_value("splits", "train", "unknown\n\x1b[2J", 1),
        set_value("dtype", "float64"),
        set_value("dtype", ["uint16"]),
        set_value("format", None),
        set_value("tokenizer", "kind", "pickle"),
        set_value("tokenizer", "vocab_size", 0),
        set_value("tokenizer", "vocab_size", 10**12),
        set_value("tokenizer", "special", "eos", 300),
        set_value("tokenizer", "special", "eos", -1),
        set_value("tokenizer", "special", "eos", "3"),
        set_value("tokenizer", "special", [3]),
        set_value("unigram_entropy", float("nan")),
        set_value("unigram_entropy", 10**400),
        set_value("empty_documents", None),
        set_value("malformed", {"count": 1, "records": 1, "examples": [{"file": 5}]}),
        set_value("sources", ["x"]),
        set_value("options", []),
        set_value("files", {"train/lengths.npy": "x"}),
        set_value("version", True),
        set_value("surprise", 1),
    ],
    fresh="path",
)
def test_what_nobody_would_prepare_is_one_line(path, tmp_path, change):
    edit_manifest(path, change)
    for read in (lambda: open_dataset(str(path)), lambda: Manifest.load(path)):
        with pytest.raises(ValueError, match=r"manifest") as raised:
            read()
        assert str(raised.value).isprintable()


@each("text", ["[" * 100_000, '{"version":' * 50_000, "[]", "5", "\x00", "{}", '{"version": {}}'], fresh="path")
def test_a_manifest_that_is_none_is_one_line(path, text):
    (path / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match="manifest") as raised:
        open_dataset(str(path))
    assert "\n" not in str(raised.value)


def test_links_in_a_dataset_lead_nowhere(path, tmp_path):
    shard = next(path.glob("train/*.zstd"))
    shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="is a link"):
        open_dataset(str(path))


def test_every_single_edit_of_the_text_is_noticed(path):
    """Each bit of each byte: an error, or the same contents."""
    file = path / "manifest.json"
    raw, whole = file.read_bytes(), Manifest.load(path)
    draw = np.random.default_rng(0)
    passed = 0
    for position in draw.choice(len(raw), min(len(raw), 1500), replace=False):
        changed = bytearray(raw)
        changed[position] ^= 1 << int(draw.integers(8))
        try:
            found = Manifest.parse(bytes(changed), "here")
        except ValueError:
            continue
        assert found == whole  # white space, or a last digit of a float
        passed += 1
    assert passed < 30


EDITS = {
    "special.eos": set_value("tokenizer", "special", "eos", 2),
    "bytes": set_value("splits", "train", "bytes", 7),
}


@each("name", EDITS, fresh="path")
def test_an_edit_by_hand_does_not_pass(path, tmp_path, name):
    """The manifest is refused; with a digest that fits, no position is taken up with it."""
    loader = loader_of(path, tmp_path / "cache")
    list(itertools.islice(iter(loader), 2))
    state = json.loads(json.dumps(loader.state_dict()))
    loader_of(path, tmp_path / "cache").load_state_dict(state)
    edit_manifest(path, EDITS[name], sign=False)
    with pytest.raises(ValueError, match="was changed after it was written"):
        loader_of(path, tmp_path / "cache")
    edit_manifest(path, EDITS[name])
    with pytest.raises(ValueError, match=rf"other data: manifest\.{name} was \d+ and is now \d+;") as raised:
        loader_of(path, tmp_path / "cache").load_state_dict(state)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["train/lengths.npy", "train/index.json", "token_histogram.npy"])
def test_changed_small_files_are_named(path, tmp_path, name):
    raw = bytearray((path / name).read_bytes())
    raw[-5] ^= 1
    (path / name).write_bytes(raw)

    def use():
        open_dataset(str(path)).read(0, 0)
        loader_of(path, tmp_path / "cache")

    with pytest.raises(ValueError, match=rf"{name} has another SHA-256"):
        use()

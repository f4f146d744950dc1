"""Tokens that other programs wrote, indexed and read where they lie."""

import itertools
import json
import re
import shutil
import struct

import numpy as np
import pytest
import token_files
from failures import each
from folders import contents
from paths import GOLDEN
from runs import losses, run_recipe
from token_files import END, write_flat, write_litdata, write_llm_c, write_mds, write_megatron

from matmix.data import arrays
from matmix.data.config import DataConfig
from matmix.data.formats.base import DamagedShard
from matmix.data.indexing import command, stretches
from matmix.data.manifest import Manifest
from matmix.data.modalities import build_loader
from matmix.data.splits.reader import open_dataset
from matmix.launch.cli import main

TEXTS = token_files.documents(90)


def with_end(texts):
    return [[[*text, END]] for text in texts]


def halves(texts):
    """Documents of two sequences each, without an end token."""
    return [[text[: len(text) // 2], text[len(text) // 2 :]] for text in texts]


def mds(folder, encoding, dtype):
    write_mds(folder / "train", TEXTS[:60], encoding, dtype)
    write_mds(folder / "val", TEXTS[60:], encoding, dtype)


def litdata(folder, dtype, number):
    write_litdata(folder / "train", TEXTS[:60], dtype, number)
    write_litdata(folder / "val", TEXTS[60:], dtype, number)


LAYOUTS = {
    "megatron": ("megatron", lambda f: write_megatron(f / "a_text_document.bin", with_end(TEXTS)), {}),
    "sequences": ("megatron", lambda f: write_megatron(f / "a.bin", halves(TEXTS), "int32"), {}),
    "nanogpt": (
        "flat",
        lambda f: [write_flat(f / "train.bin", TEXTS[:60]), write_flat(f / "val.bin", TEXTS[60:])],
        {"validation": "val.bin"},
    ),
    "olmo": ("flat", lambda f: write_flat(f / "part-0" / "a.npy", TEXTS, "<u4"), {"dtype": "uint32"}),
    "numpy": ("flat", lambda f: write_flat(f / "a.npy", TEXTS, "<i4", header=True), {}),
    "llm.c": ("flat", lambda f: write_llm_c(f / "a.bin", TEXTS), {}),
    "llm.c, llama": ("flat", lambda f: write_llm_c(f / "a.bin", TEXTS, "<u4"), {}),
    "litdata": ("litdata", lambda f: litdata(f, "<u2", "no_header_numpy:5"), {"validation": "val"}),
    "litdata, torch": ("litdata", lambda f: write_litdata(f, TEXTS, "<i8", "no_header_tensor:18"), {}),
    "llm-foundry": ("mds", lambda f: mds(f, "bytes", "<i8"), {"validation": "val"}),
    "mds": ("mds", lambda f: mds(f, "ndarray:int32", "int32"), {"validation": "val/"}),
}


@pytest.fixture(autouse=True)
def small_stretches(monkeypatch):
    monkeypatch.setattr(stretches, "STRETCH_BYTES", 700)


def indexed(folder, layout="megatron", **options):
    tokenizer = token_files.write_tokenizer(folder / "tokenizer")
    return command.index(str(folder), format=layout, tokenizer=str(tokenizer), **options)


def read_all(folder, split):
    shards = open_dataset(str(folder), split)
    return [shards.read(s, i).tolist() for s in range(shards.n_shards) for i in range(len(shards.lengths(s)))]


@each("name", LAYOUTS)
def test_the_documents_are_those_of_the_files_which_stay_as_they_are(name, tmp_path, capsys):
    layout, write, options = LAYOUTS[name]
    write(tmp_path)
    before = contents(tmp_path)
    if "validation" not in options:
        options = {**options, "validation_fraction": 0.2}
    manifest = indexed(tmp_path, layout, **options)
    assert contents(tmp_path).items() >= before.items()
    train, validation = (read_all(tmp_path, split) for split in ("train", "validation"))
    if "validation" in options:
        assert (train, validation) == (TEXTS[:60], TEXTS[60:])
    else:
        assert 3 < len(validation) < 40
        assert sorted(train + validation) == sorted(TEXTS)
        assert train == [text for text in TEXTS if text not in validation]  # in the order of the file
    words = [" ".join(f"w{token}" for token in text) for text in train]
    assert manifest.splits["train"].bytes == sum(map(len, words))
    counts = np.bincount(list(itertools.chain(*train)), minlength=token_files.VOCAB_SIZE)
    assert np.load(tmp_path / "token_histogram.npy").tolist() == counts.tolist()
    assert len(manifest.splits["train"].shards) > 3
    made = contents(tmp_path)
    indexed(tmp_path, layout, **options)
    assert "nothing to do" in capsys.readouterr().out
    assert contents(tmp_path) == made


def test_chunks_that_litdata_wrote(tmp_path):
    """`optimize(..., chunk_bytes=64, item_loader=TokensLoader())` of litdata 0.2.76 wrote five documents."""
    shutil.copytree(GOLDEN / "litdata", tmp_path, dirs_exist_ok=True)
    indexed(tmp_path, "litdata", validation_fraction=0.0)
    assert read_all(tmp_path, "train") == token_files.documents(5, longest=12)
    written = {path.name: path.read_bytes() for path in (GOLDEN / "litdata").glob("*.bin")}
    write_litdata(tmp_path / "own", token_files.documents(5, longest=12), "<u2", "no_header_numpy:5")
    own = (tmp_path / "own/chunk-0-0.bin").read_bytes()
    assert own[28:] == written["chunk-0-0.bin"][20:] + written["chunk-0-1.bin"][16:]


def test_batches_are_those_of_a_prepared_dataset_on_any_ranks(tmp_path, data, monkeypatch):
    monkeypatch.setattr(stretches, "STRETCH_BYTES", 1 << 20)
    prepared = data.write(tmp_path / "prepared", TEXTS, format="webdataset", shard_documents=1000)
    write_megatron(tmp_path / "m" / "a.bin", with_end(TEXTS))
    indexed(tmp_path / "m", validation_fraction=0.0)
    write_flat(tmp_path / "f" / "a.bin", TEXTS)
    indexed(tmp_path / "f", "flat", validation_fraction=0.0)

    def rows(path, world=1, **options):
        config = DataConfig(path=str(path), seqlen=24, workers=0, **options)
        sizes = {"global_batch_size": 8, "micro_batch_size": 4, "data_size": world}
        loaders = [iter(build_loader(config, data_rank=rank, **sizes)) for rank in range(world)]
        for _ in range(12):
            for loader in loaders:
                for batch in itertools.islice(loader, 2 // world):
                    yield batch.input_ids.tolist(), batch.labels.tolist()

    for options in ({}, {"packing": "document"}):
        expected = list(rows(prepared, **options))
        for path, world in (("m", 1), ("m", 2), ("f", 1)):
            assert list(rows(tmp_path / path, world, **options)) == expected


def damage(folder, name):
    path = folder / "a.bin"
    raw = path.read_bytes()
    if name == "missing":
        path.unlink()
    else:
        path.write_bytes({"longer": raw + b"\x07\x00", "flipped": raw[:900] + b"\x08\x00" + raw[902:]}[name])


@each(
    "name, expected",
    [
        ("longer", r"a\.bin from byte 0 has \d+ bytes instead of \d+.*run `matmix index` again"),
        ("flipped", r"a\.bin from byte \d+ has another SHA-256 than its index says.*run `matmix index` again"),
        ("missing", r"a\.bin from byte 0 is missing"),
    ],
)
def test_files_that_change_after_indexing_are_named(name, expected, tmp_path):
    write_megatron(tmp_path / "a.bin", with_end(TEXTS))
    indexed(tmp_path, validation_fraction=0.0)
    damage(tmp_path, name)
    with pytest.raises((DamagedShard, FileNotFoundError), match=expected):
        read_all(tmp_path, "train")
    if name == "flipped":  # one stretch is left out, the others are read
        shards = open_dataset(str(tmp_path), skip_damaged=True)
        unread = 0
        for shard in range(shards.n_shards):
            try:
                shards.opened(shard)
            except DamagedShard:
                unread += 1
        assert unread == 1 < shards.n_shards
        write_megatron(tmp_path / "a.bin", [*with_end(TEXTS), [[9, END]]])
        with pytest.raises(ValueError, match="of these files before they were changed; delete"):
            indexed(tmp_path, validation_fraction=0.0)


def _index_of(folder, change):
    path = write_megatron(folder / "a.bin", with_end(TEXTS)).with_suffix(".idx")
    path.write_bytes(change(path.read_bytes()))


def _append(path, more=b"\x07\x00"):
    path.write_bytes(path.read_bytes() + more)


def _twice(folder):
    write_megatron(folder / "a.bin", with_end(TEXTS))
    write_megatron(folder / "b.bin", with_end(TEXTS), "int32")


def _litdata(folder, change=None, *, chunk=None):
    """change: of the object in index.json; chunk: of the bytes of the first chunk."""
    write_litdata(folder, TEXTS, "<u2", "no_header_numpy:5")
    index = json.loads((folder / "index.json").read_text())
    if change:
        change(index["config"], index["chunks"])
    (folder / "index.json").write_text(json.dumps(index))
    if chunk:
        path = folder / "chunk-0-0.bin"
        path.write_bytes(chunk(path.read_bytes()))


BAD = {
    "litdata, zstd": (
        "litdata",
        lambda f: _litdata(f, lambda config, _: config.update(compression="zstd")),
        "its chunks have the compression 'zstd': write them without",
    ),
    "litdata, pytree": (
        "litdata",
        lambda f: _litdata(f, lambda config, chunks: [chunk.update(dim=None) for chunk in chunks]),
        "no lists of ids as of litdata's TokensLoader, but no_header_numpy:5",
    ),
    "litdata, loader": (
        "litdata",
        lambda f: _litdata(f, lambda config, _: config.update(item_loader="ParquetLoader")),
        "no lists of ids as of litdata's TokensLoader",
    ),
    "litdata, floats": (
        "litdata",
        lambda f: _litdata(f, lambda config, _: config.update(data_format=["no_header_tensor:0"])),
        "its ids are no_header_tensor:0 of litdata, no dtype of token ids",
    ),
    "litdata, damaged index": ("litdata", lambda f: _litdata(f, lambda config, _: config.clear()), "none of litdata"),
    "litdata, other dtype": (
        "litdata",
        lambda f: _litdata(f, lambda config, _: config.update(data_format=["no_header_tensor:16"])),
        r"chunk-0-0\.bin (is damaged: its items|does not hold)",
    ),
    "litdata, cut": ("litdata", lambda f: _litdata(f, chunk=lambda raw: raw[:-2]), "do not lie one after another"),
    "litdata, lacking": ("litdata", lambda f: _litdata(f, lambda _, c: c.pop(0)), "no chunk that the index.json"),
    "litdata, missing": (
        "litdata",
        lambda f: _litdata(f, lambda _, c: c.append({**c[0], "filename": "chunk-9-0.bin"})),
        r"lists chunk-9-0\.bin, which is not there",
    ),
    "litdata, elsewhere": (
        "litdata",
        lambda f: _litdata(f, lambda _, c: c.append({**c[0], "filename": "../a.bin"})),
        "has a separator",
    ),
    "litdata, no index": ("litdata", lambda f: write_flat(f / "a.bin", TEXTS), r"has no index\.json beside it"),
    "idx and bin": (
        "megatron",
        lambda f: _append(write_megatron(f / "a.bin", with_end(TEXTS))),
        r"a\.idx disagrees with a\.bin: it describes [\d,]+ bytes, there are",
    ),
    "no idx": ("megatron", lambda f: write_flat(f / "a.bin", TEXTS), r"has no a\.idx beside it"),
    "cut idx": ("megatron", lambda f: _index_of(f, lambda raw: raw[:-8]), r"a\.idx has [\d,]+ bytes instead of"),
    "other file": ("megatron", lambda f: _index_of(f, lambda raw: b"P" + raw[1:]), "does not begin with MMIDIDX"),
    "version": ("megatron", lambda f: _index_of(f, lambda raw: raw[:9] + struct.pack("<Q", 2) + raw[17:]), "version 2"),
    "last document": (
        "megatron",
        lambda f: _index_of(f, lambda raw: raw[:-8] + struct.pack("<q", 5)),
        "its documents do not cover its 90 sequences in order",
    ),
    "pointers": (
        "megatron",
        lambda f: _index_of(f, lambda raw: raw[:402] + struct.pack("<q", 2) + raw[410:]),
        "do not lie one after another",
    ),
    "pictures": ("megatron", lambda f: write_megatron(f / "a.bin", with_end(TEXTS), "uint8"), "holds uint8, which is"),
    "ids": (
        "megatron",
        lambda f: write_megatron(f / "a.bin", [*with_end(TEXTS), [[9, 97]]]),
        r"a\.bin: the document at byte [\d,]+ holds the id 97, outside of the 97 ids",
    ),
    "negative ids": ("megatron", lambda f: write_megatron(f / "a.bin", [[[9, -1]]], "int32"), "holds the id -1"),
    "dtypes": ("megatron", _twice, r"b\.bin holds int32, and .*a\.bin uint16: index them in folders of their own"),
    "no end": (
        "flat",
        lambda f: (f / "a.bin").write_bytes(bytes([7, 0] * 50)),
        r"a\.bin does not hold the end token 3, so that its documents have no borders",
    ),
    "odd": ("flat", lambda f: (f / "a.bin").write_bytes(bytes([7, 0, 3, 0, 7])), "no whole number of uint16"),
    "llm.c, cut": (
        "flat",
        lambda f: _append(write_llm_c(f / "a.bin", TEXTS)),
        r"a\.bin begins with the mark of llm\.c",
    ),
    "llm.c, head": (
        "flat",
        lambda f: (f / "a.bin").write_bytes(struct.pack("<4i", 20240520, 3, 7, 3)),
        "version 3 and 7",
    ),
    "nothing": ("flat", lambda f: None, r"holds no \.bin or \.npy file"),
    "empty": ("flat", lambda f: (f / "a.bin").write_bytes(b""), "does not hold the end token"),
    "packed": ("mds", lambda f: (f / "shard.00000.mds.zstd").write_bytes(b"x"), "is compressed: decompress"),
    "no mds": ("mds", lambda f: (f / "a.mds").write_bytes(b"abcdefgh"), "no MDS shard"),
    "link": ("flat", lambda f: (f / "a.bin").symlink_to("/etc/hostname"), "is a link: put the file itself there"),
}


def say(capsys, *words):
    assert main(["index", *map(str, words)]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert len(errors) == 1
    return errors[0]


@each("name", BAD)
def test_bad_files_are_one_line_and_leave_nothing(name, tmp_path, capsys):
    layout, write, expected = BAD[name]
    folder = tmp_path / "in"
    folder.mkdir()
    write(folder)
    before = contents(folder) if name != "link" else None
    tokenizer = token_files.write_tokenizer(tmp_path / "tok")
    words = [folder, "--format", layout, "--tokenizer", tokenizer, "--validation-fraction", "0"]
    said = say(capsys, *words)
    assert re.search(expected, said), said
    if before is not None:
        assert contents(folder) == before


@each(
    "words, expected",
    [
        ([], "no folder given: matmix index DIR"),
        (["s3://bucket/a", "--format", "flat"], "in a folder of this machine"),
        (["{in}", "--format", "flat", "--out", "s3://bucket/a"], "an index lies in a folder of this machine"),
        (["{in}", "--format", "parquet"], "format must be one of megatron, flat, mds, litdata, got 'parquet'"),
        (["{in}", "--format", "flat"], "no --tokenizer is given"),
        (["{in}/nowhere", "--format", "flat"], "nowhere is no folder"),
        (["{in}", "--format", "flat", "--tokenizer", "{tok}", "--end", "97"], "outside of the 97 ids"),
        (["{in}", "--format", "flat", "--tokenizer", "{tok}", "--end", "eot"], "no end token 'eot'"),
        (["{in}", "--format", "flat", "--tokenizer", "{tok}", "--dtype", "float32"], "float32, which is none of"),
        (
            ["{in}", "--format", "flat", "--tokenizer", "{tok}", "--validation", "v*"],
            "matches the --validation pattern v*",
        ),
        (
            [
                "{in}",
                "--format",
                "flat",
                "--tokenizer",
                "{tok}",
                "--validation",
                "a.bin",
                "--validation-fraction",
                "0.1",
            ],
            "keep one of them",
        ),
        (
            ["{in}", "--format", "flat", "--tokenizer", "{tok}", "--validation-fraction", "1e-9"],
            "the validation split got none of the 90 documents",
        ),
    ],
)
def test_mistakes_are_one_line(words, expected, tmp_path, capsys):
    write_flat(tmp_path / "in" / "a.bin", TEXTS)
    tokenizer = token_files.write_tokenizer(tmp_path / "tok")
    assert expected in say(capsys, *(word.format(**{"in": tmp_path / "in", "tok": tokenizer}) for word in words))


def test_files_without_borders_and_of_validation_alone(tmp_path):
    (tmp_path / "a.bin").write_bytes(np.arange(7, 60, dtype="<u2").tobytes())
    manifest = indexed(tmp_path, "flat", end="none", validation="*")
    assert list(manifest.splits) == ["validation"]
    assert read_all(tmp_path, "validation") == [list(range(7, 60))]


def test_an_index_is_of_a_folder_here_and_its_borders_belong_to_a_saved_position(tmp_path):
    write_megatron(tmp_path / "a" / "a.bin", with_end(TEXTS))
    write_megatron(tmp_path / "b" / "a.bin", [[list(itertools.chain(*texts)) for texts in with_end(TEXTS)]])
    for name in "ab":
        indexed(tmp_path / name, validation_fraction=0.0)
    with pytest.raises(ValueError, match="copy its folder here"):
        open_dataset((tmp_path / "a").as_uri(), cache_dir=str(tmp_path / "cache"))
    (tmp_path / "a" / "train" / "starts.npy").write_bytes((tmp_path / "b" / "train" / "starts.npy").read_bytes())
    with pytest.raises(ValueError, match=r"train/starts\.npy has another SHA-256"):
        read_all(tmp_path / "a", "train")


OWN = ["token_histogram.npy", "train/lengths.npy", "validation/starts.npy", "tokenizer/tokenizer.json", "manifest.json"]


@each("name", [*OWN, "train"])
def test_files_of_others_with_the_names_of_an_index_stay(name, tmp_path):
    folder, tokenizer = tmp_path / "in", str(token_files.write_tokenizer(tmp_path / "words"))
    write_flat(folder / "a.npy", TEXTS)
    if name in OWN:
        write_flat(folder / name, TEXTS)
    else:
        (folder / name).touch()
    before = contents(folder)
    with pytest.raises(ValueError, match=rf"{name} (was not made by `matmix index`.*--out|is in the way)") as caught:
        command.index(str(folder), format="flat", tokenizer=tokenizer)
    assert "\n" not in str(caught.value)
    assert contents(folder) == before
    if not name.endswith(".npy"):  # these are tokens
        (folder / name).rename(tmp_path / "away")
    elif "/" in name:
        (folder / name).rename(folder / name.replace("/", "-"))
    command.index(str(folder), format="flat", tokenizer=tokenizer, out=str(tmp_path / "index"))


def test_a_prepared_dataset_needs_no_index(tmp_path, data):
    folder = data.write(tmp_path / "prepared", TEXTS, format="webdataset", shard_documents=1000)
    before = contents(folder)
    with pytest.raises(ValueError, match="holds a prepared dataset, which needs no index"):
        command.index(str(folder), format="mds", tokenizer=str(token_files.write_tokenizer(tmp_path / "t")))
    assert contents(folder) == before


@pytest.mark.parametrize("stop", ["train/lengths.npy", "validation/starts.npy", "manifest.json"])
def test_an_index_goes_on_after_a_stop_and_is_made_anew(stop, tmp_path, monkeypatch):
    folder, options = tmp_path / "in", {"format": "flat", "tokenizer": str(token_files.write_tokenizer(tmp_path / "t"))}
    write_flat(folder / "a.npy", TEXTS)

    def stopped(path, *rest, **more):
        if str(path).endswith(stop):
            raise KeyboardInterrupt
        return write(path, *rest, **more)

    for module in (arrays, command):
        write = module.write_atomic
        monkeypatch.setattr(module, "write_atomic", stopped)
    with pytest.raises(KeyboardInterrupt):
        command.index(str(folder), **options, validation_fraction=0.2)
    monkeypatch.undo()
    manifest = command.index(str(folder), **options, validation_fraction=0.2)
    assert [name for name, *_ in manifest.options["inputs"]] == ["a.npy"]
    write_flat(folder / "b.npy", TEXTS)  # of an index that is finished, too
    (folder / "manifest.json").unlink()
    command.index(str(folder), **options, validation_fraction=0.0)
    assert read_all(folder, "train") == TEXTS * 2
    assert not (folder / "validation" / "starts.npy").exists()


def test_an_index_in_another_folder_of_one_that_is_only_read(tmp_path, capsys, monkeypatch):
    folder, index = tmp_path / "shared", tmp_path / "mine" / "index"
    write_megatron(folder / "a.bin", with_end(TEXTS))
    before = contents(folder)
    words = [str(folder), "--format", "megatron", "--tokenizer", str(token_files.write_tokenizer(tmp_path / "t"))]
    words += ["--validation-fraction", "0"]
    monkeypatch.setattr(command.os, "access", lambda path, mode: path != folder)
    assert re.search(r"shared cannot be written to: name another folder for the index with --out", say(capsys, *words))
    for _ in range(2):
        assert main(["index", *words, "--out", str(index)]) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert contents(folder) == before
    assert read_all(index, "train") == TEXTS
    damage(folder, "flipped")
    shards = open_dataset(str(index), verify=False)  # it is compared all the same
    with pytest.raises(DamagedShard, match="another SHA-256"):
        [shards.opened(number) for number in range(shards.n_shards)]
    folder.rename(tmp_path / "moved")
    with pytest.raises(FileNotFoundError, match=rf"a\.bin from byte 0 is missing in {folder};"):
        open_dataset(str(index), skip_damaged=True)


@pytest.mark.slow  # imports streaming as a whole
@pytest.mark.parametrize("encoding", ["bytes", "ndarray:int32", "ndarray:uint16:9"])
def test_shards_by_streaming_itself(encoding, tmp_path):
    from streaming import MDSWriter

    texts = [(text * 9)[:9] for text in TEXTS] if encoding.endswith("9") else TEXTS
    dtype = encoding.split(":")[1] if ":" in encoding else "int64"
    with MDSWriter(columns={"id": "str", "tokens": encoding}, out=str(tmp_path / "a"), size_limit=3000) as writer:
        for number, text in enumerate(texts):
            ids = np.array(text, dtype)
            writer.write({"id": str(number), "tokens": ids.tobytes() if encoding == "bytes" else ids})
    indexed(tmp_path, "mds", validation_fraction=0.0)
    assert read_all(tmp_path, "train") == texts


@pytest.mark.slow
@pytest.mark.parametrize("name", ["megatron", "nanogpt"])
def test_a_run_resumes_exactly_and_refuses_another_index(name, tmp_path):
    layout, write, options = LAYOUTS[name]
    folder = tmp_path / "tokens"
    write(folder)
    indexed(folder, layout, **(options or {"validation_fraction": 0.2}))
    small = ["--data.seqlen", "16", "--model.dropout", "0", "--evaluation.every", "4"]
    run_recipe("debug_mru", str(folder), tmp_path / "whole", *small)
    run_recipe("debug_mru", str(folder), tmp_path / "halves", *small, "--stop-step", "4")
    run_recipe("debug_mru", str(folder), tmp_path / "halves", *small)
    assert losses(tmp_path / "halves") == losses(tmp_path / "whole")
    other = shutil.copytree(folder, tmp_path / "other")
    (other / "manifest.json").unlink()
    indexed(other, layout, validation_fraction=0.3)
    assert json.loads((other / "manifest.json").read_text())["format"] == "in_place"
    assert Manifest.load(other).splits["train"] != Manifest.load(folder).splits["train"]
    run_recipe("debug_mru", str(folder), tmp_path / "again", *small, "--stop-step", "4")
    with pytest.raises(ValueError, match="data"):
        run_recipe("debug_mru", str(other), tmp_path / "again", *small)

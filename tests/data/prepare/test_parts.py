"""Parts prepared apart and joined are the dataset that one preparation makes; nothing is lost, doubled or half read."""

import gzip
import json
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from failures import each
from folders import Interruption, contents, interrupt_at
from foreign import write_mds, write_tar
from nightly import nightly

from matmix.data.manifest import Manifest
from matmix.data.prepare import command as module
from matmix.data.prepare import merge as prepare_merge
from matmix.data.prepare.base import BrokenInputError
from matmix.data.prepare.command import prepare, prepare_shared
from matmix.data.prepare.merge import merge
from matmix.data.prepare.parts import missing_parts
from matmix.data.prepare.text import PrepareConfig, preparation, sources
from matmix.data.prepare.text.preparation import TextPreparation
from matmix.data.splits.reader import open_dataset
from matmix.data.tokenizer import Tokenizer

WORDS = [f"{a}{b}" for a in ("ki", "ra", "to", "mo", "lu") for b in ("n", "se", "m", "p")]
PARTS = 5


def texts(count, seed=0):
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, rng.integers(1, 40))) for _ in range(count)]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(sources, "CHUNK_BYTES", 700)
    monkeypatch.setattr("matmix.data.prepare.text.texts.REMEMBERED_BYTES", 1)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Files, and their parts in `out`."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "CHUNK_BYTES", 700)
        patch.setattr("matmix.data.prepare.text.texts.REMEMBERED_BYTES", 1)
        prepare_parts(write_inputs(folder / "in"), folder / "out")
    return folder


@pytest.fixture
def prepared(made, tmp_path):
    """A copy of the parts."""
    return shutil.copytree(made / "out", tmp_path / "prepared")


@pytest.fixture
def inputs(tmp_path):
    return write_inputs(tmp_path / "in")


def write_inputs(folder):
    """Files of seven kinds; three lines of 300 are malformed, the last in the middle of a file."""
    folder.mkdir()
    lines = [json.dumps({"text": t}) for t in texts(100)]
    (folder / "a.jsonl").write_text("\n".join([*lines[:70], "{", "[]", *lines[70:90], "not json", *lines[90:]]))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(lines[:50]).encode()))
    pq.write_table(pa.table({"text": texts(60, seed=1)}), folder / "c.parquet", row_group_size=11)
    table = pa.table({"text": texts(10, seed=3)})
    with pa.ipc.new_stream(str(folder / "c.arrow"), table.schema) as stream:
        stream.write_table(table, max_chunksize=3)
    rows = [{"text": text, "id": i} for i, text in enumerate(texts(20, seed=4))]
    write_mds(folder / "c2", rows, {"text": "str", "id": "int"}, zstd=True)
    write_tar(
        folder / "c3.tar",
        {f"{i}.{suffix}": text for i, text in enumerate(texts(30, seed=5)) for suffix in ("txt", "cls")},
    )
    (folder / "d.txt").write_text(" ".join(texts(20, seed=2)) + "\n")
    return folder


def options(inputs, out, **changes):
    chosen = {
        "inputs": (str(inputs),),
        "out": str(out),
        "vocab_size": 300,
        "validation_fraction": 0.2,
        "max_document_chars": 150,
        "max_malformed": 0.1,
        "shard_megabytes": 0.004,
        "processes": 1,
    }
    if "tokenizer" in changes:
        del chosen["vocab_size"]
    return PrepareConfig(**{**chosen, **changes})


def prepare_parts(inputs, out, numbers=range(1, PARTS + 1), **changes):
    for number in numbers:
        prepare(options(inputs, out, part=f"{number}/{PARTS}", **changes))


def join(out, most_broken=0.1, **changes):
    return merge(str(out), TextPreparation, most_broken=most_broken, **changes)


def documents(folder, split):
    shards = open_dataset(str(folder), split)
    return [shards.read(s, i).tolist() for s in range(shards.n_shards) for i in range(len(shards.lengths(s)))]


@pytest.mark.parametrize(
    ("kind", "compression"), [("mds", "zstd"), ("webdataset", "none"), nightly("webdataset", "zstd")]
)
def test_joined_parts_are_the_whole(tmp_path, inputs, kind, compression):
    chosen = {"format": kind, "compression": compression}
    if kind == "webdataset":
        chosen["shard_megabytes"] = 0.012
    whole = prepare(options(inputs, tmp_path / "whole", **chosen))
    prepare_parts(inputs, tmp_path / "out", (4, 1, 5, 3, 2), **chosen)
    joined = join(tmp_path / "out")
    for split in ("train", "validation"):
        assert documents(tmp_path / "out", split) == documents(tmp_path / "whole", split)
        assert len(joined.splits[split].shards) > 3
        assert (tmp_path / "out" / split / "lengths.npy").read_bytes() == (
            tmp_path / "whole" / split / "lengths.npy"
        ).read_bytes()
    histograms = [np.load(tmp_path / name / "token_histogram.npy") for name in ("whole", "out")]
    assert np.array_equal(*histograms)
    same = ("format", "compression", "dtype", "tokenizer", "unigram_entropy", "sources", "malformed", "empty_documents")
    for name in (*same, "options"):
        assert getattr(joined, name) == getattr(whole, name), name
    assert whole.malformed["count"] == 3
    assert {p.name for p in (tmp_path / "out").iterdir()} == {p.name for p in (tmp_path / "whole").iterdir()}
    # The libraries read it as well, and asking for a part, for the whole or for joining again changes nothing.
    check_with_library(tmp_path / "out", kind, compression, joined)
    before = contents(tmp_path / "out")
    prepare_parts(inputs, tmp_path / "out", (2,), **chosen)
    assert prepare(options(inputs, tmp_path / "out", **chosen)) == join(tmp_path / "out") == joined
    assert contents(tmp_path / "out") == before
    assert missing_parts(tmp_path / "out", PARTS) == []


def check_with_library(folder, kind, compression, manifest):
    if kind == "mds":
        from streaming.base.format import reader_from_json

        index = json.loads((folder / "train" / "index.json").read_text())
        readers_of = [reader_from_json(str(folder), "train", entry) for entry in index["shards"]]
        assert [r.samples for r in readers_of] == [s.documents for s in manifest.splits["train"].shards]
        assert all(Path(folder, "train", r.zip_data.basename).is_file() for r in readers_of)
    elif compression == "none":
        import webdataset

        files = [str(folder / "train" / s.file) for s in manifest.splits["train"].shards]
        keys = [sample["__key__"] for sample in webdataset.WebDataset(files, shardshuffle=False)]
        assert len(set(keys)) == manifest.splits["train"].documents


@pytest.mark.slow
def test_more_parts_than_records(tmp_path):
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts(30)))
    whole = prepare(options(tmp_path / "in.jsonl", tmp_path / "whole"))
    for number in range(1, 51):
        prepare(options(tmp_path / "in.jsonl", tmp_path / "out", part=f"{number}/50"))
    joined = join(tmp_path / "out")
    assert documents(tmp_path / "out", "train") == documents(tmp_path / "whole", "train")
    assert joined.splits["validation"].documents == whole.splits["validation"].documents


def test_a_stopped_part_goes_on_and_a_finished_one_is_left_alone(tmp_path, inputs, monkeypatch, told, capfd):
    prepare_parts(inputs, tmp_path / "whole")
    prepare_parts(inputs, tmp_path / "out", (1,))
    monkeypatch.setattr(module, "STATE_SECONDS", 0)
    monkeypatch.setattr(module, "STATE_SHARE", float("inf"))
    with monkeypatch.context() as patch:
        interrupt_at(patch, 12)
        with pytest.raises(Interruption):
            prepare_parts(inputs, tmp_path / "out", (2,))
    assert missing_parts(tmp_path / "out", PARTS) == [2, 3, 4, 5]
    times = {p: p.stat().st_mtime_ns for p in (tmp_path / "out" / "parts" / "part-00001-of-00005").rglob("*")}
    told.clear()
    capfd.readouterr()
    prepare_parts(inputs, tmp_path / "out")
    message = "\n".join(told)
    assert int(message.split("continuing after ")[1].split()[0]) > 0
    assert "training" not in message
    assert capfd.readouterr().out.count("nothing to do") == 1
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "out" / "parts" / "part-00001-of-00005").rglob("*")} == times
    assert missing_parts(tmp_path / "out", PARTS) == []
    join(tmp_path / "out")
    join(tmp_path / "whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.slow
def test_joining_that_stopped_at_any_step_is_finished(tmp_path, inputs, monkeypatch):
    prepare_parts(inputs, tmp_path / "parts")
    shutil.copytree(tmp_path / "parts", tmp_path / "whole")
    with monkeypatch.context() as patch:
        count = interrupt_at(patch, 0)
        join(tmp_path / "whole")
    expected = contents(tmp_path / "whole")
    for number in range(1, count() + 1):
        out = tmp_path / f"{number}"
        shutil.copytree(tmp_path / "parts", out)
        with monkeypatch.context() as patch:
            interrupt_at(patch, number)
            with pytest.raises(Interruption):
                join(out)
        assert not (out / "manifest.json").exists()
        join(out)
        assert contents(out) == expected
        shutil.rmtree(out)


def test_parts_are_not_touched_while_they_are_joined(made, prepared, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(prepare_merge, "sync_directory", lambda _: (_ for _ in ()).throw(Interruption()))
        with pytest.raises(Interruption):
            join(prepared)
    with pytest.raises(ValueError, match=r"is being joined; finish that: matmix prepare --merge --out"):
        prepare_parts(made / "in", prepared, (1,))
    assert join(prepared).splits["train"].documents > 0


def test_missing_parts_are_named_with_the_command(tmp_path, inputs, capsys):
    prepare_parts(inputs, tmp_path / "out", (1, 4), max_malformed=0.2)
    assert missing_parts(tmp_path / "out", PARTS) == [2, 3, 5]
    assert missing_parts(tmp_path / "nothing", 2) == [1, 2]
    with pytest.raises(ValueError, match=r"3 of 5 parts are not finished: 2, 3, 5; make each with: ") as caught:
        join(tmp_path / "out")
    command = shlex.split(str(caught.value).split("make each with: ")[1])
    assert command[:2] == ["matmix", "prepare"]
    assert command[-2:] == ["--part", "2/5"]
    capsys.readouterr()
    assert join(tmp_path / "out", dry_run=True) is None
    table = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[1].split(",")[0] for line in table] == [
        "finished", "not begun", "not begun", "finished", "not begun",
    ]  # fmt: skip
    # The command is one that works.
    from matmix.launch.cli import main

    for number in (2, 3, 5):
        assert main([*command[1:-1], f"{number}/5"]) == 0
    assert main(["prepare", "--merge", "--out", str(tmp_path / "out"), "--dry-run", "--max-malformed", "0.1"]) == 0
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert main(["prepare", "--merge", "--out", str(tmp_path / "out"), "--max-malformed", "0.1"]) == 0
    assert (tmp_path / "out" / "manifest.json").exists()


def part(out, number):
    return out / "parts" / f"part-{number:05}-of-{PARTS:05}"


def change_record(folder, change):
    path = folder / "part.json"
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))


def cut_shard(out):
    shard = next(part(out, 3).glob("train/shard*"))
    shard.write_bytes(shard.read_bytes()[:-1])


def other_part(out):
    shutil.rmtree(part(out, 3))
    shutil.copytree(part(out, 2), part(out, 3))


def other_tokenizer(out):
    (part(out, 2) / "tokenizer" / "tokenizer.model").write_bytes(b"another")


def fewer_documents(out):
    np.save(part(out, 2) / "train" / "lengths.npy", np.zeros(3, np.uint32))


def skip_records(out):
    def change(record):
        record["spans"][-1][2] -= 5

    change_record(part(out, 2), change)


def read_twice(out):
    def change(record):
        record["spans"][0][1] -= 5

    change_record(part(out, 3), change)


def begin_late(out):
    def change(record):
        record["spans"][0][1] += 5

    change_record(part(out, 3), change)


@each(
    "harm, message",
    [
        (cut_shard, r"part-00003-of-00005/train/shard\S+ is missing or damaged; delete .*part-00003"),
        (lambda out: (part(out, 4) / "part.json").unlink(), r"part-00004\S+/part.json is missing or damaged"),
        (other_part, r"part-00003\S+ holds another preparation \(part '2/5' there, '3/5' here\)"),
        (other_tokenizer, "part-00002.*tokenizer.model is not the file that the parts were begun with; delete"),
        (fewer_documents, r"part-00002\S+/lengths.npy is missing, damaged or was changed; delete .*part-00002"),
        (skip_records, r"part-00002-of-00005 goes on at .*: records are lost"),
        (read_twice, r"part-00003-of-00005 goes on at .*: records come twice"),
        (begin_late, r"part-00003-of-00005 goes on at .*: records are lost"),
    ],
    fresh="prepared",
)
def test_parts_that_do_not_fit(prepared, harm, message):
    harm(prepared)
    before = contents(prepared)
    with pytest.raises(ValueError, match=message) as caught:
        join(prepared)
    assert "\n" not in str(caught.value)
    assert contents(prepared) == before


def test_an_input_that_changed(tmp_path, inputs):
    prepare_parts(inputs, tmp_path / "out", (1, 2, 3, 4))
    path = inputs / "a.jsonl"
    original = path.read_bytes()
    path.write_bytes(original.replace(b"k", b"K", 1))
    with pytest.raises(ValueError, match="other inputs"):
        prepare_parts(inputs, tmp_path / "out", (5,))
    path.write_bytes(original)
    prepare_parts(inputs, tmp_path / "out", (5,))
    path.write_bytes(original.replace(b"k", b"K", 1))
    with pytest.raises(ValueError, match=r"a\.jsonl has changed since the parts were begun"):
        join(tmp_path / "out")
    path.unlink()
    with pytest.raises(ValueError, match=r"a\.jsonl has gone since the parts were begun"):
        join(tmp_path / "out")
    path.write_bytes(original)
    join(tmp_path / "out")


def test_options_that_do_not_fit(tmp_path, inputs):
    out = tmp_path / "out"
    for bad in ("0/64", "65/64", "3", "-1/4", "1/0", "a/b"):
        with pytest.raises(ValueError, match="part must be k/n with a k from 1 to n") as caught:
            options(inputs, out, part=bad)
        assert "\n" not in str(caught.value)
    with pytest.raises(FileNotFoundError, match="holds no parts; make each with matmix prepare INPUT --out"):
        join(out)
    prepare_parts(inputs, out, (1,))
    with pytest.raises(ValueError, match=r"is prepared in 5 parts; give --part k/5"):
        prepare(options(inputs, out, part="1/6"))
    with pytest.raises(ValueError, match=r"vocab_size 300 there, 301 here"):
        prepare(options(inputs, out, part="2/5", vocab_size=301))
    with pytest.raises(ValueError, match=r"holds parts of a preparation"):
        prepare(options(inputs, out))
    whole = tmp_path / "whole"
    prepare(options(inputs, whole))
    with pytest.raises(ValueError, match="holds another preparation"):
        prepare(options(inputs, whole, part="1/5", vocab_size=301))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("keep")
    with pytest.raises(ValueError, match=r"holds something else \(notes\)"):
        prepare(options(inputs, tmp_path / "mine", part="1/5"))
    with pytest.raises(ValueError, match="vocab"):
        prepare(options(inputs, tmp_path / "new", part="1/5", vocab_size=100_000))
    assert not (tmp_path / "new").exists()


def test_too_much_malformed_is_found_when_all_is_known(prepared):
    with pytest.raises(BrokenInputError, match=r"3 of \d+ lines are malformed \(\S+a\.jsonl, line 71: not JSON"):
        join(prepared, 0.001)
    assert join(prepared).malformed["count"] == 3


def test_a_tokenizer_made_first_or_given(tmp_path, inputs, told):
    first = Tokenizer.load(prepare_shared(options(inputs, tmp_path / "out")))
    assert Tokenizer.load(prepare_shared(options(inputs, tmp_path / "out"))).sha256 == first.sha256
    prepare_parts(inputs, tmp_path / "out")
    assert "".join(told).count("training") == 1
    told.clear()
    assert join(tmp_path / "out").tokenizer.sha256 == first.sha256
    given = tmp_path / "out" / "tokenizer" / "tokenizer.model"
    prepare_parts(inputs, tmp_path / "given", tokenizer=str(given))
    assert "training" not in "".join(told)
    joined = join(tmp_path / "given")
    assert joined.tokenizer.sha256 == joined.options["tokenizer"] == first.sha256
    assert documents(tmp_path / "given", "train") == documents(tmp_path / "out", "train")


def test_a_file_system_without_locks(tmp_path, inputs, monkeypatch):
    """Each of two processes trains the tokenizer; what they publish is the same."""
    import filelock

    def refuse(*_, **__):
        raise NotImplementedError("FileSystem does not appear to support flock")

    make, calls = preparation.train_tokenizer, []

    def another_is_faster(*arguments):
        calls.append(arguments)
        if len(calls) == 1:
            prepare_shared(options(inputs, tmp_path / "out"))
        return make(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(filelock.FileLock, "acquire", refuse)
        patch.setattr(preparation, "train_tokenizer", another_is_faster)
        prepare_shared(options(inputs, tmp_path / "out"))
        assert len(calls) == 2
        prepare_parts(inputs, tmp_path / "out")
        assert join(tmp_path / "out").splits["train"].documents


PROGRAM = """
import sys, time
from pathlib import Path
from matmix.data.prepare.command import prepare
from matmix.data.prepare.text import PrepareConfig, preparation
from matmix.data.prepare.text.preparation import TextPreparation
print("ready", flush=True)
while not Path(sys.argv[3]).exists():
    time.sleep(0.01)
prepare(PrepareConfig(
    inputs=(sys.argv[1],), out=sys.argv[2], part=sys.argv[4], vocab_size=300, validation_fraction=0.2,
    max_document_chars=150, max_malformed=0.1, shard_megabytes=0.004, processes=1))
"""


@pytest.mark.slow
def test_processes_that_start_at_once_and_one_that_is_killed(tmp_path, inputs):
    """Four processes at the same moment train one tokenizer; the one that holds the lock is killed."""
    program, go = tmp_path / "program.py", tmp_path / "go"
    program.write_text(PROGRAM)

    def start(number):
        call = [sys.executable, str(program), str(inputs), str(tmp_path / "out"), str(go), f"{number}/4"]
        return subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    processes = [start(number) for number in (1, 2, 3, 4)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    go.touch()
    deadline = time.monotonic() + 60
    while not (tmp_path / "out" / "parts" / "lock").exists() and time.monotonic() < deadline:
        time.sleep(0.001)
    processes[0].kill()
    said = [process.communicate(timeout=120)[1] for process in processes]
    assert [p.returncode for p in processes[1:]] == [0, 0, 0], said
    assert sum("training a" in text for text in said[1:]) <= 1
    again = start(1)
    assert again.wait(timeout=120) == 0
    again.communicate()
    joined = join(tmp_path / "out")
    prepare(options(inputs, tmp_path / "whole"))
    assert joined.tokenizer == Manifest.load(tmp_path / "whole").tokenizer
    for split in ("train", "validation"):
        assert documents(tmp_path / "out", split) == documents(tmp_path / "whole", split)

"""Bad input: one line each, and nothing that was there before is touched."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from failures import each
from nightly import nightly

from matmix.data import tokenizer as tokenizer_module
from matmix.data.manifest import Manifest
from matmix.data.prepare import command as module
from matmix.data.prepare import pool as prepare_pool
from matmix.data.prepare.base import BrokenInputError
from matmix.data.prepare.command import prepare
from matmix.data.prepare.text import PrepareConfig, preparation

TEXTS = [f"some words of document {i}\nand a second line\n" for i in range(200)]


def options(tmp_path, *inputs, **changes):
    chosen = {
        "inputs": tuple(str(tmp_path / i) for i in inputs or ("in.jsonl",)),
        "out": str(tmp_path / "out"),
        "vocab_size": 290,
        "validation_fraction": 0.2,
        "processes": 1,
    }
    if "tokenizer" in changes:
        del chosen["vocab_size"]
    return PrepareConfig(**{**chosen, **changes})


@pytest.fixture
def corpus(tmp_path):
    lines = [json.dumps({"text": t}) for t in TEXTS]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    return lines


def fails(config, message, error=ValueError, left=False):
    """The error is one line, and the output folder is not there afterwards (or as it was)."""
    out = Path(config.out)
    before = contents(out)
    with pytest.raises(error, match=message) as caught:
        prepare(config)
    assert "\n" not in str(caught.value)
    if not left:
        assert contents(out) == before
    return str(caught.value)


def contents(folder):
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} if folder.exists() else None


def test_missing_and_unreadable_paths(tmp_path, corpus):
    (tmp_path / "a.pdf").write_bytes(b"")
    fails(options(tmp_path, "absent"), "data path .*absent does not exist", FileNotFoundError)
    fails(options(tmp_path, "*.gz"), "no file matches", FileNotFoundError)
    fails(options(tmp_path, "a.pdf"), "suffix that cannot be read")
    fails(options(tmp_path, tokenizer=str(tmp_path / "x.model")), "does not exist", FileNotFoundError)


@pytest.mark.parametrize("with_tokenizer", [False, True])
def test_empty_corpus(tmp_path, corpus, with_tokenizer):
    changes = {}
    if with_tokenizer:
        prepare(options(tmp_path, out=str(tmp_path / "made")))
        changes = {"tokenizer": str(tmp_path / "made")}
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "b.jsonl").write_text('\n{"text": " "}\n')
    fails(options(tmp_path, "a.txt", **changes), r"the corpus is empty: there is no text in .*a\.txt")
    fails(options(tmp_path, "a.txt", "b.jsonl", **changes), "the corpus is empty: there is no text in 2 files")


@pytest.mark.parametrize(("with_tokenizer", "processes"), [(False, 1), (True, 2)])
def test_not_utf8(tmp_path, corpus, with_tokenizer, processes):
    changes = {"processes": processes}
    if with_tokenizer:
        prepare(options(tmp_path, out=str(tmp_path / "made")))
        changes["tokenizer"] = str(tmp_path / "made")
    (tmp_path / "a.txt").write_bytes(b"one\ntwo caf\xe9\n")
    fails(options(tmp_path, "a.txt", **changes), r"a\.txt is not UTF-8: line 2, byte 8 of the line is 0xe9")


def test_vocabulary_too_large(tmp_path, corpus):
    fails(options(tmp_path, vocab_size=20_000), r"the largest possible is \d+")


def test_malformed_lines(tmp_path, corpus, capfd):
    corpus[7] = "{broken"
    corpus[120] = '{"body": "x"}'
    (tmp_path / "in.jsonl").write_text("\n".join(corpus))
    message = fails(options(tmp_path, max_malformed=0.009), "2 of 200 lines are malformed", BrokenInputError, True)
    assert "in.jsonl, line 8: not JSON" in message
    assert "in.jsonl, line 121: no field 'text' (its fields: body)" in message
    # The work is kept: a larger share is no other preparation.
    manifest = prepare(options(tmp_path, max_malformed=0.01))
    assert manifest.malformed["count"] == 2
    assert [e["line"] for e in manifest.malformed["examples"]] == [8, 121]
    assert "line 8: not JSON" in capfd.readouterr().out
    assert sum(s.documents for s in manifest.splits.values()) == 198


def test_one_json_array(tmp_path, corpus):
    for indent in (None, 1):
        (tmp_path / "in.jsonl").write_text(json.dumps([{"text": text} for text in TEXTS], indent=indent))
        fails(options(tmp_path), r"lines are malformed .*; give one object a line \(jq -c '\.\[\]' FILE")


def test_missing_text_field(tmp_path, corpus, monkeypatch):
    message = "200 of 200 lines are malformed .*line 1: no field 'content' .its fields: text.*; name .* --text-field"
    fails(options(tmp_path, text_field="content"), message)
    pq.write_table(pa.table({"body": TEXTS}), tmp_path / "a.parquet")
    fails(options(tmp_path, "a.parquet"), "no column 'text'; its columns are body .choose one with --text-field")
    prepare(options(tmp_path, out=str(tmp_path / "made")))
    monkeypatch.setattr(module, "HOPELESS_RECORDS", 100)
    config = options(tmp_path, text_field="content", tokenizer=str(tmp_path / "made"))
    fails(config, "200 of 200 lines", BrokenInputError, True)


IDLE = {
    "text_field": ("body", ["a.txt", "a.fa", "a.fq", "raw"]),
    "template": ("{a}{b}", ["a.txt", "a.txt.gz", "a.fa", "a.fq", "raw"]),
    "text_documents": ("line", ["a.jsonl", "a.parquet", "a.arrow", "a.mds", "a.tar", "a.fa", "a.fq", "raw"]),
    "document_separator": ("---", ["a.jsonl", "a.parquet", "a.txt", "raw"]),
    "intervals": ("a.bed", ["a.txt", "a.jsonl", "a.parquet", "a.fq"]),
}


@each("option", IDLE)
def test_an_option_that_no_input_takes(tmp_path, option):
    value, names = IDLE[option]
    for name in names:
        path = tmp_path / ("a.txt" if name == "raw" else name)
        path.touch()
        raw = {"raw_bytes": True, "tokenizer": "bytes"} if name == "raw" else {}
        flag = option.replace("_", "-")
        fails(options(tmp_path, path.name, **raw, **{option: value}), rf"^prepare: --{flag} is for [^:]*[a-z]$")


@each(
    "name, changes, message",
    [
        ("a.jsonl", {"template": "{a}", "text_field": "b"}, "--template takes the place of --text-field"),
        ("file:///a.tar", {"raw_bytes": True, "tokenizer": "bytes"}, "raw-bytes reads files of this machine: download"),
        (
            "pipe:cat a.tar",
            {"raw_bytes": True, "tokenizer": "bytes"},
            "raw-bytes reads files of this machine: download",
        ),
        (
            "a.jsonl",
            {"tokenizer": "bytes", "vocab_size": 300},
            "vocab_size is for a tokenizer that is trained, and --to",
        ),
        ("a.jsonl", {"tokenizer": "bytes", "sample_megabytes": 3.0}, "sample_megabytes is for a tokenizer that is tra"),
    ],
)
def test_options_that_exclude_each_other(tmp_path, name, changes, message):
    (tmp_path / "a.jsonl").touch()
    inputs = (name if ":" in name else str(tmp_path / name),)
    with pytest.raises(ValueError, match=message):
        prepare(PrepareConfig(**{"inputs": inputs, "out": str(tmp_path / "out"), **changes}))
    assert not (tmp_path / "out").exists()


def test_an_option_that_some_input_takes(tmp_path, corpus):
    (tmp_path / "a.txt").write_text("some text\n")
    documents = prepare(options(tmp_path, "in.jsonl", "a.txt", text_documents="line", vocab_size=300)).splits
    assert sum(split.documents for split in documents.values()) == 201


def test_output_that_is_something_else(tmp_path, corpus):
    out = tmp_path / "out"
    out.write_text("a file")
    with pytest.raises(ValueError, match="out is a file"):
        prepare(options(tmp_path))
    assert out.read_text() == "a file"
    out.unlink()
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    fails(options(tmp_path), "out is not empty and holds no preparation of matmix")


def test_output_of_another_preparation(tmp_path, corpus):
    prepare(options(tmp_path))
    message = "holds another preparation .vocab_size 290 there, 291 here.*choose another output folder"
    fails(options(tmp_path, vocab_size=291), message)
    (tmp_path / "in.jsonl").write_text("\n".join(corpus[:-1]))
    fails(options(tmp_path), "holds another preparation .other inputs")


def test_unfinished_output_of_another_preparation(tmp_path, corpus, monkeypatch, told):
    def stopped(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_write", stopped)
    with pytest.raises(KeyboardInterrupt):
        prepare(options(tmp_path))
    assert "stopped; run the same command again to continue" in told[-1]
    monkeypatch.undo()
    fails(options(tmp_path, format="webdataset"), "format 'mds' there, 'webdataset' here")
    prepare(options(tmp_path))


def test_a_full_disk_is_named(tmp_path, corpus, monkeypatch):
    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    fails(options(tmp_path), r"No space left on device: '/.*'", OSError, left=True)


def test_finished_output_with_a_missing_shard(tmp_path, corpus):
    prepare(options(tmp_path))
    (tmp_path / "out" / "validation" / "shard.00000.mds.zstd").unlink()
    fails(options(tmp_path), r"validation/shard\.00000\.mds\.zstd is missing or damaged; delete")


def test_empty_split(tmp_path, corpus):
    fails(options(tmp_path, validation_fraction=0.999999), "the train split got none of the 200 documents")


def test_one_document_is_refused_before_a_tokenizer_is_trained(tmp_path, monkeypatch):
    monkeypatch.setattr(preparation, "train_tokenizer", None)
    (tmp_path / "book.txt").write_text("\n\n".join(TEXTS))
    fails(options(tmp_path, "book.txt"), r"book\.txt is one document.*--max-document-chars 4000")
    (tmp_path / "twice.jsonl").write_text(2 * (json.dumps({"text": TEXTS[0]}) + "\n"))
    fails(options(tmp_path, "twice.jsonl"), r"is 2 equal documents.*--max-document-chars 4000, or do without")
    (tmp_path / "bad.jsonl").write_text(json.dumps({"text": TEXTS[0]}) + "\n" + 5 * "not JSON\n")
    fails(options(tmp_path, "bad.jsonl"), r"5 of 6 lines are malformed \(.*bad\.jsonl")


@pytest.mark.parametrize("fraction", [0.1, 1e-6])
def test_few_documents_leave_one_for_validation(fraction, tmp_path):
    """Whatever their hashes say: for none of these texts is preparing a matter of chance."""
    made = {}
    for start in range(0, 60, 10):
        name = f"ten{start}.jsonl"
        (tmp_path / name).write_text("\n".join(json.dumps({"text": text}) for text in TEXTS[start : start + 10]))
        changes = {"out": str(tmp_path / f"out{start}"), "validation_fraction": fraction}
        made[start] = prepare(options(tmp_path, name, **changes))
    found = [(m.splits["train"].documents, m.splits["validation"].documents) for m in made.values()]
    assert all(train + validation == 10 and train and validation for train, validation in found)
    assert any(validation == 1 for _, validation in found)


def test_a_user_folder_keeps_its_place(tmp_path, corpus):
    (tmp_path / "out").mkdir()
    fails(options(tmp_path, vocab_size=20_000), "largest possible")
    prepare(options(tmp_path, out=str(tmp_path / "made")))
    made = str(tmp_path / "made")
    fails(options(tmp_path, tokenizer=made, validation_fraction=0.999999), "the train split got none")
    assert list((tmp_path / "out").iterdir()) == []


def test_an_interrupt_while_a_tokenizer_is_trained(tmp_path, corpus, monkeypatch):
    """The trainer makes an error of its own of it."""

    def interrupted(*_):
        yield "some text"
        raise KeyboardInterrupt

    monkeypatch.setattr(tokenizer_module, "_lines", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare(options(tmp_path))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("moment", [0.0, nightly(0.2)])
def test_an_interrupt_while_workers_start_leaves_no_tracebacks(moment, tmp_path):
    """Ctrl-C goes to all processes of the terminal, also to those that have not yet learned to leave it alone."""
    code = """
import os, signal, sys, threading, time
from matmix.data.prepare.pool import work_in_order
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever started the tests may have it ignored
def interrupt():
    time.sleep(float(sys.argv[1]))
    os.killpg(0, signal.SIGINT)
def chunks():
    yield 1
    threading.Thread(target=interrupt, daemon=True).start()
    yield from range(2, 10)
    time.sleep(5)
if __name__ == "__main__":
    try:
        list(work_in_order(chunks(), 2, abs, doing="working"))
    except KeyboardInterrupt:
        sys.exit(130)
"""
    (tmp_path / "work.py").write_text(code)
    command = [sys.executable, str(tmp_path / "work.py"), str(moment)]
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "")


def test_killed_worker(tmp_path, corpus, monkeypatch):
    class Killing(prepare_pool.ProcessPoolExecutor):
        def submit(self, *arguments):
            future = super().submit(*arguments)
            for process in list(self._processes):
                os.kill(process, signal.SIGKILL)
            return future

    monkeypatch.setattr(prepare_pool, "ProcessPoolExecutor", Killing)
    with pytest.raises(RuntimeError, match=r"tokenising process was killed.*run the same command again"):
        prepare(options(tmp_path, processes=2))
    monkeypatch.undo()
    prepare(options(tmp_path, processes=2))


@each(
    "changes, message",
    [
        ({"inputs": ()}, "no inputs"),
        ({"out": ""}, "no output folder"),
        ({"vocab_size": 0}, "vocab_size must be at least 1"),
        ({"processes": -1}, "processes must be at least 0"),
        ({"max_document_chars": 5}, "must be 0 or at least 16"),
        ({"sample_megabytes": 0.0}, "sample_megabytes must be above 0"),
        ({"shard_megabytes": float("nan")}, "shard_megabytes must be above 0"),
        ({"shard_megabytes": 5000.0}, "at most 4000"),
        ({"validation_fraction": 1.0}, r"must be in \[0, 1\)"),
        ({"max_malformed": 1.5}, r"must be in \[0, 1\]"),
        ({"character_coverage": 0.0}, r"must be in \(0, 1\]"),
        ({"text_documents": "separator", "document_separator": " "}, "document_separator is blank"),
    ],
)
def test_options(changes, message):
    with pytest.raises(ValueError, match=message):
        PrepareConfig(**{"inputs": ("a",), "out": "b", **changes})


@each(
    "text, error, message",
    [
        (None, FileNotFoundError, r"holds no manifest\.json"),
        ("{", ValueError, "is damaged"),
        ('{"version": 99}', ValueError, "has version 99"),
        ('{"version": 1}', ValueError, "is damaged"),
        ("[]", ValueError, "is damaged"),
    ],
)
def test_manifest_that_cannot_be_used(tmp_path, text, error, message):
    if text is not None:
        (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(error, match=message):
        Manifest.load(tmp_path)

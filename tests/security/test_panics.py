"""A library written in Rust that panics ends nothing in a traceback: one line says so, in every process."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from matmix.data.loading.rows import Failure, errors_as_failures
from matmix.data.prepare import pool
from matmix.data.storage.remote import RemoteError, persist
from matmix.data.tokenizer import Tokenizer
from matmix.train.callbacks.base import Callbacks
from matmix.train.process.console import guarded
from matmix.train.process.distributed import agree
from matmix.train.process.exits import EXIT_USER

# Backtracks without an end where no end of the text follows the letters.
PATTERN = pre_tokenizers.Split(tokenizers.Regex("(a+)+$"), "isolated")
TEXT = "a" * 40 + "b"
WORDS = "a library written in Rust gave up: Onig: Regex search error: retry-limit-in-match over"


def panic(*_: object) -> int:
    PATTERN.pre_tokenize_str(TEXT)
    raise AssertionError("no panic")


@pytest.fixture
def tokenizer(tmp_path):
    backend = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    backend.pre_tokenizer = PATTERN
    backend.save(str(tmp_path / "tokenizer.json"))
    return Tokenizer.load(tmp_path)


def test_a_panic_is_no_exception():
    """Else nothing here would be tested."""
    with pytest.raises(BaseException, match="retry-limit") as caught:
        panic()
    assert not isinstance(caught.value, Exception)
    with pytest.raises(pickle.PicklingError):
        pickle.dumps(caught.value)


def test_texts(tokenizer):
    with pytest.raises(ValueError, match=f"tokenizer.json cannot tokenise the text that begins with 'aaa.*: {WORDS}"):
        tokenizer.encode_batch(["ab", TEXT])


@pytest.mark.slow
@pytest.mark.parametrize("processes", ["1", "2"])
def test_prepare(tokenizer, tmp_path, processes):
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": f"{TEXT} {n}"}) for n in range(20)))
    command = [
        sys.executable,
        "-P",
        "-m",
        "matmix.launch.cli",
        "prepare",
        "a.jsonl",
        "--out",
        "out",
        "--processes",
        processes,
    ]
    done = subprocess.run(
        [*command, "--tokenizer", "tokenizer.json"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "RUST_BACKTRACE": "1"},
    )
    assert done.returncode == EXIT_USER
    assert done.stderr.strip().splitlines()[-1].endswith(WORDS)
    assert "Traceback" not in done.stderr
    assert "backtrace:" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_commands(capsys):
    assert guarded(panic) == EXIT_USER
    assert f"matmix: error: {WORDS}\n" in capsys.readouterr().err


def test_reading_and_tokenising_processes(monkeypatch):
    failure = errors_as_failures(panic)(None, [0])
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.message) == (ValueError, WORDS)
    monkeypatch.setattr(pool, "_work", panic)
    with pytest.raises(ValueError, match=WORDS):
        pool._work_on(None)


def test_what_ranks_do_together():
    with pytest.raises(ValueError, match=WORDS):
        agree(panic)


def test_stores_and_callbacks(caplog):
    with pytest.raises(RemoteError, match=WORDS):
        persist(panic, "writing s3://bucket")
    callbacks = Callbacks()
    callbacks.make(panic)
    assert WORDS in callbacks._failed[0]

"""A tokenizer is trained in a process of its own, which can be waited for and ended."""

from __future__ import annotations

import signal
import time
from multiprocessing.context import SpawnProcess

import pytest

from matmix.data.prepare.command import prepare
from matmix.data.prepare.text import PrepareConfig
from matmix.data.prepare.text import preparation as module
from matmix.data.prepare.text.preparation import train_in
from matmix.data.tokenizer import train_sentencepiece

TEXTS = ["the king speaks\nto the queen\r\n", "café 日本語 \u2028 of a land far away"]
OPTIONS = {"vocab_size": 295, "model_type": "bpe", "byte_fallback": True}


@pytest.fixture
def apart(monkeypatch):
    """However little text it is; gives the processes that are started."""
    started = []

    start = SpawnProcess.start

    def noted(process):
        started.append(process)
        start(process)

    monkeypatch.setattr(module, "_FEW", 0)
    monkeypatch.setattr(module, "_SECONDS_BETWEEN_LOOKS", 0.001)  # a fast machine needs less than 0.2
    monkeypatch.setattr(SpawnProcess, "start", noted)
    return started


def test_the_tokenizer_is_the_same(apart, tmp_path, monkeypatch, told):
    monkeypatch.setattr("matmix.data.prepare.report._SECONDS_BETWEEN_LINES", 0.0)
    expected = train_sentencepiece(TEXTS, tmp_path / "expected.model", **OPTIONS)
    found = train_in(tmp_path, TEXTS, OPTIONS)
    assert found.path.read_bytes() == expected.path.read_bytes()
    assert len(apart) == 1
    assert "training the tokenizer: 0 s so far" in told


def test_a_text_that_is_too_small_is_the_same_error(apart, tmp_path):
    with pytest.raises(ValueError, match="a vocabulary of 9,000 is larger than this text supports: the largest"):
        train_in(tmp_path, TEXTS, {**OPTIONS, "vocab_size": 9000})


def test_ctrl_c_ends_it_and_leaves_nothing(apart, tmp_path, monkeypatch):
    """Whoever waits gets the signal; the trainer is not of its group."""

    def interrupt(*_):
        raise KeyboardInterrupt

    (tmp_path / "text.txt").write_text("\n\n".join(TEXTS))
    monkeypatch.setattr("matmix.data.prepare.report.Report.update", interrupt)
    out = str(tmp_path / "out")
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        prepare(PrepareConfig(inputs=(str(tmp_path / "text.txt"),), out=out, vocab_size=295, text_documents="line"))
    assert time.monotonic() - started < 5
    assert [process.exitcode for process in apart] == [-signal.SIGKILL]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.txt"]


def test_a_killed_training_is_told(apart, tmp_path, monkeypatch):
    monkeypatch.setattr("matmix.data.prepare.report.Report.update", lambda _: apart[0].kill())
    with pytest.raises(RuntimeError, match=r"was killed by SIGKILL \(out of memory\?\); a smaller --sample-megabytes"):
        train_in(tmp_path, TEXTS, OPTIONS)

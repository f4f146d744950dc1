"""A preparation that is stopped, by an exception at any write or by SIGKILL, ends with the same bytes."""

import json
import math
import os
import signal
import subprocess
import sys
import time

import folders
import numpy as np
import pytest
from folders import Interruption, contents
from nightly import nightly

from matmix.data.prepare import command as module
from matmix.data.prepare.command import prepare
from matmix.data.prepare.text import PrepareConfig, sources

WORDS = [f"{a}{b}" for a in ("ki", "ra", "to", "mo", "lu") for b in ("n", "se", "m", "p")]


def write_corpus(path, count, words=20):
    rng = np.random.default_rng(0)
    lines = (json.dumps({"text": " ".join(rng.choice(WORDS, words))}) for _ in range(count))
    path.write_text("\n".join(lines))


def options(tmp_path, out, **changes):
    chosen = {
        "inputs": (str(tmp_path / "in.jsonl"),),
        "out": str(tmp_path / out),
        "vocab_size": 300,
        "validation_fraction": 0.3,
        "shard_megabytes": 0.001,
        "processes": 1,
    }
    return PrepareConfig(**{**chosen, **changes})


def interrupt_at(monkeypatch, number):
    """`folders.interrupt_at` in a preparation that saves its state after each chunk."""
    monkeypatch.undo()
    monkeypatch.setattr(module, "STATE_SECONDS", 0)
    monkeypatch.setattr(module, "STATE_SHARE", math.inf)
    monkeypatch.setattr(sources, "CHUNK_BYTES", 1500)
    return folders.interrupt_at(monkeypatch, number)


@pytest.mark.parametrize(("kind", "step"), [("mds", 6), ("webdataset", 7), nightly("mds", 1)])
def test_stopped_at_any_write(tmp_path, monkeypatch, kind, step):
    """Stopped before each rename that a whole run makes, then once more soon after, then left to run."""
    write_corpus(tmp_path / "in.jsonl", 60)
    count = interrupt_at(monkeypatch, 0)
    changes = {"format": kind, "shard_megabytes": 0.001 if kind == "mds" else 0.012}
    prepare(options(tmp_path, "whole", **changes))
    expected = contents(tmp_path / "whole")
    assert sum("shard" in name for name in expected) > 4
    for number in range(1, count() + 1, step):
        for stop in (number, 4):
            interrupt_at(monkeypatch, stop)
            with pytest.raises(Interruption):
                prepare(options(tmp_path, f"{number}", **changes))
            assert not (tmp_path / f"{number}" / "manifest.json").exists()
        interrupt_at(monkeypatch, 0)
        prepare(options(tmp_path, f"{number}", **changes))
        assert contents(tmp_path / f"{number}") == expected


def test_continuing_does_not_start_again(tmp_path, monkeypatch, told):
    write_corpus(tmp_path / "in.jsonl", 60)
    interrupt_at(monkeypatch, 12)
    with pytest.raises(Interruption):
        prepare(options(tmp_path, "out"))
    told.clear()
    monkeypatch.undo()
    prepare(options(tmp_path, "out"))
    message = "\n".join(told)
    assert "training" not in message
    assert int(message.split("continuing after ")[1].split()[0]) > 0


def test_same_again_does_nothing(tmp_path, capfd):
    write_corpus(tmp_path / "in.jsonl", 60)
    first = prepare(options(tmp_path, "out"))
    times = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*")}
    os.utime(tmp_path / "in.jsonl")
    capfd.readouterr()
    again = prepare(options(tmp_path, "out", processes=2, max_malformed=0.5))
    assert again == first
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*")} == times
    assert "nothing to do" in capfd.readouterr().out


PROGRAM = """
import logging
import sys
from matmix.data.prepare import command as prepare
from matmix.data.prepare.text import PrepareConfig, sources
if __name__ == "__main__":
    logging.basicConfig(level="INFO", format="%(message)s")
    prepare.STATE_SECONDS, prepare.STATE_SHARE, sources.CHUNK_BYTES = 0, float("inf"), 20_000
    prepare.prepare(PrepareConfig(
        inputs=(sys.argv[1],), out=sys.argv[2], vocab_size=300, validation_fraction=0.3,
        shard_megabytes=0.02, processes=int(sys.argv[3])))
"""


@pytest.mark.parametrize("processes", [nightly(1), 2])
def test_killed(tmp_path, processes):
    """Killed three times at unforeseen moments, each after some progress; workers end with their parent."""
    write_corpus(tmp_path / "in.jsonl", 4000)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)

    def start(out):
        call = [sys.executable, str(program), str(tmp_path / "in.jsonl"), str(tmp_path / out), str(processes)]
        return subprocess.Popen(call, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    assert start("whole").wait() == 0
    expected = contents(tmp_path / "whole")
    state = tmp_path / "out" / ".prepare" / "state.npz"
    killed = 0
    for _ in range(3):
        process = start("out")
        before = state.stat().st_mtime_ns if state.exists() else 0
        while process.poll() is None and (not state.exists() or state.stat().st_mtime_ns == before):
            time.sleep(0.005)
        time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        # stderr is shared with the workers: it ends when the last of them has gone.
        process.communicate(timeout=20)
        killed += process.returncode == -signal.SIGKILL
    assert killed >= 1
    # A kill may come after the last write, or a whole run may fit between two looks at the clock.
    finished = (tmp_path / "out" / "manifest.json").exists()
    process = start("out")
    message = process.communicate()[1]
    assert process.returncode == 0
    assert finished or "continuing after" in message
    assert contents(tmp_path / "out") == expected


def test_two_at_once(tmp_path, monkeypatch):
    write_corpus(tmp_path / "in.jsonl", 60)
    write = module._write

    def while_running(*arguments):
        with pytest.raises(ValueError, match=r"another process is preparing .*out right now"):
            prepare(options(tmp_path, "out"))
        return write(*arguments)

    monkeypatch.setattr(module, "_write", while_running)
    prepare(options(tmp_path, "out"))


def test_unfinished_with_a_missing_shard(tmp_path, monkeypatch):
    write_corpus(tmp_path / "in.jsonl", 60)
    interrupt_at(monkeypatch, 12)
    with pytest.raises(Interruption):
        prepare(options(tmp_path, "out"))
    monkeypatch.undo()
    (tmp_path / "out" / "train" / "shard.00000.mds.zstd").unlink()
    with pytest.raises(ValueError, match=r"shard\.00000\.mds\.zstd is missing or damaged.* delete"):
        prepare(options(tmp_path, "out"))

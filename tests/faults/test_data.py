"""Damaged shards and slow storage: an error that names the shard, or a run that goes on, counts, and says so."""

import json
import time
from pathlib import Path

import psutil
import pytest
from fault_harness import assert_same
from runs import losses, records, run_recipe

from matmix.data.prepare.command import prepare
from matmix.data.prepare.text import PrepareConfig
from matmix.data.splits.reader import TokenShards
from matmix.train.process.exits import EXIT_USER


@pytest.fixture(scope="module")
def damaged(dataset, tmp_path_factory):
    """The text of `dataset` in dozens of shards, two of them changed in one byte: read in order, they are met in the
    first half of a run and in the second."""
    path = tmp_path_factory.mktemp("damaged") / "data"
    verses = str(Path(dataset).parent / "verses.jsonl")
    options = {"vocab_size": 320, "validation_fraction": 0.1, "shard_megabytes": 0.001, "processes": 1}
    manifest = prepare(PrepareConfig(inputs=(verses,), out=str(path), **options))
    shards = manifest.splits["train"].shards
    names = [shards[3].file, shards[8].file]
    for name in names:
        shard = path / "train" / name
        raw = bytearray(shard.read_bytes())
        raw[len(raw) // 2] ^= 1
        shard.write_bytes(raw)
    return path, names


def damage_in(run):
    return [record["damaged"] for record in run.records()]


@pytest.mark.slow
def test_a_damaged_shard_ends_the_run_or_is_left_out_and_counted(make_run, damaged):
    path, names = damaged
    options = ("--data.path", str(path), "--data.workers", "1", "--data.shuffle", "False")
    run = make_run(*options, ranks=2)
    attempt = run.start()
    assert EXIT_USER in attempt.wait()
    assert f"shard train/{names[0]} has another SHA-256" in attempt.text()
    assert "Traceback" not in attempt.text()
    # The same run goes on without it, is stopped in between, and counts as if it had not been.
    texts = [run.finish("--data.skip-damaged", "True", "--stop-step", "17").text(0)]
    texts.append(run.finish("--data.skip-damaged", "True").text(0))
    whole = make_run(*options, "--data.skip-damaged", "True", ranks=2)
    texts.append(whole.finish().text())
    assert_same(run, whole)
    counts = damage_in(run)
    assert counts == damage_in(whole) == sorted(counts)
    assert 0 < counts[16] < counts[-1] < 30 * 4
    for name, text in zip(names, texts, strict=False):
        assert f"leaving out the sequences of a damaged shard: {path}: shard train/{name} has another" in text
    assert texts[2].count("leaving out the sequences") == 2
    one = make_run(*options, "--data.skip-damaged", "True")
    one.finish()
    assert damage_in(one) == counts


@pytest.mark.slow
def test_slow_storage_is_waited_for_and_said_once(dataset, tmp_path, monkeypatch, capsys):
    options = ("--steps", "6", "--evaluation.every", "0", "--logging.every", "1", "--data.workers", "0")
    run_recipe("debug_mru", dataset, tmp_path / "fast", *options)
    assert "waiting for data" not in capsys.readouterr().err
    read = TokenShards.read

    def slow(*arguments):
        time.sleep(0.05)
        return read(*arguments)

    monkeypatch.setattr(TokenShards, "read", slow)
    run_recipe("debug_mru", dataset, tmp_path / "slow", *options)
    assert losses(tmp_path / "slow") == losses(tmp_path / "fast")
    said = capsys.readouterr().err
    assert said.count("of the time: raise data.workers (now 0) or data.prefetch") == 1
    assert records(tmp_path / "slow")[-1]["data_wait"] > 0.5


@pytest.mark.slow
def test_a_reader_that_blocks_for_seconds_costs_seconds(dataset, tmp_path, monkeypatch):
    """Longer than the intervals at which torch looks after its workers."""
    children = psutil.Process().children()
    options = ("--steps", "4", "--evaluation.every", "0", "--logging.every", "1", "--data.workers", "1")
    run_recipe("debug_mru", dataset, tmp_path / "fast", *options)
    read, blocked = TokenShards.read, tmp_path / "blocked"

    def blocking(*arguments):
        if not blocked.exists():
            blocked.touch()
            time.sleep(7)
        return read(*arguments)

    monkeypatch.setattr(TokenShards, "read", blocking)
    run_recipe("debug_mru", dataset, tmp_path / "slow", *options)
    assert losses(tmp_path / "slow") == losses(tmp_path / "fast")
    assert json.loads((tmp_path / "slow" / "summary.json").read_text())["step"] == 4
    assert blocked.exists()
    assert psutil.Process().children() == children  # a run that has ended leaves no readers

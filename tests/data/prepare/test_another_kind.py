"""A kind of data from outside is prepared as texts and pictures are: resumed, in parts, and at a URL."""

import os
import subprocess
import sys

import numpy as np
import pytest
from folders import Interruption, contents, interrupt_at
from series import PrepareSeries, SeriesFile, SeriesPreparation

from matmix.data.prepare import command
from matmix.data.prepare.base import BrokenInputError
from matmix.data.prepare.merge import merge
from matmix.data.splits.reader import TokenShards, open_dataset
from matmix.data.storage.storage import Storage


@pytest.fixture
def inputs(tmp_path, monkeypatch):
    """100 series of 16 steps in two files, two of them with NaN."""
    monkeypatch.setattr(SeriesFile, "chunk", 7)
    series = np.random.default_rng(0).normal(size=(100, 16)).astype(np.float32)
    series[[3, 70], 5] = np.nan
    np.save(tmp_path / "a.npy", series[:60])
    np.save(tmp_path / "b.npy", series[60:])
    return str(tmp_path / "a.npy"), str(tmp_path / "b.npy")


def options(inputs, out, **changes):
    values = {"validation_fraction": 0.2, "shard_megabytes": 0.002, "processes": 1, **changes}
    return PrepareSeries(inputs=inputs, out=str(out), **values)


def documents(out, split):
    shards = TokenShards(Storage(str(out)), split)
    return [shards.read(s, i).tolist() for s in range(shards.n_shards) for i in range(len(shards.lengths(s)))]


def test_the_same_bytes_after_a_stop_at_a_url_and_from_parts(inputs, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MATMIX_SCRATCH", str(tmp_path / "scratch"))
    monkeypatch.setattr(command, "STATE_SECONDS", 0)
    monkeypatch.setattr(command, "STATE_SHARE", float("inf"))
    manifest = command.prepare(options(inputs, tmp_path / "out"))
    assert f"train       {manifest.splits['train'].documents} series" in capsys.readouterr().out
    with monkeypatch.context() as patch:
        interrupt_at(patch, 8)
        with pytest.raises(Interruption):
            command.prepare(options(inputs, tmp_path / "again"))
    command.prepare(options(inputs, tmp_path / "again"))
    command.prepare(options(inputs, (tmp_path / "url").as_uri(), processes=2))
    assert contents(tmp_path / "again") == contents(tmp_path / "url") == contents(tmp_path / "out")
    for number in (3, 1, 2):
        command.prepare(options(inputs, tmp_path / "parts", part=f"{number}/3"))
    joined = merge(str(tmp_path / "parts"), SeriesPreparation, most_broken=0.1)
    assert (joined.facts, joined.malformed, joined.sources) == (manifest.facts, manifest.malformed, manifest.sources)
    for split in manifest.splits:
        assert documents(tmp_path / "parts", split) == documents(tmp_path / "out", split)


def test_refusals(inputs, tmp_path):
    with pytest.raises(BrokenInputError, match=r"2 of 100 series are malformed .*it holds NaN.*--max-broken"):
        command.prepare(options(inputs, tmp_path / "out", max_broken=0.0))
    command.prepare(options(inputs, tmp_path / "out"))
    with pytest.raises(ValueError, match=r"holds another preparation \(format 'mds' there, 'webdataset' here"):
        command.prepare(options(inputs, tmp_path / "out", format="webdataset"))
    with pytest.raises(ValueError, match="not text"):
        open_dataset(str(tmp_path / "out"))
    command.prepare(options(inputs, tmp_path / "parts", part="1/2"))
    with pytest.raises(ValueError, match=r"1 of 2 part is not finished: 2; make each with: matmix prepare-series"):
        merge(str(tmp_path / "parts"), SeriesPreparation)


PROGRAM = """
import sys
from series import Series
from matmix.data.modalities import MODALITIES
MODALITIES["series"] = Series()
from matmix.launch.cli import main
a, b, out = sys.argv[1:]
for words in (["--part", "1/2"], ["--part", "2/2"]):
    assert main(["prepare-series", a, b, "--out", out, "--validation-fraction", "0.2", *words]) == 0
assert main(["prepare-series", "--merge", "--out", out, "--max-broken", "0.01"]) == 2
assert main(["prepare-series", "--merge", "--out", out]) == 0
assert main(["prepare-series", "--help"]) == 0
"""


def test_it_has_a_verb_of_its_own(inputs, tmp_path):
    """Its line in `MODALITIES` is all that the command line needs."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-P", "-c", PROGRAM, *inputs, str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "2 of 100 series are malformed" in done.stderr
    assert "Files of series, one a row, to shards." in done.stdout
    assert "Share of the series that may hold NaN." in done.stdout

"""The parts of a session on a GPU, here at toy sizes with the kernels interpreted."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time

import pytest
import torch

from matmix.benchmarks.__main__ import main
from matmix.benchmarks.calls import calls
from matmix.benchmarks.counts import counted_calls
from matmix.benchmarks.gpu_session import command, record, sweep
from matmix.benchmarks.gpu_session.command import DONE, LEFT, WRONG, run_here
from matmix.benchmarks.gpu_session.record import Piece, Record
from matmix.kernels import tiles
from matmix.kernels.semiseparable.fused.scan import measured, usual

CPU = torch.device("cpu")


def kept(out, part="peers", seconds=300.0, only="") -> Record:
    return Record(out, part, CPU, seconds, only)


def counting(name, calls, result=None):
    def run():
        calls.append(name)
        return result or {"value": name}

    return Piece(name, run)


def test_what_is_done_is_not_done_again_and_what_failed_is_said(tmp_path):
    def broken():
        raise RuntimeError("no\nmore")

    calls = []
    pieces = [counting("a", calls), Piece("b", broken), counting("c", calls, {"status": "WRONG: 1.0"})]
    for _ in range(2):
        now = kept(tmp_path)
        assert now.work(pieces) == []
    assert calls == ["a", "c"]
    content = json.loads((tmp_path / "peers.json").read_text())
    assert content["pieces"]["a"] | {"took_seconds": 0} == {"status": "ok", "value": "a", "took_seconds": 0}
    assert now.wrong() == ["b: failed: RuntimeError: no", "c: WRONG: 1.0"]
    assert {"date", "commit", "code", "versions", "processor", "device"} <= set(content)


def test_a_part_stops_before_its_time_is_over_and_goes_on(tmp_path):
    calls = []
    pieces = [Piece(name, lambda: time.sleep(0.01) or calls.append(1) or {}) for name in "abc"]
    assert kept(tmp_path, seconds=record.LEAST_SECONDS / 2).work(pieces) == ["a", "b", "c"]
    assert kept(tmp_path).work(pieces) == []
    assert len(calls) == 3


def test_a_piece_that_ends_its_process_is_given_up(tmp_path):
    for number in range(record.ATTEMPTS):
        now = kept(tmp_path)
        assert not now.has("a")
        now.put("a", {"begun": number + 1})
    assert kept(tmp_path).wrong() == ["a: ended its process"]


def test_what_other_code_gave_is_kept_aside(tmp_path, monkeypatch, capsys):
    kept(tmp_path).work([counting("a", [])])
    monkeypatch.setattr(record, "digest", lambda pattern: "other")
    assert kept(tmp_path).pieces == {}
    assert "begun anew, as code and tiles changed" in capsys.readouterr().out
    assert "a" in json.loads((tmp_path / "peers.json.aside-1").read_text())["pieces"]


def test_a_file_that_is_no_record_is_one_line(tmp_path):
    for content in ("{", "[]", "{}"):
        (tmp_path / "peers.json").write_text(content)
        with pytest.raises(ValueError, match=r"peers\.json is no record of a part"):
            kept(tmp_path)


def test_the_projects_own_tests_are_the_check(tmp_path, monkeypatch):
    ran = []

    def pytest_run(words, **options):
        ran.append(words[-1])
        failed = "FAILED tests/kernels/test_tiles.py::test_one\n1 failed" if "test_tiles" in words[-1] else "7 passed"
        return subprocess.CompletedProcess(words, int("failed" in failed), stdout=failed, stderr="")

    monkeypatch.setattr(record.subprocess, "run", pytest_run)
    monkeypatch.setattr(command, "TOY_TESTS", "test_*.py")
    now = kept(tmp_path, "correctness")
    assert command.correctness(now) == []
    assert len(ran) == len(now.pieces) > 15
    assert now.pieces["test_steps.py"]["summary"] == "7 passed"
    assert now.wrong() == ["test_tiles.py: failed: FAILED tests/kernels/test_tiles.py::test_one"]


def test_launches_are_timed_one_by_one(interpreter, tmp_path, capsys):
    now = kept(tmp_path, "kernels", only="gated_norm: groups of 1536")
    [norm] = [call for call in counted_calls(torch.float32) if call.op == "gated_norm"]
    result = command.times(norm, 64, now, 1e9)
    assert [row["kernel"] for row in result["launches"]]
    for row in result["launches"]:
        assert row["bytes"] > 0
        assert row["bandwidth"] == pytest.approx(row["bytes"] / row["seconds"])
    assert "of a copy" in command.times_text(result)


@pytest.mark.slow
def test_a_candidate_is_checked_and_timed(interpreter, tmp_path):
    now = kept(tmp_path, "sweep", only="float32, mix: forward_chunk 32,")
    tried = sweep.Sweep(now, torch.float32)
    assert now.work(tried.pieces()) == []
    (piece,) = now.pieces.values()
    assert (piece["status"], piece["fields"]["forward_chunk"]) == ("ok", 32)
    assert piece["seconds"] > 0
    tried.wanted = [1.1 * x for x in tried.wanted]
    assert tried.measure(sweep.GROUPS[0], piece["fields"])["status"].startswith("WRONG: ")


def test_choices_agree_in_what_kernels_share():
    one = [(3.0, {"tile": 32, "forward_chunk": 64, "a": 1}), (2.0, {"tile": 64, "forward_chunk": 64, "a": 2})]
    two = [(1.0, {"tile": 32, "backward_chunk": 64, "b": 1}), (5.0, {"tile": 64, "backward_chunk": 64, "b": 2})]
    two += [(0.5, {"tile": 64, "backward_chunk": 32, "b": 3})]  # a tile longer than its chunk
    best, second = sweep.combined([one, two])
    assert best == (4.0, {"tile": 32, "forward_chunk": 64, "a": 1, "backward_chunk": 64, "b": 1})
    assert second[0] == 7.0
    assert sweep.combined([one, []]) == []


@pytest.mark.parametrize("itemsize", [2, 4])
def test_every_kernel_has_about_forty_candidates_that_can_be(itemsize):
    for group in sweep.GROUPS:
        candidates = group.candidates(itemsize)
        assert 35 <= len(candidates) <= 45, (group.name, len(candidates))
        configs = [sweep.fitting(fields, itemsize) for fields in candidates]
        assert configs[0] == usual(itemsize)
        for config, fields in zip(configs, candidates, strict=True):
            assert all(getattr(config, name) == value for name, value in fields.items())


def test_the_calls_that_are_named_exist():
    titles = {call.title for call in calls()}
    assert {sweep.MAIN, *sweep.ELSEWHERE} <= titles
    assert len(list(counted_calls(torch.bfloat16))) >= 9


@pytest.mark.slow
def test_the_fastest_right_configuration_becomes_the_table(tmp_path, monkeypatch):
    """With made-up times: small tiles are fast, 4 warps of `mix` are wrong, and the fastest as a whole fails."""

    def measure(self, group, fields):
        if fields.get("mix_warps") == 4:
            return {"status": "WRONG: off", "fields": fields}
        return {"fields": fields, "seconds": sum(fields.values())}

    def whole(self, config, titles):
        if config.tile == min(tile for _, tile in sweep.TILES[config.itemsize]):
            return {"status": "another width: failed", "config": config._asdict()}
        seconds = config.tile / 64 + config.mix_warps + config.state_warps / 100 + config.stages
        return {"config": config._asdict(), "total": seconds if titles else 1000.0}

    monkeypatch.setattr(sweep.Sweep, "measure", measure)
    monkeypatch.setattr(sweep.Sweep, "whole", whole)
    monkeypatch.setattr(record, "write_atomic", lambda path, content: path.write_text(content))
    before = {path: path.read_bytes() for path in tiles.FOLDER.iterdir() if path.is_file()}
    now = kept(tmp_path, "sweep")
    now.toy = False
    assert sweep.run(now) == []
    chosen = tiles.read(tmp_path / "interpreter.json", "scan", sweep.ScanConfig)
    assert set(chosen) == {2, 4}
    assert all(config.mix_warps == 8 and config.tile > 16 for config in chosen.values())
    (folder := tmp_path / "tiles").mkdir()
    shutil.copy(tmp_path / "interpreter.json", folder)
    assert measured(folder)["interpreter"] == chosen
    assert now.pieces["bfloat16, as a whole: place 1"]["status"] == "another width: failed"
    assert {path: path.read_bytes() for path in tiles.FOLDER.iterdir() if path.is_file()} == before


@pytest.mark.slow
@pytest.mark.slow
def test_a_peer_runs_in_its_own_process_and_a_failure_is_one_line(tmp_path):
    now = kept(tmp_path)
    good, bad = "mru --tokens 48 --lengths 24 --sizes 4x2 --kind scan", "mru --sizes 5x2"
    result = command.compared(good, now)
    assert result["status"] == "ok"
    assert [x["candidate"] for x in result["record"]["cases"][0]["candidates"]][:2] == ["ours", "Brent-Kung"]
    assert "failed: matmix: error: --sizes 5x2" in command.compared(bad, now)["status"]


def test_a_peer_without_time_is_left_and_one_that_takes_too_long_is_wrong(tmp_path, monkeypatch):
    def slow(words, timeout, **options):
        raise subprocess.TimeoutExpired(words, timeout)

    monkeypatch.setattr(record.subprocess, "run", slow)
    assert len(command.peers(kept(tmp_path, seconds=60.0))) == len(command.TOY_PEERS)
    now = kept(tmp_path, seconds=1000.0, only="scan")
    assert command.peers(now) == []
    (piece,) = now.pieces.values()
    assert piece["status"] == "failed: RuntimeError: took longer than 150 s"


def test_users_mistakes_are_one_line(capsys):
    for words, message in (
        (["--device", "cpu", "--minutes", "0"], "--minutes 0"),
        (["--device", "cpu", "--here"], "say which --part"),
        (["--device", "cpu", "--here", "--part", "sweep"], "TRITON_INTERPRET=1"),
        (["--device", "abacus"], "no such device"),
    ):
        assert main(["gpu-session", *words]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line


def test_the_status_says_how_a_part_ended(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(command, "end_with", lambda parent, number: True)
    monkeypatch.setattr(command, "TOY_PEERS", ("a", "b"))
    monkeypatch.setattr(command, "compared", lambda words, record: {"record": {"cases": []}})
    assert run_here("peers", CPU, tmp_path, 1.0, "") == LEFT
    assert run_here("peers", CPU, tmp_path, 100.0, "") == DONE
    monkeypatch.setattr(command, "TOY_PEERS", ("c",))
    monkeypatch.setattr(command, "compared", lambda words, record: {"status": "WRONG"})
    assert run_here("peers", CPU, tmp_path, 100.0, "") == WRONG


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_all_parts_at_toy_size(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    words = ["gpu-session", "--device", "cpu", "--out", str(tmp_path)]
    run = [sys.executable, "-P", "-m", "matmix.benchmarks", *words]
    done = subprocess.run(run, env=environment, capture_output=True, text=True)
    assert done.returncode == DONE, done.stdout + done.stderr
    assert all(json.loads((tmp_path / f"{part}.json").read_text())["pieces"] for part in command.PARTS)
    start = time.monotonic()
    assert subprocess.run(run, env=environment, capture_output=True).returncode == DONE
    assert time.monotonic() - start < 120  # nothing is done again


# As on a machine with an H100, but for the launches themselves.
WARMING = """
import torch
from matmix.benchmarks.counts import counted_calls
from matmix.benchmarks.gpu_session import command, record
record.architecture = lambda device: "sm_90"
[norm] = [call for call in counted_calls(torch.bfloat16) if call.op == "gated_norm"]
pieces = [record.Piece("norm", dict, lambda: command.dry(norm, 64)), record.Piece("broken", dict, lambda: 1 / 0)]
record.compile_ahead(pieces, torch.device("cpu"))
"""


@pytest.mark.slow
def test_kernels_are_compiled_ahead_where_their_launch_looks_for_them(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run([sys.executable, "-P", "-c", WARMING], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "ahead" not in done.stdout
    cubins = list(tmp_path.rglob("*.cubin"))
    assert len({path.stem for path in cubins}) >= 2
    assert {path.parent.parent for path in cubins} == {tmp_path}

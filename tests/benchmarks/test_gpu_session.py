"""The parts of a session on a GPU, here at toy sizes with the kernels interpreted."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch
from paths import ROOT

from matmix.benchmarks.__main__ import main
from matmix.benchmarks.gpu_session import command, correctness, peers, plain, record, sweep, times
from matmix.benchmarks.gpu_session.command import DONE, LEFT, WRONG, run_here
from matmix.benchmarks.gpu_session.record import Limit, Piece, Session
from matmix.kernels import tiles
from matmix.kernels.semiseparable.fused.scan import measured, usual

CPU = torch.device("cpu")
ROOMS = ("kernels", "model", "data", "train", "use", "launch", "benchmarks")


def session(out, only="", *, toy=True, seconds=300.0) -> Session:
    return Session(CPU, out, toy, Limit(seconds), only)


def pieces_of(out, part) -> dict:
    return json.loads((out / f"{part}.json").read_text())["pieces"]


def counting(name, calls, found=None):
    def run():
        calls.append(name)
        return found or {"value": name}

    return Piece(name, run)


# Records


def test_what_is_done_is_not_done_again_and_what_failed_is_said(tmp_path):
    def broken():
        raise RuntimeError("no\nmore")

    calls = []
    pieces = [counting("a", calls), Piece("b", broken), counting("c", calls, {"status": "WRONG: 1.0"})]
    for _ in range(2):
        now = session(tmp_path)
        kept = now.record("part")
        assert now.work(kept, pieces) == []
    assert calls == ["a", "c"]
    found = pieces_of(tmp_path, "part")
    assert found["a"]["value"] == "a"
    assert found["a"]["status"] == "ok"
    assert kept.wrong() == ["b: failed: RuntimeError: no", "c: WRONG: 1.0"]
    content = json.loads((tmp_path / "part.json").read_text())
    assert content["device"] == "cpu"
    assert {"date", "commit", "code", "versions", "processor"} <= set(content)


def test_a_part_stops_before_its_time_is_over_and_goes_on(tmp_path):
    calls = []
    pieces = [Piece(name, lambda: time.sleep(0.01) or calls.append(1) or {}) for name in "abc"]
    now = session(tmp_path, seconds=record.LEAST_SECONDS / 2)
    assert now.work(now.record("part"), pieces) == ["a", "b", "c"]
    now = session(tmp_path)
    assert now.work(now.record("part"), pieces) == []
    assert len(calls) == 3


def test_a_piece_that_ends_its_process_is_given_up(tmp_path):
    for _ in range(record.ATTEMPTS):
        now = session(tmp_path).record("part")
        assert not now.has("a")
        now.begin("a")
    now = session(tmp_path).record("part")
    assert now.has("a")
    assert now.wrong() == ["a: ended its process"]


def test_what_other_code_gave_is_kept_aside(tmp_path, monkeypatch, capsys):
    now = session(tmp_path)
    now.work(now.record("part"), [counting("a", [])])
    monkeypatch.setattr(record, "digest", lambda paths: "other")
    assert session(tmp_path).record("part").pieces == {}
    assert "begun anew, as code and tiles changed" in capsys.readouterr().out
    assert "a" in json.loads((tmp_path / "part-before-1.json").read_text())["pieces"]


def test_a_file_that_is_no_record_is_one_line(tmp_path):
    for content in ("{", "[]", "{}"):
        (tmp_path / "part.json").write_text(content)
        with pytest.raises(ValueError, match=r"part\.json is no record of a part"):
            session(tmp_path).record("part")


# Correctness


def test_correctness_of_one_op(interpreter, tmp_path, capsys):
    now = session(tmp_path, "gated_norm")
    assert correctness.run(now) == []
    found = pieces_of(tmp_path, "correctness")
    dtypes = ("bfloat16", "float16", "float32")
    assert set(found) == {f"gated_norm, groups of 16, {dtype}" for dtype in dtypes} | {
        "gated_norm, groups of 4, float32"
    }
    for name, piece in found.items():
        assert piece["status"] == "ok"
        assert piece["same_bits"]
        weight = {"d weight"} if "float32" in name else set()  # sums over tokens may be next to nothing
        assert set(piece["errors"]) == {"output 0", "d x", "d gate"} | weight
    assert "worst" in capsys.readouterr().out


def one_check(**changed):
    (found,) = [case for case in correctness.checks(True) if case.name == "gated_norm, groups of 4"]
    return found._replace(**changed)


def test_what_is_wrong_is_said(interpreter):
    off = one_check(definition=lambda x, weight, gate, **options: 1.01 * x.double() * weight * gate)
    found = correctness.check(off, torch.float32, CPU)
    assert found["status"].startswith("WRONG: ")
    assert correctness.check(off, torch.bfloat16, CPU).get("status") is None  # which the interpreter does not round

    def nan(x, weight, gate, **options):
        return x * weight * gate * torch.nan

    found = correctness.check(one_check(op=nan), torch.float32, CPU)
    assert found["status"].startswith("WRONG: ")
    assert None in found["errors"].values()
    json.dumps(found, allow_nan=False)


def test_other_bits_the_second_time_are_said(interpreter):
    turns = []

    def drifting(x, weight, gate, **options):
        turns.append(1)
        return (x.double() * weight * gate * (1 + 1e-6 * len(turns))).float()

    case = one_check(op=drifting, definition=lambda x, weight, gate, **options: x * weight * gate)
    assert "not the same bits again in output 0" in correctness.check(case, torch.float32, CPU)["status"]


def test_every_op_with_kernels_is_checked():
    for toy in (True, False):
        names = [case.name for case in correctness.checks(toy)]
        assert len(set(names)) == len(names)
        ops = {name.split(",")[0] for name in names}
        assert ops == {
            *("quasiseparable_scan", "semiseparable_scan", "short_conv"),
            *("gated_norm", "matrix_product_scan", "mru_mixer", "scan_layer", "lion_mixer"),
        }
    assert set(sweep.ELSEWHERE) <= set(names)


def test_tests_that_passed_are_left_out_the_next_time(tmp_path):
    log = tmp_path / "log"
    assert correctness.outcomes(log) == {}
    log.write_text('["a", "failed"]\n["b", "passed"]\n["a", "passed"]\n')
    assert correctness.outcomes(log) == {"a": "passed", "b": "passed"}


@pytest.mark.slow
def test_the_projects_own_tests_run_and_are_logged(tmp_path, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    now = session(tmp_path)
    kept = now.record("correctness")
    assert correctness.run_tests(now, kept) == []
    assert kept.pieces["tests of the project"] == {
        "status": "ok",
        "passed": 1,
        "failed": 0,
        "skipped": 0,
        "names_of_failed": [],
    }
    (log,) = tmp_path.glob("tests-*.jsonl")
    before = log.read_text()
    assert correctness.run_pytest(now, log)  # nothing is left, and nothing is run
    assert log.read_text() == before


# Sweep


def test_a_candidate_is_checked_and_timed(interpreter, tmp_path):
    now = session(tmp_path, "float32, mix: forward_chunk 32,")
    kept = now.record("sweep", tiles=False)
    found = sweep.Sweep(now, kept, torch.float32)
    assert now.work(kept, found.pieces()) == []
    (piece,) = kept.pieces.values()
    assert piece["status"] == "ok"
    assert piece["seconds"] > 0
    assert piece["fields"]["forward_chunk"] == 32
    wrong = found.scan._replace(wanted={False: tuple(1.1 * x for x in found.scan.wanted[False])})
    found._made = wrong
    assert found.measure(sweep.GROUPS[0], piece["fields"])["status"].startswith("WRONG: ")


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
        found = group.candidates(itemsize)
        assert 36 <= len(found) <= 44, group.name
        configs = [sweep.fitting(fields, itemsize) for fields in found]
        assert configs[0] == usual(itemsize)
        for config, fields in zip(configs, found, strict=True):
            assert all(getattr(config, name) == value for name, value in fields.items())


def test_a_candidate_that_does_not_fit_is_left_out(tmp_path, monkeypatch):
    def run(self, backward):
        raise sweep.OutOfResources(300_000, 232_448, "shared memory")

    monkeypatch.setattr(sweep.Scan, "run", run)
    now = session(tmp_path, "float32, mix: ")
    assert sweep.run(now) == []
    found = pieces_of(tmp_path, "sweep")
    assert len(found) == sweep.TOY_CANDIDATES
    assert all(piece["status"] == "left out" and "shared memory" in piece["why"] for piece in found.values())
    assert now.record("sweep", tiles=False).wrong() == []
    assert not (tmp_path / "interpreter.json").exists()


def fake_seconds(config) -> float:
    return config.tile / 64 + config.mix_warps + config.state_warps / 100 + config.pair_registers / 1000 + config.stages


def test_the_fastest_right_configuration_becomes_the_table(tmp_path, monkeypatch):
    """With made-up times: small tiles are fast, 4 warps of `mix` are wrong, and the fastest as a whole fails."""

    def measure(self, group, fields):
        if fields.get("mix_warps") == 4:
            return {"status": "WRONG: off", "fields": fields}
        return {"fields": fields, "seconds": sum(fields.values())}

    def whole(self, config, everywhere):
        if config.tile == min(tile for _, tile in (sweep.HALF_TILES if config.itemsize == 2 else sweep.SINGLE_TILES)):
            return {"status": "another width: failed", "config": config._asdict()}
        return {"config": config._asdict(), "total": fake_seconds(config) if everywhere else 1000.0}

    monkeypatch.setattr(sweep.Sweep, "measure", measure)
    monkeypatch.setattr(sweep.Sweep, "whole", whole)
    monkeypatch.setattr(record, "write_atomic", lambda path, content: path.write_text(content))
    before = {path: path.read_bytes() for path in tiles.FOLDER.iterdir() if path.is_file()}
    assert sweep.run(session(tmp_path, toy=False)) == []
    found = pieces_of(tmp_path, "sweep")
    (path,) = tmp_path.glob("interpreter.json")
    chosen = tiles.read(path, "scan", sweep.ScanConfig)
    assert set(chosen) == {2, 4}
    for config in chosen.values():
        assert config.mix_warps == 8
        assert config.tile > 16
    assert json.loads(path.read_text())["measured"]["device"] == "cpu"
    (folder := tmp_path / "tiles").mkdir()
    shutil.copy(path, folder)
    assert measured(folder)["interpreter"] == chosen
    assert found["bfloat16, as a whole: place 1"]["status"] == "another width: failed"
    assert {path: path.read_bytes() for path in tiles.FOLDER.iterdir() if path.is_file()} == before


# Kernels


def test_launches_are_timed_one_by_one(interpreter, tmp_path, capsys):
    assert times.run(session(tmp_path, "gated norm")) == []
    found = pieces_of(tmp_path, "kernels")
    call = found["gated norm, 48 tokens"]
    assert call["status"] == "ok"
    assert [row["kernel"] for row in call["launches"]]
    for row in call["launches"]:
        assert row["bytes"] > 0
        assert row["bandwidth"] == pytest.approx(row["bytes"] / row["seconds"]["median"])
    assert found["ncu: gated norm"]["status"] == "left out"
    assert "B/token" in capsys.readouterr().out


def test_ncu_is_read():
    output = """==PROF== Connected
"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","7","mix","dram__bytes_read.sum","Mbyte","1,234.5"
"0","7","mix","dram__bytes_write.sum","byte","12"
"0","7","mix","gpu__time_duration.sum","us","3.5"
"1","7","norm","dram__bytes_read.sum","Kbyte","2"
"""
    first, second = times.read_ncu(output)
    assert first == {"kernel": "mix", "bytes_read": 1234.5e6, "bytes_written": 12.0, "ns": 3500.0}
    assert second == {"kernel": "norm", "bytes_read": 2000.0}
    assert times.read_ncu("==ERROR== ERR_NVGPUCTRPERM") == []


# Peers


def test_a_peer_runs_in_its_own_process(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "TOY", (peers.Short("mru", 48, 24, ("--sizes", "4x2", "--kind", "scan")),))
    assert peers.run(session(tmp_path)) == []
    (piece,) = pieces_of(tmp_path, "peers").values()
    assert piece["status"] == "ok"
    names = [candidate["candidate"] for candidate in piece["record"]["cases"][0]["candidates"]]
    assert names[0] == "ours"
    assert "Brent-Kung" in names


def test_a_peer_without_time_is_left_and_one_that_takes_too_long_is_wrong(tmp_path, monkeypatch):
    def slow(command, timeout, **options):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(peers.subprocess, "run", slow)
    now = session(tmp_path, seconds=60.0)
    assert len(peers.run(now)) == len(peers.TOY)
    assert pieces_of(tmp_path, "peers") == {}
    assert peers.run(session(tmp_path, "scan", seconds=1000.0)) == []
    (piece,) = pieces_of(tmp_path, "peers").values()
    assert piece["status"] == "failed: took longer than 150 s"


def test_a_command_that_fails_is_one_line(tmp_path):
    short = peers.Short("mru", 48, 24, ("--sizes", "5x2"))
    assert "failed: matmix: error: --sizes 5x2" in peers.measured(short, session(tmp_path))["status"]


# The command


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
    monkeypatch.setattr(
        peers, "pieces", lambda session: [Piece(name, lambda: {"record": {"cases": []}}) for name in "ab"]
    )
    assert run_here("peers", CPU, tmp_path, 1.0, "") == LEFT
    assert run_here("peers", CPU, tmp_path, 100.0, "") == DONE
    monkeypatch.setattr(peers, "pieces", lambda session: [Piece("c", lambda: {"status": "WRONG"})])
    assert run_here("peers", CPU, tmp_path, 100.0, "") == WRONG


def copy_of_the_tree(folder: Path) -> Path:
    for room in ROOMS:
        shutil.copytree(ROOT / room, folder / room, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "__init__.py", folder)
    return folder


# Found before that of Python, so that what is installed in editable form is not seen in any process.
HIDING = """
import sys
sys.meta_path[:] = [found for found in sys.meta_path if not getattr(found, "__module__", "").startswith("__editable__")
                    and not getattr(found, "__name__", "").startswith("_Editable")]
sys.path_hooks[:] = [hook for hook in sys.path_hooks if "Editable" not in repr(hook)]
sys.path[:] = [entry for entry in sys.path if not entry.startswith("__editable__")]
"""


def plain_copy(tmp_path, *words) -> subprocess.CompletedProcess:
    (tmp_path / "hiding").mkdir()
    (tmp_path / "hiding" / "sitecustomize.py").write_text(HIDING)
    tree = copy_of_the_tree(tmp_path / "copy")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(tmp_path / "hiding")
    check = [sys.executable, "-P", "-c", "import matmix.kernels"]
    assert "No module named 'matmix'" in subprocess.run(check, env=environment, capture_output=True, text=True).stderr
    script = tree / "benchmarks" / "gpu_session" / "plain.py"
    run = [sys.executable, str(script), "--device", "cpu", "--out", str(tmp_path / "out"), *words]
    return subprocess.run(run, env=environment, cwd=tmp_path, capture_output=True, text=True)


def test_it_runs_from_a_plain_copy_with_nothing_installed(tmp_path):
    done = plain_copy(tmp_path, "--part", "correctness", "--only", "gated_norm, groups of 4, float32")
    assert done.returncode == DONE, done.stdout + done.stderr
    kept = json.loads((tmp_path / "out" / "correctness.json").read_text())
    assert kept["pieces"]["gated_norm, groups of 4, float32"]["status"] == "ok"
    assert kept["commit"] == ""
    assert kept["code"] == record.digest(record.KERNELS.rglob("*.py"))


def test_wheels_are_unpacked(tmp_path, capsys):
    wheel = tmp_path / "one-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("one/__init__.py", "one-1.0.data/purelib/two.py", "one-1.0.data/scripts/run", "../out.py"):
            archive.writestr(name, "3")
    plain.unpack(wheel, tmp_path / "there")
    found = {str(path.relative_to(tmp_path / "there")) for path in (tmp_path / "there").rglob("*") if path.is_file()}
    assert found == {"one/__init__.py", "two.py"}
    assert not (tmp_path / "out.py").exists()
    assert plain.main(["--wheels", str(tmp_path / "there")]) == 2
    assert "there are no wheels in" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_all_parts_at_toy_size(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    words = ["gpu-session", "--device", "cpu", "--out", str(tmp_path)]
    run = [sys.executable, "-P", "-m", "matmix.benchmarks", *words]
    done = subprocess.run(run, env=environment, capture_output=True, text=True)
    assert done.returncode == DONE, done.stdout + done.stderr
    for part in command.PARTS:
        assert pieces_of(tmp_path, part)
    start = time.monotonic()
    assert subprocess.run(run, env=environment, capture_output=True).returncode == DONE
    assert time.monotonic() - start < 120  # nothing is done again


# As on a machine with an H100, but for the launches themselves.
WARMING = """
import torch
from matmix.kernels import backend
from matmix.benchmarks.gpu_session import correctness, record
backend._no_triton = lambda like: ""
record.architecture = lambda device: "sm_90"
(case,) = [x for x in correctness.checks(True) if x.name == "gated_norm, groups of 4"]
cpu = torch.device("cpu")
dry = lambda: correctness.dry(case, torch.bfloat16, cpu)
record.compile_ahead([record.Piece("norm", dict, dry), record.Piece("broken", dict, lambda: 1 / 0)], cpu)
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

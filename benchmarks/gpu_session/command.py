"""`gpu-session`: runs its parts, each in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import operator
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from matmix.benchmarks.calls import Call, form_of, on_device
from matmix.benchmarks.counts import counted_calls, moved_bytes
from matmix.benchmarks.gpu_session import sweep
from matmix.benchmarks.gpu_session.record import DeviceLost, Piece, Record
from matmix.benchmarks.measure import Clock, copy_bandwidth, device_of, median_seconds
from matmix.benchmarks.report import RESULTS, device_name, slug
from matmix.data.processes import end_with
from matmix.kernels.launching import record_launches

ROOT = Path(__file__).resolve().parents[2]
COMMAND = (sys.executable, "-P", "-m", "matmix.benchmarks")
PARTS = ("correctness", "sweep", "kernels", "peers")
GRACE = 15.0
"""Seconds beyond its time after which a part's process is ended."""
DONE, WRONG, LEFT, LOST = 0, 1, 3, 4
"""Exit statuses: all done and right; something is wrong or failed; something is left; the device answers no more."""
RESTARTS = 20
TOKENS = (65_536, 524_288)
TOY_TOKENS, TOY_PIECES = 64, 3
TOY_TESTS = "test_bfloat16.py"
LONGEST_TESTS, LONGEST_PEER = 400.0, 150.0
"""Seconds that the tests of a file, and one command at one length, may take: peers that choose tiles by trying them
take a minute at their first length."""
PEERS = (
    "scan --tokens 65536 --lengths 2048",
    "layer --tokens 65536 --lengths 2048",
    "encoder --lengths 512",
    "encoder --lengths 2048",
    "encoder --lengths 8192",
    "mru --tokens 65536 --lengths 4096 --kind mixer",
    "scan --tokens 524288 --lengths 2048",
    "scan --tokens 65536 --lengths 65536",
    "mru --tokens 65536 --lengths 4096 --kind scan --sizes 16x3",
    "layer --tokens 65536 --lengths 512",
    "layer --tokens 65536 --lengths 16384",
    "scan --tokens 65536 --lengths 512",
)
"""What is measured, the most important first."""
TOY_PEERS = (
    "scan --tokens 96 --lengths 48 --d-model 64 --dtype float32",
    "mru --tokens 96 --lengths 48 --sizes 4x2 --dtype float32",
    "layer --tokens 96 --lengths 48 --d-model 64 --dtype float32",
    "encoder --tokens 96 --lengths 48 --d-model 64 --layers 1 --dtype float32",
)


@dataclass(frozen=True, kw_only=True)
class GpuSession:
    """What half an hour on a GPU is spent on.

    Four parts, each below nine minutes: whether the kernels are right (correctness: the project's own tests of them),
    which tiles are the fastest (sweep), what each kernel takes (kernels), and how ours compares with others (peers).
    Each writes its results into a file of its own as it goes, leaves out what that file holds already, and stops before
    its time is over: started again, it goes on. Without a GPU, --device cpu runs the same parts at toy sizes, the
    kernels in Triton's interpreter.
    """

    part: Literal["", "correctness", "sweep", "kernels", "peers"] = ""
    """Only this part; default: all, one after the other."""
    device: str = "cuda"
    """cuda, cuda:1 ... or cpu."""
    out: Path | None = None
    """Folder of the records; default: results/gpu-session-DEVICE of the benchmarks."""
    minutes: float = 8.5
    """For each part."""
    only: str = ""
    """Only what has this text in its name; of correctness, files of tests."""
    here: bool = False
    """Run the part in this process, as the command itself starts each."""

    def run(self, rest: list[str], typed: list[str]) -> int:
        device = device_of(self.device)
        if not 0 < self.minutes <= 600:
            raise ValueError(f"--minutes {self.minutes}: must be more than 0, and at most 600")
        out = self.out or RESULTS / f"gpu-session-{slug(device_name(device))}"
        if self.here:
            if not self.part:
                raise ValueError("--here: say which --part")
            return run_here(self.part, device, out, self.minutes * 60, self.only)
        statuses = {}
        for part in [self.part] if self.part else PARTS:
            print(f"\n{part}\n", flush=True)
            statuses[part] = run_part(part, device, out, self.minutes * 60, self.only)
        words = {DONE: "done", WRONG: "done, with failures", LEFT: "not finished: start it again to go on"}
        for part, status in statuses.items():
            print(f"{part:<14}{words.get(status, f'ended with status {status}')}; record: {out / part}.json")
        return next((status for status in (WRONG, LOST, LEFT) if status in statuses.values()), max(statuses.values()))


def run_part(part: str, device: torch.device, out: Path, seconds: float, only: str) -> int:
    """Runs a part in a process of its own, and again where that was lost before its time was over and had come further;
    returns its exit status."""
    end, status, file = time.monotonic() + seconds, LEFT, out / f"{part}.json"
    # Triton decides where it is imported whether it interprets.
    environment = os.environ | ({"TRITON_INTERPRET": "1"} if device.type == "cpu" else {})
    for _ in range(RESTARTS):
        if (left := end - time.monotonic()) <= 0:
            break
        before = file.read_bytes() if file.exists() else None
        command = [*COMMAND, "gpu-session", "--here", "--part", part, "--device", str(device), "--out", str(out)]
        command += ["--minutes", str(left / 60), "--only", only]
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        try:
            status = process.wait(left + GRACE)
        except subprocess.TimeoutExpired:
            print(f"{part}: ended, as it took longer than its time", flush=True)
            return LEFT
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if status in (DONE, WRONG, 2, LEFT) or (file.read_bytes() if file.exists() else None) == before:
            break
        print(f"{part}: its process ended with status {status}; going on in another one", flush=True)
    return status


def run_here(part: str, device: torch.device, out: Path, seconds: float, only: str) -> int:
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError("--here --device cpu: set TRITON_INTERPRET=1, so that kernels are interpreted")
    end_with(os.getppid(), signal.SIGKILL)  # nothing is to run on alone on the device
    record = Record(out, part, device, seconds, only)
    try:
        left = {"correctness": correctness, "sweep": sweep.run, "kernels": kernels, "peers": peers}[part](record)
    except DeviceLost as lost:
        print(f"{part}: the device answers no more after: {lost}", flush=True)
        return LOST
    if left:
        print(f"{part}: {len(left)} left, from {left[0]} on; start it again to go on", flush=True)
    for line in record.wrong():
        print(f"{part}: {line}", flush=True)
    return LEFT if left else WRONG if record.wrong() else DONE


# -- Correctness -------------------------------------------------------------------------------------------------------


def correctness(record: Record) -> list[str]:
    """Runs the project's tests of the kernels, a piece for each file: on the GPU if there is one, else interpreted."""
    folder = ROOT / "tests" / "kernels"
    files = sorted(folder.rglob(TOY_TESTS if record.toy else "test_*.py"))
    names = {str(path.relative_to(folder)): path for path in files}
    if not any(record.only in name for name in names):
        raise ValueError(f"--only {record.only}: no file of tests is called so; there are {', '.join(names)}")
    pieces = [Piece(name, partial(run_tests, path, record)) for name, path in names.items()]
    return record.work(pieces, operator.itemgetter("summary"))


def run_tests(path: Path, record: Record) -> dict[str, Any]:
    """Returns how many tests of a file passed; those marked slow are left out."""
    for name in ("pytest", "hypothesis"):
        if importlib.util.find_spec(name) is None:
            return {"status": "left out", "summary": f"{name} is not installed"}
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", "--tb=line"]
    if importlib.util.find_spec("xdist") and not record.toy:
        command += ["-n", str(min(8, len(os.sched_getaffinity(0))))]
    # The tests set the interpreter's variable themselves.
    done = record.run_process([*command, str(path)], LONGEST_TESTS, ("TRITON_INTER", "PYTEST"), cwd=ROOT)
    lines = (done.stdout + done.stderr).strip().splitlines() or ["pytest says nothing"]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    status = "ok" if done.returncode in (0, 5) else f"failed: {(failed or lines[-1:])[0]}"  # 5: all are slow
    return {"status": status, "summary": lines[-1], "failed": failed}


# -- Kernels -----------------------------------------------------------------------------------------------------------


def kernels(record: Record) -> list[str]:
    bandwidth = copy_bandwidth(Clock(record.device), 1 << 20 if record.toy else None)
    print(f"copy bandwidth {bandwidth / 1e9:,.0f} GB/s, read + written", flush=True)
    pieces = []
    for tokens in (TOY_TOKENS,) if record.toy else TOKENS:
        for call in counted_calls(torch.float32 if record.toy else torch.bfloat16):
            name = f"{call.op}: {call.title}, {tokens:,} tokens"
            pieces.append(Piece(name, partial(times, call, tokens, record, bandwidth), partial(dry, call, tokens)))
    return record.work(pieces[:TOY_PIECES] if record.toy else pieces, times_text)


def dry(call: Call, tokens: int) -> None:
    with on_device(torch.device("meta"), tokens):
        call.run(form_of(call))


def times(call: Call, tokens: int, record: Record, bandwidth: float) -> dict[str, Any]:
    """Returns for each launch of both passes, from a cold second-level cache: seconds, and bytes of its tensors."""
    with on_device(record.device, tokens), record_launches(run=True) as launches:
        call.run(form_of(call))
    rows = []
    for launch in launches:
        seconds, moved = median_seconds(partial(sweep.again, launch), record.device), moved_bytes(launch)
        row = {"kernel": launch.kernel.__name__, "grid": list(launch.grid), "seconds": seconds, "bytes": moved}
        rows.append(row | {"bandwidth": moved / seconds, "of_copy": moved / seconds / bandwidth})
    total = sum(row["seconds"] for row in rows)
    return {"launches": rows, "seconds": total, "ns_per_token": total * 1e9 / tokens, "copy_bandwidth": bandwidth}


def times_text(result: dict[str, Any]) -> str:
    lines = [f"{result['seconds'] * 1e3:,.3f} ms, {result['ns_per_token']:,.1f} ns a token"]
    for row in result["launches"]:
        speed = f"{row['bandwidth'] / 1e9:>10,.0f} GB/s{row['of_copy']:>8.0%} of a copy"
        lines.append(f"    {row['kernel']:<22}{row['seconds'] * 1e6:>12,.1f} us{speed}")
    return "\n".join(lines)


# -- Peers -------------------------------------------------------------------------------------------------------------


def peers(record: Record) -> list[str]:
    """Measures ours against other implementations, each length of each command in a process of its own, so that a peer
    that ends its process ends no more than its own piece."""
    pieces = [Piece(words, partial(compared, words, record)) for words in (TOY_PEERS if record.toy else PEERS)]
    return record.work(pieces, compared_text)


def compared(words: str, record: Record) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "record.json")
        command = [*COMMAND, *words.split(), "--device", str(record.device), "--out", str(out)]
        command += ["--rounds", "2" if record.toy else "15", "--budget", "1.0", "--no-compile", "--no-plot"]
        # These compare what users get, on a CPU the PyTorch forms: nothing is interpreted.
        done = record.run_process(command, LONGEST_PEER, ("TRITON_INTERPRET",))
        if not out.exists():
            last = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
            return {"status": f"failed: {last[:200]}"}
        print(done.stdout, flush=True)
        measured = json.loads(out.read_text())
    differing = [x["candidate"] for x in candidates_in(measured) if x.get("agrees") is False]
    return {"status": f"DIFFERS FROM OURS: {differing[0]}" if differing else "ok", "record": measured}


def compared_text(result: dict[str, Any]) -> str:
    ratios = {x["candidate"]: x.get("over_ours", {}).get("both") for x in candidates_in(result["record"])}
    return "; ".join(f"{name} {ratio:.2f} x" for name, ratio in ratios.items() if ratio)


def candidates_in(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [candidate for case in record["cases"] for candidate in case["candidates"]]

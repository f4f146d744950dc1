"""Real training processes for tests that harm them: start, watch, kill, start again, compare with a run left alone.

A `Run` is one run directory; `Run.start` starts its ranks as separate processes (forked from a `Zygote`, which saves
their imports, or started by torchrun) with the faults of `injections.py` in some of them, and gives an `Attempt`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil
import torch
from saved_weights import read_weights

HERE = Path(__file__).resolve().parent
# What a run may take on a machine that does other things besides; a test that gets there has failed.
PATIENCE = 180.0


def wait_until(condition: Callable[[], Any], what: str, patience: float = PATIENCE) -> Any:
    """The first value of `condition` that is true."""
    deadline = time.monotonic() + patience
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {patience:.0f} s for {what}"
        time.sleep(0.01)
    return value


def free_port() -> int:
    """One below those that Linux gives to outgoing connections, so that it stays free until it is used again."""
    while True:
        port = random.SystemRandom().randint(20000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def python_path() -> str:
    """For processes that import these files."""
    return os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])


class Zygote:
    """A process with all imports done that forks training processes on request."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(HERE / "zygote.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": python_path()},
        )
        self.ended = False
        self.codes: dict[int, int] = {}
        self.started: list[int] = []
        self.heard = threading.Condition()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in self.process.stdout:
            message = json.loads(line)
            with self.heard:
                if "code" in message:
                    self.codes[message["pid"]] = message["code"]
                else:
                    self.started.append(message["pid"])
                self.heard.notify_all()
        with self.heard:
            self.ended = True
            self.heard.notify_all()

    def start(self, arguments: list[str], environment: dict[str, str], output: Path) -> int:
        """The new process's number."""
        with self.heard:
            known = len(self.started)
            request = {"arguments": arguments, "environment": environment, "output": str(output)}
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            self.heard.wait_for(lambda: self.ended or len(self.started) > known, PATIENCE)
            assert len(self.started) > known, "the zygote does not answer; its own error is on stderr"
            return self.started[-1]

    def close(self) -> None:
        # Not by the end of its input: a process that this one forked since, as a data loader, may hold the pipe open.
        self.process.kill()
        self.process.wait()


@dataclasses.dataclass
class Attempt:
    """The processes of one start of a run: its ranks, or the torchrun that started them."""

    zygote: Zygote
    mark: str  # stands in the environment of every process of the attempt
    markers: Path
    outputs: list[Path]
    pids: list[int]
    launcher: subprocess.Popen | None = None

    def poll(self) -> list[int | None]:
        """Exit codes, None for what still runs."""
        if self.launcher is not None:
            return [self.launcher.poll()]
        return [self.zygote.codes.get(pid) for pid in self.pids]

    def wait(self, patience: float = PATIENCE) -> list[int]:
        """Exit codes in order of rank (of the launcher, if there is one)."""
        try:
            wait_until(lambda: None not in self.poll(), "the processes to end", patience)
        except AssertionError as error:
            text = self.text()
            self.kill()
            raise AssertionError(f"{error}: {self.poll()}\n{text}") from None
        return self.poll()

    def kill(self, *ranks: int, number: int = signal.SIGKILL) -> None:
        """Sends a signal to ranks, or, without any, SIGKILL to every process of the attempt."""
        if ranks:
            for rank in ranks:
                if self.poll()[rank] is None:
                    os.kill(self.pids[rank], number)
            return
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self.launcher is not None:
            self.launcher.wait()
        wait_until(lambda: not self.processes(), "the killed processes to be gone")

    def processes(self) -> list[psutil.Process]:
        """Everything alive that belongs to the attempt, also what the ranks started themselves."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("FAULTS_MARK") == self.mark:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied, ProcessLookupError):
                continue
        known = {process.pid for process in found}
        # A forked process shows the environment of its zygote until it starts another program.
        for pid in self.pids:
            if pid not in known and pid not in self.zygote.codes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    found.append(psutil.Process(pid))
        return found

    def marked(self, name: str, rank: int) -> bool:
        return (self.markers / f"{name}.{rank}").exists()

    def wait_for_mark(self, name: str, rank: int = 0) -> None:
        def reached() -> bool:
            assert None in self.poll() or self.marked(name, rank), f"ended before {name}:\n{self.text()}"
            return self.marked(name, rank)

        wait_until(reached, f"rank {rank} to reach {name}")

    def set_mark(self, name: str) -> None:
        (self.markers / name).touch()

    def text(self, rank: int | None = None) -> str:
        """What a rank, or all of them, wrote to their outputs."""
        outputs = self.outputs if rank is None else [self.outputs[rank]]
        return "".join(path.read_text(errors="replace") for path in outputs if path.exists())


class Run:
    """One run directory and the command that starts it."""

    def __init__(
        self,
        zygote: Zygote,
        folder: Path,
        dataset: str,
        *overrides: str,
        ranks: int = 1,
        nodes: int = 1,
        command: tuple[str, ...] = ("debug_mru",),
    ) -> None:
        """dataset: "" where the command names its data itself."""
        self.zygote, self.folder, self.ranks, self.nodes, self.command = zygote, folder, ranks, nodes, command
        self.path = folder / "run"
        data = ["--data.path", dataset] if dataset else []
        self.overrides = [*data, "--run-dir", str(self.path), "--device", "cpu", *overrides]
        self.attempts: list[Attempt] = []
        folder.mkdir(parents=True, exist_ok=True)

    def start(
        self, *overrides: str, faults: Iterable[dict[str, Any]] = (), torchrun: bool = False, port: int = 0
    ) -> Attempt:
        """Starts all ranks, which meet at `port` or one that is free. A fault that has "markers": True is told the
        attempt's folder for them."""
        number = len(self.attempts)
        markers = self.folder / f"markers-{number}"
        markers.mkdir()
        faults = [{**fault, "markers": str(markers)} if fault.get("markers") else fault for fault in faults]
        common = {
            "FAULTS": json.dumps(faults),
            "FAULTS_MARK": uuid.uuid4().hex,
            "MATMIX_ATTEMPT": f"attempt-{number}",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port or free_port()),
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        arguments = [*self.command, *self.overrides, *overrides]
        attempt = Attempt(self.zygote, common["FAULTS_MARK"], markers, [], [])
        self.attempts.append(attempt)
        if torchrun:
            attempt.outputs = [self.folder / f"attempt-{number}.log"]
            attempt.launcher = self._torchrun(arguments, common, attempt.outputs[0])
            return attempt
        here = self.ranks // self.nodes
        for rank in range(self.ranks):
            places = {"RANK": rank, "LOCAL_RANK": rank % here, "WORLD_SIZE": self.ranks, "LOCAL_WORLD_SIZE": here}
            places["GROUP_RANK"] = rank // here
            attempt.outputs.append(self.folder / f"attempt-{number}-rank-{rank}.log")
            environment = {**common, **{name: str(value) for name, value in places.items()}}
            attempt.pids.append(self.zygote.start(arguments, environment, attempt.outputs[-1]))
        return attempt

    def _torchrun(self, arguments: list[str], environment: dict[str, str], output: Path) -> subprocess.Popen:
        command = [sys.executable, "-P", "-m", "torch.distributed.run", f"--nproc-per-node={self.ranks}"]
        command += ["--master-addr=127.0.0.1", f"--master-port={environment['MASTER_PORT']}", str(HERE / "worker.py")]
        with output.open("ab") as file:
            return subprocess.Popen(
                command + arguments,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**os.environ, **environment, "PYTHONPATH": python_path(), "PYTHONSAFEPATH": "1"},
                start_new_session=True,
            )

    def finish(self, *overrides: str, **options: Any) -> Attempt:
        """Starts the run once more and lets it end; it must end well."""
        attempt = self.start(*overrides, **options)
        codes = attempt.wait()
        assert set(codes) == {0}, f"ended with {codes}:\n{attempt.text()}"
        return attempt

    def close(self) -> None:
        for attempt in self.attempts:
            attempt.kill()

    # -- what it left behind ---------------------------------------------------------------------------------

    def records(self, kind: str = "train") -> list[dict[str, Any]]:
        """The whole lines of metrics.jsonl, also while it is being written."""
        path = self.path / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        records = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [record for record in records if record["kind"] == kind]

    def steps(self) -> int:
        """The last step that was recorded."""
        records = self.records()
        return records[-1]["step"] if records else 0

    def curve(self) -> list[tuple[int, float, float, int]]:
        """(step, loss, gradient norm, tokens since the start) of every step that was recorded, in the file's order."""
        return [(r["step"], r["loss"], r["grad_norm"], r["tokens"]) for r in self.records()]

    def checkpoints(self) -> list[str]:
        """Names of what lies in the folder of checkpoints, finished or not."""
        folder = self.path / "checkpoints"
        return sorted(path.name for path in folder.iterdir()) if folder.exists() else []

    def newest(self) -> Path:
        return max((self.path / "checkpoints").glob("step-*"))

    def weights(self) -> dict[str, torch.Tensor]:
        """Full weights of the newest checkpoint, all of whose checksums are right."""
        return dict(read_weights(self.newest()))


def assert_same(run: Run, reference: Run) -> None:
    """The run ended as one that nothing happened to: every step once, the same numbers bit for bit, nothing lying
    around."""
    assert run.curve() == reference.curve()
    evaluations = [[(r["step"], r["loss"]) for r in each.records("validation")] for each in (run, reference)]
    assert evaluations[0] == evaluations[1]
    weights, expected = run.weights(), reference.weights()
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(weights[name], tensor), name
    assert run.checkpoints() == reference.checkpoints(), run.checkpoints()
    assert not (leftovers := [p.name for p in run.path.rglob("*.tmp*")]), leftovers

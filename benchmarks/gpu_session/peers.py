"""Ours against other implementations, in short: `scan`, `mru`, `layer` and `encoder` at a few lengths, few rounds each.

Each length of each command runs in a process of its own, so that a peer that ends its process, or takes longer than
there is time, ends no more than its own piece.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from matmix.benchmarks.gpu_session.record import OutOfTime, Piece, Session

LONGEST = 150.0
"""Seconds that one piece may take: peers that choose tiles by trying them take a minute at their first length."""


class Short(NamedTuple):
    """One command at one length."""

    command: str
    tokens: int
    seqlen: int
    words: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.command}, length {self.seqlen:,}, {self.tokens:,} tokens"


SHORT = (
    Short("scan", 65_536, 2048),
    Short("layer", 65_536, 2048),
    Short("encoder", 32_768, 512),
    Short("encoder", 32_768, 2048),
    Short("encoder", 32_768, 8192),
    Short("mru", 65_536, 4096, ("--kind", "mixer")),
    Short("scan", 524_288, 2048),
    Short("scan", 65_536, 65_536),
    Short("mru", 65_536, 4096, ("--kind", "scan", "--sizes", "16x3")),
    Short("layer", 65_536, 512),
    Short("layer", 65_536, 16_384),
    Short("scan", 65_536, 512),
)
"""What is measured, the most important first."""
TOY = (
    Short("scan", 96, 48, ("--d-model", "64")),
    Short("mru", 96, 48, ("--sizes", "4x2")),
    Short("layer", 96, 48, ("--d-model", "64")),
    Short("encoder", 96, 48, ("--d-model", "64", "--layers", "1")),
)


def pieces(session: Session) -> list[Piece]:
    """All of them."""
    found = []
    for short in TOY if session.toy else SHORT:
        name = f"{short.name}{', ' + ' '.join(short.words) if short.words and not session.toy else ''}"
        found.append(Piece(name, partial(measured, short, session)))
    return found


def measured(short: Short, session: Session) -> dict[str, Any]:
    """The record of a command; or what it ended with. Raises `OutOfTime`."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        command = [sys.executable, "-P", "-m", "matmix.benchmarks", short.command, "--no-compile"]
        command += ["--tokens", str(short.tokens), "--lengths", str(short.seqlen), "--device", str(session.device)]
        command += ["--rounds", "2" if session.toy else "15", "--budget", "0.2" if session.toy else "1.0"]
        command += [*(("--dtype", "float32") if session.toy else ()), *short.words, "--no-plot", "--out", str(out)]
        # These compare what users get, on a CPU the PyTorch forms: nothing is interpreted.
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        limit = max(5.0, min(LONGEST, session.limit.left() - 3))
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit, env=environment)
        except subprocess.TimeoutExpired:
            if limit < LONGEST:
                raise OutOfTime from None
            return {"status": f"failed: took longer than {limit:.0f} s"}
        if not out.exists():
            last = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
            return {"status": f"failed: {last[:200]}"}
        print(done.stdout, flush=True)
        record = json.loads(out.read_text())
        candidates = [candidate for case in record["cases"] for candidate in case["candidates"]]
        differing = [candidate["candidate"] for candidate in candidates if candidate.get("agrees") is False]
        return {"status": f"DIFFERS FROM OURS: {differing[0]}" if differing else "ok", "record": record}


def text(found: dict[str, Any]) -> str:
    """Seconds of forward and backward of each candidate, over ours."""
    words = []
    for case in found["record"]["cases"]:
        for candidate in case["candidates"]:
            ratio = candidate.get("over_ours", {}).get("both")
            words.append(f"{candidate['candidate']} {f'{ratio:.2f} x' if ratio else candidate['status']}")
    return "; ".join(words)


def run(session: Session) -> list[str]:
    """The part; returns what is left."""
    return session.work(session.record("peers"), pieces(session), text)

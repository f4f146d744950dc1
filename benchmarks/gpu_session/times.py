"""What each kernel takes: seconds, bytes and achieved bandwidth of every launch of the main calls, alone.

A forward and a backward pass of each op run once, and their launches are kept; then each is launched by itself, from a
cold second-level cache. Its bytes are those of its tensors, each once, and its bandwidth is compared with that of a
copy of a gigabyte on the same device. Where NVIDIA's ncu is installed and may read counters, it adds the bytes that
each kernel really moved.
"""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from matmix.benchmarks.gpu_session.record import OutOfTime, Piece, Session
from matmix.benchmarks.gpu_session.sweep import again
from matmix.benchmarks.kernels import conv, mru, norm
from matmix.benchmarks.kernels.counts import _bytes
from matmix.benchmarks.kernels.scan import hydra_inputs
from matmix.benchmarks.measuring.settings import Settings
from matmix.benchmarks.measuring.suite import Candidate, Case, both_passes, on_leaves
from matmix.benchmarks.measuring.timing import Clock, copy_bandwidth, quartiles
from matmix.kernels import matrix_product_scan, mru_mixer, quasiseparable_scan, semiseparable_scan
from matmix.kernels.launching import Launch, record_launches

TOKENS = (65_536, 524_288)
SEQLEN = 2048
DOCUMENT = 512
"""Tokens of a document where rows are packed."""
METRICS = {
    "dram__bytes_read.sum": "bytes_read",
    "dram__bytes_write.sum": "bytes_written",
    "gpu__time_duration.sum": "ns",
}
"""What ncu is asked for, and what it is called here."""


def candidates(settings: Settings) -> Iterator[tuple[str, Callable[[], Candidate]]]:
    """Each main call by its name, made when it is asked for; all take tensors of real values in the settings' dtype."""
    for title, packed in (("Hydra's scan", False), ("Hydra's scan, packed", True)):
        yield title, partial(_hydra, settings, packed)
    yield "LION's scan", partial(_lion, settings)
    yield "SSD's scan", partial(_ssd, settings)
    yield (
        "short convolution, width 7",
        partial(_like, conv.ours(False, "triton"), conv.conv_case, _seqlen(settings), False, settings),
    )
    yield "gated norm", partial(_like, norm.ours("triton"), norm.norm_case, settings.tokens, settings)
    single = replace(settings, dtype=torch.float32)
    for order, heads in [(4, 2)] if settings.device.type == "cpu" else [(8, 6), (16, 3)]:
        size = mru.Size(order, heads, "cayley")
        mixer = partial(mru_mixer, construction=size.construction, backend="triton")
        yield f"MRU mixer, {size}", partial(_like, mixer, mru.mixer_case, _seqlen(settings), size, settings)
        scan = partial(matrix_product_scan, backend="triton")
        yield f"MRU scan, {size}", partial(_like, scan, mru.scan_case, _seqlen(settings), size, single)


def _like(op: Callable[..., Tensor], make: Callable[..., Case], *arguments: Any) -> Candidate:
    """An op on the tensors that ours has in a case of another command."""
    ours = make(*arguments).candidates[0]
    return on_leaves("ours", op, ours.leaves, ours.cotangent)


def _seqlen(settings: Settings) -> int:
    return settings.lengths[0]


def _hydra_inputs(settings: Settings, packed: bool = False) -> tuple[list[Tensor], Tensor, Tensor | None]:
    """[v, q, k, q, k, log-decays, input scales, diagonal], a cotangent, and the documents' boundaries."""
    seqlen = _seqlen(settings)
    batch = settings.batch(seqlen)
    rows, length = (1, batch * seqlen) if packed else (batch, seqlen)
    leaves, cotangent = hydra_inputs(rows, length, settings)
    v, qf, kf, qb, kb, dt_forward, dt_backward, decay, diagonal = (x.detach() for x in leaves)
    given = [v, qf, kf, qb, kb, dt_forward * decay, dt_backward * decay, dt_forward, dt_backward, diagonal]
    bounds = None
    if packed:
        document = min(DOCUMENT, seqlen // 2)
        bounds = torch.arange(0, length + 1, document, dtype=torch.int32, device=settings.device)
        bounds[-1] = length
    return [x.requires_grad_() for x in given], cotangent, bounds


def _hydra(settings: Settings, packed: bool) -> Candidate:
    leaves, cotangent, bounds = _hydra_inputs(settings, packed)

    def mix(v, qf, kf, qb, kb, af, ab, wf, wb, diagonal):
        return quasiseparable_scan(
            v, qf, kf, qb, kb, af, ab, input_scale_forward=wf, input_scale_backward=wb, diagonal=diagonal,
            cu_seqlens=bounds, backend="triton",
        )  # fmt: skip

    return on_leaves("ours", mix, leaves, cotangent)


def _lion(settings: Settings) -> Candidate:
    (v, q, k, _, _, decay, *_), cotangent, _ = _hydra_inputs(settings)
    options = {"shift": False, "self_term": "mean", "gate_offset": 1, "normalize": "row_sum", "backend": "triton"}
    positive = [x.detach().abs().requires_grad_() for x in (q, k)]
    leaves = [v, *positive, decay]
    return on_leaves(
        "ours", lambda v, q, k, decay: quasiseparable_scan(v, q, k, q, k, decay, decay, **options), leaves, cotangent
    )


def _ssd(settings: Settings) -> Candidate:
    (v, q, k, _, _, decay, _, steps, _, diagonal), cotangent, _ = _hydra_inputs(settings)

    def mix(v, q, k, decay, steps, diagonal):
        return semiseparable_scan(v, q, k, decay, input_scale=steps, diagonal=diagonal, backend="triton")

    return on_leaves("ours", mix, [v, q, k, decay, steps, diagonal], cotangent)


def times(make: Callable[[], Candidate], tokens: int, session: Session, bandwidth: float) -> dict[str, Any]:
    """Of each launch of both passes: seconds, bytes and bandwidth."""
    clock, rounds = Clock(session.device), 1 if session.toy else 15
    candidate = make()
    with record_launches(run=True) as launches:
        both_passes(candidate)
    if not launches:
        raise RuntimeError("no kernel was launched")
    rows = []
    for found in launches:
        again(found)  # nothing is compiled or loaded when it is timed
        seconds = quartiles([clock.seconds(partial(again, found))[0] for _ in range(rounds)])
        moved = _bytes(found)
        rows.append(
            {
                "kernel": found.kernel.__name__,
                "grid": list(found.grid),
                "seconds": seconds._asdict(),
                "bytes": moved,
                "bytes_per_token": round(moved / tokens, 1),
                "bandwidth": moved / seconds.median,
                "of_copy": moved / seconds.median / bandwidth,
            }
        )
    total = sum(row["seconds"]["median"] for row in rows)
    return {"launches": rows, "seconds": total, "ns_per_token": total * 1e9 / tokens, "copy_bandwidth": bandwidth}


def dry(make: Callable[[], Candidate]) -> None:
    """Only the launches."""
    both_passes(make())


def text(found: dict[str, Any]) -> str:
    """The launches of a call, a line each."""
    if "launches" not in found:
        return str(found.get("why") or f"{len(found['kernels'])} kernels")
    lines = [f"{found['seconds'] * 1e3:,.3f} ms, {found['ns_per_token']:,.1f} ns a token"]
    for row in found["launches"]:
        microseconds = row["seconds"]["median"] * 1e6
        lines.append(
            f"    {row['kernel']:<22}{microseconds:>12,.1f} us{row['bytes_per_token']:>12,.0f} B/token"
            f"{row['bandwidth'] / 1e9:>10,.0f} GB/s{row['of_copy']:>8.0%} of a copy"
        )
    return "\n".join(lines)


def settings_for(tokens: int, session: Session) -> Settings:
    """Those that the cases of other commands take."""
    return Settings(
        command="gpu-session",
        device=session.device,
        dtype=torch.float32 if session.toy else torch.bfloat16,
        tokens=tokens,
        lengths=(min(SEQLEN, tokens // 2),),
        d_model=64 if session.toy else 768,
        layers=None,
        rounds=1,
        budget=1.0,
        compile=False,
        only=(),
        out=session.out,
        plot=None,
    )


def run(session: Session) -> list[str]:
    """The part; returns what is left."""
    record = session.record("kernels")
    bandwidth = copy_bandwidth(Clock(session.device), 1 << 20 if session.toy else None)
    print(f"copy bandwidth {bandwidth / 1e9:,.0f} GB/s, read + written", flush=True)
    for tokens in (48,) if session.toy else TOKENS:
        pieces = []
        for name, make in candidates(settings_for(tokens, session)):
            measure = partial(times, make, tokens, session, bandwidth)
            pieces.append(Piece(f"{name}, {tokens:,} tokens", measure, partial(dry, make)))
        if left := session.work(record, pieces, text):
            return left
    pieces = [Piece(f"ncu: {name}", partial(counted, name, session)) for name in NCU]
    return session.work(record, pieces, text)


NCU = ("Hydra's scan", "SSD's scan", "short convolution, width 7", "gated norm")
"""Calls whose bytes are counted by ncu, at the smaller number of tokens."""
NCU_SECONDS = 120.0
"""What one of them may take."""


def counted(name: str, session: Session) -> dict[str, Any]:
    """Bytes that the kernels of a call moved, by NVIDIA's counters; left out where they cannot be read. Raises
    `OutOfTime`."""
    ncu = shutil.which("ncu")
    if ncu is None or session.device.type != "cuda":
        return {"status": "left out", "why": "ncu is not installed" if ncu is None else "there is no GPU"}
    command = [ncu, "--csv", "--metrics", ",".join(METRICS), "--profile-from-start", "off", sys.executable, "-P", "-m"]
    command += ["matmix.benchmarks.gpu_session.one_call", str(session.device), str(TOKENS[0]), name]
    try:
        limit = max(5.0, min(NCU_SECONDS, session.limit.left() - 5))
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, env=dict(os.environ))
    except subprocess.TimeoutExpired:
        if limit < NCU_SECONDS:
            raise OutOfTime from None
        return {"status": "left out", "why": "ncu took too long"}
    kernels = read_ncu(done.stdout)
    if not kernels:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if "ERR" in line or "rror" in line]
        return {"status": "left out", "why": f"ncu counted nothing: {(lines or ['no message'])[0][:160]}"}
    return {"kernels": kernels}


def read_ncu(output: str) -> list[dict[str, Any]]:
    """Of each kernel that ncu's CSV (one line per kernel and metric) lists: name, bytes read and written, and
    nanoseconds."""
    lines = output.splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return []
    scale = {"Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "us": 1e3, "usecond": 1e3, "ms": 1e6, "msecond": 1e6, "s": 1e9}
    scale |= {"second": 1e9}
    kernels: dict[str, dict[str, Any]] = {}
    for row in csv.DictReader(lines[start:]):
        if row.get("Metric Name") in METRICS:
            value = float(row["Metric Value"].replace(",", "")) * scale.get(row["Metric Unit"], 1.0)
            kernels.setdefault(row["ID"], {"kernel": row["Kernel Name"]})[METRICS[row["Metric Name"]]] = value
    return list(kernels.values())


def launches_of(name: str, settings: Settings) -> list[Launch]:
    """One forward and backward pass of a call."""
    make = dict(candidates(settings))[name]
    with record_launches(run=True) as found:
        both_passes(make())
    return found

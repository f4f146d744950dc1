"""What the speed commands have in common on the command line, checked before anything runs."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

import torch

RESULTS = Path(__file__).parents[1] / "results"
LENGTHS = ",".join(str(1 << power) for power in range(7, 18))  # 128 to 131,072


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """One run of one command."""

    command: str
    device: torch.device
    dtype: torch.dtype
    tokens: int
    """Tokens of every case; batch = tokens / length, at least 1."""
    lengths: tuple[int, ...]
    d_model: int | None
    """None for a command whose cases have their own widths."""
    layers: int | None
    """Depth of the models of `encoder`; None for the recipes' own."""
    rounds: int
    budget: float
    compile: bool
    only: tuple[str, ...]
    out: Path
    plot: Path | None

    def batch(self, seqlen: int) -> int:
        """Sequences of a case."""
        return max(1, self.tokens // seqlen)

    def wanted(self, name: str) -> bool:
        """Whether a candidate is measured; ours always is."""
        return name == "ours" or not self.only or any(text in name for text in self.only)


def add_arguments(parser: argparse.ArgumentParser, lengths: str = LENGTHS, *, width: bool = True) -> None:
    """The arguments that every speed command takes (--d-model only with `width`)."""
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1 ... or cpu (default: cuda)")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--tokens", type=int, default=65536, help="tokens of a case (default: 65536)")
    parser.add_argument("--lengths", default=lengths, metavar="L,L,...", help=f"sequence lengths (default: {lengths})")
    if width:
        parser.add_argument("--d-model", type=int, default=768, help="model width, a multiple of 64 (default: 768)")
    parser.add_argument("--rounds", type=int, default=30, help="how often the candidates take turns (default: 30)")
    parser.add_argument("--budget", type=float, default=3.0, metavar="SECONDS", help="per candidate and case, after "
                        "5 rounds (default: 3)")  # fmt: skip
    parser.add_argument("--only", default="", metavar="TEXT,...", help="peers whose name contains one of these")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="leave out what torch.compile makes")
    parser.add_argument("--out", type=Path, help="JSON (default: results/COMMAND-DEVICE.json of the benchmarks)")
    parser.add_argument("--plot", type=Path, help="picture, PNG, SVG or PDF (default: beside the JSON, as PNG)")
    parser.add_argument("--no-plot", action="store_true", help="draw nothing (drawing needs the extra `bench`)")


def settings_from(command: str, options: argparse.Namespace) -> Settings:
    """Checked settings. Raises ValueError, one line, for what cannot be."""
    device = device_of(options.device)
    try:
        lengths = tuple(int(part) for part in options.lengths.split(","))
    except ValueError:
        raise ValueError(f"--lengths {options.lengths}: give whole numbers, such as 128,512") from None
    for name in ("tokens", "rounds"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} {getattr(options, name)}: must be 1 or more")
    if min(lengths) < 1:
        raise ValueError(f"--lengths {options.lengths}: must be 1 or more")
    d_model = getattr(options, "d_model", None)
    if d_model is not None and (d_model < 64 or d_model % 64):
        raise ValueError(f"--d-model {d_model}: must be a multiple of 64, the width of a head")
    out = options.out or RESULTS / f"{command}-{slug(device_name(device))}.json"
    return Settings(
        command=command,
        device=device,
        dtype=getattr(torch, options.dtype),
        tokens=options.tokens,
        lengths=lengths,
        d_model=d_model,
        layers=getattr(options, "layers", None),
        rounds=options.rounds,
        budget=options.budget,
        compile=options.compile,
        only=tuple(text for text in options.only.split(",") if text),
        out=out,
        plot=None if options.no_plot else options.plot or out.with_suffix(".png"),
    )


def device_of(name: str) -> torch.device:
    """A device that is there. Raises ValueError, one line, for any other."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device {name}: no such device; give cuda or cpu") from None
    if device.type not in ("cuda", "cpu"):
        raise ValueError(f"--device {name}: give cuda or cpu")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "there is no GPU here; run this on a machine with one, or try the program out in small with "
            "--device cpu --tokens 2048 --lengths 128,512 --dtype float32"
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device {name}: there are {torch.cuda.device_count()} GPUs, counted from 0")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def device_name(device: torch.device) -> str:
    """The GPU's name, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def slug(name: str) -> str:
    """Lower-case words joined by dashes."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")

"""`lengths`: what whole models cost against the length of their rows: time and memory, one line a mixer or form.
`inference`: the memory of encoders without gradients, and what LION's recurrence keeps step by step."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from matmix.benchmarks.report import columns
from matmix.data.storage.files import write_atomic
from matmix.launch.figures import panels, png_of
from matmix.launch.lab.compare.speed import in_a_process
from matmix.launch.lab.measuring import environment, random_batch, tensor_bytes
from matmix.model import build_model, initialize
from matmix.model.mixers.scans import lion
from matmix.train.config import RunConfig
from matmix.train.recipe import load_config, write_config

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LION, _MRU = "model.mixers.lion_s.form", "model.mixers.mru.scan"
GROUPS: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "encoders": (
        "masked_lm",
        {
            "Hydra": {"model.layers": ["hydra"]},
            "LION-S, attention": {"model.layers": ["lion_s"], _LION: "attention"},
            "LION-S, chunked": {"model.layers": ["lion_s"], _LION: "chunked"},
            "LION-S, recurrent": {"model.layers": ["lion_s"], _LION: "recurrent"},
            "softmax attention": {"model.layers": ["attention"]},
        },
    ),
    "language models": (
        "causal_lm",
        {
            "MRU, chunked": {"model.layers": ["mru"], _MRU: "chunked"},
            "MRU, Brent-Kung": {"model.layers": ["mru"], _MRU: "brent_kung"},
            "MRU, Hillis-Steele": {"model.layers": ["mru"], _MRU: "hillis_steele"},
            "MRU, sequential": {"model.layers": ["mru"], _MRU: "sequential"},
            "SSD": {"model.layers": ["semiseparable"]},
            "softmax attention": {"model.layers": ["attention"]},
        },
    ),
}
"""Models -> their objective, and name -> what is other than in the base."""
BASE: dict[str, Any] = {
    "model.n_layers": 2,
    "model.d_model": 64,
    "model.vocab_size": 256,
    "model.mixers.attention.nheads": 2,
    "model.mixers.attention.headdim": 32,
    "model.mixers.mru.order": 8,
    "engine.activation_checkpointing": "none",
    "data.path": "unread",
    "data.packing": "rows",
    "device": "cpu",
}
Cell = dict[str, float]


def config_of(objective: str, changes: dict[str, Any], length: int, rows: int) -> RunConfig:
    """Returns the config of a model of GROUPS for steps on `rows` rows of `length` tokens."""
    sizes = {"data.seqlen": length, "global_batch_size": rows, "micro_batch_size": rows}
    recipe = "debug_hydra" if objective == "masked_lm" else "debug_mru"
    config = load_config(recipe, {**BASE, **sizes, **changes, "objective.name": objective})
    return dataclasses.replace(config, run_dir="unused")


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Training steps of small models of 2 blocks and width 64, on as many tokens at every length.

    Each case is a process of its own (forward, backward and optimizer of one micro-batch, fp32): tokens per second, and
    by how much its resident memory grew from before the model. A form that takes `slowest` seconds a step is not
    measured at greater lengths.
    """

    lengths: tuple[int, ...] = (128, 512, 2048, 8192)
    """Tokens in a row."""
    tokens: int = 8192
    """Tokens in a step."""
    slowest: float = 4.0
    """Seconds."""
    out: Path = Path("lengths.json")
    """The results; the picture lies beside them, with the suffix .png."""

    def run(self, rest: list[str], typed: list[str]) -> int:
        if rest:
            raise ValueError(f"lengths: unknown words {' '.join(rest)}")
        results: dict[str, dict[str, dict[int, Cell]]] = {}
        for group, (objective, models) in GROUPS.items():
            results[group] = {name: self.measured(objective, changes) for name, changes in models.items()}
            for what, unit in (("tokens_per_second", 1e3), ("peak_bytes", 2**20)):
                words = "thousand tokens a second" if unit == 1e3 else "MiB"
                rows = [[f"{group}, {words}", *map(str, self.lengths)]]
                for name, cells in results[group].items():
                    rows.append([name, *(_word(cells.get(length), what, unit) for length in self.lengths)])
                print(columns(rows), end="\n\n", flush=True)
        record = {"environment": environment(), "settings": {"tokens": self.tokens, **BASE}, "groups": results}
        write_atomic(self.out, json.dumps(record, indent=1) + "\n")
        write_atomic(self.out.with_suffix(".png"), picture(results))
        print(f"kept in {self.out}, drawn in {self.out.with_suffix('.png')}")
        return 0

    def measured(self, objective: str, changes: dict[str, Any]) -> dict[int, Cell]:
        """Returns the rows of `measure` by length. Raises RuntimeError where a process fails."""
        cells: dict[int, Cell] = {}
        for length in self.lengths:
            rows = max(1, self.tokens // length)
            config = config_of(objective, changes, length, rows)
            with tempfile.TemporaryDirectory() as folder:
                write_config(config, path := Path(folder, "lengths.toml"))
                found = in_a_process(path)
            if isinstance(found, str):
                raise RuntimeError(f"{changes} at {length} tokens: {found}")
            cells[length] = {key: found[key] for key in ("tokens_per_second", "peak_bytes")}
            if rows * length / found["tokens_per_second"] > self.slowest:
                break
        return cells


def _word(cell: Cell | None, what: str, unit: float) -> str:
    return "-" if cell is None else f"{cell[what] / unit:.3g}"


def picture(results: dict[str, dict[str, dict[int, Cell]]]) -> bytes:
    """Returns a PNG: for each group of models their speed and their memory over the length."""
    figure, grid = panels((11, 4 * len(results)), len(results), 2)
    for (left, right), (group, models) in zip(grid, results.items(), strict=True):
        for name, cells in models.items():
            left.plot(list(cells), [cell["tokens_per_second"] / 1e3 for cell in cells.values()], "o-", label=name)
            right.plot(list(cells), [cell["peak_bytes"] / 2**20 for cell in cells.values()], "o-", label=name)
        left.set(yscale="log", ylabel="thousand tokens per second")
        right.set(ylim=(0, None), ylabel="MiB of a training step")
        for axes in (left, right):
            _over_lengths(axes, models, group)
        left.yaxis.set_major_formatter("{x:g}")
        right.legend(fontsize=8)
    return png_of(figure)


def _over_lengths(axes: Axes, models: dict[str, dict[int, Cell]], title: str) -> None:
    axes.set(xscale="log", xlabel="tokens in a row", title=title)
    lengths = sorted({length for cells in models.values() for length in cells})
    axes.set_xticks(lengths, map(str, lengths), minor=False)
    axes.minorticks_off()


# -- without gradients -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Inference:
    """What encoders of 2 blocks and width 64 take for one row without gradients, against its length, fp32 on a CPU.

    Bytes are those of all tensors at their most, as torch's allocator counts them, parameters left out; with each model
    comes the power of the length that its bytes grow with, fitted to the greater half of the lengths. The picture has
    beside them what LION's recurrence keeps in each step, read off a run of it.
    """

    lengths: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096)
    """Tokens in a row."""
    out: Path = Path("inference.json")
    """The results; the picture lies beside them, with the suffix .png."""

    def run(self, rest: list[str], typed: list[str]) -> int:
        if rest or len(self.lengths) < 2:
            raise ValueError(f"inference: unknown words {' '.join(rest)}" if rest else "--lengths: give two or more")
        models = {name: self.measured(changes) for name, changes in GROUPS["encoders"][1].items()}
        for what, unit, words in (("peak_bytes", 2**20, "MiB"), ("tokens_per_second", 1e3, "thousand tokens a second")):
            rows = [[words, *map(str, self.lengths), *(["grows as"] if unit == 2**20 else [])]]
            for name, cells in models.items():
                rows.append([name, *(_word(cell, what, unit) for cell in cells.values())])
                if unit == 2**20:
                    rows[-1].append(f"L^{exponent(cells):.2f}")
            print(columns(rows), end="\n\n", flush=True)
        record = {"environment": environment(), "settings": BASE, "models": models}
        write_atomic(self.out, json.dumps(record, indent=1) + "\n")
        write_atomic(self.out.with_suffix(".png"), memory_picture(models))
        print(f"kept in {self.out}, drawn in {self.out.with_suffix('.png')}")
        return 0

    def measured(self, changes: dict[str, Any]) -> dict[int, Cell]:
        """Returns bytes and speed by length: {"peak_bytes": ..., "tokens_per_second": ...}."""
        cells: dict[int, Cell] = {}
        for length in self.lengths:
            config = config_of("masked_lm", changes, length, 1)
            initialize(model := build_model(config.model).eval(), seed=0)
            tokens, seconds = random_batch(config, 1).inputs, []
            with torch.no_grad():
                for _ in range(3):
                    began = time.perf_counter()
                    model(tokens)
                    seconds.append(time.perf_counter() - began)
                _, peak = tensor_bytes(lambda model=model, tokens=tokens: model(tokens))
            cells[length] = {"peak_bytes": peak, "tokens_per_second": length / min(seconds)}
        return cells


def exponent(cells: dict[int, Cell]) -> float:
    """Returns the slope of log bytes over log length, by least squares, in the greater half of the lengths."""
    greater = sorted(cells)[-max(2, len(cells) // 2) :]
    logs = ([math.log(at) for at in greater], [math.log(cells[at]["peak_bytes"]) for at in greater])
    return statistics.linear_regression(*logs).slope


def kept_by_step(length: int, nheads: int = 2, headdim: int = 32) -> dict[str, list]:
    """Runs LION's recurrence on a row of so many tokens and notes each of its steps.

    Returns: "tokens", the two tokens that the step takes, forward and backward; "cells", the numbers y and c in the
    cells written so far; "states", those of both directions' states; "all_states", of the states of all steps so far,
    had they been kept.
    """
    notes: dict[str, list] = {"tokens": [], "cells": [], "states": [], "all_states": []}
    written: set[int] = set()
    real = lion.lion_step

    def step(q, k, v, *others):
        y, c, state = real(q, k, v, *others)
        tokens = v[:, 0, 0].int().tolist()
        written.update(tokens)
        notes["tokens"].append(tokens)
        notes["cells"].append(len(written) * (y[0].numel() + c[0].numel()))
        notes["states"].append(sum(part.numel() for part in state))
        notes["all_states"].append(sum(notes["states"]))
        return y, c, state

    q = torch.ones(1, length, nheads, headdim)
    v = torch.arange(length, dtype=q.dtype).view(1, -1, 1, 1).expand(q.shape)
    with mock.patch.object(lion, "lion_step", step), torch.no_grad():
        lion.lion_recurrence(q, q, v, lion.LionGates(torch.zeros(1, length, nheads), 1, 0))
    return notes


def memory_picture(models: dict[str, dict[int, Cell]]) -> bytes:
    """Returns a PNG: which cells LION's recurrence has filled after each step, how much it keeps, and the memory of
    whole models over the length."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    figure, grid = panels((16, 5), 1, 3)
    cells, steps, whole = grid[0]
    taken, rows, filled = kept_by_step(16)["tokens"], [], [0] * 16
    for forward, backward in taken:
        filled[forward] += 1
        filled[backward] += 2
        rows.append(list(filled))
    colours = {"empty": "white", "y and c forward": "#9fd8ea", "y and c backward": "#ffe680", "their sums": "#8fce8f"}
    cells.imshow(rows, cmap=ListedColormap(list(colours.values())), vmin=0, vmax=3)
    cells.grid(False)
    for at in range(17):
        cells.axhline(at - 0.5, color="grey", linewidth=0.4)
        cells.axvline(at - 0.5, color="grey", linewidth=0.4)
    cells.set(xlabel="cell, one for each token", ylabel="step", title="LION's recurrence: what each cell holds")
    cells.set_xticks(range(0, 16, 3), range(1, 17, 3))
    cells.set_yticks(range(0, 16, 3), range(1, 17, 3))
    handles = [Patch(facecolor=colour, edgecolor="grey", label=name) for name, colour in colours.items()]
    cells.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, fontsize=8)
    kept, count = kept_by_step(256), range(1, 257)
    for name, label in (
        ("all_states", "states of all steps: not kept"),
        ("cells", "y and c"),
        ("states", "two states"),
    ):
        steps.plot(count, kept[name], "--" if name == "all_states" else "-", label=label)
    steps.set(yscale="log", xlabel="step", ylabel="numbers kept", title="a row of 256 tokens, 2 heads of 32")
    steps.legend(fontsize=8)
    for name, row in models.items():
        label = f"{name}: L^{exponent(row):.2f}"
        whole.plot(list(row), [cell["peak_bytes"] / 2**20 for cell in row.values()], "o-", label=label)
    whole.set(yscale="log", ylabel="MiB without gradients")
    _over_lengths(whole, models, "whole encoders, a row at a time")
    whole.yaxis.set_major_formatter("{x:g}")
    whole.legend(fontsize=8)
    return png_of(figure)

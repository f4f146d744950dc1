"""`lengths`: what whole models cost against the length of their rows: time and memory, one line a mixer or form."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matmix.benchmarks.report import columns
from matmix.data.storage.files import write_atomic
from matmix.launch.figures import panels, png_of
from matmix.launch.lab.compare.speed import in_a_process
from matmix.launch.lab.measuring import environment
from matmix.train.recipe import load_config, write_config

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
            sizes = {"data.seqlen": length, "global_batch_size": rows, "micro_batch_size": rows}
            recipe = "debug_hydra" if objective == "masked_lm" else "debug_mru"
            config = load_config(recipe, {**BASE, **sizes, **changes, "objective.name": objective})
            config = dataclasses.replace(config, run_dir="unused")
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
            axes.set(xscale="log", xlabel="tokens in a row", title=group)
            lengths = sorted({length for cells in models.values() for length in cells})
            axes.set_xticks(lengths, map(str, lengths), minor=False)
            axes.minorticks_off()
        left.yaxis.set_major_formatter("{x:g}")
        right.legend(fontsize=8)
    return png_of(figure)

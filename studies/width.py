"""`python -P -m matmix.studies.width PART`: what muP (`optimizer.mup_base_width`) does for models of several widths."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
import tyro

from matmix.data.storage.files import write_atomic
from matmix.launch.figures import panels, png_of
from matmix.model import ModelConfig, build_model, initialize
from matmix.model.config import MixerOptions
from matmix.model.mixers import MIXERS
from matmix.studies.mru.runs import run
from matmix.train.arguments import parse_arguments
from matmix.train.config import RunConfig
from matmix.train.optim.config import OptimizerConfig
from matmix.train.optim.groups import make_optimizer
from matmix.train.optim.width import initial_factors
from matmix.train.process.console import guarded
from matmix.train.recipe import load_config

BASE = 64
"""The base width."""
WAYS = {0: "without", BASE: "with"}
"""By `optimizer.mup_base_width`."""
SHAPE = {"n_layers": 2, "vocab_size": 64, "max_seqlen": 32, "init_std": BASE**-0.5}
"""Of the models of the coordinate check. Matrices of the base width keep the size of what passes through them."""
NARROW_HEADS = MixerOptions(
    **{name: dataclasses.replace(MIXERS[name].Config(), headdim=16) for name in ("attention", "hydra", "lion_s")}
)


def coordinates(mixer: str, width: int, base_width: int, *, steps: int = 4, lr: float = 0.01) -> dict[str, float]:
    """Returns by how much a coordinate of the residual stream before and behind each layer, and of the logits, changes
    in a few steps of AdamW, in the mean of absolute values, by "stream 0" and so on, and "logits"."""
    kind = "language_model" if MIXERS[mixer].causal_form else "encoder"
    config = ModelConfig(architecture=kind, layers=(mixer,), d_model=width, mixers=NARROW_HEADS, **SHAPE)
    model = build_model(config)
    initialize(model, 0, initial_factors(config, base_width))
    optimizer = make_optimizer(model, OptimizerConfig(lr=lr, mup_base_width=base_width), config.max_seqlen)
    tokens = torch.randint(config.vocab_size, (8, config.max_seqlen), generator=torch.Generator().manual_seed(0))
    targets = (3 * tokens + 1) % config.vocab_size

    @torch.no_grad()
    def seen() -> list[torch.Tensor]:
        streams: list[torch.Tensor] = []
        logits = model(tokens, streams=streams)
        return [*streams, logits]

    before = seen()
    for _ in range(steps):
        F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    changes = [float((after - was).abs().mean()) for was, after in zip(before, seen(), strict=True)]
    return dict(zip([*(f"stream {index}" for index in range(config.n_layers + 1)), "logits"], changes, strict=True))


def quickstart(mixer: str, base_width: int, width: int, rate: float, seed: int, data: str, steps: int) -> RunConfig:
    """Returns the quickstart's config with another mixer, width, rate and seed, and a quarter of its batches."""
    own = {
        "model.layers": [mixer],
        "model.d_model": width,
        "optimizer.lr": rate,
        "optimizer.mup_base_width": base_width,
        "steps": steps,
        "seed": seed,
    }
    small = {
        "global_batch_size": 8,
        "data.seqlen": 64,
        # As the quickstart was when docs/training.md was measured.
        "model.init_std": 0.02,
        "model.mlp_ratio": 4.0,
        "model.mixers.mru.order": 8,
        "model.mixers.mru.shift": "blend",
        "schedule.warmup": 40,
        "evaluation.ablation_batches": 0,
        "evaluation.batches": 50,
    }
    return load_config("mru_shakespeare", {**own, **small, "data.path": data, "evaluation.every": 0})


def picture(found: dict[str, dict[str, dict[int, dict[str, float]]]], steps: int) -> bytes:
    """Draws mixer -> "with" and "without" -> width -> `coordinates`; returns a PNG."""
    figure, grid = panels((3.2 * len(found), 5.6), 2, len(found), sharex=True, sharey=True)
    for column, (mixer, ways) in enumerate(found.items()):
        for row, (way, by_width) in enumerate(ways.items()):
            axes = grid[row, column]
            for name in next(iter(by_width.values())):
                axes.plot(list(by_width), [values[name] for values in by_width.values()], marker="o", label=name)
            axes.set(title=f"{mixer}, {way} muP", xscale="log", yscale="log", xticks=list(by_width))
            axes.set_xticks([], minor=True)
            axes.set_xticklabels([str(width) for width in by_width])
    for axes in grid[-1]:
        axes.set_xlabel("d_model")
    for axes in grid[:, 0]:
        axes.set_ylabel(f"mean |change| after {steps} steps")
    grid[0, 0].legend(fontsize=8)
    return png_of(figure)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """Whether what is learnt in a step has the same size at all widths, and whether the best rate is the same.

        OMP_NUM_THREADS=1 python -P -m matmix.studies.width coordinates
        matmix prepare bundled:shakespeare --out datasets/shakespeare_char --model-type char --byte-fallback False \\
            --max-document-chars 4000 --validation-fraction 0.03
        OMP_NUM_THREADS=1 python -P -m matmix.studies.width rates

    Parts: `coordinates`, which draws the mean change of activations in a few steps over the width, with muP and
    without, into `mup_coordinates.png`; `rates`, the quickstart at every width and rate, with muP and without, at
    batches of 8 times 64 tokens, whose validation losses it keeps in `mup_rates.json`, and their means over seeds. What
    is there is not run again, nor is the base width with muP, which is the one without.
    """

    part: tyro.conf.Positional[Literal["coordinates", "rates"]]
    """The part of the study."""
    mixers: tuple[str, ...] = ()
    """Those of the models; none given = attention, mru, hydra and lion_s, of `rates` mru and attention."""
    widths: tuple[int, ...] = ()
    """Those of the models; none given = 64, 128, 256 and 512, of `rates` 64 and 256."""
    rates: tuple[float, ...] = (1e-3, 4e-3, 1.6e-2, 6.4e-2)
    """Learning rates of `rates`."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Those of `rates`."""
    steps: int = 0
    """Steps of a run; 0 = 4, of `rates` 200."""
    data: str = "datasets/shakespeare_char"
    """The prepared data of `rates`."""
    out: Path = Path("docs/pictures")
    """Folder of the picture and the results."""

    def run(self) -> int:
        self.out.mkdir(parents=True, exist_ok=True)
        (self.coordinates if self.part == "coordinates" else self.run_rates)()
        return 0

    def coordinates(self) -> None:
        widths, steps = self.widths or (64, 128, 256, 512), self.steps or 4
        found = {
            mixer: {
                way: {width: coordinates(mixer, width, base, steps=steps) for width in widths}
                for base, way in WAYS.items()
            }
            for mixer in self.mixers or ("attention", "mru", "hydra", "lion_s")
        }
        for (mixer, ways), way in itertools.product(found.items(), WAYS.values()):
            growth = {name: ways[way][widths[-1]][name] / ways[way][widths[0]][name] for name in ways[way][widths[0]]}
            words = ", ".join(f"{name} x {ratio:.2f}" for name, ratio in growth.items())
            print(f"{mixer} {way} muP, from {widths[0]} to {widths[-1]}: {words}", flush=True)
        write_atomic(self.out / "mup_coordinates.png", picture(found, steps))

    def run_rates(self) -> None:
        """Trains what is not there yet, and prints a table."""
        path = self.out / "mup_rates.json"
        losses: dict[str, float | None] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        print(
            "| d_model | "
            + " | ".join(f"{rate:g}" for rate in self.rates)
            + " |"
            + "\n|---"
            + "|---" * len(self.rates)
            + "|"
        )
        for mixer, width, base in itertools.product(
            self.mixers or ("mru", "attention"), self.widths or (64, 256), WAYS
        ):
            if base == width:
                continue
            means, steps = [], self.steps or 200
            made_on = f"{WAYS[base]} muP, {steps} steps of {self.data}"
            for rate in self.rates:
                keys = [f"{mixer}, width {width}, rate {rate:g}, {made_on}, seed {seed}" for seed in self.seeds]
                for key, seed in zip(keys, self.seeds, strict=True):
                    if key not in losses:
                        config = quickstart(mixer, base, width, rate, seed, self.data, steps)
                        losses[key] = run(config)["loss"]
                        write_atomic(path, json.dumps(losses, indent=1) + "\n")
                means.append(statistics.mean(math.inf if losses[key] is None else losses[key] for key in keys))
            words = [f"**{mean:.3f}**" if mean == min(means) else f"{mean:.3f}" for mean in means]
            print(f"| {mixer}, {width}, {WAYS[base]} muP | " + " | ".join(words) + " |", flush=True)


def main(arguments: Sequence[str]) -> int:
    return guarded(lambda: parse_arguments(Study, list(arguments), prog="python -P -m matmix.studies.width").run())


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

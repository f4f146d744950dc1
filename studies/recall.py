"""`python -P -m matmix.studies.recall`: what decides when Hydra, and sums of two scans, learn associative recall.

Runs of so small models spend much of their time between operations. Here the seeds of a form and a rate are one model
with a dimension of runs in front, in plain PyTorch: M is made as a matrix, of the parameters that Hydra has.
Forms differ in initial values, in gradients that are 0 or a sum, in the shift and in the convolution.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from matmix.data.storage.files import write_atomic
from matmix.kernels.scan_layer.chunked import LayerForm
from matmix.model.build import build_model
from matmix.model.config import MixerOptions, ModelConfig
from matmix.model.initialization import initialize
from matmix.model.mixers.scans.hydra import HydraConfig
from matmix.model.mixers.scans.scan_block import side_matrices
from matmix.train.arguments import parse_arguments
from matmix.train.process.console import guarded

Parameters = dict[str, Tensor]

WIDTH = 48
"""Of Hydra in recall_bidirectional_small, with 63,236 parameters."""
ROWS, SYMBOLS, ITEMS, LENGTH, LAYERS = 32, 16, 4, 16, 2
LENGTHS = (1, 2, 4, 8)
LEARNED = 0.3
"""A training loss well into the second stage."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """What one entry of the study is."""

    diagonal: Literal["free", "from 0", "none"] = "free"
    """D and fc_D start as in Hydra, start at 0, or stay there."""
    shared: bool = True
    """Both directions have one A_log and one dt_bias."""
    shift: bool = True
    """Each direction's output moves one token on."""
    A: tuple[float, float] = (1.0, 1.0)
    """-A is drawn from this range."""
    dt: tuple[float, float] = (0.001, 0.1)
    """Step sizes at the start."""
    convolution: bool = True
    """Else each channel is its token's."""
    gate: bool = True
    """Else nothing multiplies what the norm gives."""
    norm: bool = True
    """Else the gate multiplies what is read as it is."""
    init_std: float = 0.0
    """Standard deviation of matrices at the start; 0 is sqrt(2 / (5 width)) = 0.091."""


FORMS = {
    "Hydra": Form(),
    "Hydra, no diagonal": Form(diagonal="none"),
    "Hydra, D and fc_D from 0": Form(diagonal="from 0"),
    "Hydra, A and dt of each direction": Form(shared=False),
    "SSD, added, shifted": Form(diagonal="none", shared=False),
    "SSD, added, the diagonal once": Form(shift=False, shared=False),
    "SSD, added": Form(diagonal="none", shift=False, shared=False),
    "Hydra, A from 1 to 16": Form(A=(1.0, 16.0)),
    "Hydra, larger steps": Form(dt=(0.03, 1.0)),
    "Hydra, no convolution": Form(convolution=False),
    "Hydra, no shift": Form(shift=False),
    "Hydra, no gate": Form(gate=False),
    "Hydra, no norm": Form(norm=False),
    "Hydra, weights from 0.02": Form(init_std=0.02),
    "SSD, added, shifted, weights from 0.02": Form(diagonal="none", shared=False, init_std=0.02),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """Trains every form at every rate with every seed and prints, for each form and rate, the accuracy at 1, 2, 4 and 8
    times the length and the step at which the training loss (mean of 50 steps) falls below 0.3.

        OMP_NUM_THREADS=1 python -P -m matmix.studies.recall

    Runs of one form and rate are trained together. The command goes on after a stop, and makes no run twice.
    """

    forms: tuple[str, ...] = tuple(FORMS)
    """Which."""
    rates: tuple[float, ...] = (1.5e-3, 6e-3)
    """Learning rates."""
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    """Of the weights and the samples."""
    steps: int = 1000
    """Of 32 samples."""
    out: Path = Path("runs/recall_study")
    """Folder of the results, one file for each form, rate and number of steps."""

    def run(self) -> int:
        for name in self.forms:
            if name not in FORMS:
                raise ValueError(f'--forms: there is no "{name}"; there are {", ".join(FORMS)}')
        self.out.mkdir(parents=True, exist_ok=True)
        for rate in self.rates:
            for name in self.forms:
                self.results(name, rate)
        print("| form | rate | 1x | 2x | 4x | 8x | learned by | steps until then |\n" + "|---" * 8 + "|")
        for name in self.forms:
            for rate in self.rates:
                print(row(name, rate, list(self.results(name, rate).values())), flush=True)
        return 0

    def results(self, name: str, rate: float) -> dict[str, Any]:
        """Returns what came out for each seed; missing runs are made."""
        path = self.out / f"{name}, rate {rate:g}, {self.steps} steps.json"
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if missing := [seed for seed in self.seeds if str(seed) not in found]:
            for seed, result in zip(missing, train(FORMS[name], rate, missing, self.steps, path.stem), strict=True):
                found[str(seed)] = result
            write_atomic(path, json.dumps(found, indent=1) + "\n")
        return {str(seed): found[str(seed)] for seed in self.seeds}


def row(name: str, rate: float, results: list[dict[str, Any]]) -> str:
    """One line of the table."""
    scores = np.array([result["accuracy"] for result in results]) * 100
    cells = [f"{mean:.1f}" for mean in scores.mean(0)]
    if len(scores) > 1:
        cells = [f"{cell} ± {by:.1f}" for cell, by in zip(cells, scores.std(0, ddof=1), strict=True)]
    learned = sorted(result["learned"] for result in results if result["learned"])
    return f"| {name} | {rate:g} | {' | '.join(cells)} | {len(learned)} of {len(results)} | {learned} |"


def train(form: Form, rate: float, seeds: list[int], steps: int, said: str) -> list[dict[str, Any]]:
    """Trains one run for each seed, all in one."""
    begun = time.process_time()
    parameters = stacked([started(form, seed) for seed in seeds])
    draws = [np.random.default_rng([seed, 1]) for seed in seeds]
    model = Model(form)
    gradients = torch.func.vmap(torch.func.grad_and_value(model.loss))
    optimizer = AdamW(parameters, form)
    losses = []
    for step in range(steps):
        batches = [samples(draw, ROWS, LENGTH) for draw in draws]
        given, value = gradients(parameters, *(torch.stack(part) for part in zip(*batches, strict=True)))
        optimizer.step(parameters, given, rate * schedule(step, steps))
        losses.append(value)
        if (step + 1) % 250 == 0:
            mean = ", ".join(f"{loss:.2f}" for loss in torch.stack(losses[-50:]).mean(0).tolist())
            print(f"{said}: step {step + 1:,}, losses {mean}; {time.process_time() - begun:.0f} s", flush=True)
    curves = torch.stack(losses).double()[: steps // 50 * 50].view(steps // 50, 50, len(seeds)).mean(1)
    accuracies = [accuracy(model, parameters, times * LENGTH) for times in LENGTHS]
    seconds = (time.process_time() - begun) / len(seeds)
    below = [(curve < LEARNED).nonzero() for curve in curves.unbind(1)]
    return [
        {
            "accuracy": [of_runs[i] for of_runs in accuracies],
            "learned": 50 * (int(below[i][0]) + 1) if len(below[i]) else None,
            "seconds": round(seconds, 1),
            "losses": [round(loss, 4) for loss in curves[:, i].tolist()],
            "D": [parameters[f"blocks.{layer}.mixer.D"][i].tolist() for layer in range(LAYERS)],
        }
        for i in range(len(seeds))
    ]


def schedule(step: int, steps: int) -> float:
    """Warm-up over 5 % of the steps, then a cosine down to 5 %."""
    warmup = round(0.05 * steps)
    if step < warmup:
        return (step + 1) / warmup
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(steps - warmup, 1)))


def hydra(init_std: float = 0.0) -> nn.Module:
    """The recipe's encoder, without initial values."""
    mixers = MixerOptions(hydra=HydraConfig(headdim=16, d_state=16))
    sizes = {"vocab_size": 64, "d_model": WIDTH, "n_layers": LAYERS, "max_seqlen": LENGTH, "mlp_ratio": 2.0}
    return build_model(
        ModelConfig(
            architecture="encoder", layers=("hydra",), mixers=mixers, type_vocab_size=0, init_std=init_std, **sizes
        )
    )


def started(form: Form, seed: int) -> Parameters:
    """The parameters at the start of a run."""
    model = hydra(form.init_std)
    initialize(model, seed)
    parameters = {name: value.detach().clone() for name, value in model.named_parameters()}
    draw = torch.Generator().manual_seed(seed)
    for name, value in parameters.items():
        part = name.rsplit(".", 1)[-1]
        if part in ("A_log", "dt_bias"):
            low, high = form.A if part == "A_log" else map(math.log, form.dt)
            drawn = torch.empty(1 if form.shared else 2, len(value)).uniform_(low, high, generator=draw)
            drawn = drawn.log() if part == "A_log" else drawn.exp() + torch.log(-torch.expm1(-drawn.exp()))
            parameters[name] = drawn.expand(2, -1).clone()
        elif form.diagonal != "free" and name.endswith((".D", "fc_D.weight")):
            parameters[name] = torch.zeros_like(value)
    return parameters


def stacked(of_runs: list[Parameters]) -> Parameters:
    return {name: torch.stack([run[name] for run in of_runs]) for name in of_runs[0]}


def samples(draw: np.random.Generator, rows: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs (rows, length), and the places and the values of the masks, (rows, ITEMS): all rows of
    `data.synthetic.recall` at once."""
    keys = draw.random((rows, SYMBOLS)).argsort(1)[:, :ITEMS]
    values = SYMBOLS + draw.integers(SYMBOLS, size=(rows, ITEMS))
    ids = np.full((rows, length), 2 * SYMBOLS)
    ids[:, 0 : 2 * ITEMS : 2], ids[:, 1 : 2 * ITEMS : 2] = keys, values
    places = 2 * ITEMS + 2 * draw.random((rows, (length - 2 * ITEMS) // 2)).argsort(1)[:, :ITEMS]
    np.put_along_axis(ids, places, keys, 1)
    np.put_along_axis(ids, places + 1, 2 * SYMBOLS + 3, 1)
    return torch.from_numpy(ids), torch.from_numpy(places + 1), torch.from_numpy(values)


class Model:
    """The encoder as a function of its parameters."""

    def __init__(self, form: Form) -> None:
        self.form = form
        self.layer: LayerForm = hydra().blocks[0].mixer.form

    def loss(self, p: Parameters, ids: Tensor, places: Tensor, values: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(p, ids, places).flatten(0, 1), values.flatten())

    def logits(self, p: Parameters, ids: Tensor, places: Tensor) -> Tensor:
        """(B, L) and (B, n) -> (B, n, vocabulary)."""
        x = norm(p, "embeddings.norm", p["embeddings.word.weight"][ids], 1e-12)
        for layer in range(LAYERS):
            name = f"blocks.{layer}"
            x = x + self.mix(p, f"{name}.mixer", norm(p, f"{name}.norm_mixer", x))
            if layer == LAYERS - 1:  # nothing else is read from here on
                x = x.take_along_dim(places.unsqueeze(-1), 1)
            hidden = F.gelu(F.linear(norm(p, f"{name}.norm_mlp", x), p[f"{name}.mlp.up.weight"]))
            x = x + F.linear(hidden, p[f"{name}.mlp.down.weight"])
        x = F.gelu(F.linear(norm(p, "norm", x), p["head.dense.weight"], p["head.dense.bias"]))
        return F.linear(norm(p, "head.norm", x, 1e-12), p["embeddings.word.weight"], p["head.bias"])

    def mix(self, p: Parameters, name: str, x: Tensor) -> Tensor:
        z, channels, raw = self.layer.split(F.linear(x, p[f"{name}.in_proj.weight"]))
        if self.form.convolution:
            kernel, length = p[f"{name}.conv1d.weight"].squeeze(1), channels.shape[1]
            padded = F.pad(channels, (0, 0, kernel.shape[1] // 2, kernel.shape[1] // 2))
            taps = (padded[:, i : i + length] * kernel[:, i] for i in range(kernel.shape[1]))
            channels = sum(taps) + p[f"{name}.conv1d.bias"]
        v, q, k = self.layer.values_and_vectors(F.silu(channels))
        dt = F.softplus(raw.unflatten(-1, (2, -1)) + p[f"{name}.dt_bias"])
        decay = -dt * p[f"{name}.A_log"].exp()
        forward, backward = ((q[i], k[i], decay[..., i, :], dt[..., i, :]) for i in range(2))
        matrix = sum(side_matrices(forward, backward, shift=self.form.shift))
        y = torch.einsum("bhts,bshp->bthp", matrix, v)
        diagonal = F.linear(v.flatten(-2), p[f"{name}.fc_D.weight"]) + p[f"{name}.D"]
        y = (y + diagonal.unsqueeze(-1) * v).flatten(-2)
        if self.form.norm:
            y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5)
        y = y * p[f"{name}.norm.weight"]
        if self.form.gate:
            y = y * F.silu(z)
        return F.linear(y, p[f"{name}.out_proj.weight"])


def norm(p: Parameters, name: str, x: Tensor, eps: float = 1e-5) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], p[f"{name}.weight"], p.get(f"{name}.bias"), eps)


class AdamW:
    """Of all runs at once, each with its own norm of gradients."""

    def __init__(self, parameters: Parameters, form: Form) -> None:
        self.form, self.taken = form, 0
        self.first = {name: torch.zeros_like(value) for name, value in parameters.items()}
        self.second = {name: torch.zeros_like(value) for name, value in parameters.items()}

    def step(self, parameters: Parameters, gradients: Parameters, rate: float) -> None:
        """Gradients are clipped at a norm of 1; matrices decay."""
        self.taken += 1
        for name, gradient in gradients.items():
            if self.form.shared and name.endswith(("A_log", "dt_bias")):  # the gradient of one parameter used twice
                gradients[name] = gradient.sum(1, keepdim=True).expand_as(gradient)
            if self.form.diagonal == "none" and name.endswith((".D", "fc_D.weight")):
                gradients[name] = torch.zeros_like(gradient)
        # A shared parameter counts once.
        share = [0.5 if self.form.shared and name.endswith(("A_log", "dt_bias")) else 1.0 for name in gradients]
        squares = [by * g.flatten(1).square().sum(1) for by, g in zip(share, gradients.values(), strict=True)]
        factor = (1 / (sum(squares).sqrt() + 1e-6)).clamp(max=1)
        for name, value in parameters.items():
            gradient = gradients[name] * factor.view(-1, *[1] * (value.dim() - 1))
            self.first[name].lerp_(gradient, 0.1)
            self.second[name].mul_(0.95).addcmul_(gradient, gradient, value=0.05)
            if value.dim() > 2 and not name.endswith(("A_log", "dt_bias")):
                value.mul_(1 - rate * 0.01)
            size = (self.second[name] / (1 - 0.95**self.taken)).sqrt_().add_(1e-8)
            value.addcdiv_(self.first[name], size, value=-rate / (1 - 0.9**self.taken))


@torch.no_grad()
def accuracy(model: Model, parameters: Parameters, length: int) -> list[float]:
    """The share of right answers of each run, in 256 fresh samples that all runs share."""
    draw, right = np.random.default_rng([length, 2]), 0
    for _ in range(8):  # a matrix of 8 times the length takes 64 times the memory
        ids, places, values = samples(draw, 32, length)
        runs = ({name: value[i] for name, value in parameters.items()} for i in range(len(parameters["head.bias"])))
        right += torch.stack([(model.logits(run, ids, places).argmax(-1) == values).sum() for run in runs])
    return (right / (8 * 32 * ITEMS)).tolist()


def main(arguments: Sequence[str]) -> int:
    return guarded(lambda: parse_arguments(Study, list(arguments), prog="python -P -m matmix.studies.recall").run())


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

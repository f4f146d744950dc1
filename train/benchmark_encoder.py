"""A training step, forward and backward without the optimizer, of the recipes' Hydra and BERT encoders.

    python -P -m matmix.kernels.benchmarks encoder

The models are those of hydra_base_c4 (23 layers of Hydra, 112M parameters) and bert_base_c4 (12 blocks of flash
attention and MLP), the loss is masked-token prediction at the recipes' 30 % of random tokens. Weights are float32 and
products run in bfloat16 under autocast, as in training.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from matmix.data.batch import Batch
from matmix.kernels.benchmarks.scan import flash_only
from matmix.kernels.benchmarks.settings import Settings
from matmix.kernels.benchmarks.speed import parser_of, run_command
from matmix.kernels.benchmarks.suite import Candidate, Case
from matmix.model import build_model, initialize
from matmix.train.activation import compile_blocks, compute_in_bfloat16
from matmix.train.config import RunConfig
from matmix.train.cross_entropy import IGNORED
from matmix.train.objectives import compute_loss, count_targets
from matmix.train.recipe import load_config

LENGTHS, TOKENS = "512,8192", 32768


def recipe(name: str, settings: Settings) -> RunConfig:
    """A recipe, in the size asked for."""
    config = load_config(name)
    attention = dataclasses.replace(config.model.mixers.attention, nheads=settings.d_model // 64)
    model = dataclasses.replace(
        config.model,
        d_model=settings.d_model,
        n_layers=settings.layers or config.model.n_layers,
        mixers=dataclasses.replace(config.model.mixers, attention=attention),
    )
    return dataclasses.replace(config, model=model)


def random_batch(batch: int, seqlen: int, config: RunConfig, device: torch.device) -> Batch:
    """Full sequences of random tokens without padding, the recipe's share of them to be predicted."""
    torch.manual_seed(0)
    ids = torch.randint(config.model.vocab_size, (batch, seqlen))
    chosen = torch.rand(batch, seqlen) < config.objective.masking.probability
    chosen[0, 0] = True
    labels = torch.where(chosen, ids, IGNORED)
    select = chosen.flatten().nonzero().squeeze(1)
    return Batch(ids, labels, None, None, seqlen, select, ids.numel()).to(device)


def step_of(name: str, title: str, batch: Batch, settings: Settings, *, compiled: bool, ours: bool) -> Candidate:
    """A model with its weights; `run` is its forward pass to the mean loss."""
    config = recipe(name, settings)
    model = build_model(config.model, device=settings.device)
    initialize(model, 0)
    if compiled:
        compile_blocks(model, dynamic=False)
    if settings.dtype != torch.float32:
        compute_in_bfloat16(model, settings.device)
    targets = count_targets(batch)

    def run() -> Tensor:
        with flash_only(settings.device):
            return compute_loss(model, batch, config.objective).total / targets

    return Candidate(name=title, run=run, leaves=list(model.parameters()), compared=ours)


def encoder_case(seqlen: int, settings: Settings) -> Case:
    """Both models at one length."""
    count = settings.batch(seqlen)
    batch = random_batch(count, seqlen, recipe("hydra_base_c4", settings), settings.device)
    candidates = []
    for name, title in (("hydra_base_c4", "ours"), ("bert_base_c4", "BERT, flash attention")):
        for compiled in (False, True) if settings.compile else (False,):
            words = f"{title}, compiled" if compiled else title
            if settings.wanted(words):
                ours = title == "ours"
                candidates.append(step_of(name, words, batch, settings, compiled=compiled, ours=ours))
    return Case(label=f"length {seqlen:,}, batch {count:,}", seqlen=seqlen, batch=count, candidates=candidates)


def cases(settings: Settings) -> Iterator[Case]:
    """One case per length."""
    for seqlen in settings.lengths:
        yield encoder_case(seqlen, settings)


def main(arguments: list[str]) -> None:
    """The command."""
    parser = parser_of("encoder", __doc__, LENGTHS)
    parser.set_defaults(tokens=TOKENS)
    parser.add_argument("--layers", type=int, default=None, help="depth of both models (default: the recipes')")
    options = parser.parse_args(arguments)
    if options.dtype == "float16":
        raise ValueError("--dtype float16: training runs in bfloat16 or float32")
    if options.layers is not None and options.layers < 1:
        raise ValueError(f"--layers {options.layers}: must be 1 or more")
    run_command("encoder", options, cases, floors=False)

"""A training step, forward and backward without the optimizer, of the recipes' Hydra and BERT encoders.

    python -P -m matmix.benchmarks encoder

The models are those of hydra_base_c4 (23 layers of Hydra, 112M parameters) and bert_base_c4 (12 blocks of flash
attention and MLP), the loss is masked-token prediction at the recipes' 30 % of random tokens. Weights are float32 and
products run in bfloat16 under autocast, as in training.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from matmix.benchmarks.measuring.settings import Settings
from matmix.benchmarks.measuring.suite import Case
from matmix.benchmarks.training.steps import run_steps, step_parser, steps_of
from matmix.data.loading.batch import Batch
from matmix.data.loading.masking import IGNORED
from matmix.train.config import RunConfig
from matmix.train.recipe import load_config

LENGTHS = "512,8192"


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


def encoder_case(seqlen: int, settings: Settings) -> Case:
    """Both models at one length."""
    count = settings.batch(seqlen)
    hydra, bert = (recipe(name, settings) for name in ("hydra_base_c4", "bert_base_c4"))
    batch = random_batch(count, seqlen, hydra, settings.device)
    models = {"ours": hydra.model, "BERT, flash attention": bert.model}
    candidates = steps_of(models, hydra.objective, batch, settings)
    return Case(label=f"length {seqlen:,}, batch {count:,}", seqlen=seqlen, batch=count, candidates=candidates)


def cases(settings: Settings) -> Iterator[Case]:
    """One case per length."""
    for seqlen in settings.lengths:
        yield encoder_case(seqlen, settings)


def main(arguments: list[str]) -> None:
    """The command."""
    run_steps("encoder", step_parser("encoder", __doc__, LENGTHS).parse_args(arguments), cases)

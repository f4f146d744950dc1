"""A training step, forward and backward without the optimizer, of an MRU language model and of a GPT of its size.

    python -P -m matmix.benchmarks language_model

Two sizes: `tinystories` (4 blocks of width 768, 12 heads with 8 x 8 states, 8,192 words) and `small`, like GPT-2 small
(12 blocks of width 768, 50,304 words) with 3 heads of 16 x 16 states. The GPT has flash attention and rotary positions
in the MRU's place, and MLPs as wide as gives it the same number of parameters. The loss is next-token prediction on
full sequences. Weights are float32 and products run in bfloat16 under autocast, as in training.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial

import torch

from matmix.benchmarks.measuring.settings import Settings
from matmix.benchmarks.measuring.suite import Case
from matmix.benchmarks.training.steps import run_steps, step_parser, steps_of
from matmix.data.loading.batch import Batch
from matmix.data.loading.masking import IGNORED
from matmix.model import ModelConfig, build_model
from matmix.train.config import ObjectiveConfig
from matmix.train.recipe import load_config

LENGTHS = "1024,4096,16384"
SIZES = {"tinystories": (8, 4, 8192), "small": (16, 12, 50304)}
"""Name -> order of the states, blocks, words of the vocabulary (GPT-2's 50,257 rounded up to whole tiles)."""
MLP_STEP = 64
"""The GPT's MLPs are a multiple of this wide: whole tiles of matrix units."""


def mru_model(size: str, settings: Settings) -> ModelConfig:
    """The model of mru_tinystories with orthogonal state matrices and the size's depth, states and vocabulary, in the
    width and depth asked for."""
    model = load_config("mru_tinystories").model
    order, layers, words = SIZES[size]
    nheads = max(1, settings.d_model // order**2)
    mru = dataclasses.replace(model.mixers.mru, order=order, nheads=nheads, construction="cayley")
    return dataclasses.replace(
        model,
        d_model=settings.d_model,
        n_layers=settings.layers or layers,
        vocab_size=words,
        mixers=dataclasses.replace(model.mixers, mru=mru),
    )


def count_parameters(config: ModelConfig) -> int:
    """Parameters of a model, tied ones once."""
    return sum(parameter.numel() for parameter in build_model(config, device="meta").parameters())


def same_size_gpt(mru: ModelConfig) -> ModelConfig:
    """Attention in place of the MRU, and MLPs whose width makes up for the difference in parameters."""
    gpt = dataclasses.replace(mru, layers=("attention",))
    surplus = count_parameters(gpt) - count_parameters(mru)
    width = round(gpt.d_model * gpt.mlp_ratio) - surplus / (2 * gpt.d_model * gpt.n_layers)
    width = max(MLP_STEP, round(width / MLP_STEP) * MLP_STEP)
    return dataclasses.replace(gpt, mlp_ratio=width / gpt.d_model)


def random_batch(batch: int, seqlen: int, words: int, device: torch.device) -> Batch:
    """Full sequences of random tokens, each but a sequence's last predicting the next."""
    torch.manual_seed(0)
    ids = torch.randint(words, (batch, seqlen))
    labels = torch.cat([ids[:, 1:], torch.full((batch, 1), IGNORED)], 1)
    return Batch(ids, labels, None, None, seqlen, None, ids.numel()).to(device)


def language_model_case(size: str, seqlen: int, settings: Settings) -> Case:
    """Both models at one size and length."""
    count, mru = settings.batch(seqlen), mru_model(size, settings)
    gpt = same_size_gpt(mru)
    batch = random_batch(count, seqlen, mru.vocab_size, settings.device)
    candidates = steps_of({"ours": mru, "GPT, flash attention": gpt}, ObjectiveConfig(), batch, settings)
    ours, theirs = (f"{count_parameters(model) / 1e6:.1f}M" for model in (mru, gpt))
    hidden = round(gpt.mlp_ratio * gpt.d_model)
    kind = f"{size}: MRU of {ours}, GPT of {theirs} parameters (MLPs {hidden:,} wide)"
    return Case(
        label=f"L {seqlen:,}, B {count:,}", kind=kind, note=kind, seqlen=seqlen, batch=count, candidates=candidates
    )


def cases(settings: Settings, sizes: list[str]) -> Iterator[Case]:
    """One case per size and length."""
    for size in sizes:
        for seqlen in settings.lengths:
            yield language_model_case(size, seqlen, settings)


def main(arguments: list[str]) -> None:
    """The command."""
    parser = step_parser("language_model", __doc__, LENGTHS)
    parser.add_argument("--size", default="both", choices=["both", *SIZES], help="of the models (default: both)")
    options = parser.parse_args(arguments)
    sizes = list(SIZES) if options.size == "both" else [options.size]
    run_steps("language_model", options, partial(cases, sizes=sizes))

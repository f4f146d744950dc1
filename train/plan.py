"""`matmix train RECIPE --dry-run`: what a run would be, found on the meta device without data or memory."""

from __future__ import annotations

import dataclasses
import os

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from matmix.model import build_model
from matmix.model.config import ModelConfig
from matmix.model.flops import flops_per_token
from matmix.train.callbacks.progress import short_number
from matmix.train.config import RunConfig
from matmix.train.engine.config import EngineConfig
from matmix.train.storages import Storages

_ASSUMED_VOCABULARY = 32768


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Sizes and costs of a run; bytes are per rank."""

    parameters: int
    flops_per_token: float  # forward
    tokens_per_step: int
    steps: int
    ranks: int
    micro_batch_size: int
    accumulation: int
    state_bytes: float  # weights, gradients and moments
    gathered_bytes: float  # weights that are whole at one time
    activation_bytes: float

    @property
    def total_bytes(self) -> float:
        return self.state_bytes + self.gathered_bytes + self.activation_bytes


def saved_bytes(config: ModelConfig, batch: int, seqlen: int, low_precision: bool) -> tuple[float, float]:
    """Bytes that a forward pass over (batch, seqlen) tokens keeps for the backward pass, found without memory.

    Returns: what the tokens cost, in proportion to their number; and what any number of them costs, such as
    copies of the weights in bf16.
    """
    with FakeTensorMode():
        model = build_model(config, device="cpu")

        def live_bytes(sequences: int) -> int:
            with Storages() as storages, torch.autocast("cpu", dtype=torch.bfloat16, enabled=low_precision):
                tokens = torch.zeros(sequences, seqlen, dtype=torch.long)
                # The readout is left out: the loss never holds the logits of a whole micro-batch.
                loss = model(tokens, readout=lambda features, weight, bias: features.sum())
                held = storages.live_bytes()
            del loss  # which held all that is counted
            return held

        one, two = live_bytes(1), live_bytes(2)
    return float(batch * (two - one)), float(2 * one - two)


def _state_bytes(parameters: int, engine: EngineConfig, ranks: int) -> tuple[float, float]:
    """(bytes of weights, gradients and two moments per rank, all float32; share of the weights that is gathered)."""
    shard = ranks // engine.replicate
    if engine.name == "fsdp2":
        return 16 * parameters / shard, 1.0 if shard > 1 else 0.0
    if engine.name == "ddp":
        return 16.0 * parameters, 0.0
    weights = 4 / (ranks if engine.zero_stage >= 3 else 1)
    gradients = 4 / (ranks if engine.zero_stage >= 2 else 1)
    moments = 8 / (ranks if engine.zero_stage >= 1 else 1)
    return (weights + gradients + moments) * parameters, 1.0 if engine.zero_stage >= 3 and ranks > 1 else 0.0


def make_plan(config: RunConfig, ranks: int) -> Plan:
    """The plan of `config` on `ranks` processes. Raises ValueError where the batch does not divide."""
    model_config = config.model
    if model_config.vocab_size == 0:
        model_config = dataclasses.replace(model_config, vocab_size=_ASSUMED_VOCABULARY)
    model = build_model(model_config, device="meta")
    micro = config.micro_batch(ranks)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    states, gathers = _state_bytes(parameters, config.engine, ranks)
    blocks = len(model.blocks)
    block_bytes = 4 * sum(parameter.numel() for parameter in model.blocks.parameters()) / blocks
    outside = 4 * parameters - block_bytes * blocks
    activations, copies = saved_bytes(model_config, micro, config.data.seqlen, config.engine.precision == "bf16")
    inputs = blocks * micro * config.data.seqlen * model_config.d_model * 4
    recomputed = {"none": 0.0, "full": 1.0, "selective": 1 / config.engine.selective_every}
    share = recomputed[config.engine.activation_checkpointing]
    if config.engine.activation_checkpointing == "selective" and config.engine.selective_by == "op":
        share = 0.0  # what the ops keep is not known here: the figure without checkpointing is a bound
    kept = activations * (1 - share) + (share > 0) * (inputs * share + activations / blocks)
    return Plan(
        parameters=parameters,
        flops_per_token=flops_per_token(model_config, config.data.seqlen, head_share=config.objective.target_share),
        tokens_per_step=config.global_batch_size * config.data.seqlen,
        steps=config.steps,
        ranks=ranks,
        micro_batch_size=micro,
        accumulation=config.global_batch_size // (micro * ranks),
        state_bytes=states,
        gathered_bytes=gathers * (outside + 2 * block_bytes),
        activation_bytes=kept + copies,
    )


def print_plan(config: RunConfig) -> int:
    """Prints the plan for the number of ranks in WORLD_SIZE (one where unset)."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    plan = make_plan(config, ranks)
    if int(os.environ.get("RANK", "0")):
        return 0
    tokens = plan.tokens_per_step * plan.steps
    flops = 3 * plan.flops_per_token
    gib = 2**30
    engine = config.engine.name
    if engine == "deepspeed":
        engine += f" stage {config.engine.zero_stage}"
    vocabulary = f"vocabulary {config.model.vocab_size}"
    if config.model.vocab_size == 0:
        vocabulary = f"vocabulary {_ASSUMED_VOCABULARY} assumed, training takes the data's"
    memory = {
        "weights, gradients and moments": plan.state_bytes,
        "gathered weights": plan.gathered_bytes,
        "activations": plan.activation_bytes,
    }
    parts = ", ".join(f"{size / gib:.2f} {name}" for name, size in memory.items())
    sequences = f"{config.global_batch_size} sequences of {config.data.seqlen}"
    pieces = f"{ranks} rank(s) x {plan.accumulation} micro-batch(es) of {plan.micro_batch_size}"
    by_op = ""
    if config.engine.activation_checkpointing == "selective" and config.engine.selective_by == "op":
        by_op = " by op (the activations above are without it)"
    rows = {
        "parameters": f"{short_number(plan.parameters)} ({plan.parameters:,}; {vocabulary})",
        "FLOPs per token": f"{short_number(plan.flops_per_token)} forward, {short_number(flops)} with backward",
        "memory per rank": f"{plan.total_bytes / gib:.2f} GiB estimated: {parts}",
        "batch": f"{sequences} = {short_number(plan.tokens_per_step)} tokens; {pieces}",
        "engine": f"{engine}, {config.engine.precision}, activation checkpointing "
        f"{config.engine.activation_checkpointing}{by_op}",
        "steps": f"{plan.steps:,}",
        "tokens": f"{short_number(tokens)} ({tokens:,})",
        "compute": f"{flops * tokens:.3g} FLOPs in all",
    }
    for name, text in rows.items():
        print(f"{name:<16}  {text}")
    return 0

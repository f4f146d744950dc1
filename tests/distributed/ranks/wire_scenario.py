"""What ranks send each other in a step, and in which order."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import scenarios
import torch
from torch import nn
from traffic import Traffic

from matmix.model import ModelConfig, build_model, initialize
from matmix.model.carrying import CarriedRows
from matmix.model.mixers import MIXERS
from matmix.train.config import RunConfig
from matmix.train.engine import kinds, wire
from matmix.train.engine.base import Engine
from matmix.train.engine.build import build_engine
from matmix.train.engine.config import EngineConfig
from matmix.train.engine.kinds import Sizes, sent
from matmix.train.estimate.plan import weights_of
from matmix.train.recipe import load_config
from matmix.train.tasks.cross_entropy import linear_cross_entropy

LAYERS, ACCUMULATION, VOCABULARY, WIDTH = 3, 2, 96, 64
MODEL = ModelConfig(
    architecture="encoder",
    layers=("hydra",),
    n_layers=LAYERS,
    d_model=WIDTH,
    vocab_size=VOCABULARY,
    tie_embeddings=False,
)
TYPES = (torch.float32, torch.bfloat16, torch.uint8)
"""In which weights and gradients are sent; several of them together as bytes."""


def model_of(options: dict[str, Any]) -> nn.Module:
    """A wider one for DeepSpeed, which at stage 3 does not cut what is small."""
    wider = 4 if options["name"] == "deepspeed" else 1
    return build_model(dataclasses.replace(MODEL, d_model=wider * WIDTH), device="meta")


def make_engine(options: dict[str, Any]) -> Engine:
    engine = build_engine(EngineConfig(**options), scenarios.place())
    model = model_of(options)
    engine.prepare(model, lambda model: initialize(model, seed=0), scenarios.make_optimizer)
    return engine


def step(engine: Engine, number: int) -> float:
    """Trains one step on tokens of this rank; returns the sum of its losses."""
    generator = torch.Generator().manual_seed(100 * number + engine.rank)
    total = 0.0
    for index in range(ACCUMULATION):
        tokens = torch.randint(0, VOCABULARY, (2, 12), generator=generator)
        readout = functools.partial(linear_cross_entropy, targets=tokens.flip(1).flatten())
        loss = engine.model(tokens, readout=readout).total / tokens.numel()
        total += loss.item()
        engine.backward(loss / ACCUMULATION, last=index == ACCUMULATION - 1)
    engine.step(1.0)
    return total


def planned(options: dict[str, Any], ranks: int) -> dict[str, float]:
    """Bytes that a rank is said to send, by the first word of the exchange."""
    sizes = Sizes(weights=weights_of(model_of(options)), n_blocks=LAYERS, moments=0, accumulation=ACCUMULATION)
    return {one.what.split()[0]: 4 * one.sent for one in sent(EngineConfig(**options), ranks, sizes)}


def bytes_of_steps(runs: list[dict[str, Any]]) -> list[Any]:
    """For each run (bytes that a step sends by kind, what the plan says)."""
    found = []
    for options in runs:
        engine = make_engine(options)
        step(engine, 0)
        with Traffic() as traffic:
            step(engine, 1)
        kinds = ("all_gather", "reduce_scatter", "all_reduce")
        counted = {kind.replace("_", "-"): traffic.bytes(kind, *TYPES) for kind in kinds}
        found.append((counted, planned(options, engine.world_size)))
    return found


def bytes_of_zero(runs: list[dict[str, Any]], reuse: int) -> list[Any]:
    """`bytes_of_steps`; stage 3 keeps the weights that are used again behind fewer than `reuse` others. It would keep
    as many as it may gather ahead, too: more than this model has."""
    from matmix.train.engine import zero

    with pytest.MonkeyPatch.context() as patch:
        options = {"stage3_max_reuse_distance": reuse, "stage3_prefetch_bucket_size": 0}
        patch.setattr(zero, "ZERO_OPTIONS", options)
        patch.setattr(kinds, "REUSE", reuse)
        return bytes_of_steps(runs)


def losses_and_checkpoints(directory: str) -> dict[str, Any]:
    """20 losses in bf16 with weights sent in bf16 and in float32, and with sums in bf16; what a checkpoint holds."""
    found: dict[str, Any] = {}
    rounded = wire.gather_rounded
    for name in ("fsdp2", "ddp"):
        for case, reduced in (("float32", "fp32"), ("rounded", "fp32"), ("sums", "bf16")):
            wire.gather_rounded = (lambda *_: None) if case == "float32" else rounded
            engine = make_engine({"name": name, "precision": "bf16", "reduce_dtype": reduced})
            found[name, case] = [step(engine, number) for number in range(20)]
        wire.gather_rounded = rounded
        kept = [*engine._state().values(), *(p.grad for p in engine.module.parameters() if p.grad is not None)]
        found[name, "types"] = {str(one.dtype) for one in kept}
        options = {"name": name, "precision": "bf16", "reduce_dtype": "bf16"}
        scenarios.ENGINES[f"{name} in bf16"] = options
        runs = scenarios.stop_and_resume(
            f"{name} in bf16", str(Path(directory)), dropout=0.0, stop=3, steps=6, accumulation=2
        )
        found[name, "resumed"] = runs
    return found


def order_of_collectives(runs: list[dict[str, Any]]) -> list[list[str]]:
    """What each run sends in a step, and when blocks compute, in order."""
    return [_order(options) for options in runs]


def _order(options: dict[str, Any]) -> list[str]:
    engine = make_engine(options)
    step(engine, 0)
    with Traffic() as traffic:
        for index, block in enumerate(engine.module.blocks):
            block.mixer.out_proj.register_forward_hook(_noting(traffic, index))
        step(engine, 1)
    return [one.kind for one in traffic.sent if one.dtype in (None, *TYPES)]


def _noting(traffic: Traffic, index: int) -> Any:
    def note(_module: Any, _inputs: Any, output: torch.Tensor) -> None:
        traffic.note(f"forward {index}")
        if output.requires_grad:
            output.register_hook(lambda _gradient: traffic.note(f"backward {index}"))

    return note


def in_context(layers: list[str], tokens: int, checkpointing: str = "none", carry: bool = False) -> RunConfig:
    """Layers of these mixers whose rows of so many tokens two ranks share."""
    causal = not MIXERS[layers[0]].bidirectional_form
    config = load_config(
        "debug_mru" if causal else "debug_hydra", [f"--engine.activation-checkpointing={checkpointing}"]
    )
    model = dataclasses.replace(
        MODEL,
        architecture="language_model" if causal else "encoder",
        layers=tuple(layers),
        n_layers=len(layers),
        max_seqlen=512,
    )
    engine = dataclasses.replace(config.engine, name="ddp", context=2)
    data = dataclasses.replace(config.data, seqlen=tokens, carry=carry, shuffle=not carry)
    return dataclasses.replace(config, model=model, engine=engine, data=data, micro_batch_size=1)


def bytes_of_contexts(runs: list[tuple]) -> list[float]:
    """Bytes that a micro-batch sends between the layers of two ranks, for each run."""
    found = []
    for run in runs:
        config = in_context(*run)
        engine = build_engine(config.engine, scenarios.place())
        model = build_model(config.model, device="meta")
        engine.prepare(model, lambda model: initialize(model, seed=0), scenarios.make_optimizer)
        length = config.data.seqlen // 2
        bounds = torch.tensor([0, config.data.seqlen], dtype=torch.int32) - length * engine.rank
        carried = CarriedRows(continues=torch.zeros(1, dtype=torch.bool)) if config.data.carry else None
        with Traffic() as forward:
            y = engine.model(torch.ones(1, length, dtype=torch.long), cu_seqlens=bounds, carried=carried)
        with Traffic() as backward:
            y.sum().backward()
        # Gradients are summed besides.
        sent = forward.sent + [one for one in backward.sent if one.kind != "all_reduce"]
        found.append(sum(one.bytes for one in sent))
    return found

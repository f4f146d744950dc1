"""What DeepSpeed holds on a rank and what it sends."""

from __future__ import annotations

from matmix.train.engine.config import EngineConfig
from matmix.train.engine.costs import Exchange, Held, Sizes, held_whole

# DeepSpeed's defaults, in elements: the buffer in which gradients are summed, and weights that ZeRO 3 leaves gathered.
BUCKET, LIVE = 500_000_000, 1_000_000_000


def held_by_zero(engine: EngineConfig, ranks: int, sizes: Sizes) -> Held:
    """From stage 1 on the optimizer works on a float32 copy of this rank's part of the weights, and gradients meet in a
    buffer of fixed size. Stage 3 keeps gathered weights until there are LIVE of them."""
    stage, whole = engine.zero_stage, sizes.parameters
    if stage == 0:
        return held_whole(sizes)
    part = whole / ranks
    moments = sizes.moments / ranks
    if stage == 3:
        gathered = min(whole, LIVE)
        return Held(2 * part, moments, gathered, BUCKET, standing=part, share=0.0, whole=2 * sizes.block)
    standing = whole if stage == 1 else part
    return Held(whole + part, moments, buffers=BUCKET, standing=standing, share=0.0, whole=part)


def sent_by_zero(engine: EngineConfig, ranks: int, sizes: Sizes) -> list[Exchange]:
    """Gradients are summed, from stage 2 on at every micro-batch, as no rank keeps whole ones to add to. Stage 3
    gathers weights for each pass."""
    part = (ranks - 1) / ranks * sizes.parameters
    if engine.zero_stage == 0:
        return [Exchange("all-reduce of gradients", 2 * part, ranks, ranks)]
    reductions = sizes.accumulation if engine.zero_stage >= 2 else 1
    gathers = 2 * sizes.accumulation if engine.zero_stage == 3 else 1
    return [
        Exchange("reduction of gradients", part * reductions, ranks, ranks),
        Exchange("all-gather of weights", part * gathers, ranks, ranks),
    ]

"""How much of a model an engine holds on a rank, for estimates of memory."""

from __future__ import annotations

import dataclasses

from matmix.train.engine.config import EngineConfig


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """A model and how it is trained, in elements."""

    parameters: int
    block: int  # of one block, on average
    outside: int  # of all blocks
    moments: int  # that the optimizer keeps of each parameter
    accumulates: bool  # a step has several micro-batches


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """What an engine holds on a rank, in elements of float32."""

    weights: float
    moments: float
    gathered: float = 0.0
    buffers: float = 0.0
    standing: float = 0.0  # gradients that stay between micro-batches
    share: float = 1.0  # of a complete gradient
    whole: float = 0.0  # gradients that are whole for a while before ranks sum them


def held_whole(sizes: Sizes) -> Held:
    """Everything, as in a single process."""
    again, whole = sizes.accumulates, sizes.parameters
    return Held(whole, sizes.moments * whole, standing=whole * again, share=float(not again))


def held_by_fsdp(engine: EngineConfig, ranks: int, sizes: Sizes) -> Held:
    """What `fully_shard` leaves on a rank: its shard, and what is gathered for a while."""
    if ranks == 1:
        return held_whole(sizes)
    shard = 1 if engine.name == "ddp" else ranks // engine.replicate
    near = sizes.outside + 2 * sizes.block
    return Held(
        sizes.parameters / shard,
        sizes.moments * sizes.parameters / shard,
        gathered=sizes.parameters if engine.name == "ddp" or not engine.reshard_after_forward else near,
        # Before the last micro-batch of a step gradients stay whole; in the last one they are summed block by block.
        standing=sizes.parameters * sizes.accumulates,
        share=1 / shard,
        whole=0.0 if sizes.accumulates else sizes.outside + sizes.block,
    )

"""What an engine holds on a rank and what it sends, for estimates of memory and time.

What a rank sends is counted as ring algorithms send it: an all-gather or reduce-scatter of S elements over n ranks
sends (n - 1) / n S from each, an all-reduce twice that.
"""

from __future__ import annotations

import dataclasses

from matmix.train.engine.config import EngineConfig
from matmix.train.engine.mesh import MeshShape


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """A model and how it is trained, in elements."""

    parameters: int
    block: int  # of one block, on average
    outside: int  # of all blocks
    moments: float  # that the optimizer keeps, as many as elements of float32 would take its bytes
    accumulation: int  # micro-batches of a step

    @property
    def accumulates(self) -> bool:
        return self.accumulation > 1


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


@dataclasses.dataclass(frozen=True, slots=True)
class Exchange:
    """One kind of exchange between ranks in a step."""

    what: str
    sent: float  # by each rank, in elements of float32, at every precision
    ranks: int  # that take part
    span: int  # ranks from the first to the last that takes part: within a node if it has as many


def held_whole(sizes: Sizes) -> Held:
    """Everything, as in a single process."""
    again, whole = sizes.accumulates, sizes.parameters
    return Held(whole, sizes.moments, standing=whole * again, share=float(not again))


def held_by_fsdp(engine: EngineConfig, ranks: int, sizes: Sizes) -> Held:
    """What `fully_shard` leaves on a rank: its shard, and what is gathered for a while."""
    if ranks == 1:
        return held_whole(sizes)
    shard = MeshShape.of(engine, ranks).parts
    near = sizes.outside + 2 * sizes.block
    return Held(
        sizes.parameters / shard,
        sizes.moments / shard,
        gathered=sizes.parameters if engine.name == "ddp" or not engine.reshard_after_forward else near,
        # Before the last micro-batch of a step gradients stay whole; in the last one they are summed block by block.
        standing=sizes.parameters * sizes.accumulates,
        share=1 / shard,
        whole=0.0 if sizes.accumulates else sizes.outside + sizes.block,
    )


def sent_by_fsdp(engine: EngineConfig, ranks: int, sizes: Sizes) -> list[Exchange]:
    """The shards of a copy gather weights and sum gradients; copies sum the gradients of their shards."""
    shape = MeshShape.of(engine, ranks)
    copies, shard = shape.copies, shape.parts
    found = []
    if shard > 1:
        part = (shard - 1) / shard
        times = 2 if engine.reshard_after_forward else 1
        gathered = ((sizes.parameters - sizes.outside) * times + sizes.outside) * sizes.accumulation
        found.append(Exchange("all-gather of weights", part * gathered, shard, shard))
        found.append(Exchange("reduce-scatter of gradients", part * sizes.parameters, shard, shard))
    if copies > 1:
        part = 2 * (copies - 1) / copies
        found.append(Exchange("all-reduce of gradients", part * sizes.parameters / shard, copies, ranks))
    return found


def parts_to_save(engine: EngineConfig, ranks: int) -> int:
    """Returns into how many parts so many ranks cut what they save."""
    return ranks if engine.kind == "deepspeed" else MeshShape.of(engine, ranks).parts

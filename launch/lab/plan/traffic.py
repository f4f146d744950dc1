"""Bytes that a rank sends in one optimizer step, by collective, and how long the links take.

Counted as ring algorithms send them: an all-gather or reduce-scatter of S bytes over n ranks sends (n - 1) / n S from
each, an all-reduce twice that. Weights and gradients travel in float32 at every precision.
"""

from __future__ import annotations

import dataclasses

from matmix.launch.lab.plan.hardware import GB, Cluster
from matmix.train.config import RunConfig
from matmix.train.estimate.memory import FLOAT
from matmix.train.estimate.plan import Plan


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
    """One kind of exchange."""

    what: str
    bytes: float  # sent by each rank in a step
    ranks: int  # that take part
    within_node: bool

    def seconds(self, cluster: Cluster) -> float:
        speed = cluster.node_gb_per_s if self.within_node else cluster.network_gb_per_s
        return self.bytes / (speed * GB)


def collectives(config: RunConfig, plan: Plan, gpus_per_node: int) -> list[Collective]:
    """What the engine of `config` sends in a step of `plan`."""
    engine, ranks = config.engine, plan.ranks
    if ranks == 1:
        return []
    weights = float(FLOAT * plan.parameters)
    blocks = float(FLOAT * plan.block_parameters * config.model.n_layers)
    if engine.name == "deepspeed":
        return _zero(engine.zero_stage, weights, ranks, ranks <= gpus_per_node, plan.accumulation)
    copies = ranks if engine.name == "ddp" else engine.replicate
    shard = ranks // copies
    found = []
    if shard > 1:
        inside, part = shard <= gpus_per_node, (shard - 1) / shard
        times = 2 if engine.reshard_after_forward else 1
        gathered = (blocks * times + weights - blocks) * plan.accumulation
        found.append(Collective("all-gather of weights", part * gathered, shard, inside))
        found.append(Collective("reduce-scatter of gradients", part * weights, shard, inside))
    if copies > 1:
        part = 2 * (copies - 1) / copies
        found.append(
            Collective("all-reduce of gradients", part * weights / shard, copies, copies * shard <= gpus_per_node)
        )
    return found


def _zero(stage: int, weights: float, ranks: int, inside: bool, accumulation: int) -> list[Collective]:
    part = (ranks - 1) / ranks * weights
    if stage == 0:
        return [Collective("all-reduce of gradients", 2 * part, ranks, inside)]
    reductions = accumulation if stage >= 2 else 1  # from stage 2 on no rank keeps whole gradients to add to
    gathers = 2 * accumulation if stage == 3 else 1
    return [
        Collective("reduction of gradients", part * reductions, ranks, inside),
        Collective("all-gather of weights", part * gathers, ranks, inside),
    ]

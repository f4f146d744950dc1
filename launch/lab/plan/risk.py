"""Failures and checkpoints: how often to save, and what is lost."""

from __future__ import annotations

import dataclasses
import math

from matmix.launch.lab.plan.hardware import GB, Cluster
from matmix.train.config import RunConfig
from matmix.train.estimate.memory import FLOAT
from matmix.train.estimate.plan import Plan
from matmix.train.optim import optimizer_class


@dataclasses.dataclass(frozen=True, slots=True)
class Risk:
    """Seconds, but for `lost`, a share of the time."""

    mtbf: float  # mean time between failures of the whole run
    stall: float  # training waits for each save
    interval: float  # between saves as configured
    best_interval: float  # sqrt(2 stall mtbf): Young (1974), Daly (2006)
    restart: float

    def lost(self, interval: float) -> float:
        """Share of the time that saving, work done again and restarts cost, to first order (Daly's eq. 9)."""
        return self.stall / interval + (interval / 2 + self.restart) / self.mtbf


def assess(config: RunConfig, plan: Plan, cluster: Cluster, step_seconds: float, stall: float | None = None) -> Risk:
    """stall: seconds that a save stops training, as measured; None = the copy of a rank's part to its host."""
    if stall is None:
        copies = plan.ranks if config.engine.name == "ddp" else config.engine.replicate
        # Weights and moments; every rank of a group of shards copies its own.
        tensors = 1 + len(optimizer_class(config.optimizer).moments)
        stall = tensors * FLOAT * plan.parameters / max(1, plan.ranks // copies) / (cluster.host_gb_per_s * GB)
    mtbf = cluster.mtbf_gpu_hours * 3600 / plan.ranks
    every = config.checkpoint.every or config.steps
    return Risk(
        mtbf=mtbf,
        stall=stall,
        interval=every * step_seconds,
        best_interval=math.sqrt(2 * stall * mtbf),
        restart=60 * cluster.restart_minutes,
    )

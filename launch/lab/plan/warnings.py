"""What should make a person stop before submitting."""

from __future__ import annotations

import math
from pathlib import Path

from matmix.data.manifest import Manifest
from matmix.launch.lab.plan.estimate import USABLE, Estimate
from matmix.launch.lab.plan.hardware import Cluster
from matmix.launch.lab.plan.risk import Risk
from matmix.train.config import RunConfig
from matmix.train.words import duration

FEW_TOKENS = 2048  # a pass over fewer leaves most of a large GPU idle
WORTH_A_WARNING = 0.01  # share of the run's time
MANY_EPOCHS = 4  # up to about four passes repeated data are nearly as good as new (arXiv 2305.16264)


def data_tokens(config: RunConfig) -> int | None:
    """Tokens of the training split; None where it is not on this machine, or generated."""
    if config.data.synthetic.task:
        return None
    paths = list(dict(config.data.mixture)) or [config.data.path]
    total = 0
    for path in paths:
        if not (Path(path) / "manifest.json").is_file():
            return None
        total += Manifest.load(Path(path)).splits["train"].tokens
    return total


def find_warnings(one: Estimate, cluster: Cluster, risk: Risk) -> list[str]:
    """One line each."""
    config, plan, found = one.config, one.plan, []
    if not one.fits:
        found.append(
            f"a rank needs {plan.total_bytes / 1e9:.0f} GB of the {cluster.memory_gb * USABLE:.0f} GB that can be used "
            f"of a {cluster.gpu}: take a smaller micro-batch, checkpointing, or a suggestion below"
        )
    tokens = plan.micro_batch_size * config.data.seqlen
    if tokens < FEW_TOKENS:
        found.append(
            f"global batch too small for the mesh: a rank sees {tokens} tokens in a pass, which leaves most of a "
            f"{cluster.gpu} idle; use fewer GPUs or a larger global_batch_size"
        )
    if one.traffic_seconds > one.compute_seconds:
        found.append(
            f"exchanges between GPUs ({duration(one.traffic_seconds)} a step) take longer than arithmetic "
            f"({duration(one.compute_seconds)}): the batch is too small for the mesh, or the mesh too wide"
        )
    available, needed = data_tokens(config), plan.tokens_per_step * plan.steps
    if available is not None and needed > MANY_EPOCHS * available:
        found.append(
            f"data repeats: the run reads {needed / available:.1f} times the {available:,} tokens of the training "
            f"split; beyond about {MANY_EPOCHS} passes repeated data teach less and less"
        )
    if risk.lost(risk.interval) > risk.lost(risk.best_interval) + WORTH_A_WARNING:
        steps = max(1, round(risk.best_interval / one.step_seconds))
        digits = max(0, int(math.log10(steps)) - 1)
        found.append(
            f"a checkpoint every {config.checkpoint.every or config.steps} steps ({duration(risk.interval)}) "
            f"loses {risk.lost(risk.interval):.1%} of the time to failures, one every {duration(risk.mtbf)}; "
            f"every {duration(risk.best_interval)} is best: --checkpoint.every {round(steps, -digits)}"
        )
    return found

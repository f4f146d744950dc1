"""`matmix plan RECIPE --gpus 512 --gpu h100 [--key value ...]`: what a person should know before submitting."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated

import tyro

from matmix.train.arguments import Recipe, check_overrides


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanRun:
    """Show memory, traffic, time and risk of a run on a cluster, found without data or GPUs.

    Any field of the recipe can be given too, as in --micro-batch-size 8.
    """

    recipe: Recipe = ""
    """Recipe, run directory, or name of a bundled recipe."""
    gpus: int
    """Number of GPUs, one rank each."""
    gpu: str | None = None
    """Kind of GPU: a100, h100, h200, b200, mi300x; default: h100."""
    cluster: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """TOML file with the cluster's own figures."""
    mfu: float | None = None
    """Share of the peak that training reaches."""
    measured: Annotated[str | None, tyro.conf.arg(metavar="RUN")] = None
    """Take that share from a run on such GPUs."""
    save_stall: float | None = None
    """Seconds that a save stops training, if measured."""

    def run(self, rest: list[str], typed: Sequence[str]) -> int:
        from matmix.launch.lab.plan.report import describe_plan
        from matmix.train.config import RunConfig
        from matmix.train.recipe import load_phases

        if self.gpus < 1:
            raise ValueError(f"--gpus must be >= 1, got {self.gpus}")
        if self.mfu is not None and not 0 < self.mfu <= 1:
            raise ValueError(f"--mfu is a share between 0 and 1, got {self.mfu}")
        check_overrides(self, rest, RunConfig)
        phases = load_phases(self.recipe, rest)
        for number, config in enumerate(phases):
            if len(phases) > 1:
                print(f"{config.run_dir}:" if not number else f"\n{config.run_dir}:")
            print("\n".join(describe_plan(config, rest, self, is_phase=len(phases) > 1)))
        return 0

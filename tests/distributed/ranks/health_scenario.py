"""Two ranks check each other's health; the second one's memory, or clock, is bad."""

import os
from pathlib import Path

import torch

from matmix.train.errors import HealthError
from matmix.train.process import health
from matmix.train.process.distributed import Distributed


def check(folder: str) -> dict[str, str]:
    rank = int(os.environ["RANK"])
    os.environ["MATMIX_NODE"] = f"gpu{rank + 1:02d}"
    distributed, found = Distributed.from_environment("cpu"), {}
    sound = health.check_health(distributed, Path(folder))
    found["sound"] = health.describe(sound)
    found["bandwidth is positive"] = str(min(report.bandwidth for report in sound) > 0)

    arange, clock = torch.arange, health.time.time
    if rank == 1:
        torch.arange = lambda *arguments, **options: arange(*arguments, **options).index_fill_(0, torch.tensor(7), 9)
    try:
        health.check_health(distributed, Path(folder))
    except HealthError as error:
        found["bad memory"] = str(error)
    finally:
        torch.arange = arange

    if rank == 1:
        health.time.time = lambda: clock() + 7200
    try:
        found["bad clock"] = "; ".join(health.find_warnings(health.check_health(distributed, Path(folder))))
    finally:
        health.time.time = clock
    return found

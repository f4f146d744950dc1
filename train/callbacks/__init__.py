"""Callbacks: side effects of training, such as progress, records and pictures."""

import dataclasses

from matmix.train.arguments import find_part, read_options
from matmix.train.callbacks.base import Callback, Callbacks, Rewind, RunView, StepRecord
from matmix.train.callbacks.housekeeping import DataWait, GarbageCollection, LauncherGone, Profiler, Progress
from matmix.train.callbacks.records import Curves, MetricsFile
from matmix.train.callbacks.trackers import MLflow, TensorBoard, WandB
from matmix.train.callbacks.watchdog import Watchdog
from matmix.train.config import RunConfig
from matmix.train.process.launched import followed

__all__ = ["Callback", "Callbacks", "Rewind", "RunView", "StepRecord", "make_callbacks"]


TRACKERS = {"wandb": WandB, "mlflow": MLflow}
"""The names that a table [[callback]] gives them."""


def make_callbacks(config: RunConfig, rank: int) -> Callbacks:
    """Returns the callbacks of a rank, in order, without those that cannot be made. Raises ValueError (one line) where
    a table [[callback]] names no callback, or options that it does not have."""
    logging = config.logging
    wanted = [
        (True, MetricsFile, {}),
        (True, DataWait, {}),
        (config.faults.hang_minutes, Watchdog, {"minutes": config.faults.hang_minutes}),
        (logging.progress, Progress, {}),
        (logging.tensorboard, TensorBoard, {}),
        (logging.picture, Curves, {}),
        (logging.profile_start, Profiler, {"start": logging.profile_start, "steps": logging.profile_steps}),
        (config.gc_every, GarbageCollection, {"every": config.gc_every}),
        (followed(), LauncherGone, {}),
    ]
    chosen = [(kind, options) for is_wanted, kind, options in wanted if is_wanted]
    for own in config.callback:
        kind = find_part(own.name, TRACKERS, "callback", Callback)
        options = read_options(own.options, kind.Options, f'callback "{own.name}"')
        chosen.append((kind, {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}))
    callbacks = Callbacks()
    for kind, options in chosen:
        if rank == 0 or not kind.main_rank_only:
            callbacks.make(kind, **options)
    return callbacks

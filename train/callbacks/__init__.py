"""Callbacks: side effects of training, such as progress, records and pictures."""

from __future__ import annotations

import inspect

from matmix.train.callbacks.base import Callback, Callbacks, Rewind, RunView, StepRecord
from matmix.train.callbacks.curves import Curves
from matmix.train.callbacks.housekeeping import DataWait, GarbageCollection, LauncherGone
from matmix.train.callbacks.metrics_file import MetricsFile
from matmix.train.callbacks.profiler import Profiler
from matmix.train.callbacks.progress import Progress
from matmix.train.callbacks.tensorboard import TensorBoard
from matmix.train.callbacks.watchdog import Watchdog
from matmix.train.config import CallbackConfig, RunConfig
from matmix.train.plugins import find_part
from matmix.train.process.launcher import followed

__all__ = ["Callback", "Callbacks", "Rewind", "RunView", "StepRecord", "make_callbacks"]


def make_callbacks(config: RunConfig, rank: int) -> Callbacks:
    """The callbacks of a rank, in order. Raises ValueError (one line) where a table [[callback]] names no callback, or
    options that it does not have; a callback that fails is left out."""
    logging = config.logging
    wanted = [
        (True, MetricsFile, ()),
        (True, DataWait, ()),
        (config.faults.hang_minutes, Watchdog, (config.faults.hang_minutes,)),
        (logging.progress, Progress, ()),
        (logging.tensorboard, TensorBoard, ()),
        (logging.picture, Curves, ()),
        (logging.profile_start, Profiler, (logging.profile_start, logging.profile_steps)),
        (config.gc_every, GarbageCollection, (config.gc_every,)),
        (followed(), LauncherGone, ()),
    ]
    found = [(kind, arguments, {}) for is_wanted, kind, arguments in wanted if is_wanted]
    found += [(_named(own), (), own.options) for own in config.callback]
    callbacks = Callbacks()
    for kind, arguments, options in found:
        if rank == 0 or not kind.main_rank_only:
            callbacks.make(kind, *arguments, **options)
    return callbacks


def _named(config: CallbackConfig) -> type[Callback]:
    """The class that a table [[callback]] names."""
    kind = find_part(config.name, {}, "callback")
    if not (isinstance(kind, type) and issubclass(kind, Callback)):
        raise ValueError(f"callback {config.name!r} is not a subclass of matmix.train.callbacks.Callback")
    try:
        inspect.signature(kind).bind(**config.options)
    except TypeError as error:
        raise ValueError(f"callback {config.name!r}: its options do not fit: {error}") from None
    return kind

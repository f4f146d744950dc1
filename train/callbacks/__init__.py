"""Side effects of training: what is shown, recorded, watched."""

from __future__ import annotations

from matmix.train.callbacks.base import Callback, Callbacks, StepRecord
from matmix.train.callbacks.curves import Curves
from matmix.train.callbacks.data_wait import DataWait
from matmix.train.callbacks.garbage import GarbageCollection
from matmix.train.callbacks.launcher import LauncherGone
from matmix.train.callbacks.metrics_file import MetricsFile
from matmix.train.callbacks.nan_guard import NanGuard
from matmix.train.callbacks.profiler import Profiler
from matmix.train.callbacks.progress import Progress
from matmix.train.callbacks.tensorboard import TensorBoard
from matmix.train.callbacks.watchdog import Watchdog
from matmix.train.config import RunConfig
from matmix.train.process.launcher import followed

__all__ = ["Callback", "Callbacks", "StepRecord", "make_callbacks"]


def make_callbacks(config: RunConfig, rank: int) -> Callbacks:
    """The callbacks a rank runs, in order: those that may end the run come last, after everything was recorded."""
    callbacks: list[Callback] = [MetricsFile(), DataWait()]
    if config.faults.hang_minutes:
        callbacks.append(Watchdog(config.faults.hang_minutes))
    if config.logging.progress:
        callbacks.append(Progress())
    if config.logging.tensorboard:
        callbacks.append(TensorBoard())
    if config.logging.picture:
        callbacks.append(Curves())
    if config.logging.profile_start:
        callbacks.append(Profiler(config.logging.profile_start, config.logging.profile_steps))
    if config.gc_every:
        callbacks.append(GarbageCollection(config.gc_every))
    if followed():
        callbacks.append(LauncherGone())
    callbacks.append(NanGuard(config.max_bad_steps))
    return Callbacks(callback for callback in callbacks if rank == 0 or not callback.main_rank_only)

"""The faults that `worker.py` puts into a process. Each function arms one; its arguments come from a test's JSON.

They act on what the operating system sees of a run (files opened, renamed, removed; clocks; limits) or on the borders
between its parts (a step, a backward pass, a batch), so that they hold whatever those parts look like inside.
"""

from __future__ import annotations

import errno
import functools
import importlib
import os
import re
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_SAVE = re.compile(r"/checkpoints/[^/]*step-(\d+)(?:/(.*))?$")
_COPY = re.compile(r"/matmix-\d+/[^/]+/[^/]+/[^/]*step-(\d+)(?:/(.*))?$")  # that stays with a node


def mark(folder: str, name: str) -> None:
    """Tells the test where this process is: an empty file named <name>.<rank>."""
    (Path(folder) / f"{name}.{os.environ.get('RANK', '0')}").touch()


def sleep_for_ever() -> None:
    while True:
        time.sleep(3600)


def wait_for_go(markers: str) -> None:
    while not (Path(markers) / "go").exists():
        time.sleep(0.02)


def pause_in(function: str, markers: str, call: int = 1) -> None:
    """Stands still at the n-th call of a function ("module:name" or "module:class.name") until the test sets the marker
    "go", once the marker <name> is set."""
    module, _, path = function.partition(":")
    *parents, name = path.split(".")
    owner = functools.reduce(getattr, parents, importlib.import_module(module))
    original, calls = getattr(owner, name), 0

    def paused(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            mark(markers, name)
            wait_for_go(markers)
        return original(*arguments, **options)

    setattr(owner, name, paused)


def before_step(step: int, action: Callable[[Any], None]) -> None:
    """Calls `action(trainer)` before optimizer step number `step` (the first one is 1), every time it comes."""
    from matmix.train.loop import Trainer

    train_step = Trainer.train_step

    def faulty(self: Any, *arguments: Any, **options: Any) -> Any:
        if self.state.step + 1 == step:
            action(self)
        return train_step(self, *arguments, **options)

    Trainer.train_step = faulty


# -- saving --------------------------------------------------------------------------------------------------


def phase_of(event: str, arguments: tuple[Any, ...], paths: re.Pattern = _SAVE) -> tuple[str, int] | None:
    """The phase of a save that a file operation belongs to, and the step that is saved (or, in "prune", removed)."""
    if not arguments or not isinstance(arguments[0], str | os.PathLike):
        return None
    match = paths.search(os.fspath(arguments[0]))
    if match is None:
        return None
    step, name = int(match[1]), match[2] or ""
    unfinished = "/.tmp-step-" in os.fspath(arguments[0])
    if event == "open":
        mode, flags = arguments[1], arguments[2]
        writes = bool(set(mode) & set("wax+")) if isinstance(mode, str) else bool(flags & (os.O_WRONLY | os.O_RDWR))
        if not unfinished:
            return ("sharing", step) if writes else None
        if name.endswith("checkpoint.json"):
            return ("manifest", step) if writes else None
        return ("writing" if writes else "checksums", step)
    if event == "os.rename" and unfinished and not name:
        return "rename", step
    if event in ("os.remove", "os.rename", "shutil.rmtree") and not unfinished:
        return "prune", step
    return None


def pause_in_save(phase: str, step: int, markers: str, for_ever: bool = True, local: bool = False) -> None:
    """Stands still in a phase of the first save at or after `step`, once the marker <phase> is set: for ever, or until
    the test sets the marker "go". local: of a copy that stays with the node."""
    if phase == "staging":
        _pause_in_staging(step, markers, "copy" if local else "save")
        return
    reached = False

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal reached
        if reached:
            return
        found = phase_of(event, arguments, _COPY if local else _SAVE)
        if found is None or found[0] != phase or (phase != "prune" and found[1] < step):
            return
        reached = True
        mark(markers, phase)
        sleep_for_ever() if for_ever else wait_for_go(markers)

    sys.addaudithook(hook)


def _pause_in_staging(step: int, markers: str, method: str) -> None:
    from matmix.train.loop import Trainer

    save = getattr(Trainer, method)

    def faulty(self: Any, *arguments: Any, **options: Any) -> Any:
        if self.state.step >= step:
            state = self.engine.named_tensors

            def paused() -> Any:
                mark(markers, "staging")
                sleep_for_ever()
                return state()

            self.engine.named_tensors = paused
        return save(self, *arguments, **options)

    setattr(Trainer, method, faulty)


def no_space(first: int, last: int) -> None:
    """The disk is full for whoever opens a file of the checkpoints of steps `first` to `last` for writing."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        found = phase_of(event, arguments)
        if found is not None and found[0] in ("writing", "manifest") and first <= found[1] <= last:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    sys.addaudithook(hook)


def small_files(step: int, limit: int) -> None:
    """From `step` on the kernel refuses to make any file longer than `limit` bytes."""
    before_step(step, lambda _: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY)))


# -- steps ---------------------------------------------------------------------------------------------------


def nan_gradients(step: int) -> None:
    """This rank's gradients of one step are NaN; its losses are not."""

    def poison(trainer: Any) -> None:
        backward = trainer.engine.backward

        def faulty(loss: Any, *, last: bool) -> None:
            backward(loss * float("nan"), last=last)
            if last:
                trainer.engine.backward = backward

        trainer.engine.backward = faulty

    before_step(step, poison)


def nan_after_reduction(step: int) -> None:
    """One number of this rank's gradients of one step turns into a NaN after the ranks have summed them."""

    def poison(trainer: Any) -> None:
        engine = trainer.engine
        update = engine.step

        def faulty(max_norm: float) -> Any:
            gradient = next(parameter.grad for parameter in engine.module.parameters() if parameter.grad is not None)
            getattr(gradient, "_local_tensor", gradient).flatten()[0] = float("nan")
            engine.step = update
            return update(max_norm)

        engine.step = faulty

    before_step(step, poison)


def flip_a_bit(step: int, once: bool = False) -> None:
    """The lowest bit of one of this rank's weights changes before a step (once: the first time that it comes)."""
    import torch

    done = False

    def flip(trainer: Any) -> None:
        nonlocal done
        if once and done:
            return
        done = True
        weight = dict(trainer.engine.named_tensors())["blocks.0.norm_mixer.weight"].detach()
        getattr(weight, "_local_tensor", weight).view(torch.int32)[3] ^= 1

    before_step(step, flip)


def slow_steps(first: int, last: int, seconds: float) -> None:
    """This rank's own work takes so much longer in each of these steps."""
    from matmix.train import loop
    from matmix.train.tasks.token_prediction import TokenPrediction

    compute_loss = TokenPrediction.loss
    now = [0]
    train_step = loop.Trainer.train_step

    def step(self: Any, *arguments: Any, **options: Any) -> Any:
        now[0] = self.state.step + 1
        return train_step(self, *arguments, **options)

    def slow(*arguments: Any, **options: Any) -> Any:
        if first <= now[0] <= last:
            time.sleep(seconds)
        return compute_loss(*arguments, **options)

    loop.Trainer.train_step, TokenPrediction.loss = step, slow


def hang(step: int, markers: str, how: str = "sleep") -> None:
    """This rank stands still before a step: in Python, or in C without ever letting go of the interpreter's lock."""

    def stand_still(_: Any) -> None:
        mark(markers, "hang")
        if how == "sleep":
            sleep_for_ever()
        import ctypes

        ctypes.PyDLL(None).sleep(3600)

    before_step(step, stand_still)


def impatient(step: int, seconds: float) -> None:
    """From `step` on the watchdog waits so long only. Before, a machine that is busy otherwise may take its time."""

    def shorten(trainer: Any) -> None:
        from matmix.train.callbacks.watchdog import Watchdog

        watchdog = next(callback for callback in trainer.callbacks if isinstance(callback, Watchdog))
        watchdog.limit, watchdog.poll, watchdog.grace = seconds, seconds / 20, 24.0
        watchdog.arm()

    before_step(step, shorten)


def pause(step: int, markers: str, rewinds: int = 0) -> None:
    """Stands still before a step, of a run that went back over so many spikes, until the test sets the marker "go"."""

    def wait(trainer: Any) -> None:
        if trainer.state.rewinds < rewinds:
            return
        mark(markers, "pause")
        while not (Path(markers) / "go").exists():
            time.sleep(0.02)

    before_step(step, wait)


def high_loss(first: int, last: int, factor: float) -> None:
    """The losses of the samples `first` to `last` of the data order are `factor` times what they are."""
    from matmix.train import loop
    from matmix.train.tasks.token_prediction import TokenPrediction

    compute_loss = TokenPrediction.loss
    trainers: list[Any] = []
    train_step = loop.Trainer.train_step

    def step(self: Any, *arguments: Any, **options: Any) -> Any:
        trainers[:] = [self, self.loader.samples]
        return train_step(self, *arguments, **options)

    def faulty(*arguments: Any, **options: Any) -> Any:
        result = compute_loss(*arguments, **options)
        if trainers and first <= trainers[1] <= last:
            return result._replace(total=result.total * factor, loss=result.loss * factor)
        return result

    loop.Trainer.train_step = step
    TokenPrediction.loss = faulty


# -- the machine ---------------------------------------------------------------------------------------------


def clock_offset(seconds: float) -> None:
    """This process's wall clock is wrong; the monotonic clocks are not."""
    now, now_ns = time.time, time.time_ns
    time.time = lambda: now() + seconds
    time.time_ns = lambda: now_ns() + int(seconds * 1e9)


def slow_reader(seconds: float) -> None:
    """Every micro-batch takes this much longer to read."""
    from matmix.data.modalities.text import TokenRows

    read = TokenRows.__getitems__

    def slow(self: Any, numbers: Any) -> Any:
        time.sleep(seconds)
        return read(self, numbers)

    TokenRows.__getitems__ = slow


def little_memory(step: int, more: int) -> None:
    """From `step` on this process may not grow by more than so many bytes."""

    def limit(_: Any) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        size = pages * resource.getpagesize() + more
        resource.setrlimit(resource.RLIMIT_AS, (size, size))

    before_step(step, limit)

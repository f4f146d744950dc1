"""A rank that hangs would hold the job until its limit: it ends itself, and leaves what all its threads were doing."""

import contextlib
import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from matmix.train.callbacks.base import Callback, RunView
from matmix.train.meters import collectives
from matmix.train.process.distributed import wait_for_ranks
from matmix.train.process.exits import EXIT_HUNG
from matmix.train.process.hang_report import Whereabouts, exchange, explain
from matmix.train.process.heartbeat import beat, last_beat
from matmix.train.run.outcome import Outcome, attempt_id, write_outcome
from matmix.train.words import duration

logger = logging.getLogger(__name__)


class Watchdog(Callback):
    """Ends the process with EXIT_HUNG after `minutes` without a sign of life (`matmix.train.process.heartbeat`).

    Ranks that wait for a hung one in a collective look like it, so each of them dumps its stacks, tells the others
    where it is and hears where they are (`hang_report`), and its last line names who stopped.
    """

    main_rank_only = False

    def __init__(self, minutes: float) -> None:
        self.limit = 60 * minutes
        self.poll = min(5.0, self.limit / 20)
        # How long ranks that are ready to end wait for the others' stacks: the first one to go takes the rest with it.
        self.grace = min(60.0, self.limit)
        self.stopped = threading.Event()
        self.thread: threading.Thread | None = None
        self.file: TextIO | None = None
        self.earlier: dict[Path, tuple[int, int]] = {}

    # -- what the loop calls -------------------------------------------------------------------------------------

    def on_start(self, run: RunView) -> None:
        self.run = run
        self.rank, self.world_size = run.engine.rank, run.engine.world_size
        self.main_thread = threading.get_ident()
        self.path = stacks_path(run.path, attempt_id(), self.rank)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # A start under the same name, maybe of more ranks, may have left its stacks here.
            self.earlier = {path: _written(path) for path in self._stack_files() if path != self.path}
            # Opened now: when the process hangs, opening may hang too.
            self.file = self.path.open("w", encoding="utf-8")
        except OSError as error:
            logger.warning(f"if this run hangs, its stacks go to stderr alone ({error})")
        # The ranks that wait for a hung one are to leave their stacks before a collective gives up and ends them.
        wait_for_ranks(max(30, 2 * self.limit / 60))
        beat("the start of the loop")
        self.thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self.thread.start()

    def on_step(self, run: RunView) -> None:
        beat(f"the end of step {run.state.step}")

    def on_end(self, run: RunView) -> None:
        if self.thread is None:
            return
        self.stopped.set()
        self.thread.join()
        faulthandler.cancel_dump_traceback_later()
        if self.file is not None:
            self.file.close()
            with contextlib.suppress(OSError):
                path = stacks_path(run.path, attempt_id(), self.rank)
                if path.stat().st_size == 0:
                    path.unlink()

    # -- the thread ----------------------------------------------------------------------------------------------

    def arm(self) -> None:
        """Sets a timer outside the interpreter, which ends the process (with code 1, the only one it knows) where the
        thread below cannot run: the main thread hangs in C and keeps the interpreter's lock."""
        last = last_beat()
        quiet = 0.0 if last.waiting else time.monotonic() - last.seconds
        # Later than the thread would act, sooner than the other ranks cease to wait for this one's stacks.
        seconds = max(self.limit - quiet, 0) + self.grace / 2
        faulthandler.dump_traceback_later(seconds, exit=True, file=self.file or sys.__stderr__)

    def _watch(self) -> None:
        while True:
            self.arm()
            if self.stopped.wait(self.poll):
                return
            last = last_beat()
            quiet = time.monotonic() - last.seconds
            if (quiet >= self.limit and not last.waiting) or (quiet >= self.limit / 2 and self._dumped()):
                break
        faulthandler.cancel_dump_traceback_later()
        self._end(quiet)

    def _end(self, quiet: float) -> None:
        place = "its main thread is gone"
        if (frame := sys._current_frames().get(self.main_thread)) is not None:
            code = frame.f_code
            place = f"its main thread is in {code.co_name} ({Path(code.co_filename).name}, line {frame.f_lineno})"
        mine = (
            f"rank {self.rank} made no progress for {duration(quiet)} (no step, evaluation batch, save); the last sign "
            f"of life was {last_beat().what}; {place}"
        )
        places = {self.rank: Whereabouts(collectives.count.begun, mine)}
        deadline = time.monotonic() + self.grace
        # By number: the file objects' locks may be held by a thread that hangs.
        os.write(2, f"matmix: {mine}\n".encode())
        faulthandler.dump_traceback(file=2, all_threads=True)
        # The storage, or another rank, may be what hangs, so this process must be able to end without them.
        self._try(self._dump, mine, seconds=self.grace / 4)
        self._try(self._ask, places, seconds=self.grace / 2)
        reason = explain(dict(places), self.rank, self.world_size)
        os.write(2, f"matmix: error: {reason}\n".encode())
        self._try(self._write, reason, seconds=self.grace / 4)
        while time.monotonic() < deadline and self._dumped() < self.world_size:
            time.sleep(self.poll)
        os.write(2, f"matmix: rank {self.rank} ends with code {EXIT_HUNG}; stacks in {self.path.parent}\n".encode())
        os._exit(EXIT_HUNG)

    @staticmethod
    def _try(action: Callable[..., None], *arguments: Any, seconds: float) -> None:
        """Runs an action for at most this long, and goes on without it."""
        thread = threading.Thread(target=action, args=arguments, daemon=True)
        thread.start()
        thread.join(seconds)

    def _dump(self, mine: str) -> None:
        if self.file is not None:
            self.file.write(f"{mine}\n")
            self.file.flush()
            faulthandler.dump_traceback(file=self.file, all_threads=True)

    def _ask(self, places: dict[int, Whereabouts]) -> None:
        with contextlib.suppress(RuntimeError):  # nobody is left to ask
            exchange(places, attempt_id(), self.rank, self.world_size, self.grace / 4)

    def _write(self, reason: str) -> None:
        step, saved = self.run.state.step, max(self.run.saved_steps(), default=None)
        outcome = Outcome(code=EXIT_HUNG, reason=reason, step=step, saved_step=saved)
        write_outcome(self.run.path, outcome, self.rank)

    def _dumped(self) -> int:
        """Returns how many ranks of this start have written their stacks, as far as this rank sees them."""
        count = 0
        for path in self._stack_files():
            with contextlib.suppress(OSError):
                written = _written(path)
                count += written[1] > 0 and written != self.earlier.get(path)
        return count

    def _stack_files(self) -> Iterator[Path]:
        return self.path.parent.glob("rank-*.stacks.txt")


def _written(path: Path) -> tuple[int, int]:
    """Returns when a file was written, in ns, and its size."""
    state = path.stat()
    return state.st_mtime_ns, state.st_size


def stacks_path(run_dir: Path, attempt: str, rank: int) -> Path:
    """Returns RUN/logs/<attempt>/rank-00003.stacks.txt, next to that rank's log."""
    return Path(run_dir) / "logs" / attempt / f"rank-{rank:05d}.stacks.txt"

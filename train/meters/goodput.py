"""Where the wall-clock time of a run went since its first start: into useful steps, waiting for data, saves and so on.

The account is part of the checkpoints. The account in a checkpoint ends at its save. A start from this checkpoint books
the time since then as restart: steps that are done again, time without a process, and the start itself.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import psutil

from matmix.data.storage.files import write_atomic

CAUSES = ("useful", "data", "saves", "evaluation", "skipped", "restarts", "rewinds", "other")
"""useful: steps that count (with their waits for other ranks); data: waits for it; saves: what they keep training
waiting; skipped: steps that were not finite; restarts: starts, and what was lost since the checkpoint they go on from;
rewinds: the same for going back within a start; other: records, comparisons of copies."""


class Goodput:
    """An account in which every second since the run's first start appears once."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(CAUSES, 0.0)
        self.mark = time.monotonic()

    def begin(self, since: float) -> None:
        """Begins the account of a run without a checkpoint; since: when the run first started, seconds since 1970."""
        self.seconds = dict.fromkeys(CAUSES, 0.0)
        self._lose_since(since, "restarts")

    def spend(self, cause: str) -> None:
        """Books the time since the last call under this cause."""
        now = time.monotonic()
        self.seconds[cause] += now - self.mark
        self.mark = now

    def shares(self) -> dict[str, float]:
        """The share of each cause in the time since the run's first start, and this time as "seconds"."""
        total = sum(self.seconds.values())
        return {"seconds": total, **{cause: spent / max(total, 1e-9) for cause, spent in self.seconds.items()}}

    def state_dict(self) -> dict[str, Any]:
        """JSON-serialisable."""
        return {"seconds": dict(self.seconds), "until": time.time()}

    def load_state_dict(self, state: dict[str, Any] | None, lost_to: str) -> None:
        """lost_to: the cause under which the time since this state was saved is booked. None (an older checkpoint): the
        account begins now."""
        known = state["seconds"] if state else {}
        self.seconds = {cause: float(known.get(cause, 0.0)) for cause in CAUSES}
        self._lose_since(state["until"] if state else time.time(), lost_to)

    def _lose_since(self, since: float, cause: str) -> None:
        # Hosts' clocks may be apart; an account never shrinks.
        self.seconds[cause] += max(time.time() - since, 0.0)
        self.mark = time.monotonic()


def first_start(run_dir: Path, *, write: bool) -> float:
    """When the run was first started, seconds since 1970, as RUN/launch/begun tells; where there is none, when this
    process was. write: note it there. Storage that fails costs the note only."""
    path, mine = run_dir / "launch" / "begun", psutil.Process().create_time()
    with contextlib.suppress(OSError, ValueError):
        return min(float(path.read_text(encoding="ascii")), mine)
    if write:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, f"{mine:.3f}\n")
    return mine

"""A progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from types import TracebackType
from typing import Self

from tqdm import tqdm

logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_LINES = 10.0


class _Shown:
    """A report with a bar on a terminal, which it closes."""

    _bar: tqdm | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()


class ProgressReport(_Shown):
    """Shows on stderr how many bytes of the input are read, and how fast tokens (or other units) are made."""

    def __init__(self, total_bytes: int, *, tokens: int = 0, label: str = "tokenising", unit: str = "tokens") -> None:
        self.total = max(1, total_bytes)
        self.label = label
        self.unit = unit
        self._first_tokens = tokens
        self._started = self._last = time.monotonic()
        if sys.stderr.isatty():
            self._bar = tqdm(total=total_bytes, unit="B", unit_scale=True, desc=label, dynamic_ncols=True, leave=False)

    def update(self, done_bytes: int, tokens: int) -> None:
        """Shows how far the work is. `done_bytes` and `tokens` count from the beginning of the whole preparation."""
        now = time.monotonic()
        rate = (tokens - self._first_tokens) / max(now - self._started, 1e-9)
        speed = f"{tokens:,} {self.unit}, {rate:,.0f} {self.unit}/s"
        if self._bar is not None:
            self._bar.set_postfix_str(speed, refresh=False)
            self._bar.update(done_bytes - self._bar.n)
        elif now - self._last >= _SECONDS_BETWEEN_LINES:
            self._last = now
            logger.info(f"{self.label}: {100 * done_bytes / self.total:.0f} %, {speed}")


class WaitingReport(_Shown):
    """Shows on stderr that something goes on whose end is not known, and for how long it has."""

    def __init__(self, label: str) -> None:
        self.label = label
        self._started = self._last = time.monotonic()
        if sys.stderr.isatty():
            self._bar = tqdm(desc=label, bar_format="{desc}: {elapsed}", dynamic_ncols=True, leave=False)

    def update(self) -> None:
        """Shows how long it has taken. To be called now and then."""
        now = time.monotonic()
        if self._bar is not None:
            self._bar.refresh()
        elif now - self._last >= _SECONDS_BETWEEN_LINES:
            self._last = now
            logger.info(f"{self.label}: {now - self._started:.0f} s so far")

"""SIGTERM and Ctrl-C: save, then leave. All ranks agree on the step because the flag travels with the step's counts."""

from __future__ import annotations

import signal
import threading

from matmix.train.callbacks.base import Callback


class StopSignals(Callback):
    """Records the first SIGTERM or SIGINT; a second SIGINT interrupts at once."""

    main_rank_only = False

    def __init__(self) -> None:
        self.received = 0
        self.previous: dict[int, object] = {}

    def on_start(self, trainer) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # signal handlers belong to the main thread; a caller in another thread stops by other means
        for number in (signal.SIGTERM, signal.SIGINT):
            self.previous[number] = signal.signal(number, self._note)

    def _note(self, number: int, _frame: object) -> None:
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number

    def on_end(self, trainer) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)
        self.previous.clear()

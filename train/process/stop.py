"""Notes signals that ask a run to stop, from the first moment of the process on; the loop saves and ends."""

import _thread
import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator

from matmix.train.process.exits import EXIT_INTERRUPTED

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
# One Ctrl-C may arrive twice: from the terminal, and from the launcher that passes it on.
_ONE_PRESS_SECONDS = 1.0
_PATIENCE_SECONDS = 5.0

_received = 0
_interrupted_at = 0.0
_listening = False


def received() -> int:
    """Returns the first signal that asked this process to stop, or 0."""
    return _received


def request(number: int = signal.SIGTERM) -> None:
    """Asks the run in this process to stop as if signal `number` had come; from any thread."""
    global _received
    _received = _received or int(number)


def forget() -> None:
    """Takes a request back."""
    global _received, _interrupted_at
    _received, _interrupted_at = 0, 0.0


def listen() -> None:
    """Notes the signals to the end of the process, which is ours. Called by the main thread before there are others.

    The signals are blocked and a thread waits for them. So none is lost or kills while libraries are imported, blocks
    compiled or a collective waits; none interrupts a system call; and what the process starts (compilers, git) inherits
    the block: a scheduler's signal reaches every process of the job, and a compiler that dies takes the run with it.
    """
    global _listening
    if _listening:
        return
    _listening = True
    # Python's own multiprocessing unblocks some of them in the main thread: there the handlers take over.
    for number in SIGNALS:
        signal.signal(number, _handle)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    os.register_at_fork(after_in_child=_open_in_child)
    threading.Thread(target=_wait, name="signals", daemon=True).start()


def listen_no_more() -> None:
    """Gives the signals their usual effects again, for a process that turns out to have nothing to save."""
    global _listening
    if not _listening:
        return
    _listening = False
    for number in SIGNALS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    # The thread waits on, but what may go to the main thread goes there.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    if _received:
        os.kill(os.getpid(), _received)


@contextlib.contextmanager
def during_run() -> Iterator[None]:
    """Notes the signals while the block runs, by plain handlers, in a process of somebody else's. Nothing changes where
    we listen already, or outside the main thread, which Python allows no handlers: `request` stops a run there."""
    if _listening or threading.current_thread() is not threading.main_thread():
        yield
        return
    forget()
    previous = {number: signal.signal(number, _handle) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _handle(number: int, _frame: object) -> None:
    if _note(number):
        raise KeyboardInterrupt


def _note(number: int) -> bool:
    """Notes a signal; returns True for the second Ctrl-C, which means "at once"."""
    global _interrupted_at
    first, now = not _received, time.monotonic()
    request(number)
    if number == signal.SIGINT:
        if _interrupted_at and now - _interrupted_at > _ONE_PRESS_SECONDS:
            return True
        _interrupted_at = _interrupted_at or now
    if first and os.environ.get("RANK", "0") == "0":
        text = f"matmix: {signal.Signals(number).name}: the run will save and stop (Ctrl-C twice leaves at once)\n"
        with contextlib.suppress(OSError):
            os.write(2, text.encode())  # `print` must not be called where a signal may have interrupted a `print`
    return False


def _wait() -> None:
    while not _note(signal.sigwait(SIGNALS)):
        pass
    _thread.interrupt_main()  # runs `_handle` there
    time.sleep(_PATIENCE_SECONDS)
    os._exit(EXIT_INTERRUPTED)  # the main thread sits in something that no exception reaches


def _open_in_child() -> None:
    # Our thread is not in the child: a blocked signal would wait there for ever.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN)
    # Whoever blocks more than we do while it starts a process (as for those that read data) opens them itself.
    if signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set(SIGNALS):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

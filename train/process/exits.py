"""Exit codes of a training process. Launchers decide by them, so they never change their meaning."""

EXIT_OK = 0
"""The run is finished, or it stopped where `stop_step` said."""
EXIT_FAILED = 1
"""Diverged, out of memory, storage that failed, a mistake of ours: another start may or may not help."""
EXIT_USER = 2
"""A config, data or command line that cannot be used: another start without a change cannot help."""
EXIT_STOPPED = 75
"""A signal asked the run to stop and all is saved: the same command goes on from there (EX_TEMPFAIL of sysexits.h)."""
EXIT_HUNG = 76
"""A rank stopped making progress and the watchdog ended the process."""
EXIT_INTERRUPTED = 130
"""A second Ctrl-C: left at once, without saving."""

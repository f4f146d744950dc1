"""The first steps of a process that is going to train, before it imports torch."""

from __future__ import annotations

from collections.abc import Callable

from matmix.train.process import node_folders, stop
from matmix.train.process.console import begin_process, guarded


def begin_training(prepare: Callable[[], object] | None = None) -> int:
    """Notes signals, ends with its launcher, finds its caches and a folder for temporary files; exit code, 0 = go on.

    prepare: what the caller adds before the folders are chosen. Mistakes of the user are shown in one line.
    """
    stop.listen()
    begin_process()

    def begin() -> int:
        if prepare is not None:
            prepare()
        node_folders.use_caches()
        node_folders.use_own_folder()
        return 0

    return guarded(begin)

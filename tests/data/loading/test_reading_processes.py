"""Reading processes outlive the signals of a scheduler, and never the process that they read for."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch

from matmix.data.loading.reading_processes import reading_context, worker_beginning

PROGRAM = """
import sys, time
from matmix.data.config import DataConfig
from matmix.data.modalities import build_loader

def main():
    path, start, mode = sys.argv[1:]
    config = DataConfig(path=path, seqlen=24, workers=2, prefetch=1, worker_start=start)
    loader = build_loader(config, global_batch_size=4, micro_batch_size=4)
    batches = iter(loader)
    next(batches)
    print("reading", flush=True)
    for line in sys.stdin:
        print(sum(next(batches).n_tokens for _ in range(20)), flush=True)
    if mode == "close":
        loader.close()

if __name__ == "__main__":
    import signal
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda *_: None)
    main()
"""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Reader:
    """A process that trains, as far as its data can tell, with two reading processes."""

    def __init__(self, folder, path, start, mode="close"):
        program = folder / "program.py"
        program.write_text(PROGRAM)
        self.process = subprocess.Popen(
            [sys.executable, str(program), str(path), start, mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout.readline() == "reading\n", self.process.communicate()[1]
        self.children = psutil.Process(self.process.pid).children(recursive=True)

    def read(self) -> int:
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def end(self) -> str:
        """Lets it come to its end; what it said on stderr."""
        said = self.process.communicate(timeout=60)[1]
        assert self.process.returncode == 0, said
        return said

    def nobody_is_left(self) -> None:
        """The children end by themselves."""
        _, alive = psutil.wait_procs(self.children, timeout=30)
        for child in alive:
            child.kill()
        assert not alive


@pytest.mark.slow
@pytest.mark.parametrize("start", ["fork", "spawn", "forkserver"])
def test_signals_to_every_process_and_a_kill_of_the_parent(tmp_path, small, start):
    reader = Reader(tmp_path, small, start)
    try:
        before = [child.pid for child in reader.children]
        assert len(before) >= 2
        for number in SIGNALS:
            for pid in [*before, reader.process.pid]:
                os.kill(pid, number)
        assert reader.read() > 0
        assert all(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in reader.children)
        # Whoever kills it, and without a word to its children: they go.
        reader.process.kill()
        reader.nobody_is_left()
    finally:
        reader.process.kill()
        reader.process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["close", "leave open"])
def test_an_orderly_end_is_quick_and_silent(tmp_path, small, mode):
    reader = Reader(tmp_path, small, "fork", mode)
    assert reader.read() > 0
    assert reader.end() == ""
    reader.nobody_is_left()


def test_a_reader_that_hangs_does_not_hold_up_the_end(data, tmp_path):
    """A worker that sleeps in its storage when the loader is closed is ended, by the signal that is not ignored."""
    from matmix.data.config import DataConfig
    from matmix.data.modalities import build_loader

    path = data.write(tmp_path / "data", data.documents(43))
    config = DataConfig(path=str(path), seqlen=24, workers=1, prefetch=1)
    loader = build_loader(config, global_batch_size=4, micro_batch_size=4)
    loader.dataset.packings[0].shards.read = lambda *_: time.sleep(3600)
    readers = loader._readers["torch"] = loader._make_loader()
    before = set(psutil.Process().children())  # what other tests in this process have started
    iter(readers)  # as `iter(loader)`, without waiting for a batch that never comes
    (worker,) = set(psutil.Process().children()) - before
    for number in SIGNALS:
        worker.send_signal(number)
    assert worker.is_running()
    del readers
    loader.close()
    assert worker.wait(timeout=60) in (0, None)


class _CannotBeSent(torch.utils.data.Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        return lambda: index  # no pickle can hold it


def test_a_batch_that_cannot_be_handed_on_ends_its_process():
    """As where /dev/shm is full; multiprocessing drops such a batch and waits for it for ever."""
    loader = torch.utils.data.DataLoader(
        _CannotBeSent(),
        batch_size=None,
        num_workers=1,
        multiprocessing_context=reading_context("fork"),
        worker_init_fn=worker_beginning("fork"),
    )
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        next(iter(loader))

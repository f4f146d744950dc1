"""What happens to runs on the cluster, all at the same time; each test then looks at one story's end.

A story is a generator function: it submits its jobs, yields what the test will look at, and then acts, in a thread of
its own. Submitting is done one by one. Only stories of selected tests are told.

    def requeued(stage):
        run = stage.run("requeued").submit(stage.dataset, nodes=2)
        yield run
        run.wait_for_step(5)
        ...

    @tells(requeued)
    def test_...(told): ...
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cluster import Cluster
from slurm_runs import SlurmRun, run_without_slurm


@dataclasses.dataclass(frozen=True)
class Stage:
    """What stories have in common."""

    cluster: Cluster
    dataset: str
    folder: Path

    def run(self, name: str) -> SlurmRun:
        return SlurmRun(self.cluster, self.folder / name)


Story = Callable[[Stage], Iterator[Any]]


def tells(told: Story, alone: int = 0) -> Callable[[Callable], Callable]:
    """Marks a test as the one that looks at a story. alone: the ranks of the run that it is compared with, to which
    nothing happens."""

    def mark(test: Callable) -> Callable:
        test.story, test.alone = told, alone
        return test

    return mark


class Stories:
    """Tells stories and keeps their ends. references: numbers of ranks of runs that nothing happens to."""

    def __init__(self, stage: Stage, stories: list[Story], references: Iterable[int]) -> None:
        self.stage = stage
        self.pool = ThreadPoolExecutor(max_workers=len(stories) + 2)
        self.ends: dict[Story, Future] = {}
        for each in dict.fromkeys(stories):
            self.ends[each] = self._begin(each)
        self.references = {ranks: self.pool.submit(self._run_alone, ranks) for ranks in references}

    def _begin(self, each: Story) -> Future:
        try:
            acting = each(self.stage)
            seen = next(acting)
        except BaseException as error:  # belongs to the story's own test
            failed: Future = Future()
            failed.set_exception(error)
            return failed

        def tell() -> Any:
            for _ in acting:
                raise AssertionError(f"{each.__name__} yields twice")
            return seen

        return self.pool.submit(tell)

    def _run_alone(self, ranks: int) -> SlurmRun:
        alone = self.stage.run(f"alone-{ranks}")
        run_without_slurm(alone.path, self.stage.dataset, ranks)
        return alone

    def close(self) -> None:
        self.pool.shutdown(wait=True, cancel_futures=True)

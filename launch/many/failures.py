"""How runs that were trained side by side ended, and what went wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from matmix.launch.many.task import Task
from matmix.train.process.exits import EXIT_FAILED, EXIT_OK, EXIT_STOPPED, EXIT_USER


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """A run that ended without its last step."""

    task: Task
    code: int
    lines: list[str]  # the last that it printed

    @property
    def reason(self) -> str:
        """The error that the run reported, or the last line that it printed."""
        errors = [line for line in self.lines if line.startswith("matmix: error: ")]
        words = (errors or self.lines or [""])[-1].removeprefix("matmix: error: ")
        return words or f"ended with exit code {self.code} and without a word"

    @property
    def is_busy(self) -> bool:
        """Whether another process holds the run, which is no failure of it."""
        return self.code == EXIT_USER and "is in use by another job (" in self.reason

    @property
    def words(self) -> str:
        """The failure in one line."""
        if not self.is_busy:
            return f"{self.task.title}: FAILED: {self.reason}"
        owner = self.task.run.lock().owner()
        return f"{self.task.title}: is being trained by process {owner.get('pid')} on {owner.get('host')}"


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    """How runs ended that were trained side by side."""

    failures: list[Failure]
    stopped: bool
    """A signal came; the runs that were going on have been saved."""

    def then(self, later: Ended) -> Ended:
        """How these runs ended and others after them."""
        return Ended([*self.failures, *later.failures], self.stopped or later.stopped)

    @property
    def is_busy(self) -> bool:
        """Whether another process trains one of the runs."""
        return any(failure.is_busy for failure in self.failures)

    @property
    def code(self) -> int:
        """The exit code of a command that trained them."""
        if not self.stopped and not all(failure.is_busy for failure in self.failures):
            return EXIT_FAILED
        return EXIT_STOPPED if self.stopped or self.is_busy else EXIT_OK


def describe_failures(failures: Sequence[Failure]) -> str:
    """What went wrong, run by run, with the last lines of each."""
    lines = [failure.words for failure in failures if failure.is_busy]
    if failed := [failure for failure in failures if not failure.is_busy]:
        runs = "1 run" if len(failed) == 1 else f"{len(failed)} runs"
        lines.append(f"{runs} failed; the same command tries again:")
    for failure in failed:
        lines.append(f"  {failure.task.title}: {failure.reason} (exit code {failure.code}, {failure.task.log})")
        lines += [f"    | {line}" for line in failure.lines]
    return "\n".join(lines)

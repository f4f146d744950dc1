"""Decides whether a run is started again: `python -m matmix.launch.jobs.attempts RUN --attempt A --code N`. It runs
between two attempts, while the nodes wait, and imports no torch."""

import argparse
import dataclasses
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matmix.data.artifacts import read_json_lines
from matmix.launch.jobs.launches import append_line, read_url
from matmix.train.process.exits import EXIT_FAILED, EXIT_HUNG, EXIT_INTERRUPTED, EXIT_OK, EXIT_STOPPED, EXIT_USER
from matmix.train.run.outcome import (
    job_of,
    local_folder,
    newest_saved,
    outcomes_folder,
    read_last_step,
    read_outcomes,
)

# Exit codes of this command; anything else means that it failed itself.
AGAIN, FINISHED, ENOUGH = 0, 10, 11
DEFAULT_MAX_REQUEUES = 3
# Stops without a save, as where nobody had begun yet. A run that hangs until each time limit looks the same.
MAX_UNSAVED = 10

_WORDS = {
    EXIT_FAILED: "failed",
    EXIT_USER: "a mistake in config, data or command line",
    EXIT_STOPPED: "stopped and saved",
    EXIT_HUNG: "hung",
    EXIT_INTERRUPTED: "interrupted without saving",
}
_DEADLY = ("SIGHUP", "SIGQUIT", "SIGILL", "SIGABRT", "SIGBUS", "SIGFPE", "SIGKILL", "SIGSEGV", "SIGPIPE", "SIGTERM")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PastAttempt:
    """How one attempt, a start of the run's processes, ended."""

    attempt: str
    code: int | None = None  # None: nobody saw it end
    reason: str = ""  # one line
    phase: int = 0  # the last that was begun, of a recipe with several; step and saved_step are its own
    step: int | None = None  # the last that was begun
    saved_step: int | None = None  # of the newest checkpoint
    signalled: bool = False  # the launcher told it to stop

    @property
    def finished(self) -> bool:
        return self.code == EXIT_OK

    @property
    def stopped(self) -> bool:
        """It ended because it was told to."""
        return self.code == EXIT_STOPPED or (self.signalled and self.code not in (EXIT_OK, EXIT_USER, EXIT_INTERRUPTED))

    @property
    def failed(self) -> bool:
        return not self.finished and not self.stopped

    @property
    def place(self) -> str:
        """The step that was begun last, in words."""
        return f"step {self.step}{f' of phase {self.phase}' if self.phase else ''}"


class Decision(NamedTuple):
    """Says whether a run is started again, and why in one line."""

    again: bool
    why: str


def describe(code: int | None) -> str:
    """Puts an exit code in words."""
    if code is None:
        return "nobody saw it end (a node that failed, or a launcher that was killed)"
    # srun's own errors have large codes, too: 140 is a node that did not answer rather than SIGUSR2.
    deadly = {signal.Signals[name].value: name for name in _DEADLY}
    number = -code if code < 0 else code - 128
    return _WORDS.get(code) or (f"killed by {deadly[number]}" if number in deadly else f"exit code {code}")


def decide(attempts: Sequence[PastAttempt], max_requeues: int = DEFAULT_MAX_REQUEUES) -> Decision:
    """Decides from a job's attempts, the one that has just ended last. A run of weeks may lose a node every other day;
    one that cannot get over a step, or cannot begin, ends after a few tries."""
    last = attempts[-1]
    if last.finished:
        return Decision(False, "finished")
    if last.stopped:
        saved = "stopped and saved" if last.code == EXIT_STOPPED else f"told to stop, {describe(last.code)}"
        times = _in_a_row(attempts, lambda attempt: attempt.stopped and attempt.code != EXIT_STOPPED)
        if times > MAX_UNSAVED:
            return Decision(False, f"{saved}; {times} times in a row it was told to stop and had saved nothing new")
        return Decision(True, f"{saved}: goes on from its newest checkpoint")
    why = last.reason or describe(last.code)
    # Mistakes are found before the first step. What was there and is gone later, such as data on a node that lost a
    # file system, is a failure like others.
    if last.code == EXIT_INTERRUPTED or (last.code == EXIT_USER and last.step is None):
        return Decision(False, f"{why}: starting again would not help")
    if _fails_again(attempts):
        return Decision(False, f"{last.place} failed twice in a row ({why}): starting again would not help")
    failures = _in_a_row(attempts, lambda attempt: attempt.failed)
    if failures > max_requeues:
        times = f"{failures} times in a row" if failures > 1 else "once"
        return Decision(False, f"failed {times} without getting further, {max_requeues} restarts allowed ({why})")
    return Decision(True, f"{why}: restart {failures} of at most {max_requeues} without getting further")


def _fails_again(attempts: Sequence[PastAttempt]) -> bool:
    """Returns whether the failure before the last was at the same step, and no attempt since has gone past it."""
    *earlier, last = attempts
    for attempt in reversed(earlier if last.step is not None else []):
        if attempt.failed:
            return (attempt.phase, attempt.step) == (last.phase, last.step)
        if attempt.step is not None and (attempt.phase, attempt.step) > (last.phase, last.step):
            break
    return False


def _in_a_row(attempts: Sequence[PastAttempt], counts: Callable[[PastAttempt], bool]) -> int:
    """Counts attempts since (and with) the last one that saved a later step than any attempt before it."""
    furthest, counted = (0, -1), 0
    for attempt in attempts:
        saved = attempt.phase, -1 if attempt.saved_step is None else attempt.saved_step
        if saved > furthest:
            furthest, counted = saved, 0
        counted += counts(attempt)
    return counted


# -- what is known of an attempt -------------------------------------------------------------------------------------


def _path(run: Path) -> Path:
    return run / "launch" / "attempts.jsonl"


def read_attempts(run: Path) -> list[PastAttempt]:
    """Returns all attempts that were begun, in order; those without an end have code None."""
    known = {field.name for field in dataclasses.fields(PastAttempt)}
    facts: dict[str, dict[str, Any]] = {}
    for line in read_json_lines(_path(run)):
        if isinstance(name := line.get("attempt"), str):
            facts.setdefault(name, {}).update({key: value for key, value in line.items() if key in known})
    return [PastAttempt(**own) if "code" in own else _collect(run, name, None) for name, own in facts.items()]


def _collect(run: Path, name: str, code: int | None, *, signalled: bool = False) -> PastAttempt:
    """Reads what the ranks of an attempt wrote about its end, or takes `code` where they wrote nothing."""
    # Where rank 0 writes: the folder of the last phase that the attempt has begun.
    folders = {number: local_folder(read_url(path) or path, 0) for number, path in {0: run, **phases_of(run)}.items()}
    begun = [number for number, path in folders.items() if any(outcomes_folder(path).glob(f"{name}.*"))]
    phase = max(begun, default=0)
    run = folders[phase]
    outcomes = read_outcomes(run, name)
    saved = [outcome.saved_step for outcome in outcomes.values() if outcome.saved_step is not None]
    reason = describe(code)
    if outcomes:
        # Rank 0's where it is a good end, else the first failure in time: the others followed from it. A mistake of the
        # user is found by all ranks; what one rank alone has met, such as a full disk, explains the rest.
        rank = min(outcomes, key=lambda rank: (outcomes[rank].code != EXIT_USER, outcomes[rank].time))
        if 0 in outcomes and outcomes[0].code in (EXIT_OK, EXIT_STOPPED):
            rank = 0
        # A phase that ended well is the end of the run only if that of the processes says so.
        if not (phase and outcomes[rank].code == EXIT_OK != code):
            code, reason = outcomes[rank].code, outcomes[rank].reason
        if rank:
            reason = f"rank {rank} on {outcomes[rank].host}: {reason}"
    facts = {
        "phase": phase,
        "step": read_last_step(run, name),
        "saved_step": max(saved) if saved else newest_saved(run),
    }
    return PastAttempt(attempt=name, code=code, reason=reason, signalled=signalled, **facts)


def phases_of(run: Path) -> dict[int, Path]:
    """Returns the folders of a launched run's phases by number, in order; {} where its recipe has none."""
    numbers = {path.name.removeprefix("phase-"): path for path in run.glob("phase-*")}
    return {int(number): numbers[number] for number in sorted(filter(str.isdigit, numbers), key=int)}


def mark_cancelled(run: Path, job: str) -> None:
    """From now on no attempt of this job is followed by another."""
    folder = run / "launch" / "cancelled"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / job).touch()


def begin(run: Path, name: str, nodes: str = "") -> None:
    """Notes that an attempt begins, so that it is known also if nobody sees it end."""
    append_line(_path(run), {"attempt": name, "begun": int(time.time()), "nodes": nodes})


def conclude(
    run: Path, name: str, code: int, *, max_requeues: int, signalled: bool, ending: str
) -> tuple[PastAttempt, Decision]:
    """Reads how an attempt ended, decides, and writes both down, unless the run was moved away meanwhile. signalled:
    the launcher told it to stop. ending: why it is not to be started again, whatever happened."""
    known = read_attempts(run)
    if name not in {attempt.attempt for attempt in known}:
        attempt = PastAttempt(attempt=name, code=code, reason=describe(code), signalled=signalled)
        return attempt, Decision(False, f"{run} is not the folder any more that the attempt began in")
    attempt = _collect(run, name, code, signalled=signalled)
    earlier = [a for a in known if a.attempt != name and job_of(a.attempt) == job_of(name)]
    decision = decide([*earlier, attempt], max_requeues)
    if not ending and (run / "launch" / "cancelled" / job_of(name)).exists():
        ending = "the job was cancelled"
    if ending and decision.again:
        decision = Decision(False, f"{attempt.reason}; {ending}")
    facts = {**dataclasses.asdict(attempt), "again": decision.again, "why": decision.why, "ended": int(time.time())}
    append_line(_path(run), facts)
    return attempt, decision


def main(arguments: list[str] | None = None) -> int:
    """Prints the decision in one line. Exit code 0 = start again, 10 = finished, 11 = do not."""
    parser = argparse.ArgumentParser(prog="python -m matmix.launch.jobs.attempts")
    parser.add_argument("run", type=Path)
    parser.add_argument("--attempt", dest="name", required=True)
    parser.add_argument("--code", type=int, required=True)
    parser.add_argument("--max-requeues", type=int, default=DEFAULT_MAX_REQUEUES)
    parser.add_argument("--signalled", action="store_true")
    ending = "the job was cancelled, or Slurm itself starts it again"
    parser.add_argument("--ending", action="store_const", const=ending, default="")
    attempt, decision = conclude(**vars(parser.parse_args(arguments)))  # the options are its parameters
    verdict = "starting again" if decision.again else "not started again from here"
    print(f"attempt {attempt.attempt}: {verdict}: {decision.why}", flush=True)
    if attempt.finished:
        return FINISHED
    return AGAIN if decision.again else ENOUGH


if __name__ == "__main__":
    sys.exit(main())

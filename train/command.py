"""`matmix train RECIPE [--key value ...]`, also `torchrun -m matmix.train RECIPE ...`."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

from matmix.train.config import RunConfig
from matmix.train.errors import RunFailure
from matmix.train.process.console import exit_code, guarded, is_expected, one_line
from matmix.train.process.exits import EXIT_FAILED, EXIT_OK, EXIT_STOPPED
from matmix.train.recipe import bundled_recipes, load_config
from matmix.train.run.directory import RunDirectory
from matmix.train.run.outcome import Attempt
from matmix.train.run.remote import push_outcome

if TYPE_CHECKING:
    from matmix.train.loop import Result

USAGE = """usage: matmix train RECIPE [--dry-run] [--key value ...]

RECIPE is a path to a TOML file, a run directory, or the name of a bundled recipe: {recipes}.
Any field of the recipe can be given on the command line, as in --optimizer.lr 3e-4; `matmix train RECIPE --help`
lists them, with the options of the mixers that it uses (of others: --model.layers NAME --help).
--dry-run prints parameters, FLOPs, memory, steps and tokens and trains nothing.
The same command again resumes the run from its newest checkpoint."""


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit code (`matmix.train.process.exits`)."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE.format(recipes=", ".join(bundled_recipes())))
        return 0 if arguments else 2
    dry_run = "--dry-run" in arguments
    arguments = [argument for argument in arguments if argument != "--dry-run"]
    loaded: list[RunConfig] = []

    def read() -> int:
        loaded.append(load_config(arguments[0], arguments[1:]))
        return 0

    code = guarded(read)
    if code or not loaded:  # the reader of a long --help has left
        return code
    if dry_run:
        from matmix.train.estimate.plan import print_plan

        return guarded(lambda: print_plan(loaded[0]))
    return guarded(lambda: _train(loaded[0]), every_rank=True)


def _train(config: RunConfig) -> int:
    """Trains, and leaves behind how it ended, however it ends (except by SIGKILL and the like)."""
    rank = int(os.environ.get("RANK", "0"))
    attempt = Attempt(RunDirectory(config.run_dir).path, rank)
    try:
        from matmix.train.loop import train

        result = train(config, attempt)
    except BaseException as error:
        text = one_line(error)
        attempt.end(exit_code(error), text if is_expected(error) else f"{type(error).__name__}: {text}")
        push_outcome(config.run_dir, rank)
        if isinstance(error, BrokenPipeError):
            raise RunFailure(f"nobody reads this process's output any more ({text})") from error
        raise
    words = _closing_words(config, result)
    code = EXIT_OK
    if not result.saved:
        code = EXIT_FAILED
    elif result.stopped and not result.finished:
        code = EXIT_STOPPED
    attempt.step = result.step
    attempt.end(code, words.splitlines()[0])
    push_outcome(config.run_dir, rank)
    if rank == 0:
        print(words)
    return code


def _closing_words(config: RunConfig, result: Result) -> str:
    if not result.saved:
        return (
            f"Step {result.step} of {config.steps} is not saved: its checkpoint could not be written (see above). "
            f"Make room and start the same command again; it goes on from the newest checkpoint."
        )
    if not result.finished:
        if result.stopped:
            who = signal.Signals(result.signal).name if result.signal else "a signal to another rank"
            saved = ", saved" if result.step else ""
            return (
                f"Stopped by {who} at step {result.step} of {config.steps}{saved}. The same command goes on from there."
            )
        how = f"at step {result.step} of {config.steps} as stop_step says, saved"
        return f"Stopped {how}. Without stop_step it goes on from there."
    from matmix.train.evaluators import make_evaluators

    metrics = result.metrics
    done = "Finished" if result.steps_done else "Nothing to do, the run finished"
    lines = [f"{done} at step {result.step}: {config.run_dir}"]
    (loss, _), *others = make_evaluators(config, config.task())
    lines += loss.summary(metrics)
    if result.unigram_entropy is not None and "chance_accuracy" not in metrics:
        lines.append(f"Unigram entropy of the corpus {result.unigram_entropy:.4f} nats per token.")
    for evaluator, _ in others:
        lines += evaluator.summary(metrics)
    if (run := RunDirectory(config.run_dir)).curves.is_file():
        lines.append(f"Curves: {run.where}/{run.curves.name}")
    export = f"matmix export {config.run_dir} --out DIR"
    if not config.model.model_class.tokens:
        lines.append(f"Next: {export}")
    else:
        # Prompts rarely have the one length that some mixers take.
        look = "show-mixer {} --text TEXT" if config.model.fixed_length_mixers() else "generate {} --prompt TEXT"
        lines.append(f"Next: matmix {look.format(config.run_dir)}, or {export}")
    return "\n".join(lines)

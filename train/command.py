"""Trains a recipe and records how the run ended."""

from __future__ import annotations

import gc
import math
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matmix.data.artifacts import panics_as_errors, read_json_lines, shell_line
from matmix.train.config import RunConfig
from matmix.train.errors import RunFailure
from matmix.train.process.console import exit_code, is_expected, one_line
from matmix.train.process.distributed import Distributed, agree, rank_and_world_size
from matmix.train.process.exits import EXIT_FAILED, EXIT_OK, EXIT_STOPPED
from matmix.train.recipe import load_phases
from matmix.train.run.directory import RunDirectory
from matmix.train.run.outcome import Attempt
from matmix.train.run.remote import has_begun, push_outcome

if TYPE_CHECKING:
    from matmix.train.loop import Result
    from matmix.train.tasks.base import Metric


def train_recipe(recipe: str, overrides: Sequence[str], *, dry_run: bool = False) -> int:
    """Trains, or shows the size and cost of training; returns the exit code (`matmix.train.process.exits`)."""
    return train_phases(load_phases(recipe, list(overrides)), dry_run=dry_run)


def train_phases(phases: Sequence[RunConfig], *, dry_run: bool = False) -> int:
    """Does what `train_recipe` does with configs that have been read: trains one phase after the other, from the last
    one that has begun; those before it need not be there."""
    if dry_run:
        from matmix.train.estimate.plan import print_plans

        return print_plans(phases)
    if len(phases) == 1:
        return _train(phases[0])[0]
    with Distributed.from_environment(phases[0].device) as distributed:  # the ranks meet once
        for config in phases:  # now, and not when its turn comes
            config.micro_batch(config.data_size(distributed.world_size))
        at_work = agree(lambda: list(map(has_begun, phases)), here=rank_and_world_size()[0] == 0)[0]
        first = max((number for number, begun in enumerate(at_work) if begun), default=0)
        for config in phases[first:]:
            code, finished = _train(config, is_last=config is phases[-1])
            if not finished:
                return code
    return code


def _train(config: RunConfig, *, is_last: bool = True) -> tuple[int, bool]:
    """Trains, and records how it ended, however it ends (except by SIGKILL and the like). Returns the exit code,
    and whether the run has finished. is_last: no phase follows."""
    rank = int(os.environ.get("RANK", "0"))
    attempt = Attempt(RunDirectory(config.run_dir).path, rank)
    try:
        from matmix.train.loop import train

        if not gc.get_freeze_count():  # what has been imported stays, and no collection need look through it
            gc.freeze()
        with panics_as_errors():
            result = train(config, attempt)
    except BaseException as error:
        text = one_line(error)
        attempt.end(exit_code(error), text if is_expected(error) else f"{type(error).__name__}: {text}")
        push_outcome(config.run_dir, rank)
        if isinstance(error, BrokenPipeError):
            raise RunFailure(f"nobody reads this process's output any more ({text})") from error
        raise
    words = _closing_words(config, result, is_last=is_last)
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
    return code, result.saved and result.finished


def _closing_words(config: RunConfig, result: Result, *, is_last: bool = True) -> str:
    step = f"step {result.step} of {result.steps}"
    if not result.saved:
        return (
            f"{step.capitalize()} is not saved: its checkpoint could not be written (see above). "
            "Make room and start the same command again; it goes on from the newest checkpoint."
        )
    if result.stopped and not result.finished:
        who = signal.Signals(result.signal).name if result.signal else "a signal to another rank"
        return f"Stopped by {who} at {step}{', saved' if result.step else ''}. The same command goes on from there."
    if not result.finished:
        return f"Stopped at {step} as stop_step says, saved. Without stop_step it goes on from there."
    from matmix.train.evaluators import make_evaluators
    from matmix.train.evaluators.base import TITLE, averaged_metrics, of_averaged
    from matmix.train.guards.steps import ADVICE

    metrics = result.metrics
    done = "Finished" if result.steps_done else "Nothing to do, the run finished"
    lines = [f"{done} at step {result.step}: {config.run_dir}"]
    (loss, _), *others = make_evaluators(config, config.task())
    lines += loss.summary(metrics)
    if result.unigram_entropy is not None and "chance_accuracy" not in metrics:
        lines.append(f"Unigram entropy of the corpus {result.unigram_entropy:.4f} nats per token.")
    for evaluator, _ in others:
        lines += evaluator.summary(metrics)
    if averaged := of_averaged(metrics):
        lines += [f"{TITLE.capitalize()}: {line[0].lower()}{line[1:]}" for line in loss.summary(averaged)]
    run, known = RunDirectory(config.run_dir), [config.task().loss_metric, *config.task().metrics]
    lines += earlier_best(run.path, [*known, *averaged_metrics(known)], metrics)
    if run.curves.is_file():
        lines.append(f"Curves: {run.where}/{run.curves.name}")
    if not is_last:
        return "\n".join(lines)
    if not math.isfinite(metrics.get("loss", 0.0)):
        lines.append(f"The run has diverged: its validation loss is {metrics['loss']}. Train it anew: {ADVICE}.")
        return "\n".join(lines)
    export = shell_line("matmix", "export", config.run_dir, "--out", "DIR")
    if config.model.model_class.inputs == "images":
        lines.append(f"Next: {shell_line('matmix', 'classify', config.run_dir, 'IMAGE')}, or {export}")
    elif (kind := config.model.model_class).inputs != "tokens" or kind.takes_head or kind.separated:
        lines.append(f"Next: {export}")
    else:
        # Prompts rarely have the one length that some mixers take.
        prompt = "TEXT" if config.model.causal else "TEXT <mask> TEXT"
        look = shell_line("matmix", "generate", config.run_dir, *config.task().writes_with, "--prompt", prompt)
        if config.model.fixed_length_mixers():
            look = shell_line("matmix", "show-mixer", config.run_dir, "--text", "TEXT")
        lines.append(f"Next: {look}, or {export}")
    return "\n".join(lines)


def earlier_best(run: Path, known: Sequence[Metric], metrics: Mapping[str, float]) -> list[str]:
    """Returns a line about those of the `known` metrics that an earlier evaluation of the run found better than the
    last one, as where a model has begun to learn its data by heart; [] where there is none. metrics: what the last
    evaluation found."""
    records = [record for record in read_json_lines(run / "metrics.jsonl") if record.get("kind") == "validation"]
    better = []
    for metric in known:
        values = {
            record.get("step"): value
            for record in records
            if isinstance(value := record.get(metric.name), float) and math.isfinite(value)
        }
        if not values or metric.name not in metrics:
            continue
        sign = -1 if metric.higher_is_better else 1
        step = min(values, key=lambda step: sign * values[step])
        if sign * values[step] < sign * metrics[metric.name]:
            better.append(f"{metric.words(values[step])} at step {step}")
    return [f"Better before: validation {', '.join(better)}."] if better else []

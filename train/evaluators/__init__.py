"""Evaluators: measurements of a model between steps. Each is one file and one line in `EVALUATORS`."""

from collections.abc import Sequence

import torch

from matmix.train.arguments import find_part, read_options
from matmix.train.config import EvaluatorConfig, RunConfig
from matmix.train.evaluators.ablation import MixingGain
from matmix.train.evaluators.base import PREFIX, Evaluation, Evaluator, Interrupted
from matmix.train.evaluators.context import ContextGain
from matmix.train.evaluators.lengths import AccuracyByLength
from matmix.train.evaluators.spans import SpanLoss
from matmix.train.evaluators.validation import Scores, ValidationLoss
from matmix.train.tasks.base import Task

__all__ = ["EVALUATORS", "Evaluation", "Evaluator", "evaluate", "make_evaluators"]

EVALUATORS: dict[str, type[Evaluator]] = {
    "loss": ValidationLoss,
    "context": ContextGain,
    "spans": SpanLoss,
    "mixing": MixingGain,
    "lengths": AccuracyByLength,
    "scores": Scores,
}
"""The evaluators that every run has where they apply; recipes may name others as "my_package.module:MyEvaluator"."""
_AT_THE_END = {"lengths"}
"""Names of those that run after the last step only, unless a recipe says otherwise."""


def make_evaluators(config: RunConfig, task: Task) -> list[tuple[Evaluator, int]]:
    """Returns a run's evaluators in order, each with the steps between its evaluations (0 = only after the last step).
    Raises ValueError (one line) for names and options that cannot be used."""
    named: dict[str, EvaluatorConfig] = {}
    for entry in config.evaluation.evaluator:
        if entry.name in named:
            raise ValueError(f'evaluation.evaluator: "{entry.name}" is named twice')
        named[entry.name] = entry
    evaluators = []
    for name in [*EVALUATORS, *(name for name in named if name not in EVALUATORS)]:
        entry = named.get(name)
        kind = find_part(name, EVALUATORS, "evaluator", Evaluator)
        if not kind.applies(config, task):
            if entry is None:
                continue
            raise ValueError(f'evaluation.evaluator: "{name}" has nothing to measure in this run')
        options = read_options(entry.options if entry else {}, kind.Options, f'evaluation.evaluator "{name}"')
        every = entry.every if entry else None
        if every is None:
            every = 0 if name in _AT_THE_END else config.evaluation.every
        evaluators.append((kind(config, task, options), every))
    return evaluators


@torch.no_grad()
def evaluate(evaluators: Sequence[Evaluator], evaluation: Evaluation, config: RunConfig) -> dict[str, float] | None:
    """Runs these evaluators and returns their metrics by name, those of the averaged weights besides where the run has
    such; or None on all ranks where a signal interrupted one."""
    engine = evaluation.engine
    engine.eval()
    try:
        metrics = _metrics_of(evaluators, evaluation, config.evaluation.batches)
        if config.ema.decay:
            with engine.averaged():
                averaged = _metrics_of(evaluators, evaluation, config.evaluation.batches)
                metrics |= {PREFIX + name: value for name, value in averaged.items()}
    except Interrupted:
        return None
    finally:
        engine.train()
    return metrics


def _metrics_of(evaluators: Sequence[Evaluator], evaluation: Evaluation, batches: int) -> dict[str, float]:
    """batches: number of global batches that are read; 0 = all."""
    task, metrics = evaluation.task, {}
    watching = [evaluator for evaluator in evaluators if type(evaluator).observe is not Evaluator.observe]
    for evaluator in evaluators:
        evaluator.begin(evaluation)
    for batch in evaluation.batches(batches) if watching else ():
        targets, batch = task.count_targets(batch), evaluation.on_device(batch)
        costs = task.costs(evaluation.model, batch)
        for evaluator in watching:
            evaluator.observe(batch, costs, targets)
    for evaluator in evaluators:
        metrics |= evaluator.finish(evaluation)
    return metrics

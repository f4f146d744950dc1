"""Remembers which evaluation was the best, and ends a run that gets no better."""

import difflib
import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any

from matmix.train.config import EvaluationConfig
from matmix.train.tasks.base import Metric

logger = logging.getLogger(__name__)


class BestEvaluation:
    """The best evaluation so far and the number of those since, the same on all ranks and part of the checkpoints."""

    def __init__(self, config: EvaluationConfig, known: Iterable[Metric]) -> None:
        """known: the metrics that evaluations find. Raises ValueError (one line) where `config` names none of them."""
        self.patience, self.metric = config.patience, None
        if config.best:
            by_name = {metric.name: metric for metric in known}
            if config.best not in by_name:
                near = difflib.get_close_matches(config.best, by_name, n=1, cutoff=0.0)[0]
                raise ValueError(f'evaluation.best = "{config.best}" is no metric of this run; the nearest is "{near}"')
            self.metric = by_name[config.best]
        self.load_state_dict(None)

    @property
    def stops(self) -> bool:
        """Returns whether the last `evaluation.patience` evaluations were no better."""
        return bool(self.patience) and self.waited >= self.patience

    def is_better(self, metrics: Mapping[str, float]) -> bool | None:
        """Returns whether an evaluation is better than the best one so far; None where it lacks the metric."""
        if self.metric is None or (value := metrics.get(self.metric.name)) is None:
            return None
        sign = 1 if self.metric.higher_is_better else -1
        return math.isfinite(value) and not sign * value <= sign * self.value

    def ends_with(self, metrics: Mapping[str, float]) -> bool:
        """Returns whether the run ends with an evaluation that is still to be counted."""
        return bool(self.patience) and self.waited + 1 >= self.patience and self.is_better(metrics) is False

    def after_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Counts an evaluation; one without the metric does not count."""
        better = self.is_better(metrics)
        if better is None:
            return
        if better:
            self.step, self.value, self.waited = step, metrics[self.metric.name], 0
            return
        self.waited += 1
        if self.stops:
            logger.info(
                f"step {step}: {self.metric.title} was no better in {self.waited} evaluations than "
                f"{self.metric.number(self.value)} at step {self.step}: the run ends here (evaluation.patience)"
            )

    def state_dict(self) -> dict[str, Any] | None:
        """Returns what it remembers, JSON-serialisable; None where that is nothing."""
        own = {"step": self.step, "value": self.value, "waited": self.waited}
        return {"metric": self.metric.name, **own} if self.step >= 0 else None

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Takes up what a checkpoint remembers of the same metric."""
        self.step, self.value, self.waited = -1, math.nan, 0
        if state and self.metric is not None and state.get("metric") == self.metric.name:
            self.step, self.value, self.waited = state["step"], state["value"], state["waited"]


def is_out_of_patience(config: EvaluationConfig, remembered: Any) -> bool:
    """Returns whether a run has ended by `evaluation.patience`; remembered: the best evaluation of its summary."""
    known = remembered if isinstance(remembered, dict) and remembered.get("metric") == config.best else {}
    waited = known.get("waited")
    return bool(config.patience) and isinstance(waited, int) and waited >= config.patience

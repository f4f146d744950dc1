"""The numbers of an evaluation in words, and beside them what trivial answers score: a score alone does not say whether
anything was learned."""

import dataclasses
from collections.abc import Iterable, Mapping

_CONTROL = "control_"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """The name, unit and direction of one number of an evaluation."""

    name: str
    """Its key in records, such as "masked_accuracy"."""
    title: str
    """Its name for people, such as "masked accuracy"."""
    unit: str = ""
    """Such as "nats per token"; "%" for shares, which are shown times 100."""
    higher_is_better: bool = False
    digits: int = 4
    """Digits behind the point where it is shown."""
    control: str = ""
    """The trivial answer whose value stands beside it, such as "the most frequent class"; "" = there is none."""

    @property
    def heading(self) -> str:
        """The title with its unit, where that is not the title itself."""
        return f"{self.title} ({self.unit})" if self.unit not in ("", self.title) else self.title

    def number(self, value: float) -> str:
        """Returns the value with its unit, such as "93.1%" or "1.234 bits per byte"."""
        return self._digits(value) if self.unit == "%" else f"{self._digits(value)} {self.unit}".rstrip()

    def words(self, value: float) -> str:
        """Returns the value in few words, such as "masked accuracy 93.1%" or "1.234 bits per byte"."""
        return self.number(value) if self.unit == self.title else f"{self.title} {self._digits(value)}"

    def _digits(self, value: float) -> str:
        return f"{value:.{self.digits}{'%' if self.unit == '%' else 'f'}}"


def share(name: str, title: str, control: str = "", *, digits: int = 1) -> Metric:
    """Returns the metric of a share that is to be large."""
    return Metric(name=name, title=title, unit="%", higher_is_better=True, digits=digits, control=control)


def words_on(known: Iterable[Metric], metrics: Mapping[str, float]) -> list[str]:
    """Returns the `known` ones of `metrics` in words."""
    return [metric.words(metrics[metric.name]) for metric in known if metric.name in metrics]


def as_controls(scores: Mapping[str, float]) -> dict[str, float]:
    """Returns the scores of trivial answers by the names that records have for them."""
    return {_CONTROL + name: value for name, value in scores.items()}


def control_of(metric: Metric, metrics: Mapping[str, float]) -> float | None:
    """Returns the score of the trivial answer by a metric in those of an evaluation; None where it is not known."""
    return metrics.get(_CONTROL + metric.name)


def control_words(metric: Metric, metrics: Mapping[str, float]) -> str:
    """Returns the score and name of the trivial answer, as in "38.9% (the most frequent class)", or ""."""
    value = control_of(metric, metrics)
    return "" if value is None else f"{metric.number(value)} ({metric.control})"


def control_lines(known: Iterable[Metric], metrics: Mapping[str, float]) -> list[str]:
    """Returns sentences with an evaluation's controls, and with what the model is not better at."""
    beside = [metric for metric in known if metric.name in metrics and control_of(metric, metrics) is not None]
    if not beside:
        return []
    listed = ", ".join(f"{metric.title} {control_words(metric, metrics)}" for metric in beside)
    lines = [f"Control without a model: {listed}."]

    def is_better(metric: Metric) -> bool:
        gain = metrics[metric.name] - metrics[_CONTROL + metric.name]
        return gain > 0 if metric.higher_is_better else gain < 0

    behind = [metric.title for metric in beside if not is_better(metric)]
    if len(behind) == len(beside):
        return [*lines, "The model is not better than this control: it has learned nothing that helps here."]
    return [*lines, f"The model is not better than this control in: {', '.join(behind)}."] if behind else lines

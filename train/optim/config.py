"""The tables [optimizer], [schedule] and [ema] of a recipe."""

import dataclasses
import math
import re
from typing import Any, Literal

from matmix.model.parameter_rules import ParameterRule
from matmix.train.errors import require, require_at_least

RULE = "optimizer.rule"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RuleConfig:
    """A table [[optimizer.rule]]: how some parameters are trained, over what their mixer says and earlier rules."""

    match: str | tuple[str, ...]
    """Pattern of parameter names, as in "*.in_proj.weight" (`matmix train RECIPE --dry-run` shows the names), or a list
    of them."""
    lr: float | None = None
    """Factor on the learning rate, and so on the whole step, weight decay included."""
    clip: float | None = None
    """The gradients of all that match are clipped together to this norm, apart from all others; inf = not clipped."""
    weight_decay: float | None = None
    """Weight decay of these matrices; 0 = not decayed."""
    optimizer: str | None = None
    """The optimizer of these parameters, as in optimizer.name, with the options that it has by default."""

    def __post_init__(self) -> None:
        sound = bool(self.patterns) and all(isinstance(pattern, str) and pattern for pattern in self.patterns)
        require(sound, f"{RULE}: match = {self.match!r} should be a pattern of parameter names, or a list of them")
        fields = ("lr", "clip", "weight_decay", "optimizer")
        given = {key: value for key in fields if (value := getattr(self, key)) is not None}
        require(bool(given), f"{self.title} changes nothing: give lr, clip, weight_decay or optimizer")
        try:
            ParameterRule(**given)
        except ValueError as error:
            raise ValueError(f"{self.title}: {error}") from None

    @property
    def patterns(self) -> tuple[str, ...]:
        return (self.match,) if isinstance(self.match, str) else tuple(self.match)

    @property
    def title(self) -> str:
        """The name of the rule in messages."""
        return f'{RULE} "{", ".join(self.patterns)}"'

    @property
    def label(self) -> str:
        """The name in records of the parameters that it clips."""
        return re.sub(r"[^\w.-]+", "_", " ".join(self.patterns)).strip("._") or "rule"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """Weight decay is for matrices and embeddings, but for those that a mixer exempts because they are rates or
    states; vectors (norms, biases) have none."""

    name: str = "adamw"
    """adamw (arXiv 1711.05101), adamw_8bit (2110.02861), muon (2502.16982), stable_adamw (2304.13013), lion
    (2302.06675), adafactor (1804.04235), soap (2409.11321), or an optimizer of your own as
    "my_package.module:MyOptimizer". What it cannot take, such as vectors, is left to adamw."""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """A table with the options of this optimizer alone; on the command line as in '{momentum = 0.9}'."""
    lr: float = 3e-4
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """adamw, adamw_8bit, stable_adamw, soap: decay rates of the two moments."""
    eps: float = 1e-8
    """adamw, adamw_8bit, stable_adamw, soap: added to the root of the second moment."""
    weight_decay: float = 0.1
    """Weight decay of matrices and embeddings."""
    fully_decoupled: bool = False
    """A step shrinks weights by weight_decay * lr_t / lr instead of weight_decay * lr_t (the paper's own form)."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this global norm; 0 = not clipped. Those that a rule clips apart do not count."""
    mixer_rules: bool = True
    """Take over what mixers say of the learning rate and the clipping of their own parameters."""
    embedding_lr: float = 1.0
    """Factor on the learning rate of the tables of embeddings, for tokens, positions and types, and so of a readout
    that is tied to them."""
    layer_decay: float = 1.0
    """Factor on the learning rate from each layer to the one below it (arXiv 1801.06146): output and final norm have
    the full rate, the embeddings the lowest; 1 = all the same."""
    mup_base_width: int = 0
    """The d_model for which rates and initial values are meant; in wider and narrower models they follow the width by
    muP (arXiv 2203.03466), with adamw, adamw_8bit, stable_adamw and lion. 0 = they are the same at any width."""
    freeze: tuple[str, ...] = ()
    """Patterns of names of parameters that are not trained, such as "embeddings.*"."""
    rule: tuple[RuleConfig, ...] = ()
    """Tables [[optimizer.rule]]: rate, clipping and weight decay of parameters by name, the later over the earlier; on
    the command line as in '{match = "*.in_proj.weight", lr = 0.1, clip = 8.0}'."""

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "embedding_lr"):
            value = getattr(self, name)
            require(0 < value < math.inf, f"optimizer.{name} must be positive and finite, got {value}")
        sound = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        require(sound, f"optimizer.betas must be two numbers in [0, 1), got {self.betas}")
        require_at_least(self, "optimizer.", weight_decay=0, max_grad_norm=0, mup_base_width=0)
        require(self.weight_decay < math.inf, f"optimizer.weight_decay must be finite, got {self.weight_decay}")
        require(0 < self.layer_decay <= 1, f"optimizer.layer_decay must lie in (0, 1], got {self.layer_decay}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """Learning rate over steps, as a share of optimizer.lr."""

    name: Literal["constant", "linear", "cosine", "wsd", "trapezoid"] = "cosine"
    """Shape after warm-up; wsd = warm-up, stable, decay (arXiv 2404.06395); trapezoid = wsd with a linear decay."""
    warmup: float = 0.02
    """Linear warm-up: a share of all steps if below 1, else a number of steps."""
    start: float = 0.0
    """Share of the peak that the warm-up starts from, at step 0."""
    final: float = 0.1
    """Share of the peak that is left at the last step."""
    decay: float = 0.1
    """wsd and trapezoid: length of the final decay, a share of all steps if below 1, else a number of steps."""
    decay_shape: Literal["linear", "1-sqrt", "cosine"] = "linear"
    """wsd: the shape of the final decay; 1-sqrt falls steeply at first and was the better one in arXiv 2405.18392."""

    steps: int = 0
    """Steps that all of this counts over, as where several phases share one schedule; 0 = those of the run."""

    def __post_init__(self) -> None:
        require_at_least(self, "schedule.", warmup=0, decay=0, steps=0)
        require(0 <= self.start <= 1, f"schedule.start must lie in [0, 1], got {self.start}")
        require(0 <= self.final <= 1, f"schedule.final must lie in [0, 1], got {self.final}")

    @property
    def is_stable(self) -> bool:
        """Whether it stays at the peak for a while before its decay."""
        return self.name in ("wsd", "trapezoid")

    def parts(self, steps: int) -> tuple[float, float]:
        """Returns the last step of the warm-up and the last one before the decay, of a run of so many steps."""
        steps = self.steps or steps
        warmup = min(_length(self.warmup, steps), steps)
        if self.name == "constant":
            return warmup, math.inf
        return warmup, max(steps - _length(self.decay, steps), warmup) if self.is_stable else warmup

    def words(self, steps: int, peak: float) -> str:
        """Says in words how the learning rate goes in a run of so many steps, for people."""
        steps = self.steps or steps
        warmup, stable = self.parts(steps)
        parts = [f"from {self.start * peak:.3g} to {peak:.3g} at step {warmup:,g}"] if warmup else [f"{peak:.3g}"]
        if stable > warmup:
            parts.append(f"stable to step {min(stable, steps):,g}")
        if stable < steps:
            shape = self.decay_shape if self.is_stable else self.name
            parts.append(f"{shape} to {self.final * peak:.3g} at step {steps:,}")
        return ", ".join(parts)


def _length(value: float, steps: int) -> float:
    return value * steps if value < 1 else value


def _linear(progress: float, final: float) -> float:
    return 1 - (1 - final) * progress


def _one_minus_sqrt(progress: float, final: float) -> float:
    return 1 - (1 - final) * math.sqrt(progress)


def _cosine(progress: float, final: float) -> float:
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))


_SHAPES = {"linear": _linear, "1-sqrt": _one_minus_sqrt, "cosine": _cosine}


def rate_share(step: int, steps: int, config: ScheduleConfig) -> float:
    """Share of the peak learning rate used by optimizer step `step` (1-based) of a run of `steps`."""
    steps = config.steps or steps
    warmup, stable = config.parts(steps)
    if step < warmup:
        return config.start + (1 - config.start) * (step / warmup)
    if step <= stable:
        return 1.0
    shape = _SHAPES[config.decay_shape if config.is_stable else config.name]
    return shape(min((step - stable) / max(steps - stable, 1e-9), 1.0), config.final)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EmaConfig:
    """An exponential moving average of the weights, float32, which evaluations measure beside the weights themselves.
    It changes nothing of the training."""

    decay: float = 0.0
    """Share of the average that a step leaves, as 0.9999, which averages over some 10,000 steps; 0 = no average."""
    warmup: bool = False
    """Leave at most (1 + t) / (10 + t) after step t, so that the first weights are soon forgotten."""
    every: int = 1
    """Steps between updates of the average, each of which leaves the share decay ** every."""

    def __post_init__(self) -> None:
        require(0 <= self.decay < 1, f"ema.decay must be at least 0 and below 1, got {self.decay}")
        require_at_least(self, "ema.", every=1)
        given = self.warmup or self.every != 1
        require(bool(self.decay) or not given, "ema.warmup and ema.every need ema.decay, such as 0.9999")

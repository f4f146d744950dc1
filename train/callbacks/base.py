"""The base class of callbacks, which see a run at certain moments, have side effects only, and never end the run."""

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from matmix.data.artifacts import panics_as_errors
from matmix.train.arguments import NoOptions
from matmix.train.config import RunConfig
from matmix.train.engine.base import Engine
from matmix.train.evaluators.base import Evaluator
from matmix.train.meters.speed import StepRecord
from matmix.train.process.logs import EVERY_RANK
from matmix.train.state import TrainState

logger = logging.getLogger(__name__)


class RunView(Protocol):
    """The parts of a run that a callback may read, and does not change."""

    config: RunConfig
    state: TrainState
    """The steps, tokens and skipped steps so far."""
    engine: Engine
    """Has `rank`, `world_size`, `mesh`, and the model as `module`, of which a rank may hold a shard only."""
    evaluators: Sequence[tuple[Evaluator, int]]
    """The evaluators, each with the steps between its evaluations."""
    metrics: Mapping[str, float]
    """The metrics of the last evaluation, and its "step"; empty before the first one."""
    last_loss: float
    """The loss of the last step, over all ranks, in nats per target."""
    last_norm: float
    """The norm of the last step's gradients before clipping."""
    step_was_finite: bool
    """False if the last step had a NaN or infinite loss or gradient and was skipped."""
    monitored: Mapping[str, float]
    """The scalars that the mixers report of the last step if it was not finite."""
    stop_agreed: bool
    """True once a signal has asked the run to end."""

    @property
    def path(self) -> Path:
        """The run directory. It may be moved while the run goes on, so ask for it whenever you write there."""

    @property
    def steady_path(self) -> Path:
        """The run directory by a name that stays right while it is moved, for writers that open files each time."""

    def saved_steps(self) -> Sequence[int]:
        """Returns the steps of the run's checkpoints, ascending."""


@dataclasses.dataclass(frozen=True, slots=True)
class Rewind:
    """The run went back to a checkpoint, and its state is that of the checkpoint."""

    step: int
    """The step after which it went back."""
    kind: Literal["rewind", "restore"]
    """rewind: over a loss spike; restore: because copies of the model differed."""


class Callback:
    """Sees a run; all methods are optional. A callback whose method raises is reported in one line, ended by `on_end`,
    and left out from then on. It writes lines for people to `logging.getLogger("matmix")` or a logger below that."""

    Options: ClassVar[type] = NoOptions
    """A frozen dataclass of the options that a recipe may give it; they are arguments of the class."""
    main_rank_only: bool = True
    """True: only rank 0 has it. Where every rank has one, none may wait for another, which may have failed."""
    tries_again: bool = False
    """True: it writes later what it could not write. An OSError is reported once, and the callback stays."""

    def on_start(self, run: RunView) -> None:
        """Before the first step; the state has been restored."""

    def on_step(self, run: RunView) -> None:
        """After every optimizer step."""

    def on_record(self, run: RunView, record: StepRecord) -> None:
        """Every `logging.every` steps and after the last."""

    def on_evaluation(self, run: RunView, metrics: dict[str, float]) -> None:
        """After an evaluation."""

    def on_rewind(self, run: RunView, rewind: Rewind) -> None:
        """After the run went back to a checkpoint."""

    def on_end(self, run: RunView) -> None:
        """At the end of every run, also after an error, of its own or not; `on_start` may not have been called."""


class Callbacks(list[Callback]):
    """The callbacks of a rank, in the order in which they are called."""

    def __init__(self) -> None:
        super().__init__()
        self._told: set[Callback] = set()
        self._failed: list[str] = []  # warnings of those that could not be made, until there is a run to give them

    def make(self, kind: Callable[..., Callback], **options: Any) -> None:
        """Makes a callback and adds it, or leaves it out if that fails."""
        try:
            with panics_as_errors():
                self.append(kind(**options))
        except Exception as error:
            self._failed.append(_warning(kind.__name__, "cannot be made", error))

    def call(self, run: RunView, event: str, *arguments: Any) -> None:
        """Calls the method `event` of each; one that raises is left out from then on."""
        while self._failed:
            _warn(run, self._failed.pop(0))
        for callback in tuple(self):
            self._call_one(run, callback, event, *arguments)

    def _call_one(self, run: RunView, callback: Callback, event: str, *arguments: Any) -> None:
        try:
            with panics_as_errors():
                getattr(callback, event)(run, *arguments)
        except Exception as error:
            name = type(callback).__name__
            if callback.tries_again and isinstance(error, OSError):
                if callback not in self._told:
                    self._told.add(callback)
                    _warn(run, _warning(name, "cannot write", error))
            elif callback in self:  # what it does while it is ended may fail as well
                self.remove(callback)
                _warn(run, _warning(name, f"failed in {event}", error))
                if event != "on_end":
                    self._call_one(run, callback, "on_end")


def _warn(run: RunView, text: str) -> None:
    logger.warning(f"{text} (rank {run.engine.rank})" if run.engine.rank else text, extra=EVERY_RANK)


def _warning(name: str, what: str, error: Exception) -> str:
    reason = " ".join(str(error).split())
    reason = reason if isinstance(error, OSError) and reason else f"{type(error).__name__}: {reason}".rstrip(": ")
    return f"{name} {what} ({reason}); training goes on without"

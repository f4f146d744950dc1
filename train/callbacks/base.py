"""What a callback may observe. Callbacks have side effects only: nothing they do changes the numbers of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matmix.train.loop import Trainer


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One reporting interval: `steps` optimizer steps that end at `step`. Losses are means over all ranks' targets."""

    step: int
    steps: int
    loss: float  # nats per target
    means: dict[str, float]  # over the same targets, of what else the task records, such as "accuracy"
    grad_norm: float  # of the last step, before clipping
    lr: float
    tokens: int  # seen since the start of the run, padding not counted
    tokens_per_second: float  # over all ranks
    seconds_per_step: float
    data_wait: float  # share of the time spent waiting for data
    memory: float  # peak GiB of this rank: device memory on CUDA, resident memory on CPU
    mfu: float | None  # share of the device's peak FLOP/s, where that is known
    skipped: int  # steps skipped since the start for a NaN or infinite gradient
    damaged: int  # sequences left out since the start for a damaged shard (data.skip_damaged)
    rewinds: int  # times that the run went back over a loss spike since the start
    restores: int  # times that the run went back because copies of the model differed
    clip_norms: dict[str, float]  # of the last step, before clipping, by clipping group, where there are several
    monitored: dict[str, float]  # what the mixers say of the interval's forward passes, such as state norms by layer
    ranks: dict[str, float]  # seconds a step by rank: `stragglers.numbers`; empty in a single process
    goodput: dict[str, float]  # shares of the time since the first start: `goodput.CAUSES`

    def numbers(self) -> dict[str, float]:
        """All that has a value: `means` by their own names, norms of clipping groups under "grad_norm/<group>", what
        the mixers say under "monitor/blocks.<i>.<name>", others under "ranks/" and "goodput/"."""
        numbers: dict[str, float] = {}
        for key, value in dataclasses.asdict(self).items():
            numbers |= value if key == "means" else {} if value is None else {key: value}
        prefixes = {"clip_norms": "grad_norm", "monitored": "monitor", "ranks": "ranks", "goodput": "goodput"}
        for key, prefix in prefixes.items():
            numbers |= {f"{prefix}/{name}": value for name, value in numbers.pop(key).items()}
        return numbers


class Callback:
    """All methods are optional. Those with `main_rank_only` live on rank 0 alone."""

    main_rank_only: bool = True
    records: bool = False
    """It only writes records: where it cannot, training goes on without them."""

    def on_start(self, trainer: Trainer) -> None:
        """Before the first step; the state has been restored."""

    def on_step(self, trainer: Trainer) -> None:
        """After every optimizer step."""

    def on_record(self, trainer: Trainer, record: StepRecord) -> None:
        """Every `logging.every` steps and after the last."""

    def on_evaluation(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """After an evaluation."""

    def on_rewind(self, trainer: Trainer, step: int, kind: str) -> None:
        """After the run went back from `step`: over a loss spike ("rewind"), or because copies of the model differed
        ("restore"). The state is that of the checkpoint."""

    def on_message(self, trainer: Trainer, text: str) -> None:
        """Something a person should read."""

    def on_end(self, trainer: Trainer) -> None:
        """Always, also after an error."""


class Callbacks(list[Callback]):
    """The callbacks of a rank, in the order in which they are told of things."""

    def __init__(self, callbacks: Iterable[Callback] = ()) -> None:
        super().__init__(callbacks)
        self._complained: set[int] = set()

    def call(self, trainer: Trainer, event: str, *arguments: Any) -> None:
        """Calls the method `event` of each. One that only writes records may fail to: a full disk must cost records,
        not the run."""
        for callback in self:
            try:
                getattr(callback, event)(trainer, *arguments)
            except OSError as error:
                if not callback.records:
                    raise
                if id(callback) not in self._complained:
                    self._complained.add(id(callback))
                    trainer.tell(f"warning: {type(callback).__name__} cannot write ({error}); training goes on without")

    def show(self, trainer: Trainer, text: str) -> None:
        """Shows a message by those that show messages, else on stdout."""
        shown = [callback for callback in self if type(callback).on_message is not Callback.on_message]
        if not shown:
            print(text, flush=True)
        for callback in shown:
            callback.on_message(trainer, text)

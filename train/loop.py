"""The training loop. `train(config)` reads top to bottom: set up, restore, step, evaluate, save, finish."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import torch

from matmix.data.loader import Loader
from matmix.data.manifest import unigram_entropy
from matmix.model import build_model, initialize
from matmix.model.flops import flops_per_token
from matmix.train import rng
from matmix.train.callbacks import Callback, StopSignals, make_callbacks
from matmix.train.checkpoint import CheckpointManager
from matmix.train.config import RunConfig
from matmix.train.distributed import Distributed, barrier
from matmix.train.engine import Engine, build_engine
from matmix.train.evaluate import evaluate
from matmix.train.failures import explaining
from matmix.train.health import tell_health
from matmix.train.loaders import make_loader, with_data_facts
from matmix.train.monitor import Monitor
from matmix.train.objectives import compute_loss, count_targets
from matmix.train.optimizer import make_optimizer
from matmix.train.recipe import config_to_dict
from matmix.train.run import RunDirectory, git_revision
from matmix.train.schedule import rate_share
from matmix.train.speed import Speedometer


@dataclasses.dataclass(slots=True)
class TrainState:
    """Where a run stands. Everything else that a checkpoint holds belongs to the engine or the loader."""

    step: int = 0
    tokens: int = 0
    skipped: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """What a call of `train` did."""

    step: int
    steps_done: int  # by this call; 0 if the run had already finished
    finished: bool
    signal: int  # the signal that ended it early, or 0
    saved: bool  # whether the last step is in a checkpoint
    metrics: dict[str, float]  # of the last evaluation
    unigram_entropy: float  # of the training split, nats per token


class Trainer:
    """Holds the parts of a run together; callbacks see it. Use `train` unless you need the parts."""

    def __init__(self, config: RunConfig, distributed: Distributed) -> None:
        rank, world_size = distributed.rank, distributed.world_size
        self.run = RunDirectory(config.run_dir)
        self.loader = make_loader(config, "train", rank, world_size, self.run.tokenizer_sha256())
        self.config = config = with_data_facts(config, self.loader)
        self.run.check(config)
        self.state = TrainState()
        self.accumulation = self.loader.micro_batches_per_step
        self.validation: Loader | None = None
        self.callbacks = make_callbacks(config, rank)
        self.signals = next(callback for callback in self.callbacks if isinstance(callback, StopSignals))
        rng.seed_all(config.seed, rank)
        self.engine: Engine = build_engine(config.engine, distributed)
        self.engine.prepare(
            build_model(config.model, device="meta"),
            initialize=functools.partial(initialize, seed=config.seed),
            make_optimizer=functools.partial(make_optimizer, config=config.optimizer),
        )
        self.checkpoints = CheckpointManager(
            self.run.checkpoints, keep_last=config.checkpoint.keep_last, keep_every=config.checkpoint.keep_every
        )
        flops = flops_per_token(config.model, config.data.seqlen, head_share=config.objective.target_share)
        self.speed = Speedometer(flops, distributed.device, world_size)
        self.monitor = Monitor(self.engine)
        self.monitored: dict[str, float] = {}  # of the last step if it was not finite, the same on all ranks
        self.step_was_finite, self.last_loss, self.last_norm = True, math.nan, math.nan
        self.metrics: dict[str, float] = {}
        self.unigram_entropy = unigram_entropy(self.loader.token_histogram)
        self.unsaved_step = -1  # the step whose checkpoint could not be written
        self.complained: set[int] = set()

    # -- one step ------------------------------------------------------------------------------------------------

    def train_step(self, batches: Any) -> None:
        """One optimizer step over a whole global batch."""
        config, engine, state = self.config, self.engine, self.state
        with self.speed.waiting_for_data():
            micro_batches = [next(batches) for _ in range(self.accumulation)]
        targets, tokens = sum(map(count_targets, micro_batches)), sum(batch.n_tokens for batch in micro_batches)
        # One reduction carries what all ranks must agree on before the step: the divisor, and whether to stop after it.
        counts = torch.tensor([targets, tokens, bool(self.signals.received)], dtype=torch.float64)
        targets, tokens, stop = engine.all_reduce_sum(counts.to(engine.device)).tolist()

        lr = config.optimizer.lr * rate_share(state.step + 1, config.steps, config.schedule)
        for group in engine.optimizer.param_groups:
            group["lr"] = lr
        sums = torch.zeros(2, dtype=torch.float64, device=engine.device)
        self.monitor.start_step()
        for index, batch in enumerate(micro_batches):
            loss = compute_loss(engine.model, batch.to(engine.device, non_blocking=True), config.objective)
            self.monitor.collect()
            engine.backward(loss.total / max(targets, 1), last=index == self.accumulation - 1)
            sums += torch.stack([loss.loss.detach(), loss.correct]).double()
        norm = engine.step(config.optimizer.max_grad_norm)

        loss_sum, correct = engine.all_reduce_sum(sums).tolist()
        state.step += 1
        state.tokens += int(tokens)
        self.last_loss, self.last_norm = loss_sum / max(targets, 1), float(norm)
        self.step_was_finite = math.isfinite(self.last_norm) and math.isfinite(self.last_loss)
        state.skipped += not self.step_was_finite
        self.monitored = {} if self.step_was_finite else self.monitor.of_step()
        if self.step_was_finite:
            self.speed.count(loss_sum, correct, targets, tokens)
        self.stop_agreed = bool(stop)
        self.call("on_step")
        if state.step % config.logging.every == 0 or state.step == config.last_step:
            counters = dataclasses.asdict(state)
            record = self.speed.record(
                **counters, grad_norm=self.last_norm, lr=lr, monitored=self.monitor.of_interval()
            )
            self.call("on_record", record)

    # -- the run -------------------------------------------------------------------------------------------------

    def fit(self) -> Result:
        """Trains from the newest checkpoint, or from the start, to the last step."""
        config = self.config
        self.stop_agreed = False
        try:
            self.restore()
            state, first = self.state, self.state.step
            self.call("on_start")
            batches = iter(self.loader)
            self.speed.start()
            while state.step < config.last_step and not self.stop_agreed:
                self.train_step(batches)
                self.checkpoints.report(self.tell)
                if config.evaluation.every and state.step % config.evaluation.every == 0:
                    self.evaluate()
                if config.checkpoint.every and state.step % config.checkpoint.every == 0:
                    self.save()
            saved = self.save(wait=True)
            if state.step == config.steps and saved and not self.is_summarised():
                self.finish()
        finally:
            try:
                self.checkpoints.close(self.tell)
            finally:
                self.call("on_end")
        return Result(
            step=state.step,
            steps_done=state.step - first,
            finished=state.step == config.steps,
            signal=self.signals.received,
            saved=saved,
            metrics=self.metrics,
            unigram_entropy=self.unigram_entropy,
        )

    def restore(self) -> None:
        """Loads the newest valid checkpoint, if there is one. Raises ValueError if there are only damaged ones."""
        newest = self.checkpoints.latest_valid(self.tell)
        barrier()  # no rank is still checking a directory that rank 0 begins to fill
        if self.engine.rank == 0:
            self.run.begin(self.config)
            self.loader.tokenizer.save(self.run.path / "tokenizer")  # runs outlive the datasets they were trained on
        if newest is None:
            return
        extra = self.checkpoints.load(newest, self.engine)
        self.state = TrainState(**extra["train_state"])
        self.loader.load_state_dict(extra["data"])
        if self.state.step < self.config.last_step:
            self.tell(f"resumed from {newest.name}: {self.config.last_step - self.state.step} steps to go")

    def save(self, *, wait: bool = False) -> bool:
        """Saves the current step unless that is done, or a try has just failed; True if it is saved or, without `wait`,
        being written in the background."""
        wait = wait or not self.config.checkpoint.asynchronous
        if wait and (failed := self.checkpoints.wait(self.tell)) is not None:
            self.unsaved_step = failed
        if self.state.step == self.unsaved_step:
            return False
        if self.checkpoints.has(self.state.step):
            return True
        with self.speed.paused():
            extra = {
                "train_state": dataclasses.asdict(self.state),
                "data": self.loader.state_dict(),
                "config": config_to_dict(self.config),
                "git_revision": git_revision(),
            }
            if not wait:
                self.checkpoints.begin_save(self.state.step, self.engine, extra, self.tell)
                return True
            path = self.checkpoints.save(self.state.step, self.engine, extra, self.tell)
        self.unsaved_step = self.state.step if path is None else -1
        return path is not None

    def evaluate(self) -> dict[str, float]:
        """Evaluates once per step: the last step's scheduled evaluation is also the final one."""
        if self.metrics.get("step") != self.state.step:
            with self.speed.paused():
                if self.validation is None:
                    ranks = self.engine.rank, self.engine.world_size
                    sha256 = self.loader.tokenizer.sha256
                    self.validation = make_loader(self.config, "validation", *ranks, sha256)
                metrics = evaluate(self.engine, self.validation, self.config)
                self.call("on_evaluation", metrics)
            self.metrics = {"step": self.state.step, **metrics}
        return self.metrics

    def is_summarised(self) -> bool:
        summary = self.run.read_summary()
        if summary is not None and summary["step"] == self.state.step:
            self.metrics = summary["validation"]
            return True
        return False

    def finish(self) -> None:
        """The final evaluation, and the summary that says the run is complete."""
        self.evaluate()
        if self.engine.rank == 0:
            summary = {"step": self.state.step, "tokens": self.state.tokens, "validation": self.metrics}
            try:
                self.run.write_summary({**summary, "unigram_entropy": self.unigram_entropy})
            except OSError as error:
                self.tell(f"warning: no summary written ({error}); the same command tries again")

    # -- callbacks -----------------------------------------------------------------------------------------------

    def call(self, event: str, *arguments: Any) -> None:
        for callback in self.callbacks:
            try:
                getattr(callback, event)(self, *arguments)
            except OSError as error:
                if not callback.records:
                    raise
                # A full disk must cost records, not the run.
                if id(callback) not in self.complained:
                    self.complained.add(id(callback))
                    self.tell(f"warning: {type(callback).__name__} cannot write ({error}); training goes on without")

    def tell(self, text: str) -> None:
        """Shows a message once, on the main rank."""
        if self.engine.rank == 0:
            shown = [c for c in self.callbacks if type(c).on_message is not Callback.on_message]
            if not shown:
                print(text, flush=True)
            for callback in shown:
                callback.on_message(self, text)


def train(config: RunConfig) -> Result:
    """Runs `config` to its last step, resuming where its run directory stands.

    Raises ValueError for a config, data or checkpoint that cannot be used, and RunFailure when training diverged,
    memory ran out, or a rank is gone or a node not fit.
    """
    with Distributed.from_environment(config.device) as distributed, explaining(config, distributed.world_size):
        tell_health(distributed, config.run_dir)
        return Trainer(config, distributed).fit()

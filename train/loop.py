"""The training loop. `train(config)` reads top to bottom: set up, restore, step, evaluate, save, finish."""

import dataclasses
import functools
import logging
import math
from pathlib import Path
from typing import Any

import torch

from matmix.data.manifest import unigram_entropy
from matmix.model import build_model, count_parameters, initialize
from matmix.train.callbacks import Rewind, make_callbacks
from matmix.train.checkpoint.lanes import Lanes
from matmix.train.checkpoint.manifest import read_manifest
from matmix.train.checkpoint.save import seed_all
from matmix.train.checkpoint.steps import list_steps
from matmix.train.config import RunConfig
from matmix.train.engine.base import Engine
from matmix.train.engine.build import build_engine
from matmix.train.engine.mesh import make_mesh
from matmix.train.errors import ReplicaError
from matmix.train.evaluators import Evaluation, evaluate, make_evaluators
from matmix.train.evaluators.base import averaged_metrics
from matmix.train.evaluators.validation import check_targets
from matmix.train.failures import explaining
from matmix.train.guards.best import BestEvaluation
from matmix.train.guards.replicas import Replicas
from matmix.train.guards.steps import DamagedShards, NanGuard, SpikeGuard
from matmix.train.init.start import branched_from, give_teacher, start_weights
from matmix.train.loaders import make_loader, with_data_facts
from matmix.train.meters import collectives
from matmix.train.meters.collectives import Stragglers
from matmix.train.meters.speed import Goodput, Monitor, Speedometer, first_start
from matmix.train.optim.config import rate_share
from matmix.train.optim.groups import changed_rules, make_optimizer, parameter_groups, rule_record
from matmix.train.optim.width import initial_factors
from matmix.train.process import logs, stop
from matmix.train.process.distributed import Distributed, FolderGroup, agree, barrier, from_rank_zero, gather_objects
from matmix.train.process.freed_memory import keep_freed_memory
from matmix.train.process.health import check_health
from matmix.train.recipe import config_to_dict
from matmix.train.run.directory import LOG, Change, Moved, MovedError, RunDirectory, check_tokenizer
from matmix.train.run.lock import RunLock
from matmix.train.run.outcome import Attempt, adopt_attempt, attempt_id, git_revision
from matmix.train.run.remote import opened
from matmix.train.state import Result, TrainState, check_extra
from matmix.train.step import check_graph, make_step
from matmix.train.words import short_number

logger = logging.getLogger(__name__)


class Trainer:
    """Holds the parts of a run together; callbacks see it. Use `train` unless you need the parts."""

    def __init__(
        self,
        config: RunConfig,
        distributed: Distributed,
        attempt: Attempt | None = None,
        run: RunDirectory | None = None,
    ) -> None:
        rank = distributed.rank
        if distributed.device.type == "cpu":
            keep_freed_memory()
        self.mesh = make_mesh(config.engine, distributed)
        data = self.mesh.data_rank, self.mesh.data_size
        self.run = run or RunDirectory(config.run_dir)
        self.attempt = attempt or Attempt(self.run.path, rank)
        self.loader = make_loader(config, "train", *data, self.run.tokenizer_sha256(), part=self.mesh.part)
        self.config = config = with_data_facts(config, self.loader)
        self.run.check(config)
        facts = self.loader.facts
        tokenizer, histogram = facts.tokenizer, facts.token_histogram  # None where there are no tokens
        self.tokenizer_sha256 = None if tokenizer is None else tokenizer.sha256
        # Now, so that what is wrong with it is said before hours of training.
        self.validation = make_loader(config, "validation", *data, self.tokenizer_sha256, part=self.mesh.part)
        self.task = config.task()
        self.task.mesh = self.mesh
        give_teacher(self.task, config, tokenizer, distributed.device)
        self.evaluators = make_evaluators(config, self.task)
        known = [metric for evaluator, _ in self.evaluators for metric in evaluator.metrics]
        known = [self.task.loss_metric, *self.task.metrics, *known]
        self.best = BestEvaluation(config.evaluation, known + averaged_metrics(known) * bool(config.ema.decay))
        self.state = TrainState()
        self.accumulation = self.loader.micro_batches_per_step
        self.callbacks = make_callbacks(config, rank)
        seed_all(config.seed, self.mesh.batch_rank)
        collectives.watch()
        model = build_model(config.model, device="meta")
        self.groups = parameter_groups(model, config.optimizer, config.positions)
        check_graph(config, distributed, {group.optimizer for group in self.groups})
        self.say_what_begins(distributed)
        self.engine: Engine = build_engine(config.engine, distributed, self.mesh)
        options = {"config": config.optimizer, "seqlen": config.positions, "ema": config.ema}
        factors = initial_factors(config.model, config.optimizer.mup_base_width)
        seeded = functools.partial(initialize, seed=config.seed, factors=factors)
        self.engine.prepare(model, seeded, functools.partial(make_optimizer, **options))
        self.lock = RunLock(self.run.path)
        self.log_file: logging.Handler | None = None  # on rank 0, while it holds the lock
        self.checkpoints = self.run.checkpoint_manager(config.checkpoint)
        self.lanes = self.checkpoints.lanes = Lanes(self.loader)
        self.speed = Speedometer(self.engine, self.task.flops(config.model, config.data.seqlen), self.task.unit)
        self.monitor = Monitor(self.engine)
        self.step = make_step(config, self.engine, self.task, self.monitor)
        self.damaged_shards = DamagedShards()
        self.monitored: dict[str, float] = {}  # of the last step if it was not finite, the same on all ranks
        self.spikes = SpikeGuard(config.faults)
        self.nan_guard = NanGuard(config.max_bad_steps)
        self.step_was_finite, self.last_loss, self.last_norm = True, math.nan, math.nan
        self.lr, self.gradients_differ = 0.0, False
        self.replicas = Replicas(config.faults, self.engine)
        self.stragglers = Stragglers(self.engine, config.data.workers)
        self.goodput = Goodput()
        self.stop_agreed = False
        self.moved: Moved | None = None  # what has happened to the run directory, the same on all ranks
        self.metrics: dict[str, float] = {}  # of the last evaluation, and its "step"
        self.unigram_entropy = None if histogram is None else unigram_entropy(histogram)
        self.rules_before: dict[str, list[float]] = {}  # `rule_record` of the checkpoint that was loaded
        self.first_step = 0  # where this start begins
        self.unsaved_step = -1  # the step whose checkpoint could not be written

    def say_what_begins(self, distributed: Distributed) -> None:
        """Tells people at once what they have started; the first record may be minutes away."""
        config = self.config
        ranks = "" if distributed.world_size == 1 else f" on {distributed.world_size} ranks"
        data = self.task.modality(config.data).named(config.data) or "the recipe's data"
        saved = list_steps(self.run.checkpoints, written=True)
        begins = f"a branch of {config.init.from_}" if config.init.goes_on else "from the first"
        begins = f"from the newest checkpoint, step {saved[-1]}" if saved else begins
        parameters = short_number(count_parameters(config.model))
        logger.info(
            f"{self.run.where}: {parameters} parameters, {distributed.device.type}{ranks}, "
            f"{config.engine.words}; {data}; {config.steps} steps, {begins}"
        )
        for words in (config.micro_batch_words(self.mesh.data_size), self.loader.facts.not_promised):
            if words:
                logger.info(words)

    # -- one step ------------------------------------------------------------------------------------------------

    def train_step(self, batches: Any) -> None:
        """One optimizer step over a whole global batch."""
        config, state = self.config, self.state
        self.attempt.begin_step(state.step + 1)
        recorded = (state.step + 1) % config.logging.every == 0 or state.step + 1 == config.last_step
        with self.speed.stepping(sample=recorded):
            self.compute_step(batches)
        self.call("on_step")
        self.nan_guard.after_step(self)
        if recorded:
            self.record()
        self.goodput.spend("other")

    def compute_step(self, batches: Any) -> None:
        """The step itself, up to what all ranks know of it."""
        config, engine, state = self.config, self.engine, self.state
        self.lanes.begin_step()
        with self.speed.waiting_for_data():
            read = [engine.part_of_batch(next(batches)) for _ in range(self.accumulation)]
        micro_batches = [self.lanes.attach(index, batch) for index, batch in enumerate(read)]
        self.goodput.spend("data")
        targets = sum(map(self.task.count_targets, micro_batches))
        tokens = sum(batch.n_tokens for batch in micro_batches)
        damaged, news = self.damaged_shards.count(micro_batches)
        # One reduction carries what all ranks must agree on before the step, such as the divisor. A batch counts once.
        counts = torch.tensor([targets, tokens, damaged], dtype=torch.float64) * self.mesh.is_counted
        counts = torch.cat([counts, torch.tensor([news])])
        targets, tokens, damaged, news = engine.all_reduce_sum(counts.to(engine.device)).tolist()
        if news:
            self.damaged_shards.share()

        lr = config.optimizer.lr * rate_share(state.step + 1, config.steps, config.schedule)
        for group in engine.optimizer.param_groups:
            group["lr"] = lr * group["lr_factor"]
        sums, norm, monitored = self.step(micro_batches, max(targets, 1))
        self.monitor.collect(monitored)

        # As late as can be, so that no further step is begun after a signal.
        sums[0] = bool(stop.received()) or self.moved_run() is not None
        sums[3:] *= self.mesh.is_counted
        # What one rank sees all ranks act on: behind a condition that ranks see differently, collectives deadlock.
        signals, not_finite, differing, loss_sum, *recorded = engine.all_reduce_sum(sums).tolist()
        self.attempt.step = state.step = state.step + 1
        state.tokens += int(tokens)
        state.damaged += int(damaged)
        self.lr, self.last_loss, self.last_norm = lr, loss_sum / max(targets, 1), float(norm)
        self.step_was_finite = not not_finite and math.isfinite(self.last_loss)
        self.gradients_differ = bool(differing)
        state.skipped += not self.step_was_finite
        self.monitored = {} if self.step_was_finite else self.monitor.of_step()
        if not self.step_was_finite:
            self.lanes.forget()  # what made the step so may be in the states as well
        else:
            self.speed.count(loss_sum, dict(zip(self.task.recorded, recorded, strict=True)), targets, tokens)
        self.stop_agreed = bool(signals)
        if self.stop_agreed:
            self.follow_run()
        self.goodput.spend("useful" if self.step_was_finite else "skipped")

    def record(self) -> None:
        """Tells the callbacks of the interval that ends here."""
        engine = self.engine
        ranks, lines = self.stragglers.look(self.state.step, self.speed.own_times())
        for line in lines:
            logger.info(line)
        record = self.speed.record(
            **dataclasses.asdict(self.state),
            grad_norm=self.last_norm,
            clip_norms={name: float(norm) for name, norm in engine.clip_norms.items()},
            lr=self.lr,
            monitored=self.monitor.of_interval(),
            ranks=ranks,
            goodput=self.goodput.shares(),
        )
        self.call("on_record", record)

    # -- the run -------------------------------------------------------------------------------------------------

    def fit(self) -> Result:
        """Trains from the newest checkpoint, or from the start, to the last step."""
        config = self.config
        try:
            self.restore()
            self.first_step = self.state.step
            if not self.first_step:  # not to be told after hours of training
                evaluation = Evaluation(engine=self.engine, task=self.task, loader=self.validation)
                check_targets(evaluation, config.evaluation.batches)
            self.call("on_start")
            self.stop_agreed = any(gather_objects(bool(stop.received())))
            if self.evaluation_is_due():
                self.evaluate()  # if a signal had interrupted it
            batches = iter(self.loader)
            self.speed.start()
            self.goodput.spend("restarts")
            while self.state.step < config.last_step and not self.stop_agreed and not self.best.stops:
                self.train_step(batches)
                if (difference := self.find_difference()) is not None:
                    batches = self.replicas.go_back(self, batches, difference)
                    continue
                if self.spikes.sees_spike(self):
                    batches = self.spikes.go_back(self, batches)
                    continue
                if self.evaluation_is_due():
                    self.evaluate()
                if self.is_time(config.checkpoint.every) or self.best.step == self.state.step:
                    self.save()
                elif self.is_time(config.checkpoint.local_every):
                    self.copy()
            saved = self.state.step == 0 or self.save(wait=True)
            if saved:
                self.checkpoints.copies.end()
            ended = self.state.step == config.steps or self.best.stops
            finished = ended and (not saved or self.is_summarised() or self.finish())
            self.follow_run()
            if self.moved is not None:
                step, steps = self.state.step if saved else 0, from_rank_zero(self.saved_steps())
                raise MovedError(self.moved.says(config.run_dir, step, steps))
        finally:
            try:
                self.checkpoints.close()
            finally:
                for loader in (self.loader, self.validation):
                    loader.close()
                self.call("on_end")
                if self.log_file is not None:
                    logs.close_file(self.log_file)
                self.lock.release()
                self.attempt.run_dir = self.run.path
                if self.moved is None:  # else how the attempt ended is written to where it is now
                    self.run.place.release()
        return Result(
            step=self.state.step,
            steps=config.steps,
            steps_done=self.state.step - self.first_step,
            finished=finished,
            stopped=self.stop_agreed,
            signal=stop.received(),
            saved=saved,
            metrics=self.metrics,
            unigram_entropy=self.unigram_entropy,
        )

    def find_difference(self) -> str | None:
        """Returns what differs between copies of the model after the step just done, where it is time to look: every so
        many steps, before a save, and where the norms of a step's gradients did."""
        every = self.config.faults.replica_check_every
        ends = self.stop_agreed or self.state.step == self.config.last_step
        due = every and (ends or self.is_time(every) or self.is_time(self.config.checkpoint.every))
        if not due and not self.gradients_differ:
            return None
        difference = self.compare_replicas()
        if difference is None and self.gradients_differ:
            logger.warning(f"step {self.state.step}: norms of the same gradients differed, the weights do not")
        return difference

    def compare_replicas(self) -> str | None:
        """Returns what differs between copies of the model now, or None."""
        with self.speed.paused():
            difference = self.replicas.find_difference(self.state.step)
        self.goodput.spend("other")
        return difference

    def restore(self) -> None:
        """Takes the run directory and loads the newest valid checkpoint, if there is one. Raises ValueError if another
        job uses the directory, if there are only damaged checkpoints, or if `steps` lies before the newest valid
        one."""
        agree(self.lock.acquire, here=self.engine.rank == 0)
        self.run.place.hold()
        self.attempt.run_dir = self.run.place.steady
        if self.engine.rank == 0:
            self.log_file = logs.open_file(lambda: self.run.path / LOG)
        changes: list[Change] = []
        newest = self.checkpoints.newest(self.engine)
        if newest is None:
            self.goodput.begin(first_start(self.run.path, write=False))
            if self.config.init.goes_on:
                changes = self.branch()
            elif self.config.init.from_:
                start_weights(self.config, self.engine, self.loader.facts.tokenizer)
        else:
            changes = self.load(newest)
            if (left := self.config.last_step - self.state.step) > 0:
                logger.info(f"resumed from {newest.name}: {left} steps to go")
                if words := changed_rules(self.rules_before, self.groups):
                    logger.info(words)
        barrier()  # no rank is still checking a directory that rank 0 begins to fill
        if self.engine.rank == 0:
            if newest is None and self.config.checkpoint.start_over:
                self.run.set_aside_records()
            self.run.begin(self.config, self.state.step, self.loader.facts.tokenizer, changes)
            first_start(self.run.path, write=True)
        self.run.lead(self.checkpoints)
        if newest is None:
            self.checkpoints.copies.follow(None)

    def load(self, newest: Path, *, lost_to: str = "restarts") -> list[Change]:
        """Puts everything where the checkpoint `newest` has it, except what a changed config now says, and returns
        these changes; lost_to: what the time since then is counted as. Raises ValueError for what may not change."""
        extra = read_manifest(newest)["extra"]
        check_extra(extra, newest)
        changes = self.run.changes_since(extra, self.config)
        self.take(newest)
        if self.state.step > self.config.steps:
            raise ValueError(
                f"steps = {self.config.steps} is less than the {self.state.step} that {self.run.path} has done; "
                f"set steps to {self.state.step} or more, or choose another --run-dir"
            )
        self.best.load_state_dict(extra.get("best"))
        self.checkpoints.best = self.best.step
        self.goodput.load_state_dict(extra.get("goodput"), lost_to)
        self.is_summarised()
        return changes

    def branch(self) -> list[Change]:
        """Goes on from the checkpoint of another run that `init` names, and returns what its config changes."""
        checkpoint, changes = branched_from(self.config)
        self.take(checkpoint)
        left = self.config.last_step - self.state.step
        logger.info(f"branched from {checkpoint.name} of {self.config.init.from_}: {left} steps to go")
        return changes

    def take(self, checkpoint: Path) -> None:
        """Puts the model, the optimizer, the data and what guards remember where a checkpoint has them."""
        manifest = read_manifest(checkpoint)
        extra = manifest["extra"]
        check_tokenizer(extra, self.loader.facts.tokenizer, checkpoint)
        self.checkpoints.load(checkpoint, self.engine)
        self.step.forget()
        self.state = TrainState(**extra["train_state"])
        self.loader.load_state_dict(extra["data"])
        if self.config.data.carry:
            fresh = self.engine.module.initial_state(self.lanes.size, self.engine.device)
            agree(lambda: self.lanes.load(checkpoint, manifest["files"], fresh))
        self.rules_before = extra["parameter_rules"]
        self.spikes.load_state_dict(extra.get("spikes"))
        self.replicas.same_at = -1
        self.attempt.step = self.state.step
        self.metrics = extra.get("evaluation") or {}

    def save(self, *, wait: bool = False) -> bool:
        """Saves the current step unless that is done, or a try has just failed; True if it is saved or, without `wait`,
        being written in the background."""
        self.follow_run()
        wait = wait or not self.config.checkpoint.asynchronous
        if wait and (failed := self.checkpoints.wait()) is not None:
            self.unsaved_step = failed
        if self.state.step == self.unsaved_step:
            return False
        if self.checkpoints.has(self.state.step):
            if wait and self.state.step != self.first_step:  # a start that does nothing removes nothing
                self.checkpoints.clear_up(self.state.step)
            return True
        if self.config.faults.replica_check_every and (difference := self.compare_replicas()) is not None:
            raise ReplicaError(f"step {self.state.step} is not saved: {difference}")
        with self.speed.paused():
            if not wait:
                self.checkpoints.begin_save(self.state.step, self.engine, self.extra())
                self.goodput.spend("saves")
                return True
            path = self.checkpoints.save(self.state.step, self.engine, self.extra())
        self.goodput.spend("saves")
        self.unsaved_step = self.state.step if path is None else -1
        return path is not None

    def copy(self) -> None:
        """Begins a copy of the current step that stays with the nodes, unless a checkpoint comes at once."""
        if self.stop_agreed or self.state.step >= self.config.last_step:
            return
        if self.config.faults.replica_check_every and self.compare_replicas() is not None:
            return  # nobody shall go on from there; the next comparison of the loop says what differs
        with self.speed.paused():
            self.checkpoints.begin_copy(self.state.step, self.engine, self.extra())
        self.goodput.spend("saves")

    def moved_run(self) -> Moved | None:
        """Returns what this rank, one for each node, sees of a run directory that is not at its path any more. One look
        at the file system."""
        return self.run.place.moved() if FolderGroup.of_node().leads else None

    def follow_run(self) -> None:
        """Where the run directory was moved, on all ranks: all that is still to be written goes to where it is now, and
        the run saves and ends, as after a signal. What keeps writing to the path would make a second run of half a
        run."""
        seen = next(filter(None, gather_objects(self.moved_run())), None)
        if seen is None or self.moved is not None:
            return
        self.moved, self.stop_agreed = seen, True
        if seen.lost:
            raise MovedError(seen.says(self.config.run_dir, 0, ()))
        self.run.lead(self.checkpoints)

    def extra(self) -> dict[str, Any]:
        """Returns what a checkpoint of the current step holds besides what the engine has."""
        return {
            "train_state": dataclasses.asdict(self.state),
            "data": self.loader.state_dict(gather_objects),
            "config": config_to_dict(self.config),
            "tokenizer_sha256": self.tokenizer_sha256,
            "unit": self.task.unit,
            "git_revision": git_revision(),
            "parameter_rules": rule_record(self.groups),
            "spikes": self.spikes.state_dict(),
            "best": self.best.state_dict(),
            "evaluation": self.metrics if self.metrics.get("step") == self.state.step else None,
            "goodput": self.goodput.state_dict(),
        }

    def is_time(self, every: int) -> bool:
        """Returns True where what happens every so many steps (0 = never) happens after the current one."""
        return every > 0 and self.state.step > 0 and self.state.step % every == 0

    def evaluation_is_due(self) -> bool:
        """Returns True where any evaluator has its turn after the current step."""
        return any(self.is_time(every) for _, every in self.evaluators)

    def evaluate(self) -> bool:
        """Evaluates once per step with those whose turn it is; the last step's is with all, and also the final one. A
        signal to any rank ends the evaluation without a record, and then the run: False. The checkpoint tells that this
        step is not evaluated, and the next start of the run begins with that."""
        if self.metrics.get("step") == self.state.step:
            return True
        if self.stop_agreed:
            return False
        with self.speed.paused():
            last = self.state.step == self.config.steps
            due = [evaluator for evaluator, every in self.evaluators if last or self.is_time(every)]
            evaluation = Evaluation(
                engine=self.engine,
                task=self.task,
                loader=self.validation,
                interrupted=lambda: bool(stop.received()) or self.moved_run() is not None,
            )
            metrics = evaluate(due, evaluation, self.config)
            if metrics is not None and self.best.ends_with(metrics):  # the last evaluation is with all
                others = [evaluator for evaluator, _ in self.evaluators if evaluator not in due]
                rest = evaluate(others, evaluation, self.config)
                metrics = None if rest is None else metrics | rest
            self.goodput.spend("evaluation")
            self.follow_run()
            if metrics is None:
                self.stop_agreed = True
                return False
            self.metrics = {"step": self.state.step, **metrics}
            self.call("on_evaluation", metrics)
            self.nan_guard.after_evaluation(self, metrics)
            self.best.after_evaluation(self.state.step, metrics)
            self.checkpoints.best = self.best.step
        return True

    def is_summarised(self) -> bool:
        summary = from_rank_zero(self.run.read_summary())
        if summary is not None and summary["step"] == self.state.step:
            self.metrics = summary["validation"]
            return True
        return False

    def finish(self) -> bool:
        """The final evaluation, and the summary that says the run is complete; False if a signal came between."""
        if not self.evaluate():
            return False
        if self.engine.rank == 0:
            summary = {"step": self.state.step, self.task.unit: self.state.tokens, "validation": self.metrics}
            summary["data"] = {"train": self.loader.contents, "validation": self.validation.contents}
            best = {} if (best := self.best.state_dict()) is None else {"best": best}
            self.run.write_summary({**summary, "unigram_entropy": self.unigram_entropy, **best})
        return True

    # -- what callbacks and guards see ---------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        return self.run.path

    @property
    def steady_path(self) -> Path:
        return self.run.place.steady

    def saved_steps(self) -> list[int]:
        return self.checkpoints.steps()

    def newest_checkpoint(self) -> Path | None:
        return self.checkpoints.latest_valid()

    def went_back(self, rewind: Rewind) -> None:
        self.call("on_rewind", rewind)
        self.speed.start()

    def call(self, event: str, *arguments: Any) -> None:
        """Tells the callbacks of an event."""
        self.callbacks.call(self, event, *arguments)


def train(config: RunConfig, attempt: Attempt | None = None) -> Result:
    """Runs `config` to its last step, resuming where its run directory stands. SIGTERM, Ctrl-C, SIGUSR1 and SIGUSR2 to
    any rank end it early, with a checkpoint; attempt: where callers follow how far it comes. Raises ValueError for a
    config, data or checkpoint that cannot be used, and RunFailure when training diverged, memory ran out, or a rank is
    gone or a node not fit."""
    with (
        stop.during_run(),
        Distributed.from_environment(config.device) as distributed,
        logs.shown(config.logging.level, rank=distributed.rank),
        explaining(config, distributed.world_size),
    ):
        adopt_attempt(from_rank_zero(attempt_id()))
        check_health(distributed, config.run_dir)
        with opened(config.run_dir) as run:
            return Trainer(config, distributed, attempt, run).fit()

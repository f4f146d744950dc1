"""The mean of the weights of several checkpoints of a run, as a run of its own (arXiv 1803.05407, 2306.03241)."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from matmix.data.storage.remote import is_url
from matmix.model import build_model, initialize
from matmix.model.interop.export.directory import check_target
from matmix.train.checkpoint.steps import list_steps
from matmix.train.engine.build import build_engine
from matmix.train.engine.config import EngineConfig
from matmix.train.engine.full_state import MODEL, FullState
from matmix.train.engine.kinds import open_full
from matmix.train.evaluators import Evaluation, evaluate, make_evaluators
from matmix.train.loaders import make_loader
from matmix.train.optim.config import EmaConfig
from matmix.train.optim.groups import make_optimizer
from matmix.train.process.distributed import Distributed
from matmix.train.run.directory import RunDirectory
from matmix.train.run.trained import Trained, local_outline, open_trained
from matmix.use.exporting import write_run


class MeanState(FullState):
    """A state whose weights and buffers are means over several states, summed in float64 and rounded once; all else is
    that of the last one. Reads only what is asked for."""

    def __init__(self, states: Sequence[FullState]) -> None:
        self._states, self.entries = states, states[-1].entries

    def read(self, key: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        dtype = self.entries[key].dtype
        if not key.startswith(MODEL) or not dtype.is_floating_point:
            return self._states[-1].read(key, start, stop)
        total = sum(state.read(key, start, stop).double() for state in self._states)
        return (total / len(self._states)).to(dtype)


def average_run(run_dir: str | Path, out_dir: str | Path, *, last: int = 5) -> list[str]:
    """Writes a run whose one checkpoint has the mean of the weights of the last checkpoints of another run (a folder or
    a URL), and evaluates it beside the newest of them on one device.

    out_dir must not exist, or be empty, and appears whole or not at all; optimizer, position in the data and step are
    those of the newest checkpoint. Returns the lines of a table of both evaluations. Raises FileNotFoundError or
    ValueError (one line) for a run with fewer checkpoints, for a damaged one, and without the validation data.
    """
    out = Path(out_dir)
    if is_url(str(out_dir)):
        raise ValueError(f"averages are made in a folder, not at a URL such as {out_dir}")
    check_target(out)
    if last < 2:
        raise ValueError(f"--last must be 2 or more, got {last}")
    folder = RunDirectory(local_outline(run_dir))
    folder.read_config()  # says if this is no run
    steps = list_steps(folder.checkpoints)[-last:]
    if len(steps) < last:
        there = ", ".join(map(str, steps)) or "none"
        raise ValueError(
            f"{run_dir} has fewer than {last} checkpoints (of steps: {there}): lower --last, or train with a higher "
            "checkpoint.keep_last or with checkpoint.keep_every"
        )
    opened = [open_trained(run_dir, step, weights_only=step != steps[-1]) for step in steps]
    newest = opened[-1]
    states = [open_full(one.checkpoint, one.manifest["layout"], weights_only=one is not newest) for one in opened]
    mean = MeanState(states)
    rows = {newest.checkpoint.name: states[-1], f"mean of {last}, from step {steps[0]}": mean}
    found = _measured(newest, rows)
    evaluation = {"step": steps[-1], **found[next(reversed(found))]}
    write_run(newest, out, state=mean, extra={"evaluation": evaluation, "averaged_steps": steps})
    return _table(newest, found)


def _measured(trained: Trained, states: Mapping[str, FullState]) -> dict[str, dict[str, float]]:
    """Returns the metrics of the run's last evaluation, with the weights of each state instead."""
    config = trained.config
    engine_config = EngineConfig(precision=config.engine.precision)
    config = dataclasses.replace(config, engine=engine_config, ema=EmaConfig())
    found = {}
    with Distributed.from_environment(config.device) as distributed:
        engine, task = build_engine(config.engine, distributed), config.task()
        task.mesh = engine.mesh
        options = {"config": config.optimizer, "seqlen": config.positions, "ema": config.ema}
        seeded = functools.partial(initialize, seed=config.seed)
        model = build_model(config.model, device="meta")
        engine.prepare(model, seeded, functools.partial(make_optimizer, **options))
        sha256 = trained.manifest["extra"]["tokenizer_sha256"]
        loader = make_loader(config, "validation", 0, 1, sha256, part=engine.mesh.part)
        evaluators = [evaluator for evaluator, _ in make_evaluators(config, task)]
        try:
            for name, state in states.items():
                engine.load_weights(state)
                metrics = evaluate(evaluators, Evaluation(engine=engine, task=task, loader=loader), config)
                assert metrics is not None, "nobody interrupts it"
                found[name] = metrics
        finally:
            loader.close()
    return found


def _table(trained: Trained, found: Mapping[str, Mapping[str, float]]) -> list[str]:
    task = trained.config.task()
    metrics = [one for one in (task.loss_metric, *task.metrics) if all(one.name in row for row in found.values())]
    rows = [["weights", *(metric.title for metric in metrics)]]
    rows += [[name, *(metric.number(row[metric.name]) for metric in metrics)] for name, row in found.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]

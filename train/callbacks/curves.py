"""curves.png: the picture of a run, drawn from metrics.jsonl when it has ended."""

from __future__ import annotations

import io
from typing import Any

from matmix.data.artifacts import read_json_lines
from matmix.data.storage.files import write_atomic
from matmix.train.callbacks.base import Callback, RunView
from matmix.train.evaluators.averaged import PREFIX as EMA
from matmix.train.evaluators.averaged import TITLE
from matmix.train.evaluators.context import PREFIX

_SMOOTH = 0.05  # share of the records over which the training loss is averaged


class Curves(Callback):
    """Draws once, after the last step. matplotlib is loaded then; until then this costs nothing."""

    def __init__(self) -> None:
        self.evaluated = False

    def on_evaluation(self, run: RunView, metrics: dict[str, float]) -> None:
        self.evaluated = True

    def on_end(self, run: RunView) -> None:
        # What has failed is not drawn, nor what has to make room quickly, nor what is drawn already.
        ended = run.state.step == run.config.last_step and not run.stop_agreed
        picture = run.path / "curves.png"
        if ended and (self.evaluated or not picture.exists()):
            write_atomic(picture, draw(read_json_lines(run.path / "metrics.jsonl")))


def draw(records: list[dict[str, Any]]) -> bytes:
    """A PNG of the records of a run: losses over the steps and, where evaluations say so, over the position."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    # Null where every step was skipped, or a loss left the range of floats.
    training = [record for record in records if record["kind"] == "train" and record["loss"] is not None]
    evaluations = [record for record in records if record["kind"] == "validation"]
    validation = [record for record in evaluations if record.get("loss") is not None]
    measured = [record for record in evaluations if position_losses(record)]
    figure = Figure(figsize=(12 if measured else 7, 4.5), layout="constrained", dpi=110)
    left, *rest = figure.subplots(1, 2 if measured else 1, squeeze=False)[0]

    steps, losses = [record["step"] for record in training], [record["loss"] for record in training]
    left.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=0.8)
    left.plot(steps, _running_mean(losses), color="tab:blue", label="training, running mean")
    places, evaluated = [record["step"] for record in validation], [record["loss"] for record in validation]
    left.plot(places, evaluated, "o-", color="tab:red", markersize=5, label="validation")
    averaged = [(record["step"], record[EMA + "loss"]) for record in validation if record.get(EMA + "loss") is not None]
    if averaged:
        left.plot(*zip(*averaged, strict=True), "s--", color="tab:green", markersize=4, label=f"validation, {TITLE}")
    left.set_xlabel("step")
    left.set_ylabel("loss (nats per target)")
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in rest:
        shown = [measured[0], measured[-1]] if len(measured) > 1 else measured
        for record, look in zip(shown, ("o--", "o-")[-len(shown) :], strict=True):
            found = position_losses(record)
            label = f"step {record['step']}"
            if "context_gain" in record:
                label += f": context gain {record['context_gain']:.2f}"
            if "mixing_gain" in record:
                label += f", without mixing {record['mixing_gain']:+.2f}"
            # By the beginnings of the bins, which then stand at equal distances.
            places = [begin.bit_length() - 1 for begin, _, _ in found]
            axes.plot(places, [loss for *_, loss in found], look, label=label)
        ticks = {begin.bit_length() - 1: name for record in shown for begin, name, _ in position_losses(record)}
        axes.set_xticks(list(ticks), list(ticks.values()))
        axes.set_xlabel("tokens of the document up to the predicting one")
        axes.set_ylabel("validation loss (nats per target)")
    for axes in (left, *rest):
        axes.grid(True, alpha=0.3, linewidth=0.6)
        axes.legend(fontsize=9)
    png = io.BytesIO()
    figure.savefig(png, format="png")
    return png.getvalue()


def position_losses(record: dict[str, Any]) -> list[tuple[int, str, float]]:
    """(first position, its bin as it is named, loss) of an evaluation."""
    names = [name.removeprefix(PREFIX) for name in record if name.startswith(PREFIX)]
    found = [(int(name.partition("-")[0]), name, record[PREFIX + name]) for name in names]
    return [entry for entry in found if entry[2] is not None]


def _running_mean(values: list[float]) -> list[float]:
    window = max(1, round(_SMOOTH * len(values)))
    parts = [values[max(0, end - window) : end] for end in range(1, len(values) + 1)]
    return [sum(part) / len(part) for part in parts]

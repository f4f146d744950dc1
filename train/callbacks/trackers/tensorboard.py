"""TensorBoard scalars: loss, lr, gradient norm, tokens/s, model FLOPs utilisation, memory, data wait, mixers' states,
validation."""

from __future__ import annotations

import math
import time
from pathlib import Path

from matmix.train.callbacks.base import Callback, Rewind, RunView, StepRecord

_NAMES = {
    "loss": "train/loss",
    "lr": "train/lr",
    "grad_norm": "train/grad_norm",
    "tokens": "train/tokens",
    "images": "train/images",
    "skipped": "train/skipped_steps",
    "damaged": "train/damaged_sequences",
    "rewinds": "train/rewinds",
    "restores": "train/restores",
    "tokens_per_second": "speed/tokens_per_second",
    "images_per_second": "speed/images_per_second",
    "seconds_per_step": "speed/seconds_per_step",
    "mfu": "speed/model_flops_utilisation",
    "data_wait": "speed/data_wait_share",
    "memory": "memory/peak_gib",
}


def _put_into_the_past(folder: Path) -> None:
    """Renames event files whose name is later than now.

    TensorBoard reads files in the order of the times in their names. A run that was resumed on a node whose clock is
    behind would be read before what it resumed, and would hide none of the steps that it does again.
    """
    now = int(time.time())
    found = [(int(path.name.split(".")[3]), path) for path in folder.glob("events.out.tfevents.*")]
    later = sorted(entry for entry in found if entry[0] >= now)
    for place, (_, path) in enumerate(later):
        *front, _, rest = path.name.split(".", 4)
        path.rename(path.with_name(".".join([*front, f"{now - len(later) + place:010d}", rest])))


class TensorBoard(Callback):
    """Writes to RUN/tensorboard; a resumed run hides the events of the steps that it does again."""

    def on_start(self, run: RunView) -> None:
        from torch.utils.tensorboard import SummaryWriter  # two seconds of import that only this callback needs

        folder = run.steady_path / "tensorboard"  # its writer opens the file anew each time
        _put_into_the_past(folder)
        self.writer = SummaryWriter(str(folder), purge_step=run.state.step + 1)

    def on_record(self, run: RunView, record: StepRecord) -> None:
        names = _NAMES | {name: f"train/{name}" for name in record.means}
        for key, value in record.numbers().items():
            if math.isnan(value):
                continue  # a gap in the curve
            if key in names or key.startswith(("monitor/", "grad_norm/", "ranks/", "goodput/")):
                self.writer.add_scalar(names.get(key, key), value, record.step)

    def on_evaluation(self, run: RunView, metrics: dict[str, float]) -> None:
        for key, value in metrics.items():
            self.writer.add_scalar(f"validation/{key}", value, run.state.step)
        self.writer.flush()

    def on_rewind(self, run: RunView, rewind: Rewind) -> None:
        self.writer.close()
        self.on_start(run)

    def on_end(self, run: RunView) -> None:
        if hasattr(self, "writer"):
            self.writer.close()

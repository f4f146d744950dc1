"""TensorBoard: the numbers of the records, in RUN/tensorboard."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from matmix.train.callbacks.base import Rewind, RunView
from matmix.train.callbacks.records import Recorder
from matmix.train.callbacks.trackers import numbers

_TAGS = {
    "train/skipped": "train/skipped_steps",
    "train/damaged": "train/damaged_sequences",
    "train/tokens_per_second": "speed/tokens_per_second",
    "train/images_per_second": "speed/images_per_second",
    "train/seconds_per_step": "speed/seconds_per_step",
    "train/mfu": "speed/model_flops_utilisation",
    "train/data_wait": "speed/data_wait_share",
    "train/memory": "memory/peak_gib",
}
"""Tags of numbers that are not called by the kind and the name in their record."""


class TensorBoard(Recorder):
    """Writes scalars; a resumed run hides the events of the steps that it does again."""

    def on_start(self, run: RunView) -> None:
        from torch.utils.tensorboard import SummaryWriter  # two seconds of import that only this callback needs

        folder = run.steady_path / "tensorboard"  # its writer opens the file anew each time
        _put_into_the_past(folder)
        self.writer = SummaryWriter(str(folder), purge_step=run.state.step + 1)

    def take(self, run: RunView, record: dict[str, Any]) -> None:
        for name, value in numbers(record).items():
            # Numbers of layers, ranks and causes stand in groups of their own: monitor/..., ranks/..., goodput/...
            tag = name.removeprefix("train/") if name.startswith("train/") and name.count("/") > 1 else name
            self.writer.add_scalar(_TAGS.get(tag, tag), value, record["step"])
        if record["kind"] == "validation":
            self.writer.flush()

    def on_rewind(self, run: RunView, rewind: Rewind) -> None:
        self.writer.close()
        self.on_start(run)

    def on_end(self, run: RunView) -> None:
        if hasattr(self, "writer"):
            self.writer.close()


def _put_into_the_past(folder: Path) -> None:
    """Renames event files whose name is later than now.

    TensorBoard reads files in the order of the times in their names. A run that was resumed on a node whose clock is
    behind would be read before what it resumed, and would hide none of the steps that it does again.
    """
    now = int(time.time())
    files = [(int(path.name.split(".")[3]), path) for path in folder.glob("events.out.tfevents.*")]
    later = sorted(entry for entry in files if entry[0] >= now)
    for place, (_, path) in enumerate(later):
        *front, _, rest = path.name.split(".", 4)
        path.rename(path.with_name(".".join([*front, f"{now - len(later) + place:010d}", rest])))

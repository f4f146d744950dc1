"""Tasks that are generated while training, by name.

To add one: write its file, and add its line here. Or name yours in a recipe: data.synthetic.task =
"my_package.module:Name", a subclass of `Task` or, for inputs that are no tokens, of `GeneratedSamples`.
"""

import difflib

from matmix.data.synthetic.config import SyntheticConfig
from matmix.data.synthetic.copying import SelectiveCopying
from matmix.data.synthetic.listops import ListOps
from matmix.data.synthetic.parity import Parity
from matmix.data.synthetic.recall import MultiQueryRecall
from matmix.data.synthetic.task import GeneratedSamples, Task
from matmix.data.synthetic.word_problems import A5, S3, S5

TASKS: dict[str, type[GeneratedSamples]] = {
    "parity": Parity,
    "s3": S3,
    "a5": A5,
    "s5": S5,
    "mqar": MultiQueryRecall,
    "selective_copying": SelectiveCopying,
    "listops": ListOps,
}
"""Name in a configuration -> class. One from outside is added under its "package.module:Name" (see `train.loaders`)."""

__all__ = ["TASKS", "GeneratedSamples", "SyntheticConfig", "Task", "make_task"]

for _name, _task in TASKS.items():
    _task.name = _name


def make_task(config: SyntheticConfig) -> GeneratedSamples:
    """The task of a configuration. Raises ValueError (one line) for an unknown one, or for options that do not fit."""
    if config.task not in TASKS:
        near = difflib.get_close_matches(config.task, TASKS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(TASKS)}"
        raise ValueError(f"data.synthetic.task = {config.task!r} is no task; {hint}")
    return TASKS[config.task](config)

"""Samples that are generated while training, by name. To add one: write its file, and add its line here. Or name yours
in a recipe: data.synthetic.task = "my_package.module:Name", a subclass of `Puzzle` or, for inputs that are no tokens,
of `GeneratedSamples`."""

import difflib

from matmix.data.config import SyntheticConfig
from matmix.data.synthetic.base import GeneratedSamples, Puzzle
from matmix.data.synthetic.copying import Reversal, SelectiveCopying
from matmix.data.synthetic.listops import ListOps
from matmix.data.synthetic.pathfinder import Pathfinder
from matmix.data.synthetic.recall import MultiQueryRecall
from matmix.data.synthetic.word_problems import A5, S3, S5, Parity

__all__ = ["GENERATED", "GeneratedSamples", "Puzzle", "SyntheticConfig", "make_generated"]

GENERATED: dict[str, type[GeneratedSamples]] = {
    "parity": Parity,
    "s3": S3,
    "a5": A5,
    "s5": S5,
    "mqar": MultiQueryRecall,
    "selective_copying": SelectiveCopying,
    "reversal": Reversal,
    "listops": ListOps,
    "pathfinder": Pathfinder,
}
"""Name in a configuration -> class. One from outside is added under its "package.module:Name" (see `train.loaders`)."""

for _name, _kind in GENERATED.items():
    _kind.name = _name


def make_generated(config: SyntheticConfig) -> GeneratedSamples:
    """Returns what generates samples. Raises ValueError (one line) for an unknown name or options that do not fit."""
    if config.task not in GENERATED:
        near = difflib.get_close_matches(config.task, GENERATED, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(GENERATED)}"
        raise ValueError(f"data.synthetic.task = {config.task!r} is no task; {hint}")
    return GENERATED[config.task](config)

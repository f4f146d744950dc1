"""The eight tasks of GLUE (arXiv 1804.07461, without WNLI): files, recipes, published settings, and scores."""

import dataclasses
import difflib
from collections.abc import Sequence
from pathlib import Path

from matmix.data.config import ExamplesConfig
from matmix.launch.glue import Column
from matmix.train.recipe import config_from_dict
from matmix.train.recipe_files import find_recipe, read_toml


@dataclasses.dataclass(frozen=True, slots=True)
class Score:
    """A number of the table."""

    metric: str
    """Its name in the records of an evaluation, such as "f1"."""
    title: str
    second: bool = False
    """Found on the task's second file, after training."""


@dataclasses.dataclass(frozen=True, slots=True)
class GlueTask:
    """A task. Its training examples are in train.tsv."""

    name: str
    """Also that of its folder in the download."""
    scores: tuple[Score, ...]
    from_mnli: bool = False
    """Begins with the weights of the run on MNLI with the same seed."""
    validation: str = "dev.tsv"
    """The file that is scored while training."""
    second: str = ""
    """A second one, scored after training."""

    @property
    def recipe(self) -> str:
        """The bundled recipe, with the columns of the files and the published settings."""
        return f"glue_{self.name.lower().replace('-', '')}"

    @property
    def files(self) -> tuple[str, ...]:
        """Returns the files that the folder must hold. test.tsv has no labels."""
        return tuple(filter(None, ("train.tsv", self.validation, self.second)))

    def form(self) -> ExamplesConfig:
        """Describes the files as the recipe does."""
        return config_from_dict(read_toml(find_recipe(self.recipe)), self.recipe).data.examples

    def overrides(self, folder: Path) -> list[str]:
        """The options of the recipe that name the files in `folder`, the whole download."""
        train, validation = (str(folder / self.name / file) for file in ("train.tsv", self.validation))
        return ["--data.examples.train", train, "--data.examples.validation", validation]


_ACCURACY, _F1 = Score("accuracy", "accuracy"), Score("f1", "F1")
_MATCHED = Score("accuracy", "accuracy, matched"), Score("accuracy", "accuracy, mismatched", second=True)
_CORRELATIONS = Score("pearson", "Pearson correlation"), Score("spearman", "Spearman correlation")
_TASKS = (
    GlueTask("MNLI", _MATCHED, validation="dev_matched.tsv", second="dev_mismatched.tsv"),
    GlueTask("QNLI", (_ACCURACY,)),
    GlueTask("QQP", (_ACCURACY, _F1)),
    GlueTask("RTE", (_ACCURACY,), from_mnli=True),
    GlueTask("SST-2", (_ACCURACY,)),
    GlueTask("MRPC", (_ACCURACY, _F1), from_mnli=True),
    GlueTask("CoLA", (Score("matthews", "Matthews correlation"),)),
    GlueTask("STS-B", _CORRELATIONS, from_mnli=True),
)
TASKS = {task.name: task for task in _TASKS}
"""By name, in the order of the papers' tables."""


def named(names: Sequence[str], option: str = "--tasks") -> list[GlueTask]:
    """The tasks of these names, in the order of `TASKS`; case and hyphens do not count. Raises ValueError (one line)
    for others, which `option` gave."""
    known = {_plain(name): name for name in TASKS}
    for name in names:
        if _plain(name) not in known:
            near = difflib.get_close_matches(_plain(name), known, n=1)
            hint = f'did you mean "{known[near[0]]}"?' if near else f"known: {', '.join(TASKS)}"
            raise ValueError(f'{option}: GLUE has no task "{name}" here ({hint})')
    wanted = {known[_plain(name)] for name in names}
    return [task for task in TASKS.values() if task.name in wanted]


def _plain(name: str) -> str:
    return name.lower().replace("-", "")


BERT = {  # learning rate, weight decay, epochs, batch
    "MNLI": (5e-5, 5e-6, 3, 48),
    "RTE": (1e-5, 1e-5, 3, 16),
    "QQP": (3e-5, 3e-6, 5, 16),
    "QNLI": (1e-5, 1e-6, 10, 16),
    "SST-2": (3e-5, 3e-6, 3, 16),
    "STS-B": (3e-5, 3e-6, 10, 32),
    "MRPC": (8e-5, 8e-6, 10, 32),
    "CoLA": (5e-5, 5e-6, 10, 32),
}
LION_LR = 1e-5


def overrides(column: Column, task: str, given: Sequence[str] = ()) -> list[str]:
    """Options for the recipe of a task, where the recipe does not have them, and after them those that are `given`."""
    if column == "hydra":
        return [*given]
    if column == "lion":
        return ["--optimizer.lr", repr(LION_LR), *given]
    lr, decay, epochs, batch = BERT[task]
    by_steps = any(word.partition("=")[0] == "--steps" for word in given)
    words = ["--optimizer.lr", repr(lr), "--optimizer.weight-decay", repr(decay), "--global-batch-size", str(batch)]
    return [*words, *([] if by_steps else ["--epochs", str(epochs)]), *given]

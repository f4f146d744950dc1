"""`matmix finetune SOURCE TASK [--key value ...]`: trains a pretrained encoder on labelled examples."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

import tyro

from matmix.data.loading.examples import open_examples
from matmix.model.config import model_config_to_dict
from matmix.train.arguments import Recipe
from matmix.train.command import train_phases
from matmix.train.config import InitConfig, RunConfig
from matmix.train.entry import Train
from matmix.train.init.sources import InitSource, source_of
from matmix.train.plugins import find_part
from matmix.train.recipe import find_recipe, plain, read_toml, resolved_config
from matmix.train.tasks import TASKS, Task
from matmix.train.tasks.finetuning.base import ExampleTask

_OF_RECIPES = ("head", "dropout", "embedding_dropout")
"""What a recipe decides of the model; the rest is the source's."""
_OF_TASKS = "finetune"
"""The bundled recipe whose settings a task has that is named without a recipe."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finetune:
    """Train a pretrained encoder on labelled examples. The same command again resumes the run.

    SOURCE is a run directory or its URL, an export, or a checkpoint of the papers' code. TASK is a recipe (a TOML file
    or a bundled name), or a task: sequence_classification, multi_label, regression, token_classification,
    question_answering, multiple_choice, embedding. Any field of a recipe can be given, as in
    --data.examples.train FILE, --epochs 5 or --optimizer.lr 1e-5.
    """

    first: ClassVar[tuple[str, str]] = ("task", "SOURCE TASK [--key value ...]")

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SOURCE")]
    """Run directory or its URL, export, or checkpoint."""
    recipe: Annotated[Recipe, tyro.conf.arg(metavar="TASK")] = ""
    """Recipe, or name of a task."""
    step: int = 0
    """Checkpoint of a run to start from; 0 = the newest."""
    from_scratch: bool = False
    """Draw all weights from the seed, as a control: of SOURCE only model, tokenizer and special tokens are taken."""
    dry_run: bool = False
    """Show parameters, FLOPs, memory and steps, and train nothing."""

    def begin(self) -> int:
        """What comes first in a process that is ours; exit code, 0 = go on."""
        return Train(recipe=self.recipe, dry_run=self.dry_run).begin()

    def run(self, rest: Sequence[str], typed: Sequence[str]) -> int:
        """Trains; returns the exit code (`matmix.train.process.exits`)."""
        config = finetuning_config(self.source, self.recipe, list(rest), step=self.step, from_scratch=self.from_scratch)
        return train_phases([config], dry_run=self.dry_run)


def finetuning_config(
    source: str, task: str, overrides: list[str], *, step: int = 0, from_scratch: bool = False
) -> RunConfig:
    """The config of a run that fine-tunes `source`; from_scratch: of a run of the same model with weights of its own.

    Raises FileNotFoundError or ValueError (one line) for a source, a task, examples or options that cannot be used.
    """
    values = read_toml(find_recipe(_OF_TASKS if task in TASKS else task))
    objective = values.setdefault("objective", {})
    if task in TASKS:
        objective["name"] = task
    objective["name"] = _typed(overrides, "--objective.name") or objective.get("name", "")
    kind = find_part(objective["name"], TASKS, "objective.name", Task)
    if not issubclass(kind, ExampleTask):
        raise ValueError(
            f'"{objective["name"]}" is no task on labelled examples: matmix train RECIPE --init.from {source} goes on '
            "training with it"
        )
    start = source_of(InitConfig(from_=source, step=step))
    if from_scratch:
        values.pop("init", None)
    else:
        values["init"] = {**values.get("init", {}), "from": source, "step": step}
    values["model"] = _model(start, kind, values.get("model", {}))
    _fill_data(values.setdefault("data", {}), start)
    name = source.rstrip("/").rpartition("/")[2]
    run_dir = values.pop("run_dir", "") or f"runs/{name}-{Path(task).stem}{'-from-scratch' if from_scratch else ''}"
    config = resolved_config(plain(values), task, overrides, run_dir)
    if "outputs" not in values["model"]["head"] and _typed(overrides, "--model.head.outputs") is None:
        config = _with_outputs(config, kind)
    return config


def _model(start: InitSource, kind: type[ExampleTask], own: dict[str, Any]) -> dict[str, Any]:
    """The table [model]: that of the source with another output, and what a recipe says of head and dropout."""
    if start.model.causal:
        raise ValueError(f"{start.words} is a {start.model.architecture}, which sees no later tokens: give an encoder")
    model = model_config_to_dict(start.model)
    head = {name: value for name, value in model.pop("head", {}).items() if name != "outputs"}
    architecture = {"architecture": kind.architectures[0]}
    own = {name: value for name, value in own.items() if name in _OF_RECIPES}
    return {**model, **own, **architecture, "head": {**head, **own.get("head", {})}}


def _fill_data(data: dict[str, Any], start: InitSource) -> None:
    """Sets what the source says of tokens and lengths, unless a recipe does."""
    if start.tokenizer is None and "tokenizer" not in data.get("examples", {}):
        raise ValueError(f"{start.words} has no tokenizer: set data.examples.tokenizer")
    examples = data.setdefault("examples", {})
    if start.tokenizer is not None:
        examples.setdefault("tokenizer", str(start.tokenizer.path))
    examples.setdefault("token_types", start.model.type_vocab_size >= 2)
    data.setdefault("prefix", start.prefix)
    data.setdefault("suffix", start.suffix)
    longest = start.model.max_seqlen
    if start.model.fixed_length_mixers():
        data["packing"], data["seqlen"] = "rows", longest
    elif start.model.position_embeddings:
        data["seqlen"] = min(data.get("seqlen", longest), longest)


def _with_outputs(config: RunConfig, kind: type[ExampleTask]) -> RunConfig:
    """`config` with as many outputs as the examples have classes or values."""
    outputs = open_examples(kind.examples, config.data, "train").outputs
    if outputs is None:
        return config
    head = dataclasses.replace(config.model.head, outputs=outputs)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, head=head))


def _typed(words: Sequence[str], key: str) -> str | None:
    """The value that a command line gives to an option, or None."""
    for word, following in itertools.pairwise([*words, ""]):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == key:
            return value if equals else following
    return None

"""`matmix finetune SOURCE TASK [--key value ...]`: trains a pretrained encoder on labelled examples, or an image
classifier on other pictures."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

import tyro

from matmix.data.loading.examples import open_examples
from matmix.data.loading.images import image_facts
from matmix.data.shell import shell_line
from matmix.launch.fitting import with_fitted_rate, with_fitted_steps
from matmix.launch.many.processes import begin_alone, check_alone, check_parallel, is_one_of_several
from matmix.launch.many.seeds import tasks_of_seeds, train_seeds
from matmix.model import ARCHITECTURES
from matmix.model.config import ModelConfig, model_config_to_dict
from matmix.train.arguments import Recipe
from matmix.train.command import train_phases
from matmix.train.config import InitConfig, RunConfig
from matmix.train.engine.full_state import Weights
from matmix.train.entry import Train
from matmix.train.init.sources import InitSource, source_of
from matmix.train.loaders import make_loader, with_data_facts, with_outputs
from matmix.train.plugins import find_part
from matmix.train.process import logs
from matmix.train.process.distributed import rank_and_world_size
from matmix.train.process.exits import EXIT_OK
from matmix.train.recipe import config_from_dict, plain, resolved_config, write_config
from matmix.train.recipe_files import find_recipe, read_toml
from matmix.train.tasks import TASKS, Task
from matmix.train.tasks.finetuning.base import ExampleTask
from matmix.train.tasks.image_classification import ImageClassification

_OF_RECIPES = ("head", "dropout", "embedding_dropout")
"""What a recipe decides of the model; the rest is the source's."""
_OF_TASKS, _OF_IMAGES = "finetune", "finetune_images"
"""The bundled recipes whose settings a task has that is named without a recipe."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finetune:
    """Train a pretrained encoder on labelled examples, or an image classifier on other pictures. The same command again
    resumes the run.

    SOURCE is a run directory or its URL, an export, or a checkpoint of the papers' code. TASK is a recipe (a TOML file
    or a bundled name), or a task: sequence_classification, multi_label, regression, token_classification,
    question_answering, multiple_choice, embedding; of pictures: image_classification. Any field of a recipe can be
    given, as in --data.examples.train FILE, --epochs 5 or --optimizer.lr 1e-5; for pictures --data.images.path DIR and
    --data.images.size 384. Where nobody gives them, the rate fits the width of the model, and the epochs the number of
    examples: at least 300 steps.

    With --seeds 0 1 2 each seed is a run of its own, RUN_DIR/seed-0 and so on, on one GPU or its share of the cores.
    At the end comes a table of the mean, the sample standard deviation and each seed's value of all metrics, which
    RUN_DIR/seeds.json holds unrounded. The same command goes on where it was stopped.

    On several GPUs: torchrun --nproc-per-node=8 -m matmix.launch.cli finetune SOURCE TASK [--key value ...]; or
    --write-recipe FILE, and then matmix launch local (or torchrun, slurm) FILE.
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
    seeds: tuple[int, ...] = ()
    """Train with each of these seeds, and tell mean and deviation of the scores."""
    parallel: int = 1
    """With --seeds: runs at a time."""
    dry_run: bool = False
    """Show parameters, FLOPs, memory and steps, and train nothing. With --seeds: of the first."""
    write_recipe: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the whole recipe of the run into this file, for matmix launch, and train nothing."""

    def begin(self) -> int:
        """What comes first in a process that is ours; exit code, 0 = go on."""
        trains = not (self.dry_run or self.seeds or self.write_recipe)
        if not trains and is_one_of_several():
            return begin_alone()
        return Train(recipe=self.recipe, dry_run=not trains).begin()

    def run(self, rest: Sequence[str], typed: Sequence[str]) -> int:
        """Trains; returns the exit code (`matmix.train.process.exits`)."""
        if self.seeds and not self.dry_run:
            check_alone("--seeds")
        if self.write_recipe is not None and is_one_of_several():
            raise ValueError("--write-recipe writes a file and trains nothing: give it in one process")
        options = {"step": self.step, "from_scratch": self.from_scratch}
        with logs.shown("info", rank=rank_and_world_size()[0]):
            config = finetuning_config(self.source, self.recipe, list(rest), **options)
        if self.seeds:
            return self._train_seeds(config, rest)
        if "--seeds" in typed:
            raise ValueError("--seeds is given without a seed")
        if self.parallel != 1:
            raise ValueError("--parallel belongs to --seeds: give both")
        if self.write_recipe is not None:
            return _write(config, self.write_recipe)
        return train_phases([config], dry_run=self.dry_run)

    def _train_seeds(self, config: RunConfig, rest: Sequence[str]) -> int:
        if _typed(rest, "--seed") is not None:
            raise ValueError("--seed and --seeds are both given: keep one of them")
        if self.write_recipe is not None:
            raise ValueError("--write-recipe writes the recipe of one run: give it without --seeds")
        check_parallel(self.parallel)
        tasks = tasks_of_seeds(config, self.seeds)
        if self.dry_run:
            return train_phases([tasks[0].config], dry_run=True)
        return train_seeds(tasks, Path(config.run_dir), self.parallel)


def finetuning_config(
    source: str, task: str, overrides: list[str], *, step: int = 0, from_scratch: bool = False
) -> RunConfig:
    """The config of a run that fine-tunes `source`; from_scratch: of a run of the same model with weights of its own.

    Raises FileNotFoundError or ValueError (one line) for a source, a task, examples or options that cannot be used.
    """
    values, kind = read_task(task, overrides)
    start = source_of(InitConfig(from_=source, step=step))
    on_images = issubclass(kind, ImageClassification)
    if not on_images:
        kind = on_examples(kind, values, source, start.model)
    if from_scratch:
        values.pop("init", None)
    else:
        values["init"] = {**values.get("init", {}), "from": source, "step": step}
    data = values.setdefault("data", {})
    if on_images:
        values["model"] = _image_model(start, values.get("model", {}))
        _fill_images(values, start, overrides)
    else:
        values["model"] = _model(start.model, start.words, kind, values.get("model", {}))
        _fill_tokens(data, start)
        _fill_lengths(data, start.model)
    with_fitted_rate(values, start.model.d_model, on_images=on_images)
    name = source.rstrip("/").rpartition("/")[2]
    run_dir = values.pop("run_dir", "") or f"runs/{name}-{Path(task).stem}{'-from-scratch' if from_scratch else ''}"
    config = resolved_config(plain(values), task, overrides, run_dir)
    if config.model.head.outputs == 0:
        config = _with_classes(config) if on_images else _with_outputs(config, kind)
    typed = {word.partition("=")[0] for word in overrides}
    return with_fitted_steps(config, values, typed, on_images=on_images)


def counted(config: RunConfig) -> RunConfig:
    """`config` with the steps of its epochs, which the number of examples decides.

    Raises FileNotFoundError or ValueError (one line) for examples that cannot be used.
    """
    loader = make_loader(config, "train", 0, 1)
    try:
        return with_data_facts(config, loader)
    finally:
        loader.close()


def planned_config(task: str, model: ModelConfig, words: str, overrides: Sequence[str] = ()) -> RunConfig:
    """The config of a run that fine-tunes a model which is yet to be trained, but for its tokens and the number of
    outputs; words: what messages call the model.

    Raises FileNotFoundError or ValueError (one line) for a task or a model that cannot be used.
    """
    values, kind = read_task(task, overrides)
    kind = on_examples(kind, values, words, model)
    values["model"] = _model(model, words, kind, values.get("model", {}))
    _fill_lengths(values.setdefault("data", {}), model)
    with_fitted_rate(values, model.d_model, on_images=False)
    return resolved_config(plain(values), task, overrides, values.get("run_dir", ""))


def read_task(task: str, overrides: Sequence[str]) -> tuple[dict[str, Any], type[Task]]:
    """What the recipe of a task says, and the task.

    Raises FileNotFoundError or ValueError (one line) where there is no such recipe or task.
    """
    usual = {"image_classification": _OF_IMAGES}.get(task, _OF_TASKS)
    values = read_toml(find_recipe(usual if task in TASKS else task))
    objective = values.setdefault("objective", {})
    if task in TASKS:
        objective["name"] = task
    objective["name"] = _typed(overrides, "--objective.name") or objective.get("name", "")
    return values, find_part(objective["name"], TASKS, "objective.name", Task)


def on_examples(
    kind: type[Task], values: dict[str, Any], source: str, model: ModelConfig | None = None
) -> type[ExampleTask]:
    """The task, which the recipe `values` names, if it is one on labelled examples. source, model: what is to be
    fine-tuned on it, as far as that is known.

    Raises ValueError (one line) where it is another task, and says which ones fit the model.
    """
    if issubclass(kind, ExampleTask):
        return kind
    name = values["objective"]["name"]
    if model is None or _fits(kind, model):
        raise ValueError(f'"{name}" is no task on labelled examples: {_going_on(source)} goes on training with it')
    needed = " or ".join(kind.architectures)
    raise ValueError(
        f'"{name}" trains architecture {needed}, and {source} has architecture {model.architecture}: '
        + _tasks_of(model, source)
    )


def _going_on(source: str) -> str:
    """The command that trains a pretrained model on other data than labelled examples."""
    return shell_line("matmix", "train", "RECIPE", "--init.from", source)


def _fits(kind: type[Task], model: ModelConfig) -> bool:
    """Whether a task trains models that see as much of a text as this one: all of it, or what came before. Of
    architectures from outside nothing is known."""
    known = [ARCHITECTURES[name].causal for name in kind.architectures if name in ARCHITECTURES]
    return model.causal in known or len(known) < max(1, len(kind.architectures))


def _tasks_of(model: ModelConfig, source: str) -> str:
    """The bundled tasks for a model, and the commands that take them."""
    fitting = {name: kind for name, kind in TASKS.items() if _fits(kind, model)}
    examples = ", ".join(name for name, kind in fitting.items() if issubclass(kind, ExampleTask))
    others = " or ".join(name for name, kind in fitting.items() if not issubclass(kind, ExampleTask))
    on_text = f"{_going_on(source)} goes on with {others}"
    return f"matmix finetune takes {examples}, and {on_text}" if examples else on_text


def judging_config(
    source: str | Path, task: str, *, step: int | None = None, weights: Weights = "raw"
) -> tuple[RunConfig, InitSource]:
    """The config of a run that would have made the model in `source` by training on a task, but for its examples; and
    the source. Any encoder can be an embedder, of the mean of its features unless the recipe says otherwise.

    Raises FileNotFoundError or ValueError (one line) for a source or a task that cannot be used, also together.
    """
    start = source_of(InitConfig(from_=str(source), step=step or 0, weights=weights))
    values, kind = read_task(task, [])
    kind = on_examples(kind, values, str(source), start.model)
    needed, name = kind.architectures[0], values["objective"]["name"]
    if start.model.architecture in kind.architectures:
        values["model"] = model_config_to_dict(start.model)
    elif start.model.causal or needed != "text_embedder":
        raise ValueError(
            f"{start.words} is a model of architecture {start.model.architecture}, and {name} is scored with a "
            f"{needed}; {shell_line('matmix', 'finetune', 'ENCODER', name)} makes one"
        )
    else:
        own = values.get("model", {}).get("head", {})
        values["model"] = _model(start.model, start.words, kind, {"head": {"pooling": "mean", **own}})
    _fill_tokens(values.setdefault("data", {}), start)
    _fill_lengths(values["data"], start.model)
    return config_from_dict(plain(values), task), start


def _model(model: ModelConfig, words: str, kind: type[ExampleTask], own: dict[str, Any]) -> dict[str, Any]:
    """The table [model]: that of the source with another output, and what a recipe says of head and dropout."""
    if model.causal:
        raise ValueError(
            f"{words} is a {model.architecture}, which sees no later tokens: give an encoder; "
            + _tasks_of(model, "SOURCE")
        )
    values = model_config_to_dict(model)
    head = {name: value for name, value in values.pop("head", {}).items() if name != "outputs"}
    if not model.model_class.takes_head:
        # Of the whole text the first position of an encoder holds nothing that training on masked tokens put there.
        head["pooling"] = "mean"
    architecture = {"architecture": kind.architectures[0]}
    own = {name: value for name, value in own.items() if name in _OF_RECIPES}
    return {**values, **own, **architecture, "head": {**head, **own.get("head", {})}}


def _fill_tokens(data: dict[str, Any], start: InitSource) -> None:
    """Sets what the source says of tokens, unless a recipe does."""
    if start.tokenizer is None and "tokenizer" not in data.get("examples", {}):
        raise ValueError(f"{start.words} has no tokenizer: set data.examples.tokenizer")
    examples = data.setdefault("examples", {})
    if start.tokenizer is not None:
        examples.setdefault("tokenizer", str(start.tokenizer.path))
    examples.setdefault("token_types", start.model.type_vocab_size >= 2)
    data.setdefault("prefix", start.prefix)
    data.setdefault("suffix", start.suffix)


def _image_model(start: InitSource, own: dict[str, Any]) -> dict[str, Any]:
    """The table [model]: that of the source as a classifier of images, and what a recipe says of head and dropout."""
    if not start.model.model_class.takes_images:
        raise ValueError(f"{start.words} is a {start.model.architecture}, which sees no images: give a model that does")
    values = model_config_to_dict(start.model)
    head = {name: value for name, value in values.pop("head", {}).items() if name != "outputs"}
    own = {name: value for name, value in own.items() if name in (*_OF_RECIPES, "drop_path")}
    # What the source has of a head is kept, so that its layers but for the last one can be taken.
    return {**values, **own, "architecture": "image_classifier", "head": {**own.get("head", {}), **head}}


def _fill_images(values: dict[str, Any], start: InitSource, overrides: Sequence[str]) -> None:
    """Sets size, channels, mean and spread of the images to the source's, unless a recipe or the command line gives
    others; the model sees images as large as those that are read."""
    images, seen = values["data"].setdefault("images", {}), values["model"].setdefault("image", {})
    typed = _typed(overrides, "--data.images.size") or _typed(overrides, "--model.image.size")
    size = typed if typed and typed.isdecimal() else images.get("size", start.model.image.size)
    images["size"] = seen["size"] = int(size)
    images.setdefault("channels", start.model.image.channels)
    if start.images is not None:
        for name in ("mean", "std"):
            images.setdefault(name, list(getattr(start.images, name)))


def _with_classes(config: RunConfig) -> RunConfig:
    """`config` with as many outputs as the pictures have classes."""
    model = with_outputs(config.model, len(image_facts(config.data).classes), config.data.images.named)
    return dataclasses.replace(config, model=model)


def _fill_lengths(data: dict[str, Any], model: ModelConfig) -> None:
    """Sets the lengths that the model can have."""
    longest = model.max_seqlen
    if model.fixed_length_mixers():
        data["packing"], data["seqlen"] = "rows", longest
    elif model.position_embeddings:
        data["seqlen"] = min(data.get("seqlen", longest), longest)


def _with_outputs(config: RunConfig, kind: type[ExampleTask]) -> RunConfig:
    """`config` with as many outputs as the examples have classes or values."""
    outputs = open_examples(kind.examples, config.data, "train").outputs
    if outputs is None:
        return config
    return dataclasses.replace(config, model=with_outputs(config.model, outputs, "the training examples"))


def _write(config: RunConfig, path: Path) -> int:
    """Writes the recipe of a run into a new file; exit code."""
    if path.exists():
        raise ValueError(f"--write-recipe: there is a {path} already; give the name of a new file")
    write_config(config, path)
    ranks = shell_line("matmix", "launch", "local", path, "--nproc", "N")
    print(f"{path}: a run in {config.run_dir}. Next: {ranks}, or {shell_line('matmix', 'train', path)}")
    return EXIT_OK


def _typed(words: Sequence[str], key: str) -> str | None:
    """The value that a command line gives to an option, or None."""
    for word, following in itertools.pairwise([*words, ""]):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == key:
            return value if equals else following
    return None

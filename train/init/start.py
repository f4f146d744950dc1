"""Fills a new model with the weights of `init.from`: what is taken, what is new, what is left."""

import dataclasses
import fnmatch
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from matmix.data.artifacts import shell_line
from matmix.data.storage.remote import is_url
from matmix.data.tokenizer import Tokenizer
from matmix.model import build_model
from matmix.model.backbone import Backbone
from matmix.model.config import ModelConfig, model_config_to_dict
from matmix.model.interop.importing.exported import load_weights
from matmix.train.activation import compute_in_bfloat16
from matmix.train.config import InitConfig, RunConfig
from matmix.train.engine.base import Engine, persistent_tensors
from matmix.train.engine.full_state import MODEL, RenamedState
from matmix.train.errors import require
from matmix.train.init import InitSource, source_of
from matmix.train.optim.groups import short_names
from matmix.train.recipe import config_from_dict, differences, differing, with_defaults, with_step
from matmix.train.run.directory import Change, refused_changes
from matmix.train.tasks import Task

logger = logging.getLogger(__name__)

Shapes = Mapping[str, tuple[int, ...]]
_SIZES = ("architecture.", "options.", "vocab_size.", "max_seqlen.", "type_vocab_size.", "head.", "image.size.")
# Besides what a run that is started again may change.
_BRANCH_MAY_CHANGE = ("global_batch_size", "data.seqlen", "objective.masking.probability")


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
    """The weights of a source that a model takes."""

    source: InitSource
    taken: dict[str, str]
    """Names in the model -> names in the source."""
    grown: dict[str, tuple[int, int]]
    """Names of those with more rows in the model -> rows there, rows here."""
    resized: dict[str, tuple[int, ...]]
    """Names of those that belong to images of another size -> the shape here."""
    new: list[str]
    left: list[str]

    def words(self) -> str:
        """Says in one line what is taken."""
        grown = [f"{name} {old} -> {new} rows" for name, (old, new) in self.grown.items()]
        parts = [
            f"weights from {self.source.words}: {len(self.taken)} tensors taken",
            *([f"with more rows here: {', '.join(grown)}"] if grown else []),
            *([f"interpolated for another size of images: {', '.join(self.resized)}"] if self.resized else []),
            f"new: {', '.join(short_names(self.new)) or 'none'}",
            f"left: {', '.join(short_names(self.left)) or 'none'}",
        ]
        return "; ".join(parts)


class _Taken(RenamedState):
    """The weights that are taken, by the model's names."""

    def __init__(self, start: Start, model: ModelConfig) -> None:
        super().__init__(start.source.state, {MODEL + ours: MODEL + theirs for ours, theirs in start.taken.items()})
        self._model, self._resized = model, {MODEL + name for name in start.resized}
        for name, shape in start.resized.items():
            self.entries[MODEL + name] = dataclasses.replace(self.entries[MODEL + name], shape=shape)

    def read(self, key: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        if key not in self._resized:
            return super().read(key, start, stop)
        whole, name = self._state.read_whole(self._keys[key]), key.removeprefix(MODEL)
        return self._model.model_class.resized_parameter(name, whole, self._model).flatten()[start:stop]


def start_weights(config: RunConfig, engine: Engine, tokenizer: Tokenizer | None) -> None:
    """Fills the model of `engine`, as the seed has drawn it, with what `config.init` takes of its source, and says so
    in one line, on all ranks. Raises FileNotFoundError or ValueError (one line), before anything changes."""
    source = source_of(config.init)
    check_tokenizers(source, tokenizer, config.init)
    shapes = {name: tuple(shape) for name, shape in engine.shapes().items()}
    start = plan_start(source, config.model, shapes, config.init)
    engine.load_weights(_Taken(start, config.model))
    logger.info(start.words())
    if different := _differences(source.model, config.model):
        logger.warning(f"the model computes otherwise than that of {source.words}: {different}")


def give_teacher(task: Task, config: RunConfig, tokenizer: Tokenizer | None, device: torch.device) -> None:
    """Gives a task that learns from one the model that `config.objective.teacher` names, on all ranks. tokenizer: of
    the data, if it is known. Raises FileNotFoundError or ValueError (one line)."""
    if not task.takes_teacher:
        return
    key, init = "objective.teacher", with_step(InitConfig(from_=config.objective.teacher))
    require(config.engine.context == 1, f"{key}: a teacher reads whole rows; set engine.context to 1")
    if not is_url(init.from_) and not Path(init.from_).exists():
        raise FileNotFoundError(f"{key}: there is no {init.from_}; train it first, or name another one")
    source = source_of(init)
    check_tokenizers(source, tokenizer, init, key=key)
    try:
        source.model.check_seqlen(config.data.seqlen)
    except ValueError as error:
        raise ValueError(f"{key}: {source.words}: {error}") from None
    model = build_model(source.model)
    load_start(model, source)
    if config.engine.precision == "bf16":
        compute_in_bfloat16(model, device)
    task.learn_from(model.to(device), source.words, config.model)
    logger.info(f"teacher: {source.words}")


def branched_from(config: RunConfig, source: InitSource | None = None) -> tuple[Path, list[Change]]:
    """Returns the checkpoint that `config` goes on from as a branch of another run, and the changes to the config
    there; source: what `config.init` names, if it is open. Raises FileNotFoundError or ValueError (one line) for what
    is no run, for changes that make it another run's, and for a decay from a step that has not the peak rate."""
    source = source or source_of(config.init)
    if source.run is None:
        raise ValueError(f"init.from: {source.words} has weights alone, and no step to go on from")
    checkpoint, extra = source.run.checkpoint, source.run.manifest["extra"]
    theirs, step = with_defaults(extra["config"]), extra["train_state"]["step"]
    changes = [change for change in differences(theirs, config) if not change[0].startswith("init.")]
    if text := refused_changes(change for change in changes if change[0] not in _BRANCH_MAY_CHANGE):
        raise ValueError(f"init.from: {source.words} was trained with another config ({text}): it can't go on so")
    if step >= config.steps:
        raise ValueError(f"steps = {config.steps} does not lie behind {source.words}, from which the run goes on")
    there = config_from_dict(theirs, str(checkpoint))
    warmup, stable = there.schedule.parts(there.steps)
    if config.init.decay and step < warmup:
        raise ValueError(f"init.decay: {source.words} is inside of the warm-up, which lasts to step {warmup:g}")
    if config.init.decay and step > stable:
        advice = "take a checkpoint of that step or before" if stable > warmup else "that schedule has no stable phase"
        fall = f"{there.schedule.name} falls from step {stable:,g} on"
        raise ValueError(f"init.decay: {source.words} is inside of a decay ({fall}): {advice}")
    return checkpoint, [change for change in changes if change[0] != "run_dir"]


def load_start(model: Backbone, source: InitSource) -> None:
    """Fills a whole model on one device with the weights of `source`, which has all of them and maybe a head that is
    left. Raises ValueError (one line) for what does not fit."""
    shapes = {name: tuple(tensor.shape) for name, tensor in persistent_tensors(model)}
    start = plan_start(source, model.config, shapes, InitConfig())
    assert not start.new, "an architecture of the source's own has no new weights"
    taken = _Taken(start, model.config)
    load_weights(model, ((name, taken.read(MODEL + name).view(shapes[name])) for name in shapes), source.words)


def planned_start(config: RunConfig) -> tuple[RunConfig, str]:
    """Returns `config`, with the source's vocabulary where it leaves that to the data, and a line that says what its
    run would begin with. Raises as `start_weights`, or `branched_from`."""
    source = source_of(config.init)
    if not config.model.vocab_size:
        model = dataclasses.replace(config.model, vocab_size=source.model.vocab_size)
        config = dataclasses.replace(config, model=model)
    if config.init.goes_on:
        branched_from(config, source)
        return config, f"all of {source.words}: weights, optimizer, step and position in the data"
    model = build_model(config.model, device="meta")
    shapes = {name: tuple(tensor.shape) for name, tensor in persistent_tensors(model)}
    return config, plan_start(source, config.model, shapes, config.init).words()


def plan_start(source: InitSource, model: ModelConfig, shapes: Shapes, init: InitConfig) -> Start:
    """shapes: of the model's parameters and persistent buffers. Raises ValueError (one line) for a weight of either
    side that is neither in the other nor named as new or left, for a shape that does not fit, and for words in `init`
    that name nothing."""
    entries = source.state.entries.items()
    theirs = {key.removeprefix(MODEL): entry.shape for key, entry in entries if key.startswith(MODEL)}
    renamed = _renamed(theirs, init, source.words)
    ignored: set[str] = set()
    for pattern in init.ignore:
        if not (named := fnmatch.filter([*shapes, *renamed], pattern)):
            raise ValueError(f'init.ignore: "{pattern}" names no weight of the model, nor of {source.words}')
        ignored.update(named)
    ours_new, theirs_left = model.model_class.new_parameters, source.model.model_class.head_parameters
    start = Start(source, {}, {}, {}, [], [])
    # Images of other classes: the layers that tell them apart are drawn anew, where their shapes are others.
    renewed = {
        name
        for name, shape in shapes.items()
        if model.model_class.inputs == "images" and name.startswith(ours_new) and theirs.get(renamed.get(name)) != shape
    }
    for name, shape in shapes.items():
        if name in ignored | renewed or (name not in renamed and name.startswith(ours_new)):
            start.new.append(name)
        elif name in renamed:
            if shape != (there := theirs[renamed[name]]):
                if _resized_shape(name, there, model) == shape:
                    start.resized[name] = shape
                else:
                    start.grown[name] = _grown(name, there, shape, model, source.words)
            start.taken[name] = renamed[name]
        else:
            problem = f"init.from: {source.words} has no {name}, which the model has in the shape {shape}"
            advice = "init.ignore leaves it to the seed, and init.rename takes what has another name there"
            raise ValueError(f"{problem}; {advice}")
    # What another kind of output was made with has no use here.
    unused = tuple(prefix for prefix in theirs_left if not any(name.startswith(prefix) for name in shapes))
    for name, key in renamed.items():
        if name in start.taken:
            continue
        if name not in ignored | renewed and not name.startswith(unused):
            problem = f"{key} of the shape {theirs[key]} in {source.words} has no place in the model"
            advice = "init.ignore leaves it there, and init.rename gives it another name"
            raise ValueError(f"init.from: {problem}; {advice}")
        start.left.append(key)
    if not start.taken:
        raise ValueError(f"init.from: nothing of {source.words} is taken")
    return start


def _renamed(names: Iterable[str], init: InitConfig, words: str) -> dict[str, str]:
    """Returns the name here -> the name in the source."""
    pairs = [pair.split("=") for pair in init.rename]
    renamed: dict[str, str] = {}
    used: set[str] = set()
    for name in names:
        old, new = next(((old, new) for old, new in pairs if name.startswith(old)), ("", ""))
        used.add(old)
        ours = new + name.removeprefix(old)
        if ours in renamed:
            raise ValueError(f"init.rename: {renamed[ours]} and {name} of {words} would both be {ours}")
        renamed[ours] = name
    if idle := [old for old, _ in pairs if old not in used]:
        raise ValueError(f'init.rename: no weight of {words} begins with "{idle[0]}"')
    return renamed


def _resized_shape(name: str, theirs: tuple[int, ...], model: ModelConfig) -> tuple[int, ...]:
    """Returns the shape that `model` gives a weight of a model that was trained on images of another size."""
    try:
        return tuple(model.model_class.resized_parameter(name, torch.empty(theirs, device="meta"), model).shape)
    except (RuntimeError, ValueError):  # it is no grid of positions
        return theirs


def _grown(
    name: str, theirs: tuple[int, ...], ours: tuple[int, ...], model: ModelConfig, words: str
) -> tuple[int, int]:
    """Returns the rows there and here of a weight that may have more here. Raises ValueError for other shapes."""
    field = model.model_class.growing_parameters.get(name)
    if field is not None and theirs[1:] == ours[1:]:
        if theirs[0] < ours[0]:
            return theirs[0], ours[0]
        advice = f"; set model.{field} = {theirs[0]}, or more"
    else:
        advice = "; init.ignore leaves it to the seed" if name.startswith(model.model_class.new_parameters) else ""
    raise ValueError(f"init.from: {name} has the shape {theirs} in {words}, and {ours} here{advice}")


def check_tokenizers(source: InitSource, tokenizer: Tokenizer | None, init: InitConfig, key: str = "init.from") -> None:
    """Raises ValueError (one line) where ids of the source stand for other pieces in the data, which may have more;
    key: what names the source."""
    theirs = source.tokenizer
    if init.other_tokenizer or tokenizer is None or theirs is None or tokenizer.sha256 == theirs.sha256:
        return
    common = range(min(theirs.vocab_size, tokenizer.vocab_size))
    differing = (index for index in common if theirs.piece(index) != tokenizer.piece(index))
    if (index := next(differing, None)) is not None:
        what = f"id {index} is {theirs.piece(index)!a} there and {tokenizer.piece(index)!a} in the data"
    elif theirs.vocab_size > tokenizer.vocab_size:
        what = f"it has {theirs.vocab_size} ids, that of the data {tokenizer.vocab_size}"
    else:
        return
    problem = f"{key}: the tokenizer of {source.words} is not that of the data ({what})"
    prepare = f"prepare the data with that one ({shell_line('matmix', 'prepare', '--tokenizer', theirs.path)})"
    either = ", or set init.other_tokenizer = true" if key == "init.from" else ""
    raise ValueError(f"{problem}: {prepare}{either}")


def _differences(theirs: ModelConfig, ours: ModelConfig) -> str:
    """Lists the options of the model that are other than the source's, but for sizes, output and dropout."""
    rows = differing(model_config_to_dict(theirs), model_config_to_dict(ours))
    rows = [(key, *values) for key, *values in rows if None not in values and "dropout" not in key]
    return ", ".join(f"model.{key} {old!r} -> {new!r}" for key, old, new in rows if not f"{key}.".startswith(_SIZES))

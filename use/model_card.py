"""Writes the part of an export's model card that tells of the run: data, optimizer, losses, controls and scores."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from matmix.data.artifacts import one_line, read_json_lines
from matmix.data.manifest import Manifest
from matmix.data.modalities import modality_of
from matmix.data.storage.storage import Storage
from matmix.model.build import count_parameters
from matmix.model.mixers.convolutions.short import Convolution
from matmix.train.arguments import find_part
from matmix.train.config import RunConfig
from matmix.train.evaluators.base import of_averaged
from matmix.train.run.directory import RunDirectory
from matmix.train.run.trained import Trained
from matmix.train.tasks import TASKS, Task, unit_of
from matmix.train.tasks.image_classification import ImageClassification
from matmix.train.tasks.metrics import control_of
from matmix.train.tasks.token_prediction import TokenPrediction

NONE_KNOWN = (
    "No run of a control is known, such as the same model trained without mixers: what the mixers are good for, these\n"
    "numbers do not show. `matmix compare` trains controls, and `matmix export --control RUN` names one."
)


def notes_on(trained: Trained, controls: Sequence[str] = ()) -> str:
    """Returns Markdown: a table of the training, and one of losses. controls: runs whose losses stand beside it. Raises
    ValueError (one line) where such a run cannot."""
    config, extra = trained.config, trained.manifest["extra"]
    counted, step = extra["train_state"], extra["train_state"]["step"]
    modality = modality_of(config.data)
    names = modality.names(config.data)
    manifests = [_manifest(path, trained) for path in modality.datasets(config.data)]
    evaluation = extra.get("evaluation") or _last(trained.run.path, "validation", step)
    evaluation = of_averaged(evaluation) if trained.which == "ema" else evaluation
    sequences = "examples, texts of up to" if config.data.examples.train else "sequences of"
    unit, batch = unit_of(config.objective.name), f"{config.global_batch_size:,}"
    rows = {"data": ", ".join(names)}
    for name, manifest in zip(names, manifests, strict=False):
        if manifest is not None:
            held = (f"{split} {modality.split_words(info)}" for split, info in manifest.splits.items())
            rows["documents" + (f" of {name}" if len(names) > 1 else "")] = "; ".join(held)
    clipped = f"clipped at {norm:g}" if (norm := config.optimizer.max_grad_norm) else "not clipped"
    rows |= {
        "begins with": _beginning(config),
        f"{unit} seen": f"{counted['tokens']:,}",
        "batch": f"{batch} {sequences} {config.data.seqlen:,} tokens" if unit == "tokens" else f"{batch} {unit}",
        "objective": config.objective.name,
        "optimizer": f"{config.optimizer.name}, weight decay {config.optimizer.weight_decay:g}, gradients {clipped}",
        "learning rate": config.schedule.words(config.steps, config.optimizer.lr),
        "precision": config.engine.precision,
        "seed": str(config.seed),
        "weights": _weights(trained),
    }
    if training := _last(trained.run.path, "train", step):
        rows |= _numbers(config, {"loss": training.get("loss")}, f"training, step {training['step']:,}")
    rows |= _numbers(config, evaluation, f"validation, step {evaluation.get('step', step):,}")
    lines = [f"| {name} | {_cell(value)} |" for name, value in rows.items() if value]
    table = "\n".join([f"Trained for {step:,} steps with matmix:", "", "| | |", "|---|---|", *lines])
    known = dict(_control(trained, path) for path in (*controls, *_controls_beside(trained)))
    if isinstance(evaluation.get("loss"), float) and config.objective.name in TASKS:
        losses = (*_own_losses(config, evaluation), *known.items(), *_trivial_losses(config, manifests))
        lines = [f"| {_cell(name)} | {value:.4f} |" for name, value in losses]
        heading = f"| | validation loss, {config.task().loss_metric.unit or 'nats'} |"
        table = "\n".join([table, "", heading, "|---|---|", *lines, *([] if known else ["", NONE_KNOWN])])
    return table


def _beginning(config: RunConfig) -> str:
    """Says whose weights the run began with, where it was another's: its name, not where it lay."""
    init, names = config.init, config.init.from_.rstrip("/").split("/")
    name = "/".join(names[-2:] if names[-1].startswith("phase-") else names[-1:])
    step = f"step {init.step:,} of " if init.step else ""
    return f"{'all' if init.goes_on else 'the weights'} of {step}{name}" if name else ""


def _weights(trained: Trained) -> str:
    """Says what the weights are where they are not just those that were trained."""
    if trained.which == "ema":
        return f"their moving average, decay {trained.config.ema.decay:g}"
    steps = trained.manifest["extra"].get("averaged_steps")
    return f"mean of the checkpoints of steps {', '.join(map(str, steps))}" if steps else ""


def _cell(text: str) -> str:
    return one_line(text).replace("|", " ")


def _last(run: Path, kind: str, step: int) -> dict[str, Any]:
    """Returns the last record of a kind up to a step, as far as the run's records are at hand."""
    records = (r for r in read_json_lines(run / "metrics.jsonl") if r.get("kind") == kind)
    return ([{}] + [r for r in records if isinstance(r.get("step"), int) and r["step"] <= step])[-1]


def _numbers(config: RunConfig, measured: Mapping[str, Any], where: str) -> Iterator[tuple[str, str]]:
    """Yields titles and values of a task's measures; of a task from outside, which is not imported, their names."""
    if config.objective.name not in TASKS:
        numbers = {name: value for name, value in measured.items() if type(value) is float}
        yield from ((f"{name.replace('_', ' ')} ({where})", f"{value:.4f}") for name, value in numbers.items())
        return
    task = config.task()
    for metric in (task.loss_metric, *task.metrics):
        if type(value := measured.get(metric.name)) is float:
            yield f"{metric.title} ({where})", metric.number(value)
            if type(control := control_of(metric, measured)) is float:
                yield f"{metric.title} of {metric.control} ({where})", metric.number(control)


def _manifest(path: str, trained: Trained) -> Manifest | None:
    """Returns that of a prepared dataset; None where it is not at hand, or was made again with another tokenizer."""
    try:
        manifest = Storage(path, trained.config.data.cache_dir).manifest
    except (OSError, ValueError):  # a card says what is known, and needs no dataset
        return None
    wanted = trained.manifest["extra"].get("tokenizer_sha256")
    same = manifest.tokenizer is None or wanted in (None, manifest.tokenizer.sha256)
    return manifest if same else None


# -- Losses of this model and of others --------------------------------------------------------------------------------


def _own_losses(config: RunConfig, evaluation: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    yield "**this model**", evaluation["loss"]
    if isinstance(without := evaluation.get("loss_without_mixing"), float):
        batches = config.evaluation.ablation_batches
        where = f"in the first {batches:,} global batch{'es' * (batches != 1)} of the validation split"
        if isinstance(gain := evaluation.get("mixing_gain"), float):  # a batch may be easier than the whole split
            where += f", where it has {without - gain:.4f} as it is"
        yield f"this model with each mixer's output replaced by its mean, {where}", without


def _trivial_losses(config: RunConfig, manifests: Sequence[Manifest | None]) -> Iterator[tuple[str, float]]:
    """Yields the losses in nats of models that know nothing, or only frequencies: for tokens and images."""
    task = find_part(config.objective.name, TASKS, "objective.name", Task)
    if issubclass(task, ImageClassification):
        yield f"every class alike: ln {config.model.head.outputs:,}", math.log(config.model.head.outputs)
    elif issubclass(task, TokenPrediction) and manifests:
        yield f"every token alike: ln {config.model.vocab_size:,}", math.log(config.model.vocab_size)
        if len(manifests) == 1 and manifests[0] is not None and manifests[0].unigram_entropy:
            yield "frequencies of single tokens: their entropy", manifests[0].unigram_entropy


def _controls_beside(trained: Trained) -> Iterator[str]:
    """Yields the finished controls, without mixers but short convolutions, of the same comparison and seed:
    COMPARISON/<entry>/seed-0, or COMPARISON/<entry>/<variant>/seed-0 of the same variant."""
    run = trained.run.path.resolve()
    if not re.fullmatch(r"seed-\d+", run.name) or len(run.parents) < 3:
        return
    homes = {run.parents[1]: f"*/{run.name}", run.parents[2]: f"*/{run.parent.name}/{run.name}"}
    home = next((home for home in homes if (home / "comparison.toml").is_file()), None)
    for path in [] if home is None else sorted(home.glob(homes[home])):
        other = RunDirectory(path)
        finished = path != run and other.read_summary() is not None
        if finished and set(other.read_config().model.mixer_names()) <= {Convolution.name}:
            yield str(path)


def _control(trained: Trained, path: str) -> tuple[str, float]:
    """Returns the table's words for a run, and its last validation loss."""
    config, ours = RunDirectory(Path(path)).read_config(), trained.config
    same = (config.objective.name, config.data.path, config.data.mixture, config.data.seqlen)
    if same != (ours.objective.name, ours.data.path, ours.data.mixture, ours.data.seqlen):
        raise ValueError(
            f"{path} is no control of {trained.run.path}: its objective, data or data.seqlen are others, so that the "
            "losses cannot be compared"
        )
    evaluation = _last(Path(path), "validation", config.steps)
    if not isinstance(loss := evaluation.get("loss"), float):
        raise ValueError(f"{path} has no validation loss in its metrics.jsonl; it cannot stand beside the model")
    mixers = ", ".join(config.model.mixer_names()) or "no mixer"
    size = f"{count_parameters(config.model):,} parameters"
    batches = f"{evaluation['step']:,} steps of {config.global_batch_size:,}"
    return f"control: {mixers} ({size}, {batches}, seed {config.seed})", loss

"""`matmix export RUN --out DIR` and `matmix import --from KIND FILE OUT`: write directories that transformers
loads."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro

from matmix.data.artifacts import artifact_name, artifact_path
from matmix.data.loading.images import image_facts
from matmix.data.shell import shell_line
from matmix.data.tokenizer import Tokenizer
from matmix.launch.export_notes import notes_on
from matmix.model.architecture import Outputs
from matmix.model.images.config import ImageInputs
from matmix.model.interop import read_checkpoint
from matmix.model.interop.export.directory import SUMS, check_target, export_model, exported_files
from matmix.train.arguments import RunFolder
from matmix.train.checkpoint.files import sha256
from matmix.train.config import RunConfig
from matmix.train.engine.full_state import Weights
from matmix.train.run.trained import Trained, open_trained
from matmix.train.tasks import TASKS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export:
    """Write a run's weights as a directory that transformers loads by itself."""

    source: RunFolder = ""
    out: str | None = None
    """Directory to write (must not hold anything else)."""
    check: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None
    """Compare the files of an export with their hashes."""
    step: int | None = None
    """Checkpoint to export; default: the newest."""
    weights: Weights = "raw"
    """The weights that the run goes on with, or with ema their average. What is not asked for is not averaged: whether
    the average is the better one depends on its decay and the steps, and evaluations tell."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the weights."""
    max_shard_bytes: int = 5 * 10**9
    """Size of a weight file."""
    license: str = ""
    """Of the weights, for the model card, such as apache-2.0; default: unknown."""
    language: tuple[str, ...] = ()
    """Of the texts, for the model card, such as en; default: unknown."""
    onnx: bool = False
    """Also write model.onnx, of models of texts; needs the extra onnx."""
    control: tuple[RunFolder, ...] = ()
    """Runs on the same data whose validation losses the model card puts beside that of the model. Those that a
    comparison trained beside it are found without."""

    def run(self, rest: Sequence[str], typed: Sequence[str]) -> int:
        """Exports or checks; the exit code."""
        if self.check is not None:
            if self.source or self.out is not None:
                raise ValueError("--check DIR looks at an export that is there: leave RUN and --out out")
            check_export(self.check)
            return 0
        if not self.source or self.out is None:
            raise ValueError("matmix export RUN --out DIR, or matmix export --check DIR")
        options = {"dtype": self.dtype, "max_shard_bytes": self.max_shard_bytes, "licence": self.license}
        about = {"languages": self.language, "controls": self.control, "onnx": self.onnx}
        export_run(self.source, self.out, step=self.step, weights=self.weights, **options, **about)
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Import:
    """Turn a checkpoint of another project into an export directory."""

    kind: Annotated[Literal["hydra", "mru-lm"], tyro.conf.arg(name="from")]
    """Whose it is."""
    file: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="FILE")]
    """.safetensors, .pt, .bin or a directory in transformers' layout."""
    out: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="OUT")]
    """Directory to write."""

    def run(self, rest: Sequence[str], typed: Sequence[str]) -> int:
        """Imports; the exit code."""
        import_reference(self.kind, self.file, self.out)
        return 0


def export_run(
    run_dir: str | Path,
    out_dir: str | Path,
    *,
    step: int | None = None,
    weights: Weights = "raw",
    dtype: str = "float32",
    max_shard_bytes: int = 5 * 10**9,
    licence: str = "",
    languages: Sequence[str] = (),
    controls: Sequence[str] = (),
    onnx: bool = False,
) -> Path:
    """Write the weights of a run as a directory that transformers loads without matmix, or, for an architecture that
    transformers has no form for, as weights and configuration.

    Args:
        run_dir: the run, a folder or a URL; its newest valid checkpoint is taken, or that of `step`.
        out_dir: must not exist, or be empty; appears whole or not at all.
        weights: "raw", or "ema", the average that a run with [ema] keeps.
        dtype: "float32", "bfloat16" or "float16".
        max_shard_bytes: largest size of a file of weights, and what bounds the memory this needs.
        licence: of the weights, for the model card; "" = unknown.
        languages: of the texts, for the model card, such as "en"; () = unknown.
        controls: runs whose validation losses the model card puts beside that of the model.
        onnx: also write model.onnx.
    Returns: out_dir. Raises FileNotFoundError or ValueError (one line).
    """
    check_target(Path(out_dir))
    trained = open_trained(run_dir, step, weights=weights)
    config, checkpoint = trained.config, trained.checkpoint
    tokenizer = trained.tokenizer if config.model.model_class.tokens else None
    # A task from outside is not imported: it has to be known already.
    outputs = config.task().outputs(config.data) if config.objective.name in TASKS else Outputs()
    if onnx:
        print("Writing model.onnx as well, which takes a minute or more ...", flush=True)
    out = export_model(
        config.model,
        trained.weights(),
        None if tokenizer is None else tokenizer.path,
        out_dir,
        special={} if tokenizer is None else tokenizer.special,
        prefix=config.data.prefix,
        suffix=config.data.suffix,
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
        max_length=config.data.seqlen,
        notes=notes_on(trained, controls),
        licence=licence,
        languages=languages,
        outputs=outputs,
        images=image_inputs(config),
        onnx=onnx,
    )
    which = ", averaged weights," if weights == "ema" else ""
    print(f"Exported {checkpoint.name} of {run_dir}{which} to {out} ({_size(out)}).")
    if hint := other_weights(trained):
        print(hint)
    return out


def image_inputs(config: RunConfig) -> ImageInputs | None:
    """What the images of a run's evaluation are made by, for the image processor; None where it has none."""
    images = config.data.images
    if not config.model.model_class.takes_images or not images.datasets:
        return None
    mean, std = images.mean, images.std
    if not mean or not std:
        facts = image_facts(config.data)
        mean, std = mean or facts.mean, std or facts.std
    interpolation = "bicubic" if images.interpolation == "random" else images.interpolation
    return ImageInputs(mean=mean, std=std, crop=images.crop, size=images.size, interpolation=interpolation)


def other_weights(trained: Trained) -> str:
    """A line that says so where the weights that were not chosen had the lower loss in the checkpoint's evaluation, or
    ""."""
    found = trained.manifest["extra"].get("evaluation") or {}
    losses = {"raw": found.get("loss"), "ema": found.get("ema_loss")}
    if not all(isinstance(loss, float) for loss in losses.values()):
        return ""
    other = "raw" if trained.which == "ema" else "ema"
    if losses[other] >= losses[trained.which]:
        return ""
    return (
        f"Its {'averaged' if other == 'ema' else 'raw'} weights had the lower validation loss, {losses[other]:.4f} in "
        f"place of {losses[trained.which]:.4f}: {shell_line('--weights', other)} takes those."
    )


def import_reference(kind: str, file: str | Path, out_dir: str | Path) -> Path:
    """Turn a checkpoint of another project into a directory that transformers loads without matmix.

    Args:
        kind: "hydra" or "mru-lm".
        file: the checkpoint, a file or a directory. A tokenizer.json or tokenizer.model next to the weights
            is taken along; without one the export has no tokenizer.
        out_dir: as for `export_run`.
    Returns: out_dir. Raises FileNotFoundError or ValueError (one line).
    """
    check_target(Path(out_dir))
    config, state = read_checkpoint(kind, file)
    folder = Path(file) if Path(file).is_dir() else Path(file).parent
    found = next((folder / n for n in ("tokenizer.json", "tokenizer.model") if (folder / n).is_file()), None)
    tokenizer = None if found is None else Tokenizer.load(found)
    out = export_model(
        config,
        state,
        found,
        out_dir,
        special={} if tokenizer is None else tokenizer.special,
        # The encoders of that project were trained on [CLS] text [SEP]; its language models on bare text.
        prefix="none" if config.causal else "cls",
        suffix="none" if config.causal else "sep",
        notes=f"Converted from a {kind} checkpoint by matmix.",
    )
    what = "without a tokenizer" if tokenizer is None else "with its tokenizer"
    print(f"Imported {file} to {out} ({_size(out)}), {what}.")
    return out


def check_export(directory: str | Path) -> None:
    """Compare every file of an export with the hash that it was written with.

    Raises FileNotFoundError where there is no export, ValueError (one line) that names the first file that is missing,
    changed, or was added.
    """
    directory = Path(directory)
    sums = directory / SUMS
    if not sums.is_file():
        raise FileNotFoundError(f"{directory} holds no {SUMS}: it is no export, or one of an earlier version")
    listed: dict[str, str] = {}
    for line in sums.read_bytes().decode(errors="replace").splitlines():
        value, separator, name = line.partition("  ")
        if not separator or len(value) != 64:
            raise ValueError(f"{sums} is damaged: {line[:80]!a} is no hash of a file")
        listed[artifact_name(name, sums, nested=True)] = value
    if (extra := _find_unlisted(directory, listed)) is not None:
        raise ValueError(f"{directory} holds {extra!a}, which it was not written with")
    for name, value in listed.items():
        path = artifact_path(directory, name, sums, nested=True)
        if not path.is_file():
            raise ValueError(f"{directory} lacks {name}")
        if sha256(path) != value:
            raise ValueError(f"{path} is not as it was written: its SHA-256 differs; export again")
    print(f"{directory}: {len(listed)} files ({_size(directory)}), all as they were written.")


def _find_unlisted(directory: Path, listed: Collection[str]) -> str | None:
    """The first file or folder in an export that is none of those listed, nor the folder of one."""
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if name in (*listed, SUMS) or name.partition("/")[0] in ("__pycache__", ".cache", ".git"):
            continue
        if path.is_symlink() or not any(other.startswith(f"{name}/") for other in listed):
            return name
    return None


def _size(directory: Path) -> str:
    return f"{sum(file.stat().st_size for file in exported_files(directory)) / 1e6:,.1f} MB"

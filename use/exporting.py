"""Writes models in other forms: directories that transformers loads, and runs that any engine goes on with."""

import dataclasses
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from matmix.data.artifacts import artifact_name, artifact_path, shell_line
from matmix.data.storage.files import sync_directory
from matmix.data.storage.remote import is_url
from matmix.data.tokenizer import Tokenizer
from matmix.model.architecture import Outputs
from matmix.model.interop import read_checkpoint
from matmix.model.interop.export.directory import SUMS, check_target, export_model, exported_files, new_directory
from matmix.model.interop.export.model_card import call_that_loads
from matmix.train.checkpoint import manifest
from matmix.train.checkpoint.lanes import SUBDIRECTORY as CARRIED
from matmix.train.engine.full_state import FullState, layout_of_moments
from matmix.train.engine.full_tensors import KIND, SUBDIRECTORY, write_full
from matmix.train.engine.kinds import open_full
from matmix.train.recipe import write_config
from matmix.train.run.directory import RunDirectory
from matmix.train.run.trained import Trained, open_trained
from matmix.train.state import Weights
from matmix.train.tasks import TASKS
from matmix.use.model_card import notes_on
from matmix.use.opening import TrainedModel, image_inputs, open_model


def export_run(
    source: TrainedModel | str | Path,
    out_dir: str | Path,
    *,
    step: int | None = None,
    weights: Weights = "raw",
    controls: Sequence[str] = (),
    onnx: bool = False,
    **options: Any,
) -> Path:
    """Writes the weights of a run as a directory that transformers loads without matmix, or, for an architecture that
    transformers has no form for, as weights and configuration.

    Args:
        source: a run that was opened, or its folder or URL: its newest valid checkpoint is taken, or that of `step`.
        out_dir: must not exist, or be empty; appears whole or not at all.
        weights: of a run by its name: "raw", or "ema", the average that a run with [ema] keeps.
        controls: runs whose validation losses the model card puts beside that of the model.
        onnx: also write model.onnx.
        options: dtype, max_shard_bytes, licence and languages, as of `export_model`.
    Returns: out_dir. Raises FileNotFoundError or ValueError (one line).
    """
    check_target(Path(out_dir))
    opened = source if isinstance(source, TrainedModel) else open_model(source, step=step, weights=weights)
    if (trained := opened.run) is None:
        raise ValueError(f"{opened.name} is no run: matmix export takes the weights of one")
    config = trained.config
    # A task from outside is not imported: it has to be known already.
    outputs = config.task().outputs(config.data) if config.objective.name in TASKS else Outputs()
    if onnx:
        print("Writing model.onnx as well, which takes a minute or more ...", flush=True)
    out = export_model(
        config.model,
        trained.weights(),
        **_with_tokenizer(trained.tokenizer if config.model.model_class.inputs == "tokens" else None),
        out_dir=out_dir,
        prefix=config.data.prefix,
        suffix=config.data.suffix,
        max_length=config.data.seqlen,
        notes=notes_on(trained, controls),
        outputs=outputs,
        images=image_inputs(config),
        onnx=onnx,
        **options,
    )
    which = ", averaged weights," if opened.averaged else ""
    print(f"Exported {trained.checkpoint.name} of {opened.name}{which} to {out} ({_size(out)}).")
    evaluation = trained.manifest["extra"].get("evaluation") or {}
    losses = {"raw": evaluation.get("loss"), "ema": evaluation.get("ema_loss")}
    other = "raw" if trained.which == "ema" else "ema"
    if all(isinstance(loss, float) for loss in losses.values()) and losses[other] < losses[trained.which]:
        print(
            f"Its {'averaged' if other == 'ema' else 'raw'} weights had the lower validation loss, {losses[other]:.4f} "
            f"in place of {losses[trained.which]:.4f}: {shell_line('--weights', other)} takes those."
        )
    load = call_that_loads(config.model, outputs, repr(str(out)))
    print(f"Next, in Python: {load}; {out / 'README.md'} has the whole example.")
    return out


def import_reference(kind: str, file: str | Path, out_dir: str | Path) -> Path:
    """Turns a checkpoint of another project into a directory that transformers loads without matmix.

    kind: "hydra" or "mru-lm"; file: the checkpoint, a file or a directory. A tokenizer.json or tokenizer.model next to
    the weights is taken along; without one the export has no tokenizer. Raises FileNotFoundError or ValueError (one
    line).
    """
    check_target(Path(out_dir))
    config, state = read_checkpoint(kind, file)
    folder = Path(file) if Path(file).is_dir() else Path(file).parent
    files = (folder / name for name in ("tokenizer.json", "tokenizer.model"))
    tokenizer = next((Tokenizer.load(path) for path in files if path.is_file()), None)
    out = export_model(
        config,
        state,
        **_with_tokenizer(tokenizer),
        out_dir=out_dir,
        # The encoders of that project were trained on [CLS] text [SEP]; its language models on bare text.
        prefix="none" if config.causal else "cls",
        suffix="none" if config.causal else "sep",
        notes=f"Converted from a {kind} checkpoint by matmix.",
    )
    what = "without a tokenizer" if tokenizer is None else "with its tokenizer"
    print(f"Imported {file} to {out} ({_size(out)}), {what}.")
    return out


def _with_tokenizer(tokenizer: Tokenizer | None) -> dict[str, Any]:
    return {"tokenizer": None} if tokenizer is None else {"tokenizer": tokenizer.path, "special": tokenizer.special}


def check_export(directory: str | Path) -> None:
    """Compares every file of an export with the hash that it was written with. Raises FileNotFoundError where there is
    no export, ValueError (one line) that names the first file that is missing, changed, or was added."""
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
        if manifest.sha256(path) != value:
            raise ValueError(f"{path} is not as it was written: its SHA-256 differs; export again")
    print(f"{directory}: {len(listed)} files ({_size(directory)}), all as they were written.")


def _find_unlisted(directory: Path, listed: Collection[str]) -> str | None:
    """Returns the first file or folder in an export that is not listed, nor the folder of a listed file."""
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if name in (*listed, SUMS) or name.partition("/")[0] in ("__pycache__", ".cache", ".git"):
            continue
        if path.is_symlink() or not any(other.startswith(f"{name}/") for other in listed):
            return name
    return None


def _size(directory: Path) -> str:
    return f"{sum(file.stat().st_size for file in exported_files(directory)) / 1e6:,.1f} MB"


MAX_FILE_BYTES = 5 * 10**9


def convert_run(
    run_dir: str | Path, out_dir: str | Path, *, step: int | None = None, max_file_bytes: int = MAX_FILE_BYTES
) -> Path:
    """Writes a new run with one checkpoint of another: weights, moments, step counts, random generators, position in
    the data, whichever engine wrote them.

    Needs no ranks and holds one tensor in memory. Of the run, a folder or a URL, the newest valid checkpoint is taken,
    or that of `step`. out_dir must not exist, or be empty, and appears whole or not at all. A file of tensors ends at
    max_file_bytes; a larger tensor has one of its own. Returns the new checkpoint. Raises FileNotFoundError or
    ValueError (one line).
    """
    if is_url(str(out_dir)):
        raise ValueError(f"converted runs are made in a folder, not at a URL such as {out_dir}")
    out = Path(out_dir)
    check_target(out)
    trained = open_trained(run_dir, step, weights_only=False)
    write_run(trained, out, max_file_bytes=max_file_bytes)
    name = trained.checkpoint.name
    print(f"Converted {name} of {run_dir} to {out}; `{shell_line('matmix', 'train', out)}` goes on from there.")
    return RunDirectory(out).checkpoints / name


def write_run(trained: Trained, out: Path, **options: Any) -> None:
    """Writes the run `out` with one checkpoint, `trained`; options: of `convert_checkpoint`."""
    run = trained.run.path
    with new_directory(out) as folder:
        made = RunDirectory(folder)
        convert_checkpoint(trained.checkpoint, made.checkpoints / trained.checkpoint.name, **options)
        write_config(dataclasses.replace(trained.config, run_dir=str(out)), made.config_path)
        if (run / "tokenizer").is_dir():
            shutil.copytree(run / "tokenizer", folder / "tokenizer")
        if (run / "metrics.jsonl").is_file():
            shutil.copy(run / "metrics.jsonl", folder)
    sync_directory(out.parent)


def convert_checkpoint(
    source: Path,
    target: Path,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    state: FullState | None = None,
    extra: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Writes one checkpoint, known to be whole, into the new directory `target` in the form that every engine reads.
    state: in place of the tensors there, of the same names and shapes; extra: what the loop is to find besides."""
    before = manifest.read_manifest(source)
    layout = before["layout"]
    state = open_full(source, layout) if state is None else state
    write_full(state, target / SUBDIRECTORY, max_file_bytes=max_file_bytes)
    for folder in (manifest.GENERATORS, CARRIED):
        if (source / folder).is_dir():
            shutil.copytree(source / folder, target / folder)
    kept = {name: layout[name] for name in ("world_size", "shapes")}  # ranks: those that the generators are of
    after = {"engine": KIND, **kept, **layout_of_moments(state.moments(), layout["shapes"])}
    files = manifest.describe_files(target, manifest.list_files(target))
    extra = {**before["extra"], **extra}
    manifest.write_manifest(target, {**before, "layout": after, "extra": extra, "files": files})

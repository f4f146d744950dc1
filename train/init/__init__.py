"""Finds trained weights and reads them by our names: of a run, an export, or a checkpoint of the papers' code."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from matmix.data.config import ImagesConfig
from matmix.data.storage.remote import is_url
from matmix.data.tokenizer import FastTokenizer, Tokenizer
from matmix.model.config import ModelConfig
from matmix.model.interop.importing.checkpoints import SOURCES, open_checkpoint
from matmix.model.interop.importing.exported import read_export_config, weight_files
from matmix.model.interop.importing.foreign import read_object
from matmix.train.checkpoint.files import read_manifest
from matmix.train.config import InitConfig
from matmix.train.engine.full_state import MODEL, Entry, FullState
from matmix.train.engine.full_tensors import TensorFiles
from matmix.train.engine.kinds import open_weights
from matmix.train.process.distributed import FolderGroup, agree
from matmix.train.run.directory import RunDirectory
from matmix.train.run.trained import Trained, fetch_run, find_trained


@dataclasses.dataclass(frozen=True, slots=True)
class InitSource:
    """Weights to start from, read where they are asked for, and what they were trained on."""

    words: str
    """What messages call it, as in "step-00000300 of runs/a"."""
    model: ModelConfig
    state: FullState
    """Weights and persistent buffers."""
    tokenizer: Tokenizer | None
    """None where there is none, or it is not known."""
    prefix: str
    """Special token before every document, as in data.prefix."""
    suffix: str
    """Special token after every document, as in data.suffix."""
    path: Path
    """Where it lies on this machine."""
    images: ImagesConfig | None = None
    """Of a run on pictures: how it reads them, with their mean and spread."""
    run: Trained | None = None
    """The checkpoint of a run; None for an export or a checkpoint of the papers' code."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Found:
    """Where a source lies on this node."""

    kind: str  # of _KINDS
    path: Path
    words: str
    checkpoint: Path | None = None  # of a run


class _Mapped(FullState):
    """Tensors that may lie in the map of a file, in any type of numbers: only what is asked for is read, and made
    float32."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = {MODEL + name: tensor for name, tensor in tensors.items()}
        self.entries = {key: Entry(tuple(tensor.shape)) for key, tensor in self._tensors.items()}

    def read(self, key: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        tensor = self._tensors[key]
        stop = tensor.numel() if stop is None else stop
        if not tensor.is_contiguous():  # flattened, it would be copied as a whole
            row = tensor[0].numel()
            first = start // row
            tensor, start, stop = tensor[first : -(-stop // row)], start - first * row, stop - first * row
        return tensor.flatten()[start:stop].to(torch.float32, copy=True)


def source_of(init: InitConfig) -> InitSource:
    """What `init.from` names. Called on all ranks; of what lies at a URL, one rank of each node fetches a copy.

    Raises FileNotFoundError or ValueError (one line).
    """
    path, fetched = Path(init.from_), None
    if is_url(init.from_):
        node = FolderGroup.of_node()
        options = {"step": init.step or None, "weights_only": init.weights == "raw"}
        copies = agree(lambda: (node.number, fetch_run(init.from_, **options)), here=node.leads)
        path, fetched = dict(filter(None, copies))[node.number]
    found = _find(path, fetched, init)
    opened: list[InitSource] = []
    agree(lambda: opened.append(_KINDS[found.kind](found, init)))
    return opened[0]


def _find(path: Path, fetched: Path | None, init: InitConfig) -> _Found:
    """fetched: the checkpoint of a run, where it is known to be whole. The ranks share the check of others."""
    if not path.exists():
        raise FileNotFoundError(f"init.from: there is no {init.from_}")
    if (path / "config.toml").is_file():
        trained = find_trained(RunDirectory(path), init.step or None, whole=fetched, weights=init.weights)
        averaged = ", averaged" if init.weights == "ema" else ""
        return _Found("run", path, f"{trained.checkpoint.name} of {init.from_}{averaged}", trained.checkpoint)
    config = path / "config.json"
    exported = config.is_file() and "matmix" in read_object(config)
    kind = "an export" if exported else "no run"
    if init.step:
        raise ValueError(f"{init.from_} is {kind}, which has no steps to choose from: leave step out")
    if init.weights != "raw":
        raise ValueError(f"{init.from_} is {kind}, and only runs have averaged weights: leave weights out")
    if exported:
        return _Found("export", path, f"the export {init.from_}")
    return _Found("checkpoint", path, init.from_)


def _open_run(found: _Found, init: InitConfig) -> InitSource:
    assert found.checkpoint is not None
    run, manifest = RunDirectory(found.path), read_manifest(found.checkpoint)
    config = run.read_config()
    state = open_weights(found.checkpoint, manifest["layout"], init.weights)
    reads_text = config.model.model_class.inputs == "tokens" and not config.data.synthetic.task
    trained = Trained(run, found.checkpoint, config, manifest, init.weights)
    tokenizer = trained.tokenizer if reads_text else None
    around = (config.data.prefix, config.data.suffix)
    return InitSource(found.words, config.model, state, tokenizer, *around, found.path, config.data.images, trained)


def _open_export(found: _Found, init: InitConfig) -> InitSource:
    model = read_export_config(found.path)
    state = TensorFiles(weight_files(found.path), f"the export {found.path} is damaged")
    tokenizer = _tokenizer_in(found.path)
    return InitSource(found.words, model, state, tokenizer, *_put_around(tokenizer), found.path)


def _open_checkpoint(found: _Found, init: InitConfig) -> InitSource:
    folder, problems = found.path if found.path.is_dir() else found.path.parent, {}
    for project in [init.project] if init.project else SOURCES:
        try:
            model, tensors = open_checkpoint(project, found.path)
        except ValueError as error:
            problems[project] = error
            continue
        # The encoders of that project were trained on [CLS] text [SEP]; its language models on bare text.
        around = ("none", "none") if model.causal else ("cls", "sep")
        words = f"the {project} checkpoint {found.words}"
        return InitSource(words, model, _Mapped(tensors), _tokenizer_in(folder), *around, found.path)
    reasons = "; ".join(f"{project}: {error}" for project, error in problems.items())
    raise ValueError(f"{found.path} is no run, no export, and no known checkpoint ({reasons})")


_KINDS: dict[str, Callable[[_Found, InitConfig], InitSource]] = {
    "run": _open_run,
    "export": _open_export,
    "checkpoint": _open_checkpoint,
}


def _tokenizer_in(folder: Path) -> Tokenizer | None:
    """The tokenizer beside weights, None where there is none."""
    names = (folder / name for name in ("tokenizer.json", "tokenizer.model"))
    return next((Tokenizer.load(path) for path in names if path.is_file()), None)


def _put_around(tokenizer: Tokenizer | None) -> tuple[str, str]:
    """Names of the special tokens that an export's tokenizer puts before and after a text. That of a language model
    puts none after it, as prompts go on: its documents end with eos where there is such a token."""
    if not isinstance(tokenizer, FastTokenizer):
        return "none", "none"
    special, text = tokenizer.special, tokenizer.backend.encode("a", add_special_tokens=True).ids
    around = set(text) - set(tokenizer.encode("a"))
    prefix = next((name for name in ("cls", "bos") if special[name] in around and special[name] == text[0]), "none")
    suffix = next((name for name in ("sep", "eos") if special[name] in around and special[name] == text[-1]), "none")
    if suffix == "none" and prefix != "cls" and special["eos"] is not None:
        suffix = "eos"
    return prefix, suffix

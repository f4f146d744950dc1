"""Finds trained weights and reads them by our names: of a run, an export, or a checkpoint of the papers' code."""

import dataclasses
import functools
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
from matmix.train.config import InitConfig
from matmix.train.engine.full_state import MODEL, Entry, FullState
from matmix.train.engine.full_tensors import TensorFiles
from matmix.train.engine.kinds import open_weights
from matmix.train.process.distributed import FolderGroup, agree
from matmix.train.run.trained import Trained, fetch_run, open_trained


@dataclasses.dataclass(frozen=True, slots=True)
class InitSource:
    """Weights to start from, read where they are asked for, and what they were trained on."""

    words: str
    """Its name in messages, such as "step-00000300 of runs/a"."""
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
    """Its place on this machine."""
    images: ImagesConfig | None = None
    """For a run on pictures: how it reads them, with their mean and spread."""
    run: Trained | None = None
    """The checkpoint of a run; None for an export or a checkpoint of the papers' code."""


class _Mapped(FullState):
    """Tensors of any type, maybe in the map of a file: only what is asked for is read, and made float32."""

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
    """Opens what `init.from` names, on all ranks; of what lies at a URL, one rank of each node fetches a copy. Raises
    FileNotFoundError or ValueError (one line)."""
    path, fetched = Path(init.from_), None
    if is_url(init.from_):
        node = FolderGroup.of_node()
        options = {"step": init.step or None, "weights_only": init.weights == "raw" and not init.goes_on}
        copies = agree(lambda: (node.number, fetch_run(init.from_, **options)), here=node.leads)
        path, fetched = dict(filter(None, copies))[node.number]
    open_source = _find(path, fetched, init)
    opened: list[InitSource] = []
    agree(lambda: opened.append(open_source()))
    return opened[0]


def _find(path: Path, fetched: Path | None, init: InitConfig) -> Callable[[], InitSource]:
    """Returns what opens a source; the ranks share the check. fetched: the whole checkpoint of a run, if known."""
    if not path.exists():
        raise FileNotFoundError(f"init.from: there is no {init.from_}")
    if (path / "config.toml").is_file():
        trained = open_trained(path, init.step or None, whole=fetched, weights=init.weights)
        averaged = ", averaged" if init.weights == "ema" else ""
        return functools.partial(_open_run, trained, f"{trained.checkpoint.name} of {init.from_}{averaged}")
    config = path / "config.json"
    exported = config.is_file() and "matmix" in read_object(config)
    kind = "an export" if exported else "no run"
    if init.step:
        raise ValueError(f"{init.from_} is {kind}, which has no steps to choose from: leave step out")
    if init.weights != "raw":
        raise ValueError(f"{init.from_} is {kind}, and only runs have averaged weights: leave weights out")
    if exported:
        return functools.partial(_open_export, path, f"the export {init.from_}")
    return functools.partial(_open_checkpoint, path, init)


def _open_run(trained: Trained, words: str) -> InitSource:
    config = trained.config
    state = open_weights(trained.checkpoint, trained.manifest["layout"], trained.which)
    reads_text = config.model.model_class.inputs == "tokens" and not config.data.synthetic.task
    tokenizer = trained.tokenizer if reads_text else None
    around, images = (config.data.prefix, config.data.suffix), config.data.images
    return InitSource(words, config.model, state, tokenizer, *around, trained.run.path, images, trained)


def _open_export(path: Path, words: str) -> InitSource:
    model, tokenizer = read_export_config(path), _tokenizer_in(path)
    state = TensorFiles(weight_files(path), f"the export {path} is damaged")
    return InitSource(words, model, state, tokenizer, *_put_around(tokenizer), path)


def _open_checkpoint(path: Path, init: InitConfig) -> InitSource:
    folder, problems = path if path.is_dir() else path.parent, {}
    for project in [init.project] if init.project else SOURCES:
        try:
            model, tensors = open_checkpoint(project, path)
        except ValueError as error:
            problems[project] = error
            continue
        # The encoders of that project were trained on [CLS] text [SEP]; its language models on bare text.
        around = ("none", "none") if model.causal else ("cls", "sep")
        words = f"the {project} checkpoint {init.from_}"
        return InitSource(words, model, _Mapped(tensors), _tokenizer_in(folder), *around, path)
    reasons = "; ".join(f"{project}: {error}" for project, error in problems.items())
    raise ValueError(f"{path} is no run, no export, and no known checkpoint ({reasons})")


def _tokenizer_in(folder: Path) -> Tokenizer | None:
    """The tokenizer beside weights, None where there is none."""
    names = (folder / name for name in ("tokenizer.json", "tokenizer.model"))
    return next((Tokenizer.load(path) for path in names if path.is_file()), None)


def _put_around(tokenizer: Tokenizer | None) -> tuple[str, str]:
    """Returns the names of the special tokens that an export's tokenizer puts around a text; that of a language model
    ends none, as prompts go on: its documents end with eos where there is such a token."""
    if not isinstance(tokenizer, FastTokenizer):
        return "none", "none"
    special, text = tokenizer.special, tokenizer.backend.encode("a", add_special_tokens=True).ids
    around = set(text) - set(tokenizer.encode("a"))
    prefix = next((name for name in ("cls", "bos") if special[name] in around and special[name] == text[0]), "none")
    suffix = next((name for name in ("sep", "eos") if special[name] in around and special[name] == text[-1]), "none")
    if suffix == "none" and prefix != "cls" and special["eos"] is not None:
        suffix = "eos"
    return prefix, suffix

"""Reads a run or an export as a model that is ready for use, with its tokenizer."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from tokenizers import Tokenizer as FastTokenizer

from matmix.data.tokenizer import Tokenizer
from matmix.model import build_model
from matmix.model.backbone import Backbone
from matmix.model.config import ModelConfig
from matmix.model.interop.export.tokenizer import load_fast_tokenizer, special_tokens_around
from matmix.model.interop.importing.exported import load_weights, read_export, read_export_config, read_length
from matmix.model.interop.importing.foreign import read_object
from matmix.train.checkpoint.steps import step_of
from matmix.train.config import RunConfig
from matmix.train.engine.full_state import Weights
from matmix.train.run.directory import RunDirectory
from matmix.train.run.remote import fetch_run
from matmix.train.run.trained import find_trained


@dataclasses.dataclass(frozen=True, slots=True)
class TextReader:
    """Reads texts as they were read for training: what spells a special token is text."""

    tokenizer: Tokenizer
    before: tuple[int, ...] = ()
    """Special tokens that the training puts before a text."""
    after: tuple[int, ...] = ()

    def ids(self, text: str, max_length: int | None = None) -> list[int]:
        """The tokens of a text with those around it; of a long one the first, so that they are `max_length` in all."""
        room = None if max_length is None else max(0, max_length - len(self.before) - len(self.after))
        return [*self.before, *self.tokenizer.encode(text)[:room], *self.after]


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """A model ready for use, from a run or an export."""

    path: Path
    model: Backbone
    tokenizer: FastTokenizer
    """Puts the special tokens of the training around a text; of an encoder, finds those that the text spells."""
    reader: TextReader
    special: dict[str, int | None]
    start: int | None
    """What a generated text starts from when there is no prompt."""
    seqlen: int
    """Tokens of a sequence in training; of an export, what its configuration says to keep to."""
    device: torch.device
    step: int | None = None
    """The step of a run's checkpoint, None for an export."""


def load_source(
    source: str | Path, *, step: int | None = None, device: str | None = None, weights: Weights = "raw"
) -> Source:
    """Read a run (its newest checkpoint, or that of `step`; the weights or their average) or an export."""
    check_device(device)
    path, fetched = fetch_run(source, step=step, weights_only=weights == "raw")
    if not path.is_dir():
        raise FileNotFoundError(f"no run or export at {path}")
    if (path / "config.toml").is_file():
        return _load_run(path, step, device, fetched, weights)
    if (path / "config.json").is_file():
        if step is not None:
            raise ValueError(f"{path} is an export, which has no steps to choose from; leave step out")
        check_raw(weights, path)
        return _load_export(path, device)
    raise ValueError(f"{path} is neither a run (no config.toml) nor an export (no config.json)")


def check_device(device: str | None) -> None:
    """Raises ValueError (one line) for a device that torch does not know or this machine does not have."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # the latter from a torch that was built without it
        reason = str(error).partition("\n")[0]
        raise ValueError(f"--device {device} cannot be used here ({reason}); use --device cpu") from None


def check_raw(weights: Weights, source: str | Path) -> None:
    """Raises ValueError where an average is asked for of what has one kind of weights."""
    if weights != "raw":
        raise ValueError(f"{source} is no run, which may have an average beside its weights: leave --weights out")


def _load_run(path: Path, step: int | None, device: str | None, fetched: Path | None, weights: Weights) -> Source:
    trained = find_trained(RunDirectory(path), step, whole=fetched, weights=weights)
    _check_reads_text(trained.config.model, path)
    config, tokenizer = trained.config, trained.tokenizer
    model = build_model(config.model)
    load_weights(model, trained.weights(), path)
    fast = load_fast_tokenizer(tokenizer.path, tokenizer.special)
    reader = reader_of(config, tokenizer, fast)
    start = reader.before[0] if reader.before else tokenizer.special["eos"]
    step = step_of(trained.checkpoint.name)
    ready = _ready(path, model, fast, reader, start, device)
    return dataclasses.replace(ready, step=step, seqlen=config.data.seqlen)


def _load_export(path: Path, device: str | None) -> Source:
    _check_reads_text(read_export_config(path), path)
    if not (path / "tokenizer.json").is_file():
        raise ValueError(f"{path} has no tokenizer to turn a prompt into tokens; use it from Python")
    model = read_export(path)
    tokenizer = Tokenizer.load(path / "tokenizer.json")
    fast = load_fast_tokenizer(tokenizer.path, tokenizer.special)
    reader = TextReader(tokenizer, *_put_around(fast))
    defaults = path / "generation_config.json"
    start = read_object(defaults).get("bos_token_id") if defaults.is_file() else None
    ready = _ready(path, model, fast, reader, start, device)
    return dataclasses.replace(ready, seqlen=read_length(path) or ready.seqlen)


def reader_of(config: RunConfig, tokenizer: Tokenizer, fast: FastTokenizer) -> TextReader:
    """What reads texts as the training of `config` does, but puts nothing behind one that is to be continued. `fast`
    puts the same around a text from then on."""
    prefix = tokenizer.special.get(config.data.prefix)
    suffix = None if config.model.causal else tokenizer.special.get(config.data.suffix)
    fast.post_processor = special_tokens_around(fast, prefix, suffix)
    return TextReader(tokenizer, *(() if index is None else (index,) for index in (prefix, suffix)))


def _put_around(fast: FastTokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens that an export's tokenizer puts before and after a text."""
    bare, whole = (fast.encode("a", add_special_tokens=special).ids for special in (False, True))
    begin = next((at for at in range(len(whole)) if whole[at : at + len(bare)] == bare), 0)
    return tuple(whole[:begin]), tuple(whole[begin + len(bare) :])


def _check_reads_text(config: ModelConfig, path: Path) -> None:
    if not config.model_class.tokens:
        instead = "; matmix classify takes pictures" if config.model_class.takes_images else ""
        raise ValueError(f"{path} holds a model of architecture {config.architecture!r}, which reads no text{instead}")


def _ready(
    path: Path,
    model: Backbone,
    fast: FastTokenizer,
    reader: TextReader,
    start: int | None,
    device: str | None,
) -> Source:
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    # In a text to continue a special token's name is text, as it was in training.
    fast.encode_special_tokens = model.config.causal
    special, longest = reader.tokenizer.special, model.config.max_seqlen
    return Source(path, model.to(place).eval(), fast, reader, special, start, longest, place)

"""Opens a trained model: a run or an export, in a folder or at a URL, or a checkpoint of the published code."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as FastTokenizer

from matmix.data.storage.remote import is_url
from matmix.data.tokenizer import Tokenizer
from matmix.model import build_model
from matmix.model.backbone import Backbone
from matmix.model.config import ModelConfig
from matmix.model.images.config import ImageInputs
from matmix.model.interop.export.tokenizer import load_fast_tokenizer, special_tokens_around
from matmix.model.interop.importing import exported
from matmix.train.checkpoint.steps import step_of
from matmix.train.config import InitConfig, RunConfig
from matmix.train.init import InitSource, source_of
from matmix.train.run.trained import Trained
from matmix.train.state import Weights


@dataclasses.dataclass(frozen=True, slots=True)
class TextReader:
    """Reads texts as the training read them: a text that spells a special token is read as that text."""

    tokenizer: Tokenizer
    marking: FastTokenizer
    """The same tokenizer with the special tokens of the training put around a text. For an encoder it also recognises
    special tokens that a text spells."""
    before: tuple[int, ...] = ()
    """Special tokens that the training puts before a text."""
    after: tuple[int, ...] = ()
    """Special tokens that the training puts after a text; none for a language model, whose texts are to go on."""

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, *, prefix: str, suffix: str, causal: bool, marking: FastTokenizer | None = None
    ) -> TextReader:
        """Returns the reader of a model that was trained with these special tokens around each text.

        prefix, suffix: names as in data.prefix and data.suffix; marking: the tokenizer where it has no file. Raises
        ValueError (one line) for a tokenizer that cannot be converted.
        """
        marking = marking or load_fast_tokenizer(tokenizer.path, tokenizer.special)
        begin, end = tokenizer.special.get(prefix), None if causal else tokenizer.special.get(suffix)
        marking.post_processor = special_tokens_around(marking, begin, end)
        # In a text to continue the name of a special token is text, as it was in training.
        marking.encode_special_tokens = causal
        return cls(tokenizer, marking, *(() if index is None else (index,) for index in (begin, end)))

    def ids(self, text: str, max_length: int | None = None) -> list[int]:
        """Returns the tokens of a text with the special ones around it, at most `max_length`, cutting the text."""
        room = None if max_length is None else max(0, max_length - len(self.before) - len(self.after))
        return [*self.before, *self.tokenizer.encode(text)[:room], *self.after]

    @property
    def special(self) -> dict[str, int | None]:
        """Ids of the special tokens by name: pad, unk, bos, eos, cls, sep, mask; None where there is no such token."""
        return self.tokenizer.special

    @property
    def start(self) -> int | None:
        """The token that a generated text starts from when there is no prompt; None where there is none."""
        return self.before[0] if self.before else self.special["eos"]


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """A trained model, and what is known of it. The weights are read when `model` is first asked for."""

    name: str
    """The run, export or checkpoint as the caller named it."""
    origin: InitSource
    """Its files."""
    device: torch.device

    @property
    def path(self) -> Path:
        """The folder or file on this machine."""
        return self.origin.path

    @property
    def run(self) -> Trained | None:
        """The checkpoint of a run; None for an export or a published checkpoint."""
        return self.origin.run

    @property
    def config(self) -> ModelConfig:
        """The configuration of the model."""
        return self.origin.model

    @property
    def step(self) -> int | None:
        """The step of a run's checkpoint; None for an export."""
        return None if self.run is None else step_of(self.run.checkpoint.name)

    @property
    def averaged(self) -> bool:
        """Says whether the weights are the moving average that the run kept."""
        return self.run is not None and self.run.which == "ema"

    @property
    def state(self) -> str:
        """Says which weights these are, for people: "step 1,000", "step 1,000, averaged weights" or "export"."""
        step = "export" if self.step is None else f"step {self.step:,}"
        return f"{step}, averaged weights" if self.averaged else step

    @property
    def where(self) -> str:
        """Names the weights for people: the source and which of its weights."""
        return f"{self.name}, {self.state}"

    @functools.cached_property
    def model(self) -> Backbone:
        """The model on `device`, in evaluation mode. Raises ValueError (one line) for weights that do not fit."""
        model = build_model(self.config)
        exported.load_weights(model, self.origin.state.weights(), self.path)
        return model.to(self.device).eval()

    @functools.cached_property
    def reader(self) -> TextReader:
        """Reads texts for the model. Raises ValueError (one line) for a model that reads none."""
        origin, kind = self.origin, self.config.model_class
        if kind.inputs != "tokens":
            instead = "; matmix classify takes pictures" if kind.inputs == "images" else ""
            raise ValueError(
                f"{self.path} holds a model of architecture {self.config.architecture!r}, which reads no text{instead}"
            )
        if (tokenizer := origin.tokenizer if self.run is None else self.run.tokenizer) is None:
            raise ValueError(f"{self.path} has no tokenizer to turn a prompt into tokens; give its model token ids")
        return TextReader.of(tokenizer, prefix=origin.prefix, suffix=origin.suffix, causal=self.config.causal)

    def packed(self, texts: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Returns the arguments of `model` that read the tokens of some texts as documents of one row."""
        lengths = [len(text) for text in texts]
        return {
            "inputs": torch.tensor([list(itertools.chain.from_iterable(texts))], device=self.device),
            "cu_seqlens": torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=self.device),
            "max_seqlen": max(lengths),
        }

    @property
    def seqlen(self) -> int:
        """Tokens of a sequence in training; of an export, the length that its configuration says to keep to."""
        if self.run is not None:
            return self.run.config.data.seqlen
        known = exported.read_length(self.path) if (self.path / "config.json").is_file() else None
        return known or self.config.max_seqlen

    @functools.cached_property
    def image_inputs(self) -> ImageInputs:
        """Says how pictures are resized and normalised for the model. Raises ValueError where that is unknown."""
        kind = self.config.model_class
        if kind.inputs != "images":
            instead = "evaluate scores its task on texts" if kind.takes_head else "generate writes with it"
            raise ValueError(
                f"{self.path} holds a model of architecture {self.config.architecture!r}, which reads no pictures; "
                f"matmix {instead}"
            )
        if self.run is not None:
            if (inputs := image_inputs(self.run.config)) is None:
                raise ValueError(f"{self.name} was not trained on pictures, and does not say how to read them")
        elif (inputs := exported.read_image_inputs(self.path)) is None:
            raise ValueError(
                f"{self.path} has no {exported.PROCESSOR}, which says how to read pictures; export the run again"
            )
        return inputs

    @functools.cached_property
    def classes(self) -> tuple[str, ...]:
        """Names of a classifier's outputs in their order; () where they are unknown, which those of pictures never are:
        of an export without names they are "class 0" and so on."""
        takes_images, outputs = self.config.model_class.inputs == "images", self.config.head.count
        if self.run is not None:
            data = self.run.config.data
            return self.run.config.modality.class_names(data) if takes_images else data.examples.labels
        names = exported.read_labels(self.path)
        if takes_images and len(names or range(outputs)) != outputs:
            raise ValueError(f"{self.path}/config.json names {len(names)} classes, but the model has {outputs} outputs")
        return names or tuple(f"class {number}" for number in range(outputs if takes_images else 0))


def open_model(
    source: str | Path, *, step: int | None = None, weights: Weights = "raw", device: str | None = None
) -> TrainedModel:
    """Opens a run (a folder or a URL), an export (the same), or a checkpoint of the published Hydra or mru-lm code.

    Args:
        step: which checkpoint of a run, from 1 on; None = the newest valid one.
        weights: of a run "raw", or "ema", the average that a run with [ema] keeps.
        device: "cpu", "cuda", ...; None = the GPU where there is one.
    Raises FileNotFoundError or ValueError (one line) for what is not there or cannot be used.
    """
    if step is not None and step < 1:
        raise ValueError(f"step must be 1 or more, got {step}; without it the newest checkpoint is taken")
    place, path = _device(device), Path(source)
    if not is_url(source):
        if not path.exists():
            raise FileNotFoundError(f"no run or export at {path}")
        has_config = (path / "config.toml").is_file() or (path / "config.json").is_file()
        if path.is_dir() and not has_config:
            raise ValueError(f"{path} is neither a run (no config.toml) nor an export (no config.json)")
    return TrainedModel(str(source), source_of(InitConfig(from_=str(source), step=step or 0, weights=weights)), place)


def _device(name: str | None) -> torch.device:
    """Raises ValueError (one line) for a device that torch does not know or this machine does not have."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # the latter from a torch that was built without it
        reason = str(error).partition("\n")[0]
        raise ValueError(f"--device {name} cannot be used here ({reason}); use --device cpu") from None


def image_inputs(config: RunConfig) -> ImageInputs | None:
    """Returns how the evaluation of a run reads pictures; None for a run that reads none. Raises FileNotFoundError or
    ValueError (one line) where that depends on a dataset that is not there."""
    images = config.data.images
    if config.model.model_class.inputs != "images" or not images.datasets:
        return None
    mean, std, background = images.mean, images.std, images.background
    if not mean or not std:
        facts = config.modality.facts(config.data)
        mean, std, background = mean or facts.mean, std or facts.std, facts.background
    interpolation = "bicubic" if images.interpolation == "random" else images.interpolation
    sizes = {"crop": images.crop, "size": images.size, "interpolation": interpolation}
    return ImageInputs(mean=mean, std=std, background=255 if background is None else background, **sizes)

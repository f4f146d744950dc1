"""Loads what is shown: a trained model or a recipe's initial weights, and a text or a picture as the model reads it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer as FastTokenizer

from matmix.data.artifacts import shell_line
from matmix.data.storage.remote import is_url
from matmix.data.storage.storage import Storage
from matmix.data.tokenizer import Tokenizer
from matmix.model import build_model
from matmix.model.backbone import Backbone
from matmix.model.config import ModelConfig
from matmix.model.images.config import ImageConfig, ImageInputs
from matmix.model.initialization import initialize
from matmix.train.config import RunConfig
from matmix.train.loaders import with_vocabulary
from matmix.train.recipe import load_config
from matmix.train.recipe_files import find_recipe, read_toml
from matmix.train.state import Weights
from matmix.use.generation import MASK
from matmix.use.opening import TextReader, TrainedModel, image_inputs, open_model
from matmix.use.pictures import read_pictures

MOST_TOKENS = 128
BYTES = 256


@dataclasses.dataclass(frozen=True, slots=True)
class ShownModel:
    """A model whose mixers are drawn."""

    name: str
    """Name of the folder of its pages."""
    where: str
    """The source as the pages name it: a path, a URL or the name of a recipe."""
    state: str
    """Which weights it has: "step 1,000", "initial weights" or "export"."""
    label: str
    """The weights as a part of a file's name, such as "step-1000"."""
    model: Backbone


@dataclasses.dataclass(frozen=True, slots=True)
class Subject(ShownModel):
    """A model and the tokens of the text that it is shown with."""

    text: str
    ids: list[int]
    pieces: list[str]
    """The text of each token."""
    notes: list[str]
    """Remarks about the tokens, such as that the text was cut."""
    overrides: tuple[str, ...] = ()
    """Changes of a recipe."""


def trained(source: str, text: str, step: int | None, max_tokens: int | None, weights: Weights = "raw") -> Subject:
    """Opens the model of a run or an export. Raises FileNotFoundError or ValueError (one line)."""
    opened = open_model(source, step=step, device="cpu", weights=weights)
    ids, pieces, notes = _encode(opened.model, opened.reader, text, max_tokens)
    named = (name_of(source), where_of(source), opened.state, label_of(opened))
    return Subject(*named, opened.model, text, ids, pieces, notes)


def label_of(opened: TrainedModel) -> str:
    """Returns the weights of a model as a part of a file's name, such as "step-1000"."""
    return "export" if opened.step is None else f"step-{opened.step}" + opened.averaged * "-ema"


def check_no_comparison(source: str) -> None:
    """Raises ValueError (one line) for a comparison, which has no weights of its own: its folder, an entry's folder in
    it, or its recipe."""
    path, several = Path(source), f"{source} is a comparison of several models; "
    if path.is_dir():
        trained_here = any((path / name).is_file() for name in ("config.toml", "config.json"))
        runs = [] if trained_here else _runs_in(path)
    else:
        try:
            recipe = find_recipe(source)
        except FileNotFoundError:
            return
        if "comparison" not in (values := read_toml(recipe)):
            return
        home = Path(values.get("run_dir") or f"runs/{recipe.stem}")
        if not (runs := _runs_in(home)):
            train = shell_line("matmix", "compare", source)
            raise ValueError(f"{several}once they are trained ({train}) choose a run of them, {home}/ENTRY/seed-N")
    if runs:
        others = f" or one of the {len(runs) - 1} beside it" if len(runs) > 1 else ""
        raise ValueError(f"{several}choose a run of them: {runs[0]}{others}")


def _runs_in(folder: Path) -> list[Path]:
    """Finds the runs of a comparison's folder, or of an entry's folder in one."""
    return sorted({path.parent for depth in ("", "*/", "*/*/") for path in folder.glob(f"{depth}seed-*/config.toml")})


def name_of(source: str) -> str:
    """Returns the last part of a path; for a comparison's run, which ends in a seed, all that is below its folder."""
    path = Path(source).resolve()
    parts = source.rstrip("/").split("/") if is_url(source) else path.parts
    if not re.fullmatch(r"seed-\d+", parts[-1]):
        return parts[-1]
    with_variants = not is_url(source) and len(path.parts) > 3 and (path.parents[2] / "comparison.toml").is_file()
    return "-".join(parts[-3:] if with_variants else parts[-2:])


def where_of(source: str) -> str:
    """Returns a path as seen from the current folder if it lies there, else as it was given."""
    path, here = Path(source), Path.cwd()
    if is_url(source) or not path.resolve().is_relative_to(here):
        return source
    return str(path.resolve().relative_to(here)) if path.resolve() != here else here.name


def read_recipe(source: str, overrides: Sequence[str]) -> tuple[str, RunConfig]:
    """Returns the name of a recipe's folder of pages, and its config. Raises FileNotFoundError or ValueError (one
    line)."""
    try:
        name = name_of(str(find_recipe(source).with_suffix("")))
    except FileNotFoundError as error:
        raise FileNotFoundError(f"no run at {source}, and {error}") from None
    return name, load_config(source, list(overrides))


def initial_model(config: ModelConfig, seed: int) -> Backbone:
    """Builds a model with the weights that its training starts from."""
    model = build_model(config).eval()
    initialize(model, seed)
    return model


def fresh(source: str, text: str, max_tokens: int | None, overrides: Sequence[str]) -> Subject:
    """Builds the model that training a recipe starts from. Raises FileNotFoundError or ValueError (one line)."""
    name, config = read_recipe(source, overrides)
    if config.model.model_class.inputs != "tokens":
        raise ValueError(f"{source} trains a {config.model.architecture}, which reads no text; give an --image")
    reader = _dataset_reader(config)
    needed = (config.model.vocab_size or BYTES) if reader is None else reader.tokenizer.vocab_size
    model = initial_model(with_vocabulary(config.model, needed), config.seed)
    if reader is not None:
        ids, pieces, notes = _encode(model, reader, text, max_tokens)
    else:
        raw, notes = _fill(model, list(text.encode()[: _limit(model, max_tokens)]))
        ids = [byte % model.config.vocab_size for byte in raw]
        pieces = [bytes([byte]).decode("ascii", errors="replace") for byte in raw]
        where = config.data.path or "the recipe's data path"
        notes = [f"Tokens are the bytes of the text, modulo the vocabulary: there is no dataset at {where}.", *notes]
    return Subject(name, source, "initial weights", "initial", model, text, ids, pieces, notes, tuple(overrides))


def _dataset_reader(config: RunConfig) -> TextReader | None:
    """Returns what reads texts as a recipe trains on them; None without the dataset."""
    path, marking = config.data.path or next(iter(config.data.mixture), ""), None
    if config.data.synthetic.task:
        tokenizer = config.modality.facts(config.data).tokenizer
        marking = FastTokenizer.from_str(tokenizer.backend.to_str())
    elif not path:
        return None
    else:
        try:
            storage = Storage(path, config.data.cache_dir)
        except FileNotFoundError:
            return None
        tokenizer = Tokenizer.load(storage.file(storage.manifest.tokenizer.file))
    around = {"prefix": config.data.prefix, "suffix": config.data.suffix, "causal": config.model.causal}
    return TextReader.of(tokenizer, **around, marking=marking)


def _limit(model: Backbone, max_tokens: int | None) -> int:
    """Returns the most tokens of a text to take."""
    config = model.config
    if config.fixed_length_mixers():
        return config.max_seqlen
    limit = MOST_TOKENS if max_tokens is None else max_tokens
    return min(limit, config.max_seqlen) if not config.causal and config.position_embeddings else limit


def _encode(
    model: Backbone, reader: TextReader, text: str, max_tokens: int | None
) -> tuple[list[int], list[str], list[str]]:
    """Returns the tokens of a text as in training, the text of each, and notes about them."""
    limit, mask, marking = _limit(model, max_tokens), reader.special["mask"], reader.marking
    if model.config.causal or mask is None or MASK not in text:
        whole, read = len(reader.ids(text)), reader.ids(text, limit)
    else:
        text = text.replace(MASK, reader.tokenizer.piece(mask))
        marking.no_truncation()
        whole = len(marking.encode(text).ids)
        marking.enable_truncation(limit)  # keeps the special token at the end, as training does
        read = marking.encode(text).ids
    ids, notes = _fill(model, read)
    if whole > len(ids):
        notes.insert(0, f"The first {len(ids)} of {whole} tokens.")
    return ids, [reader.tokenizer.piece(index) for index in ids], notes


def _fill(model: Backbone, ids: list[int]) -> tuple[list[int], list[str]]:
    """Tokens repeated where mixers take one length only, and a note that says so. Raises ValueError for too few."""
    fixed, length = model.config.fixed_length_mixers(), model.config.max_seqlen
    if len(ids) < 2:
        raise ValueError("the text has fewer than 2 tokens, which there is nothing to mix of; give a longer one")
    if not fixed or len(ids) == length:
        return ids, []
    note = f"The text is repeated until it fills the {length} tokens that {' and '.join(fixed)} needs."
    return (ids * -(-length // len(ids)))[:length], [note]


@dataclasses.dataclass(frozen=True, slots=True)
class ImageSubject(ShownModel):
    """A model of images and the picture that it is shown with."""

    file: str
    """File of the picture."""
    images: torch.Tensor
    """(1, channels, size, size), as the model reads it"""
    picture: np.ndarray
    """(size, size, 3), the same before normalisation, from 0 to 1"""
    notes: list[str]
    overrides: tuple[str, ...] = ()
    """Changes of a recipe."""

    @property
    def image(self) -> ImageConfig:
        """How the model reads images."""
        return self.model.config.image

    @property
    def side(self) -> int:
        """Patches along one side of the picture."""
        return self.images.shape[-1] // self.image.patch


def trained_on_images(source: str, file: str, step: int | None, weights: Weights = "raw") -> ImageSubject:
    """Opens the model of a run or an export. Raises FileNotFoundError or ValueError (one line)."""
    opened = open_model(source, step=step, device="cpu", weights=weights)
    images, picture = _read(file, opened.image_inputs, opened.model)
    named = (name_of(source), where_of(source), opened.state, label_of(opened))
    return ImageSubject(*named, opened.model, file, images, picture, [])


def fresh_on_images(source: str, file: str, overrides: Sequence[str]) -> ImageSubject:
    """Builds the model that training a recipe starts from. Raises FileNotFoundError or ValueError (one line)."""
    name, config = read_recipe(source, overrides)
    if config.model.model_class.inputs != "images":
        raise ValueError(f"{source} trains a {config.model.architecture}, which reads no pictures; give a --text")
    notes = []
    try:
        inputs = image_inputs(config)
    except FileNotFoundError:
        inputs = None
    if inputs is None:
        grey, images = (0.5,) * config.model.image.channels, config.data.images
        inputs = ImageInputs(mean=grey, std=grey, crop=images.crop, size=config.model.image.size)
        where = images.named or "the recipe's data path"
        notes.append(f"The picture is normalised by a mean and a spread of 0.5: there is no dataset at {where}.")
    model = initial_model(config.model, config.seed)
    pictures = _read(file, inputs, model)
    return ImageSubject(name, source, "initial weights", "initial", model, file, *pictures, notes, tuple(overrides))


def _read(file: str, inputs: ImageInputs, model: Backbone) -> tuple[torch.Tensor, np.ndarray]:
    images = read_pictures([file], inputs)
    image = model.config.image
    if images.shape[1] != image.channels or images.shape[2] % image.patch:
        raise ValueError(
            f"pictures of {inputs.size} pixels and {len(inputs.mean)} channels do not fit a model of patches of "
            f"{image.patch} pixels and {image.channels} channels"
        )
    pixels = images[0] * torch.tensor(inputs.std).view(-1, 1, 1) + torch.tensor(inputs.mean).view(-1, 1, 1)
    return images, pixels.clamp(0, 1).expand(3, -1, -1).permute(1, 2, 0).numpy()

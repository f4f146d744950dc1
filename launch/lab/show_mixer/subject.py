"""Loads what is shown: a trained model or a recipe's initial weights, and a text or a picture as the model reads it."""

import contextlib
import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
from matmix.use.opening import TextReader, image_inputs, open_model
from matmix.use.pictures import read_pictures

MOST_TOKENS = 128
BYTES = 256


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model whose mixers are drawn, and what it reads."""

    name: str
    """Name of the folder of its pages."""
    where: str
    """The source as the pages name it: a path, a URL or the name of a recipe."""
    state: str = "initial weights"
    """Which weights it has: "step 1,000", "initial weights" or "export"."""
    label: str = "initial"
    """The weights as a part of a file's name, such as "step-1000"."""
    overrides: tuple[str, ...] = ()
    """Changes of a recipe."""
    model: Backbone
    given: str
    """The text, or the file of the picture."""
    inputs: torch.Tensor
    """The tokens (1, L), or the picture (1, channels, size, size) as the model reads it."""
    notes: list[str]
    """Remarks, such as that the text was cut."""
    pieces: list[str] = dataclasses.field(default_factory=list)
    """The text of each token."""
    picture: np.ndarray | None = None
    """(size, size, 3), the picture before normalisation, from 0 to 1"""

    @property
    def ids(self) -> list[int]:
        return self.inputs[0].tolist()

    @property
    def image(self) -> ImageConfig:
        return self.model.config.image

    @property
    def side(self) -> int:
        """Patches along one side of the picture."""
        return self.inputs.shape[-1] // self.image.patch


def trained(
    source: str, text: str | None, step: int | None, max_tokens: int | None, weights: Weights = "raw",
    file: str | None = None,
) -> Subject:  # fmt: skip
    """Opens the model of a run or an export, to read a text or the picture in a file. Raises FileNotFoundError or
    ValueError (one line)."""
    opened = open_model(source, step=step, device="cpu", weights=weights)
    _check_reads(f"{source} holds", opened.config, file)
    if file is None:
        read = _encode(opened.model, opened.reader, text, max_tokens)
    else:
        read = _read_picture(file, opened.image_inputs, [], opened.model)
    label = "export" if opened.step is None else f"step-{opened.step}" + opened.averaged * "-ema"
    named = {"name": name_of(source), "where": where_of(source), "state": opened.state, "label": label}
    return Subject(**named, model=opened.model, **read)


def check_no_comparison(source: str) -> None:
    """Raises ValueError (one line) for a comparison, which has no weights of its own: its folder, an entry's folder in
    it, or its recipe."""
    home, values = Path(source), {}
    if home.is_dir():
        if any((home / name).is_file() for name in ("config.toml", "config.json")):
            return
    else:
        with contextlib.suppress(FileNotFoundError):
            recipe = find_recipe(source)
            values = read_toml(recipe)
        if "comparison" not in values:
            return
        home = Path(values.get("run_dir") or f"runs/{recipe.stem}")
    several = f"{source} is a comparison of several models; "
    configs = (path for depth in ("", "*/", "*/*/") for path in home.glob(f"{depth}seed-*/config.toml"))
    if runs := sorted({path.parent for path in configs}):
        others = f" or one of the {len(runs) - 1} beside it" if len(runs) > 1 else ""
        raise ValueError(f"{several}choose a run of them: {runs[0]}{others}")
    if values:
        train = shell_line("matmix", "compare", source)
        raise ValueError(f"{several}once they are trained ({train}) choose a run of them, {home}/ENTRY/seed-N")


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
    path, here = Path(source).resolve(), Path.cwd()
    if is_url(source) or not path.is_relative_to(here):
        return source
    return str(path.relative_to(here)) if path != here else here.name


def _check_reads(words: str, config: ModelConfig, file: str | None) -> None:
    """Raises ValueError (one line) for a model that cannot read the text, or the picture in a file; words: where it
    comes from."""
    if config.model_class.inputs != ("tokens" if file is None else "images"):
        instead = "reads no text; give an --image" if file is None else "reads no pictures; give a --text"
        raise ValueError(f"{words} a model of architecture {config.architecture!r}, which {instead}")


def fresh(
    source: str, text: str | None, max_tokens: int | None, overrides: Sequence[str], file: str | None = None
) -> Subject:
    """Builds the model that training a recipe starts from, to read a text or the picture in a file. Raises
    FileNotFoundError or ValueError (one line)."""
    try:
        name = name_of(str(find_recipe(source).with_suffix("")))
    except FileNotFoundError as error:
        raise FileNotFoundError(f"no run at {source}, and {error}") from None
    config = load_config(source, list(overrides))
    _check_reads(f"{source} trains", config.model, file)
    reader = None if file else _dataset_reader(config)
    needed = (config.model.vocab_size or BYTES) if reader is None else reader.tokenizer.vocab_size
    model = build_model(config.model if file else with_vocabulary(config.model, needed)).eval()
    initialize(model, config.seed)
    if file:
        read = _read_picture(file, *_dataset_inputs(config), model)
    elif reader is not None:
        read = _encode(model, reader, text, max_tokens)
    else:
        where = config.data.path or "the recipe's data path"
        note = f"Tokens are the bytes of the text, modulo the vocabulary: there is no dataset at {where}."
        raw, notes = _fill(model, list(text.encode()[: _limit(model, max_tokens)]))
        ids = torch.tensor([raw]) % model.config.vocab_size
        pieces = [bytes([byte]).decode("ascii", errors="replace") for byte in raw]
        read = {"given": text, "inputs": ids, "pieces": pieces, "notes": [note, *notes]}
    return Subject(name=name, where=source, overrides=tuple(overrides), model=model, **read)


def _dataset_reader(config: RunConfig) -> TextReader | None:
    """Returns what reads texts as a recipe trains on them; None without the dataset."""
    marking = None
    if config.data.synthetic.task:
        tokenizer = config.modality.facts(config.data).tokenizer
        marking = FastTokenizer.from_str(tokenizer.backend.to_str())
    elif path := config.data.path or next(iter(config.data.mixture), ""):
        try:
            storage = Storage(path, config.data.cache_dir)
        except FileNotFoundError:
            return None
        tokenizer = Tokenizer.load(storage.file(storage.manifest.tokenizer.file))
    else:
        return None
    around = {"prefix": config.data.prefix, "suffix": config.data.suffix, "causal": config.model.causal}
    return TextReader.of(tokenizer, **around, marking=marking)


def _limit(model: Backbone, max_tokens: int | None) -> int:
    config = model.config
    if config.fixed_length_mixers():
        return config.max_seqlen
    limit = MOST_TOKENS if max_tokens is None else max_tokens
    return min(limit, config.max_seqlen) if not config.causal and config.position_embeddings else limit


def _encode(model: Backbone, reader: TextReader, text: str, max_tokens: int | None) -> dict[str, Any]:
    """Returns what a subject holds of a text, read as in training."""
    given, limit, mask, marking = text, _limit(model, max_tokens), reader.special["mask"], reader.marking
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
    pieces = list(map(reader.tokenizer.piece, ids))
    return {"given": given, "inputs": torch.tensor([ids]), "pieces": pieces, "notes": notes}


def _fill(model: Backbone, ids: list[int]) -> tuple[list[int], list[str]]:
    """Tokens repeated where mixers take one length only, and a note that says so. Raises ValueError for too few."""
    fixed, length = model.config.fixed_length_mixers(), model.config.max_seqlen
    if len(ids) < 2:
        raise ValueError("the text has fewer than 2 tokens, which there is nothing to mix of; give a longer one")
    if not fixed or len(ids) == length:
        return ids, []
    note = f"The text is repeated until it fills the {length} tokens that {' and '.join(fixed)} needs."
    return (ids * -(-length // len(ids)))[:length], [note]


def _dataset_inputs(config: RunConfig) -> tuple[ImageInputs, list[str]]:
    """Returns how a recipe reads pictures, and a note where its dataset is not there to say so."""
    with contextlib.suppress(FileNotFoundError):
        if (inputs := image_inputs(config)) is not None:
            return inputs, []
    grey, images = (0.5,) * config.model.image.channels, config.data.images
    where = images.named or "the recipe's data path"
    note = f"The picture is normalised by a mean and a spread of 0.5: there is no dataset at {where}."
    return ImageInputs(mean=grey, std=grey, crop=images.crop, size=config.model.image.size), [note]


def _read_picture(file: str, inputs: ImageInputs, notes: list[str], model: Backbone) -> dict[str, Any]:
    """Returns what a subject holds of a picture."""
    images, image = read_pictures([file], inputs), model.config.image
    if images.shape[1] != image.channels or images.shape[2] % image.patch:
        given = f"pictures of {inputs.size} pixels and {len(inputs.mean)} channels"
        wanted = f"patches of {image.patch} pixels and {image.channels} channels"
        raise ValueError(f"{given} do not fit a model of {wanted}")
    pixels = images[0] * torch.tensor(inputs.std).view(-1, 1, 1) + torch.tensor(inputs.mean).view(-1, 1, 1)
    picture = pixels.clamp(0, 1).expand(3, -1, -1).permute(1, 2, 0).numpy()
    return {"given": file, "inputs": images, "picture": picture, "notes": notes}

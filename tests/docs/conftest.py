"""What the snippets of pages work on: exports of every kind, and a folder with the files that they name."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from paths import GOLDEN, ROOT

from matmix.data.tokenizer import train_sentencepiece
from matmix.model import HeadConfig, ImageConfig, ModelConfig
from matmix.model.architecture import Outputs
from matmix.model.images.config import ImageInputs
from matmix.model.interop.export.directory import export_model

# For `import bare_site`, as the tests of exports do.
sys.path.insert(0, str(ROOT / "tests/export/bare"))

from small_models import HEADS, MIXERS, MODELS, random_model, training_text

PICTURES = ModelConfig(
    architecture="image_classifier",
    d_model=16,
    n_layers=2,
    layers=("hydra",),
    mixers=MIXERS,
    head=HeadConfig(outputs=3, hidden=False),
    image=ImageConfig(size=16, patch=4),
)
_NONE = Outputs()
EXPORTED = {
    "AutoModelForCausalLM": (MODELS["mru"], _NONE),
    "AutoModelForMaskedLM": (MODELS["hydra"], _NONE),
    "AutoModelForSequenceClassification": HEADS["classes"],
    "AutoModelForMultipleChoice": HEADS["choices"],
    "AutoModelForTokenClassification": HEADS["tokens"],
    "AutoModelForQuestionAnswering": HEADS["spans"],
    "AutoModel": HEADS["embedder"],
    "AutoModelForImageClassification": (PICTURES, Outputs(labels=("cat", "dog", "hen"))),
}
"""Class of transformers -> a small model whose card names it, and what its outputs stand for."""


@pytest.fixture(scope="session")
def exported(tmp_path_factory) -> dict[str, Path]:
    """Class of transformers -> an export whose card names it."""
    work = tmp_path_factory.mktemp("exported")
    tokenizer = train_sentencepiece(training_text(), work / "tokenizer.model", vocab_size=420)
    found = {}
    for name, (config, outputs) in EXPORTED.items():
        prefix, suffix = ("bos", "eos") if config.causal else ("cls", "sep")
        text = {"special": tokenizer.special, "prefix": prefix, "suffix": suffix}
        on_images = config.model_class.inputs == "images"
        images = {"images": ImageInputs(mean=(0.5,) * 3, std=(0.2,) * 3, crop=0.9, size=16)}
        path = found[name] = work / name / "export"  # transformers keeps the code of exports by the name of the folder
        path.parent.mkdir()
        weights = random_model(config).state_dict()
        source = None if on_images else tokenizer.path
        export_model(config, weights, source, path, outputs=outputs, **(images if on_images else text))
    return found


@pytest.fixture(scope="session")
def desk(tmp_path_factory) -> Path:
    """A folder with the files that snippets name: photo.jpg, checkpoint.pt (of mru-lm)."""
    from PIL import Image
    from safetensors import safe_open

    folder = tmp_path_factory.mktemp("desk")
    values = np.random.default_rng(0).integers(0, 256, (9, 7, 3), dtype=np.uint8)
    Image.fromarray(values).resize((45, 34)).save(folder / "photo.jpg")
    with safe_open(GOLDEN / "mru_lm_first_a.safetensors", "pt") as file:
        names = [name for name in file.keys() if name.startswith("state.")]  # noqa: SIM118
        torch.save({name.removeprefix("state."): file.get_tensor(name) for name in names}, folder / "checkpoint.pt")
    return folder

"""README.md of an export: what the model is, how it is loaded, and what its maker says of it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version

from huggingface_hub import ModelCardData

from matmix.model.architecture import Outputs
from matmix.model.build import count_parameters
from matmix.model.config import ModelConfig, used_mixers
from matmix.model.interop.export.config import FORMS, main_class
from matmix.model.interop.export.sentence_transformers import takes_layout

UNKNOWN = "unknown"


def model_card(
    config: ModelConfig,
    *,
    has_tokenizer: bool,
    has_processor: bool = False,
    notes: str,
    outputs: Outputs = Outputs(),  # noqa: B008  (frozen)
    licence: str = "",
    languages: Sequence[str] = (),
) -> str:
    """The text of the card; arguments as for `export_model`, and whether there are a tokenizer and an image
    processor."""
    form = FORMS.get(config.architecture)
    vocabulary = f", {config.vocab_size:,} tokens" if config.model_class.inputs == "tokens" else ""
    fixed = [] if config.model_class.inputs == "images" else config.fixed_length_mixers()
    paragraphs = [
        _front_matter(config, licence, languages) if form else "",
        f"# matmix {config.architecture.replace('_', ' ')}",
        f"{config.n_layers} layers ({', '.join(sorted(used_mixers(config))) or 'no mixer'}), width {config.d_model}"
        f"{vocabulary}, "
        f"{count_parameters(config):,} parameters.",
        f"It takes sequences of exactly {config.max_seqlen} tokens and no padding, having parameters for every\n"
        f"position ({', '.join(fixed)}): cut or fill texts to that length."
        if fixed
        else "",
        _images(config),
        _head(config, outputs),
        notes.strip(),
        _loading(config, has_tokenizer, has_processor, outputs),
        _rights(config, licence, languages),
    ]
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph) + "\n"


def _front_matter(config: ModelConfig, licence: str, languages: Sequence[str]) -> str:
    """The YAML that the hub reads."""
    form = FORMS[config.architecture]
    data = ModelCardData(
        library_name=form.library,
        pipeline_tag=form.pipeline,
        license=licence or UNKNOWN,
        language=list(languages) or None,
        tags=["matmix", config.architecture, *sorted(used_mixers(config))],
    )
    return f"---\n{data.to_yaml()}\n---"


def _rights(config: ModelConfig, licence: str, languages: Sequence[str]) -> str:
    """Languages and licences, which are said also where they are not known."""
    lines = [f"Licence of the weights: {licence or UNKNOWN}."]
    if config.architecture in FORMS:
        lines.append("The code beside them is under the Apache License 2.0 (`LICENSE`).")
    if config.model_class.inputs == "tokens":
        lines.append(f"Language of the texts: {', '.join(languages) or UNKNOWN}.")
    return "\n".join([*lines, f"Written by matmix {version('matmix')}."])


def _head(config: ModelConfig, outputs: Outputs) -> str:
    """Tells what the outputs of a classifier or an embedder are computed from, and what they stand for."""
    if not config.model_class.takes_head:
        return ""
    source = "every position of a text"
    if config.model_class.inputs == "images":
        source = "the class token" if config.image.pooling == "cls" else "all patches of an image (their mean)"
    elif config.model_class.per_document:
        source = (
            "the first position of a text" if config.head.pooling == "cls" else "all positions of a text (their mean)"
        )
    if not config.model_class.new_parameters:
        return f"It gives one vector for each text: the features of {source}."
    count = f"{config.head.count} outputs" if config.head.count > 1 else "one output"
    return f"It has {count}, computed from {source}{': ' * bool(outputs.labels)}{', '.join(outputs.labels)}."


def _images(config: ModelConfig) -> str:
    """Tells what images the model reads."""
    if config.model_class.inputs != "images":
        return ""
    image, fixed = config.image, config.fixed_length_mixers()
    sizes = f"of any size in multiples of {image.patch} pixels; it was trained on {image.size} x {image.size}"
    if fixed:
        sizes = f"of exactly {image.size} x {image.size} pixels ({', '.join(fixed)})"
    return f"It reads images of {image.channels} channels, {sizes}, in patches of {image.patch} x {image.patch}."


def _loading(config: ModelConfig, has_tokenizer: bool, has_processor: bool, outputs: Outputs) -> str:
    """How the model is loaded, and what that needs."""
    folder = '"PATH/TO/THIS/DIRECTORY"'
    if config.architecture not in FORMS:
        code = ["from matmix.model.interop import read_export", "", f"model = read_export({folder}).eval()"]
        needs = f"Reading it needs matmix and the module that registers its architecture, `{config.architecture}`."
        return "\n".join(["```python", *code, "```", "", needs])
    main = main_class(config, outputs)
    code = ["from PIL import Image"] if has_processor else []
    code += [
        f"from transformers import {main}{', AutoTokenizer' * has_tokenizer}{', AutoImageProcessor' * has_processor}",
        "",
        f"model = {main}.from_pretrained({folder}, trust_remote_code=True)",
    ]
    if has_tokenizer:
        code.append(f"tokenizer = AutoTokenizer.from_pretrained({folder}, trust_remote_code=True)")
    if has_processor:
        code += [
            f"processor = AutoImageProcessor.from_pretrained({folder}, trust_remote_code=True)",
            'image = Image.open("photo.jpg")',
            'logits = model(**processor(image, return_tensors="pt")).logits',
        ]
    if has_tokenizer and main == "AutoModelForTokenClassification":
        code += [
            "",
            "# Words, the label of each of which is that of its first token. All but the first have their space.",
            'words = ["Words", "with", "labels"]',
            'spaced = [words[0], *(f" {word}" for word in words[1:])]',
            'logits = model(**tokenizer(spaced, is_split_into_words=True, return_tensors="pt")).logits',
        ]
    if has_tokenizer and takes_layout(config):
        code += [
            "",
            "# One vector for each text:",
            "from sentence_transformers import SentenceTransformer",
            "",
            f"encoder = SentenceTransformer({folder}, trust_remote_code=True)",
            'embeddings = encoder.encode(["one text", "and another"])',
        ]
    needs = (
        "The code in `modeling_matmix.py` needs PyTorch and transformers only.\n"
        "Where matmix is installed, its kernels are used."
    )
    return "\n".join(["```python", *code, "```", "", needs])

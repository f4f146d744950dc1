"""README.md of an export: what the model is, how it is loaded, and what its maker says of it."""

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
    """Returns the text of the card. Arguments are as for `export_model`."""
    reads = config.model_class.inputs
    vocabulary = f", {config.vocab_size:,} tokens" if reads == "tokens" else ""
    fixed, known = ", ".join(config.fixed_length_mixers()), config.architecture in FORMS
    mixers = sorted(used_mixers(config))
    paragraphs = [
        f"# matmix {config.architecture.replace('_', ' ')}",
        f"{config.n_layers} layers ({', '.join(mixers) or 'no mixer'}), width {config.d_model}{vocabulary}, "
        f"{count_parameters(config):,} parameters.",
    ]
    if known:
        form = FORMS[config.architecture]
        front = ModelCardData(
            library_name=form.library,
            pipeline_tag=form.pipeline,
            license=licence or UNKNOWN,
            language=list(languages) or None,
            tags=["matmix", config.architecture, *mixers],
        )
        paragraphs.insert(0, f"---\n{front.to_yaml()}\n---")
    if reads == "images":
        image = config.image
        sizes = f"of any size in multiples of {image.patch} pixels; it was trained on {image.size} x {image.size}"
        sizes = f"of exactly {image.size} x {image.size} pixels ({fixed})" if fixed else sizes
        patches = f"in patches of {image.patch} x {image.patch}"
        paragraphs.append(f"It reads images of {image.channels} channels, {sizes}, {patches}.")
    elif fixed:
        paragraphs.append(
            f"It takes sequences of exactly {config.max_seqlen} tokens and no padding, having parameters for every\n"
            f"position ({fixed}): cut or fill texts to that length."
        )
    rights = [f"Licence of the weights: {licence or UNKNOWN}."]
    if known:
        rights.append("The code beside them is under the Apache License 2.0 (`LICENSE`).")
    if reads == "tokens":
        rights.append(f"Language of the texts: {', '.join(languages) or UNKNOWN}.")
    rights.append(f"Written by matmix {version('matmix')}.")
    loading = _loading(config, has_tokenizer, has_processor, outputs)
    paragraphs += [_head(config, outputs), notes.strip(), loading, "\n".join(rights)]
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph) + "\n"


def _head(config: ModelConfig, outputs: Outputs) -> str:
    """Tells what the outputs of a classifier or an embedder are computed from, and what they stand for."""
    if not config.model_class.takes_head:
        return ""
    if config.model_class.inputs == "images":
        source = "the class token" if config.image.pooling == "cls" else "all patches of an image (their mean)"
    elif config.model_class.per_document:
        first = config.head.pooling == "cls"
        source = "the first position of a text" if first else "all positions of a text (their mean)"
    else:
        source = "every position of a text"
    if not config.model_class.new_parameters:
        return f"It gives one vector for each text: the features of {source}."
    count = f"{config.head.count} outputs" if config.head.count > 1 else "one output"
    return f"It has {count}, computed from {source}{': ' * bool(outputs.labels)}{', '.join(outputs.labels)}."


def call_that_loads(config: ModelConfig, outputs: Outputs, folder: str) -> str:
    """Returns the call that loads an export; folder: as Python writes it."""
    if config.architecture not in FORMS:
        return f"read_export({folder})"
    return f"{main_class(config, outputs)}.from_pretrained({folder}, trust_remote_code=True)"


def _loading(config: ModelConfig, has_tokenizer: bool, has_processor: bool, outputs: Outputs) -> str:
    """Tells how the model is loaded, and what that needs."""
    folder, trust = '"PATH/TO/THIS/DIRECTORY"', "trust_remote_code=True"
    call = call_that_loads(config, outputs, folder)
    if config.architecture not in FORMS:
        code = ["from matmix.model.interop import read_export", "", f"model = {call}.eval()"]
        needs = f"Reading it needs matmix and the module that registers its architecture, `{config.architecture}`."
        return "\n".join(["```python", *code, "```", "", needs])
    main = main_class(config, outputs)
    code = ["from PIL import Image"] if has_processor else []
    code += [
        f"from transformers import {main}{', AutoTokenizer' * has_tokenizer}{', AutoImageProcessor' * has_processor}",
        "",
        f"model = {call}",
    ]
    if has_tokenizer:
        code.append(f"tokenizer = AutoTokenizer.from_pretrained({folder}, {trust})")
    if has_processor:
        code += [
            f"processor = AutoImageProcessor.from_pretrained({folder}, {trust})",
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
            f"encoder = SentenceTransformer({folder}, {trust})",
            'embeddings = encoder.encode(["one text", "and another"])',
        ]
    needs = (
        "The code in `modeling_matmix.py` needs PyTorch and transformers only.\n"
        "Where matmix is installed, its kernels are used."
    )
    return "\n".join(["```python", *code, "```", "", needs])

"""Writes a model as a directory that transformers loads without matmix, if there are classes for its architecture;
other architectures are written as weights and configuration."""

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from matmix.model.architecture import Outputs
from matmix.model.build import build_model
from matmix.model.config import ModelConfig, model_config_to_dict, used_mixers
from matmix.model.images.config import ImageInputs
from matmix.model.interop.export.bundle import bundle
from matmix.model.interop.export.config import EXPORT, FORMS, head_fields, main_class
from matmix.model.interop.export.model_card import model_card
from matmix.model.interop.export.onnx.file import check_packages, write_onnx
from matmix.model.interop.export.sentence_transformers import layout_files, takes_layout
from matmix.model.interop.export.tokenizer import load_fast_tokenizer, write_tokenizer
from matmix.model.interop.export.weights import write_weights

SUMS = "SHA256SUMS"
_CONFIG_SOURCE = f"{EXPORT}.config"

_LICENSE = """\
# Copyright the matmix authors. Licensed under the Apache License, Version 2.0 (the "License"); you may not
# use this file except in compliance with the License. You may obtain a copy of the License at
#     http://www.apache.org/licenses/LICENSE-2.0
# Distributed on an "AS IS" BASIS, WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
"""


def export_model(
    config: ModelConfig,
    state: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
    tokenizer: str | Path | None,
    out_dir: str | Path,
    *,
    special: Mapping[str, int | None] | None = None,
    prefix: str = "none",
    suffix: str = "none",
    dtype: str = "float32",
    max_shard_bytes: int = 5 * 10**9,
    max_length: int = 0,
    notes: str = "",
    licence: str = "",
    languages: Sequence[str] = (),
    outputs: Outputs = Outputs(),  # noqa: B008  (frozen)
    images: ImageInputs | None = None,
    onnx: bool = False,
) -> Path:
    """Writes weights, configuration, tokenizer and, for transformers, the code of a model into a new directory, which
    appears whole or not at all.

    Args:
        state: weights by name; pairs are taken one by one, so that no more than one file of weights is in memory.
        tokenizer: a sentencepiece model or a tokenizer.json, with the ids of pad, unk, bos, eos, cls, sep and mask as
            `special`; prefix, suffix: names of those that stood before and after every document in training.
        out_dir: must not exist, or be empty.
        dtype: "float32", "bfloat16" or "float16"; max_shard_bytes: largest size of a file of weights.
        max_length: tokens of the longest documents in training, from which on the tokenizer and sentence-transformers
            cut texts if asked to; 0 = config.max_seqlen.
        notes, licence, languages: for the model card: Markdown, and what is known of weights and texts.
        outputs: what those of a classifier stand for; images: what a model of images has to be given.
        onnx: also write model.onnx.
    Returns: the directory. Raises ValueError (one line) if it is not empty or the parts do not fit each other.
    """
    out_dir, special, max_length = Path(out_dir), dict(special or {}), max_length or config.max_seqlen
    if onnx:
        if config.model_class.separated:
            raise ValueError(f"ONNX: {config.architecture} cuts texts where their tokens say; leave --onnx out")
        check_packages()
    check_target(out_dir)
    if licence and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.+-]*", licence):
        raise ValueError(f"license {licence!r}: give its short name, such as apache-2.0 or cc-by-4.0")
    for language in languages:
        if not re.fullmatch(r"[A-Za-z]{2,3}(-[A-Za-z0-9]+)*", language):
            raise ValueError(f"language {language!r}: give its ISO code, such as en or zh")
    fast = None if tokenizer is None else load_fast_tokenizer(tokenizer, special)
    if fast is not None and fast.get_vocab_size() > config.vocab_size:
        raise ValueError(
            f"the tokenizer {tokenizer} has {fast.get_vocab_size()} ids, the model only {config.vocab_size}; "
            "take the tokenizer that the model was trained with"
        )
    with new_directory(out_dir) as folder:
        expected = {name: t.shape for name, t in build_model(config, device="meta").state_dict().items()}
        pairs = state.items() if isinstance(state, Mapping) else state
        write_weights(folder, pairs, expected=expected, prefix="model.", dtype=dtype, max_shard_bytes=max_shard_bytes)
        if onnx:
            model = build_model(config)
            for file in sorted(folder.glob("*.safetensors")):
                weights = {name.removeprefix("model."): value for name, value in load_file(file).items()}
                model.load_state_dict(weights, strict=False)
            write_onnx(model.eval(), folder / "model.onnx", longest=max(max_length, config.max_seqlen))
        if config.architecture in FORMS:
            write_code(folder, config)
            (folder / "LICENSE").write_text(license_of_the_code(), encoding="utf-8")
        if images is not None:
            write_image_processor(folder, config, images)
        files = {"config.json": config_file(config, special, dtype, outputs, max_length)}
        if config.causal and config.model_class.inputs == "tokens":
            # Where documents start with no token of their own, what is generated from nothing starts as after
            # the end of one.
            start = special.get("bos") if prefix == "bos" else special.get("eos")
            ids = {"pad": special.get("pad"), "bos": start, "eos": special.get("eos")}
            files["generation_config.json"] = _token_ids(ids)
        if fast is not None:
            around = {"special": special, "prefix": prefix, "suffix": suffix}
            write_tokenizer(folder, fast, config, **around, max_length=max_length)
            files |= layout_files(config, max_length) if takes_layout(config) else {}
        for name, content in files.items():
            _write_json(folder / name, content)
        takes = {"has_tokenizer": fast is not None, "has_processor": images is not None}
        card = model_card(config, **takes, notes=notes, licence=licence, languages=languages, outputs=outputs)
        (folder / "README.md").write_text(card, encoding="utf-8")
        write_sums(folder)
    return out_dir


@contextlib.contextmanager
def new_directory(out_dir: Path) -> Iterator[Path]:
    """Yields a folder that becomes `out_dir` in the end, or is gone after an error. Raises ValueError (one line)."""
    check_target(out_dir)
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    temporary = out_dir.parent / f".tmp-{out_dir.name}-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        # Onto an empty directory, or into nothing: what came there in the meantime stays, and this fails.
        temporary.rename(out_dir)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_target(out_dir: Path) -> None:
    """Raises ValueError unless `out_dir` is free to be written."""
    if out_dir.exists() and not (out_dir.is_dir() and not any(out_dir.iterdir())):
        raise ValueError(f"{out_dir} exists and is not an empty directory; choose another one, or remove it")


def license_of_the_code() -> str:
    """Returns the licence of this project: from the clone that this file lies in, or what was installed."""
    if (path := Path(__file__).parents[3] / "LICENSE").is_file():
        return path.read_text(encoding="utf-8")
    # In the folder of a build several distributions have the name, of which some are without it.
    texts = (distribution.read_text("licenses/LICENSE") for distribution in distributions(name="matmix"))
    text = next(filter(None, texts), None)
    assert text is not None, "matmix was installed without its LICENSE"
    return text


def write_sums(directory: Path) -> None:
    """Writes SHA256SUMS over all files in a directory, in the form that `sha256sum -c` reads."""
    lines = []
    for path in exported_files(directory):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        lines.append(f"{digest}  {path.relative_to(directory).as_posix()}\n")
    (directory / SUMS).write_text("".join(lines), encoding="utf-8")


def exported_files(directory: Path) -> list[Path]:
    """Returns all files in a directory and in folders of it, sorted."""
    return sorted(path for path in directory.rglob("*") if not path.is_dir())


def config_file(
    config: ModelConfig, special: Mapping[str, int | None], dtype: str, outputs: Outputs, max_length: int
) -> dict[str, Any]:
    """Returns the content of config.json."""
    fields: dict[str, Any] = {}
    if form := FORMS.get(config.architecture):
        modules = {name: f"modeling_matmix.{own}" for name, own in form.classes.items()}
        fields = {
            "model_type": form.config_class.model_type,
            "architectures": [form.classes[main_class(config, outputs)]],
            "auto_map": {"AutoConfig": f"configuration_matmix.{form.config_class.__name__}", **modules},
            **head_fields(config, outputs),
        }
    fields |= {"vocab_size": config.vocab_size, "tie_word_embeddings": config.tie_embeddings, "dtype": dtype}
    if config.model_class.inputs == "tokens":
        fields["max_position_embeddings"] = longest_text(config, max_length)
    return {**fields, **_token_ids(special), "matmix": model_config_to_dict(config)}


def longest_text(config: ModelConfig, max_length: int) -> int:
    """Returns how long a text may be for tools: as in the training, or as what the model has parameters for."""
    return config.max_seqlen if config.position_embeddings or config.fixed_length_mixers() else max_length


def write_code(directory: Path, config: ModelConfig) -> None:
    """Writes modeling_matmix.py and configuration_matmix.py."""
    form, kind = FORMS[config.architecture], config.architecture.replace("_", " ")
    # The configuration names the architecture, which must be known even where AutoModel needs less than all of it.
    own = (config.model_class.__module__, config.model_class.__qualname__)
    modeling = _bundled(
        directory / "modeling_matmix.py",
        [own, *((f"{EXPORT}.{form.source}", name) for name in form.classes.values())],
        f"A matmix {kind} for transformers, in PyTorch alone.",
        registries={"MIXERS": used_mixers(config)},
        siblings={_CONFIG_SOURCE: ".configuration_matmix"},
    )
    # transformers remembers model classes by their configuration class, and takes configuration files with
    # the same content, in directories of the same name, for the same: they must differ where the models do.
    fingerprint = hashlib.sha256(modeling.encode()).hexdigest()[:16]
    _bundled(
        directory / "configuration_matmix.py",
        [(_CONFIG_SOURCE, form.config_class.__name__)],
        "Configuration of a matmix model for transformers.",
        f"\nFor modeling_matmix.py {fingerprint}.",
    )


def write_image_processor(directory: Path, config: ModelConfig, images: ImageInputs) -> None:
    """Writes preprocessor_config.json and image_processing_matmix.py. Raises ValueError where `images` do not fit."""
    image = config.image
    if len(images.mean) != image.channels or images.size % image.patch:
        raise ValueError(
            f"images of {images.size} pixels and {len(images.mean)} channels do not fit a model of patches of "
            f"{image.patch} and {image.channels} channels"
        )
    name = "MatmixImageProcessor"
    roots = [(f"{EXPORT}.images", name)]
    _bundled(directory / "image_processing_matmix.py", roots, "From pictures to the inputs of a matmix model.")
    fields = {"image_processor_type": name, "auto_map": {"AutoImageProcessor": f"image_processing_matmix.{name}"}}
    _write_json(directory / "preprocessor_config.json", fields | asdict(images))


def _bundled(path: Path, roots: list[tuple[str, str]], what: str, extra: str = "", **options: Any) -> str:
    """Writes the module that `bundle` makes, with a header; returns it."""
    series = version("matmix")
    origin = f"Written by matmix {series} from its own sources. Not meant to be edited."
    code = bundle(roots, header=f'{_LICENSE}"""{what}\n\n{origin}{extra}\n"""', version=series, **options)
    path.write_text(code, encoding="utf-8")
    return code


def _token_ids(special: Mapping[str, int | None]) -> dict[str, int]:
    names = ("pad", "bos", "eos", "cls", "sep", "mask")
    return {f"{name}_token_id": special[name] for name in names if special.get(name) is not None}


def _write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

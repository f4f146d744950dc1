"""Writes a model as a directory that transformers loads without matmix, if there are classes for its architecture;
other architectures are written as weights and configuration."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from matmix.model.build import build_model
from matmix.model.config import ModelConfig, model_config_to_dict, used_mixers
from matmix.model.interop.export.bundle import bundle
from matmix.model.interop.export.tokenizer import load_fast_tokenizer, write_tokenizer
from matmix.model.interop.export.weights import write_weights

SUMS = "SHA256SUMS"
_EXPORT = "matmix.model.interop.export"
_CONFIG_SOURCE = f"{_EXPORT}.config"


@dataclasses.dataclass(frozen=True, slots=True)
class TransformersForm:
    """The classes by which transformers loads the models of an architecture."""

    model_type: str
    config_class: str
    source: str
    auto_classes: dict[str, str]
    main: str
    pipeline: str


FORMS = {
    "language_model": TransformersForm(
        model_type="matmix",
        config_class="MatmixConfig",
        source=f"{_EXPORT}.language_model",
        auto_classes={"AutoModel": "MatmixModel", "AutoModelForCausalLM": "MatmixForCausalLM"},
        main="AutoModelForCausalLM",
        pipeline="text-generation",
    ),
    "encoder": TransformersForm(
        model_type="matmix-encoder",
        config_class="MatmixEncoderConfig",
        source=f"{_EXPORT}.encoder",
        auto_classes={
            "AutoModel": "MatmixEncoderModel",
            "AutoModelForMaskedLM": "MatmixForMaskedLM",
            "AutoModelForSequenceClassification": "MatmixForSequenceClassification",
        },
        main="AutoModelForMaskedLM",
        pipeline="fill-mask",
    ),
}
"""Architecture -> its form. Others are exported as weights and configuration, which `read_export` reads."""

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
    notes: str = "",
) -> Path:
    """Write weights, configuration, tokenizer and, for transformers, the code of a model into a new directory.

    The directory appears whole or not at all: everything is written next to it first and then renamed.

    Args:
        config: the model's configuration. state: its weights by name; an iterable of pairs is consumed
        one tensor at a time, so that no more than one file of weights is in memory. tokenizer: a
        sentencepiece model or a tokenizer.json; None exports without a tokenizer. out_dir: must not
        exist, or be empty. special: ids of pad, unk, bos, eos, cls, sep, mask, where there are such
        tokens. prefix, suffix: names of the special tokens that stood before and after every document in
        training. dtype: "float32", "bfloat16" or "float16". max_shard_bytes: largest size of a file of
        weights. notes: Markdown for the model card, such as where the weights come from.
    Returns: the directory. Raises ValueError (one line) if it is not empty or the parts do not fit each
    other.
    """
    out_dir, special = Path(out_dir), dict(special or {})
    check_target(out_dir)
    fast = None if tokenizer is None else load_fast_tokenizer(tokenizer, special)
    if fast is not None and fast.get_vocab_size() > config.vocab_size:
        raise ValueError(
            f"the tokenizer {tokenizer} has {fast.get_vocab_size()} ids, the model only {config.vocab_size}; "
            "take the tokenizer that the model was trained with"
        )
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    temporary = out_dir.parent / f".tmp-{out_dir.name}-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        expected = {name: t.shape for name, t in build_model(config, device="meta").state_dict().items()}
        pairs = state.items() if isinstance(state, Mapping) else state
        write_weights(
            temporary, pairs, expected=expected, prefix="model.", dtype=dtype, max_shard_bytes=max_shard_bytes
        )
        if config.architecture in FORMS:
            write_code(temporary, config)
        _write_json(temporary / "config.json", config_file(config, special, dtype))
        if config.causal and config.model_class.tokens:
            # Where documents start with no token of their own, what is generated from nothing starts as after
            # the end of one.
            start = special.get("bos") if prefix == "bos" else special.get("eos")
            ids = {"pad": special.get("pad"), "bos": start, "eos": special.get("eos")}
            _write_json(temporary / "generation_config.json", _token_ids(ids))
        if fast is not None:
            write_tokenizer(
                temporary,
                fast,
                special=special,
                prefix=special.get(prefix),
                # A prompt is a document that has not ended.
                suffix=None if config.causal else special.get(suffix),
                max_length=config.max_seqlen,
                # New tokens are appended on the right, so a batch of prompts must end there.
                padding_side="left" if config.causal else "right",
                token_types=config.architecture == "encoder" and config.type_vocab_size > 1,
            )
        (temporary / "README.md").write_text(model_card(config, fast is not None, notes), encoding="utf-8")
        write_sums(temporary)
        if out_dir.exists():
            out_dir.rmdir()
        temporary.rename(out_dir)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return out_dir


def write_sums(directory: Path) -> None:
    """Write SHA256SUMS over all files in a directory, in the form that `sha256sum -c` reads."""
    lines = []
    for path in sorted(directory.iterdir()):
        with path.open("rb") as file:
            lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.name}\n")
    (directory / SUMS).write_text("".join(lines), encoding="utf-8")


def check_target(out_dir: Path) -> None:
    """Raise ValueError unless `out_dir` is free to be written."""
    if out_dir.is_dir() and not any(out_dir.iterdir()):
        return
    if out_dir.exists():
        raise ValueError(f"{out_dir} exists and is not an empty directory; choose another one, or remove it")


def config_file(config: ModelConfig, special: Mapping[str, int | None], dtype: str) -> dict[str, Any]:
    """The content of config.json."""
    for_transformers = {}
    if form := FORMS.get(config.architecture):
        modules = {name: f"modeling_matmix.{target}" for name, target in form.auto_classes.items()}
        for_transformers = {
            "model_type": form.model_type,
            "architectures": [form.auto_classes[form.main]],
            "auto_map": {"AutoConfig": f"configuration_matmix.{form.config_class}", **modules},
        }
    return {
        **for_transformers,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_embeddings,
        "dtype": dtype,
        **_token_ids(special),
        "matmix": model_config_to_dict(config),
    }


def write_code(directory: Path, config: ModelConfig) -> None:
    """Write modeling_matmix.py and configuration_matmix.py."""
    form, matmix_version = FORMS[config.architecture], version("matmix")
    kind = config.architecture.replace("_", " ")

    def header(what: str, extra: str = "") -> str:
        origin = f"Written by matmix {matmix_version} from its own sources. Not meant to be edited."
        return f'{_LICENSE}"""{what}\n\n{origin}{extra}\n"""'

    modeling = bundle(
        [(form.source, name) for name in form.auto_classes.values()],
        header=header(f"A matmix {kind} for transformers, in PyTorch alone."),
        version=matmix_version,
        registries={"MIXERS": used_mixers(config)},
        siblings={_CONFIG_SOURCE: ".configuration_matmix"},
    )
    # transformers remembers model classes by their configuration class, and takes configuration files with
    # the same content, in directories of the same name, for the same: they must differ where the models do.
    fingerprint = hashlib.sha256(modeling.encode()).hexdigest()[:16]
    configuration = bundle(
        [(_CONFIG_SOURCE, form.config_class)],
        header=header("Configuration of a matmix model for transformers.", f"\nFor modeling_matmix.py {fingerprint}."),
        version=matmix_version,
    )
    (directory / "modeling_matmix.py").write_text(modeling, encoding="utf-8")
    (directory / "configuration_matmix.py").write_text(configuration, encoding="utf-8")


def model_card(config: ModelConfig, has_tokenizer: bool, notes: str) -> str:
    """README.md of an export."""
    form = FORMS.get(config.architecture)
    folder = '"PATH/TO/THIS/DIRECTORY"'
    if form is None:
        code = ["from matmix.model.interop import read_export", "", f"model = read_export({folder}).eval()"]
        needs = f"Reading it needs matmix and the module that registers its architecture, `{config.architecture}`."
    else:
        code = [
            f"from transformers import {form.main}{', AutoTokenizer' if has_tokenizer else ''}",
            "",
            f"model = {form.main}.from_pretrained({folder}, trust_remote_code=True)",
        ]
        if has_tokenizer:
            code.append(f"tokenizer = AutoTokenizer.from_pretrained({folder})")
        needs = (
            "The code in `modeling_matmix.py` needs PyTorch and transformers only.\n"
            "Where matmix is installed, its kernels are used."
        )
    fixed = config.fixed_length_mixers()
    paragraphs = [
        f"---\nlibrary_name: transformers\npipeline_tag: {form.pipeline}\n---" if form else "",
        f"# matmix {config.architecture.replace('_', ' ')}",
        f"{config.n_layers} layers ({', '.join(sorted(used_mixers(config))) or 'no mixer'}), width {config.d_model}"
        f"{f', {config.vocab_size:,} tokens' if config.model_class.tokens else ''}.",
        f"It takes sequences of exactly {config.max_seqlen} tokens and no padding, having parameters for every\n"
        f"position ({', '.join(fixed)}): cut or fill texts to that length."
        if fixed
        else "",
        notes.strip(),
        "\n".join(["```python", *code, "```"]),
        needs,
    ]
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph) + "\n"


def _token_ids(special: Mapping[str, int | None]) -> dict[str, int]:
    names = ("pad", "bos", "eos", "cls", "sep", "mask")
    return {f"{name}_token_id": special[name] for name in names if special.get(name) is not None}


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

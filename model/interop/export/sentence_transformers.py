"""The files by which `SentenceTransformer(DIR, trust_remote_code=True)` of sentence-transformers loads an export.

Its first module runs transformers' AutoModel, the second one pools the features of a text as the model does.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matmix.model.architectures.encoder import EncoderTrunk
from matmix.model.config import ModelConfig

_POOLING = "1_Pooling"


def takes_layout(config: ModelConfig) -> bool:
    """Returns True where a model gives features that can be pooled to one vector for each text of any length:
    embedders, and encoders that still have the output of their pretraining."""
    embeds = config.architecture == "text_embedder" or not config.model_class.takes_head
    return embeds and issubclass(config.model_class, EncoderTrunk) and not config.fixed_length_mixers()


def write_layout(directory: Path, config: ModelConfig, max_length: int) -> None:
    """Writes modules.json, sentence_bert_config.json, config_sentence_transformers.json and 1_Pooling/config.json. The
    features of a plain encoder are averaged. max_length: tokens at which longer texts are cut."""
    pooling = config.head.pooling if config.model_class.takes_head else "mean"
    kinds = {"cls_token": pooling == "cls", "mean_tokens": pooling == "mean", "max_tokens": False}
    (directory / _POOLING).mkdir()
    _write(
        directory / "modules.json",
        [
            {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
            {"idx": 1, "name": "1", "path": _POOLING, "type": "sentence_transformers.models.Pooling"},
        ],
    )
    _write(directory / "sentence_bert_config.json", {"max_seq_length": max_length, "do_lower_case": False})
    _write(
        directory / "config_sentence_transformers.json",
        {"prompts": {}, "default_prompt_name": None, "similarity_fn_name": "cosine"},
    )
    _write(
        directory / _POOLING / "config.json",
        {"word_embedding_dimension": config.d_model} | {f"pooling_mode_{kind}": used for kind, used in kinds.items()},
    )


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

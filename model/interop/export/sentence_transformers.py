"""The files by which `SentenceTransformer(DIR, trust_remote_code=True)` of sentence-transformers loads an export.

Its first module runs transformers' AutoModel, the second one pools the features of a text as the model does.
"""

from typing import Any

from matmix.model.architectures.encoder import EncoderTrunk
from matmix.model.config import ModelConfig


def takes_layout(config: ModelConfig) -> bool:
    """Returns True where a model gives features that can be pooled to one vector for each text of any length:
    embedders, and encoders that still have the output of their pretraining."""
    embeds = config.architecture == "text_embedder" or not config.model_class.takes_head
    return embeds and issubclass(config.model_class, EncoderTrunk) and not config.fixed_length_mixers()


def layout_files(config: ModelConfig, max_length: int) -> dict[str, Any]:
    """Returns the files by their names. max_length: tokens at which longer texts are cut."""
    pooling = config.head.pooling if config.model_class.takes_head else "mean"
    parts = (("", "Transformer"), ("1_Pooling", "Pooling"))
    return {
        "modules.json": [
            {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for index, (path, kind) in enumerate(parts)
        ],
        "sentence_bert_config.json": {"max_seq_length": max_length, "do_lower_case": False},
        "config_sentence_transformers.json": {
            "prompts": {},
            "default_prompt_name": None,
            "similarity_fn_name": "cosine",
        },
        "1_Pooling/config.json": {
            "word_embedding_dimension": config.d_model,
            "pooling_mode_cls_token": pooling == "cls",
            "pooling_mode_mean_tokens": pooling == "mean",
            "pooling_mode_max_tokens": False,
        },
    }

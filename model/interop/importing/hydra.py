"""The published Hydra layer and encoder: constructor arguments, parameter names."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from matmix.model.architectures.encoder import Encoder
from matmix.model.config import MixerOptions, ModelConfig
from matmix.model.interop.importing.layouts import ForeignConfig, Layout, is_tied
from matmix.model.mixers.scans.hydra import Hydra, HydraConfig

_OPTIONS = ("d_state", "d_conv", "expand", "headdim", "ngroups", "bias", "conv_bias", "learnable_init_states")
# Arguments of the layer that change initialisation or speed only.
_WITHOUT_EFFECT = ("conv_init", "chunk_size", "use_mem_eff_path", "layer_idx", "device", "dtype")

_ACTIVATIONS = {
    "gelu": "gelu",
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "gelu_tanh"),
    "relu": "relu",
    **dict.fromkeys(("silu", "swish"), "silu"),
}


def hydra_layer_layout(state: Mapping[str, torch.Tensor], values: Mapping[str, Any]) -> Layout:
    """Returns the layout of a layer (kind hydra-layer) from its constructor arguments."""
    config = ForeignConfig("hydra-layer", values)
    d_model = config.require("d_model", int)
    low, high = config.get("dt_limit", (0.0, math.inf), tuple | list)
    config.choice("activation", "swish", ("swish", "silu"))
    options = HydraConfig(
        **config.options(HydraConfig, *_OPTIONS, "dt_min", "dt_max", "dt_init_floor"),
        dt_limit_low=float(low),
        dt_limit_high=0.0 if math.isinf(high) else float(high),
    )
    config.refuse_unknown(_WITHOUT_EFFECT)
    return Layout.of_layer(config.kind, (Hydra,), d_model, options)


class PublishedEncoder(Encoder):
    """An encoder that takes the mask as its second argument."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **options: Any) -> Any:
        return super().forward(input_ids, attention_mask=attention_mask, **options)


_EMBEDDING, _OUTPUT = "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"


def hydra_mlm_layout(state: Mapping[str, torch.Tensor], values: Mapping[str, Any]) -> Layout:
    """Returns the layout of the encoder (kind hydra-mlm) that a BertConfig describes; keys of it that say nothing about
    it are ignored. Options of the layer that a BertConfig lacks may be added to it: ngroups, bias, conv_bias,
    learnable_init_states.

    Texts of one length give what the original gives. Beside longer ones its mixers read the padding as tokens of
    zeros, which changes the scores near the end of a text; ours stop at its end.
    """
    config = ForeignConfig("hydra-mlm", values)
    config.choice("matrix_mixer_type", "hydra", ("hydra",))
    activation = config.choice("hidden_act", "gelu", _ACTIVATIONS)
    norm_eps = config.get("layer_norm_eps", 1e-12)
    tied = is_tied(config.kind, state, _OUTPUT, _EMBEDDING)
    model = ModelConfig(
        architecture="encoder",
        vocab_size=config.get("vocab_size", 30522),
        d_model=config.get("hidden_size", 768),
        n_layers=config.get("num_hidden_layers", 12),
        layers=("hydra",),
        mlp_ratio=0.0,
        norm="pre" if config.get("is_prenorm", False) else "post",
        norm_bias=True,
        final_norm_eps=norm_eps,
        embedding_dropout=config.get("hidden_dropout_prob", 0.1),
        max_seqlen=config.get("max_position_embeddings", 512),
        tie_embeddings=tied,
        type_vocab_size=config.get("type_vocab_size", 2),
        position_embeddings=config.get("use_position_embeddings", False),
        embedding_norm_eps=norm_eps,
        head_activation=_ACTIVATIONS[activation],
        mixers=MixerOptions(hydra=HydraConfig(**config.options(HydraConfig, *_OPTIONS))),
    )
    names = {
        "embeddings.word": "bert.embeddings.word_embeddings",
        "embeddings.token_type": "bert.embeddings.token_type_embeddings",
        "embeddings.position": "bert.embeddings.position_embeddings",
        "embeddings.norm": "bert.embeddings.LayerNorm",
        "norm": "bert.encoder.norm_f",
        "head.dense": "cls.predictions.transform.dense",
        "head.norm": "cls.predictions.transform.LayerNorm",
        "head.bias": "cls.predictions.decoder.bias",
        "output": "cls.predictions.decoder",
    }
    for index in range(model.n_layers):
        theirs = f"bert.encoder.layer.{index}.layer"
        names |= {f"blocks.{index}.mixer": f"{theirs}.mixer", f"blocks.{index}.norm_mixer": f"{theirs}.norm"}
    ignored = {"bert.embeddings.position_ids", "bert.embeddings.token_type_ids", *([_OUTPUT] if tied else [])}
    built = {"bases": (PublishedEncoder,), "arguments": {"config": model}}
    return Layout(kind=config.kind, **built, names=names, ignored=ignored)


def hydra_mlm_values(state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Returns the configuration that the shapes of a state imply, for checkpoints without one (ngroups 1)."""
    prefix = "bert.encoder.layer.0.layer.mixer."
    needed = (_EMBEDDING, f"{prefix}norm.weight", f"{prefix}A_log", f"{prefix}conv1d.weight")
    if missing := [name for name in needed if name not in state]:
        raise ValueError(f"hydra-mlm: the state lacks key {missing[0]!r}")
    word, norm, heads, conv = (state[name] for name in needed)
    types, positions = (state.get(f"bert.embeddings.{kind}_embeddings.weight") for kind in ("token_type", "position"))
    tables = {"type_vocab_size": types, "max_position_embeddings": positions}
    return {
        "vocab_size": word.shape[0],
        "hidden_size": word.shape[1],
        "num_hidden_layers": 1 + max(int(name.split(".")[3]) for name in state if ".encoder.layer." in name),
        "expand": norm.shape[0] // word.shape[1],
        "headdim": norm.shape[0] // heads.shape[0],
        "d_state": (conv.shape[0] - norm.shape[0]) // 4,
        "d_conv": conv.shape[-1],
        "is_prenorm": "bert.encoder.norm_f.weight" in state,
        "use_position_embeddings": positions is not None,
        **{name: table.shape[0] for name, table in tables.items() if table is not None},
    }

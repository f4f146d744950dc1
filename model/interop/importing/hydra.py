"""The published Hydra layer and encoder: constructor arguments, parameter names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from matmix.model.config import MixerOptions, ModelConfig
from matmix.model.interop.importing.layouts import ForeignConfig, Layout, is_tied
from matmix.model.mixers.scans.hydra import HydraConfig

# Arguments of the layer that change initialisation or speed only.
_WITHOUT_EFFECT = frozenset({"conv_init", "chunk_size", "use_mem_eff_path", "layer_idx", "device", "dtype"})

_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}

_MIXER_PARAMETERS = (
    "in_proj.weight",
    "conv1d.weight",
    "dt_bias",
    "A_log",
    "D",
    "fc_D.weight",
    "norm.weight",
    "out_proj.weight",
)


def hydra_layer_layout(values: Mapping[str, Any]) -> tuple[int, HydraConfig, Layout]:
    """Width, options and names of a layer (kind hydra-layer) from its constructor arguments."""
    config = ForeignConfig("hydra-layer", values)
    d_model = config.require("d_model", int)
    low, high = config.get("dt_limit", (0.0, math.inf), tuple | list)
    activation = config.get("activation", "swish")
    if activation not in ("swish", "silu"):
        raise ValueError(f"hydra-layer: activation = {activation!r}; the layer knows swish (= silu) only")
    options = HydraConfig(
        d_state=config.get("d_state", 64),
        d_conv=config.get("d_conv", 7),
        expand=config.get("expand", 2),
        headdim=config.get("headdim", 64),
        ngroups=config.get("ngroups", 1),
        dt_min=config.get("dt_min", 0.001),
        dt_max=config.get("dt_max", 0.1),
        dt_init_floor=config.get("dt_init_floor", 1e-4),
        dt_limit_low=float(low),
        dt_limit_high=0.0 if math.isinf(high) else float(high),
        learnable_init_states=config.get("learnable_init_states", False),
        bias=config.get("bias", False),
        conv_bias=config.get("conv_bias", True),
    )
    config.refuse_unknown(_WITHOUT_EFFECT)
    names = mixer_names(options)
    return d_model, options, Layout(kind="hydra-layer", names={name: name for name in names})


def mixer_names(options: HydraConfig) -> list[str]:
    """Names of the parameters of one layer; ours are the same."""
    names = list(_MIXER_PARAMETERS)
    if options.conv_bias:
        names.append("conv1d.bias")
    if options.bias:
        names += ["in_proj.bias", "out_proj.bias"]
    if options.learnable_init_states:
        names.append("init_states")
    return names


def hydra_mlm_layout(state: Mapping[str, torch.Tensor], values: Mapping[str, Any]) -> tuple[ModelConfig, Layout]:
    """The encoder (kind hydra-mlm) that a BertConfig describes; keys of it that say nothing about it are
    ignored. Options of the layer that a BertConfig lacks may be added to it: ngroups, bias, conv_bias,
    learnable_init_states.

    Texts of one length give what the original gives. Beside longer ones its mixers read the padding as tokens of
    zeros, which changes the scores near the end of a text; ours stop at its end.
    """
    config = ForeignConfig("hydra-mlm", values)
    mixer_type = config.get("matrix_mixer_type", "hydra")
    if mixer_type != "hydra":
        raise ValueError(f"hydra-mlm: matrix_mixer_type = {mixer_type!r}; only 'hydra' can be read")
    activation = config.get("hidden_act", "gelu")
    if activation not in _ACTIVATIONS:
        raise ValueError(f"hydra-mlm: hidden_act = {activation!r}; known: {', '.join(_ACTIVATIONS)}")
    d_model, expand = config.get("hidden_size", 768), config.get("expand", 2)
    options = HydraConfig(
        d_state=config.get("d_state", 64),
        d_conv=config.get("d_conv", 7),
        expand=expand,
        headdim=config.get("headdim", 64),
        ngroups=config.get("ngroups", 1),
        bias=config.get("bias", False),
        conv_bias=config.get("conv_bias", True),
        learnable_init_states=config.get("learnable_init_states", False),
    )
    pre, positions = config.get("is_prenorm", False), config.get("use_position_embeddings", False)
    embedding, output = "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"
    tied = is_tied("hydra-mlm", state, output, embedding)
    norm_eps = config.get("layer_norm_eps", 1e-12)
    model = ModelConfig(
        architecture="encoder",
        vocab_size=config.get("vocab_size", 30522),
        d_model=d_model,
        n_layers=config.get("num_hidden_layers", 12),
        layers=("hydra",),
        mlp_ratio=0.0,
        norm="pre" if pre else "post",
        norm_bias=True,
        final_norm_eps=norm_eps,
        embedding_dropout=config.get("hidden_dropout_prob", 0.1),
        max_seqlen=config.get("max_position_embeddings", 512),
        tie_embeddings=tied,
        type_vocab_size=config.get("type_vocab_size", 2),
        position_embeddings=positions,
        embedding_norm_eps=norm_eps,
        head_activation=_ACTIVATIONS[activation],
        mixers=MixerOptions(hydra=options),
    )
    names = {
        "embeddings.word.weight": embedding,
        "embeddings.token_type.weight": "bert.embeddings.token_type_embeddings.weight",
        "embeddings.norm.weight": "bert.embeddings.LayerNorm.weight",
        "embeddings.norm.bias": "bert.embeddings.LayerNorm.bias",
        "head.dense.weight": "cls.predictions.transform.dense.weight",
        "head.dense.bias": "cls.predictions.transform.dense.bias",
        "head.norm.weight": "cls.predictions.transform.LayerNorm.weight",
        "head.norm.bias": "cls.predictions.transform.LayerNorm.bias",
        "head.bias": "cls.predictions.decoder.bias",
    }
    if model.type_vocab_size == 0:
        del names["embeddings.token_type.weight"]
    if positions:
        names["embeddings.position.weight"] = "bert.embeddings.position_embeddings.weight"
    if not tied:
        names["output.weight"] = output
    if pre:
        names |= {f"norm.{part}": f"bert.encoder.norm_f.{part}" for part in ("weight", "bias")}
    for index in range(model.n_layers):
        theirs = f"bert.encoder.layer.{index}.layer."
        names |= {f"blocks.{index}.mixer.{name}": f"{theirs}mixer.{name}" for name in mixer_names(options)}
        names |= {f"blocks.{index}.norm_mixer.{part}": f"{theirs}norm.{part}" for part in ("weight", "bias")}
    ignored = {"bert.embeddings.position_ids", "bert.embeddings.token_type_ids"} | ({output} if tied else set())
    return model, Layout(kind="hydra-mlm", names=names, ignored=frozenset(ignored))


def hydra_mlm_values(state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The configuration that the shapes of a state imply, for checkpoints without one (ngroups 1)."""
    prefix = "bert.encoder.layer.0.layer.mixer."
    needed = ("bert.embeddings.word_embeddings.weight", prefix + "norm.weight", prefix + "A_log")
    needed += (prefix + "conv1d.weight",)
    for name in needed:
        if name not in state:
            raise ValueError(f"hydra-mlm: the state lacks key {name!r}")
    word, norm, heads, conv = (state[name] for name in needed)
    values: dict[str, Any] = {
        "vocab_size": word.shape[0],
        "hidden_size": word.shape[1],
        "num_hidden_layers": 1 + max(int(name.split(".")[3]) for name in state if ".encoder.layer." in name),
        "expand": norm.shape[0] // word.shape[1],
        "headdim": norm.shape[0] // heads.shape[0],
        "d_state": (conv.shape[0] - norm.shape[0]) // 4,
        "d_conv": conv.shape[-1],
        "is_prenorm": "bert.encoder.norm_f.weight" in state,
        "use_position_embeddings": "bert.embeddings.position_embeddings.weight" in state,
    }
    for name, key in (
        ("type_vocab_size", "token_type_embeddings"),
        ("max_position_embeddings", "position_embeddings"),
    ):
        if f"bert.embeddings.{key}.weight" in state:
            values[name] = state[f"bert.embeddings.{key}.weight"].shape[0]
    return values

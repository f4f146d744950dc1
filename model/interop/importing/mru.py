"""mru-lm's models: constructor arguments, parameter names, in all of its arrangements.

"layers": a list of "mru", "attn" and "mlp" layers, each behind a LayerNorm of its own (`pre_lns`). "blocks":
mixer and MLP in one block (`first_ln`, `second_ln`), attention without positions. The first form, of December 2024:
such blocks, all of them MRUs with chunked input, and no norm at the end.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from matmix.model.architectures.language_model import LanguageModel
from matmix.model.config import MixerOptions, ModelConfig
from matmix.model.interop.importing.layouts import ForeignConfig, Layout, is_tied, shape_text
from matmix.model.mixers.attention.softmax_attention import AttentionConfig
from matmix.model.mixers.mru import MRUConfig

_OUR_NAMES = {"mru": "mru", "attn": "attention", "mlp": "mlp"}
_CONSTRUCTIONS = ("cayley", "identity_plus", "ldu", "qr")
"""Those of ours that are that project's to the last sign: its product of reflections has no minus, and its step of
Newton-Schulz is another."""

_POSITION_TABLES = {f"position_embedding.{name}" for name in ("c", "s", "t", "invt")}
_PARAMETERS = {
    "mru": {
        "mixer.in_proj": "state_matrices_up",
        "mixer.state_up": "state_matrices_up",
        "mixer.state_down": "state_matrices_down",
        "mixer.out_proj": "mru_out",
    },
    "attn": {
        "mixer.q_proj": "query_layer",
        "mixer.k_proj": "key_layer",
        "mixer.v_proj": "value_layer",
        "mixer.out_proj": "attention_down",
    },
    "mlp": {"mlp.up": "mlp.0", "mlp.down": "mlp.2"},
}
"""Kind of layer -> beginnings of our names in a block -> theirs."""


def mru_lm_layout(state: Mapping[str, Tensor], values: Mapping[str, Any]) -> Layout:
    """Returns the layout of the model (kind mru-lm) that the reference's configuration describes.

    Beyond the reference's keys, `state_construction` names the construction of state matrices, which that code has
    changed by editing: "cayley", "identity_plus", "ldu" or "qr". By default it is what the published networks had:
    cayley where the up projection has no more rows than a triangle has elements, else ldu in the "layers" arrangement
    and qr in blocks. `form` = "first" says that it is the network of December 2024, whose construction is
    identity_plus; where it is left out, the names of the state tell. `element_scale` is a factor of the elements, which
    the blocks of one commit (310a009, with "identity_plus") had: 1 / order.

    Read exactly are the networks of the commits 8fb2d95 to b9b8e85 (first form), 916e582 to 10ebd4a (blocks), and from
    d1311e3 on (layers). Those of 932802f and bc8fca1, which the next commit mended, and of f4b9ecc and edacdaa, with
    other scales, have the same names and shapes and compute something else.
    """
    config = ForeignConfig("mru-lm", values)
    form = config.get("form", "")
    if form not in ("", "first"):
        raise ValueError(f'mru-lm: form = {form!r}; known: "first" (of December 2024), or leave it out')
    first = form == "first" or "blocks.0.state_matrices_up" in state
    d_model = config.require("embedding_size", int)
    nheads, state_size = config.require("n_state_heads", int), config.get("state_size", d_model)
    order = math.isqrt(state_size // nheads) if nheads > 0 else 0
    if nheads < 1 or nheads * order**2 != state_size:
        raise ValueError(
            f"mru-lm: state_size = {state_size} is not n_state_heads = {nheads} times the square of a whole number"
        )
    blocks = first or ("layers" not in values and any(name.startswith("blocks.") for name in state))
    kinds = block_kinds(state, config) if blocks else layer_kinds(config)
    attention_heads = config.get("n_attn_heads", nheads)
    key_size, value_size = config.get("key_size", d_model), config.get("value_size", d_model)
    if attention_heads < 1 or key_size % attention_heads or value_size % attention_heads:
        raise ValueError(
            f"mru-lm: n_attn_heads = {attention_heads} does not divide key_size = {key_size} "
            f"and value_size = {value_size}"
        )
    dropout = config.get("dropout_rate", 0.0)
    head = "lm_head_weights" if first else "lm_head.weight"
    tied = is_tied("mru-lm", state, head, "wte.weight")
    model = ModelConfig(
        architecture="language_model",
        vocab_size=config.require("vocab_size", int),
        d_model=d_model,
        n_layers=len(kinds),
        layers=tuple(_OUR_NAMES[kind] for kind in kinds),
        mlp_ratio=4.0 if blocks or "mlp" in kinds else 0.0,
        dropout=dropout,
        embedding_dropout=dropout,
        max_seqlen=config.get("max_sequence_length", 1024),
        final_norm=not first,
        tie_embeddings=tied,
        mixers=MixerOptions(
            mru=MRUConfig(
                order=order,
                nheads=nheads,
                construction="identity_plus" if first else construction_of(state, config, nheads, order, blocks),
                element_scale=config.get("element_scale", 0.0),
                input="chunked" if first else "dense",
                dropout=dropout,
            ),
            attention=AttentionConfig(
                nheads=attention_heads,
                headdim=key_size // attention_heads,
                value_headdim=value_size // attention_heads,
                position="none" if blocks else "xpos",
                dropout=dropout,
            ),
        ),
    )
    config.refuse_unknown(("create_state_matrix", "n_blocks", "layers"))
    # A matrix of two names goes by that under which the reference's named_parameters() has it.
    embedding, twin = (head, "wte.weight") if first and tied and head in state else ("wte.weight", head)
    names = {"embedding.weight": embedding, "output.weight": head, "norm": "final_ln"}
    return Layout(
        kind="mru-lm",
        bases=(LanguageModel,),
        arguments={"config": model},
        names=names | (names_in_blocks(kinds, first) if blocks else names_in_layers(kinds)),
        ignored=_POSITION_TABLES | ({twin} if tied else set()),
    )


def names_in_blocks(kinds: Sequence[str], first: bool) -> dict[str, str]:
    """Returns the names of blocks of a mixer and an MLP; those of the first form have no folder of their mixer."""
    names = {}
    for index, kind in enumerate(kinds):
        block = f"blocks.{index}."
        names |= {f"{block}norm_mixer": f"{block}first_ln", f"{block}norm_mlp": f"{block}second_ln"}
        for part, place in ((kind, block if first else f"{block}{kind}."), ("mlp", block)):
            names |= {f"{block}{ours}": f"{place}{theirs}" for ours, theirs in _PARAMETERS[part].items()}
    return names


def names_in_layers(kinds: Sequence[str]) -> dict[str, str]:
    """Returns the names of layers, each a mixer or an MLP behind a norm."""
    names = {}
    for index, kind in enumerate(kinds):
        norm = "norm_mlp" if kind == "mlp" else "norm_mixer"
        names[f"blocks.{index}.{norm}"] = f"pre_lns.{index}"
        names |= {f"blocks.{index}.{ours}": f"layers.{index}.{theirs}" for ours, theirs in _PARAMETERS[kind].items()}
    return names


def layer_kinds(config: ForeignConfig) -> list[str]:
    """Returns the list of layers of the "layers" arrangement, checked."""
    kinds = list(config.get("layers", None, list | tuple) or config.require("layers", list))
    for kind in kinds:
        if kind not in _OUR_NAMES:
            raise ValueError(f"mru-lm: layers names {kind!r}; known: {', '.join(_OUR_NAMES)}")
    return kinds


def block_kinds(state: Mapping[str, Tensor], config: ForeignConfig) -> list[str]:
    """Returns the mixer of every block of the "blocks" arrangement, from the names in the state."""
    numbers = {int(name.split(".")[1]) for name in state if name.startswith("blocks.")}
    count = config.get("n_blocks", 1 + max(numbers, default=0))
    return ["attn" if any(name.startswith(f"blocks.{i}.attn.") for name in state) else "mru" for i in range(count)]


def construction_of(state: Mapping[str, Tensor], config: ForeignConfig, nheads: int, order: int, blocks: bool) -> str:
    """Returns the configured construction, or the one that the shape of an up projection allows."""
    of_squares, full, triangle = "qr" if blocks else "ldu", nheads * order**2, nheads * order * (order - 1) // 2
    given = config.get("construction", "")
    if given or config.get("state_construction", ""):
        return config.choice("state_construction", given, _CONSTRUCTIONS)
    up = next(((name, part) for name, part in state.items() if name.endswith("state_matrices_up.weight")), None)
    if up is not None and up[1].shape[0] not in (full, triangle):
        raise ValueError(
            f"mru-lm: key {up[0]!r} has shape {shape_text(up[1])}, but the configuration gives "
            f"({full}, {config.values['embedding_size']})"
        )
    return of_squares if up is None or up[1].shape[0] == full else "cayley"


def mru_lm_values(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Returns the configuration that the shapes of a state imply, for checkpoints without one."""

    def first_of(ending: str) -> Tensor | None:
        return next((tensor for name, tensor in state.items() if name.endswith(ending)), None)

    down, embedding = first_of("state_matrices_down"), state.get("wte.weight", state.get("lm_head_weights"))
    if embedding is None or down is None or down.dim() != 3:
        raise ValueError(
            "mru-lm: the state lacks key 'wte.weight' or a 'state_matrices_down' of shape (heads, order, c)"
        )
    nheads, order, _ = down.shape
    vocab_size, d_model = embedding.shape
    values: dict[str, Any] = {"vocab_size": vocab_size, "embedding_size": d_model, "n_state_heads": nheads}
    values["state_size"] = nheads * order**2
    layers = {int(name.split(".")[1]) for name in state if name.startswith("layers.")}
    if layers:
        signs = {"state_matrices_down": "mru", "query_layer.weight": "attn"}
        values["layers"] = [
            next((kind for sign, kind in signs.items() if f"layers.{index}.{sign}" in state), "mlp")
            for index in sorted(layers)
        ]
    query, table = first_of("query_layer.weight"), state.get("position_embedding.c")
    if query is not None and table is not None:
        values |= {"key_size": query.shape[0], "value_size": first_of("value_layer.weight").shape[0]}
        values["n_attn_heads"] = query.shape[0] // table.shape[-1]
        values["max_sequence_length"] = table.shape[0]
    return values

"""The matrix mixers of the Hydra paper's code, one block for all of them: constructor arguments."""

from collections.abc import Mapping
from typing import Any

import torch

from matmix.model.interop.importing.layouts import ForeignConfig, Layout
from matmix.model.mixers.structured.cauchy import CauchyDD, CauchyDI
from matmix.model.mixers.structured.dense import DFT, Dense
from matmix.model.mixers.structured.low_rank import LowRankDD, LowRankDI, SoftmaxDD, SoftmaxDI
from matmix.model.mixers.structured.matrix_mixer import MatrixMixer
from matmix.model.mixers.structured.quasiseparable import QuasiseparableDD, QuasiseparableDI
from matmix.model.mixers.structured.toeplitz import Toeplitz, ToeplitzDD, ToeplitzDI
from matmix.model.mixers.structured.vandermonde import VandermondeDD


class PublishedSoftmaxDI(SoftmaxDI):
    """Attention with weights for every position as the authors' code computes it: where there are as many heads as
    positions, the first dimension of its q and k counts heads. Elsewhere that code fails."""

    def queries_and_keys(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = super().queries_and_keys(inputs)
        return (q.transpose(1, 2), k.transpose(1, 2)) if self.nheads == self.max_seqlen else (q, k)


# matrix_mixer_type -> the form with parameters of its own and the one made from the data.
_MIXERS: dict[str, tuple[type[MatrixMixer], type[MatrixMixer] | None]] = {
    "attention": (PublishedSoftmaxDI, SoftmaxDD),
    "cauchy": (CauchyDI, CauchyDD),
    "dense": (Dense, None),
    "dft": (DFT, None),
    "low_rank": (LowRankDI, LowRankDD),
    "quasiseparable": (QuasiseparableDI, QuasiseparableDD),
    "toeplitz": (ToeplitzDI, ToeplitzDD),
    "vandermonde": (DFT, VandermondeDD),  # without data the authors' block always takes the Fourier transform
}

# Arguments that change initialisation or speed only.
_WITHOUT_EFFECT = ("conv_init", "chunk_size", "layer_idx", "device", "dtype", "qk_dim", "max_seq_len")


def matrix_mixer_layout(state: Mapping[str, torch.Tensor], values: Mapping[str, Any]) -> Layout:
    """Returns the layout of a block (kind hydra-matrix-mixer) from its constructor arguments.

    All of them compute what the papers' code does. A Toeplitz block takes offset "published", the diagonals as that
    code has them, which runs for sequences of max_seq_len tokens only. A data-dependent cauchy block has no guard, so
    that a bias below 0 can make a pole, as there. An attention block without data dependence fails there, unless there
    are as many heads as positions; here it takes the softmax over positions.
    """
    config = ForeignConfig("hydra-matrix-mixer", values)
    kind = config.choice("matrix_mixer_type", config.require("matrix_mixer_type", str), _MIXERS)
    fixed, dependent = _MIXERS[kind]
    if dependent is None and config.get("is_data_dependent", False):
        raise ValueError(f"{config.kind}: is_data_dependent = True, but {kind!r} has no form that depends on the data")
    mixer = dependent if dependent is not None and config.require("is_data_dependent", bool) else fixed
    d_model, headdim = config.require("d_model", int), config.get("headdim", 128)
    config.choice("activation", "swish", ("swish", "silu"))
    options = config.options(mixer.Config, "expand", "d_conv", "bias", "conv_bias") | {"headdim": headdim}
    # The length is that of the parameters, and stands in the scales; two forms have neither.
    needs_length = mixer not in (DFT, QuasiseparableDD, SoftmaxDD)
    length = config.require("max_seq_len", int) if needs_length else config.get("max_seq_len", 1)
    expand, fields = options["expand"], mixer.Config.__dataclass_fields__
    width = {"qk_dim": config.require("qk_dim", int)} if fields.keys() & {"qk_dim", "d_state"} else {}
    sizes = {"d_model": d_model, "headdim": headdim, "expand": expand, "max_seq_len": length, **width}
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{config.kind}: {name} = {value}: must be at least 1")
    if expand * d_model % headdim:
        raise ValueError(f"{config.kind}: headdim = {headdim} does not divide expand * d_model = {expand} * {d_model}")
    if options["d_conv"] < 1 or options["d_conv"] % 2 == 0:
        raise ValueError(f"{config.kind}: d_conv = {options['d_conv']}: must be odd and at least 1")
    if issubclass(mixer, Toeplitz):
        options["offset"] = "published"
    if mixer is CauchyDD:
        options["guard"] = 0.0
    if "d_state" in fields:
        options["d_state"] = expand * d_model // headdim * width["qk_dim"]
    elif width:
        options |= width
    config.refuse_unknown(_WITHOUT_EFFECT)
    # The Fourier transform is no weight.
    ignored = ("matrix_mixer.dft_matrix",) if mixer is DFT else ()
    return Layout.of_layer(config.kind, (mixer,), d_model, mixer.Config(**options), length, ignored=ignored)

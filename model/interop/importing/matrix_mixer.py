"""The matrix mixers of the Hydra paper's code, one block for all of them: constructor arguments, parameter names."""

from __future__ import annotations

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

KIND = "hydra-matrix-mixer"

# matrix_mixer_type -> the form with parameters of its own and the one made from the data.
_MIXERS: dict[str, tuple[type[MatrixMixer], type[MatrixMixer] | None]] = {
    "attention": (SoftmaxDI, SoftmaxDD),
    "cauchy": (CauchyDI, CauchyDD),
    "dense": (Dense, None),
    "dft": (DFT, None),
    "low_rank": (LowRankDI, LowRankDD),
    "quasiseparable": (QuasiseparableDI, QuasiseparableDD),
    "toeplitz": (ToeplitzDI, ToeplitzDD),
    "vandermonde": (DFT, VandermondeDD),  # without data the authors' block always takes the Fourier transform
}

# Arguments that change initialisation or speed only.
_WITHOUT_EFFECT = frozenset({"conv_init", "chunk_size", "layer_idx", "device", "dtype", "qk_dim", "max_seq_len"})

_SCALAR = "matrix_mixer.bias"


class ScalarAsVector:
    """A module with one parameter of one entry that is a scalar without dimensions in the original code."""

    def reference_gradients(self) -> dict[str, torch.Tensor]:
        """Returns the gradients of `FromReference.reference_gradients`, with that number's gradient in its shape
        there."""
        gradients = super().reference_gradients()
        return {name: grad.reshape(()) if name == _SCALAR else grad for name, grad in gradients.items()}


def scalar_as_vector(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state with one dimension for the parameter that has none."""
    return {name: part.reshape(1) if name == _SCALAR and part.dim() == 0 else part for name, part in state.items()}


def matrix_mixer_layout(values: Mapping[str, Any]) -> tuple[type[MatrixMixer], int, Any, int, Layout]:
    """Class, width, options, length N and names of a block (kind hydra-matrix-mixer) from its constructor arguments.

    A Toeplitz block takes offset "published", the diagonals as the papers' code computes them. That code runs for
    sequences of max_seq_len tokens only.

    Two functions differ from the papers' code. Where a data-dependent cauchy block has denominators e^q + e^k + 2 b
    below 1e-2, which needs b < 0.005, ours continues 1 / x by its tangent (see `CauchyDD`). An attention block without
    data dependence takes the softmax over positions; that code sums over the wrong dimensions and fails, unless there
    are as many heads as positions.
    """
    config = ForeignConfig(KIND, values)
    mixer = _mixer_class(config)
    d_model, headdim, expand = config.require("d_model", int), config.get("headdim", 128), config.get("expand", 2)
    activation = config.get("activation", "swish")
    if activation not in ("swish", "silu"):
        raise ValueError(f"{KIND}: activation = {activation!r}; the block knows swish (= silu) only")
    options: dict[str, Any] = {
        "headdim": headdim,
        "expand": expand,
        "d_conv": config.get("d_conv", 7),
        "bias": config.get("bias", False),
        "conv_bias": config.get("conv_bias", True),
    }
    fields = mixer.Config.__dataclass_fields__
    if "qk_dim" in fields:
        options["qk_dim"] = config.require("qk_dim", int)
    # The length is that of the parameters, and stands in the scales; two forms have neither.
    needs_length = mixer not in (DFT, QuasiseparableDD, SoftmaxDD)
    length = config.require("max_seq_len", int) if needs_length else config.get("max_seq_len", 1)
    least = {"d_model": d_model, "headdim": headdim, "expand": expand, "max_seq_len": length}
    least |= {"qk_dim": config.require("qk_dim", int)} if fields.keys() & {"qk_dim", "d_state"} else {}
    for name, value in least.items():
        if value < 1:
            raise ValueError(f"{KIND}: {name} = {value}: must be at least 1")
    if expand * d_model % headdim:
        raise ValueError(f"{KIND}: headdim = {headdim} does not divide expand * d_model = {expand} * {d_model}")
    if options["d_conv"] < 1 or options["d_conv"] % 2 == 0:
        raise ValueError(f"{KIND}: d_conv = {options['d_conv']}: must be odd and at least 1")
    if issubclass(mixer, Toeplitz):
        options["offset"] = "published"
    if "d_state" in fields:
        options["d_state"] = expand * d_model // headdim * config.require("qk_dim", int)
    config.refuse_unknown(_WITHOUT_EFFECT)
    options = mixer.Config(**options)
    mixer.check(d_model, options)
    with torch.device("meta"):
        block = mixer(d_model, options, causal=False, max_seqlen=length, output_std=0.02)
    # Ours are named like theirs; the Fourier transform is no weight.
    names = {name: name for name, _ in block.named_parameters()}
    ignored = frozenset({"matrix_mixer.dft_matrix"} if mixer is DFT else ())
    return mixer, d_model, options, length, Layout(kind=KIND, names=names, ignored=ignored)


def _mixer_class(config: ForeignConfig) -> type[MatrixMixer]:
    """The class that matrix_mixer_type and is_data_dependent mean."""
    kind = config.require("matrix_mixer_type", str)
    if kind not in _MIXERS:
        raise ValueError(f"{KIND}: matrix_mixer_type = {kind!r}; known: {', '.join(_MIXERS)}")
    fixed, dependent = _MIXERS[kind]
    if dependent is not None:
        return dependent if config.require("is_data_dependent", bool) else fixed
    if config.get("is_data_dependent", False):
        raise ValueError(f"{KIND}: is_data_dependent = True, but {kind!r} has no form that depends on the data")
    return fixed

"""The base class of all sequence mixers, the interface that blocks, models, training and tests use; and functions that
several kinds of mixers share.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from matmix.kernels import gated_norm, semiseparable_scan, semiseparable_step, short_conv, short_conv_step
from matmix.kernels.checks import check_cu_seqlens, transformed
from matmix.kernels.context import Context
from matmix.kernels.functions import outside_autocast, working
from matmix.model.calls import Called, is_quantised, weight_of, weights_of
from matmix.model.initialization import InitRule, NoDraws, constant_init, normal_init, uniform_init
from matmix.model.mixers.continued import Continued
from matmix.model.options import check_words
from matmix.model.parameter_rules import NOT_DECAYED, ParameterRule
from matmix.model.positions import by_documents


class ScanOrders(NamedTuple):
    """The orders in which a sequence of L positions is read."""

    places: Tensor
    """(orders, n) int64: the position that is read as t-th; n = L, or L - 1 with one position outside."""
    outside: int | None = None
    """A position that belongs to no order: it is near to all others alike."""

    def inverse(self) -> Tensor:
        """(orders, n) int64: when each of the positions, but for the one outside, is read."""
        places = self.places
        if self.outside is not None:
            places = places - (places > self.outside).long()
        return places.argsort(1)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadsConfig:
    """Options of mixers whose heads may be wider or narrower together than the model."""

    headdim: int = 64
    """Channels per head."""
    nheads: int = 0
    """Number of heads; 0 means d_model / headdim."""


def head_count(d_model: int, config: Any) -> int:
    """The number of heads: config.nheads, where 0 stands for d_model / headdim."""
    return config.nheads or d_model // config.headdim


class RMSNormWeight(nn.Module):
    """The weight of a gated RMSNorm; the op itself is `kernels.gated_norm`."""

    def __init__(self, width: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))
        self.init_rules = {"weight": constant_init(1.0)}


class RMSNorm(RMSNormWeight):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in the dtype of x."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


def gated(y: Tensor, gate: Tensor, norm: RMSNormWeight | None) -> Tensor:
    """y, normalised where there is a norm, times silu(gate), (..., d) each."""
    y = y.to(gate.dtype)
    return y * F.silu(gate) if norm is None else gated_norm(y, weight_of(norm), gate, eps=norm.eps)


class ShortConv(nn.Conv1d):
    """The weights of a depthwise convolution of few taps; `convolve` computes it."""

    def __init__(self, channels: int, taps: int, bias: bool):
        super().__init__(channels, channels, taps, groups=channels, bias=bias)
        self.init_rules = dict.fromkeys(("weight", "bias"), uniform_init(taps**-0.5))


def conv_weights(conv: nn.Conv1d) -> tuple[Tensor, Tensor | None]:
    """Weight (channels, taps) and bias of a depthwise convolution that an operation of `kernels` computes."""
    weight, bias = weights_of(conv, "weight", "bias")
    return weight.squeeze(1), bias


def convolve(
    conv: nn.Conv1d,
    x: Tensor,
    window: Tensor | None = None,
    *,
    in_place: bool = False,
    context: Context | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """`short_conv` of x (B, L, channels), in a `context` of a part, with its `options`, and None. With a `window`, the
    last inputs (B, channels, taps - 1), it goes on behind them over whole rows, also by one token x (B, channels), and
    gives the new window, for a token `in_place` of the old. With `cu_seqlens` each document has a window, (documents,
    channels, taps - 1), also in a part."""
    weight, bias = conv_weights(conv)
    if window is None:
        return short_conv(x, weight, bias, context=context, **options), None
    if x.dim() == 2:
        return short_conv_step(x, window, weight, bias, activation=options.get("activation"), in_place=in_place)
    if (cu_seqlens := options.pop("cu_seqlens", None)) is not None:
        continued = Continued.of(x, window.mT, cu_seqlens, context)
        y = short_conv(continued.x, weight, bias, **options, cu_seqlens=continued.cu_seqlens)
        return y[:, continued.places], continued.window.mT.to(window.dtype)
    return short_conv(x, weight, bias, **options, initial_state=window, return_final_state=True)


def scan_on(
    *arguments: Any,
    initial_state: Tensor,
    cu_seqlens: Tensor | None = None,
    in_place: bool = False,
    chunk_size: int | None = None,
    context: Context | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Outputs and new state of `semiseparable_scan`, or of `semiseparable_step` for one token v (B, H, P)."""
    if arguments[0].dim() == 3:
        return semiseparable_step(*arguments, initial_state, in_place=in_place, **options)
    options |= {"return_final_state": True, "chunk_size": chunk_size, "cu_seqlens": cu_seqlens, "context": context}
    return semiseparable_scan(*arguments, initial_state=initial_state, **options)


def recomputed(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """function(*arguments), computed again in the backward pass; nothing in it may be random."""
    if not torch.is_grad_enabled() or transformed():
        return function(*arguments)
    # Reading a generator's state would keep CUDA graphs from being captured.
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False, **options)


def zero_state(layer: nn.Module, device: torch.device | None, *shape: int, exact: bool = False) -> Tensor:
    """Zeros of the type of a layer's weights, with `exact` float32 at least, on `device`; None = on theirs. float32
    where they are quantised, and have no type that numbers could be computed in. A plain tensor where they are of a
    class of their own, which may make no others."""
    weight = layer.weight
    if is_quantised(layer):
        return torch.zeros(shape, device=device)
    dtype = torch.promote_types(weight.dtype, torch.float32) if exact else weight.dtype
    return torch.zeros(shape, dtype=dtype, device=weight.device if device is None else device)


class ExactLinear(nn.Linear):
    """A linear layer that `exact_linear` computes."""


@outside_autocast
def exact_linear(x: Tensor, layer: ExactLinear) -> Tensor:
    """x W^T + b in float32 at least, also under autocast: what the logits of gates need."""
    x = working(x)
    if type(layer) is not ExactLinear:  # an adapter or quantised, and more than its weight
        wide = {name: w.to(x.dtype) for name, w in layer.named_parameters() if w.is_floating_point()}
        return functional_call(layer, wide, (x,)).to(x.dtype)
    weight, bias = weights_of(layer, "weight", "bias")
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def gate_sums(log_gate: Tensor, length: int) -> Tensor:
    """Sums over k = j + 1 .. i of log_gate[k] for i > j, else 0: (B, L, H) or (H,) -> (B or 1, H, L, L).

    log_gate: logarithms of gates from (0, 1]; a gate of 0 is taken as e^-10,000, which is 0 as well.
    Differences of cumulative sums: taken in float64, as in float32 they cancel once a few gates are nearly closed.
    (Sums along one side of a square take four times as long on a CPU.)
    """
    if log_gate.dim() == 1:
        position = torch.arange(length, device=log_gate.device)
        distance = (position[:, None] - position).clamp(min=0)
        return (log_gate[:, None, None] * distance).unsqueeze(0)
    sums = log_gate.transpose(1, 2).double().clamp(min=-1e4).cumsum(-1)
    # Minus before the square is made, not after: so it is in the backward pass as well.
    return (sums.unsqueeze(-1) + sums.neg().unsqueeze(-2)).to(log_gate.dtype).tril(-1)


class Mixer(Called):
    """A sequence mixer Y = combine(M(x) f(x), x), with M (L x L) per head (arXiv 2407.09941, section 2).

    `forward` is the fast algorithm. `matrix`, `values` and `combine` are the definition it must agree with:
    forward(x) == combine(mix(matrix(x), values(x)), x), in O(L^2) and without packing.

    A mixer is one file with a frozen config dataclass and a subclass of this, and one line in
    `mixers/__init__.py`. Blocks call it for all that they want of it, `forward`, `step` and the others (see `Called`).
    """

    name: ClassVar[str] = ""
    """Its name in configurations; set by the registry."""
    Config: ClassVar[type]
    """Its frozen options dataclass."""
    causal_form: ClassVar[bool] = False
    """Can be built with causal=True: no output sees a later token."""
    bidirectional_form: ClassVar[bool] = False
    """Can be built with causal=False: outputs see the whole document."""
    sequence_aligned: ClassVar[bool] = True
    """M[:i+1, :i+1] comes from tokens up to i only (plus `halo`, and but for the sum that `row_normalized` ones
    divide by), so any length works."""
    complexity: ClassVar[str] = "O(L)"
    """Cost of the default form in the sequence length L: "O(L)", "O(L log L)", "O(L^1.5)" or "O(L^2)"."""
    data_dependent: ClassVar[bool] = True
    """M is made from x. False: M is the same for every x."""
    fixed_length: ClassVar[bool] = False
    """Has parameters for every position: takes sequences of exactly max_seqlen tokens, and no packed documents."""
    holds_identity: ClassVar[bool] = False
    """M is I and a matrix: values are added to what is mixed."""
    row_normalized: ClassVar[bool] = False
    """Each row of M is divided by a sum over that row."""
    static_step: ClassVar[bool] = False
    """The state has the same shapes after every token, and `step_in_place` reads nothing back from the device: a CUDA
    graph can replay it."""
    rank_option: ClassVar[str | None] = None
    """The option that bounds the rank of blocks of M strictly below or above the diagonal; None where none does."""
    takes_in_place: ClassVar[bool] = False
    """`step` has an option `in_place`, with which the new state takes the memory of the given one."""
    takes_context: ClassVar[bool] = False
    """It mixes parts of rows while other ranks hold the others, unless `why_no_context` says more."""
    carries: ClassVar[bool] = False
    """`forward_with_state` takes packed documents, so that in training states can enter rows."""
    not_float8: ClassVar[tuple[str, ...]] = ()
    """Linear maps within that stay in bf16 where others are computed in fp8: what they give must be more exact, or an
    operation takes their weights without calling them."""
    not_decayed: ClassVar[tuple[str, ...]] = ()
    """Parameters, where the mixer has them, that the base class's `parameter_rules` keeps from weight decay."""
    context: Context | None = None
    """The ranks that rows are cut over; `forward` is then given a part, as `matmix.kernels.context` says. None = whole
    rows."""
    monitor_limits: ClassVar[dict[str, float]] = {}
    """The limits of values of `monitor` above which the layers after this mixer overflow, where it is known."""

    def __init__(self, d_model: int, config: Any, *, causal: bool, max_seqlen: int, output_std: float) -> None:
        """d_model: width of inputs and outputs. config: an instance of `Config`. max_seqlen: longest document in
        training; some mixers have parameters for each of its positions, others scale positions by it. output_std:
        standard deviation of the initial output projection, `out_proj` unless `init_rules` says another."""
        super().__init__()
        self.d_model, self.config, self.causal, self.max_seqlen = d_model, config, causal, max_seqlen
        self.init_rules: dict[str, InitRule] = {"out_proj.weight": normal_init(output_std)}

    # -- facts, and options that do not fit -----------------------------------------------------------------------

    @classmethod
    def check(cls, d_model: int, config: Any) -> None:
        """Raise a one-line ValueError when options do not fit. Those with a list of allowed values are checked here."""
        check_words(config, f"model.mixers.{cls.name}.")

    @classmethod
    def require(cls, holds: bool, config: Any, option: str, otherwise: str) -> None:
        """Raise a one-line ValueError about the value of an option unless something holds."""
        if not holds:
            raise ValueError(f"model.mixers.{cls.name}.{option} = {getattr(config, option)!r}: {otherwise}")

    @classmethod
    def require_least(cls, config: Any, **least: int) -> None:
        """Raise a one-line ValueError for an option, if the mixer has it, that is below its least value."""
        for option, bound in least.items():
            cls.require(getattr(config, option, bound) >= bound, config, option, f"must be at least {bound}")

    @classmethod
    def require_inner_width(cls, d_model: int, config: Any) -> None:
        """Raise a one-line ValueError where heads of `headdim` channels do not fill the inner width."""
        cls.require_least(config, headdim=1, expand=1)
        if config.expand * d_model % config.headdim:
            raise ValueError(
                f"model.mixers.{cls.name}.headdim = {config.headdim} does not divide the inner width expand * d_model ="
                f" {config.expand} * {d_model} = {config.expand * d_model}; change headdim, expand or d_model"
            )

    @classmethod
    def require_heads(cls, d_model: int, config: Any) -> None:
        """Raise a one-line ValueError where heads do not fit the width."""
        cls.require_least(config, headdim=1, nheads=0)
        if config.nheads == 0 and d_model % config.headdim:
            raise ValueError(
                f"model.mixers.{cls.name}.headdim = {config.headdim} does not divide d_model = {d_model}; "
                "change headdim, or give nheads"
            )

    @classmethod
    def require_steps(cls, config: Any) -> None:
        """Raise a one-line ValueError where dt_min and dt_max are no range of step sizes to draw from."""
        fits = 0 < config.dt_min <= config.dt_max < float("inf")
        cls.require(fits, config, "dt_min", f"must be above 0 and at most dt_max = {config.dt_max}")

    @classmethod
    def check_scans(cls, config: Any, scans: int, outside: bool) -> None:
        """Raise a one-line ValueError when the mixer cannot read `scans` orders, or a position outside of them."""
        if outside:
            raise ValueError(
                f"model.image.class_outside = true: {cls.name} has no class token outside of its scan; "
                "lion_lit, lion_d and lion_s have, or set it to false"
            )

    @classmethod
    def longest_document(cls, config: Any, max_seqlen: int) -> int | None:
        """Returns the tokens of the longest document that the mixer takes; None = no limit."""
        return max_seqlen if cls.fixed_length else None

    @classmethod
    def check_seqlen(cls, config: Any, seqlen: int, max_seqlen: int) -> None:
        """Raise a one-line ValueError when the mixer cannot take documents of `seqlen` tokens."""
        if cls.fixed_length and seqlen != max_seqlen:
            raise ValueError(
                f"{cls.name or cls.__name__} has parameters for sequences of exactly model.max_seqlen = {max_seqlen} "
                f"tokens, got {seqlen}; make the two equal (in inference cut or fill the text), or choose a mixer that "
                "takes any length"
            )

    def check_input(self, x: Tensor, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None) -> None:
        """Raises ValueError (one line) for boundaries that do not bound x, or that a mixer of a fixed length is given,
        and for documents of another length than the mixer takes, as far as it is known without reading boundaries."""
        if cu_seqlens is None:
            parts = 1 if self.context is None else self.context.size
            self.check_seqlen(self.config, parts * x.shape[1], self.max_seqlen)
        elif self.fixed_length:
            raise ValueError(
                f"{self.name or type(self).__name__} has parameters for sequences of exactly {self.max_seqlen} tokens "
                'and takes no packed or padded documents; in training data.packing = "rows" makes whole rows, in '
                f"inference cut or fill every text to {self.max_seqlen} tokens"
            )
        else:
            part = self.context is not None
            check_cu_seqlens(self.name or type(self).__name__, cu_seqlens, *x.shape[:2], x, part=part)
            if max_seqlen is not None:
                self.check_seqlen(self.config, max_seqlen, self.max_seqlen)

    @classmethod
    def why_no_context(cls, config: Any, causal: bool) -> str:
        """Returns the reason why the mixer cannot mix a part of a row while other ranks hold the others, as a clause
        behind its name; empty if it can."""
        if cls.takes_context:
            return ""
        return "has parameters for every position" if cls.fixed_length else "needs whole rows on one rank"

    def parameter_rules(self, seqlen: int) -> dict[str, ParameterRule]:
        """Rules of parameters that are trained differently, by name; seqlen: length of the training sequences."""
        there = dict(self.named_parameters())
        rules = {name: ParameterRule(blocks=rows) for name, rows in self.blocks().items()}
        return rules | {name: NOT_DECAYED for name in self.not_decayed if name in there}

    def blocks(self) -> dict[str, tuple[int, ...]]:
        """Returns the rows of the linear maps that stand one below the other in a matrix, by its name; () for a matrix
        that is no linear map. What is left out is one, or has another number of dimensions than 2."""
        return {}

    def sums(self) -> dict[str, tuple[float, float]]:
        """Returns of parameters outside of linear layers, by name, the number of terms in the sums that they stand in
        and a factor on these, if one of them grows with d_model: by it rates are made smaller for wider models."""
        return {}

    @classmethod
    def block_rank(cls, config: Any) -> int | None:
        """Returns the largest rank that blocks of M strictly below or above the diagonal can have; None is no bound."""
        return None if cls.rank_option is None else getattr(config, cls.rank_option)

    @classmethod
    def halo(cls, config: Any) -> int:
        """Returns how many later tokens M depends on besides: half the width of a centred convolution before it."""
        return getattr(config, "d_conv", 1) // 2 if cls.bidirectional_form and cls.data_dependent else 0

    @classmethod
    def has_convolution(cls, config: Any) -> bool:
        """Returns whether a short convolution, whose width is the option `d_conv`, stands in front of M."""
        return getattr(config, "d_conv", 1) > 1

    @classmethod
    def convolution_alone(cls, config: Any) -> dict[str, Any]:
        """Returns options, beside those that both have, with which the mixer `convolution` is this one's block without
        its M."""
        return {}

    @classmethod
    def reach(cls, config: Any, causal: bool) -> int | None:
        """The largest distance between two tokens that the mixer mixes; None = no limit."""
        return None

    @classmethod
    def flops_per_token(cls, d_model: int, config: Any, seqlen: int, causal: bool) -> float:
        """Forward floating-point operations (2 per multiply-add) for one token of a document of `seqlen`: those of
        linear layers and short convolutions, and `mixing_flops`."""
        weights = weights_per_token(cls, d_model, config, causal)
        return 2.0 * weights + cls.mixing_flops(d_model, config, seqlen, causal)

    @classmethod
    def mixing_flops(cls, d_model: int, config: Any, seqlen: int, causal: bool) -> float:
        """Returns the part of `flops_per_token` that is no linear layer and no short convolution."""
        return 0.0

    @classmethod
    def flops_in_orders(cls, d_model: int, config: Any, seqlen: int, causal: bool, scans: int) -> float:
        """Returns `flops_per_token` where a document is read in `scans` orders."""
        return scans * cls.flops_per_token(d_model, config, seqlen, causal)

    # -- the fast algorithm ---------------------------------------------------------------------------------------

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None) -> Tensor:
        """Mix x (B, L, d_model), same shape. With cu_seqlens, B is 1 and documents do not see each other."""
        raise NotImplementedError

    def forward_by_document(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        """`forward` of each packed document by itself, those of one length together: x (1, L, d_model) -> same shape.

        For mixers whose algorithm knows no boundaries. Reads cu_seqlens on the host.
        """
        y = by_documents(lambda x, _: type(self).forward(self, x), cu_seqlens, int, x[0])
        return y.unsqueeze(0)

    def forward_in_orders(self, x: Tensor, orders: ScanOrders) -> Tensor:
        """The mean of what `forward` gives for x (B, L, d_model), one document a row, read in each of the orders; each
        output is that of its own position."""
        assert orders.outside is None, f"{self.name} has no position outside of its scan"
        outputs = [
            type(self).forward(self, x[:, places])[:, inverse]
            for places, inverse in zip(orders.places, orders.inverse(), strict=True)
        ]
        return outputs[0] if len(outputs) == 1 else sum(outputs) / len(outputs)

    # -- the definition -------------------------------------------------------------------------------------------

    def matrix(self, x: Tensor) -> Tensor:
        """M (B, H, L, L) for x (B, L, d_model), row t for output t; (1, H, L, L) where it is the same for all x."""
        raise NotImplementedError

    def matrix_in_orders(self, x: Tensor, orders: ScanOrders) -> Tensor:
        """The mean of the matrices of the orders, (B, H, L, L), rows and columns as the positions stand in x; to be
        looked at, as gates and norms behind M are not linear."""
        assert orders.outside is None, f"{self.name} has no position outside of its scan"
        matrices = [
            self.matrix(x[:, places])[:, :, inverse][:, :, :, inverse]
            for places, inverse in zip(orders.places, orders.inverse(), strict=True)
        ]
        return sum(matrices) / len(matrices)

    def values(self, x: Tensor) -> Tensor:
        """f(x) (B, L, H, P), the values that M is multiplied with."""
        return self.v_proj(x).unflatten(-1, (self.nheads, -1))

    def mix(self, matrix: Tensor, values: Tensor) -> Tensor:
        """M f(x): (B, H, L, L) and (B, L, H, P) -> (B, L, H, P)."""
        return torch.einsum("bhts,bshp->bthp", matrix, values)

    def combine(self, mixed: Tensor, x: Tensor) -> Tensor:
        """Applies what follows the mixing: gate, norm and output projection, (B, L, H, P) -> (B, L, d_model)."""
        return self.out_proj(mixed.flatten(-2))

    # -- what training watches ------------------------------------------------------------------------------------

    def monitor(self) -> dict[str, Tensor]:
        """Scalars of the last forward pass to watch in training, by name."""
        return {}

    def overflow_advice(self) -> str:
        """Advice, as half a sentence or empty, for where a value of `monitor` is NaN or infinite."""
        return ""

    # -- causal forms: the state after some tokens ----------------------------------------------------------------

    def initial_state(self, batch_size: int, device: torch.device | None = None) -> Any:
        """The state before the first token (causal forms). device: None = that of the weights."""
        raise NotImplementedError

    def forward_with_state(self, x: Tensor, state: Any, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Any]:
        """Continue from `state` over x (B, L, d_model): outputs, same shape, and the state after the last token.

        Mixers that `carries` holds of also take cu_seqlens (documents + 1,). B is then 1, and states are those before
        and after each document, (documents, ...); documents without tokens pass theirs on. In a `context` x is a part:
        of the states after documents those count that end here.
        """
        raise NotImplementedError

    def step(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """One token: x (B, d_model), state -> (B, d_model), new state. The given state is left as it is."""
        y, state = self.forward_with_state(x.unsqueeze(1), state)
        return y.squeeze(1), state

    def step_in_place(self, x: Tensor, state: Any) -> Tensor:
        """`step` whose new state takes the memory of the given one: x (B, d_model), state -> (B, d_model).

        It refuses no state, as that would wait for the device; `refuse` does so afterwards.
        """
        if self.takes_in_place:
            return self.step(x, state, in_place=True)[0]
        y, new = self.step(x, state)
        overwrite(state, new)
        return y

    def watched(self) -> Tensor | None:
        """The number, on the device, by which `refuse` judges the state after the last step; None = any will do."""
        return None

    def refuse(self, watched: float) -> None:
        """Raise OverflowError where `watched` says that nothing can follow this state."""


@functools.cache
def weights_per_token(kind: type[Mixer], d_model: int, config: Any, causal: bool) -> int:
    """The number of weights of linear layers and short convolutions, each of which a token is multiplied with once."""
    with torch.device("meta"), NoDraws():
        mixer = kind(d_model, config, causal=causal, max_seqlen=1, output_std=1.0)
    return sum(layer.weight.numel() for layer in mixer.modules() if isinstance(layer, nn.Linear | nn.Conv1d))


def overwrite(state: Any, new: Any) -> None:
    """Copy the tensors of a state, in nested lists and tuples, into the memory of those of another one."""
    if isinstance(state, Tensor):
        state.copy_(new)
        return
    for part, new_part in zip(state or (), new or (), strict=True):
        overwrite(part, new_part)

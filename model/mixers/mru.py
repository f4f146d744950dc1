"""MRU, the matrix recurrent unit (mru-lm): H_t = H_{t-1} X_t per head, causal, O(1) memory per generated
token."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from matmix.kernels import matrix_product_scan, mru_mixer, mru_mixer_is_fused, mru_step
from matmix.kernels.checks import transformed
from matmix.kernels.documents import shift_right
from matmix.kernels.functions import working
from matmix.kernels.matrix_product.spans import ORDERS
from matmix.kernels.mru.chunked import elements_from_chunks, log_norms, project, scan_log_norms, state_matrices, summary
from matmix.kernels.mru.constructions import (
    BOUNDED_CONSTRUCTIONS,
    PLAIN,
    construction_products,
    element_columns,
    state_elements,
)
from matmix.model.calls import weights_of
from matmix.model.initialization import constant_init, normal_init
from matmix.model.mixers.base import Mixer, ShortConv, convolve, overwrite, zero_state
from matmix.model.mixers.continued import tokens_before
from matmix.model.parameter_rules import NOT_DECAYED, ParameterRule

State = Tensor | tuple[Tensor, Tensor]
"""States (batch, H, order, order), and with `shift` what it keeps of the tokens before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MRUConfig:
    """Options of the MRU mixer."""

    order: int = 8
    """States are order x order matrices, order from 1 to 32; 4, 8, 16 and 32 waste nothing."""
    nheads: int = 0
    """Number of states; 0 means that what they remember is together as wide as the model: d_model / order^2 states,
    and four times as many with affine, which remembers in a quarter of each."""
    construction: Literal[
        "affine", "identity_plus", "ldu", "cayley", "householder", "qr", "newton_schulz", "ldu_newton_schulz", "plain"
    ] = "affine"
    """The way from elements to state matrices. affine has a memory that fades and is added to, cayley and
    householder are orthogonal, newton_schulz and ldu_newton_schulz have norm at most 1: their states cannot overflow.
    newton_schulz, I + M brought near an orthogonal matrix, is for word problems, which it learns. ldu (mru-lm's
    newest choice) and qr have determinant 1 and identity_plus (its first) is unconstrained: their states can. plain is
    mru-lm's README to the letter, X = reshape(x) W_in, by a W_in that keeps norms on average at first: unconstrained,
    and without the identity, so that states can also vanish."""
    input: Literal["auto", "dense", "chunked"] = "auto"
    """The way from a token to elements. dense: a full projection. chunked: mru-lm's first form, in which row i of a
    head's M is a chunk of d_model / (nheads order) numbers of the token times a small matrix of the head; d_model
    weights in all. Constructions that take a triangle take that of (M - M^T) / sqrt(2). auto: chunked with affine and
    plain, else dense."""
    element_scale: float = 0.0
    """The elements are multiplied by this; 0 = automatic: 1 for dense and plain, 0.08 nheads for chunked (with
    affine 0.8), where the factor stands in for a learning rate of its own (muP)."""
    element_std: float = 0.0
    """Standard deviation that elements have at the start, where the numbers of tokens have 1; 0 = automatic: 1 with
    newton_schulz, order^-0.5 with plain, and 0 with the others, all of whose X start as the same matrix.
    Where it is above 0, but for plain, what is read from the states starts as large as tokens."""
    output_scale: float = 0.0
    """The factor of what is read from the states; 0 = automatic: 1 for dense and plain, d_model / order for
    chunked, whose initial read-out is smaller by this."""
    output_std: float = 0.0
    """Standard deviation of the initial output projection; 0 = automatic: by the depth, as in all mixers. mru-lm's
    first form has 0.02 / sqrt(number of blocks)."""
    shift: Literal["auto", "none", "blend", "conv"] = "auto"
    """blend: elements come from a learned blend of each token with the one before it in its document. conv: they come
    from silu of a short convolution of the tokens, which is also added to what is read, by a learned factor for each
    channel. auto: conv with affine, else none."""
    d_conv: int = 4
    """Width of the causal depthwise convolution of shift = "conv" (2 to 9)."""
    gate: Literal["auto", "none", "silu"] = "auto"
    """silu: what is read from the states is multiplied by silu of a projection of the token. auto: silu with affine,
    else none."""
    decay: bool = False
    """Multiply every state matrix of a head by a learned number from (0, 1], about 1 at first: log-norms fall by a
    constant per token, which can hold the growth of an unbounded construction. It scales old and new alike, as the
    state is one product, so that nothing is forgotten faster; with a bounded construction states only shrink."""
    scan: Literal["chunked", "brent_kung", "hillis_steele", "sequential"] = "chunked"
    """The way states are multiplied up. chunked: by the fastest kernels there are. The others are mru-lm's: two
    parallel scans (hillis_steele in O(L log L)) and the recurrence, in PyTorch, for comparison; ranks cannot share rows
    with them."""
    bias: bool = False
    """Biases in the dense input projection and in the output projection."""
    dropout: float = 0.0
    """Dropout on the elements of the state matrices."""

    def chosen(self, field: str) -> str:
        """The option input, shift or gate, with "auto" replaced by what the construction implies."""
        value = getattr(self, field)
        if value != "auto":
            return value
        if field == "input" and self.construction == PLAIN:
            return "chunked"
        affine, other = {"input": ("chunked", "dense"), "shift": ("conv", "none"), "gate": ("silu", "none")}[field]
        return affine if self.construction == "affine" else other


class MRU(Mixer):
    """Elements of x -> state matrices X_t -> H_t = H_{t-1} X_t -> H_t W_down[head] -> gate -> output projection.

    States are float32 (bfloat16 states lose 29 % over 1,024 steps). After a forward, `monitor` gives the largest
    and the mean log-norm of the states: the thing to watch with a construction that does not bound them.

    What M means here: the unit has no values that are mixed. Unrolled, H_t = H_0 X_1 ... X_t is the block
    semiseparable matrix M[t, s] = X_{s+1} ... X_t (blocks of order x order, M[t, t] = I) applied to a
    sequence that is u_1 = H_0 X_1 at the first token and zero afterwards. All information passes through M,
    none through f(x).
    """

    Config = MRUConfig
    causal_form = True
    takes_context = True
    static_step = True
    carries = True
    not_float8 = ("in_proj",)  # products of state matrices gather the errors of all tokens
    # Layer norms square what comes from the states: what follows is NaN before states are infinite.
    monitor_limits: ClassVar[dict[str, float]] = {"log_norm_max": math.log(torch.finfo(torch.float32).max) / 2}

    def __init__(self, d_model: int, config: MRUConfig, *, output_std: float, **options):
        super().__init__(d_model, config, output_std=config.output_std or output_std, **options)
        self.order = order = config.order
        self.nheads = self.head_count(d_model, config)
        self.state_size = self.nheads * order**2
        d_chunk = d_model // (self.nheads * order)
        self.element_scale, self.output_scale, fan_in = config.element_scale or 1.0, config.output_scale or 1.0, order
        plain = config.construction == PLAIN
        if config.chosen("input") == "dense":
            width = self.nheads * state_elements(config.construction, order)
            self.in_proj = nn.Linear(d_model, width, bias=config.bias)
        else:
            if not plain:
                # 0.08 (1 / order) (d_model / d_chunk), as mru-lm writes it.
                scale = 0.8 if config.construction == "affine" else 0.08
                self.element_scale = config.element_scale or scale * self.nheads
                self.output_scale = config.output_scale or d_model / order
                fan_in = self.state_size
            self.state_up = nn.Parameter(torch.empty(self.nheads, d_chunk, element_columns(config.construction, order)))
        self.state_down = nn.Parameter(torch.empty(self.nheads, order, d_chunk))
        shift = config.chosen("shift")
        self.shift_share = nn.Parameter(torch.empty(d_model)) if shift == "blend" else None
        self.conv1d = ShortConv(d_model, config.d_conv, True) if shift == "conv" else None
        self.skip = nn.Parameter(torch.empty(d_model)) if shift == "conv" else None
        fading = (self.nheads, state_elements("affine", order))
        self.state_base = nn.Parameter(torch.empty(fading)) if config.construction == "affine" else None
        self.gate_proj = nn.Linear(d_model, d_model, bias=config.bias) if config.chosen("gate") == "silu" else None
        self.out_proj = nn.Linear(d_model, d_model, bias=config.bias)
        self.element_dropout = nn.Dropout(config.dropout)
        # The square root of 1 / decay - 1: any value gives a decay in (0, 1].
        self.decay_root = nn.Parameter(torch.empty(self.nheads)) if config.decay else None
        self.log_norms: Tensor | None = None
        # Elements start at zero, so every H_t starts as the identity, whose flattened variance is 1 / order. A plain X
        # starts with numbers of that variance, by which products keep their squared norm on average. Those of
        # newton_schulz start far from each other: word problems are learned where products differ from the start.
        summed = d_model if config.chosen("input") == "dense" else d_chunk
        spread = config.element_std or {PLAIN: order**-0.5, "newton_schulz": 1.0}.get(config.construction, 0.0)
        apart = spread > 0 and not plain
        elements = normal_init(spread * summed**-0.5 / self.element_scale) if spread else constant_init(0.0)
        self.init_rules |= {
            "in_proj.weight": elements,
            "state_up": elements,
            "state_base": partial(draw_fading, k=order // 2),
            "shift_share": constant_init(0.5),
            "skip": constant_init(1.0),
            # Rows of norm 1 give what is read the size of tokens: it tells products apart from the start.
            "state_down": normal_init((1.0 if apart else 0.02 * fan_in**0.5) / self.output_scale),
            # A decay of 0.9999: 1 itself would have no gradient.
            "decay_root": constant_init(0.01),
        }

    def parameter_rules(self, seqlen: int) -> dict[str, ParameterRule]:
        # Every few rows of in_proj make a state matrix of their own: as one linear map they mean nothing.
        if self.state_base is not None:
            # Rates of fading: smaller ones are another memory, not a simpler one. What a token adds fades, so that
            # mru-lm's rule has no reason, and costs 0.06 nats where it was tried (docs/mru-study.md).
            rules, rule = {"state_base": NOT_DECAYED}, ParameterRule(blocks=())
        else:
            # mru-lm's rule: each token acts on all later ones, by matrices of fan-in `order`.
            rules, rule = {}, ParameterRule(lr=(2 / seqlen) ** 0.5 / self.order, clip=(seqlen / 2) ** 0.5, blocks=())
        return rules | {name: rule for name, _ in self.named_parameters() if name.startswith("in_proj.")}

    def sums(self) -> dict[str, tuple[float, float]]:
        if self.config.chosen("input") == "dense":
            return {}
        # mru-lm writes its muP factors into the model, with other rates than AdamW's in mind.
        chunk, order = self.state_up.shape[1], self.order
        return {"state_up": (chunk, self.element_scale), "state_down": (order, self.output_scale)}

    @staticmethod
    def head_count(d_model: int, config: MRUConfig) -> int:
        """The number of states per token."""
        return config.nheads or d_model * heads_per_square(config) // config.order**2

    @classmethod
    def check(cls, d_model: int, config: MRUConfig) -> None:
        super().check(d_model, config)
        for name in ("element_scale", "element_std", "output_scale", "output_std"):
            fits = 0 <= getattr(config, name) < math.inf
            cls.require(fits, config, name, "must be 0 (automatic) or more")
        least = 1 if state_elements(config.construction, 1) else 2
        otherwise = f"must be from {least} to {ORDERS[-1]} with {config.construction}"
        cls.require(least <= config.order <= ORDERS[-1], config, "order", otherwise)
        cls.require(config.nheads >= 0, config, "nheads", "must be 0 (automatic) or more")
        cls.require(2 <= config.d_conv <= 9, config, "d_conv", "must be from 2 to 9")
        cls.require(0 <= config.dropout < 1, config, "dropout", "must be at least 0 and below 1")
        nheads = cls.head_count(d_model, config)
        square = config.order**2
        if nheads == 0 or (not config.nheads and d_model * heads_per_square(config) % square):
            quarter = " / 4" if heads_per_square(config) > 1 else ""
            raise ValueError(
                f"model.mixers.mru: d_model = {d_model} is not a multiple of order^2{quarter} = "
                f"{square / heads_per_square(config):g}; change order, or give nheads"
            )
        if d_model % (nheads * config.order):
            raise ValueError(
                f"model.mixers.mru: nheads * order = {nheads} * {config.order} does not divide "
                f"d_model = {d_model}; change nheads or order"
            )

    @classmethod
    def convolution_alone(cls, config: MRUConfig) -> dict[str, Any]:
        return {"expand": 1, "project": False, "norm": False}

    @classmethod
    def has_convolution(cls, config: MRUConfig) -> bool:
        return config.chosen("shift") == "conv"

    @classmethod
    def why_no_context(cls, config: MRUConfig, causal: bool) -> str:
        if config.scan == "chunked":
            return super().why_no_context(config, causal)
        return f'with scan = "{config.scan}" needs whole rows on one rank'

    @classmethod
    def flops_per_token(cls, d_model: int, config: MRUConfig, seqlen: int, causal: bool) -> float:
        nheads, order = cls.head_count(d_model, config), config.order
        state_size = nheads * order**2
        d_chunk = d_model // (nheads * order)
        inputs = nheads * d_model * state_elements(config.construction, order)
        if config.chosen("input") == "chunked":
            inputs = nheads * d_chunk * order * element_columns(config.construction, order)
        if cls.has_convolution(config):
            inputs += config.d_conv * d_model
        read = state_size * d_chunk + d_model**2
        read = read + d_model**2 if config.chosen("gate") == "silu" else min(state_size * d_model, read)
        return 2.0 * (inputs + read) + cls.mixing_flops(d_model, config, seqlen, causal)

    @classmethod
    def mixing_flops(cls, d_model: int, config: MRUConfig, seqlen: int, causal: bool) -> float:
        """Returns the operations of state matrices and of the recurrence, whatever the scan: Brent and Kung's takes
        twice as many for the latter, Hillis and Steele's log2(seqlen) times."""
        products = 1 + construction_products(config.construction)
        return 2.0 * products * cls.head_count(d_model, config) * config.order**3

    def source(
        self, x: Tensor, kept: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """What elements are made from, typed and shaped like x (B, L, d_model) or (B, d_model), and what a state keeps
        of the last tokens for those behind them. kept: the same of the tokens before x; None for whole rows."""
        if self.conv1d is not None:
            options = {"causal": True, "activation": "silu", "cu_seqlens": cu_seqlens, "context": self.context}
            return convolve(self.conv1d, x, kept, **options)
        if self.shift_share is None:
            return x, None
        if kept is None:
            before, last = shift_right(x, cu_seqlens, self.context), None
        else:
            # A copy: the buffer of x may be the next token's.
            before, last = (kept, x.clone()) if x.dim() == 2 else tokens_before(x, kept, cu_seqlens, self.context)
        return torch.lerp(x, before.to(x.dtype), self.shift_share.to(x.dtype)), last

    def inputs(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Makes from what `source` gives (..., d_model) elements of the state matrices (..., H, E) and None; or, in the
        chunked form and where nothing comes between, the chunks (..., H, order, d_chunk) and their weights (H, d_chunk,
        order)."""
        if self.config.chosen("input") == "dense":
            elements = self.in_proj(x).unflatten(-1, (self.nheads, -1))
            if self.element_scale != 1:
                elements = elements * self.element_scale
        else:
            chunks = x.unflatten(-1, (self.nheads, self.order, -1))
            w_up = working(self.state_up) * self.element_scale
            if self.state_base is None and not (self.training and self.config.dropout):
                return chunks, w_up
            elements = self.from_chunks(chunks, w_up)
        elements = self.element_dropout(elements)
        return elements if self.state_base is None else working(elements) + working(self.state_base), None

    def from_chunks(self, inputs: Tensor, w_up: Tensor | None) -> Tensor:
        """Elements (..., H, E) from what `inputs` gives, typed like them."""
        if w_up is None:
            return inputs
        return elements_from_chunks(inputs, w_up, self.config.construction).to(inputs.dtype)

    def elements(self, x: Tensor) -> Tensor:
        """Elements of the state matrices (B, L, H, E) from x (B, L, d_model)."""
        return self.from_chunks(*self.inputs(self.source(x)[0]))

    def read_out(self) -> Tensor:
        """W_down (H, order, d_chunk) as states are multiplied by it."""
        return self.state_down if self.output_scale == 1 else self.state_down * self.output_scale

    def build(self, elements: Tensor) -> Tensor:
        """X (..., H, order, order) in float32 (float64 for float64) from elements (..., H, E)."""
        matrices = state_matrices(elements, self.config.construction, self.order)
        if self.decay_root is not None:
            matrices = faded(matrices, self.decay_root)
        return matrices

    def state_matrices(self, x: Tensor) -> Tensor:
        """X (B, L, H, order, order) from x (B, L, d_model)."""
        return self.build(self.elements(x))

    def mixed(
        self, elements: Tensor, cu_seqlens: Tensor | None = None, initial_state: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """All states (B, L, H, order, order) and the last ones from elements (B, L, H, E); notes their norms."""
        matrices = self.build(elements)
        before = None if initial_state is None else pad_order(initial_state.to(matrices.dtype))
        padded = matrix_product_scan(
            pad_order(matrices), initial_state=before, return_final_state=True, cu_seqlens=cu_seqlens,
            context=self.context, columns=self.columns(initial_state), scan=self.config.scan,
        )  # fmt: skip
        states, final = (h[..., : self.order, : self.order] for h in padded)
        self.note_norms(scan_log_norms(states, final, cu_seqlens, self.context))
        return states, final

    def columns(self, initial_state: Tensor | None) -> int:
        """The columns of products that ranks of a context send; see `matrix_product_scan`."""
        narrow = self.state_base is not None and self.decay_root is None and initial_state is None
        return self.order // 2 if narrow else 0

    def combine(self, mixed: Tensor, x: Tensor) -> Tensor:
        """Computes outputs (..., d_model) from states (..., H, order, order)."""
        return self.read(mixed, x, x if self.skip is None else self.source(x)[0])

    def read(self, mixed: Tensor, x: Tensor, source: Tensor) -> Tensor:
        """`combine`, given what `source` makes of x."""
        states = mixed.to(x.dtype)
        # An adapter or a quantised layer is more than its weight.
        alone = self.gate_proj is None and self.skip is None
        foldable = alone and self.state_size <= self.d_model and type(self.out_proj) is nn.Linear
        if not foldable:
            read_out = self.read_out().to(x.dtype)
            return self.finish(project(states, read_out) if states.dim() == 5 else states @ read_out, x, source)
        # Both maps are linear: folded into one, the tokens see a single large product instead of many tiny
        # ones.
        weight, bias = weights_of(self.out_proj, "weight", "bias")
        out = weight.unflatten(1, (self.nheads, self.order, -1))
        folded = torch.einsum("hjc,dhic->dhij", self.read_out(), out)
        return F.linear(states.flatten(-3), folded.flatten(1), bias)

    def finish(self, read: Tensor, x: Tensor, source: Tensor) -> Tensor:
        """Gate and output projection of what was read from the states, (..., H, order, d_chunk), and of `source`."""
        y = read.flatten(-3)
        if self.skip is not None:
            y = torch.addcmul(y, source, self.skip.to(y.dtype))
        if self.gate_proj is not None:
            y = y * F.silu(self.gate_proj(x))
        return self.out_proj(y)

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None) -> Tensor:
        return self.run(x, self.source(x, cu_seqlens=cu_seqlens)[0], cu_seqlens)[0]

    def run(
        self, x: Tensor, source: Tensor, cu_seqlens: Tensor | None = None, state: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns outputs (B, L, d_model) and the last states (B or documents, H, order, order), by the fused op or by
        its parts, and stores the norms of states for `monitor`."""
        inputs, w_up = self.inputs(source)
        if self.is_fused(inputs, w_up):
            y, final, norms = mru_mixer(
                inputs, self.read_out(), w_up=w_up, construction=self.config.construction, initial_state=state,
                return_final_state=True, return_log_norms=True, cu_seqlens=cu_seqlens, context=self.context,
            )  # fmt: skip
            self.note_norms(norms)
            return self.finish(y, x, source), final
        states, final = self.mixed(self.from_chunks(inputs, w_up), cu_seqlens, state)
        return self.read(states, x, source), final

    def is_fused(self, inputs: Tensor, w_up: Tensor | None) -> bool:
        """Returns whether kernels take `inputs` to outputs without states in memory. On the CPU the parts are faster,
        as `combine` folds two projections into one."""
        construction = self.config.construction
        if self.decay_root is not None or self.config.scan != "chunked":
            return False
        return mru_mixer_is_fused(inputs, self.state_down, construction, w_up)

    def note_norms(self, log_norms: Tensor) -> None:
        """Keeps log-norms of states for `monitor`. A tensor of a transform would outlive it: then there are none."""
        self.log_norms = None if transformed() else log_norms

    def monitor(self) -> dict[str, Tensor]:
        """Largest and mean log-norm of the states of the last forward; infinite or NaN after an overflow."""
        if self.log_norms is None:
            return {}
        return {"log_norm_max": self.log_norms[0], "log_norm_mean": self.log_norms[1]}

    def initial_state(self, batch_size: int, device: torch.device | None = None) -> State:
        """The identity, (batch_size, H, order, order), float32 at least; with `shift` beside it zeros: the token before
        (batch_size, d_model), or those before (batch_size, d_model, d_conv - 1)."""
        like = torch.empty(0, dtype=self.state_down.dtype, device=self.state_down.device if device is None else device)
        exact = torch.promote_types(like.dtype, torch.float32)
        states = torch.eye(self.order, dtype=exact, device=like.device).repeat(batch_size, self.nheads, 1, 1)
        if self.conv1d is not None:
            return states, zero_state(self.conv1d, device, batch_size, self.d_model, self.config.d_conv - 1)
        return states if self.shift_share is None else (states, like.new_zeros(batch_size, self.d_model))

    def forward_with_state(self, x: Tensor, state: State, cu_seqlens: Tensor | None = None) -> tuple[Tensor, State]:
        """Continue from a state; raises OverflowError when the states stop being finite, but not for packed documents:
        training does not wait for the device."""
        y, state = self.carried(x, state, cu_seqlens)
        if cu_seqlens is None:
            self.refuse_overflow()
        return y, state

    step = forward_with_state

    def step_in_place(self, x: Tensor, state: State) -> Tensor:
        y, new = self.carried(x, state)
        overwrite(state, new)
        return y

    def carried(self, x: Tensor, state: State, cu_seqlens: Tensor | None = None) -> tuple[Tensor, State]:
        """`forward_with_state`, also of one token x (B, d_model), that refuses no state."""
        states, kept = (state, None) if isinstance(state, Tensor) else state
        source, kept = self.source(x, kept, cu_seqlens)
        y, states = self.run_token(x, source, states) if x.dim() == 2 else self.run(x, source, cu_seqlens, states)
        return y, states if kept is None else (states, kept)

    def run_token(self, x: Tensor, source: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """`run` for one token x (B, d_model) from a state."""
        inputs, w_up = self.inputs(source)
        if self.is_fused(inputs, w_up):
            y, states = mru_step(inputs, states, self.read_out(), w_up=w_up, construction=self.config.construction)
            y = self.finish(y, x, source)
        else:
            matrices = self.build(self.from_chunks(inputs, w_up))
            with torch.autocast(matrices.device.type, enabled=False):
                states = states.to(matrices.dtype) @ matrices
            y = self.read(states, x, source)
        self.note_norms(summary(log_norms(states)))
        return y, states

    def watched(self) -> Tensor | None:
        return None if self.log_norms is None else self.log_norms[0]

    def refuse_overflow(self) -> None:
        if self.log_norms is not None:
            self.refuse(float(self.log_norms[0]))

    def refuse(self, watched: float) -> None:
        """Raise OverflowError when the largest log-norm is so large that norms of states overflow, or NaN."""
        if watched < math.log(torch.finfo(self.log_norms.dtype).max) / 2:
            return
        if self.config.construction in BOUNDED_CONSTRUCTIONS:
            reason = "is bounded, so that its input was not finite already"
        else:
            reason = "does not bound products of state matrices; use 'affine', or shorter sequences"
        raise OverflowError(
            f"an MRU state or its square left the range of float32 (log-norm {watched:.4g}): "
            f"construction {self.config.construction!r} {reason}"
        )

    def matrix(self, x: Tensor) -> Tensor:
        """M (B, H, L, L, order, order) with M[t, s] = X_{s+1} ... X_t for s <= t, else 0."""
        matrices = self.state_matrices(x).transpose(1, 2)
        batch, nheads, length, order, _ = matrices.shape
        identity = torch.eye(order, dtype=matrices.dtype, device=matrices.device)
        rows = [matrices.new_zeros(batch, nheads, length, order, order)]
        for t in range(length):
            row = torch.zeros_like(rows[0])
            row[:, :, :t] = rows[-1][:, :, :t] @ matrices[:, :, t, None]
            row[:, :, t] = identity
            rows.append(row)
        return torch.stack(rows[1:], dim=2)

    def values(self, x: Tensor) -> Tensor:
        """u (B, L, H, order, order): X_1 at the first token, zero afterwards."""
        matrices = self.state_matrices(x)
        return torch.cat([matrices[:, :1], torch.zeros_like(matrices[:, 1:])], 1)

    def mix(self, matrix: Tensor, values: Tensor) -> Tensor:
        return torch.einsum("bshki,bhtsij->bthkj", values, matrix)

    def overflow_advice(self) -> str:
        if self.config.construction in BOUNDED_CONSTRUCTIONS:  # only NaNs that came in do that
            return "its construction is bounded, so its input was not finite already; try a lower optimizer.lr"
        return 'use construction "affine", which is bounded, or a lower optimizer.lr'


def faded(matrices: Tensor, root: Tensor) -> Tensor:
    """Matrices (..., H, o, o) times 1 / (1 + root^2), root (H,): any number gives a factor in (0, 1]."""
    return matrices / (1 + root.to(matrices.dtype).square())[:, None, None]


def pad_order(matrices: Tensor) -> Tensor:
    """(..., o, o) -> (..., p, p), p the next order that the scan takes: an identity block stands behind."""
    order = matrices.shape[-1]
    extra = next(taken for taken in ORDERS if taken >= order) - order
    if not extra:
        return matrices
    padded = F.pad(matrices, (0, extra, 0, extra))
    padded.diagonal(dim1=-2, dim2=-1)[..., order:] = 1
    return padded


def heads_per_square(config: MRUConfig) -> int:
    """States of order^2 numbers for every order^2 numbers of the model's width, where their number is automatic."""
    return 4 if config.construction == "affine" else 1


def fading_rates(nheads: int, k: int) -> Tensor:
    """Rates (nheads, k) from 1/2 to 0.003 per token, evenly spread in logarithm over the heads and, within each, from
    fast to slow."""
    return torch.logspace(math.log10(0.5), math.log10(0.003), nheads * k).view(k, nheads).mT


def draw_fading(shape: torch.Size, generator: torch.Generator, *, k: int) -> Tensor:
    """Elements (H, E) whose A (k x k) is diag(1 - rate) and whose B, where they have one, is 0; see `fading_rates`."""
    elements = torch.zeros(shape[0], shape[1] // k, k)
    elements.diagonal(dim1=-2, dim2=-1).copy_(-fading_rates(shape[0], k))
    return elements.flatten(-2)

"""Calls of the ops' Triton forms that between them reach every kernel with every choice made at compile time.

Their tensors are on the device "meta": they have the sizes of real training but neither memory nor values, which the
host side of a kernel must not look at anyway. Within `on_device` they are real.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor

import matmix.kernels  # noqa: F401 - whose operations name their Triton forms
from matmix.kernels.backend import TRITON_FORMS
from matmix.kernels.context import Context
from matmix.kernels.functions import Output
from matmix.kernels.gated_norm.chunked import NormInputs
from matmix.kernels.lion.chunked import LionInputs
from matmix.kernels.matrix_memory.chunked import MemoryInputs
from matmix.kernels.matrix_product.chunked import ProductInputs
from matmix.kernels.mru.chunked import MixerInputs
from matmix.kernels.mru.constructions import element_columns, state_elements
from matmix.kernels.mru.op import FUSED, LARGEST_WIDTHS
from matmix.kernels.s6.op import ScanInputs, ScanOutputs
from matmix.kernels.scan_layer.chunked import LayerForm, LayerInputs
from matmix.kernels.semiseparable.chunked.forward import ScanStepInputs
from matmix.kernels.semiseparable.form import ScanCall, ScanForm, ScanSide
from matmix.kernels.short_conv.chunked import ConvInputs, ConvStepInputs, StateConvInputs, StateConvOutputs

BATCH, SEQLEN = 8, 8192
HEADS = 24
_PLAIN = ScanForm()
_device, _tokens = torch.device("meta"), BATCH * SEQLEN

Run = Callable[[torch.dtype, ModuleType], object]
"""Calls `forward`, and `backward` if there is one, of the module given, on tensors of this dtype."""


class Call(NamedTuple):
    """Forward and, if there is one, backward pass of one op on tensors of one dtype."""

    op: str
    title: str
    dtype: torch.dtype
    run: Callable[[ModuleType], object]
    main: bool
    """Models use the op like this: it is compiled under every configuration."""

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


def form_of(call: Call) -> ModuleType:
    return importlib.import_module(TRITON_FORMS[call.op])


def calls() -> Iterator[Call]:
    """Yields all calls in bfloat16; float32 has tiles of its own, and float16 those of bfloat16."""
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        for op, runs in CALLS.items():
            for title, run in runs.items():
                yield Call(op, title, dtype, partial(run, dtype), title in MAIN and dtype != torch.float16)


@contextmanager
def on_device(device: torch.device, tokens: int) -> Iterator[None]:
    """Gives calls in this block real tensors with so many tokens, the same numbers for each dtype and at each start."""
    global _device, _tokens
    before = _device, _tokens
    _device, _tokens = device, tokens
    torch.manual_seed(0)
    try:
        yield
    finally:
        _device, _tokens = before


def _rows(rows: int) -> tuple[int, int]:
    """Rows of equal length that make up all tokens, and this length."""
    rows = max(1, min(rows, _tokens // 64))
    return rows, _tokens // rows


def _documents(packed: bool) -> Tensor | None:
    """Boundaries of documents of 1,024 tokens on average."""
    length = min(1024, _tokens // 2)
    return torch.arange(0, _tokens + 1, length, dtype=torch.int32, device=_device) if packed else None


@contextmanager
def _context(wanted: bool) -> Iterator[str]:
    """The name of a context of two ranks, of which this is the first and the other one sends the same; "" for none."""

    def gather(received: Tensor, sent: Tensor, **_: object) -> SimpleNamespace:
        received.view(2, -1).copy_(sent)
        return SimpleNamespace(wait=lambda: None)

    context = Context("benchmark", 0, 2)
    with (
        mock.patch.object(Context, "named", lambda name: context if name else None),
        mock.patch.object(Context, "group", None),
        mock.patch("torch.distributed.all_gather_into_tensor", gather),
    ):
        yield context.name if wanted else ""


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (0.1 * torch.randn(shape, device=_device)).to(dtype)


def _factors(*shape: int) -> Tensor:
    """Numbers below zero, as the logarithms of decays are."""
    return -0.05 * torch.rand(shape, device=_device)


# -- How each op is called ---------------------------------------------------------------------------------------------


def _conv(
    dtype: torch.dtype, module: ModuleType, *,
    width: int, channels: int = 1664, tokens: int = 0, causal: bool = False, bias: bool = False, silu: bool = False,
    packed: bool = False, split: bool = False, from_state: bool = False, exact: bool = False,
) -> None:  # fmt: skip
    rows, seqlen = (BATCH, tokens // BATCH) if tokens else _rows(1 if packed else BATCH)
    x = _empty(rows, seqlen, 2 * channels + 24 if split else channels, dtype=dtype)
    if split:  # as a layer's one input projection gives it
        x = x[..., channels : 2 * channels]
    weight, offset = _empty(channels, width, dtype=dtype), _empty(channels, dtype=dtype) if bias else None
    activation = "silu" if silu else None
    if from_state:
        held = _empty(rows, channels, width - 1, dtype=torch.float32 if exact else dtype)
        given = StateConvInputs(x, weight, offset, held, activation)
        outputs = StateConvOutputs(*module.forward_from_state(given))
        module.backward_from_state(given, outputs, outputs)
    else:
        given = ConvInputs(x, weight, offset, causal, activation, _documents(packed))
        output = Output(module.forward(given))
        module.backward(given, output, output)


def _conv_step(
    dtype: torch.dtype, module: ModuleType, *,
    width: int, channels: int = 1664, bias: bool = False, silu: bool = False, in_place: bool = False,
) -> None:  # fmt: skip
    x, state = _empty(BATCH, 2 * channels, dtype=dtype)[:, channels:], _empty(BATCH, channels, width - 1, dtype=dtype)
    weight, offset = _empty(channels, width, dtype=dtype), _empty(channels, dtype=dtype) if bias else None
    module.forward(ConvStepInputs(x, state, weight, offset, "silu" if silu else None), in_place)


def _norm(dtype: torch.dtype, module: ModuleType, *, width: int, group: int | None = None) -> None:
    x = _empty(*_rows(BATCH), width, dtype=dtype)
    gate = _empty(*x.shape[:2], 2 * width + 152, dtype=dtype)[..., :width]
    given = NormInputs(x, _empty(width, dtype=dtype), gate, 1e-5, group)
    output = Output(module.forward(given))
    module.backward(given, output, output)


def _s6(dtype: torch.dtype, module: ModuleType, *, d: int = 1536, n: int = 16, packed: bool = False) -> None:
    (batch, seqlen), cu_seqlens = _rows(1 if packed else BATCH), _documents(packed)
    shared = _empty(batch, seqlen, 48 + 2 * n, dtype=dtype)  # as a layer's projection gives it, behind the step sizes
    x, dt, rates = _empty(batch, seqlen, d, dtype=dtype), -_factors(batch, seqlen, d), _factors(d, n)
    initial = None if cu_seqlens is None else _empty(cu_seqlens.shape[0] - 1, d, n)
    given = ScanInputs(x, dt, shared[..., 48 : 48 + n], shared[..., 48 + n :], rates, initial, cu_seqlens)
    outputs = ScanOutputs(*module.forward(given))
    module.backward(given, outputs, outputs if packed else outputs._replace(state=None))


def _memory(dtype: torch.dtype, module: ModuleType, *, order: int = 4, width: int = 4, packed: bool = False) -> None:
    (batch, seqlen), cu_seqlens = _rows(1 if packed else BATCH), _documents(packed)
    heads, tokens = 3072 // width, (batch, seqlen)
    values, elements = (_empty(*tokens, heads, n, dtype=dtype) for n in (width, order**2))
    keys, queries = (_empty(*tokens, order, dtype=dtype) for _ in range(2))
    initial = None if cu_seqlens is None else _empty(cu_seqlens.shape[0] - 1, heads, width, order)
    given = MemoryInputs(values, elements, keys, queries, _factors(heads, order), initial, cu_seqlens)
    outputs = module.forward(given)
    module.backward(given, outputs, outputs if packed else outputs._replace(final=None))


def _scan(
    dtype: torch.dtype, module: ModuleType, *,
    directions: int = 1, form: ScanForm = _PLAIN, d_state: int = 64, headdim: int = 64, decay: str | None = None,
    scale: bool = False, diagonal: str | None = None, packed: bool = False, states: bool = False, rows: int = BATCH,
    groups: int = 2, part: bool = False,
) -> tuple:  # fmt: skip
    """Returns the output and the gradients."""
    heads = HEADS
    if _tokens < SEQLEN:  # for the interpreter
        heads, d_state, headdim = 2, min(d_state, 16), min(headdim, 16)
    (batch, seqlen), cu_seqlens = _rows(1 if packed else rows), _documents(packed)
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    v = _empty(batch, seqlen, heads, headdim, dtype=dtype)

    def factor(kind: str | None) -> Tensor | None:
        """Returns per token a view of all heads' and directions' factors, as a layer's projection gives them."""
        if kind == "token":
            return _factors(batch, seqlen, 2 * heads)[..., :heads]
        return None if kind is None else _factors(heads)

    sides = tuple(
        ScanSide(
            _empty(batch, seqlen, groups, d_state, dtype=dtype),
            _empty(batch, seqlen, groups, d_state, dtype=dtype),
            factor(decay),
            factor("token" if scale else None),
            _empty(sequences, heads, d_state, headdim + form.normalize) if states else None,
            reverse,
        )
        for reverse in (False, True)[:directions]
    )
    skip = factor(diagonal)
    # Backward passes are of linear scans: the registered op takes products and quotients apart first.
    linear = form._replace(combine="add" if form.combine == "add" else "concat", normalize=False)
    dy = _empty(*v.shape[:3], headdim * (1 if linear.combine == "add" else 2), dtype=dtype)
    with _context(part) as context:
        call = ScanCall(v, sides, skip, form, cu_seqlens, context=context)
        out = module.forward(call, states and (directions == 1 or form.normalize))
        return out, module.backward(dy, out.row_sum, out.finals, call._replace(form=linear))


def _scan_step(
    dtype: torch.dtype, module: ModuleType, *,
    batch: int = BATCH, groups: int = 1, d_state: int = 64, headdim: int = 64, decay: str | None = None,
    scale: bool = False, diagonal: str | None = None, in_place: bool = False,
) -> None:  # fmt: skip
    def factor(kind: str | None) -> Tensor | None:
        return {None: None, "token": _factors(batch, HEADS), "head": _factors(HEADS)}[kind]

    # Slices of what the convolution gives.
    mixed = _empty(batch, HEADS * headdim + 2 * groups * d_state, dtype=dtype)
    v, q, k = mixed.split([HEADS * headdim, groups * d_state, groups * d_state], -1)
    v, q, k = v.unflatten(-1, (HEADS, headdim)), *(x.unflatten(-1, (groups, d_state)) for x in (q, k))
    state = _empty(batch, HEADS, d_state, headdim)
    scales = factor("token" if scale else None)
    module.forward(ScanStepInputs(v, q, k, factor(decay), state, scales, factor(diagonal)), in_place)


def _layer(
    dtype: torch.dtype, module: ModuleType, *,
    directions: int = 2, diagonal: str | None = "projected", shared: bool = True, shift: bool = True,
    packed: bool = False, states: bool = False, high: float = math.inf, norm_first: bool = True, heads: int = HEADS,
) -> None:  # fmt: skip
    form = LayerForm(heads, 64, 1, 64, directions, shift, 0.0, high)
    projected = _empty(*_rows(1 if packed else BATCH), sum(form.widths), dtype=dtype)
    steps = (heads,) if shared else (2, heads)
    given = LayerInputs.of(
        projected, _empty(form.conv_width, 7 if directions == 2 else 4), _empty(form.conv_width), _empty(*steps),
        _empty(*steps), _empty(form.inner), heads, 1, 64, directions, shift,
        D=None if diagonal is None else _empty(heads),
        diagonal_weight=_empty(heads, form.inner, dtype=dtype) if diagonal == "projected" else None,
        initial_states=_empty(heads, 64, 64) if states else None, dt_limits=(0.0, high), norm_first=norm_first,
        cu_seqlens=_documents(packed),
    )  # fmt: skip
    scanned, mixed, product = module.forward_scan(given)
    given = given._replace(scanned=scanned, mixed=mixed, product=product)
    output = Output(module.forward(given))
    module.backward(given, output, output)


def _lion(
    dtype: torch.dtype, module: ModuleType, *,
    feature_map: str, gates: str | None, packed: bool = False, sums: bool = False, part: bool = False,
) -> None:  # fmt: skip
    batch, seqlen = _rows(1 if packed else BATCH)
    qkv = _empty(batch, seqlen, 3 * 12 * 64, dtype=dtype)
    logits = {None: None, "head": _empty(12), "token": _empty(batch, seqlen, 12)}[gates]
    given = LionInputs(
        qkv=qkv, gates=logits, cu_seqlens=_documents(packed), nheads=12, feature_map=feature_map, gate_offset=1,
        forward_gate_offset=0, eps=1e-6,
    )  # fmt: skip
    with _context(part) as context:
        if part:
            given = given._replace(gates=None, log_decays=_factors(2, *logits.shape), context=context)
        outputs = module.forward(given)
        module.backward(given, outputs, outputs if sums else outputs._replace(row_sum=None))


def _product(dtype: torch.dtype, module: ModuleType, *, order: int, packed: bool) -> None:
    (batch, seqlen), cu_seqlens = _rows(1 if packed else BATCH), _documents(packed)
    x = _empty(batch, seqlen, max(1, 96 // order), order, order, dtype=dtype)
    initial = None if packed else _empty(batch, *x.shape[2:])
    given = ProductInputs(x, initial, cu_seqlens, None)
    outputs = module.forward(given)
    module.backward(given, outputs, outputs._replace(h=outputs.h.clone(), final=None if packed else outputs.final))


def _mixer(
    dtype: torch.dtype, module: ModuleType, *,
    construction: str, order: int, packed: bool = False, states: bool = False, seqlen: int = 0,
    heads: int | None = None, width: int | None = None, below_widest: int | None = None, outputs: bool = True,
    chunked: bool = False,
) -> None:  # fmt: skip
    batch, seqlen = (BATCH, seqlen) if seqlen else _rows(1 if packed else BATCH)
    heads = heads or 48 // order
    width = width or (order if below_widest is None else LARGEST_WIDTHS[dtype] - below_widest)
    token = (order, width) if chunked else (state_elements(construction, order),)
    elements = _empty(batch, seqlen, heads, *token, dtype=dtype)
    w_down = _empty(heads, order, width, dtype=dtype)
    w_up = _empty(heads, width, element_columns(construction, order)) if chunked else None
    cu_seqlens = _documents(packed)
    rows = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    initial = _empty(rows, heads, order, order) if states else None
    given = MixerInputs(elements, w_down, w_up, initial, cu_seqlens, construction)
    results = module.forward(given)
    cotangents = results._replace(y=results.y if outputs else None, final=results.final if states else None)
    module.backward(given, results, cotangents)


# -- The calls ---------------------------------------------------------------------------------------------------------

_after_state = partial(_conv, from_state=True)
_hydra = partial(_scan, directions=2, form=ScanForm(shift=True), decay="token", scale=True, diagonal="token")
_bidirectional_lion = partial(_scan, directions=2, form=ScanForm(self_term="mean", normalize=True))
_ssd = partial(_scan, decay="token", scale=True, diagonal="head")
_mamba = partial(_layer, directions=1, diagonal="constant", norm_first=False)
_selective_lion = partial(_lion, feature_map="silu_norm", gates="token")
_MIXERS: dict[str, tuple[tuple[int, ...], dict]] = {
    "rows": ((4, 8, 16), {}),
    "packed": ((4, 8, 16), {"packed": True}),
    "from a state to a state": ((4, 8, 16), {"states": True}),
    "one token from a state": ((4, 8, 16), {"states": True, "seqlen": 1}),
    "packed, from states": ((4, 8, 16), {"states": True, "packed": True}),
    "odd width": ((4, 8, 16), {"packed": True, "below_widest": 3}),
    "final states alone": ((4, 8, 16), {"states": True, "outputs": False}),
    "one head, one column": ((4, 8, 16), {"width": 1, "heads": 1}),
    "wide projection": ((16,), {"packed": True, "below_widest": 0}),
    "rows of chunks": ((4, 8, 16), {"chunked": True}),
    "packed chunks, from states": ((4, 8, 16), {"chunked": True, "states": True, "packed": True}),
    "odd chunks": ((4, 8, 16), {"chunked": True, "states": True, "packed": True, "below_widest": 3}),
    "wide chunks": ((16,), {"chunked": True, "states": True, "packed": True, "below_widest": 0}),
    "one token's chunks": ((8,), {"chunked": True, "states": True, "seqlen": 1}),
    "final states alone, chunks": ((8,), {"chunked": True, "states": True, "outputs": False}),
}
"""Title -> orders of the states, and options."""
CALLS: dict[str, dict[str, Run]] = {
    "short_conv": {
        "width 7 centred, packed, silu": partial(_conv, width=7, bias=True, silu=True, packed=True, split=True),
        "width 4 causal, silu": partial(_conv, width=4, causal=True, bias=True, silu=True),
        "width 4 causal, plain": partial(_conv, width=4, causal=True),
        "width 7 centred, silu": partial(_conv, width=7, bias=True, silu=True, split=True),
        "width 9 centred": partial(_conv, width=9, bias=True),
        "width 9 causal, packed, silu": partial(_conv, width=9, causal=True, silu=True, packed=True),
        "width 2 causal, odd number of channels": partial(_conv, width=2, causal=True, channels=77),
        "width 4 causal, few channels": partial(_conv, width=4, causal=True, silu=True, channels=32),
        "width 4 causal, few tokens": partial(_conv, width=4, causal=True, silu=True, tokens=128),
    },
    "short_conv_from_state": {
        "width 4, silu, after a state": partial(_after_state, width=4, bias=True, silu=True),
        "width 4, after a state of float32, few channels": partial(_after_state, width=4, channels=32, exact=True),
        "width 9, after a state, few tokens": partial(_after_state, width=9, silu=True, tokens=128),
        "width 2, after a state, odd number of channels": partial(_after_state, width=2, channels=77),
    },
    "gated_norm": {
        f"groups of {group or width} in {width}": partial(_norm, width=width, group=group)
        for width, group in ((1536, None), (1536, 64), (4096, None), (77, None))
    },
    "quasiseparable_scan": {
        "Hydra": _hydra,
        "Hydra, one group": partial(_hydra, groups=1, rows=32),
        "Hydra, packed": partial(_hydra, packed=True),
        "Hydra, rows of an image's patches": partial(_hydra, rows=256),
        "Hydra, one long row": partial(_hydra, rows=1),
        "Hydra, short rows": partial(_hydra, rows=1024),
        **{
            f"Hydra, state {d_state} x {headdim}": partial(_hydra, d_state=d_state, headdim=headdim)
            for d_state, headdim in ((16, 16), (16, 128), (128, 16), (128, 128), (256, 256))
        },
        "Hydra, concat": partial(_hydra, form=ScanForm(shift=True, combine="concat"), diagonal="head"),
        "Hydra, mult": partial(_hydra, form=ScanForm(shift=True, combine="mult")),
        "LION, gates per head": partial(_bidirectional_lion, decay="head"),
        "LION, gates per token, packed": partial(_bidirectional_lion, decay="token", packed=True),
        "two directions from states": partial(_hydra, form=ScanForm(), states=True),
        "LION from states to states, one long row": partial(_bidirectional_lion, decay="token", states=True, rows=1),
        "parts of Hydra's rows": partial(_hydra, part=True),
        "a part of packed rows of Hydra": partial(_hydra, packed=True, part=True),
        "a part of one long row of Hydra": partial(_hydra, rows=1, part=True),
        "parts of LION's rows": partial(_bidirectional_lion, decay="head", part=True),
        "a part of rows with shifted sums": partial(
            _scan, directions=2, form=ScanForm(shift=True, normalize=True), decay="token", part=True
        ),
        "a part of one long row of LION, packed": partial(_bidirectional_lion, decay="token", packed=True, part=True),
    },
    "semiseparable_scan": {
        "SSD": _ssd,
        "SSD, state 128 x 64": partial(_ssd, d_state=128),
        "SSD from a state to a state": partial(_ssd, states=True),
        "SSD from a state to a state, one long row": partial(_ssd, states=True, rows=1),
        "SSD from a state to a state, packed": partial(_ssd, states=True, packed=True),
        "a part of one long row of SSD, from a state to a state": partial(_ssd, states=True, rows=1, part=True),
        "a part of packed rows of SSD": partial(_ssd, packed=True, part=True),
        "parts of rows of linear attention": partial(_scan, part=True),
        "linear attention": _scan,
        "RetNet": partial(_scan, decay="head"),
    },
    "s6_scan": {
        "a layer of Mamba-1": _s6,
        "a packed layer of Mamba-1, from states to states": partial(_s6, packed=True),
        "odd widths of Mamba-1": partial(_s6, d=77, n=5),
        "Mamba-1 with 128 states": partial(_s6, d=256, n=128),
    },
    "matrix_memory": {
        "a layer with a matrix memory": _memory,
        "a packed layer with a matrix memory, from states to states": partial(_memory, packed=True),
        "odd heads of a matrix memory": partial(_memory, width=12, order=2),
        "large states of a matrix memory": partial(_memory, width=64, order=8),
    },
    "scan_layer": {
        "a Hydra layer": _layer,
        "a packed Hydra layer, limited steps, from states": partial(_layer, packed=True, high=0.1, states=True),
        "two scans added, steps of each direction": partial(_layer, shared=False, diagonal=None, shift=False),
        "a layer of Mamba-2": _mamba,
        "a wide layer of Mamba-2": partial(_mamba, heads=80),
    },
    "lion_mixer": {
        "LION, selective gates": _selective_lion,
        "packed LION, selective gates": partial(_selective_lion, packed=True),
        "LION, a gate for each head": partial(_lion, feature_map="silu", gates="head"),
        "LION without gates": partial(_lion, feature_map="elu", gates=None),
        "LION, sums of rows given": partial(_selective_lion, sums=True),
        "a part of packed rows of LION": partial(_selective_lion, packed=True, part=True),
    },
    "semiseparable_step": {
        "a token of SSD": partial(_scan_step, decay="token", scale=True, diagonal="head"),
        "a token of SSD, state 128 x 64": partial(_scan_step, d_state=128, decay="token", scale=True, diagonal="head"),
        "a token of LION": partial(_scan_step, groups=HEADS, decay="token", diagonal="token"),
        "a token of RetNet, in place": partial(_scan_step, groups=HEADS, headdim=128, decay="head", in_place=True),
        "a token of linear attention, many rows": partial(_scan_step, groups=HEADS, headdim=65, batch=256),
        "a token of states of an odd size": partial(_scan_step, groups=HEADS, d_state=300, headdim=77, decay="token"),
    },
    "short_conv_step": {
        "a token of width 4, silu": partial(_conv_step, width=4, bias=True, silu=True),
        "a token of width 4, in place": partial(_conv_step, width=4, silu=True, in_place=True),
        "a token of width 2": partial(_conv_step, width=2),
        "a token of width 9, odd number of channels": partial(_conv_step, width=9, bias=True, channels=77),
    },
    "matrix_product_scan": {
        f"order {order}, {'packed' if packed else 'from a state to a state'}": partial(
            _product, order=order, packed=packed
        )
        for order in (4, 8, 16, 32) for packed in (False, True)
    },
    "mru_mixer": {
        f"{construction}, order {order}, {title}": partial(_mixer, construction=construction, order=order, **options)
        for construction in FUSED for title, (orders, options) in _MIXERS.items() for order in orders
    },
}  # fmt: skip
"""Op -> title -> what calls it."""
MAIN = {
    "width 7 centred, packed, silu", "width 4 causal, silu", "width 4, silu, after a state", "groups of 1536 in 1536",
    "groups of 64 in 1536", "Hydra", "SSD", "a token of SSD",
}  # fmt: skip
"""Titles of the calls that models make most."""

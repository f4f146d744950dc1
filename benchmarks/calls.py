"""Calls of the ops' Triton forms that between them reach every kernel with every choice made at compile time.

Their tensors are on the device "meta": they have the sizes of real training but neither memory nor values, which the
host side of a kernel must not look at anyway. Within `on_device` they are real.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

import matmix.kernels  # noqa: F401 - whose operations name their Triton forms
from matmix.kernels.backend import TRITON_FORMS
from matmix.kernels.mru.constructions import element_columns, state_elements
from matmix.kernels.mru.op import FUSED, LARGEST_WIDTHS
from matmix.kernels.scan_layer.chunked import LayerForm
from matmix.kernels.semiseparable.form import ScanCall, ScanForm, ScanSide

BATCH, SEQLEN = 8, 8192
_PLAIN = ScanForm()
_device, _tokens = torch.device("meta"), BATCH * SEQLEN


class Call(NamedTuple):
    """Forward and, if there is one, backward pass of one op on tensors of one dtype."""

    op: str
    title: str
    dtype: torch.dtype
    run: Callable[[ModuleType], object]
    """Calls `forward`, and `backward` if there is one, of the module given."""
    main: bool = False
    """Models use the op like this: it is compiled under every configuration."""
    rare: bool = False
    """Differs from another call only as others do too: it can wait for the night."""

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


def form_of(call: Call) -> ModuleType:
    """Returns the module that is the Triton form of the call's op."""
    return importlib.import_module(TRITON_FORMS[call.op])


def calls() -> Iterator[Call]:
    """Yields all calls in bfloat16; float32 has tiles of its own, and float16 those of bfloat16."""
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        for call in (*conv_calls(dtype), *state_conv_calls(dtype), *norm_calls(dtype), *scan_calls(dtype)):
            seldom = dtype != torch.bfloat16 and not call.main and "state 128" not in call.title
            yield call._replace(main=call.main and dtype != torch.float16, rare=seldom)
        yield from layer_calls(dtype)
        yield from step_calls(dtype)
        yield from product_calls(dtype)
        yield from mixer_calls(dtype)


def conv_calls(dtype: torch.dtype) -> Iterator[Call]:
    def call(title: str, width: int, main: bool = False, **options) -> Call:
        return Call("short_conv", title, dtype, functools.partial(_run_conv, dtype, width, **options), main)

    yield call("width 7 centred, packed, silu", 7, main=True, bias=True, silu=True, packed=True, split=True)
    yield call("width 4 causal, silu", 4, main=True, causal=True, bias=True, silu=True)
    yield call("width 4 causal, plain", 4, causal=True)
    yield call("width 7 centred, silu", 7, bias=True, silu=True, split=True)
    yield call("width 9 centred", 9, bias=True)
    yield call("width 9 causal, packed, silu", 9, causal=True, silu=True, packed=True)
    yield call("width 2 causal, odd number of channels", 2, causal=True, channels=77)
    yield call("width 4 causal, few channels", 4, causal=True, silu=True, channels=32)
    yield call("width 4 causal, few tokens", 4, causal=True, silu=True, tokens=128)


def state_conv_calls(dtype: torch.dtype) -> Iterator[Call]:
    """Yields the causal convolution from a state to a state."""

    def call(title: str, width: int, main: bool = False, **options) -> Call:
        run = functools.partial(_run_state_conv, dtype, width, **options)
        return Call("short_conv_from_state", title, dtype, run, main)

    yield call("width 4, silu, after a state", 4, main=True, bias=True, silu=True)
    yield call("width 4, after a state of float32, few channels", 4, channels=32, exact=True)
    yield call("width 9, after a state, few tokens", 9, silu=True, tokens=128)
    yield call("width 2, after a state, odd number of channels", 2, channels=77)


def _run_state_conv(
    dtype: torch.dtype, width: int, module: ModuleType, *,
    channels: int = 1664, tokens: int = 0, bias: bool = False, silu: bool = False, exact: bool = False,
) -> None:  # fmt: skip
    rows, seqlen = (BATCH, tokens // BATCH) if tokens else _rows(BATCH)
    x = _empty(rows, seqlen, channels, dtype=dtype)
    weight, offset = _empty(channels, width, dtype=dtype), _empty(channels, dtype=dtype) if bias else None
    state = _empty(rows, channels, width - 1, dtype=torch.float32 if exact else dtype)
    options = weight, offset, state, "silu" if silu else None
    y, final = module.forward_from_state(x, *options)
    module.backward_from_state(y, final, x, *options)


def _run_conv(
    dtype: torch.dtype, width: int, module: ModuleType, *,
    channels: int = 1664, tokens: int = 0, causal: bool = False, bias: bool = False, silu: bool = False,
    packed: bool = False, split: bool = False,
) -> None:  # fmt: skip
    rows, seqlen = (BATCH, tokens // BATCH) if tokens else _rows(1 if packed else BATCH)
    x = _empty(rows, seqlen, channels, dtype=dtype)
    if split:  # as a layer's one input projection gives it
        x = _empty(*x.shape[:2], 2 * channels + 24, dtype=dtype)[..., channels : 2 * channels]
    weight, offset = _empty(channels, width, dtype=dtype), _empty(channels, dtype=dtype) if bias else None
    options = (causal, "silu" if silu else None, _documents() if packed else None)
    y = module.forward(x, weight, offset, *options)
    module.backward(y, x, weight, offset, *options)


def norm_calls(dtype: torch.dtype) -> Iterator[Call]:
    for width, group, main in ((1536, None, True), (1536, 64, True), (4096, None, False), (77, None, False)):
        run = functools.partial(_run_norm, dtype, width, group)
        yield Call("gated_norm", f"groups of {group or width} in {width}", dtype, run, main)


def _run_norm(dtype: torch.dtype, width: int, group: int | None, module: ModuleType) -> None:
    x = _empty(*_rows(BATCH), width, dtype=dtype)
    gate = _empty(*x.shape[:2], 2 * width + 152, dtype=dtype)[..., :width]
    weight = _empty(width, dtype=dtype)
    y = module.forward(x, weight, gate, 1e-5, group)
    module.backward(y, x, weight, gate, 1e-5, group)


def scan_calls(dtype: torch.dtype) -> Iterator[Call]:
    def call(title: str, sides: int = 2, main: bool = False, rare: bool = False, **options) -> Call:
        op = "semiseparable_scan" if sides == 1 else "quasiseparable_scan"
        return Call(op, title, dtype, functools.partial(_run_scan, dtype, sides, **options), main, rare)

    hydra = {"form": ScanForm(shift=True), "decay": "token", "scale": True, "diagonal": "token"}
    yield call("Hydra", main=True, **hydra)
    yield call("Hydra, one group", groups=1, rows=32, **hydra)
    yield call("Hydra, packed", packed=True, **hydra)
    yield call("Hydra, rows of an image's patches", rows=256, **hydra)
    yield call("Hydra, one long row", rows=1, **hydra)
    yield call("Hydra, short rows", rows=1024, **hydra)
    for d_state in (16, 128):
        for headdim in (16, 128):
            yield call(f"Hydra, state {d_state} x {headdim}", d_state=d_state, headdim=headdim, **hydra)
    yield call("Hydra, state 256 x 256", rare=True, d_state=256, headdim=256, **hydra)
    yield call("Hydra, concat", **hydra | {"form": ScanForm(shift=True, combine="concat"), "diagonal": "head"})
    yield call("Hydra, mult", **hydra | {"form": ScanForm(shift=True, combine="mult")})
    lion = {"form": ScanForm(self_term="mean", normalize=True), "decay": "head"}
    yield call("LION, gates per head", **lion)
    yield call("LION, gates per token, packed", packed=True, **lion | {"decay": "token"})
    ssd = {"decay": "token", "scale": True, "diagonal": "head"}
    yield call("SSD", sides=1, main=True, **ssd)
    yield call("SSD, state 128 x 64", sides=1, d_state=128, **ssd)
    yield call("SSD from a state to a state", sides=1, states=True, **ssd)
    yield call("SSD from a state to a state, one long row", sides=1, states=True, rows=1, **ssd)
    yield call("SSD from a state to a state, packed", sides=1, states=True, packed=True, **ssd)
    yield call("linear attention", sides=1)
    yield call("RetNet", sides=1, decay="head")
    yield call("two directions from states", states=True, **hydra | {"form": ScanForm()})


def _run_scan(
    dtype: torch.dtype, directions: int, module: ModuleType, *,
    form: ScanForm = _PLAIN, d_state: int = 64, headdim: int = 64, decay: str | None = None, scale: bool = False,
    diagonal: str | None = None, packed: bool = False, states: bool = False, rows: int = BATCH, groups: int = 2,
    heads: int = 24,
) -> tuple:  # fmt: skip
    """Returns the output and the gradients."""
    if _tokens < SEQLEN:  # for the interpreter
        heads, d_state, headdim = 2, min(d_state, 16), min(headdim, 16)
    (batch, seqlen), cu_seqlens = _rows(1 if packed else rows), _documents() if packed else None
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
            _empty(sequences, heads, d_state, headdim) if states else None,
            reverse,
        )
        for reverse in (False, True)[:directions]
    )
    final_state, skip = states and directions == 1, factor(diagonal)
    out = module.forward(ScanCall(v, sides, skip, form, cu_seqlens), final_state)
    # Backward passes are of linear scans: the registered op takes products and quotients apart first.
    linear = form._replace(combine="add" if form.combine == "add" else "concat", normalize=False)
    dy = _empty(*v.shape[:3], headdim * (1 if linear.combine == "add" else 2), dtype=dtype)
    return out, module.backward(dy, out.row_sum, out.final, ScanCall(v, sides, skip, linear, cu_seqlens))


def layer_calls(dtype: torch.dtype) -> Iterator[Call]:
    """Layers as one operation: what they launch around the scan."""

    def layer(title: str, **options) -> Call:
        return Call("scan_layer", title, dtype, functools.partial(_run_layer, dtype, **options))

    def lion(title: str, feature_map: str, gates: str | None, **options) -> Call:
        return Call("lion_mixer", title, dtype, functools.partial(_run_lion, dtype, feature_map, gates, **options))

    yield layer("a Hydra layer")
    yield layer("a packed Hydra layer, limited steps, from states", packed=True, high=0.1, states=True)
    yield layer("two scans added, steps of each direction", shared=False, diagonal=None, shift=False)
    yield layer("a layer of Mamba-2", directions=1, diagonal="constant", norm_first=False)
    yield layer("a wide layer of Mamba-2", directions=1, diagonal="constant", norm_first=False, heads=80)
    yield lion("LION, selective gates", "silu_norm", "token")
    yield lion("packed LION, selective gates", "silu_norm", "token", packed=True)
    yield lion("LION, a gate for each head", "silu", "head")
    yield lion("LION without gates", "elu", None)
    yield lion("LION, sums of rows given", "silu_norm", "token", sums=True)


def _run_layer(
    dtype: torch.dtype, module: ModuleType, *,
    directions: int = 2, diagonal: str | None = "projected", shared: bool = True, shift: bool = True,
    packed: bool = False, states: bool = False, high: float = math.inf, norm_first: bool = True, heads: int = 24,
) -> None:  # fmt: skip
    form = LayerForm(heads, 64, 1, 64, directions, shift, 0.0, high)
    projected = _empty(*_rows(1 if packed else BATCH), sum(form.widths), dtype=dtype)
    steps = (heads,) if shared else (2, heads)
    given = module.Parameters(
        _empty(form.conv_width, 7 if directions == 2 else 4),
        _empty(form.conv_width),
        _empty(*steps),
        _empty(*steps),
        None if diagonal is None else _empty(heads),
        _empty(heads, form.inner, dtype=dtype) if diagonal == "projected" else None,
        _empty(heads, 64, 64) if states else None,
    )
    cu_seqlens, weight = _documents() if packed else None, _empty(form.inner)
    y, mixed, product = module.forward(projected, given, form, cu_seqlens, None)
    out = module.gate(projected, y, weight, form, 1e-5, None, norm_first)
    module.backward(out, projected, y, mixed, product, given, weight, form, cu_seqlens, None, 1e-5, None, norm_first)


def _run_lion(
    dtype: torch.dtype, feature_map: str, gates: str | None, module: ModuleType, *,
    packed: bool = False, sums: bool = False,
) -> None:  # fmt: skip
    batch, seqlen = _rows(1 if packed else BATCH)
    form = module.LionForm(12, feature_map, 1, 0, 1e-6)
    qkv = _empty(batch, seqlen, 3 * 12 * 64, dtype=dtype)
    logits = {None: None, "head": _empty(12), "token": _empty(batch, seqlen, 12)}[gates]
    cu_seqlens = _documents() if packed else None
    *found, decays = module.forward(qkv, logits, form, cu_seqlens)
    module.backward(found[0], found[1] if sums else None, *found, decays, qkv, logits, form, cu_seqlens)


def step_calls(dtype: torch.dtype) -> Iterator[Call]:
    """Yields one token from a state to the next."""

    def scan(title: str, main: bool = False, **options) -> Call:
        return Call("semiseparable_step", title, dtype, functools.partial(_run_step, dtype, **options), main)

    def conv(title: str, width: int, **options) -> Call:
        return Call("short_conv_step", title, dtype, functools.partial(_run_conv_step, dtype, width, **options))

    yield scan("a token of SSD", main=dtype != torch.float16, decay="token", scale=True, diagonal="head")
    yield scan("a token of SSD, state 128 x 64", d_state=128, decay="token", scale=True, diagonal="head")
    yield scan("a token of LION", groups=24, decay="token", diagonal="token")
    yield scan("a token of RetNet, in place", groups=24, headdim=128, decay="head", in_place=True)
    yield scan("a token of linear attention, many rows", groups=24, headdim=65, batch=256)
    yield scan("a token of states of an odd size", groups=24, d_state=300, headdim=77, decay="token")
    yield conv("a token of width 4, silu", 4, bias=True, silu=True)
    yield conv("a token of width 4, in place", 4, silu=True, in_place=True)
    yield conv("a token of width 2", 2)
    yield conv("a token of width 9, odd number of channels", 9, bias=True, channels=77)


def _run_step(
    dtype: torch.dtype, module: ModuleType, *,
    batch: int = BATCH, groups: int = 1, d_state: int = 64, headdim: int = 64, decay: str | None = None,
    scale: bool = False, diagonal: str | None = None, in_place: bool = False,
) -> None:  # fmt: skip
    heads = 24

    def factor(kind: str | None) -> Tensor | None:
        return {None: None, "token": _factors(batch, heads), "head": _factors(heads)}[kind]

    # Slices of what the convolution gives.
    mixed = _empty(batch, heads * headdim + 2 * groups * d_state, dtype=dtype)
    v, q, k = mixed.split([heads * headdim, groups * d_state, groups * d_state], -1)
    v, q, k = v.unflatten(-1, (heads, headdim)), *(x.unflatten(-1, (groups, d_state)) for x in (q, k))
    state = _empty(batch, heads, d_state, headdim)
    module.forward(v, q, k, factor(decay), state, factor("token" if scale else None), factor(diagonal), in_place)


def _run_conv_step(
    dtype: torch.dtype, width: int, module: ModuleType, *,
    channels: int = 1664, bias: bool = False, silu: bool = False, in_place: bool = False,
) -> None:  # fmt: skip
    x, state = _empty(BATCH, 2 * channels, dtype=dtype)[:, channels:], _empty(BATCH, channels, width - 1, dtype=dtype)
    weight, offset = _empty(channels, width, dtype=dtype), _empty(channels, dtype=dtype) if bias else None
    module.forward(x, state, weight, offset, "silu" if silu else None, in_place)


def product_calls(dtype: torch.dtype) -> Iterator[Call]:
    for order in (4, 8, 16, 32):
        for packed in (False, True):
            title = f"order {order}, {'packed' if packed else 'from a state to a state'}"
            run = functools.partial(_run_product, dtype, order, packed)
            yield Call("matrix_product_scan", title, dtype, run)


def _run_product(dtype: torch.dtype, order: int, packed: bool, module: ModuleType) -> None:
    (batch, seqlen), cu_seqlens = _rows(1 if packed else BATCH), _documents() if packed else None
    x = _empty(batch, seqlen, max(1, 96 // order), order, order, dtype=dtype)
    initial = None if packed else _empty(batch, *x.shape[2:])
    h, final, products = module.forward(x, initial, cu_seqlens, None)
    module.backward(h.clone(), None if packed else final, x, h, products, initial, cu_seqlens, None)


def mixer_calls(dtype: torch.dtype) -> Iterator[Call]:
    def call(title: str, construction: str, order: int, rare: bool = False, **options) -> Call:
        run = functools.partial(_run_mixer, dtype, construction, order, **options)
        return Call("mru_mixer", f"{construction}, order {order}, {title}", dtype, run, rare=rare)

    half = dtype == torch.float16
    for construction in FUSED:
        for order in (4, 8, 16):
            yield call("rows", construction, order, rare=half)
            yield call("packed", construction, order, rare=half, packed=True)
            yield call("from a state to a state", construction, order, rare=half or order == 4, states=True)
            yield call("one token from a state", construction, order, rare=half, states=True, seqlen=1)
            rare = half or order == 8
            yield call("packed, from states", construction, order, rare=rare, states=True, packed=True)
            yield call("odd width", construction, order, rare=rare, packed=True, width=LARGEST_WIDTHS[dtype] - 3)
            yield call("final states alone", construction, order, rare=True, states=True, outputs=False)
            yield call("one head, one column", construction, order, rare=True, width=1, heads=1)
        yield call("wide projection", construction, 16, packed=True, width=LARGEST_WIDTHS[dtype])
        for order in (4, 8, 16):
            yield call("rows of chunks", construction, order, rare=half or order == 4, chunked=True)
            packed = {"packed": True, "states": True, "chunked": True}
            yield call("packed chunks, from states", construction, order, rare=half or order != 8, **packed)
            yield call("odd chunks", construction, order, rare=True, width=LARGEST_WIDTHS[dtype] - 3, **packed)
        yield call("wide chunks", construction, 16, rare=half, width=LARGEST_WIDTHS[dtype], **packed)
        yield call("one token's chunks", construction, 8, rare=True, states=True, seqlen=1, chunked=True)
        yield call("final states alone, chunks", construction, 8, rare=True, states=True, outputs=False, chunked=True)


def _run_mixer(
    dtype: torch.dtype, construction: str, order: int, module: ModuleType, *,
    packed: bool = False, states: bool = False, seqlen: int = 0, width: int | None = None, heads: int | None = None,
    outputs: bool = True, chunked: bool = False,
) -> None:  # fmt: skip
    batch, seqlen = (BATCH, seqlen) if seqlen else _rows(1 if packed else BATCH)
    heads = heads or 48 // order
    width = width or order
    token = (order, width) if chunked else (state_elements(construction, order),)
    elements = _empty(batch, seqlen, heads, *token, dtype=dtype)
    w_down = _empty(heads, order, width, dtype=dtype)
    w_up = _empty(heads, width, element_columns(construction, order)) if chunked else None
    cu_seqlens = _documents() if packed else None
    rows = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    options = (_empty(rows, heads, order, order) if states else None, cu_seqlens, construction)
    y, final, _, edges = module.forward(elements, w_down, w_up, *options)
    module.backward(y if outputs else None, final if states else None, elements, w_down, w_up, edges, *options)


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


def _documents() -> Tensor:
    """Boundaries of documents of 1,024 tokens on average."""
    length = min(1024, _tokens // 2)
    if _device.type == "meta":
        return torch.empty(_tokens // length + 1, dtype=torch.int32, device=_device)
    return torch.arange(0, _tokens + 1, length, dtype=torch.int32, device=_device)


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    if _device.type == "meta":
        return torch.empty(shape, dtype=dtype, device=_device)
    return (0.1 * torch.randn(shape, device=_device)).to(dtype)


def _factors(*shape: int) -> Tensor:
    """Numbers below zero, as the logarithms of decays are."""
    return _empty(*shape) if _device.type == "meta" else -0.05 * torch.rand(shape, device=_device)

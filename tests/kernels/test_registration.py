"""Ops as PyTorch sees them: schemas, fake tensors, compile, checkpointing, FLOP counts; and bad arguments."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from compare import assert_refused, packed, rmse_ratio
from flop_count import FlopCount, cost_class
from nightly import each_value_once
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from matmix.kernels import (
    gated_norm,
    matrix_product_scan,
    mru_mixer,
    mru_step,
    quasiseparable_scan,
    semiseparable_scan,
    short_conv,
)
from matmix.kernels.gated_norm.chunked import gated_norm_torch
from matmix.kernels.gated_norm.definition import gated_norm_definition
from matmix.kernels.matrix_product.chunked import matrix_product_chunked
from matmix.kernels.semiseparable.chunked import quasiseparable_chunked, semiseparable_chunked
from matmix.kernels.short_conv.chunked import short_conv_torch


def draw(*shape, device="cpu"):
    return torch.randn(*shape, device=device, requires_grad=True)


def samples():
    """One call of each op as (op, tensors)."""
    v, q, k = draw(1, 40, 4, 6), draw(1, 40, 2, 5), draw(1, 40, 2, 5)
    decay = (-torch.rand(1, 40, 4)).requires_grad_()
    cu_seqlens = packed([15, 1, 24])
    positive = torch.rand(1, 40, 2, 5).add_(0.1).requires_grad_()
    x = torch.linalg.qr(torch.randn(1, 40, 3, 4, 4))[0].contiguous().requires_grad_()
    return {
        "semiseparable": (partial(semiseparable_scan, cu_seqlens=cu_seqlens), (v, q, k, decay)),
        "with states": (partial(semiseparable_scan, return_final_state=True), (v, q, k, decay)),
        "quasiseparable": (
            partial(quasiseparable_scan, cu_seqlens=cu_seqlens),
            (v, q, k, k, q, decay, decay),
        ),
        "row sums": (
            partial(
                quasiseparable_scan,
                shift=False,
                self_term="mean",
                normalize="row_sum",
                gate_offset=1,
                cu_seqlens=cu_seqlens,
            ),
            (v, positive, positive, positive, positive, decay, decay),
        ),
        "product": (partial(quasiseparable_scan, combine="mult"), (v, q, k, k, q, decay, decay)),
        "both": (partial(quasiseparable_scan, combine="concat", gate_offset=1), (v, q, k, k, q, decay, decay)),
        "matrix product": (
            partial(matrix_product_scan, return_final_state=True, cu_seqlens=cu_seqlens),
            (x,),
        ),
        "mru mixer": (
            partial(mru_mixer, return_final_state=True, return_log_norms=True, cu_seqlens=cu_seqlens, backend="torch"),
            (draw(1, 40, 3, 6), draw(3, 4, 5)),
        ),
        "mru mixer of chunks": (
            lambda chunks, w_down, w_up: mru_mixer(
                chunks, w_down, w_up=w_up, return_final_state=True, cu_seqlens=cu_seqlens, backend="torch"
            ),
            (draw(1, 40, 3, 4, 2), draw(3, 4, 5), draw(3, 2, 4)),
        ),
        "mru step": (
            lambda elements, state, w_down: mru_step(elements, state, w_down, construction="ldu", backend="torch"),
            (draw(2, 3, 16), draw(2, 3, 4, 4), draw(3, 4, 5)),
        ),
        "short conv": (
            partial(short_conv, activation="silu", cu_seqlens=cu_seqlens),
            (v.flatten(2), draw(24, 7)),
        ),
        "short conv from a state": (
            lambda x, weight, state: short_conv(
                x, weight, initial_state=state, return_final_state=True, causal=True, activation="silu"
            ),
            (draw(2, 9, 6), draw(6, 4), draw(2, 6, 3)),
        ),
        "gated norm": (gated_norm, (v.flatten(2), draw(24), draw(1, 40, 24))),
    }


NAMES = [
    *("semiseparable", "with states", "quasiseparable", "row sums", "product", "both"),
    *("matrix product", "mru mixer", "mru mixer of chunks", "mru step", "short conv"),
    *("short conv from a state", "gated norm"),
]


def first(output):
    return output[0] if isinstance(output, tuple) else output


@pytest.mark.parametrize("name", NAMES)
def test_schema_fake_and_autograd_registration(name):
    """PyTorch's own checks of a custom op, on the arguments that the public function passes down."""
    op, tensors = samples()[name]
    calls = []
    overloads = {
        packet: getattr(torch.ops.matmix, packet).default
        for packet in (
            "semiseparable_scan", "quasiseparable_scan", "matrix_product_scan", "short_conv", "gated_norm",
            "mru_mixer", "mru_mixer_backward",
            "semiseparable_scan_backward", "quasiseparable_scan_backward", "matrix_product_scan_backward",
            "short_conv_backward", "gated_norm_backward", "short_conv_from_state", "short_conv_from_state_backward",
        )
    }  # fmt: skip

    class Record(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func in overloads.values():
                calls.append((func, args))
            return func(*args, **(kwargs or {}))

    with Record():
        first(op(*tensors)).sum().backward()
    assert len(calls) == 2
    for func, args in calls:
        args = tuple(a.detach().requires_grad_(a.is_floating_point()) if torch.is_tensor(a) else a for a in args)
        utils = ("test_schema", "test_faketensor", "test_autograd_registration")
        if not func.name().endswith("_backward"):
            utils += ("test_aot_dispatch_static",)
        torch.library.opcheck(func, args, test_utils=utils)


def scalar(op):
    return lambda *tensors: first(op(*tensors)).square().sum()


@pytest.mark.parametrize("name", NAMES)
def test_transforms_of_torch_func(name):
    """Reverse mode, per-sample gradients (weights of all samples are one tensor), a Jacobian row by row, and a gradient
    through vmap: what `torch.autograd.grad` finds call by call, to the last bit where sums are taken in one order."""
    op, tensors = samples()[name]
    tensors = tuple(x.detach().requires_grad_() for x in tensors)  # some stand for two inputs
    numbers = tuple(range(len(tensors)))
    values = tuple(x.detach() for x in tensors)
    wanted = torch.autograd.grad(scalar(op)(*tensors), tensors)
    for a, b in zip(torch.func.grad(scalar(op), numbers)(*values), wanted, strict=True):
        assert torch.equal(a, b)
    output, pull = torch.func.vjp(lambda *t: first(op(*t)), *values)
    for a, b in zip(pull(2 * output), wanted, strict=True):
        assert torch.equal(a, b)

    # Two samples of all inputs but the last, which both share.
    apart = max(len(tensors) - 1, 1)
    others = tuple(x.detach().mul(0.9).requires_grad_() for x in tensors[:apart]) + tensors[apart:]
    alone = torch.autograd.grad(scalar(op)(*others), others)
    dims = tuple(0 if number < apart else None for number in numbers)
    given = tuple(torch.stack((x, y)) if d == 0 else x for x, y, d in zip(values, others, dims, strict=True))
    given = tuple(x.detach() for x in given)
    each = torch.func.vmap(torch.func.grad(scalar(op), numbers), dims)(*given)
    summed = torch.func.grad(lambda *t: torch.func.vmap(scalar(op), dims)(*t).sum(), numbers)(*given)
    for dim, a, b, c, d in zip(dims, each, wanted, alone, summed, strict=True):
        assert torch.equal(a, torch.stack((b, c)))
        assert rmse_ratio(d, a if dim == 0 else a.sum(0)) < 1e-6

    rows = torch.func.jacrev(lambda x: first(op(*values[:-1], x)).flatten()[::100])(values[-1])
    for row, out in zip(rows, first(op(*tensors)).flatten()[::100], strict=True):
        assert torch.equal(row, torch.autograd.grad(out, tensors[-1], retain_graph=True)[0])


IN_PYTORCH = {
    "semiseparable": semiseparable_chunked,
    "with states": partial(semiseparable_chunked, return_final_state=True),
    "quasiseparable": quasiseparable_chunked,
    "row sums": partial(quasiseparable_chunked, shift=False, self_term="mean", normalize="row_sum", gate_offset=1),
    "matrix product": partial(matrix_product_chunked, return_final_state=True),
    "short conv": partial(short_conv_torch, activation="silu"),
    "gated norm": gated_norm_torch,
}


@pytest.mark.parametrize("name", IN_PYTORCH)
def test_transforms_of_torch_func_without_operations(name):
    """What exports run where this package is not installed."""
    op, tensors = IN_PYTORCH[name], tuple(x.detach().requires_grad_() for x in samples()[name][1])
    values = tuple(x.detach() for x in tensors)
    wanted = torch.autograd.grad(scalar(op)(*tensors), tensors)
    gradients = torch.func.grad(scalar(op), tuple(range(len(values))))
    dims = (0, *[None] * (len(values) - 1))
    each = torch.func.vmap(gradients, dims)(values[0].expand(2, *values[0].shape), *values[1:])
    for a, b, c in zip(gradients(*values), each, wanted, strict=True):
        assert torch.equal(a, c)
        assert torch.equal(b, torch.stack((c, c)))
    with pytest.raises(ValueError, match="a derivative of this gradient is asked for, and there is none"):
        torch.func.grad(lambda *t: gradients(*t)[0].sum())(*values)
    with pytest.raises(NotImplementedError):
        torch.func.jvp(op, values, values)


def test_forward_mode_is_refused_and_never_answered_with_zeros():
    for name, (op, tensors) in samples().items():
        if name != "mru step":  # plain PyTorch, which has it
            check_that_forward_mode_is_refused(op, tensors)


def check_that_forward_mode_is_refused(op, tensors):
    tangents = [torch.ones_like(x) if number == 0 else torch.zeros_like(x) for number, x in enumerate(tensors)]
    values = tuple(x.detach() for x in tensors)
    with pytest.raises(ValueError, match="has no forward-mode derivative; use reverse mode"):
        torch.func.jvp(op, values, tuple(tangents))
    with forward_ad.dual_level(), pytest.raises(ValueError, match="an input has a tangent"):
        op(*values[:-1], forward_ad.make_dual(values[-1], tangents[-1]))
    op(*values)


def test_second_derivatives_are_refused_and_never_answered_with_zeros():
    for op, tensors in samples().values():
        check_that_second_derivatives_are_refused(op, tensors)


def check_that_second_derivatives_are_refused(op, tensors):
    values = tuple(x.detach() for x in tensors)
    slope = torch.func.grad(scalar(op))
    message = "a derivative of its gradient is asked for, and this op has none"
    with pytest.raises(ValueError, match=message):
        torch.func.grad(lambda *t: slope(*t).sum())(*values)
    with pytest.raises(ValueError, match=message):
        torch.autograd.grad(scalar(op)(*tensors), tensors[0], create_graph=True)[0].sum().backward()
    with pytest.raises(ValueError, match="an input has a tangent"):
        torch.func.jvp(slope, values, tuple(map(torch.ones_like, values)))


def test_definitions_have_the_derivatives_that_operations_refuse():
    x, weight, gate = torch.randn(3, 4), torch.rand(4), torch.randn(3, 4)
    forward, reverse = (
        outer(torch.func.jacrev(lambda x: gated_norm_definition(x, weight, gate).sum()))(x)
        for outer in (torch.func.jacfwd, torch.func.jacrev)
    )
    assert rmse_ratio(forward, reverse) < 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_compile_without_graph_breaks(name):
    """Traced whole, forward and backward; same numbers. (aot_eager: tracing without code generation.)"""
    op, tensors = samples()[name]
    wanted = first(op(*tensors))
    grads = torch.autograd.grad(wanted.square().sum(), tensors)
    torch.compiler.reset()
    compiled = torch.compile(lambda *t: first(op(*t)), fullgraph=True, backend="aot_eager")
    got = compiled(*tensors)
    assert torch.equal(got, wanted)
    for a, b in zip(torch.autograd.grad(got.square().sum(), tensors), grads, strict=True):
        assert rmse_ratio(a, b) < 1e-6


def test_activation_checkpointing():
    for name, (op, tensors) in samples().items():
        wanted = torch.autograd.grad(first(op(*tensors)).square().sum(), tensors)
        again = checkpoint(lambda op, *t: first(op(*t)), op, *tensors, use_reentrant=False)
        for a, b in zip(torch.autograd.grad(again.square().sum(), tensors), wanted, strict=True):
            assert torch.equal(a, b), name


def test_meta_device_shapes():
    x = torch.empty(2, 100, 3, 8, 8, device="meta", dtype=torch.bfloat16)
    h, final = matrix_product_scan(x, return_final_state=True)
    assert (h.shape, h.dtype, final.dtype) == (x.shape, torch.bfloat16, torch.float32)

    elements, w_down = torch.empty(2, 100, 3, 28, device="meta", dtype=torch.bfloat16), torch.empty(3, 8, 5).to("meta")
    mru_mixer(elements, w_down, construction="householder")
    y, final, norms = mru_mixer(elements, w_down, return_final_state=True, return_log_norms=True)
    assert (y.shape, y.dtype, final.dtype, norms.shape) == ((2, 100, 3, 8, 5), torch.bfloat16, torch.float32, (2,))


def test_flops_of_the_mru():
    """Forward: two products per token and head, X twice, a projection; backward: see the formula."""
    elements, w_down = draw(2, 50, 3, 64), draw(3, 8, 5)
    cost = 2 * 2 * 50 * 3 * 64
    for construction, forward, backward in (("identity_plus", (2, 1), (5, 3)), ("ldu", (4, 1), (9, 3))):
        with FlopCounterMode(display=False) as counter:
            y = mru_mixer(elements, w_down, construction=construction, backend="torch")
        assert counter.get_total_flops() == cost * (forward[0] * 8 + forward[1] * 5)
        with FlopCounterMode(display=False) as counter:
            y.sum().backward()
        assert counter.get_total_flops() == cost * (backward[0] * 8 + backward[1] * 5)


def test_flops_of_the_mru_from_chunks():
    """Forward: elements twice; backward: twice again, and the gradients of chunks and weights."""
    chunks, w_down, w_up = draw(2, 50, 3, 8, 7), draw(3, 8, 5), draw(3, 7, 8)
    elements = draw(2, 50, 3, 64)
    found = []
    for given, weights in ((chunks, w_up), (elements, None)):
        with FlopCounterMode(display=False) as forward:
            y = mru_mixer(given, w_down, w_up=weights, construction="ldu", backend="torch")
        with FlopCounterMode(display=False) as backward:
            y.sum().backward()
        found.append((forward.get_total_flops(), backward.get_total_flops()))
    once = 2 * 2 * 50 * 3 * 8 * 7 * 8
    assert [a - b for a, b in zip(*found, strict=True)] == [2 * once, 4 * once]


FORMS = [
    {},
    {"shift": False},
    {"combine": "mult"},
    {"combine": "concat"},
    {"shift": False, "self_term": "mean", "normalize": "row_sum"},
]


@pytest.mark.parametrize(("form", "length"), each_value_once([None, *FORMS], [512, 2048]))
def test_flops_are_those_of_the_products_that_run(form, length):
    """The registered formulas against what is counted while the PyTorch form runs; that also sums decays inside
    chunks by products with masks, which the formulas leave out.
    """
    on_meta = partial(draw, device="meta")
    v, q, k, decay = (
        on_meta(2, length, 8, 64),
        on_meta(2, length, 2, 32),
        on_meta(2, length, 2, 32),
        on_meta(2, length, 8),
    )
    counts = []
    ops = (semiseparable_scan, semiseparable_chunked) if form is None else (quasiseparable_scan, quasiseparable_chunked)
    for op in ops:
        inputs = (v, q, k, decay) if form is None else (v, q, k, q, k, decay, decay)
        with FlopCounterMode(display=False) as forward:
            y = op(*inputs, **(form or {}))
        with FlopCounterMode(display=False) as backward:
            y.sum().backward()
        counts.append((forward.get_total_flops(), backward.get_total_flops()))
    for formula, counted in zip(*counts, strict=True):
        assert formula <= counted <= 1.03 * formula


def _semiseparable_on_meta(length, **options):
    v, q, decay = (draw(1, length, *rest, device="meta") for rest in ((2, 8), (1, 4), (2,)))
    return semiseparable_chunked(v, q, q, decay, **options)


def _quasiseparable_on_meta(length, **options):
    v, q, decay = (draw(1, length, *rest, device="meta") for rest in ((2, 8), (1, 4), (2,)))
    return quasiseparable_chunked(v, q, q, q, q, decay, decay, **options)


def _matrix_product_on_meta(length, order):
    return matrix_product_chunked(draw(1, length, 2, order, order, device="meta"))


@pytest.mark.parametrize(
    "run",
    [
        _semiseparable_on_meta,
        *(partial(_quasiseparable_on_meta, **form) for form in FORMS),
        *(partial(_matrix_product_on_meta, order=order) for order in (4, 16)),
    ],
)
def test_all_work_is_linear_in_the_length(run):
    """Elementwise work too, which the formulas leave out: a mask over all pairs of tokens would be seen."""
    costs = {"forward": [], "backward": []}
    for length in (256, 1024, 4096):
        with FlopCount() as forward:
            y = run(length)
        with FlopCount() as backward:
            y.sum().backward()
        costs["forward"].append(forward.total)
        costs["backward"].append(backward.total)
    assert {part: cost_class(growth) for part, growth in costs.items()} == dict.fromkeys(costs, "O(L)")


@pytest.mark.parametrize("form", [*FORMS, {"shift": False, "gate_offset": 1}])
def test_memory_of_backward_is_lean(form):
    """Only the inputs are kept (and what a normaliser divided, moved gates): no state, no matrix of a chunk."""
    saved = []

    def keep(x):
        saved.append(x)
        return x

    v, q, k = draw(1, 512, 4, 16), draw(1, 512, 1, 16), draw(1, 512, 1, 16)
    decay = (-torch.rand(1, 512, 4)).requires_grad_()
    inputs = {x.untyped_storage().data_ptr() for x in (v, q, k, decay)}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        y = quasiseparable_scan(v, q, k, q, k, decay, decay, **form)
    assert y.requires_grad
    kept = {x.untyped_storage().data_ptr(): x.numel() for x in saved if x.untyped_storage().data_ptr() not in inputs}
    allowed = []
    if "normalize" in form:
        allowed += [y.numel(), decay.numel()]
    if "gate_offset" in form:
        allowed += [decay.numel()]
    assert sorted(kept.values()) == sorted(allowed)


def causal(v=(2, 3, 4, 5), q=(2, 3, 2, 4), k=(2, 3, 2, 4), log_decay=None, **options):
    """`semiseparable_scan` of ones of these shapes, or of the given tensors."""
    v, q, k = (torch.ones(x) if isinstance(x, tuple) else x for x in (v, q, k))
    return semiseparable_scan(v, q, k, log_decay, **options)


def bidirectional(**options):
    v, x = torch.ones(2, 3, 4, 5), torch.ones(2, 3, 2, 4)
    return quasiseparable_scan(v, x, x, x, x, options.pop("log_decay_forward", None), None, **options)


def mixer(elements=(2, 3, 1, 6), w_down=(1, 4, 4), **options):
    return mru_mixer(torch.ones(elements), torch.ones(w_down), **options)


ONES, STATE = torch.ones(2, 3, 4), torch.ones(2, 4, 4, 5)
NAN = torch.full((2, 3, 4), torch.nan)
BAD = {
    "v has shape (2, 3, 4); expected": lambda: causal((2, 3, 4)),
    "v has shape (2, 0, 4, 5); expected": lambda: causal((2, 0, 4, 5)),
    "4 heads cannot share 3 groups": lambda: causal(q=(2, 3, 3, 4), k=(2, 3, 3, 4)),
    "q has shape (2, 3, 4); expected": lambda: causal(q=(2, 3, 4)),
    "k has shape (2, 3, 1, 4); expected (2, 3, 2, 4)": lambda: causal(k=(2, 3, 1, 4)),
    "q has shape (2, 2, 2, 4); expected (2, 3, 2, 4)": lambda: causal(q=(2, 2, 2, 4)),
    "log_decay has shape (2, 3, 2); expected (2, 3, 4) or (4,)": lambda: causal(log_decay=torch.ones(2, 3, 2)),
    "input_scale has shape (4,); expected (2, 3, 4)": lambda: causal(input_scale=torch.ones(4)),
    "diagonal has shape (3,)": lambda: causal(diagonal=torch.ones(3)),
    "initial_state has shape (2, 4, 5, 4); expected (2, 4, 4, 5)": lambda: causal(initial_state=torch.ones(2, 4, 5, 4)),
    "q is None": lambda: causal(q=None),
    "diagonal is a float; give a floating-point tensor": lambda: causal(diagonal=1.0),
    "k has dtype torch.bfloat16, v torch.float32": lambda: causal(k=torch.ones(2, 3, 2, 4).bfloat16()),
    "v has dtype torch.int64": lambda: causal(v=torch.ones(2, 3, 4, 5, dtype=torch.int64)),
    "log_decay has dtype torch.bool": lambda: causal(log_decay=torch.ones(2, 3, 4, dtype=torch.bool)),
    "q is on meta, other inputs on cpu": lambda: causal(q=torch.ones(2, 3, 2, 4, device="meta")),
    "initial_state is on meta, other inputs on cpu": lambda: causal(initial_state=STATE.to("meta")),
    "log_decay reaches 0.011; it must be at most 0.01": lambda: causal(log_decay=0.011 * ONES),
    "log_decay_forward reaches 1;": lambda: bidirectional(log_decay_forward=torch.nn.Parameter(torch.ones(4))),
    "chunk_size is 48; use None or one of 16, 32, 64, 128, 256": lambda: causal(chunk_size=48),
    "chunk_size is 64.0": lambda: causal(chunk_size=64.0),
    "combine is 'sum'; use 'add' or 'mult' or 'concat'": lambda: bidirectional(combine="sum"),
    "self_term is 'half'; use 'sum' or 'mean'": lambda: bidirectional(self_term="half"),
    "normalize is True; use None or 'row_sum'": lambda: bidirectional(normalize=True),
    "gate_offset is 2; use 0 or 1": lambda: bidirectional(gate_offset=2),
    "gate_offset is True; use 0 or 1": lambda: bidirectional(gate_offset=True),
    "eps is -0.1; give a finite number that is not negative": lambda: bidirectional(normalize="row_sum", eps=-0.1),
    "eps is nan": lambda: bidirectional(normalize="row_sum", eps=float("nan")),
    '"mean" needs combine="add"': lambda: bidirectional(shift=False, self_term="mean", combine="mult"),
    "normalize is 'row_sum' and combine 'concat'": lambda: bidirectional(combine="concat", normalize="row_sum"),
    "initial_state_backward has shape (2, 4, 4, 5); expected (2, 4, 4, 6)": lambda: bidirectional(
        normalize="row_sum", initial_state_backward=STATE
    ),
    "shift is 1; use True or False": lambda: bidirectional(shift=1),
    "cu_seqlens needs batch 1": lambda: matrix_product_scan(torch.ones(2, 3, 1, 4, 4), cu_seqlens=packed([3])),
    "must run from 0 to 3": lambda: matrix_product_scan(torch.ones(1, 3, 1, 4, 4), cu_seqlens=packed([2])),
    "decreases": lambda: matrix_product_scan(
        torch.ones(1, 3, 1, 4, 4), cu_seqlens=torch.tensor([0, 2, 1, 3], dtype=torch.int32)
    ),
    "cu_seqlens is torch.float32 (2,); give int32 (documents + 1,)": lambda: causal(
        (1, 3, 4, 5), (1, 3, 2, 4), (1, 3, 2, 4), cu_seqlens=torch.tensor([0.0, 3.0])
    ),
    "cu_seqlens is on meta": lambda: causal(
        (1, 3, 4, 5), (1, 3, 2, 4), (1, 3, 2, 4), cu_seqlens=packed([3]).to("meta")
    ),
    "cu_seqlens runs from 0 to 4; it must run from 0 to 3": lambda: causal(
        (1, 3, 4, 5), (1, 3, 2, 4), (1, 3, 2, 4), cu_seqlens=packed([4])
    ),
    "expected (batch, seqlen, nheads, o, o)": lambda: matrix_product_scan(torch.ones(1, 3, 1, 4, 5)),
    "give a floating-point tensor": lambda: matrix_product_scan(torch.ones(1, 3, 1, 4, 4, dtype=torch.int64)),
    "needs CUDA tensors, got one on cpu": lambda: causal(backend="triton"),
    "none of them 0 and o one of 4, 8, 16, 32": lambda: matrix_product_scan(torch.ones(1, 3, 1, 5, 5)),
    "matrix_product_scan: initial_state has dtype torch.bfloat16; states are torch.float32": lambda: (
        matrix_product_scan(torch.ones(1, 3, 1, 4, 4).bfloat16(), initial_state=torch.ones(1, 1, 4, 4).bfloat16())
    ),
    "initial_state has shape (1, 2, 4, 4); expected (1, 1, 4, 4)": lambda: matrix_product_scan(
        torch.ones(1, 3, 1, 4, 4), initial_state=torch.ones(1, 2, 4, 4)
    ),
    "mru_mixer: elements have shape (2, 3, 1, 16); expected (batch, seqlen, 1, 6)": lambda: mixer((2, 3, 1, 16)),
    "mru_mixer: elements have shape (2, 3, 6); expected (batch, seqlen, 1, 6)": lambda: mixer((2, 3, 6)),
    "mru_mixer: elements have shape (2, 3, 1, 6); expected (batch, seqlen, 1, 4, 3)": lambda: mixer(
        w_up=torch.ones(1, 3, 4)
    ),
    "mru_mixer: w_up has shape (1, 4); expected (1, d_chunk, 4)": lambda: mixer(w_up=torch.ones(1, 4)),
    "mru_mixer: w_down has shape (1, 5, 4); expected (nheads, o, d_c), o one of 4, 8, 16, 32": lambda: mixer(
        (2, 3, 1, 10), (1, 5, 4)
    ),
    "mru_mixer: construction is 'orthogonal'; use 'affine' or 'identity_plus' or 'ldu'": lambda: mixer(
        construction="orthogonal"
    ),
    "mru_mixer: initial_state has dtype torch.float16; states are torch.float32": lambda: mixer(
        initial_state=torch.ones(2, 1, 4, 4).half()
    ),
    "mru_mixer: cu_seqlens needs batch 1, got 2": lambda: mixer(cu_seqlens=packed([3])),
    "mru_mixer: initial_state is on meta": lambda: mixer(initial_state=torch.ones(2, 1, 4, 4, device="meta")),
    "mru_mixer: cu_seqlens is a list; give an int32 tensor": lambda: mixer((1, 3, 1, 6), cu_seqlens=[0, 3]),
    "chunk_size is 2.5; use None or a positive whole number": lambda: matrix_product_scan(
        torch.ones(1, 3, 1, 4, 4), chunk_size=2.5
    ),
    "mru_step: state is None": lambda: mru_step(torch.ones(1, 2, 6), None),
    "mru_step: w_down has shape (3, 4, 4); expected (2, 4, d_c)": lambda: mru_step(
        torch.ones(1, 2, 6), torch.ones(1, 2, 4, 4), torch.ones(3, 4, 4)
    ),
    "mru_step: backend is 'cuda'": lambda: mru_step(torch.ones(1, 2, 6), torch.ones(1, 2, 4, 4), backend="cuda"),
    "mru_mixer: w_down is on meta": lambda: mru_mixer(torch.ones(2, 3, 1, 6), torch.ones(1, 4, 4, device="meta")),
    "mru_step: state has shape (1, 2, 3, 3); expected (batch, nheads, o, o), o one of": lambda: mru_step(
        torch.ones(1, 2, 3), torch.ones(1, 2, 3, 3)
    ),
    "mru_step: elements have shape (1, 2, 7); expected (1, 2, 6)": lambda: mru_step(
        torch.ones(1, 2, 7), torch.ones(1, 2, 4, 4)
    ),
    "mru_step: state has dtype torch.bfloat16; states are torch.float32": lambda: mru_step(
        torch.ones(1, 2, 6), torch.ones(1, 2, 4, 4).bfloat16()
    ),
    "choose one of auto": lambda: matrix_product_scan(torch.ones(1, 3, 1, 4, 4), backend="cuda"),
    "odd number of taps": lambda: short_conv(torch.ones(1, 3, 4), torch.ones(4, 6)),
    "give 2 to 9": lambda: short_conv(torch.ones(1, 3, 4), torch.ones(4, 11)),
    "activation is": lambda: short_conv(torch.ones(1, 3, 4), torch.ones(4, 3), activation="gelu"),
    "divisor of the width 4": lambda: gated_norm(torch.ones(3, 4), torch.ones(4), torch.ones(3, 4), group_size=3),
}


def test_bad_arguments_are_one_line_errors():
    assert_refused(BAD)


def test_values_are_looked_at_on_request(monkeypatch):
    """MATMIX_CHECK_VALUES=1 names the input that holds the first NaN; -inf is a decay like others."""
    infinite = torch.full((2, 3, 4), -torch.inf)
    assert causal(log_decay=infinite).isfinite().all()
    assert causal(input_scale=NAN).isnan().any()
    assert causal(log_decay=NAN).isnan().any()
    monkeypatch.setenv("MATMIX_CHECK_VALUES", "1")
    assert causal(log_decay=infinite).isfinite().all()
    with pytest.raises(ValueError, match="semiseparable_scan: input_scale holds NaN or infinity at 24 of 24 places"):
        causal(input_scale=NAN)
    with pytest.raises(ValueError, match="initial_state_forward holds NaN or infinity at 160 of 160 places"):
        bidirectional(initial_state_forward=STATE / 0)
    with pytest.raises(ValueError, match="matrix_product_scan: x holds NaN or infinity at 32 of 32 places"):
        matrix_product_scan(torch.full((1, 2, 1, 4, 4), torch.nan))
    with pytest.raises(ValueError, match="mru_mixer: elements holds NaN or infinity at 12 of 12 places"):
        mru_mixer(torch.full((1, 2, 1, 6), torch.nan), torch.ones(1, 4, 4))
    with pytest.raises(ValueError, match="mru_step: state holds NaN or infinity at 16 of 16 places"):
        mru_step(torch.ones(1, 1, 6), torch.full((1, 1, 4, 4), torch.inf))


def test_decays_above_the_bound_never_overflow_where_nobody_looks():
    """Traced by torch.compile, or under torch.vmap, the values are not known: they are taken as the bound."""
    v, q, k, high = torch.randn(1, 300, 2, 4), *torch.randn(2, 1, 300, 1, 4).unbind(0), torch.full((2,), 5.0)
    compiled = torch.compile(semiseparable_scan, fullgraph=True, backend="aot_eager")
    bound = semiseparable_scan(v, q, k, torch.full((2,), 0.01))
    assert rmse_ratio(compiled(v, q, k, high), bound) < 1e-5
    each = torch.func.vmap(semiseparable_scan, (None, None, None, 0))(v, q, k, high.expand(3, 2))
    assert rmse_ratio(each, bound.expand(3, *bound.shape)) < 1e-5


def test_vmap_over_boundaries_of_documents():
    v, q = torch.randn(1, 6, 2, 4), torch.randn(1, 6, 1, 3)
    bounds = torch.stack((packed([2, 4]), packed([5, 1])))
    each = torch.func.vmap(lambda cu_seqlens: semiseparable_scan(v, q, q, None, cu_seqlens=cu_seqlens))(bounds)
    for y, cu_seqlens in zip(each, bounds, strict=True):
        assert torch.equal(y, semiseparable_scan(v, q, q, None, cu_seqlens=cu_seqlens))

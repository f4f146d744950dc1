"""Triton forms of the short convolution and the gated norm against their definitions.

Interpreted in float32 on the CPU; on a GPU the same tests also run in bfloat16. Every buffer that the kernels are
to fill starts out as NaN, so an element that is never written shows.
"""

from __future__ import annotations

import pytest
import torch
from compare import FLOAT32, assert_matches, packed, rmse_ratio, run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nightly import each_value_once, nightly
from torch._subclasses import FakeTensorMode
from torch.nn.functional import pad
from triton_on_cpu import PoisonedTorch

from matmix.kernels import gated_norm, short_conv
from matmix.kernels.functions import Output
from matmix.kernels.gated_norm import fused as fused_norm
from matmix.kernels.gated_norm.chunked import NormInputs
from matmix.kernels.gated_norm.definition import gated_norm_definition
from matmix.kernels.launching import record_launches
from matmix.kernels.short_conv import fused as fused_conv
from matmix.kernels.short_conv.chunked import ConvInputs
from matmix.kernels.short_conv.definition import short_conv_definition

TOLERANCES = {torch.float32: FLOAT32} | ({torch.bfloat16: 5e-3} if torch.cuda.is_available() else {})
DTYPES = list(TOLERANCES)
LENGTHS = [1, 2, 63, 64, 65, 127, 257]
DOCUMENTS = [[1, 5, 64, 3, 130], [0, 1, 5, 0, 0, 64, 3, 0], [1] * 9, [40]]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    for module in (fused_conv, fused_norm):
        monkeypatch.setattr(module, "torch", PoisonedTorch())


def strided(x):
    """The same numbers as a slice of wider rows, as a projection is split."""
    return pad(x, (16, 8))[..., 16:-8]


def time_innermost(x):
    """The same numbers with the last dimension no longer side by side."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


def on(device, op, layout=lambda x: x):
    """The op in Triton on `device`, between tensors that live on the CPU."""

    def call(*, cu_seqlens=None, **inputs):
        moved = {name: x.to(device) if torch.is_tensor(x) else x for name, x in inputs.items()}
        for name in {"x", "gate"} & set(moved):
            moved[name] = layout(moved[name])
        if op is short_conv:
            moved["cu_seqlens"] = None if cu_seqlens is None else cu_seqlens.to(device)
        return op(**moved, backend="triton").cpu()

    return call


def conv_inputs(seqlen, width, *, batch=2, d=5, bias=True):
    inputs = {"x": torch.randn(batch, seqlen, d), "weight": torch.randn(d, width)}
    return inputs | ({"bias": torch.randn(d)} if bias else {})


def norm_inputs(*shape):
    return {"x": torch.randn(shape), "weight": torch.randn(shape[-1]), "gate": torch.randn(shape)}


def check_conv(device, inputs, dtype=torch.float32, layout=lambda x: x, **options):
    op = on(device, short_conv, layout)
    assert_matches(op, short_conv_definition, inputs, dtype=dtype, tolerance=TOLERANCES[dtype], **options)


def check_norm(device, inputs, dtype=torch.float32, layout=lambda x: x, **options):
    op = on(device, gated_norm, layout)
    assert_matches(op, gated_norm_definition, inputs, dtype=dtype, tolerance=TOLERANCES[dtype], **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seqlen", [*LENGTHS, nightly(1000)])
def test_conv_of_any_length(interpreter, seqlen, dtype):
    batch = 1 if seqlen == 1000 else 2
    check_conv(interpreter, conv_inputs(seqlen, 7, batch=batch), dtype, activation="silu")
    check_conv(interpreter, conv_inputs(seqlen, 4, batch=batch, bias=False), dtype, causal=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "bias", "activation"),
    each_value_once(
        [*((width, True) for width in range(2, 10)), *((width, False) for width in (3, 5, 7, 9))],
        [False, True, True],
        ["silu", None],
    ),
)
def test_conv_of_any_width(interpreter, shape, bias, activation, dtype):
    width, causal = shape
    check_conv(interpreter, conv_inputs(21, width, bias=bias), dtype, causal=causal, activation=activation)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("lengths", "form"), each_value_once(DOCUMENTS, [(7, False, "silu"), (4, True, None), (9, True, "silu")])
)
def test_conv_of_packed_documents(interpreter, lengths, form, dtype):
    width, causal, activation = form
    inputs = conv_inputs(sum(lengths), width, batch=1)
    check_conv(interpreter, inputs, dtype, causal=causal, activation=activation, cu_seqlens=packed(lengths))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("config", "layout"), each_value_once(fused_conv.configurations(), [strided, time_innermost]))
def test_every_conv_configuration(interpreter, config, layout, dtype):
    with fused_conv.force_configuration(config):
        inputs = conv_inputs(70, 7, d=config.channels + 12)
        check_conv(interpreter, inputs, dtype, layout, activation="silu")
        inputs = conv_inputs(75, 4, batch=1, d=config.channels - 5, bias=False)
        check_conv(interpreter, inputs, dtype, layout, causal=True, cu_seqlens=packed([0, 33, 2, 0, 40]))


@pytest.mark.slow
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_changing_one_document_leaves_the_others_alone(interpreter, activation):
    """Bit for bit, output and gradient of x, even where the changed document holds NaN."""
    lengths, changed = [10, 20, 0, 1, 35], slice(10, 30)
    others = [t for t in range(sum(lengths)) if not changed.start <= t < changed.stop]
    inputs = conv_inputs(sum(lengths), 7, batch=1)
    options = {"activation": activation, "cu_seqlens": packed(lengths)}
    before = run(on(interpreter, short_conv), inputs, torch.float32, **options)
    for value in (2.5, torch.nan, torch.inf):
        x = inputs["x"].clone()
        x[:, changed] = value
        after = run(on(interpreter, short_conv), inputs | {"x": x}, torch.float32, **options)
        for name in ("output 0", "d x"):
            assert torch.equal(before[name][:, others], after[name][:, others])
        assert not torch.equal(before["output 0"][:, changed], after["output 0"][:, changed])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("seqlen", "widths"), each_value_once(LENGTHS, [(12, None), (12, 4), (100, 25), (6, 2)]))
def test_norm_of_any_length_and_width(interpreter, seqlen, widths, dtype):
    d, group_size = widths
    check_norm(interpreter, norm_inputs(1, seqlen, d), dtype, group_size=group_size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [513, 1536, 2049, 5000, 16384])
def test_norm_of_wide_groups(interpreter, d, dtype):
    """Each configuration that the rule picks, the last of which cuts groups into tiles."""
    check_norm(interpreter, norm_inputs(3, d), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("config", "layout"), each_value_once(fused_norm.configurations(), [strided, time_innermost]))
def test_every_norm_configuration(interpreter, config, layout, dtype):
    with fused_norm.force_configuration(config):
        check_norm(interpreter, norm_inputs(2, 35, 96), dtype, layout, group_size=24)
        check_norm(interpreter, norm_inputs(3, 2 * config.columns + 6), dtype, layout, group_size=config.columns + 3)
        check_norm(interpreter, norm_inputs(3, config.columns), dtype, layout)


def test_norm_without_eps_ignores_what_is_not_there(interpreter):
    check_norm(interpreter, norm_inputs(5, 12), eps=0.0)
    check_norm(interpreter, norm_inputs(5, 6), eps=0.0, group_size=3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_twice(interpreter, dtype):
    for op, inputs, options in (
        (short_conv, conv_inputs(203, 7, batch=1), {"activation": "silu", "cu_seqlens": packed([1, 5, 64, 3, 130])}),
        (gated_norm, norm_inputs(2, 300, 12), {"group_size": 4}),
    ):
        first, second = (run(on(interpreter, op), inputs, dtype, **options) for _ in range(2))
        assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_and_expanded_cotangents(interpreter, dtype):
    x, weight = (t.to(interpreter, dtype) for t in conv_inputs(40, 3, bias=False).values())
    y, scale, gate = (t.to(interpreter, dtype) for t in norm_inputs(2, 40, 5).values())
    whole = torch.randn(2, 40, 9, device=interpreter, dtype=dtype)
    for dy in (whole[..., 2:7], whole.transpose(1, 2)[:, :5].transpose(1, 2), whole[..., :1].expand(-1, -1, 5)):
        for activation in (None, "silu"):
            given = ConvInputs(x, weight, None, False, activation, None)
            got, wanted = (fused_conv.backward(given, None, Output(t))[:2] for t in (dy, dy.contiguous()))
            assert all(map(torch.equal, got, wanted))
        given = NormInputs(y, scale, gate, 1e-5, None)
        got, wanted = (fused_norm.backward(given, None, Output(t)) for t in (dy, dy.contiguous()))
        assert all(map(torch.equal, got, wanted))


def test_parameters_may_be_wider_than_activations(interpreter):
    """float16 activations with float32 parameters: gradients come in each input's dtype."""
    for op, definition, inputs in (
        (short_conv, short_conv_definition, conv_inputs(65, 7)),
        (gated_norm, gated_norm_definition, norm_inputs(2, 65, 12)),
    ):
        leaves = {
            name: (t.half() if name in ("x", "gate") else t).to(interpreter).requires_grad_()
            for name, t in inputs.items()
        }
        y = op(**leaves, backend="triton")
        grads = torch.autograd.grad(y.float().square().sum(), leaves.values())
        wanted = definition(**leaves)
        assert y.dtype == torch.float16
        assert rmse_ratio(y, wanted) < 1e-3
        exact = torch.autograd.grad(wanted.square().sum(), leaves.values())
        for leaf, grad, right in zip(leaves.values(), grads, exact, strict=True):
            assert grad.dtype == leaf.dtype
            assert rmse_ratio(grad, right) < 2e-3


def test_nothing_waits_for_the_device():
    """Host code looks at no value: fake tensors have none, and would raise."""
    with FakeTensorMode(), record_launches() as launches:
        x, weight, scale = torch.empty(1, 300, 40), torch.empty(40, 7), torch.empty(40)
        cu_seqlens = torch.empty(5, dtype=torch.int32)
        conv, norm = ConvInputs(x, weight, scale, True, "silu", cu_seqlens), NormInputs(x, scale, x, 1e-5, 8)
        for fused, given in ((fused_conv, conv), (fused_norm, norm)):
            fused.forward(given)
            fused.backward(given, None, Output(x))
    names = [launch.kernel.__name__ for launch in launches]
    assert [name for name in names if name != "fill_table"] == [
        "_convolve",
        "_conv_gradients",
        "_gated_norm",
        "_gradients",
    ]


def test_rules_reach_every_configuration_and_no_other():
    sizes = [(1, 1), (1, 2048), (16, 128), (8, 8192), (1, 1 << 20)]
    picked = {fused_conv.choose_config(*size, d) for size in sizes for d in (1, 32, 33, 768, 1792)}
    assert picked == set(fused_conv.configurations())
    picked = {fused_norm.choose_config(group) for group in (1, 64, 512, 513, 2048, 2049, 4096, 4097, 100_000)}
    assert picked == set(fused_norm.configurations())


DRAW = settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # which sets one variable, the same for all examples
)


@pytest.mark.slow
@DRAW
@given(
    lengths=st.lists(st.integers(0, 24), min_size=1, max_size=3).filter(any),
    as_packed=st.booleans(),
    batch=st.integers(1, 2),
    width_causal=st.one_of(
        st.tuples(st.integers(2, 9), st.just(True)), st.tuples(st.sampled_from([3, 5, 7, 9]), st.just(False))
    ),
    d=st.integers(1, 40),
    bias=st.booleans(),
    activation=st.sampled_from([None, "silu"]),
    config=st.sampled_from(fused_conv.configurations()),
    dtype=st.sampled_from(DTYPES),
)
def test_conv_of_random_shapes(
    interpreter, lengths, as_packed, batch, width_causal, d, bias, activation, config, dtype
):
    width, causal = width_causal
    inputs = conv_inputs(sum(lengths), width, batch=1 if as_packed else batch, d=d, bias=bias)
    options = {"causal": causal, "activation": activation, "cu_seqlens": packed(lengths) if as_packed else None}
    with fused_conv.force_configuration(config):
        check_conv(interpreter, inputs, dtype, strided, **options)


@pytest.mark.slow
@DRAW
@given(
    rows=st.lists(st.integers(1, 6), min_size=1, max_size=2),
    group=st.integers(2, 40),  # a group of one has no gradient but rounding errors
    groups=st.integers(1, 3),
    tile=st.tuples(st.sampled_from([16, 64, 256]), st.sampled_from([16, 64]), st.sampled_from([1, 7, 1024])),
    dtype=st.sampled_from(DTYPES),
)
def test_norm_of_random_shapes(interpreter, rows, group, groups, tile, dtype):
    """With tiles far smaller than the real ones, so that groups are cut and programs walk."""
    config = fused_norm.NormConfig(*tile, num_warps=4, num_stages=2)
    with fused_norm.force_configuration(config):
        check_norm(interpreter, norm_inputs(*rows, group * groups), dtype, strided, group_size=group)

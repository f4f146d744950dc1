"""Ops on a single token, which carry a state on: definition, PyTorch and Triton, with and without memory of their own.

In Triton's interpreter without a GPU. Outputs that the kernels are to fill start out as NaN.
"""

from __future__ import annotations

import pytest
import torch
from compare import FLOAT32, assert_refused, rmse_ratio
from nightly import each_value_once
from triton_on_cpu import PoisonedTorch

from matmix.kernels import semiseparable_step, short_conv, short_conv_step
from matmix.kernels.launching import record_launches
from matmix.kernels.semiseparable.definition import semiseparable_definition, semiseparable_step_definition
from matmix.kernels.semiseparable.fused import step as fused_step
from matmix.kernels.short_conv import fused_step as fused_conv_step
from matmix.kernels.short_conv.definition import short_conv_definition, short_conv_step_definition

TOLERANCES = {torch.float32: FLOAT32, torch.bfloat16: 5e-3}
SIZES = [(2, 4, 2, 5, 6), (1, 6, 3, 130, 70), (3, 2, 1, 64, 64), (2, 3, 3, 300, 17)]
"""batch, heads, groups, d_state, headdim"""
FACTORS = {"none": (), "token": ("batch", "batch", "batch"), "head": ("heads", None, "heads")}
BACKENDS = ["torch", "triton"]


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    for module in (fused_step, fused_conv_step):
        monkeypatch.setattr(module, "torch", PoisonedTorch())


def scan_inputs(batch, heads, groups, d_state, headdim, kind="token"):
    """Arguments of `semiseparable_step` by name, of one `kind` of decays, scales and diagonals."""
    inputs = {
        "v": torch.randn(batch, heads, headdim),
        "q": torch.randn(batch, groups, d_state),
        "k": torch.randn(batch, groups, d_state),
        "log_decay": None,
        "state": torch.randn(batch, heads, d_state, headdim),
    }
    shapes = {"batch": (batch, heads), "heads": (heads,)}
    for name, shape in zip(("log_decay", "input_scale", "diagonal"), FACTORS[kind], strict=False):
        if shape:
            inputs[name] = torch.rand(shapes[shape]) - (1 if name == "log_decay" else 0)
    return inputs


def conv_inputs(batch, d, width, bias=True):
    inputs = {"x": torch.randn(batch, d), "state": torch.randn(batch, d, width - 1), "weight": torch.randn(d, width)}
    return inputs | ({"bias": torch.randn(d)} if bias else {})


def typed(inputs, dtype, device="cpu", names=("v", "q", "k", "x", "weight")):
    """Activations in `dtype`; the rest stays in float32."""
    return {n: x if x is None else x.to(device, dtype if n in names else x.dtype) for n, x in inputs.items()}


def check(op, definition, inputs, tolerance, **options):
    """A new state beside the old one, and one in its place: the same bits, near those of the definition."""
    wanted = definition(**{name: None if x is None else x.cpu() for name, x in inputs.items()}, **options)
    before = inputs["state"].clone()
    backends = {"torch": "cpu", "triton": inputs["state"].device}
    for backend, device in backends.items():
        given = {name: None if x is None else x.to(device) for name, x in inputs.items()}
        y, state = op(**given, **options, backend=backend)
        assert torch.equal(given["state"], before.to(device))
        assert (y.dtype, state.dtype) == (next(iter(given.values())).dtype, before.dtype)
        assert y.is_contiguous()
        errors = rmse_ratio(y.cpu(), wanted[0]), rmse_ratio(state.cpu(), wanted[1])
        assert errors[0] <= tolerance, (backend, errors)
        assert errors[1] <= FLOAT32 or state.dtype != torch.float32, (backend, errors)
        own = given | {"state": given["state"].clone()}
        y_again, state_again = op(**own, **options, in_place=True, backend=backend)
        assert state_again is own["state"]
        assert torch.equal(y, y_again)
        assert torch.equal(state, state_again)


@pytest.mark.parametrize(("sizes", "kind", "dtype"), each_value_once(SIZES, list(FACTORS), list(TOLERANCES)))
def test_a_step_of_the_scan(interpreter, sizes, kind, dtype):
    inputs = typed(scan_inputs(*sizes, kind), dtype, interpreter)
    check(semiseparable_step, semiseparable_step_definition, inputs, TOLERANCES[dtype])


@pytest.mark.parametrize("config", fused_step.configurations())
def test_every_configuration(interpreter, config):
    with fused_step.force_configuration(config):
        for sizes in SIZES:
            inputs = typed(scan_inputs(*sizes), torch.float32, interpreter)
            check(semiseparable_step, semiseparable_step_definition, inputs, FLOAT32)


def test_rules_reach_every_configuration_and_no_other():
    assert {fused_step.choose_config(heads) for heads in (1, 24, 511, 512, 10_000)} == set(fused_step.configurations())


@pytest.mark.parametrize("backend", BACKENDS)
def test_slices_and_transposed_states_are_taken_as_they_lie(interpreter, backend):
    """As a layer cuts them out of its projection; what is in place stays where it is."""
    batch, heads, d_state, headdim = 2, 3, 5, 6
    mixed = torch.randn(batch, 7 + heads * headdim + 2 * d_state, device=interpreter)
    _, v, q, k = mixed.split([7, heads * headdim, d_state, d_state], -1)
    v, q, k = v.unflatten(-1, (heads, headdim)), q.unsqueeze(1), k.unsqueeze(1)
    decay = -torch.rand(batch, 2 * heads, device=interpreter)[:, ::2]
    state = torch.randn(batch, heads, headdim, d_state, device=interpreter).mT
    wanted = semiseparable_step_definition(v, q, k, decay, state)
    y, new = semiseparable_step(v, q, k, decay, state, in_place=True, backend=backend)
    assert new is state
    assert max(rmse_ratio(y, wanted[0]), rmse_ratio(new, wanted[1])) < FLOAT32
    x, window = mixed[:, 3:9], torch.randn(batch, 3, 6, device=interpreter).mT
    weight = torch.randn(4, 6, device=interpreter).mT
    wanted = short_conv_step_definition(x, window, weight)
    y, new = short_conv_step(x, window, weight, in_place=True, backend=backend)
    assert new is window
    assert max(rmse_ratio(y, wanted[0]), rmse_ratio(new, wanted[1])) < FLOAT32


@pytest.mark.parametrize("backend", BACKENDS)
def test_steps_are_the_scan(interpreter, backend):
    """From state to state, with resets."""
    length, inputs = 9, {}
    for name, x in scan_inputs(2, 4, 2, 5, 6).items():
        inputs[name] = x if name == "state" else torch.randn(2, length, *x.shape[1:])
    inputs["log_decay"] = -inputs["log_decay"].abs()
    inputs["log_decay"][:, 5] = -torch.inf
    state = inputs.pop("state")
    y, final = semiseparable_definition(**inputs, initial_state=state, return_final_state=True)
    inputs, state, outputs = {n: x.to(interpreter) for n, x in inputs.items()}, state.to(interpreter), []
    for t in range(length):
        y_t, state = semiseparable_step(**{n: x[:, t] for n, x in inputs.items()}, state=state, backend=backend)
        outputs.append(y_t)
    assert rmse_ratio(torch.stack(outputs, 1).cpu(), y) < FLOAT32
    assert rmse_ratio(state.cpu(), final) < FLOAT32


@pytest.mark.parametrize(("sizes", "dtype"), each_value_once([(2, 5, 4), (1, 130, 2), (3, 129, 9)], list(TOLERANCES)))
def test_a_step_of_the_convolution(interpreter, sizes, dtype):
    batch, d, width = sizes
    for bias, activation in ((False, None), (True, "silu")):
        inputs = typed(conv_inputs(batch, d, width, bias), dtype, interpreter)
        check(short_conv_step, short_conv_step_definition, inputs, TOLERANCES[dtype], activation=activation)
    narrow = inputs | {"state": inputs["state"].to(dtype)}
    check(short_conv_step, short_conv_step_definition, narrow, TOLERANCES[dtype], activation="silu")


@pytest.mark.parametrize(("seqlen", "backend"), each_value_once([1, 11], BACKENDS))
def test_steps_are_the_convolution(interpreter, seqlen, backend):
    """From state to state."""
    weight, bias, first, x = torch.randn(5, 4), torch.randn(5), torch.randn(2, 5, 3), torch.randn(2, seqlen, 5)
    options = {"causal": True, "activation": "silu", "return_final_state": True}
    y, final = short_conv_definition(x, weight, bias, initial_state=first, **options)
    weights, state, outputs = [weight.to(interpreter), bias.to(interpreter)], first.to(interpreter), []
    for token in x.to(interpreter).unbind(1):
        y_t, state = short_conv_step(token, state, *weights, activation="silu", backend=backend)
        outputs.append(y_t)
    assert rmse_ratio(torch.stack(outputs, 1).cpu(), y) < FLOAT32
    assert rmse_ratio(state.cpu(), final) < FLOAT32


def test_float64_is_exact():
    inputs = {name: x.double() for name, x in scan_inputs(2, 4, 2, 5, 6).items()}
    for got, wanted in zip(semiseparable_step(**inputs), semiseparable_step_definition(**inputs), strict=True):
        assert got.dtype == torch.float64
        assert rmse_ratio(got, wanted) < 1e-14


def test_half_precision_states_are_kept_in_float32(interpreter):
    """A thousand small contributions that bfloat16 would lose beside the sum."""
    one = torch.ones(1, 1, 1, device=interpreter, dtype=torch.bfloat16)
    for backend in BACKENDS:
        state = torch.full((1, 1, 1, 1), 512.0, device=interpreter)
        for _ in range(20):
            _, state = semiseparable_step(one, one, one, None, state, backend=backend)
        assert state.item() == 532.0


def test_a_step_is_one_launch(interpreter):
    with record_launches(run=True) as launches:
        semiseparable_step(**typed(scan_inputs(2, 4, 2, 5, 6), torch.float32, interpreter), backend="triton")
        short_conv_step(**typed(conv_inputs(2, 300, 4), torch.float32, interpreter), backend="triton")
    assert [x.kernel.__name__ for x in launches] == ["advance_state", "advance_window"]


def test_gradients_are_those_of_the_definition():
    for op, definition, inputs in (
        (semiseparable_step, semiseparable_step_definition, scan_inputs(2, 4, 2, 5, 6)),
        (semiseparable_step, semiseparable_step_definition, scan_inputs(2, 4, 2, 5, 6, "none")),
        (short_conv_step, short_conv_step_definition, conv_inputs(2, 5, 4)),
    ):
        results = []
        for call in (op, definition):
            leaves = {name: x if x is None else x.double().requires_grad_() for name, x in inputs.items()}
            y, state = call(**leaves)
            loss = (y * y.detach().cos()).sum() + (state * state.detach().cos()).sum()
            results.append(torch.autograd.grad(loss, [x for x in leaves.values() if x is not None]))
        for got, wanted in zip(*results, strict=True):
            assert rmse_ratio(got, wanted) < 1e-12


OPS = {
    "scan": (semiseparable_step, lambda: scan_inputs(2, 4, 2, 5, 6)),
    "conv": (short_conv_step, lambda: conv_inputs(2, 5, 4)),
}


@pytest.mark.parametrize("name", OPS)
def test_pytorch_checks_the_registered_ops(name):
    op, make = OPS[name]
    calls = []

    class Record(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "matmix":
                calls.append((func, args))
            return func(*args, **(kwargs or {}))

    with Record():
        for in_place in (False, True):
            op(**make(), in_place=in_place)
    assert len(calls) == 2
    for func, args in calls:
        torch.library.opcheck(func, args, test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_static"))


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("in_place", [False, True])
def test_steps_compile_without_graph_breaks(name, in_place):
    op, make = OPS[name]
    inputs = make()
    copy = {n: x.clone() for n, x in inputs.items()}
    torch.compiler.reset()
    compiled = torch.compile(lambda **given: op(**given, in_place=in_place), fullgraph=True, backend="aot_eager")
    for got, wanted in zip(compiled(**copy), op(**inputs, in_place=in_place), strict=True):
        assert torch.equal(got, wanted)
    assert torch.equal(copy["state"], inputs["state"])


def test_autocast_does_not_reach_into_steps():
    for op, make in OPS.values():
        inputs = make()
        plain = op(**inputs)
        with torch.autocast("cpu", torch.bfloat16):
            cast = op(**inputs)
        assert all(map(torch.equal, plain, cast))


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("options", [{"in_place": True}, {"backend": "triton"}])
def test_gradients_are_refused_where_there_are_none(interpreter, name, options):
    op, make = OPS[name]
    inputs = {n: x.to(interpreter) for n, x in make().items()}
    inputs["weight" if "weight" in inputs else "v"].requires_grad_()
    with pytest.raises(ValueError, match=r"requires a gradient, and .* has none; call it under torch.no_grad\(\)$"):
        op(**inputs, **options)
    with torch.no_grad():
        op(**inputs, **options)


def scan_step(**changed):
    return semiseparable_step(**scan_inputs(2, 4, 2, 5, 6) | changed)


def conv_step(**changed):
    return short_conv_step(**conv_inputs(2, 5, 4) | changed)


def conv(**options):
    return short_conv(torch.ones(1, 3, 5), torch.ones(5, 3), **options)


BAD = {
    "semiseparable_step: state is None": lambda: scan_step(state=None),
    "semiseparable_step: v has shape (2, 4, 1, 6); expected (batch, nheads, headdim)": lambda: scan_step(
        v=torch.ones(2, 4, 1, 6)
    ),
    "semiseparable_step: q has shape (2, 5); expected (batch, ngroups, d_state)": lambda: scan_step(q=torch.ones(2, 5)),
    "semiseparable_step: 4 heads cannot share 3 groups": lambda: scan_step(q=torch.ones(2, 3, 5)),
    "semiseparable_step: k has shape (2, 1, 5); expected (2, 2, 5)": lambda: scan_step(k=torch.ones(2, 1, 5)),
    "semiseparable_step: k has dtype torch.float16, v torch.float32": lambda: scan_step(k=torch.ones(2, 2, 5).half()),
    "semiseparable_step: log_decay has shape (2, 1); expected (2, 4) or (4,)": lambda: scan_step(
        log_decay=torch.zeros(2, 1)
    ),
    "semiseparable_step: log_decay reaches 1; it must be at most 0.01": lambda: scan_step(log_decay=torch.ones(4)),
    "semiseparable_step: state has shape (2, 4, 6, 5); expected (2, 4, 5, 6)": lambda: scan_step(
        state=torch.ones(2, 4, 6, 5)
    ),
    "semiseparable_step: state has dtype torch.bfloat16; for v of torch.float32 it is torch.float32": lambda: scan_step(
        state=torch.ones(2, 4, 5, 6).bfloat16()
    ),
    "semiseparable_step: state is on meta": lambda: scan_step(state=torch.ones(2, 4, 5, 6, device="meta")),
    "semiseparable_step: state is expanded": lambda: scan_step(
        state=torch.ones(5, 6).expand(2, 4, 5, 6), in_place=True
    ),
    "semiseparable_step: backend is 'cuda'": lambda: scan_step(backend="cuda"),
    "short_conv_step: state is None": lambda: conv_step(state=None),
    "short_conv_step: x has shape (2, 1, 5); expected (batch, d)": lambda: conv_step(x=torch.ones(2, 1, 5)),
    "short_conv_step: state has shape (2, 3, 5); expected (2, 5, 3)": lambda: conv_step(state=torch.ones(2, 3, 5)),
    "short_conv_step: weight has 10 taps": lambda: conv_step(weight=torch.ones(5, 10)),
    "short_conv_step: bias has shape (4,); expected (5,)": lambda: conv_step(bias=torch.ones(4)),
    "short_conv_step: activation is 'gelu'": lambda: conv_step(activation="gelu"),
    "short_conv_step: state is expanded": lambda: conv_step(state=torch.ones(3).expand(2, 5, 3), in_place=True),
    "short_conv: initial_state needs causal=True": lambda: conv(initial_state=torch.ones(1, 5, 2)),
    "short_conv: return_final_state needs causal=True": lambda: conv(return_final_state=True),
    "short_conv: initial_state has shape (1, 2, 5); expected (1, 5, 2)": lambda: conv(
        causal=True, initial_state=torch.ones(1, 2, 5)
    ),
    "short_conv: return_final_state and cu_seqlens are both given": lambda: conv(
        causal=True, return_final_state=True, cu_seqlens=torch.tensor([0, 3], dtype=torch.int32)
    ),
}


def test_bad_arguments_are_one_line_errors():
    assert_refused(BAD)


def test_values_are_looked_at_on_request(monkeypatch):
    monkeypatch.setenv("MATMIX_CHECK_VALUES", "1")
    with pytest.raises(ValueError, match="semiseparable_step: state holds NaN or infinity at 240 of 240 places"):
        scan_step(state=torch.full((2, 4, 5, 6), torch.nan))
    with pytest.raises(ValueError, match="short_conv_step: state holds NaN or infinity at 30 of 30 places"):
        conv_step(state=torch.full((2, 5, 3), torch.nan))


def test_flops_are_counted():
    from torch.utils.flop_counter import FlopCounterMode

    for in_place in (False, True):
        with FlopCounterMode(display=False) as counter:
            scan_step(in_place=in_place)
        assert counter.get_total_flops() == 2 * 2 * 2 * 4 * 5 * 6
        with FlopCounterMode(display=False) as counter:
            conv_step(in_place=in_place)
        assert counter.get_total_flops() == 2 * 2 * 5 * 4


@pytest.mark.parametrize(
    ("op", "definition", "inputs"),
    [
        (semiseparable_step, semiseparable_step_definition, scan_inputs(*SIZES[0])),
        (short_conv_step, short_conv_step_definition, conv_inputs(2, 6, 4)),
    ],
)
def test_transforms_follow_a_step(op, definition, inputs):
    """grad through vmap, and forward mode, as through the definition; in place there is no rule, which is said."""
    names, values = tuple(inputs), tuple(inputs.values())

    def outputs(function, **options):
        return lambda *tensors: function(**dict(zip(names, tensors, strict=True)), **options)

    def loss(function):
        each = torch.func.vmap(outputs(function))
        return lambda *tensors: sum(out.square().sum() for out in each(*(t.expand(2, *t.shape) for t in tensors)))

    numbers = tuple(range(len(names)))
    found, wanted = (torch.func.grad(loss(f), numbers)(*values) for f in (op, definition))
    for a, b in zip(found, wanted, strict=True):
        assert rmse_ratio(a, b) < FLOAT32
    found, wanted = (torch.func.jvp(outputs(f), values, values)[1] for f in (op, definition))
    for a, b in zip(found, wanted, strict=True):
        assert rmse_ratio(a, b) < FLOAT32
    with pytest.raises(ValueError, match="in_place=True has no rule for torch"):
        torch.func.vmap(outputs(op, in_place=True))(*(t.expand(2, *t.shape).clone() for t in values))

"""Nothing that the Triton forms do on the host needs a value from the device, so both passes can be captured in a
CUDA graph."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from compare import packed
from every_mixer import language_model_of_all
from layers import layer_inputs
from mru_inputs import FUSED, mixer_inputs
from nightly import each_value_once
from test_quasiseparable import FORMS, make_for
from test_semiseparable import make
from torch._subclasses import FakeTensorMode

from matmix.kernels import (
    gated_norm,
    lion_mixer,
    matrix_memory,
    matrix_product_scan,
    mru_mixer,
    mru_step,
    quasiseparable_scan,
    s6_scan,
    scan_layer,
    semiseparable_scan,
    semiseparable_step,
    short_conv,
    short_conv_step,
)
from matmix.kernels.backend import TRITON_FORMS
from matmix.kernels.functions import Output
from matmix.kernels.gated_norm import fused as fused_norm
from matmix.kernels.gated_norm.chunked import NormInputs
from matmix.kernels.launching import record_launches
from matmix.kernels.lion import fused as fused_lion
from matmix.kernels.lion.chunked import LionInputs
from matmix.kernels.scan_layer import fused as fused_layer
from matmix.kernels.scan_layer.chunked import LayerInputs
from matmix.kernels.semiseparable.chunked.autograd import (
    TwoSidedInputs,
    TwoSidedOutputs,
    move_gates,
    two_sided_backward,
    two_sided_forward,
)
from matmix.kernels.semiseparable.chunked.forward import ScanStepInputs
from matmix.kernels.semiseparable.form import ScanCall, ScanForm, ScanSide
from matmix.kernels.semiseparable.fused import launch as fused
from matmix.kernels.semiseparable.fused import step as fused_step
from matmix.kernels.short_conv import fused as fused_conv
from matmix.kernels.short_conv import fused_step as fused_conv_step
from matmix.kernels.short_conv.chunked import ConvInputs, ConvStepInputs, StateConvInputs, StateConvOutputs
from matmix.model import build_model
from matmix.model.decoding import StaticStep, decode, has_static_step
from matmix.model.initialization import initialize
from matmix.model.interop.export.generation_state import map_state
from matmix.model.mixers import MIXERS

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LENGTHS = [5, 0, 130, 1]


@pytest.mark.parametrize(
    ("dtype", "as_packed", "seqlen"), each_value_once(DTYPES, [False, True, True], [20, 136, 5000])
)
def test_the_causal_scan_looks_at_no_value(dtype, as_packed, seqlen):
    """Fake tensors have none, and would raise; 3,000 tokens are long enough for spans."""
    documents = 4 if as_packed else 1
    inputs = make(seqlen, batch=1, heads=2, groups=1, states=documents)
    with FakeTensorMode() as mode, record_launches() as launches:
        inputs = {name: mode.from_tensor(x) for name, x in inputs.items()}
        v, q, k = (inputs[name].to(dtype) for name in "vqk")
        bounds = torch.empty(5, dtype=torch.int32) if as_packed else None
        side = ScanSide(q, k, inputs["log_decay"], inputs["input_scale"], inputs["initial_state"], False)
        call = ScanCall(v, (side,), inputs["diagonal"], ScanForm(), bounds)
        out = fused.forward(call, True)
        dv, (found,), ddiagonal = fused.backward(out.y, None, out.finals, call)
        gradients = {"v": dv, "q": found.q, "k": found.k, "diagonal": ddiagonal} | found._asdict()
        for name, x in inputs.items():
            assert gradients[name].shape == x.shape
    names = {launch.kernel.__name__ for launch in launches}
    assert {"mix", "state_pass", "pair_gradients", "vector_gradients"} <= names
    assert ("combine_spans" in names) == (seqlen == 5000)


@pytest.mark.parametrize(("form", "dtype", "as_packed"), each_value_once(list(FORMS), DTYPES, [True, False]))
def test_the_bidirectional_scan_looks_at_no_value(form, dtype, as_packed):
    """With everything that the op does around the kernels."""
    documents = 4 if as_packed else 1
    inputs = make_for(form, 136, batch=1, heads=2, groups=1, states=documents)
    options = dict(FORMS[form])
    offset = options.pop("gate_offset", 0)
    choices = ScanForm(**({"shift": True} | options | {"normalize": bool(options.get("normalize"))}))
    with FakeTensorMode() as mode, record_launches() as launches:
        inputs = {n: mode.from_tensor(x).to(dtype if n[0] in "vqk" else torch.float32) for n, x in inputs.items()}
        bounds = torch.empty(5, dtype=torch.int32) if as_packed else None
        gates = move_gates(inputs.pop("log_decay_backward", None), offset, bounds)
        tensors = dict.fromkeys(TwoSidedInputs._fields) | inputs | {"log_decay_backward": gates, "cu_seqlens": bounds}
        given = TwoSidedInputs(**tensors | choices._asdict())
        outputs = two_sided_forward(fused, given)
        cotangents = TwoSidedOutputs(torch.empty_like(outputs.y), None, None)
        gradients = two_sided_backward(fused, given, outputs, cotangents)
        for x, gradient in zip(given, gradients, strict=False):
            assert (x is None) == (gradient is None)
            assert x is None or (x.shape, x.dtype) == (gradient.shape, gradient.dtype)
    assert len(launches) >= 4


def test_the_small_ops_look_at_no_value():
    with FakeTensorMode(), record_launches() as launches:
        x, weight, scale = torch.empty(1, 300, 40), torch.empty(40, 7), torch.empty(40)
        cu_seqlens = torch.empty(5, dtype=torch.int32)
        for activation, bias in itertools.product((None, "silu"), (None, scale)):
            given = ConvInputs(x, weight, bias, True, activation, cu_seqlens)
            fused_conv.forward(given)
            fused_conv.backward(given, None, Output(x))
            given = StateConvInputs(x, weight, bias, torch.empty(1, 40, 6), activation)
            outputs = StateConvOutputs(*fused_conv.forward_from_state(given))
            dx, *_, dstate = fused_conv.backward_from_state(given, outputs, outputs)
            assert [y.shape for y in (*outputs, dx, dstate)] == [x.shape, given.state.shape] * 2
        given = NormInputs(x, scale, x, 1e-5, 8)
        fused_norm.forward(given)
        fused_norm.backward(given, None, Output(x))
    assert len(launches) >= 4 * 4 + 2


@pytest.mark.parametrize(("directions", "as_packed", "seqlen"), each_value_once([1, 2], [False, True], [20, 5000, 136]))
def test_the_layers_look_at_no_value(directions, as_packed, seqlen):
    """All that the layers around a scan launch, and what PyTorch does between."""
    tensors = layer_inputs(seqlen, batch=1, directions=directions, states=True)
    with FakeTensorMode() as mode, record_launches() as launches:
        tensors = {name: mode.from_tensor(x) for name, x in tensors.items()}
        tensors |= {name: tensors[name].bfloat16() for name in ("projected", "diagonal_weight")}
        bounds = torch.empty(5, dtype=torch.int32) if as_packed else None
        options = dict.fromkeys(LayerInputs._fields) | tensors | {"cu_seqlens": bounds, "eps": 1e-5, "norm_first": True}
        sizes = {"nheads": 2, "ngroups": 1, "d_state": 6, "directions": directions, "shift": True}
        given = LayerInputs(**options | sizes | {"low": 0.1, "high": 2.0, "keep": True})
        y, mixed, product = fused_layer.forward_scan(given)
        given = given._replace(scanned=y)
        out = fused_layer.forward(given)
        for kept in ((mixed, product), (None, None)):
            given = given._replace(mixed=kept[0], product=kept[1])
            gradients = fused_layer.backward(given, None, Output(out))
            for name, x in tensors.items():
                gradient = getattr(gradients, name)
                assert (gradient.shape, gradient.dtype) == (x.shape, x.dtype)
        qkv = torch.empty(1, seqlen, 72, dtype=torch.bfloat16)
        for gates in (None, torch.empty(2), torch.empty(1, seqlen, 2)):
            given = LionInputs(qkv, gates, 2, "silu_norm", 1, 1, 1e-6, bounds)
            outputs = fused_lion.forward(given)
            for dsums in (None, outputs.row_sum):
                dqkv, dgates, _ = fused_lion.backward(given, outputs, outputs._replace(row_sum=dsums))
                assert (dqkv.shape, gates is None) == (qkv.shape, dgates is None)
    assert launches


@pytest.mark.parametrize(("dtype", "in_place"), each_value_once(DTYPES, [False, True]))
def test_the_steps_look_at_no_value(dtype, in_place):
    """One launch each, and what is in place stays there."""
    with FakeTensorMode(), record_launches() as launches:
        v, q, state = (torch.empty(shape, dtype=dtype) for shape in ((3, 4, 20), (3, 2, 10), (3, 40, 3)))
        memory, factors = torch.empty(3, 4, 10, 20), torch.empty(3, 4)
        for given in (factors, factors[0], None):
            scale = factors if given is factors else None
            y, new = fused_step.forward(ScanStepInputs(v, q, q, given, memory, scale, given), in_place)
            assert (y.shape, y.dtype, new.shape, new is memory) == (v.shape, dtype, memory.shape, in_place)
        x, weight, bias = (torch.empty(shape, dtype=dtype) for shape in ((3, 40), (40, 4), (40,)))
        for given, activation in ((bias, "silu"), (None, None)):
            y, new = fused_conv_step.forward(ConvStepInputs(x, state, weight, given, activation), in_place)
            assert (y.shape, y.dtype, new.shape, new is state) == (x.shape, dtype, state.shape, in_place)
    assert [x.kernel.__name__ for x in launches] == ["advance_state"] * 3 + ["advance_window"] * 2


def calls():
    """Every op that has kernels, with what it takes; all tensors get gradients."""
    bounds = packed(LENGTHS)
    seqlen, shape = sum(LENGTHS), {"batch": 1, "heads": 4, "groups": 2, "d_state": 16, "headdim": 32}
    yield "semiseparable_scan", semiseparable_scan, make(seqlen, **shape, states=4), {"cu_seqlens": bounds}
    yield "semiseparable_scan", semiseparable_scan, make(5000, **shape), {"return_final_state": True}
    for form in FORMS:
        inputs = make_for(form, seqlen, **shape, states=4)
        yield "quasiseparable_scan", quasiseparable_scan, inputs, {"cu_seqlens": bounds, **FORMS[form]}
    conv = {"x": torch.randn(1, seqlen, 64), "weight": torch.randn(64, 7), "bias": torch.randn(64)}
    yield "short_conv", short_conv, conv, {"activation": "silu", "cu_seqlens": bounds}
    conv = {"x": torch.randn(2, 50, 64), "weight": torch.randn(64, 4), "initial_state": torch.randn(2, 64, 3)}
    yield "short_conv_from_state", short_conv, conv, {"causal": True, "return_final_state": True}
    norm = {"x": torch.randn(2, 50, 64), "weight": torch.randn(64), "gate": torch.randn(2, 50, 64)}
    yield "gated_norm", gated_norm, norm, {"group_size": 32}
    s6 = {"x": (1, seqlen, 40), "dt": (1, seqlen, 40), "b": (1, seqlen, 16), "c": (1, seqlen, 16), "rates": (40, 16)}
    s6 = {name: torch.randn(shape) for name, shape in s6.items()} | {"initial_state": torch.randn(4, 40, 16)}
    s6 |= {"dt": s6["dt"].abs(), "rates": -s6["rates"].abs()}
    yield "s6_scan", lambda backend, **given: s6_scan(**given), s6, {"cu_seqlens": bounds}
    memory = {"values": (1, seqlen, 4, 16), "elements": (1, seqlen, 4, 16), "keys": (1, seqlen, 4)}
    memory |= {"queries": (1, seqlen, 4), "rates": (4, 4), "initial_state": (4, 4, 16, 4)}
    memory = {name: torch.randn(shape) for name, shape in memory.items()}
    yield "matrix_memory", matrix_memory, memory, {"cu_seqlens": bounds}
    sizes = {"nheads": 2, "ngroups": 1, "d_state": 6}
    yield "scan_layer", scan_layer, layer_inputs(seqlen, batch=1, states=True), sizes | {"cu_seqlens": bounds}
    one = layer_inputs(700, batch=2, directions=1, diagonal="constant")
    one = {name: x for name, x in one.items() if x is not None}
    yield "scan_layer", scan_layer, one, sizes | {"directions": 1, "norm_first": False, "recompute": True}
    lion = {"qkv": torch.randn(1, seqlen, 96), "gates": torch.randn(1, seqlen, 2)}
    yield "lion_mixer", lion_mixer, lion, {"nheads": 2, "cu_seqlens": bounds}
    # Near the identity: products of many stay of order one.
    matrices = {"x": torch.eye(8) + 0.05 * torch.randn(1, seqlen, 4, 8, 8), "initial_state": torch.randn(4, 4, 8, 8)}
    yield "matrix_product_scan", matrix_product_scan, matrices, {"cu_seqlens": bounds, "return_final_state": True}
    for construction in FUSED:
        inputs = mixer_inputs(seqlen, construction, batch=1, heads=3, order=8, states=4)
        options = {"cu_seqlens": bounds, "return_final_state": True, "construction": construction}
        yield "mru_mixer", mru_mixer, inputs, options


def steps():
    """Every step of one token: what it takes, the state among it, and whether it can leave the new state there."""
    factors = {"log_decay": -torch.rand(2, 4), "input_scale": torch.rand(2, 4), "diagonal": torch.randn(4)}
    vectors = {"v": torch.randn(2, 4, 20), "q": torch.randn(2, 2, 10), "k": torch.randn(2, 2, 10)}
    yield "semiseparable_step", semiseparable_step, vectors | factors | {"state": torch.randn(2, 4, 10, 20)}, True
    conv = {"x": torch.randn(2, 40), "weight": torch.randn(40, 4), "bias": torch.randn(40)}
    yield "short_conv_step", short_conv_step, conv | {"state": torch.randn(2, 40, 3)}, True
    inputs = mixer_inputs(1, "cayley", batch=2, heads=3, order=8, states=2)
    inputs |= {"elements": inputs["elements"][:, 0], "state": inputs.pop("initial_state")}
    yield "mru_step", mru_step, inputs, False


def test_every_op_with_kernels_is_captured():
    assert {name for name, *_ in (*calls(), *steps())} >= set(TRITON_FORMS)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@torch.no_grad()
def test_replays_of_a_captured_step_carry_the_state_on():
    """In one place: each replay continues where the one before ended, as eager steps do, to the last bit."""
    for (_, op, inputs, in_place), dtype in itertools.product(steps(), DTYPES):
        check_replays_of_a_step(op, inputs, in_place, dtype)


def check_replays_of_a_step(op, inputs, in_place, dtype):
    narrow = {"v", "q", "k", "x", "elements"}
    held = {name: x.cuda().to(dtype if name in narrow else torch.float32) for name, x in inputs.items()}
    first = held["state"].clone()

    def step(given):
        if in_place:
            return op(**given, in_place=True, backend="triton")[0]
        y, state = op(**given, backend="triton")
        given["state"].copy_(state)
        return y

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step(held)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(held)
    held["state"].copy_(first)
    eager = {name: x.clone() for name, x in held.items()}
    for _ in range(3):
        for name in narrow & set(held):
            held[name].copy_(held[name].roll(1, -1))
            eager[name] = held[name].clone()
        graph.replay()
        assert torch.equal(captured, step(eager))
        assert torch.equal(held["state"], eager["state"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_replays_of_a_models_step_are_its_steps(dtype):
    """With a layer of each mixer that has such a step, to the last bit; also after rows were picked."""
    whole = language_model_of_all()
    layers = tuple(name for name in whole.layers if name in MIXERS and MIXERS[name].static_step)
    model = build_model(dataclasses.replace(whole, layers=layers, n_layers=len(layers)))
    initialize(model, seed=0)
    for parameter in model.parameters():
        parameter += 0.1 * torch.randn_like(parameter)
    model.cuda().to(dtype).eval()
    assert has_static_step(model)
    _, state = model.prefill(torch.randint(0, 29, (3, 5), device="cuda"))
    static, (token_ids, *others) = StaticStep(model, state, 3), torch.randint(0, 29, (6, 3), device="cuda")
    for following in others:
        logits, state = model.step(token_ids, state)
        assert torch.equal(static.step(token_ids), logits)
        token_ids = following
    static.pick([2, 1, 1])
    logits, _ = model.step(token_ids, map_state(lambda x: x[[2, 1, 1]], state))
    assert torch.equal(static.step(token_ids), logits)
    prompts = [[3, 1, 4], [1], [5, 9, 2, 6]]
    options = {"draw": lambda _, logits: int(logits.argmax()), "max_new_tokens": 8}
    assert list(decode(model, prompts, **options)) == list(decode(model, prompts, **options, static=False))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_captured_passes_equal_eager_ones():
    """Replayed on new numbers, outputs and gradients are those of a call, to the last bit."""
    for (_, op, inputs, options), dtype in itertools.product(calls(), DTYPES):
        check_captured_passes(op, inputs, options, dtype)


def check_captured_passes(op, inputs, options, dtype):
    options = {name: x.cuda() if torch.is_tensor(x) else x for name, x in options.items()}
    narrow = {"v", "x", "gate", "elements", "projected", *(name for name in inputs if name[0] in "qk")}
    first = {n: x.cuda().to(dtype if n in narrow else torch.float32) for n, x in inputs.items()}
    second = {name: x.roll(1, 1 if x.dim() > 2 else 0) for name, x in first.items()}
    held = {name: x.clone().requires_grad_() for name, x in first.items()}

    def passes(leaves):
        y = op(**leaves, **options, backend="triton")
        outputs = y if isinstance(y, tuple) else (y,)
        loss = sum(x.float().square().sum() for x in outputs)
        return *(x.detach() for x in outputs), *torch.autograd.grad(loss, list(leaves.values()))

    # Kernels are compiled and loaded before anything is captured, on a stream of its own as the documentation asks.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            passes(held)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = passes(held)
    for numbers in (first, second):
        with torch.no_grad():
            for name, x in held.items():
                x.copy_(numbers[name])
        graph.replay()
        eager = passes({name: x.clone().requires_grad_() for name, x in numbers.items()})
        assert all(torch.equal(x, y) for x, y in zip(captured, eager, strict=True))

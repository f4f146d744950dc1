"""Whether the kernels compute what they should: each op against its definition, and the project's own tests.

Every op runs in bfloat16, float16 and float32. Outputs and the gradients of all inputs are compared with the float64
definition of the same rounded inputs, long rows with the PyTorch form in float64. Then both passes are captured in a
CUDA graph, whose two replays have to equal a plain call to the last bit; without a GPU, a second call has to.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from matmix.benchmarks.gpu_session.record import KERNELS, LEAST_SECONDS, Piece, Record, Session
from matmix.benchmarks.measuring.timing import graph_of
from matmix.kernels import (
    gated_norm,
    lion_mixer,
    matrix_product_scan,
    mru_mixer,
    quasiseparable_scan,
    scan_layer,
    semiseparable_scan,
    short_conv,
)
from matmix.kernels.gated_norm.definition import gated_norm_definition
from matmix.kernels.lion.definition import lion_mixer_definition
from matmix.kernels.matrix_product.definition import matrix_product_definition
from matmix.kernels.mru.constructions import BOUNDED_CONSTRUCTIONS, element_columns, state_elements
from matmix.kernels.mru.definition import mru_mixer_definition
from matmix.kernels.mru.op import FUSED
from matmix.kernels.scan_layer.definition import scan_layer_definition
from matmix.kernels.semiseparable.definition import quasiseparable_definition, semiseparable_definition
from matmix.kernels.short_conv.definition import short_conv_definition

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
EXACT, ROUNDED = 5e-5, 5e-3
"""Largest error of an output (root mean square, over that of the wanted values) in float32 and in half precision. A
gradient in half precision may have twice as much, and twice again where the op is not linear in its values."""
TREE = KERNELS.resolve().parent
TESTS = ("tests/kernels",)
FEW_TESTS = ("tests/kernels/test_graph_capture.py::test_the_small_ops_look_at_no_value",)


class Check(NamedTuple):
    """One op on inputs of one shape."""

    name: str
    op: Callable[..., Any]
    definition: Callable[..., Any] | None
    """None: the op's own PyTorch form in float64."""
    inputs: Callable[[], dict[str, Tensor]]
    """Made anew from a fixed seed, float32, on the CPU."""
    narrow: tuple[str, ...]
    """Inputs that come in the dtype; the others stay float32."""
    options: dict[str, Any]
    linear: bool = True
    """In its values: neither normalised nor a product."""


def checks(toy: bool) -> Iterator[Check]:
    """All ops with every form that is chosen at compile time."""
    yield from _scan_checks(toy)
    yield from _small_checks(toy)
    yield from _layer_checks(toy)
    yield from _mru_checks(toy)


def _scan_checks(toy: bool) -> Iterator[Check]:
    seqlen, width, heads = (40, 16, 2) if toy else (300, 64, 4)
    lengths = [5, 0, seqlen - 6, 1]
    vectors = ("v", "q", "k", "q_forward", "k_forward", "q_backward", "k_backward")

    def two(name: str, *, definition=quasiseparable_definition, linear=True, options=None, **shape) -> Check:
        made = partial(_scan_inputs, two=True, **{"seqlen": seqlen, "width": width, "heads": heads} | shape)
        return Check(
            f"quasiseparable_scan, {name}", quasiseparable_scan, definition, made, vectors, options or {}, linear
        )

    def one(name: str, *, definition=semiseparable_definition, options=None, **shape) -> Check:
        made = partial(_scan_inputs, **{"seqlen": seqlen, "width": width, "heads": heads} | shape)
        return Check(f"semiseparable_scan, {name}", semiseparable_scan, definition, made, vectors, options or {})

    lion = {"shift": False, "self_term": "mean", "normalize": "row_sum", "gate_offset": 1, "eps": 0.2}
    yield two("Hydra")
    yield two("two directions", options={"shift": False})
    yield two("product of directions", options={"combine": "mult"}, linear=False)
    yield two("side by side", options={"combine": "concat"})
    yield two("LION", options=lion, linear=False, positive=True)
    yield two("gates per head", decay="head", options={"shift": False, "self_term": "mean"})
    yield two("no gates", decay="none", options={"shift": False}, scaled=False)
    yield two("Hydra, a reset now and then", decay="resets")
    yield two("Hydra, packed", batch=1, options={"cu_seqlens": packed(lengths)})
    yield two("Hydra, packed, from states", batch=1, states=4, options={"cu_seqlens": packed(lengths)})
    yield two("LION, packed", batch=1, positive=True, options=lion | {"cu_seqlens": packed(lengths)}, linear=False)
    yield two("Hydra, odd widths", d_state=width + width // 2 - 1, width=width // 2 + 3)
    yield one("from a state to a state", states=2, options={"return_final_state": True})
    yield one(
        "packed, from states", batch=1, states=4, options={"cu_seqlens": packed(lengths)} | {"return_final_state": True}
    )
    yield one("linear attention", decay="none", scaled=False)
    yield one("one token", seqlen=1, states=2, options={"return_final_state": True})
    if not toy:
        yield two("Hydra, wide states", d_state=128, width=128)
        yield two("Hydra, one chunk", seqlen=200, batch=64)
        yield two("Hydra, long rows", definition=None, seqlen=8192, heads=24, groups=1)
        # So many that a program takes a whole row or document.
        yield two("Hydra, many rows", definition=None, seqlen=384, batch=32, heads=24, groups=1)
        many = {"cu_seqlens": packed([1, 300, 0, 131, 64] * 8)}
        yield two("Hydra, many documents", definition=None, seqlen=8 * 496, batch=1, heads=24, groups=1, options=many)
        shape = {"seqlen": 300, "batch": 32, "heads": 24}
        yield two("LION, many rows", definition=None, positive=True, linear=False, options=lion, **shape)
        yield one("few long rows", definition=None, seqlen=20_000, batch=1, options={"return_final_state": True})


def _small_checks(toy: bool) -> Iterator[Check]:
    seqlen, channels = (40, 16) if toy else (300, 200)
    bounds = packed([5, 0, seqlen - 6, 1])

    def conv(width: int, batch: int = 2) -> dict[str, Tensor]:
        torch.manual_seed(0)
        return {
            "x": torch.randn(batch, seqlen, channels),
            "weight": torch.randn(channels, width) * width**-0.5,
            "bias": torch.randn(channels),
        }

    def norm() -> dict[str, Tensor]:
        torch.manual_seed(0)
        x, gate = torch.randn(2, 2, seqlen, channels).unbind(0)
        return {"x": x, "weight": 1 + 0.1 * torch.randn(channels), "gate": gate}

    for width, causal in ((7, False), (4, True), (2, True), (9, False)):
        options = {"causal": causal, "activation": "silu"}
        name = f"short_conv, width {width} {'causal' if causal else 'centred'}"
        yield Check(name, short_conv, short_conv_definition, partial(conv, width), ("x",), options)
    options = {"activation": "silu", "cu_seqlens": bounds}
    packed_conv = partial(conv, 7, 1)
    yield Check("short_conv, width 7 centred, packed", short_conv, short_conv_definition, packed_conv, ("x",), options)
    options = {"causal": True, "activation": "silu", "return_final_state": True}

    def conv_from_state() -> dict[str, Tensor]:
        return conv(4) | {"initial_state": torch.randn(2, channels, 3)}

    name = "short_conv, width 4 causal, from a state to a state"
    yield Check(name, short_conv, short_conv_definition, conv_from_state, ("x",), options)
    for group in (None, channels // 4):
        name = f"gated_norm, groups of {group or channels}"
        narrow, options = ("x", "gate"), {"group_size": group}
        yield Check(name, gated_norm, gated_norm_definition, norm, narrow, options, linear=False)


def _layer_checks(toy: bool) -> Iterator[Check]:
    seqlen, width, heads = (40, 16, 2) if toy else (300, 64, 4)
    bounds = packed([5, 0, seqlen - 6, 1])

    def layer(directions: int, batch: int, states: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        inner, taps = heads * width, 7 if directions == 2 else 4
        channels = inner + 2 * directions * width
        found = {
            "projected": torch.randn(batch, seqlen, inner + channels + directions * heads),
            "conv_weight": torch.randn(channels, taps) * taps**-0.5,
            "conv_bias": 0.1 * torch.randn(channels),
            "dt_bias": torch.randn(heads) - 2,
            "A_log": 0.3 * torch.randn(heads),
            "norm_weight": 1 + 0.1 * torch.randn(inner),
            "D": torch.randn(heads),
        }
        if directions == 2:
            found["diagonal_weight"] = torch.randn(heads, inner) * inner**-0.5
        if states:
            found["initial_states"] = torch.randn(heads, width, width)
        return found

    def lion(gates: str, batch: int) -> dict[str, Tensor]:
        torch.manual_seed(0)
        logits = torch.randn(heads) if gates == "head" else torch.randn(batch, seqlen, heads)
        return {"qkv": torch.randn(batch, seqlen, 3 * heads * width), "gates": logits + 2}

    sizes: dict[str, Any] = {"nheads": heads, "ngroups": 1, "d_state": width}
    both = {"directions": 2, "cu_seqlens": bounds}
    one = {"directions": 1, "norm_first": False, "group_size": heads * width}
    for name, made, options in (
        ("Hydra", partial(layer, 2, 2, False), {}),
        ("Hydra, packed, from states", partial(layer, 2, 1, True), both),
        ("Mamba-2", partial(layer, 1, 2, False), one),
    ):
        name = f"scan_layer, {name}"
        yield Check(name, scan_layer, scan_layer_definition, made, ("projected",), sizes | options, linear=False)
    for name, made, options in (
        ("gates of tokens", partial(lion, "token", 2), {}),
        ("gates of tokens, packed", partial(lion, "token", 1), {"cu_seqlens": bounds}),
        ("gates of heads", partial(lion, "head", 2), {"feature_map": "elu"}),
    ):
        options, name = {"nheads": heads} | options, f"lion_mixer, {name}"
        yield Check(name, lion_mixer, lion_mixer_definition, made, ("qkv",), options, linear=False)


def _mru_checks(toy: bool) -> Iterator[Check]:
    seqlen = 20 if toy else 200
    lengths = [5, 0, seqlen - 6, 1]
    bounds = packed(lengths)

    def matrices(order: int, rows: int, states: int) -> dict[str, Tensor]:
        torch.manual_seed(0)
        shape = (rows, seqlen, 3, order, order)
        # Near the identity: products of many stay of order one.
        x = torch.eye(order) + 0.3 / seqlen**0.5 * torch.randn(shape)
        return {"x": x, "initial_state": torch.randn(states, 3, order, order)}

    def elements(construction: str, order: int, rows: int, states: int, chunks: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        size = 0.7 if construction in BOUNDED_CONSTRUCTIONS else 0.3 / seqlen**0.5
        numbers = (order, order) if chunks else (state_elements(construction, order),)
        found = {
            "elements": torch.randn(rows, seqlen, 3, *numbers) * (1 if chunks else size),
            "w_down": torch.randn(3, order, order) * order**-0.5,
            "initial_state": torch.randn(states, 3, order, order),
        }
        if chunks:
            found["w_up"] = torch.randn(3, order, element_columns(construction, order)) * size * order**-0.5
        return found

    for order in (4,) if toy else (4, 8, 16, 32):
        made, options = partial(matrices, order, 2, 2), {"return_final_state": True}
        name = f"matrix_product_scan, order {order}"
        yield Check(name, matrix_product_scan, matrix_product_definition, made, ("x",), options, linear=False)
        made, options = partial(matrices, order, 1, 4), {"return_final_state": True, "cu_seqlens": bounds}
        name = f"matrix_product_scan, order {order}, packed"
        yield Check(name, matrix_product_scan, matrix_product_definition, made, ("x",), options, linear=False)
    for construction in FUSED:
        for order in (4,) if toy else (8, 16):
            for chunks in (False, True):
                name = f"mru_mixer, {construction}, order {order}{', from chunks' if chunks else ''}"
                narrow, options = ("elements",), {"construction": construction, "return_final_state": True}
                made = partial(elements, construction, order, 2, 2, chunks)
                yield Check(name, mru_mixer, mru_mixer_definition, made, narrow, options, linear=False)
                made, options = partial(elements, construction, order, 1, 4, chunks), options | {"cu_seqlens": bounds}
                yield Check(f"{name}, packed", mru_mixer, mru_mixer_definition, made, narrow, options, linear=False)


def _scan_inputs(
    *,
    seqlen: int,
    width: int,
    heads: int,
    two: bool = False,
    batch: int = 2,
    groups: int = 2,
    d_state: int | None = None,
    decay: str = "token",
    scaled: bool = True,
    states: int = 0,
    positive: bool = False,
) -> dict[str, Tensor]:
    """`positive`: everything that weights are made of, for sums of rows far from zero."""
    torch.manual_seed(0)
    d_state = d_state or width

    def weight(*shape: int) -> Tensor:
        return torch.rand(*shape) + 0.1 if positive else torch.randn(*shape)

    def decays() -> Tensor:
        if decay == "head":
            return -torch.rand(heads)
        found = -0.3 * torch.rand(batch, seqlen, heads)
        return torch.where(torch.rand(found.shape) < 0.05, -50.0, found) if decay == "resets" else found

    inputs = {"v": torch.randn(batch, seqlen, heads, width)}
    for end in ("_forward", "_backward") if two else ("",):
        for name in ("q", "k"):
            inputs[name + end] = weight(batch, seqlen, groups, d_state) * d_state**-0.25
        if decay != "none":
            inputs[f"log_decay{end}"] = decays()
        if scaled:
            inputs[f"input_scale{end}"] = weight(batch, seqlen, heads)
        if states:
            inputs[f"initial_state{end}"] = torch.randn(states, heads, d_state, width)
    inputs["diagonal"] = weight(batch, seqlen, heads)
    return inputs


def packed(lengths: list[int]) -> Tensor:
    """cu_seqlens of documents of these lengths."""
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def evaluate(op: Callable[..., Any], leaves: dict[str, Tensor], options: dict[str, Any]) -> dict[str, Tensor]:
    """Outputs and gradients by name, for a cotangent that every dtype holds exactly."""
    for name in _absent(op, leaves):
        options = options | {name: None}
    outputs = op(**leaves, **options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    loss = sum((y * _cotangent(y)).sum() for y in outputs)
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    found = {f"output {number}": y.detach() for number, y in enumerate(outputs)}
    # What nothing depends on, the decay of a single token, may be left without a gradient.
    return found | {
        f"d {n}": torch.zeros_like(leaves[n]) if g is None else g for n, g in zip(leaves, grads, strict=True)
    }


def _absent(op: Callable[..., Any], leaves: dict[str, Tensor]) -> list[str]:
    """Arguments without a default that are not given: decays."""
    if "v" not in leaves:
        return []
    names = ["log_decay"] if "q" in leaves else ["log_decay_forward", "log_decay_backward"]
    return [name for name in names if name not in leaves]


_cotangents: dict[tuple, Tensor] = {}


def _cotangent(y: Tensor) -> Tensor:
    """Made once, so that a captured graph reads the same one."""
    key = tuple(y.shape), y.dtype, y.device
    if key not in _cotangents:
        draw = torch.Generator().manual_seed(7)
        _cotangents[key] = torch.randn(y.shape, generator=draw).bfloat16().to(y)
    return _cotangents[key]


def check(case: Check, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Errors, and whether captured passes equal plain ones; with a status that says so where something is wrong."""
    _cotangents.clear()
    leaves, options = _given(case, dtype, device)
    run = partial(evaluate, case.op, leaves, options | {"backend": "triton"})
    got = run()
    wanted = _wanted(case, dtype, device)
    errors = {
        name: rms_error(got[name], wanted[name]) for name in wanted if dtype.itemsize == 4 or wanted[name].dim() > 1
    }
    found: dict[str, Any] = {"errors": {name: _number(error) for name, error in errors.items()}}
    worst = max(errors, key=lambda name: errors[name] / allowed(name, dtype, case.linear))
    found["worst"] = f"{worst} {errors[worst]:.1e}"
    # The interpreter cuts bits off instead of rounding to bfloat16: what it gives there is no verdict on the kernels.
    judged = device.type == "cuda" or dtype != torch.bfloat16
    found["judged"] = judged
    if judged and not all(error <= allowed(name, dtype, case.linear) for name, error in errors.items()):
        found["status"] = f"WRONG: {found['worst']}, allowed {allowed(worst, dtype, case.linear):.1e}"
        return found
    different = same_bits(run, got, device)
    found["same_bits"] = not different
    if different:
        found["status"] = f"WRONG: not the same bits again in {', '.join(different)}"
    return found


def _given(case: Check, dtype: torch.dtype, device: torch.device) -> tuple[dict[str, Tensor], dict[str, Any]]:
    inputs = case.inputs().items()
    leaves = {n: x.to(device, dtype if n in case.narrow else torch.float32).requires_grad_() for n, x in inputs}
    return leaves, {n: x.to(device) if torch.is_tensor(x) else x for n, x in case.options.items()}


def _wanted(case: Check, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """The definition on the CPU, or the PyTorch form in float64 on the device, of the same rounded inputs."""
    where = torch.device("cpu") if case.definition else device
    rounded = {n: x.to(dtype) if n in case.narrow else x for n, x in case.inputs().items()}
    leaves = {n: x.to(where, torch.float64).requires_grad_() for n, x in rounded.items()}
    options = {n: x.to(where) if torch.is_tensor(x) else x for n, x in case.options.items()}
    if case.definition is None:
        options["backend"] = "torch"
    return evaluate(case.definition or case.op, leaves, options)


def dry(case: Check, dtype: torch.dtype, device: torch.device) -> None:
    """Only the launches."""
    leaves, options = _given(case, dtype, device)
    evaluate(case.op, leaves, options | {"backend": "triton"})


def rms_error(got: Tensor, wanted: Tensor) -> float:
    """Root mean square of the error over that of the wanted values; infinite for NaN."""
    got, wanted = got.detach().double(), wanted.detach().to(got.device, torch.float64)
    error = (got - wanted).pow(2).mean().sqrt()
    ratio = (error / wanted.pow(2).mean().sqrt().clamp(min=1e-300)).item() if error != 0 else 0.0
    return ratio if ratio == ratio else float("inf")


def _number(error: float) -> float | None:
    """Three digits; None for what is no number, which JSON cannot hold."""
    return float(f"{error:.3g}") if math.isfinite(error) else None


def allowed(name: str, dtype: torch.dtype, linear: bool) -> float:
    """The largest error of an output or a gradient."""
    if dtype.itemsize == 4:
        return EXACT
    return ROUNDED if name.startswith("output") else ROUNDED * (2 if linear else 4)


def same_bits(run: Callable[[], dict[str, Tensor]], wanted: dict[str, Tensor], device: torch.device) -> list[str]:
    """Names of what a captured graph, replayed twice, or without a GPU a second call gives otherwise."""
    if device.type != "cuda":
        again = run()
        return [name for name, x in again.items() if not torch.equal(x, wanted[name])]
    held: dict[str, Tensor] = {}

    def kept() -> dict[str, Tensor]:
        held.update(run())
        return held

    replay = graph_of(kept, device)
    different: list[str] = []
    for _ in range(2):
        for x in held.values():
            x.fill_(torch.nan)  # what a replay leaves unwritten shows
        replay()
        torch.cuda.synchronize(device)
        different += [name for name, x in held.items() if not torch.equal(x, wanted[name])]
    return list(dict.fromkeys(different))


def run(session: Session) -> list[str]:
    """The part; returns what is left."""
    record = session.record("correctness")
    pieces: list[Piece] = []
    tried: set[Callable] = set()
    for case in checks(session.toy):
        for dtype in DTYPES:
            # In the interpreter, which is slow, half precision only shows that nothing fails.
            if session.toy and dtype.itemsize == 2 and case.op in tried:
                continue
            name = f"{case.name}, {str(dtype).removeprefix('torch.')}"
            rest = case, dtype, session.device
            pieces.append(Piece(name, partial(check, *rest), partial(dry, *rest)))
        tried.add(case.op)
    left = session.work(
        record, pieces, lambda found: f"worst {found['worst']}" + ("" if found["judged"] else " (not judged)")
    )
    if left:
        return left
    return run_tests(session, record)


def run_tests(session: Session, record: Record) -> list[str]:
    """The project's tests of kernels, those that have not passed before; as long as there is time."""
    name = "tests of the project"
    if session.only not in name or record.pieces.get(name, {}).get("status") == "ok":
        return []
    if why := _no_tests():
        record.put(name, {"status": "left out", "why": why})
        print(f"{name:<70} left out: {why}", flush=True)
        return []
    if session.limit.left() < LEAST_SECONDS:
        return [name]
    # Written test by test, so that nothing is lost when all of this is stopped.
    log = record.path.with_name(f"tests-{record.content['code']}.jsonl")
    ended = run_pytest(session, log)
    tests = outcomes(log)
    counts = {outcome: list(tests.values()).count(outcome) for outcome in ("passed", "failed", "skipped")}
    failed = [test for test, outcome in tests.items() if outcome == "failed"]
    piece = {**counts, "names_of_failed": failed}
    print(f"{name:<70} {', '.join(f'{number} {outcome}' for outcome, number in counts.items())}", flush=True)
    if not ended:
        record.put(name, {"begun": 0, **piece})
        return [name]
    status = "ok" if tests and not failed else f"failed: {failed[0]}" if failed else "failed: pytest ran no test"
    record.put(name, {"status": status, **piece})
    return []


def _no_tests() -> str:
    """Why the project's tests cannot run here; "" if they can."""
    if not (TREE / "tests" / "kernels").is_dir():
        return f"no tests in {TREE}"
    for name in ("pytest", "hypothesis"):
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed"
    return ""


def run_pytest(session: Session, log: Path) -> bool:
    """Run the tests that have not passed according to the log, and write on in it; whether there was time for all."""
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", "--tb=line"]
    command += ["-p", "matmix.benchmarks.gpu_session.pytest_log"]
    if importlib.util.find_spec("xdist") and not session.toy:
        command += ["-n", str(min(8, len(os.sched_getaffinity(0))))]
    with tempfile.TemporaryDirectory() as folder:
        skip = Path(folder, "skip")
        skip.write_text(json.dumps([test for test, outcome in outcomes(log).items() if outcome != "failed"]))
        # The tests set the interpreter's variable themselves; what one pytest tells its workers is not for another.
        left_out = ("TRITON_INTERPRET", "PYTEST_")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
        environment |= {"MATMIX_TEST_LOG": str(log.resolve()), "MATMIX_TEST_SKIP": str(skip)}
        command += FEW_TESTS if session.toy else TESTS
        try:
            done = subprocess.run(command, cwd=TREE, env=environment, timeout=max(1.0, session.limit.left() - 5))
        except subprocess.TimeoutExpired:
            return False
    return done.returncode in (0, 1, 5)


def outcomes(log: Path) -> dict[str, str]:
    """By test, the last run's worst."""
    found: dict[str, str] = {}
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    for line in lines:
        name, outcome = json.loads(line)
        found[name] = outcome
    return found

"""Kernels in bfloat16: outputs and all gradients within 5e-3 of the float64 definition of the same rounded inputs.

Without a GPU they run in Triton's interpreter, its bfloat16 put right (`triton_on_cpu`). Vectors and
values are bfloat16; decays, scales, diagonals and states float32, as models have them.
"""

from __future__ import annotations

import pytest
import torch
from compare import packed, rmse_ratio
from mru_inputs import FUSED, mixer_inputs
from nightly import each_value_once, nightly
from test_quasiseparable import make
from test_semiseparable import make as make_causal

from matmix.kernels import gated_norm, mru_mixer, quasiseparable_scan, semiseparable_scan, short_conv
from matmix.kernels.gated_norm.definition import gated_norm_definition
from matmix.kernels.mru.definition import mru_mixer_definition
from matmix.kernels.semiseparable.definition import quasiseparable_definition, semiseparable_definition
from matmix.kernels.short_conv.definition import short_conv_definition

HALF = ("v", "q", "k", "q_forward", "k_forward", "q_backward", "k_backward", "x", "gate", "elements")
SIZES = {"batch": 1, "heads": 2, "groups": 1, "d_state": 64, "headdim": 64}


def evaluate(op, inputs, device, dtype=None, **options):
    """Outputs and gradients; in `dtype` for the definition, else as the inputs are typed."""
    leaves = {name: x.to(device, dtype or x.dtype).requires_grad_() for name, x in inputs.items()}
    options = {name: x.to(device) if torch.is_tensor(x) else x for name, x in options.items()}
    outputs = op(**leaves, **options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    draw = torch.Generator().manual_seed(7)
    # A cotangent that both dtypes hold exactly.
    loss = sum((y * torch.randn(y.shape, generator=draw).bfloat16().to(y)).sum() for y in outputs)
    grads = torch.autograd.grad(loss, list(leaves.values()))
    found = {f"output {number}": y for number, y in enumerate(outputs)}
    return {n: x.cpu() for n, x in (found | {f"d {n}": x for n, x in zip(leaves, grads, strict=True)}).items()}


def assert_close(op, definition, inputs, device, tolerance=5e-3, op_options=None, **options):
    inputs = {n: x.bfloat16() if n in HALF else x for n, x in inputs.items() if x is not None}
    if "log_decay" not in inputs and op is semiseparable_scan:
        options["log_decay"] = None
    if "log_decay_forward" not in inputs and op is quasiseparable_scan:
        options |= {"log_decay_forward": None, "log_decay_backward": None}
    got = evaluate(op, inputs, device, **options, **(op_options or {}), backend="triton")
    wanted = evaluate(definition, inputs, "cpu", torch.float64, **options)
    errors = {name: rmse_ratio(got[name], wanted[name]) for name in wanted}
    assert all(error <= tolerance for error in errors.values()), errors


@pytest.mark.parametrize(("kind", "shift"), each_value_once(["token", "strong", "mixed", "none"], [True, False]))
def test_bidirectional_scan(interpreter, shift, kind):
    assert_close(
        quasiseparable_scan, quasiseparable_definition, make(200, kind=kind, **SIZES), interpreter, shift=shift
    )


@pytest.mark.parametrize("combine", ["mult", nightly("concat")])
def test_combined_directions(interpreter, combine):
    assert_close(quasiseparable_scan, quasiseparable_definition, make(130, **SIZES), interpreter, combine=combine)


def test_lion(interpreter):
    """Gradients through normalised rows are differences to the row's mean: the hardest case for rounding."""
    inputs = {n: x if n.startswith("log") else x.abs() + 0.1 for n, x in make(200, **SIZES).items()}
    form = {"shift": False, "self_term": "mean", "gate_offset": 1, "normalize": "row_sum"}
    assert_close(quasiseparable_scan, quasiseparable_definition, inputs, interpreter, **form)


@pytest.mark.slow
@pytest.mark.parametrize("chunk_size", [16, 64, 128])
def test_packed_documents_with_states(interpreter, chunk_size):
    inputs = make(203, states=5, **SIZES | {"d_state": 20, "headdim": 70})
    options = {"op_options": {"chunk_size": chunk_size}, "cu_seqlens": packed([1, 5, 64, 3, 130])}
    assert_close(quasiseparable_scan, quasiseparable_definition, inputs, interpreter, **options)


def test_causal_scan_from_state_to_state(interpreter):
    inputs = make_causal(200, states=1, **SIZES)
    assert_close(semiseparable_scan, semiseparable_definition, inputs, interpreter, return_final_state=True)


@pytest.mark.parametrize(("width", "causal"), [(7, False), (4, True)])
def test_convolution(interpreter, width, causal):
    inputs = {"x": torch.randn(1, 203, 48), "weight": torch.randn(48, width), "bias": torch.randn(48)}
    options = {"causal": causal, "activation": "silu", "cu_seqlens": packed([1, 5, 64, 3, 130])}
    assert_close(short_conv, short_conv_definition, inputs, interpreter, **options)


@pytest.mark.parametrize("group_size", [None, 16])
def test_norm(interpreter, group_size):
    inputs = {"x": torch.randn(90, 96), "weight": torch.randn(96), "gate": torch.randn(90, 96)}
    assert_close(gated_norm, gated_norm_definition, inputs, interpreter, group_size=group_size)


@pytest.mark.parametrize("construction", [FUSED[0], *map(nightly, FUSED[1:])])
def test_mru(interpreter, construction):
    """The projection stays float32, as a model's weights do."""
    inputs = mixer_inputs(139, construction, batch=1, heads=2, order=8, states=3)
    options = {"cu_seqlens": packed([1, 130, 8]), "return_final_state": True, "construction": construction}
    assert_close(mru_mixer, mru_mixer_definition, inputs, interpreter, **options)


def test_mru_from_chunks(interpreter):
    inputs = mixer_inputs(70, "identity_plus", batch=1, heads=2, order=8, d_chunk=8)
    options = {"cu_seqlens": packed([1, 66, 3]), "construction": "identity_plus"}
    assert_close(mru_mixer, mru_mixer_definition, inputs, interpreter, **options)

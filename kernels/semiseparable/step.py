"""The semiseparable scan for a single token, which generation uses: checks, backend choice, registration."""

from torch import Tensor

from matmix.kernels.functions import Form, working_dtype
from matmix.kernels.registration import register_step
from matmix.kernels.semiseparable.chunked.forward import ScanStepInputs, step_forward
from matmix.kernels.semiseparable.form import check_scan


def semiseparable_step(
    v: Tensor,
    q: Tensor,
    k: Tensor,
    log_decay: Tensor | None,
    state: Tensor,
    *,
    input_scale: Tensor | None = None,
    diagonal: Tensor | None = None,
    in_place: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """h_t = exp(log_decay) h_{t-1} + input_scale k v^T and y_t = q^T h_t + diagonal v for one token.

    What `semiseparable_scan` ("Transformers are SSMs", arXiv 2405.21060) does to a sequence; the cost of a token does
    not depend on how many came before. The Triton form is one launch, waits for nothing, and can be captured in a CUDA
    graph.

    Args:
        v: values (batch, nheads, headdim).
        q: (batch, ngroups, d_state), typed like v; nheads a multiple of ngroups, consecutive heads share a group.
        k: shaped and typed like q.
        log_decay: (batch, nheads), (nheads,) or None for no decay; at most 0.01, -inf forgets everything, as in
            `semiseparable_scan`.
        state: h_{t-1}, (batch, nheads, d_state, headdim) float32 (float64 for float64 inputs).
        input_scale: (batch, nheads) or None for 1.
        diagonal: (batch, nheads), (nheads,) or None for no skip.
        in_place: write h_t into the memory of `state`, which is then what is returned; else `state` is left as it is.
        backend: "auto", "torch" or "triton".

    Returns:
        y_t shaped and typed like v, and h_t shaped and typed like `state`. Gradients come from the PyTorch form: where
        an input requires one, "auto" takes it, and "triton" and `in_place` are errors.

    Raises:
        ValueError: a shape, dtype, device, bound or option does not fit.
    """
    op = "semiseparable_step"
    given = ScanStepInputs(v, q, k, log_decay, state, input_scale, diagonal)
    check_scan(op, given)
    if state.dtype != working_dtype(v):
        raise ValueError(
            f"{op}: state has dtype {state.dtype}; for v of {v.dtype} it is {working_dtype(v)}: convert it"
        )
    return _step(given, in_place, backend)


def _flops(given: ScanStepInputs, *, backward: bool) -> int:
    """The state is written and read: a multiply-add each per element, as in `scan_flops`."""
    batch, heads, headdim = given.v
    return 2 * 2 * batch * heads * headdim * given.q[2]


_step = register_step(
    "semiseparable_step", ScanStepInputs, Form(step_forward), "semiseparable.fused.step", _flops
)  # fmt: skip

"""The options of a scan, the inputs and outputs of its passes, and the checks of its arguments."""

from typing import Any, NamedTuple

from torch import Tensor

from matmix.kernels.checks import (
    check_at_most,
    check_choice,
    check_cu_seqlens,
    check_eps,
    check_finite,
    check_floating,
    check_given,
    check_same_dtype,
    check_shape,
)
from matmix.kernels.context import within_part

LARGEST_LOG_DECAY = 0.01
"""Bound of a log-decay per token: states may grow this fast and no faster, so that no product inside a chunk overflows.
"""


class ScanForm(NamedTuple):
    """The options of a scan: how its directions read, and how their outputs are combined."""

    shift: bool = False
    """Each direction's output moves one token on in its own sense (Hydra): tokens do not meet themselves."""
    combine: str = "add"
    """Two directions: "add", "mult" (elementwise product) or "concat" (forward | backward along headdim)."""
    self_term: str = "sum"
    """Two directions without shift: a token's own terms count in full in each ("sum") or half ("mean")."""
    normalize: bool = False
    """Divide each row by its sum of mixer weights plus `eps`; "add" only. States have a column for the sums."""
    eps: float = 1e-6


class ScanSide(NamedTuple):
    """One direction of a scan: q, k (batch, seqlen, ngroups, d_state), the rest as in `semiseparable_scan`."""

    q: Tensor
    k: Tensor
    log_decay: Tensor | None
    input_scale: Tensor | None
    initial_state: Tensor | None
    reverse: bool


class ScanCall(NamedTuple):
    """The inputs of both passes of a scan, shaped as in `semiseparable_scan`."""

    v: Tensor
    sides: tuple[ScanSide, ...]
    """One direction or two, the second in reverse."""
    diagonal: Tensor | None
    form: ScanForm
    cu_seqlens: Tensor | None = None
    """With a context relative to the part."""
    chunk_size: int | None = None
    context: str = ""
    """The name of the context whose ranks hold parts of the rows; "" for whole rows."""

    @property
    def bounds(self) -> Tensor | None:
        """The boundaries of documents in memory."""
        return within_part(self.cu_seqlens, self.v.shape[1]) if self.context else self.cu_seqlens


class SideGradients(NamedTuple):
    """Gradients of the tensors of a `ScanSide`, with their shapes and dtypes; None for tensors that were not given."""

    q: Tensor
    k: Tensor
    log_decay: Tensor | None
    input_scale: Tensor | None
    initial_state: Tensor | None


class ScanGradients(NamedTuple):
    """Gradients of the tensors of a `ScanCall`, with their shapes and dtypes."""

    v: Tensor
    sides: tuple[SideGradients, ...]
    diagonal: Tensor | None


class ScanOutput(NamedTuple):
    """The outputs of the forward pass of a scan."""

    y: Tensor
    """(batch, seqlen, nheads, headdim), 2 * headdim wide for "concat"; already normalised if asked for."""
    row_sum: Tensor | None
    """(batch, seqlen, nheads) float32 sums of the mixer's rows, without eps; only with `normalize`."""
    finals: tuple[Tensor, ...] | None
    """The state behind the last token of each direction, float32; only if asked for."""
    rest: Tensor | None = None
    """The part of a normalised y that rounding to half precision took off, in the same dtype. The gradient of a
    normalised row is a difference to the row's own mean, y, whose rounding would count in all of its entries alike."""


LARGEST_WIDTH = 256
"""The largest d_state and headdim of the Triton kernels: no test compiles them for wider ones."""


def check_scan(op: str, given: Any) -> None:
    """Shapes, dtypes, devices and bounds of all tensors of a scan, or of one of its steps, by the record's names.

    v and the vectors (q, k) share one dtype; everything else may have any floating dtype.
    """

    def named(*starts: str) -> list[str]:
        return [name for name in given._fields if name.startswith(starts)]

    vectors, decays, scales, states = named("q", "k"), named("log_"), named("input_"), named("initial_", "state")
    tensors = {name: getattr(given, name) for name in ("v", *vectors, *decays, *scales, "diagonal", *states)}
    step = "state" in states
    check_given(op, **{name: tensors[name] for name in ("v", *vectors, *(states if step else ()))})
    check_floating(op, **tensors)
    check_same_dtype(op, **{name: tensors[name] for name in ("v", *vectors)})
    v, vector, tokens = given.v, tensors[vectors[0]], "" if step else "seqlen, "
    if v.dim() != (3 if step else 4) or 0 in v.shape:
        shape = f"(batch, {tokens}nheads, headdim), none of them 0"
        raise ValueError(f"{op}: v has shape {tuple(v.shape)}; expected {shape}")
    *rows, heads, headdim = v.shape
    if vector.dim() != v.dim() or 0 in vector.shape:
        shape = f"(batch, {tokens}ngroups, d_state)"
        raise ValueError(f"{op}: {vectors[0]} has shape {tuple(vector.shape)}; expected {shape}")
    cu_seqlens = None if step else given.cu_seqlens
    check_cu_seqlens(op, cu_seqlens, rows[0], rows[-1], v, part=not step and given.context != "")
    groups, d_state = vector.shape[-2:]
    if heads % groups:
        raise ValueError(f"{op}: {heads} heads cannot share {groups} groups; make nheads a multiple of ngroups")
    shapes = dict.fromkeys(vectors, ((*rows, groups, d_state),))
    shapes |= dict.fromkeys([*decays, "diagonal"], ((*rows, heads), (heads,)))
    shapes |= dict.fromkeys(scales, ((*rows, heads),))
    count = rows[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    width = headdim + getattr(given, "normalize", False)
    shapes |= dict.fromkeys(states, ((count, heads, d_state, width),))
    for name, expected in shapes.items():
        if tensors[name] is not None:
            check_shape(op, name, tensors[name], *expected)
    check_at_most(op, LARGEST_LOG_DECAY, **{name: tensors[name] for name in decays})
    check_finite(op, below=tuple(decays), **tensors)


def no_kernel(d_state: int, headdim: int) -> str:
    """The reason why the Triton form cannot be used; empty if it can."""
    if max(d_state, headdim) > LARGEST_WIDTH:
        return f"takes states of at most {LARGEST_WIDTH} x {LARGEST_WIDTH} a head, not {d_state} x {headdim}"
    return ""


def check_form(op: str, given: Any, normalize: str | None, gate_offset: int) -> None:
    """The options of the bidirectional scan, each and together."""
    combine, eps = given.combine, given.eps
    check_choice(op, "shift", given.shift, (True, False))
    check_choice(op, "combine", combine, ("add", "mult", "concat"))
    check_choice(op, "self_term", given.self_term, ("sum", "mean"))
    check_choice(op, "normalize", normalize, (None, "row_sum"))
    check_choice(op, "gate_offset", gate_offset, (0, 1))
    check_eps(op, eps)
    if given.self_term == "mean" and combine != "add":
        raise ValueError(f'{op}: self_term is "mean" and combine {combine!r}; "mean" needs combine="add"')
    if normalize is not None and combine != "add":
        raise ValueError(f'{op}: normalize is {normalize!r} and combine {combine!r}; rows are summed with "add" only')

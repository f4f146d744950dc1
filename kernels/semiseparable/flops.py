"""FLOPs of the scans, as FlopCounterMode counts them: two for each multiply-add of a matrix product.

Counted are the products of the chunked form (the scores q k^T of each direction and group, chunk matrices times
values, states written and read); not counted is what is done once per element (exponentials, masks, scales, the
diagonal). A normaliser counts as one more column of values. "mult" and "concat" have a chunk matrix in each
direction where "add" has one in all. The backward pass is counted with all that it computes again; masks save
nothing, as in the dense products that run.
"""

from __future__ import annotations

from collections.abc import Sequence

from matmix.kernels.semiseparable.chunked.setup import default_scan_chunk
from matmix.kernels.semiseparable.form import ScanForm


def scan_flops(
    v_shape: Sequence[int],
    q_shape: Sequence[int],
    directions: int,
    form: ScanForm,
    chunk_size: int | None,
    *,
    backward: bool,
) -> int:
    """One pass over v (batch, seqlen, nheads, headdim) with q (batch, seqlen, ngroups, d_state)."""
    batch, seqlen, heads, headdim = v_shape
    groups, d_state = q_shape[2:]
    chunk = chunk_size or default_scan_chunk(seqlen, d_state, headdim)
    width = headdim + form.normalize
    scores = directions * groups * chunk * d_state
    matrices = (1 if form.combine == "add" else directions) * heads * chunk * width
    # Written by each chunk and read by each token.
    states = directions * 2 * heads * d_state * width
    per_token = scores + matrices + states
    if backward:
        # Scores again, then dq and dk from them; dM and dv; states again and their cotangents, each read for
        # gradients of q or k, of v and of decays.
        again = per_token if form.combine == "mult" else 0
        per_token = 3 * scores + 2 * matrices + 3 * states + again
    return 2 * batch * seqlen * per_token

"""Launches of the kernels that carry states over chunks."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from matmix.kernels.launching import launch
from matmix.kernels.semiseparable.form import ScanForm, ScanSide
from matmix.kernels.semiseparable.fused.scan import Scan, one_or_two, per_token
from matmix.kernels.semiseparable.fused.states import combine_spans, state_pass


class States(NamedTuple):
    """States of all directions at chunk edges."""

    states: Tensor | None
    """(slots, nheads, directions, d_state, headdim)."""
    vectors: Tensor | None
    """(slots, nheads, directions, d_state) float32: the same for the sums over rows."""
    ends: Tensor | None
    """(documents, nheads, directions, d_state, headdim) float32: behind the last chunk, where asked for."""
    given: bool
    """Whether documents begin with states that are not zero."""


def pass_states(
    scan: Scan,
    sides: tuple[ScanSide, ...],
    keys: list[Tensor],
    values: list[Tensor],
    initial: list[Tensor | None],
    form: ScanForm,
    sums: Tensor | None,
    *,
    cotangent: bool,
    sum_factor: Tensor | None = None,
    want_ends: bool = False,
    store: bool = True,
    before: int = 0,
) -> States:
    """States that enter the chunks; with `cotangent`, the cotangents of the states that leave them. What enters a
    document is left out (unwritten) where all documents begin, or end, with nothing. `sums` are those of as many
    directions more as come `before` these."""
    count, like, vector = len(sides), values[0], form.normalize
    documents, heads, n, p = scan.documents, scan.heads, scan.d_state, scan.headdim

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=like.device)

    slots = scan.slots(scan.chunk)
    # float16 could not hold what long documents add up to.
    held = torch.bfloat16 if like.dtype == torch.bfloat16 else torch.float32
    states = empty(slots, heads, count, n, p, dtype=held) if store else None
    vectors = empty(slots, heads, count, n) if store and vector else None
    entry = None
    if any(state is not None for state in initial):
        zero = torch.zeros(documents, heads, n, p, device=like.device) if None in initial else None
        entry = torch.stack([(zero if state is None else state).float() for state in initial], 2)
    ends = empty(documents, heads, count, n, p) if want_ends else None

    block_n, n_blocks, block_p, p_blocks = scan.blocks(scan.config.block)
    tiles = n_blocks * p_blocks
    programs = documents * heads * tiles
    chunks = scan.per_row(scan.chunk)
    span = max(8, -(-scan.rows * chunks * heads * tiles // scan.programs))
    split = programs < scan.programs // 2 and chunks >= 4 * span
    if not split:
        # Longer than the row: every document is one unit, numbered like the documents.
        span = scan.seqlen // scan.chunk + 1
    units = scan.slots(span * scan.chunk) if split else documents
    per_row = scan.per_row(span * scan.chunk) if split else 1
    span_ends = empty(units, heads, count, n, p) if split else None
    span_vectors = empty(units, heads, count, n) if split and vector else None
    span_decays = empty(units, heads, count) if split else None
    first, second, _ = one_or_two(sides, form)
    weights = [per_token(None if cotangent else side.input_scale) for side in (first, second)]
    scaled = [weight[0] is not None for weight in weights]
    factors = scan.factors(sides)
    if factors:
        table = sums[: slots * heads * (before + count) * factors * scan.chunk]
        sums = table.view(slots, heads, before + count, -1)[:, :, before:]
    # Longer than the others', as this kernel makes no pairs of tokens.
    tile = min(scan.chunk, scan.config.state_tile)
    common = {
        "TWO": count == 2, "REVERSE": first.reverse, "COTANGENT": cotangent, "PACKED": scan.cu_seqlens is not None
    }  # fmt: skip

    def run(entries: Tensor | None, entry_vectors: Tensor | None, out: Tensor | None, summing: bool) -> None:
        launch(
            state_pass, (units * heads, tiles, count),
            keys[0], *keys[0].stride()[:3], keys[-1], *keys[-1].stride()[:3], values[0], values[-1],
            *values[0].stride()[:3], *per_token(sum_factor),
            *weights[0], *weights[1], sums, None if summing else states, None if summing else vectors, entries,
            entry_vectors, out, span_vectors if summing else None, span_decays if summing else None,
            scan.table(span * scan.chunk), scan.seqlen, scan.per_row(scan.chunk), per_row, span, heads,
            scan.share,
            num_warps=scan.config.state_warps, num_stages=scan.config.stages,
            **common, SHIFT=form.shift, GATED1=first.log_decay is not None, GATED2=second.log_decay is not None,
            SCALED1=scaled[0], SCALED2=scaled[1], STORE=store and not summing, VECTOR=vector,
            ENTRY=entries is not None, INITIAL=entry is not None, END=out is not None, DECAYS=summing,
            WHOLE=scan.whole, CHUNK=scan.chunk, TILE=tile, FACTORS=factors, SIDES=before + count,
            D_STATE=n, HEADDIM=p, BLOCK_N=block_n, BLOCK_P=block_p, PRECISION=scan.precision,
            EXACT=scan.exact,
        )  # fmt: skip

    if not split:
        run(entry, None, ends, False)
        return States(states, vectors, ends, entry is not None)
    run(None, None, span_ends, True)
    for of_span, start, end in ((span_ends, entry, ends), (span_vectors, None, None)):
        if of_span is not None:
            elements = of_span[0, 0, 0].numel()
            block = min(1024, triton.next_power_of_2(elements))
            launch(
                combine_spans, (documents, heads, -(-elements // block) * count),
                of_span, span_decays, start, end, scan.cu_seqlens, scan.seqlen, per_row, span * scan.chunk,
                heads, elements, num_warps=4,
                **common, INITIAL=start is not None, FINAL=end is not None, BLOCK=block,
            )  # fmt: skip
    if store:
        run(span_ends, span_vectors, None, False)
    return States(states, vectors, ends, entry is not None)

"""Triton form of the MRU mixer: state matrices are built, multiplied and projected in registers.

Forward: the product of every chunk; the states at the chunks' edges, by the matrix-product scan over those products;
then all chunks from their edges, each state projected at once, so that neither X nor H is ever in memory. A single
chunk needs the last step alone. Only `cayley` comes first with kernels of its own (`orthogonal.py`), once forward and
once backward, and the others read X from memory.

Where elements come from chunks of the tokens (`w_up`), they are made in registers too, and nothing else of a token is
read. The gradients of both weights are sums of one share per chunk, added up in one order.

Backward: from the left, every chunk's own products at every eighth token, and what the chunk adds to the cotangent
of the state before it; what arrives at each chunk from its right, by the scan over those sums; then from the right,
eight tokens at a time: states again from the kept products, gradients of elements and weights. The elements are
read twice forward and twice backward (by ldu three times), and what is kept between the two is a state and a product
per chunk.

Chunks, slots and tiles are those of the matrix-product scan (`matrix_product/fused.py`). Documents cannot touch each
other, whatever they hold; the heads of a tile can by a NaN, as it times the zeros between blocks is NaN.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from matmix.kernels.launching import blocks_in_place, dot_precision, launch
from matmix.kernels.matrix_product import fused as scan
from matmix.kernels.matrix_product.fused import Product
from matmix.kernels.mru.orthogonal import cayley_pass, polish_pass
from matmix.kernels.mru.passes import collect_pass, gradients_pass, outputs_pass, products_pass

GROUP = 8
"""Tokens whose states the backward pass holds at once: the chunk's square root needs the least memory."""


ELIMINATED = {4: 32, 8: 32, 16: 16}
"""Matrices that one warp eliminates at the same time, by order: as many as its registers hold."""

POLISHED = 64
"""Tokens whose matrices one program makes orthogonal, one after the other."""


def level_of(elements: Tensor, w_down: Tensor, cu_seqlens: Tensor | None) -> Product:
    """The chunks of the tokens."""
    batch, seqlen, heads = elements.shape[:3]
    return Product(batch, seqlen, heads, w_down.shape[1], cu_seqlens, seqlen)


def edges_like(elements: Tensor, w_down: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Empty tensors shaped like the chunks' log-norms, and like their products and the states behind them."""
    level = level_of(elements, w_down, cu_seqlens)
    shape = (2, level.slots, level.heads, level.order, level.order) if level.longest > scan.CHUNK else (0,)
    norms = elements.new_empty((level.slots, level.heads), dtype=torch.float32)
    return norms, elements.new_empty(shape, dtype=torch.float32)


def options_of(level: Product, elements: Tensor, w_down: Tensor, w_up: Tensor | None, construction: str) -> dict:
    """Returns the last arguments of this form's kernels. WIDTH: of a tile of outputs or chunks, at least what small
    products take."""
    return {
        **level.options(),
        "CONSTRUCTION": construction,
        "CHUNKED": w_up is not None,
        "WIDTH": max(16, 1 << (w_down.shape[2] - 1).bit_length()),
        "PROJECTION": dot_precision(elements.dtype),
        "maxnreg": 255,
    }


def gradient_warps(construction: str, chunked: bool, dtype: torch.dtype) -> int:
    """Returns the warps of the program with the most to keep in registers: with fewer it spills."""
    if not chunked:
        return 1
    return (2 if dtype == torch.float32 else 1) * (2 if construction == "ldu" else 1)


def input_of(elements: Tensor, w_up: Tensor | None, construction: str) -> tuple:
    """The tensors that the kernels read for a token: elements, or chunks and their weights, by column like those of the
    projection and in float32."""
    elements = blocks_in_place(elements, elements.dim() - 2)
    weights = None
    if w_up is not None:
        # A construction with fewer columns is given columns of zeros, whose places of the tile nothing reads.
        weights = pad(w_up.float(), (0, elements.shape[3] - w_up.shape[2])).mT.mul(factor_of(construction))
    return elements, *elements.stride()[:2], None if weights is None else weights.contiguous()


def built(level: Product, given: tuple, w_down: Tensor, construction: str, options: dict) -> tuple[Tensor, int, int]:
    """State matrices (batch, seqlen, nheads, o, o) of constructions that are not built where they are multiplied, with
    their strides, from what `input_of` gives."""
    elements, width = given[0], w_down.shape[2]
    shape = (level.rows, level.seqlen, level.heads, level.order, level.order)
    x = torch.empty(shape, dtype=torch.float32, device=elements.device)
    order = torch.empty((*shape[:3], 2, level.order), dtype=torch.int8, device=elements.device)
    tokens = ELIMINATED[level.order] * level.order // level.tile
    grid = level.rows * -(-level.seqlen // tokens), level.grid[1]
    common = {name: options[name] for name in ("ORDER", "TILE", "maxnreg", "num_stages", "num_warps")}
    launch(
        cayley_pass, grid, *given, width, x, order, level.seqlen, level.heads, TOKENS=tokens,
        CHUNKED=options["CHUNKED"], WIDTH=options["WIDTH"], PROJECTION=options["PROJECTION"], **common,
    )  # fmt: skip
    total = level.rows * level.seqlen
    launch(
        polish_pass, (-(-total // POLISHED), level.grid[1]), x, order, total, level.heads, COUNT=POLISHED,
        PRECISION=options["PRECISION"], **common,
    )  # fmt: skip
    return x, *x.stride()[:2]


def factor_of(construction: str) -> float:
    """The factor on the weights of chunks: 1 / sqrt(2) for triangles, which are those of (M - M^T) / sqrt(2)."""
    return math.sqrt(0.5) if construction == "cayley" else 1.0


def forward(
    elements: Tensor,
    w_down: Tensor,
    w_up: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    construction: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `mixer_forward` of the PyTorch form."""
    level = level_of(elements, w_down, cu_seqlens)
    given, w_down = input_of(elements, w_up, construction), w_down.contiguous()
    initial = None if initial_state is None else initial_state.float().contiguous()
    options = options_of(level, elements, w_down, w_up, construction)
    if construction == "cayley":
        given = (*built(level, given, w_down, construction, options), None)
        options |= {"CONSTRUCTION": "given", "CHUNKED": False}
    norms, edges = edges_like(elements, w_down, cu_seqlens)
    entering = None
    if level.longest > scan.CHUNK:
        products, entering = edges.unbind(0)
        launch(products_pass, level.grid, *given, w_down.shape[2], products, *level.place, **options)
        above, size = level.chunks(), level.heads * level.order**2
        scan.scan_level(above, products, (above.seqlen * size, size), initial, entering, None)
    y = torch.empty(*elements.shape[:3], *w_down.shape[1:], dtype=elements.dtype, device=elements.device)
    final = level.empty(level.documents, elements)
    # One warp multiplies tiles of 16 x 16 without waiting for another; exact projections need the registers of two.
    launch(
        outputs_pass, level.grid, *given, w_down, w_down.shape[2], y, final, norms, initial, entering, *level.place,
        INITIAL=initial is not None, ENTERING=entering is not None,
        **options | {"num_warps": 2 if elements.dtype == torch.float32 else 1},
    )  # fmt: skip
    return y, final, norms, edges


def backward(
    dy: Tensor | None,
    dfinal: Tensor | None,
    elements: Tensor,
    w_down: Tensor,
    w_up: Tensor | None,
    edges: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    construction: str,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """See `mixer_backward` of the PyTorch form. Incoming gradients are read only."""
    level = level_of(elements, w_down, cu_seqlens)
    given, w_down = input_of(elements, w_up, construction), w_down.contiguous()
    dy = None if dy is None else blocks_in_place(dy, 3)
    dfinal = None if dfinal is None else dfinal.contiguous()
    initial = None if initial_state is None else initial_state.float().contiguous()
    options = options_of(level, elements, w_down, w_up, construction)
    x, collected, building = None, given, {}
    if construction == "cayley":
        x, *strides = built(level, given, w_down, construction, options)
        collected, building = (x, *strides, None), {"CONSTRUCTION": "given", "CHUNKED": False}
    weighted = w_down, w_down.shape[2], dy, *((0, 0) if dy is None else dy.stride()[:2]), dfinal
    options |= {"GROUP": GROUP, "GIVEN": dy is not None, "DFINAL": dfinal is not None}
    several = level.longest > scan.CHUNK
    inner = level.empty(level.slots * -(-scan.CHUNK // GROUP), elements)
    sums = level.empty(level.slots, elements) if several else None
    launch(
        collect_pass, level.grid, *collected, *weighted, inner, sums, *level.place, SUMS=several,
        **options | building,
    )  # fmt: skip
    arriving = entering = None
    if several:
        products, entering = edges.unbind(0)
        arriving = scan.arriving_cotangents(level.chunks(), sums, products)
    delements = torch.empty(elements.shape, dtype=elements.dtype, device=elements.device)
    down, up = (
        None if w is None else torch.empty((level.slots, *w_down.shape), dtype=torch.float32, device=elements.device)
        for w in (w_down, w_up)
    )
    work = level.empty(level.slots * (2 if x is None else 1) * GROUP, elements)
    dinitial = None if initial is None else torch.empty_like(initial)
    launch(
        gradients_pass, level.grid, *given, *weighted, x, arriving, inner, work, initial, entering, delements, up, down,
        dinitial, *level.place, BUILT=x is not None, ARRIVING=several, INITIAL=initial is not None, ENTERING=several,
        **options | {"num_warps": gradient_warps(construction, w_up is not None, elements.dtype)},
    )  # fmt: skip
    dw_down = torch.zeros_like(w_down) if dy is None else down.sum(0).to(w_down.dtype)
    dw_up = (
        None
        if w_up is None
        else up.sum(0).mT[..., : w_up.shape[2]].mul(factor_of(construction)).to(w_up.dtype).contiguous()
    )
    return delements, dw_down, dw_up, None if dinitial is None else dinitial.to(initial_state.dtype)

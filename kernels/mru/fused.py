"""Triton form of the MRU mixer: state matrices are built, multiplied and projected in registers.

Forward: the product of every chunk; the states at the chunks' edges, by the matrix-product scan over those products;
then all chunks from their edges, each state projected at once, so that neither X nor H is ever in memory. A single
chunk needs the last step alone. Only `cayley` comes first with kernels of its own (`orthogonal.py`), once forward and
once backward, and the others read X from memory. Elements that come from chunks of the tokens (`w_up`) are made in
registers too.

Backward: from the left, every chunk's own products at every eighth token, and what the chunk adds to the cotangent of
the state before it; what arrives at each chunk from its right, by the scan over those sums; then from the right, eight
tokens at a time: states again from the kept products, gradients of elements and weights (sums of one share per chunk,
in one order). The elements are read twice forward and twice backward (by ldu three times), and what is kept between the
two is a state and a product per chunk.

Chunks, slots and tiles are those of the matrix-product scan (`matrix_product/fused.py`).
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from matmix.kernels.context import Context
from matmix.kernels.launching import blocks_in_place, dot_precision, launch
from matmix.kernels.matrix_product import fused as scan
from matmix.kernels.matrix_product.fused import Product
from matmix.kernels.matrix_product.parts import Part
from matmix.kernels.mru.chunked import MixerInputs, MixerOutputs
from matmix.kernels.mru.orthogonal import cayley_pass, polish_pass
from matmix.kernels.mru.passes import collect_pass, gradients_pass, outputs_pass, products_pass

GROUP = 8
"""Tokens whose states the backward pass holds at once: the chunk's square root needs the least memory."""


ELIMINATED = {4: 32, 8: 32, 16: 16}
"""Matrices that one warp eliminates at the same time, by order: as many as its registers hold."""

POLISHED = 64
"""Tokens whose matrices one program makes orthogonal, one after the other."""


def level_of(given: MixerInputs) -> Product:
    """The chunks of the tokens."""
    return scan.level_of(given.elements, given.w_down.shape[1], given.cu_seqlens, given.context)


def part_of(given: MixerInputs) -> Part | None:
    return Part.of(Context.named(given.context), given.cu_seqlens, given.elements, given.columns)


def edges_like(given: MixerInputs) -> tuple[Tensor, Tensor]:
    """Empty tensors shaped like the chunks' log-norms, and like their products and the states behind them."""
    level = level_of(given)
    shape = (2, level.slots, level.heads, level.order, level.order) if level.several else (0,)
    norms = given.elements.new_empty((level.slots, level.heads), dtype=torch.float32)
    return norms, given.elements.new_empty(shape, dtype=torch.float32)


def options_of(level: Product, given: MixerInputs) -> dict:
    """The last arguments of this form's kernels. WIDTH: of a tile of outputs or chunks, at least what small products
    take."""
    return level.options() | {
        "CONSTRUCTION": given.construction, "CHUNKED": given.w_up is not None,
        "WIDTH": max(16, 1 << (given.w_down.shape[2] - 1).bit_length()),
        "PROJECTION": dot_precision(given.elements.dtype), "maxnreg": 255,
    }  # fmt: skip


def gradient_warps(given: MixerInputs) -> int:
    """The warps of the program with the most to keep in registers: with fewer it spills."""
    if given.w_up is None:
        return 1
    return (2 if given.elements.dtype == torch.float32 else 1) * (2 if given.construction == "ldu" else 1)


def input_of(given: MixerInputs) -> tuple:
    """The tensors that the kernels read for a token: elements, or chunks and their weights, by column like those of the
    projection and in float32."""
    elements, weights = blocks_in_place(given.elements, given.elements.dim() - 2), None
    if given.w_up is not None:
        # A construction with fewer columns is given columns of zeros, whose places of the tile nothing reads.
        weights = pad(given.w_up.float(), (0, elements.shape[3] - given.w_up.shape[2])).mT
        weights = weights.mul(factor_of(given.construction)).contiguous()
    return elements, *elements.stride()[:2], weights


def built(level: Product, tokens_in: tuple, width: int, options: dict) -> tuple[Tensor, int, int, None]:
    """State matrices (batch, seqlen, nheads, o, o) of constructions that are not built where they are multiplied, as
    `input_of` gives elements, from what that gives."""
    shape, device = (level.rows, level.seqlen, level.heads, level.order, level.order), tokens_in[0].device
    x = torch.empty(shape, dtype=torch.float32, device=device)
    order = torch.empty((*shape[:3], 2, level.order), dtype=torch.int8, device=device)
    tokens = ELIMINATED[level.order] * level.order // level.tile
    grid = level.rows * -(-level.seqlen // tokens), level.grid[1]
    common = {name: options[name] for name in ("ORDER", "TILE", "maxnreg", "num_stages", "num_warps")}
    of_token = {name: options[name] for name in ("CONSTRUCTION", "CHUNKED", "WIDTH", "PROJECTION")}
    launch(
        cayley_pass, grid, *tokens_in, width, x, order, level.seqlen, level.heads, TOKENS=tokens, **of_token, **common,
    )  # fmt: skip
    total = level.rows * level.seqlen
    launch(
        polish_pass, (-(-total // POLISHED), level.grid[1]), x, order, total, level.heads, COUNT=POLISHED,
        PRECISION=options["PRECISION"], **common,
    )  # fmt: skip
    return x, *x.stride()[:2], None


def factor_of(construction: str) -> float:
    """The factor on the weights of chunks: 1 / sqrt(2) for triangles, which are those of (M - M^T) / sqrt(2)."""
    return math.sqrt(0.5) if construction == "cayley" else 1.0


def forward(given: MixerInputs) -> MixerOutputs:
    """See `mixer_forward` of the PyTorch form."""
    level, elements, w_down = level_of(given), given.elements, given.w_down.contiguous()
    initial = None if given.initial_state is None else given.initial_state.float().contiguous()
    read, options = input_of(given), options_of(level, given)
    if given.construction == "cayley":
        read = built(level, read, w_down.shape[2], options)
        options |= {"CONSTRUCTION": "given", "CHUNKED": False}
    norms, edges = edges_like(given)
    entering = entered = None
    part = part_of(given)
    if level.several:
        products, entering = edges.unbind(0)
        launch(products_pass, level.grid, *read, w_down.shape[2], products, *level.place, **options)
        above, size = level.chunks(), level.heads * level.order**2
        strides = above.seqlen * size, size
        _, initial, entered = scan.scan_level(above, products, strides, initial, entering, None, part)
    y = torch.empty(*elements.shape[:3], *w_down.shape[1:], dtype=elements.dtype, device=elements.device)
    final = level.empty(level.documents, elements)
    # One warp multiplies tiles of 16 x 16 without waiting for another; exact projections need the registers of two.
    launch(
        outputs_pass, level.grid, *read, w_down, w_down.shape[2], y, final, norms, initial, entering, *level.place,
        INITIAL=initial is not None, ENTERING=entering is not None,
        **options | {"num_warps": 2 if elements.dtype == torch.float32 else 1},
    )  # fmt: skip
    return MixerOutputs(y, final if part is None else part.own(final, first=False), norms, edges, entered)


def backward(
    given: MixerInputs, outputs: MixerOutputs, cotangents: MixerOutputs
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """See `mixer_backward` of the PyTorch form. Incoming gradients are read only."""
    level, elements, w_down, w_up = level_of(given), given.elements, given.w_down.contiguous(), given.w_up
    dy = None if cotangents.y is None else blocks_in_place(cotangents.y, 3)
    part, dfinal = part_of(given), cotangents.final
    dfinal = None if dfinal is None else (dfinal if part is None else part.own(dfinal, first=False)).contiguous()
    initial = None if given.initial_state is None else given.initial_state.float().contiguous()
    read, options = input_of(given), options_of(level, given)
    x, collected, building = None, read, {}
    if given.construction == "cayley":
        collected = built(level, read, w_down.shape[2], options)
        x, building = collected[0], {"CONSTRUCTION": "given", "CHUNKED": False}
    weighted = w_down, w_down.shape[2], dy, *((0, 0) if dy is None else dy.stride()[:2]), dfinal
    options |= {"GROUP": GROUP, "GIVEN": dy is not None, "DFINAL": dfinal is not None}
    several = level.several
    inner = level.empty(level.slots * -(-scan.CHUNK // GROUP), elements)
    sums = level.empty(level.slots, elements) if several else None
    launch(
        collect_pass, level.grid, *collected, *weighted, inner, sums, *level.place, SUMS=several,
        **options | building,
    )  # fmt: skip
    arriving = entering = None
    if several:
        products, entering = outputs.edges.unbind(0)
        arriving, beyond = scan.arriving_cotangents(level.chunks(), sums, products, part)
    if part is not None:
        initial = part.with_edge(level.starts(initial, elements), 0, outputs.entered).contiguous()
        dfinal = beyond if dfinal is None else dfinal + beyond
        weighted, options = (*weighted[:-1], dfinal), options | {"DFINAL": True}
    delements = torch.empty(elements.shape, dtype=elements.dtype, device=elements.device)
    down, up = (
        None if w is None else torch.empty((level.slots, *w_down.shape), dtype=torch.float32, device=elements.device)
        for w in (w_down, w_up)
    )
    work = level.empty(level.slots * (2 if x is None else 1) * GROUP, elements)
    dinitial = None if initial is None else torch.empty_like(initial)
    launch(
        gradients_pass, level.grid, *read, *weighted, x, arriving, inner, work, initial, entering, delements, up, down,
        dinitial, *level.place, BUILT=x is not None, ARRIVING=several, INITIAL=initial is not None, ENTERING=several,
        **options | {"num_warps": gradient_warps(given)},
    )  # fmt: skip
    dw_down = torch.zeros_like(w_down) if dy is None else down.sum(0).to(w_down.dtype)
    dw_up = None
    if w_up is not None:
        dw_up = up.sum(0).mT[..., : w_up.shape[2]].mul(factor_of(given.construction)).to(w_up.dtype).contiguous()
    if given.initial_state is None:
        return delements, dw_down, dw_up, None
    dinitial = dinitial if part is None else part.own(dinitial, first=True)
    return delements, dw_down, dw_up, dinitial.to(given.initial_state.dtype)

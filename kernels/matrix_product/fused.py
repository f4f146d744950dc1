"""Triton form of the matrix-product scan: chunks side by side, and the same scan over the chunks' products.

A program runs one chunk of one document for a few neighbouring heads, whose matrices stand as diagonal blocks of one
tile of 16 x 16 (o = 4, 8, 16) or 32 x 32: small products only fit tensor cores in such tiles, and blocks of finite
numbers stay apart under multiplication (a NaN times the zeros between blocks is NaN). Long sequences take three steps:
the product of every chunk; the states at the chunks' edges, by the same scan over those products; all chunks from their
edges. The backward pass goes the same way from the right with pairs: what a chunk adds to the cotangent, and the
product that passes through it. Chunks are numbered as in slots.py. Matrices are float32 inside whatever the inputs are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from matmix.kernels.launching import blocks_in_place, dot_precision, launch
from matmix.kernels.matrix_product.chunked import ProductInputs, ProductOutputs
from matmix.kernels.matrix_product.passes import prefix_pass, suffix_pass
from matmix.kernels.slots import count_documents, count_slots

CHUNK = 64
"""Tokens of a chunk: one program multiplies them one after the other."""


class Product(NamedTuple):
    """Shapes of one level: tokens, or products of chunks."""

    rows: int
    seqlen: int
    heads: int
    order: int
    cu_seqlens: Tensor | None
    longest: int
    """Bound of a document's steps; once it fits a chunk, nothing passes between chunks."""

    @property
    def documents(self) -> int:
        return count_documents(self.rows, self.cu_seqlens)

    @property
    def per_row(self) -> int:
        return -(-self.seqlen // CHUNK)

    @property
    def slots(self) -> int:
        return count_slots(self.rows, self.seqlen, self.cu_seqlens, CHUNK)

    @property
    def tile(self) -> int:
        return max(16, self.order)

    @property
    def grid(self) -> tuple[int, int]:
        return self.slots, -(-self.heads // (self.tile // self.order))

    @property
    def place(self) -> tuple[Tensor | None, int, int, int, int]:
        """The arguments by which all kernels find their chunk, from `cu_seqlens` to `heads`."""
        return self.cu_seqlens, self.documents, self.seqlen, self.per_row, self.heads

    def chunks(self) -> Product:
        """The next level, whose steps are the chunks of this level."""
        if self.cu_seqlens is None:
            return self._replace(seqlen=self.per_row, longest=self.per_row)
        numbers = torch.arange(self.documents + 1, device=self.cu_seqlens.device, dtype=self.cu_seqlens.dtype)
        # A document's slots can include one that it leaves empty: an identity.
        longest = -(-self.longest // CHUNK) + 1
        return self._replace(seqlen=self.slots, cu_seqlens=self.cu_seqlens // CHUNK + numbers, longest=longest)

    def empty(self, count: int, like: Tensor) -> Tensor:
        return torch.empty((count, self.heads, self.order, self.order), dtype=torch.float32, device=like.device)

    def options(self) -> dict:
        """The last arguments of all kernels."""
        return {
            "num_warps": 1 if self.tile == 16 else 4,
            "num_stages": 2,
            "ORDER": self.order,
            "TILE": self.tile,
            "CHUNK": CHUNK,
            "PACKED": self.cu_seqlens is not None,
            "PRECISION": dot_precision(torch.float32),
        }


def level_of(x: Tensor, cu_seqlens: Tensor | None) -> Product:
    return Product(x.shape[0], x.shape[1], x.shape[2], x.shape[3], cu_seqlens, x.shape[1])


def chunk_products(level: Product, x: Tensor, strides: tuple[int, int]) -> Tensor:
    """(slots, nheads, o, o)."""
    products = level.empty(level.slots, x)
    launch(
        prefix_pass, level.grid, x, *strides, None, products, None, None, None, *level.place,
        STORE=False, FINAL=False, INITIAL=False, ENTERING=False,
        **level.options(),
    )  # fmt: skip
    return products


def scan_level(
    level: Product, x: Tensor, strides: tuple[int, int], initial: Tensor | None, h: Tensor, final: Tensor | None
) -> Tensor | None:
    """Write all states into `h`, and those at the documents' ends into `final`; returns the chunks' products."""
    products = edges = None
    if level.longest > CHUNK:
        products, above = chunk_products(level, x, strides), level.chunks()
        edges = torch.empty_like(products)
        size = level.heads * level.order**2
        scan_level(above, products, (above.seqlen * size, size), initial, edges, None)
    launch(
        prefix_pass, level.grid, x, *strides, h, None, final, initial, edges, *level.place,
        STORE=True, FINAL=final is not None, INITIAL=initial is not None,
        ENTERING=edges is not None, **level.options(),
    )  # fmt: skip
    return products


def forward(given: ProductInputs) -> ProductOutputs:
    """See `product_forward` of the PyTorch form; chunks are the kernels' own."""
    x, initial_state, cu_seqlens, _ = given
    level, x = level_of(x, cu_seqlens), blocks_in_place(x, 3)
    h = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    final = level.empty(level.documents, x)
    initial = None if initial_state is None else initial_state.float().contiguous()
    products = scan_level(level, x, x.stride()[:2], initial, h, final)
    return ProductOutputs(h, final, products_like(x, cu_seqlens) if products is None else products)


def products_like(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """An empty tensor shaped like the chunks' products that `forward` returns."""
    level = level_of(x, cu_seqlens)
    shape = (level.slots, *x.shape[2:]) if level.longest > CHUNK else (0,)
    return x.new_empty(shape, dtype=torch.float32)


def carry_back(
    level: Product, dh: Tensor | None, x: Tensor, strides: tuple[int, int], out: Tensor, *,
    tokens: bool, write: bool, **given: Tensor | None,
) -> Tensor:  # fmt: skip
    """Launches `suffix_pass` over one level; `given` are those of its other tensors that are there."""
    names = ("h", "initial", "dfinal", "arriving", "dinitial")
    h, initial, dfinal, arriving, dinitial = (given.get(name) for name in names)
    dh_strides = (0, 0) if dh is None else dh.stride()[:2] if tokens else strides
    launch(
        suffix_pass, level.grid, dh, *dh_strides, x, *strides, h, initial, dfinal, arriving, out, dinitial,
        *level.place, TOKENS=tokens, WRITE=write,
        GIVEN=dh is not None, DFINAL=dfinal is not None, INITIAL=initial is not None,
        DINITIAL=dinitial is not None, ARRIVING=arriving is not None, **level.options(),
    )  # fmt: skip
    return out


def arriving_cotangents(level: Product, sums: Tensor, products: Tensor) -> Tensor:
    """The cotangent that arrives at the right edge of each step of a level of chunks, from what each chunk adds and
    the products that pass through them."""
    size = level.heads * level.order**2
    strides = (level.seqlen * size, size)
    arriving = None
    if level.longest > CHUNK:
        added = level.empty(level.slots, products)
        carry_back(level, sums, products, strides, added, tokens=False, write=False)
        arriving = arriving_cotangents(level.chunks(), added, chunk_products(level, products, strides))
    out = torch.empty_like(products)
    return carry_back(level, sums, products, strides, out, tokens=False, write=True, arriving=arriving)


def backward(given: ProductInputs, outputs: ProductOutputs, cotangents: ProductOutputs) -> tuple[Tensor, Tensor | None]:
    """See `product_backward` of the PyTorch form."""
    x, initial_state, cu_seqlens, _ = given
    h, _, products = outputs
    dh, dfinal, _ = cotangents
    level, x = level_of(x, cu_seqlens), blocks_in_place(x, 3)
    dh = None if dh is None else blocks_in_place(dh, 3)
    dfinal = None if dfinal is None else dfinal.contiguous()
    initial = None if initial_state is None else initial_state.float().contiguous()
    arriving = None
    if level.longest > CHUNK:
        sums = level.empty(level.slots, x)
        carry_back(level, dh, x, x.stride()[:2], sums, tokens=True, write=False, dfinal=dfinal)
        arriving = arriving_cotangents(level.chunks(), sums, products)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dinitial = None if initial is None else torch.empty_like(initial)
    carry_back(
        level, dh, x, x.stride()[:2], dx, tokens=True, write=True, h=h, initial=initial, dfinal=dfinal,
        arriving=arriving, dinitial=dinitial,
    )  # fmt: skip
    return dx, None if dinitial is None else dinitial.to(initial_state.dtype)

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

from matmix.kernels.context import Context, within_part
from matmix.kernels.launching import blocks_in_place, dot_precision, launch
from matmix.kernels.matrix_product.chunked import ProductInputs, ProductOutputs
from matmix.kernels.matrix_product.parts import Part
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
    is_part: bool = False
    """Ranks hold other parts of the rows."""

    @property
    def several(self) -> bool:
        """Whether there is a next level."""
        return self.longest > CHUNK or self.is_part

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
            return self._replace(seqlen=self.per_row, longest=self.per_row, is_part=False)
        numbers = torch.arange(self.documents + 1, device=self.cu_seqlens.device, dtype=self.cu_seqlens.dtype)
        # A document's slots can include one that it leaves empty: an identity.
        longest = -(-self.longest // CHUNK) + 1
        bounds = self.cu_seqlens // CHUNK + numbers
        return self._replace(seqlen=self.slots, cu_seqlens=bounds, longest=longest, is_part=False)

    def of_documents(self, products: Tensor) -> Tensor:
        """(documents, nheads, o, o) by slot, where documents fit a chunk."""
        return products if self.cu_seqlens is None else products.index_select(0, self.chunks().cu_seqlens[:-1])

    def starts(self, initial: Tensor | None, like: Tensor) -> Tensor:
        """Initial states (documents, nheads, o, o), identities where none are given."""
        if initial is not None:
            return initial
        identity = torch.eye(self.order, dtype=torch.float32, device=like.device)
        return identity.expand(self.documents, self.heads, self.order, self.order)

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


def level_of(x: Tensor, order: int, cu_seqlens: Tensor | None, context: str) -> Product:
    """The chunks of tokens x (batch, seqlen, nheads, ...)."""
    if context:
        cu_seqlens = within_part(cu_seqlens, x.shape[1])
    return Product(*x.shape[:3], order, cu_seqlens, x.shape[1], bool(context))


def part_of(given: ProductInputs) -> Part | None:
    return Part.of(Context.named(given.context), given.cu_seqlens, given.x, given.columns)


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
    level: Product, x: Tensor, strides: tuple[int, int], initial: Tensor | None, h: Tensor, final: Tensor | None,
    part: Part | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Write all states into `h`, and those at the documents' ends into `final`; returns the chunks' products, the
    states that documents start from in a part, where they are given, and those that entered it."""
    products = edges = entered = None
    if level.several:
        products, above = chunk_products(level, x, strides), level.chunks()
        edges = torch.empty_like(products)
        size = level.heads * level.order**2
        _, initial, entered = scan_level(above, products, (above.seqlen * size, size), initial, edges, None, part)
    elif part is not None:
        initial = level.starts(initial, x)
        product = part.edge(level.of_documents(chunk_products(level, x, strides)), 1)
        entered = part.entered(part.passed_on(product, initial), initial)
        initial = part.with_edge(initial, 0, entered).contiguous()
    launch(
        prefix_pass, level.grid, x, *strides, h, None, final, initial, edges, *level.place,
        STORE=True, FINAL=final is not None, INITIAL=initial is not None,
        ENTERING=edges is not None, **level.options(),
    )  # fmt: skip
    return products, initial, entered


def forward(given: ProductInputs) -> ProductOutputs:
    """See `product_forward` of the PyTorch form; chunks are the kernels' own."""
    x, part = blocks_in_place(given.x, 3), part_of(given)
    level = level_of(x, x.shape[3], given.cu_seqlens, given.context)
    h = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    final = level.empty(level.documents, x)
    initial = None if given.initial_state is None else given.initial_state.float().contiguous()
    products, _, entered = scan_level(level, x, x.stride()[:2], initial, h, final, part)
    final = final if part is None else part.own(final, first=False)
    return ProductOutputs(h, final, products_like(given) if products is None else products, entered)


def products_like(given: ProductInputs) -> Tensor:
    """An empty tensor shaped like the chunks' products that `forward` returns."""
    x = given.x
    level = level_of(x, x.shape[3], given.cu_seqlens, given.context)
    shape = (level.slots, *x.shape[2:]) if level.several else (0,)
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


def arriving_cotangents(
    level: Product, sums: Tensor, products: Tensor, part: Part | None = None
) -> tuple[Tensor, Tensor | None]:
    """The cotangent that arrives at the right edge of each step of a level of chunks, from what each chunk adds and
    the products that pass through them; and of a part what arrives at the documents' ends from other ranks."""
    size = level.heads * level.order**2
    strides = (level.seqlen * size, size)
    arriving = beyond = None
    if level.several or part is not None:
        added = level.empty(level.slots, products)
        carry_back(level, sums, products, strides, added, tokens=False, write=False)
        passing = chunk_products(level, products, strides)
        if level.several:
            arriving, beyond = arriving_cotangents(level.chunks(), added, passing, part)
        else:
            beyond = part.arriving(*(part.edge(level.of_documents(x), 0) for x in (added, passing)))
            beyond = part.with_edge(level.empty(level.documents, sums).zero_(), 1, beyond)
    out = torch.empty_like(products)
    carry_back(level, sums, products, strides, out, tokens=False, write=True, arriving=arriving, dfinal=beyond)
    return out, beyond


def backward(given: ProductInputs, outputs: ProductOutputs, cotangents: ProductOutputs) -> tuple[Tensor, Tensor | None]:
    """See `product_backward` of the PyTorch form."""
    initial_state, part = given.initial_state, part_of(given)
    h, _, products, entered = outputs
    dh, dfinal, *_ = cotangents
    x = blocks_in_place(given.x, 3)
    level = level_of(x, x.shape[3], given.cu_seqlens, given.context)
    dh = None if dh is None else blocks_in_place(dh, 3)
    dfinal = None if dfinal is None else (dfinal if part is None else part.own(dfinal, first=False)).contiguous()
    initial = None if initial_state is None else initial_state.float().contiguous()
    arriving = None
    if level.several:
        sums = level.empty(level.slots, x)
        carry_back(level, dh, x, x.stride()[:2], sums, tokens=True, write=False, dfinal=dfinal)
        arriving, beyond = arriving_cotangents(level.chunks(), sums, products, part)
    dinitial = None if initial is None else torch.empty_like(initial)
    if part is not None:
        initial = part.with_edge(level.starts(initial, x), 0, entered).contiguous()
        dfinal = beyond if dfinal is None else dfinal + beyond
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    carry_back(
        level, dh, x, x.stride()[:2], dx, tokens=True, write=True, h=h, initial=initial, dfinal=dfinal,
        arriving=arriving, dinitial=dinitial,
    )  # fmt: skip
    if dinitial is None:
        return dx, None
    return dx, (dinitial if part is None else part.own(dinitial, first=True)).to(initial_state.dtype)

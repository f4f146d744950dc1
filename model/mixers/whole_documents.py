"""Whole documents of some heads, where ranks share a row, for mixers whose algorithms know no boundaries."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from matmix.kernels import over_heads
from matmix.kernels.context import Context
from matmix.model.positions import by_documents


def documents_over_heads(
    run: Callable[..., Tensor], context: Context, cu_seqlens: Tensor | None, *parts: Tensor
) -> Tensor:
    """`over_heads` of parts (B, L, H, width): run(*rows) is called for each document by itself, those of one length
    together, and returns what is shaped like the first rows. Reads cu_seqlens on the host."""

    def whole(*rows: Any) -> Tensor:
        *rows, boundaries, _ = rows
        if boundaries is None:
            return run(*rows)
        return by_documents(lambda *rows: run(*rows[:-1]), boundaries, int, *(part[0] for part in rows)).unsqueeze(0)

    return over_heads(whole, context, cu_seqlens, *parts)

"""Counts the arithmetic of PyTorch code, FFTs and elementwise operations included, on any device (best: meta)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

_aten = torch.ops.aten


def _transform_flops(x: torch.Tensor, dims: list[int], length: int | None = None) -> float:
    """5 N log2 N for a complex transform of N points, half of it if one side is real (Cooley-Tukey)."""
    points = math.prod(x.shape[dim] for dim in dims) if length is None else length
    return x.numel() * (1 if x.is_complex() else 0.5) * 5 * math.log2(max(points, 2))


def _solve_flops(a: torch.Tensor, b: torch.Tensor, **_: Any) -> float:
    """Triangular (.., N, N) against (.., N, K)."""
    return math.prod(torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])) * a.shape[-1] ** 2 * b.shape[-1]


class FlopCount(TorchDispatchMode):
    """While active: `products` of matrices, transforms, convolutions and ops that state their cost; `elementwise` the
    elements that every other operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0.0
        self.elementwise = 0.0

    @property
    def total(self) -> float:
        return self.products + self.elementwise

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = function.overloadpacket
        if packet not in flop_registry and not function.is_view:
            # An op without a formula is counted by what it is made of, if it is.
            with self:
                result = function.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = function(*args, **kwargs)
        if packet in flop_registry:
            self.products += flop_registry[packet](*args, **kwargs, out_val=result)
        elif packet in (_aten._fft_r2c, _aten._fft_c2c):
            self.products += _transform_flops(args[0], args[1])
        elif packet is _aten._fft_c2r:
            self.products += _transform_flops(result, args[1], args[3])
        elif packet is _aten.linalg_solve_triangular:
            self.products += _solve_flops(*args[:2])
        elif not function.is_view:
            self.elementwise += sum(x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor))
        return result


def cost_class(costs: list[float]) -> str:
    """The growth of costs at lengths L, 4 L and 16 L, whatever linear work comes with it: what exceeds linear growth,
    F(4 L) - 4 F(L), itself grows by 4^p in each step for a cost of L^p, and by 4 for L log L."""
    short, middle, long = costs
    first, second = middle - 4 * short, long - 4 * middle
    if second < 0.01 * long:
        return "O(L)"
    exponent = math.log(second / first, 4)
    return min({"O(L log L)": 1.0, "O(L^1.5)": 1.5, "O(L^2)": 2.0}.items(), key=lambda item: abs(item[1] - exponent))[0]

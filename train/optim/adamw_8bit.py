"""AdamW with moments of 8 bits (arXiv 2110.02861): the codes of a dynamic map, and a scale for each block of them."""

import functools
import math
from typing import Any, ClassVar, NamedTuple, Self

import torch

from matmix.data.artifacts import from_extra
from matmix.train.optim.base import Optimizer, State, local_part
from matmix.train.optim.config import OptimizerConfig

with from_extra("lowbit", "optimizer adamw_8bit needs torchao"):
    from torchao.optim.adam import single_param_adam
    from torchao.optim.quant_utils import create_dynamic_map, dequant_with_qmap, quantize_8bit_with_qmap, scale_tensor

SCALES = {"exp_avg": "exp_avg_scale", "exp_avg_sq": "exp_avg_sq_scale"}
"""The entries with the codes of the moments, and those with their scales."""
AT_ONCE = 1 << 22
"""Elements that are updated at a time, as what is computed on the way takes some 50 bytes of each."""


class AdamW8bit(Optimizer):
    """Takes torchao's step. There blocks go on from row to row; here each lies within a row, so that any number of
    ranks, which hold rows, takes the same steps bit for bit."""

    elementwise = False
    steps_like_adamw = True
    cut = frozenset(SCALES.values())
    smallest: ClassVar[int] = 4096
    """The fewest elements of a parameter; smaller ones have 32 bits with torchao, too."""
    block_sizes: ClassVar[tuple[int, int]] = (64, 256)
    """The fewest and the most elements of a block; torchao's have the most."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})

    @classmethod
    def from_config(cls, groups: list[dict[str, Any]], config: OptimizerConfig, options: Any) -> Self:
        return cls(groups, lr=config.lr, betas=config.betas, eps=config.eps)

    @classmethod
    def takes(cls, name: str, shape: torch.Size) -> bool:
        return math.prod(shape) >= cls.smallest and cls.block_of(shape) > 0

    @classmethod
    def block_of(cls, shape: torch.Size) -> int:
        """Returns the size of the blocks of which rows consist, the largest that is allowed; 0 where none is."""
        row, (fewest, most) = math.prod(shape[1:]), cls.block_sizes
        return max((size for size in range(fewest, most + 1) if row % size == 0), default=0)

    def new_state(self, parameter: torch.Tensor) -> State:
        # An element of each block, sharded as the parameter is.
        firsts = parameter.detach().flatten(1)[:, :: self.block_of(parameter.shape)]
        state, layout = {"step": torch.zeros(())}, torch.contiguous_format
        for codes, scales in SCALES.items():
            state[codes] = torch.zeros_like(parameter, dtype=torch.uint8, memory_format=layout)
            state[scales] = torch.zeros_like(firsts, dtype=torch.float32, memory_format=layout)
        return state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for parameter, state, group in self.with_gradients():
            state["step"] += 1
            kept = (state[name] for pair in SCALES.items() for name in pair)
            rows = max(1, AT_ONCE // math.prod(parameter.shape[1:]))
            pieces = (local_part(one).split(rows) for one in (parameter.detach(), parameter.grad, *kept))
            for weight, gradient, *moments in zip(*pieces, strict=True):
                if len(weight):
                    _update(weight, gradient, moments, state["step"], group)


def _update(
    weight: torch.Tensor, gradient: torch.Tensor, kept: list[torch.Tensor], step: torch.Tensor, group: dict[str, Any]
) -> None:
    """Updates some rows of a parameter in place, and `kept`, the codes and the scales of both moments of these rows."""
    maps = [Codes.of_map(is_signed, weight.device) for is_signed in (True, False)]
    codes, scales = kept[::2], [one.view(-1) for one in kept[1::2]]
    moments = [dequant_with_qmap(*one) for one in zip(codes, (one.values for one in maps), scales, strict=True)]
    lr, (beta1, beta2) = torch.tensor(group["lr"]), group["betas"]
    decay, eps = group["weight_decay"], group["eps"]
    single_param_adam(weight, gradient, step, *moments, None, lr, beta1, beta2, decay, eps, True, False)
    for number, moment in enumerate(moments):
        scaled, scale = scale_tensor(moment, moment.numel() // len(scales[number]))
        codes[number].copy_(maps[number].nearest(scaled))
        scales[number].copy_(scale)


class Codes(NamedTuple):
    """Codes of 8 bits for numbers from -1 to 1, such as torchao's `quantize_8bit_with_qmap` gives them, bit for bit; on
    a CPU that takes a hundred times as long."""

    values: torch.Tensor
    """What each code stands for."""
    above: torch.Tensor
    """The least number that has a higher code than this one."""
    least: torch.Tensor
    """The code of the least number with these first 16 bits: another of them has this code or the next."""

    @classmethod
    @functools.cache
    def of_map(cls, is_signed: bool, device: torch.device) -> Self:
        values = torch.tensor(create_dynamic_map(is_signed))
        low, above = values[:-1], values[1:]
        for _ in range(40):  # until no number lies between
            middle = (low + above) / 2
            is_above = quantize_8bit_with_qmap(middle, values) > torch.arange(255)
            low, above = torch.where(is_above, low, middle), torch.where(is_above, middle, above)
        above = torch.cat([above, torch.tensor([math.inf])])
        bits = torch.arange(1 << 16, dtype=torch.int32) << 16
        numbers = torch.where(bits < 0, bits | 0xFFFF, bits).view(torch.float32)
        least = quantize_8bit_with_qmap(numbers, values).int()
        return cls(values.to(device), above.to(device), least.to(device))

    def nearest(self, numbers: torch.Tensor) -> torch.Tensor:
        """Returns the code, int32, of each of `numbers`, float32, in their shape."""
        flat = numbers.flatten()
        code = self.least.index_select(0, flat.view(torch.int32) >> 16 & 0xFFFF)
        return (code + (flat >= self.above.index_select(0, code))).view_as(numbers)

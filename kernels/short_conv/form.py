"""What the short convolution over a sequence takes."""

from typing import NamedTuple

from torch import Tensor


class ConvInputs(NamedTuple):
    """The arguments of matmix::short_conv."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    causal: bool = False
    activation: str | None = None
    cu_seqlens: Tensor | None = None
    context: str = ""
    """The name of the ranks that hold the other parts of the rows; "" for whole rows."""

    @property
    def left(self) -> int:
        """The number of earlier tokens that an output is made of."""
        width = self.weight.shape[1]
        return width - 1 if self.causal else width // 2

    @property
    def right(self) -> int:
        """The number of later ones."""
        return self.weight.shape[1] - 1 - self.left

"""Heads that multiply matrices up, beside what a mixer gives: H_t = fade H_{t-1} X_t, X_t nearly orthogonal."""

from typing import Any

import torch
from torch import Tensor, nn

from matmix.kernels import matrix_product_scan
from matmix.kernels.functions import working_dtype
from matmix.kernels.mru.chunked import state_matrices
from matmix.kernels.mru.constructions import construction_products
from matmix.model.initialization import constant_init, normal_init
from matmix.model.mixers.mru import faded

ORDER = 4
CONSTRUCTION = "newton_schulz"


class ProductHeads(nn.Module):
    """in_proj(x) -> X_t (4 x 4), H_t = fade H_{t-1} X_t from H_0 = I in each head -> out_proj, (..., d_model).

    It is the MRU's `newton_schulz` (`matmix.model.mixers.mru`) with a learned factor of each head, 1 / (1 + root^2), so
    that where documents are long what is old is gone instead of noise. No norm of X_t exceeds 1: nothing overflows.
    """

    not_float8 = ("in_proj",)  # products gather the errors of all tokens

    def __init__(self, d_model: int, nheads: int, output_std: float):
        """nheads: number of products. output_std: standard deviation of an initial output projection whose inputs have
        variance 1 and are d_model many; that of the numbers of H is 1 / 4 at most."""
        super().__init__()
        self.nheads = nheads
        self.in_proj = nn.Linear(d_model, nheads * ORDER**2, bias=False)
        self.fade_root = nn.Parameter(torch.empty(nheads))
        self.out_proj = nn.Linear(nheads * ORDER**2, d_model, bias=False)
        self.init_rules = {
            # Of size 1: word problems are learned where the matrices of tokens differ from the start.
            "in_proj.weight": normal_init(d_model**-0.5),
            "fade_root": constant_init(1.0),
            "out_proj.weight": normal_init(output_std * (d_model / (nheads * ORDER)) ** 0.5),
        }

    @staticmethod
    def mixing_flops(nheads: int) -> float:
        """Floating-point operations for a token that are no linear layer."""
        return 2.0 * (1 + construction_products(CONSTRUCTION)) * nheads * ORDER**3

    def elements(self, x: Tensor) -> Tensor:
        """Elements of X (..., H, 16) from x (..., d_model)."""
        return self.in_proj(x).unflatten(-1, (self.nheads, -1))

    def matrices(self, x: Tensor) -> Tensor:
        """fade X (..., H, 4, 4), in float32 at least, from x (..., d_model)."""
        return faded(state_matrices(self.elements(x), CONSTRUCTION, ORDER), self.fade_root)

    def read(self, states: Tensor, x: Tensor) -> Tensor:
        """What states (..., H, 4, 4) add to the mixer's output, (..., d_model), in the dtype of x."""
        return self.out_proj(states.flatten(-3).to(x.dtype))

    def forward(self, x: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        """x (B, L, d_model) -> what is added to the output, same shape, and the last states (B or documents, H, 4, 4).
        options: initial_state, cu_seqlens and context, as `matrix_product_scan` has them."""
        states, final = matrix_product_scan(self.matrices(x), return_final_state=True, **options)
        return self.read(states, x), final

    def definition(self, x: Tensor) -> Tensor:
        """What `forward` gives for whole rows, one product after the other."""
        states = [self.initial_state(len(x), x.device)]
        for matrices in self.matrices(x).unbind(1):
            states.append(states[-1].to(matrices.dtype) @ matrices)
        return self.read(torch.stack(states[1:], 1), x)

    def initial_state(self, batch_size: int, device: torch.device | None = None) -> Tensor:
        """The identity, (batch_size, H, 4, 4), float32 at least."""
        device = self.fade_root.device if device is None else device
        identity = torch.eye(ORDER, dtype=working_dtype(self.fade_root), device=device)
        return identity.repeat(batch_size, self.nheads, 1, 1)

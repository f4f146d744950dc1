"""SOAP (arXiv 2409.11321): Adam in the eigenbases of a matrix's own statistics, those of Shampoo."""

import collections
import dataclasses
import inspect
from typing import Any, Self

import pytorch_optimizer
import torch

from matmix.train.errors import require, require_at_least
from matmix.train.optim.base import State, copy_rows_here, whole_tensor
from matmix.train.optim.config import OptimizerConfig
from matmix.train.optim.library import LibraryOptimizer

STATISTICS, BASES = ("left", "right"), ("left_basis", "right_basis")
"""Entries of the rows' side of a matrix, and of the columns'."""

NO_RANK = 1e-5
"""An eigenvalue is rounding if it is less than this share of the largest."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SOAPOptions:
    """Names and values as of pytorch-optimizer's."""

    shampoo_beta: float = 0.95
    """Decay rate of the statistics."""
    precondition_frequency: int = 10
    """Steps between two updates of the bases."""
    max_precondition_dim: int = 10_000
    """A side of more rows or columns is left in its own basis."""

    def __post_init__(self) -> None:
        beta = self.shampoo_beta
        require(0 <= beta < 1, f"optimizer.options.shampoo_beta must lie in [0, 1), got {beta}")
        require_at_least(self, "optimizer.options.", precondition_frequency=1, max_precondition_dim=1)


class SOAP(LibraryOptimizer, pytorch_optimizer.SOAP):
    """pytorch-optimizer's, of whole matrices: ranks that hold parts of one gather it, and each computes all of it. Of
    the first gradient a matrix gets it takes the statistics only."""

    elementwise = False
    of_linear_maps = True
    Options = SOAPOptions
    library_step = inspect.unwrap(pytorch_optimizer.SOAP.step)

    @classmethod
    def from_config(cls, groups: list[dict[str, Any]], config: OptimizerConfig, options: Any) -> Self:
        return cls(groups, lr=config.lr, betas=config.betas, eps=config.eps, **dataclasses.asdict(options))

    @classmethod
    def takes(cls, name: str, shape: torch.Size) -> bool:
        # Embeddings and heads stand outside of the layers.
        return len(shape) == 2 and name.startswith("blocks.")

    def new_state(self, parameter: torch.Tensor) -> State:
        sides = {
            name: torch.zeros(size, size, dtype=parameter.dtype, device=parameter.device)
            for names in (STATISTICS, BASES)
            for name, size in zip(names, parameter.shape, strict=True)
            if size <= self.defaults["max_precondition_dim"]
        }
        moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        return {"step": torch.zeros(()), **moments, **sides}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for parameter, state, group in self.with_gradients():
            self._update(parameter, state, group)

    def _update(self, parameter: torch.Tensor, state: State, group: dict[str, Any]) -> None:
        whole = whole_tensor(parameter.detach())
        whole.grad = whole_tensor(parameter.grad)
        own: dict[str, Any] = {}  # as the library calls it
        if state["step"]:
            own = {name: whole_tensor(state[name]) for name in ("exp_avg", "exp_avg_sq")}
            own |= {key: [state.get(name, []) for name in names] for key, names in (("GG", STATISTICS), ("Q", BASES))}
            own |= {key: group[key] for key in ("precondition_frequency", "shampoo_beta")}
        shown = collections.defaultdict(dict, {whole: own})
        self.run_library([{**group, "params": [whole], "step": int(state["step"])}], shown)
        own = shown[whole]
        new = {**own, **dict(zip(STATISTICS, own["GG"], strict=True)), **dict(zip(BASES, own["Q"], strict=True))}
        for name in state.keys() & new.keys():
            copy_rows_here(state[name], new[name])
        copy_rows_here(parameter.detach(), whole)
        state["step"] += 1

    def get_orthogonal_matrix(self, mat: list[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the first bases, of the first gradient. Where that has no rank any would do, and rounding would
        choose: these follow the first unit vectors, so that other numbers of ranks take the same steps."""
        bases = super().get_orthogonal_matrix(mat)
        for statistics, basis in zip(mat, bases, strict=True):
            if len(basis):
                values = (basis * (statistics @ basis)).sum(0)
                count = int((values < NO_RANK * values.max()).sum())
                rest = basis[:, len(basis) - count :]
                rest.copy_(torch.linalg.qr(rest @ rest[:count].T)[0])
        return bases

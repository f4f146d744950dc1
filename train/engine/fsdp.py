"""Sharded (FSDP2), replicated (DDP) and hybrid (HSDP) training with `torch.distributed.fsdp.fully_shard`: one mesh of
copies and parts, where parts = 1 is DDP and copies = 1 is FSDP; any of them reads what another one wrote. A single
process needs neither group nor sharding and runs the plain model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from matmix.model.precision import rounded_parameters
from matmix.train.engine.base import Engine, Initialize, MakeOptimizer, Snapshot, is_on_meta, persistent_tensors
from matmix.train.engine.clipping import agree_on_norms
from matmix.train.engine.full_state import MODEL, OPTIMIZER, layout_of_moments
from matmix.train.optim.base import is_sharded

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


class FsdpEngine(Engine):
    """The engine behind `name = "fsdp2"` and `name = "ddp"`."""

    kind = "torch"

    @property
    def spread(self) -> DeviceMesh | None:
        return self.mesh.spread

    def _place(self, model: nn.Module, initialize: Initialize, make_optimizer: MakeOptimizer) -> None:
        meta, rounded = is_on_meta(model), rounded_parameters(model)
        if not meta:
            model.to(self.device)
        if self.spread is not None:
            self._shard(model, self.spread)
        if meta:
            _give_memory(model, self.device)
        initialize(model)
        if self.spread is not None and self.config.precision == "bf16":
            from matmix.train.engine.wire import gather_rounded

            gather_rounded(model, rounded)
        self.model = model
        self.optimizer = make_optimizer(model)

    def _shard(self, model: nn.Module, mesh: DeviceMesh) -> None:
        from torch.distributed.fsdp import fully_shard

        from matmix.train.engine.wire import RoundedSums, prefetch

        # A 2-D mesh always reduces over both dimensions; without copies the 1-D one saves the second reduction.
        mesh = mesh["parts"] if mesh["copies"].size() == 1 else mesh["copies", "parts"]
        gather_again = self.config.reshard_after_forward and self.config.name != "ddp"
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=gather_again)
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
        for module in self._sharded_modules(model):
            # Plain sums over ranks: the loss is already divided by the global count.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if self.config.reduce_dtype == "bf16":
                module.set_custom_reduce_scatter(RoundedSums())
        prefetch(model)

    def _sharded_modules(self, model: nn.Module) -> Iterator[FSDPModule]:
        if self.spread is None:
            return iter(())
        from torch.distributed.fsdp import FSDPModule

        return (module for module in model.modules() if isinstance(module, FSDPModule))

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        if self.spread is not None:
            self.module.set_requires_gradient_sync(last)
            self.module.set_is_last_backward(last)
        loss.backward()

    @torch.no_grad()
    def step(self, max_norm: float) -> torch.Tensor:
        norm, is_finite = self.clip(max_norm, self._over_ranks)
        if self.config.cuda_graph:
            self.optimizer.found_inf = (~is_finite).float()
        if self.config.cuda_graph or is_finite:
            self.optimizer.step()
        for parameter in self.module.parameters():
            parameter.grad = None
        return norm

    def _over_ranks(self, norms: torch.Tensor) -> torch.Tensor:
        """Returns the norms over all parts from those of this rank's part, the same on all copies."""
        if self.spread is None:
            return norms
        squares = norms.square()
        if self.spread["parts"].size() > 1:
            dist.all_reduce(squares, group=self.spread.get_group("parts"))
        whole = squares.sqrt()
        if self.spread["copies"].size() > 1:
            whole, self.gradients_differ = agree_on_norms(whole, norms, self.spread.get_group("copies"))
        return whole

    # -- copies ------------------------------------------------------------------------------------------

    def copied_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        copied = self.spread is not None and self.spread["copies"].size() > 1
        for name, tensor in self._state().items():
            if copied and is_sharded(tensor):
                yield name, tensor.to_local()

    def common_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, tensor) for name, tensor in self._state().items() if not is_sharded(tensor))

    # -- checkpoints -------------------------------------------------------------------------------------

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        # After an evaluation the module still shows gathered weights, which the optimizer does not know.
        for module in self._sharded_modules(self.module):
            module.reshard()
        return persistent_tensors(self.module)

    def layout(self) -> dict[str, Any]:
        layout = super().layout()
        moments = {
            name: {entry: tuple(tensor.shape) for entry, tensor in sorted(state.items())}
            for name, state in self.optimizer.named_state()
        }
        return {**layout, **layout_of_moments(moments, layout["shapes"])}

    def _state(self) -> dict[str, torch.Tensor]:
        """Returns model and optimizer as this rank holds them."""
        state = {f"{MODEL}{name}": tensor.detach() for name, tensor in self.named_tensors()}
        for name, entries in self.optimizer.named_state():
            for entry, value in entries.items():
                state[f"{OPTIMIZER}{name}.{entry}"] = value
        return state

    def snapshot(self, *, copy: bool) -> Snapshot:
        # Imported here and not in the thread that writes, which would be late for the next save.
        from matmix.train.engine.sharded_writer import write_sharded

        own = self.mesh.written_here(self._state())
        return Snapshot(self.host.copy(own) if copy else own, write_sharded)


def _give_memory(model: nn.Module, device: torch.device) -> None:
    """Does what `model.to_empty` does, which imports sympy through torch's compiler, also where nothing is sharded."""
    if any(is_sharded(parameter) for parameter in model.parameters()):
        model.to_empty(device=device)
    else:
        model._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device))

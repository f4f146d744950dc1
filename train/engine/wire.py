"""What sharded weights and gradients are sent as: bfloat16 where the model rounds a weight before it uses it, and where
`engine.reduce_dtype` says so; else float32. What ranks keep is float32 in any case.

FSDP gathers the parameters of a block together, and takes tensors of several types (as bytes) where a parameter's own
shard says by `fsdp_pre_all_gather` what to send of it. A `MixedPrecisionPolicy` would be one type for all parameters of
a block, A_log and norms among them, and would sum the gradients of micro-batches in the type that they are reduced in.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_api

WIRE = torch.bfloat16


@torch.no_grad()
def gather_rounded(model: nn.Module, names: Iterable[str]) -> None:
    """From now on the sharded parameters with these names are gathered in bfloat16, and are so in forward passes; their
    gradients are float32. Called once their memory is there."""
    parameters = dict(model.named_parameters())
    for name in names:
        _send_rounded(parameters[name].to_local())
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Gathered parameters are the same objects from now on.
            module.unshard()
            for parameter in module.parameters():
                if parameter.dtype == WIRE:
                    parameter.grad_dtype = torch.float32
            module.reshard()


def _send_rounded(shard: torch.Tensor) -> None:
    def fsdp_pre_all_gather(
        mesh: Any, outer_size: torch.Size, _stride: Any, _module: Any, _policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], None]:
        # Shards are of one size; the last ones are shorter, or empty.
        sent = shard.new_empty(-(-outer_size[0] // mesh.size()), *outer_size[1:], dtype=WIRE)
        sent[: len(shard)] = shard
        return (sent,), None

    def fsdp_post_all_gather(outputs: tuple[torch.Tensor, ...], _metadata: None, _dtype: Any, out: Any = None) -> Any:
        return None if out is not None else (outputs[0], ())

    shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = fsdp_pre_all_gather, fsdp_post_all_gather


class RoundedSums(_fsdp_api.ReduceScatter):
    """Sums gradients over ranks in bfloat16, after those of micro-batches were summed in float32."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns what float32 gradients are copied to, and what comes of them before it is float32 again."""
        return torch.empty(*size, dtype=WIRE, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def prefetch(model: nn.Module) -> None:
    """Lets each block's weights be gathered while the block before it computes, in both directions."""
    blocks = list(model.blocks)
    for before, after in zip([model, *blocks], [*blocks, None], strict=True):
        before.set_modules_to_forward_prefetch([after] if after else [])
    for after, before in zip([model, *reversed(blocks)], [*reversed(blocks), None], strict=True):
        after.set_modules_to_backward_prefetch([before] if before else [])

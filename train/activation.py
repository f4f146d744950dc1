"""Changes to the blocks of a model that save memory, time or start-up time and do not change its numbers. Each replaces
`forward` on the instance: names in checkpoints stay the same, and hooks that an engine puts on a block (gathering its
weights) run outside of what is replaced."""

import functools
import logging
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from matmix.train.process.node_folders import use_caches

_ATEN = torch.ops.aten
_ATTENTION = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
# What is worth its memory: outputs of matrix products of weights and of attention, and of this project's own ops.
_SAVED_OPS = {_ATEN.mm.default, _ATEN.addmm.default}
_SAVED_OPS |= {getattr(_ATEN, f"_scaled_dot_product_{kind}").default for kind in _ATTENTION}


def _save_policy(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    if op in _SAVED_OPS or getattr(op, "namespace", None) == "matmix":
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def checkpoint_activations(
    model: nn.Module,
    mode: Literal["none", "full", "selective", "offload"],
    *,
    selective_by: Literal["block", "op"] = "block",
    every: int = 2,
    host: str = "cpu",
) -> None:
    """Lets blocks of `model.blocks` recompute activations in the backward pass instead of keeping them on the device.

    mode: "full" recomputes all of every block; "selective" by "block" does that for every `every`-th one, from the
    first on, by "op" for all of every block but matrix products and fused ops. Layers that can recompute parts of
    themselves (attribute `recompute`) do not in such a block: they would do so a third time, and hold what they keep.
    "offload" recomputes nothing: what blocks keep lies on the device `host` until the backward pass.
    """
    if mode == "none":
        return
    if mode == "offload":
        for block in model.blocks:
            block.forward = _keeping_elsewhere(block, host)
        return
    by_op = mode == "selective" and selective_by == "op"
    stride = every if mode == "selective" and selective_by == "block" else 1
    options: dict[str, Any] = {"use_reentrant": False}
    if by_op:
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _save_policy)
    for block in list(model.blocks)[::stride]:
        for module in block.modules():
            if getattr(module, "recompute", False):
                module.recompute = False
        block.forward = _recomputing(block.forward, options)


def _recomputing(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def recomputing_forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, **options, **kwargs)

    return recomputing_forward


def _keeping_elsewhere(block: nn.Module, host: str) -> Callable[..., Any]:
    """Returns the forward pass of a block that copies what it keeps to `host`, parameters and buffers excepted, which
    lie on the device anyway. Copies to and from pinned memory wait in the stream of the device, not on the host."""
    forward = block.forward

    @functools.wraps(forward)
    def offloading_forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # Storages, as views of weights are kept, too, and those of a pass: sharded weights are gathered by now.
        staying = {tensor.untyped_storage()._cdata for tensor in (*block.parameters(), *block.buffers())}

        def pack(tensor: torch.Tensor) -> tuple[torch.device, torch.Tensor]:
            if tensor.untyped_storage()._cdata in staying:
                return tensor.device, tensor
            # Strides stay: fused ops read in the backward pass what they wrote.
            copy = torch.empty_like(tensor, device=host, pin_memory=tensor.is_cuda)
            return tensor.device, copy.copy_(tensor, non_blocking=True)

        def unpack(packed: tuple[torch.device, torch.Tensor]) -> torch.Tensor:
            device, tensor = packed
            return tensor.to(device, non_blocking=True)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return forward(*args, **kwargs)

    return offloading_forward


def compile_blocks(model: nn.Module, **options: Any) -> None:
    """Compiles the forward pass of each block of `model.blocks` (equal blocks share one compilation). options: of
    torch.compile. Raises as `use_caches`."""
    use_caches()
    # A mixer notes its `monitor` values in forward. Without this, recomputed blocks that do so would not be compiled.
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    # With selective recomputing it reminds every user that blocks must not change tensors in place.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    for block in model.blocks:
        block.forward = torch.compile(block.forward, **options)


def compute_in_bfloat16(model: nn.Module, device: torch.device) -> None:
    """Runs the forward pass of `model` under bf16 autocast: parameters, gradients and reductions stay float32.

    Matrix products run in bf16. Norms, softmax, and whatever reads a parameter outside of a matrix product (A_log,
    dt_bias, D) see the float32 value, which a cast of all parameters to bf16 would round to 8 bits.
    """
    model.forward = torch.autocast(device.type, dtype=torch.bfloat16)(model.forward)

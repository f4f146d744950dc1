"""Changes to the blocks of a model that save memory, time or start-up time and, but for rounding, not its numbers. Each
replaces `forward` on the instance, fp8 in layers within: names in checkpoints stay the same, and hooks that an engine
puts on a block (gathering its weights) run outside of what is replaced."""

import dataclasses
import functools
import importlib.util
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
_SAVED_OPS = {_ATEN.mm.default, _ATEN.addmm.default, _ATEN._scaled_mm.default}
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


# -- fp8 -----------------------------------------------------------------------------------------------------------


def check_float8(recipe: str, device: torch.device) -> None:
    """Raises ValueError (one line) where matrix products cannot be computed in fp8."""
    wanted = f'engine.fp8 = "{recipe}" needs'
    gpus = "a GPU that multiplies numbers of fp8 (from NVIDIA L4, L40 and H100, and from AMD MI300 on)"
    if device.type != "cuda":
        raise ValueError(f"{wanted} {gpus}, and this run is on a {device.type.upper()}; leave engine.fp8 out")
    if torch.cuda.get_device_capability(device) < ((9, 4) if torch.version.hip else (8, 9)):
        raise ValueError(f"{wanted} {gpus}, and this is {torch.cuda.get_device_name(device)}; leave engine.fp8 out")
    if importlib.util.find_spec("torchao") is None:
        raise ValueError(f"{wanted} torchao: install the extra with pip install -e '.[lowbit]'")


def float8_maps(model: nn.Module) -> tuple[list[str], list[str]]:
    """Returns the names of the linear maps in `model.blocks` whose products can be in fp8, and of the others: whose
    sizes are not multiples of 16, as GPUs want, which have a class of their own, such as gates, or which their mixer
    names in `not_float8`. Raises ValueError (one line) where no product can."""
    found: tuple[list[str], list[str]] = [], []
    kept = set()
    for prefix, module in model.blocks.named_modules(prefix="blocks"):
        kept |= {f"{prefix}.{name}" for name in getattr(module, "not_float8", ())}
        if isinstance(module, nn.Linear):
            fits = type(module) is nn.Linear and prefix not in kept and not any(n % 16 for n in module.weight.shape)
            found[not fits].append(prefix)
    if not found[0]:
        raise ValueError(
            "engine.fp8: no linear map in the layers of this model can be computed in fp8, which takes sizes that are "
            "multiples of 16; leave it out"
        )
    return found


def compute_in_float8(model: nn.Module, recipe: str, *, emulate: bool = False) -> None:
    """Lets torchao compute the products of the first of `float8_maps`, in both passes. Parameters stay what they are.
    It comes before all other changes.

    recipe: "tensorwise" or "rowwise". emulate: round to fp8 and multiply in float32, on any device. Raises as
    `float8_maps`.
    """
    names, _ = float8_maps(model)
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    # Products for a weight's gradient sum over tokens, of which there may be any number.
    options = {"pad_inner_dim": True, "emulate": emulate}
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), **options)
    convert_to_float8_training(model, module_filter_fn=lambda _, name: name in names, config=config)
    for name in names:
        module = model.get_submodule(name)
        module.rounded = ("weight",)  # ranks may still send them in bf16
        module.forward = _of_contiguous(module.forward)


def _of_contiguous(forward: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """torchao cannot reshape others whose rows have a scale each."""
    return lambda x: forward(x.contiguous())

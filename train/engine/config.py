"""Configuration of the engine."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Literal

from matmix.train.errors import require_at_least


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Says how the model is spread over devices, which changes speed and memory, not the losses."""

    name: Literal["fsdp2", "ddp", "deepspeed"] = "fsdp2"
    """fsdp2 shards weights, gradients and moments (PyTorch's fully_shard); ddp keeps a copy of them on every
    rank; deepspeed is ZeRO at `zero_stage`."""
    replicate: int = 1
    """fsdp2: number of copies of the sharded model; above 1 is hybrid sharding (HSDP), ranks / replicate
    share a copy."""
    context: int = 1
    """fsdp2, ddp: number of ranks, one beside the other, that share the rows of a micro-batch: each has an equal part
    of their tokens, and layers exchange what crosses the cuts. For sequences that are too long for one device."""
    reshard_after_forward: bool = True
    """fsdp2: free gathered weights after a block's forward pass and gather them again in the backward
    pass."""
    zero_stage: Literal[0, 1, 2, 3] = 2
    """deepspeed: 0 = copies, 1 = moments sharded, 2 = and gradients, 3 = and weights."""
    offload: bool = False
    """deepspeed, stages 1 to 3: keep moments, and the weights and gradients that they update, in (pinned) host memory,
    where the host's processor updates them (ZeRO-Offload)."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: matrix products in bf16 (autocast), and fsdp2, ddp and ZeRO 3 gather the matrices in bf16; weights, moments
    and all that is no matrix product stay float32."""
    fp8: Literal["", "tensorwise", "rowwise"] = ""
    """Matrix products of the linear maps in blocks in fp8, by torchao's recipe of this name: one scale for a tensor, or
    one for each row. For GPUs that have such products, with precision bf16, which all others keep."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """What gradients are summed over ranks in; over micro-batches always in float32."""
    activation_checkpointing: Literal["none", "full", "selective", "offload"] = "none"
    """Recompute activations in the backward pass: in no block, every block, or as `selective_by` says. offload:
    recompute nothing, and keep what blocks need for it in (pinned) host memory."""
    selective_by: Literal["block", "op"] = "block"
    """selective: all of every `selective_every`-th block, or in every block all but matrix products and fused
    ops."""
    selective_every: int = 2
    """selective by block: every how many blocks one is recomputed."""
    compile: bool = False
    """torch.compile each block (half a minute at the start)."""
    cuda_graph: bool = False
    """Record what a step launches on the GPU as one CUDA graph and replay it for each further step, which saves the
    host's time between short kernels. For one process with adamw and batches of one shape."""

    @property
    def kind(self) -> str:
        """The name of the engine's kind in `matmix.train.engine.kinds` and in checkpoints."""
        return "deepspeed" if self.name == "deepspeed" else "torch"

    @property
    def sends_rounded(self) -> bool:
        """True if ranks gather in bf16 the weights that bf16 rounds before they are used."""
        return self.precision == "bf16" and (self.kind == "torch" or self.zero_stage == 3)

    @property
    def shards_all(self) -> bool:
        """True if ranks share weights, gradients and moments, and hold copies of none of them."""
        return self.name == "fsdp2" or (self.name == "deepspeed" and self.zero_stage == 3)

    @property
    def words(self) -> str:
        """The engine and its settings in a few words."""
        name = f"{self.name} stage {self.zero_stage}" if self.name == "deepspeed" else self.name
        by = f" by {self.selective_by}" if self.activation_checkpointing == "selective" else ""
        sums = ", sums in bf16" if self.reduce_dtype == "bf16" else ""
        name += ", offloaded" if self.offload else ""
        name += ", steps as a CUDA graph" if self.cuda_graph else ""
        precision = f"{self.precision}, fp8 {self.fp8}" if self.fp8 else self.precision
        return f"{name}, {precision}{sums}, activation checkpointing {self.activation_checkpointing}{by}"

    def __post_init__(self) -> None:
        require_at_least(self, "engine.", replicate=1, context=1, selective_every=1)
        if self.replicate > 1 and self.name != "fsdp2":
            raise ValueError(f'engine.replicate = {self.replicate} needs engine.name = "fsdp2", got "{self.name}"')
        if self.context > 1 and self.name == "deepspeed":
            raise ValueError(f'engine.context = {self.context} needs engine.name = "fsdp2" or "ddp", got "{self.name}"')
        if self.offload and (self.name != "deepspeed" or not self.zero_stage):
            got = f'"{self.name}"' + ", stage 0" * (self.name == "deepspeed")
            raise ValueError(
                f'engine.offload needs engine.name = "deepspeed" at engine.zero_stage = 1, 2 or 3, got {got}'
            )
        if self.fp8 and self.precision != "bf16":
            raise ValueError(f'engine.fp8 = "{self.fp8}" needs engine.precision = "bf16", got "{self.precision}"')
        if self.fp8 and self.name == "deepspeed" and self.zero_stage == 3:
            # Each product would hold on to the weight that was gathered for it, until its backward pass.
            raise ValueError(
                f'engine.fp8 = "{self.fp8}" does not work with DeepSpeed at engine.zero_stage = 3; use stage 2, or '
                'engine.name = "fsdp2"'
            )
        if self.cuda_graph:
            if self.name == "deepspeed":
                raise ValueError('engine.cuda_graph needs engine.name = "fsdp2" or "ddp", got "deepspeed"')
            plain = {"replicate": 1, "context": 1, "activation_checkpointing": "none", "compile": False, "fp8": ""}
            for other, value in plain.items():
                if (got := getattr(self, other)) != value:
                    wanted, got = json.dumps(value), json.dumps(got)
                    raise ValueError(f"engine.cuda_graph needs engine.{other} = {wanted}, got {got}")
        if self.activation_checkpointing == "offload":
            advice = 'use "full" or "selective"'
            if self.compile:
                raise ValueError(f'engine.activation_checkpointing = "offload" excludes engine.compile: {advice}')
            if self.name == "deepspeed" and self.zero_stage == 3:
                # What a pass keeps would hold on to weights that were gathered for it.
                raise ValueError(
                    'engine.activation_checkpointing = "offload" does not work with DeepSpeed at engine.zero_stage = '
                    f"3: {advice}, or stage 2"
                )
        if self.compile and self.name == "deepspeed" and self.zero_stage == 3:
            # Its hooks on the modules inside a block would be compiled with them: gradients come out wrong.
            raise ValueError(
                "engine.compile does not work with DeepSpeed at engine.zero_stage = 3; "
                'use stage 2, or engine.name = "fsdp2"'
            )


# -- layouts of checkpoints ----------------------------------------------------------------------------------------

COUNTS: dict[str, tuple[str, ...]] = {"torch": (), "deepspeed": ("zero_stage",), "portable": ()}
"""What layouts call the engine that wrote them -> the numbers that only such layouts have."""


def title(layout: Mapping[str, Any]) -> str:
    """Returns what lists call a checkpoint with this layout."""
    return f"{layout['engine']}, ZeRO-{layout['zero_stage']}" if "zero_stage" in layout else layout["engine"]

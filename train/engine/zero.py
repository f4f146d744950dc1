"""DeepSpeed ZeRO behind the engine interface: stage 0 (copies) to stage 3 (everything sharded).

DeepSpeed runs in its float32 mode at every precision: bf16 is the same autocast as in the other engine, so that weights
and reductions stay float32 and both engines give the same losses (in bf16 up to its rounding: stage 3 replaces torch's
linear layer by one that keeps no gathered weights and rounds before it adds the bias). Its averages over ranks are
cancelled by multiplying the loss with the number of ranks; micro-batches are counted here, never by DeepSpeed.

Weights are drawn in host memory, whole on every rank, and ZeRO-3 then moves and partitions them one tensor at a time:
`deepspeed.zero.Init` around the construction of a model would draw them per rank and in another order. The price is a
float32 copy of the model in host memory per rank while a run starts.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import nn

from matmix.train.engine.base import Engine, Initialize, MakeOptimizer, Snapshot, is_on_meta, persistent_tensors
from matmix.train.engine.clipping import agree_on_norms, clip_groups, clip_limits
from matmix.train.engine.config import EngineConfig
from matmix.train.engine.full_state import MODEL, OPTIMIZER, FullState, fill, kept_entries
from matmix.train.engine.mesh import Mesh
from matmix.train.engine.zero_files import SUBDIRECTORY, make_files, write_files
from matmix.train.optim.averaging import AVERAGE, STEPS, swap_average
from matmix.train.optim.base import OTHERS
from matmix.train.process.distributed import Distributed, ensure_group, is_distributed

# Passed on to DeepSpeed as "zero_optimization", together with the stage.
ZERO_OPTIONS: dict[str, Any] = {}


def import_deepspeed(device: torch.device) -> ModuleType:
    """Imports DeepSpeed, told before what it would otherwise find out with warnings and compilers."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
    # The CPU's shared-memory collective would be compiled now (half a minute); gloo does the same work.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


class ZeroEngine(Engine):
    """The engine behind `name = "deepspeed"`."""

    kind = "deepspeed"

    def __init__(self, config: EngineConfig, distributed: Distributed, mesh: Mesh) -> None:
        super().__init__(config, distributed, mesh)
        assert mesh.copies == mesh.data_size == mesh.size, "DeepSpeed cuts by itself what all ranks have copies of"
        self.deepspeed = import_deepspeed(distributed.device)
        # DeepSpeed insists on a process group and on torchrun's variable, also in a single process.
        ensure_group(distributed.device)
        os.environ.setdefault("LOCAL_RANK", str(distributed.local_rank))

    def _place(self, model: nn.Module, initialize: Initialize, make_optimizer: MakeOptimizer) -> None:
        stage = self.config.zero_stage
        home = torch.device("cpu") if stage == 3 else self.device
        model.to_empty(device=home) if is_on_meta(model) else model.to(home)
        initialize(model)
        settings = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": stage, **ZERO_OPTIONS},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": None,
            "checkpoint": {"tag_validation": "Ignore"},
        }
        if stage == 3:
            self.deepspeed.zero.Init(module=model, config_dict_or_path=settings, dtype=torch.float32)
            for module in model.modules():
                for name, buffer in module.named_buffers(recurse=False):
                    setattr(module, name, buffer.to(self.device))
        optimizer = make_optimizer(model)
        if stage > 0 and not optimizer.elementwise:
            names = [type(part).__name__ for part in optimizer.parts.values() if not part.elementwise]
            raise ValueError(
                f"{names[0] if names else type(optimizer).__name__} does not update each element by itself, and "
                "DeepSpeed cuts parameters into pieces at engine.zero_stage >= 1; use stage 0, or "
                'engine.name = "fsdp2"'
            )
        self.model, self.optimizer, _, _ = self.deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
        self.files = make_files()
        self.model.checkpoint_engine = self.files
        self.model._copy_recovery_script = lambda _path: None  # a script in every checkpoint is not wanted

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        self.model.set_gradient_accumulation_boundary(last)
        self.model.backward(loss * self.world_size)

    @torch.no_grad()
    def step(self, max_norm: float) -> torch.Tensor:
        if self.config.zero_stage == 0:
            return self._step_of_copies(max_norm)
        limits = clip_limits(self.optimizer.param_groups, max_norm)
        self.optimizer.clip_grad, norm = 0.0, None
        if len(limits) == 1:
            self.optimizer.clip_grad = limits.popitem()[1]  # the whole is one group: DeepSpeed clips it
        else:
            norm = self._clip_apart(limits)
        self.model.step()  # leaves everything as it is when the norm is not finite
        if self.optimizer.overflow:
            norm = math.inf
        elif norm is None:
            norm = self.model.get_global_grad_norm()
        return torch.as_tensor(norm, dtype=torch.float32, device=self.device)

    def _clip_apart(self, limits: dict[str, float]) -> torch.Tensor:
        """Clips each clipping group, over all ranks, before DeepSpeed's own step, and returns the norm of all gradients
        before. If that is not finite they are left alone: DeepSpeed sees it as well and drops the step."""
        optimizer, third = self.optimizer, self.config.zero_stage == 3
        # DeepSpeed's groups are the optimizer's, at stage 3 in pieces: what of each lies here.
        parts = optimizer.fp16_groups if third else optimizer.params_in_partition
        gradients: dict[str, list[torch.Tensor]] = {name: [] for name in limits}
        squares = {name: torch.zeros((), device=self.device) for name in limits}
        for index, part in enumerate(parts):
            group = optimizer.param_groups[optimizer.sub_group_to_group_id[index] if third else index]
            name = group.get("clip_group", OTHERS)
            tensors = optimizer.averaged_gradients[index]
            gradients[name] += tensors
            norm = optimizer.get_grad_norm_direct(tensors, part)  # over all ranks; -1 where it is not finite
            squares[name] += torch.where(norm < 0, math.inf, norm.square())
        norms = torch.stack(list(squares.values())).sqrt()
        norm, _, self.clip_norms = clip_groups(gradients, norms, limits)
        return norm

    def _step_of_copies(self, max_norm: float) -> torch.Tensor:
        def agreed(norms: torch.Tensor) -> torch.Tensor:
            if is_distributed():
                norms, self.gradients_differ = agree_on_norms(norms, norms, None)
            return norms

        norm, is_finite = self.clip(max_norm, agreed)
        self.model.step() if is_finite else self.model.zero_grad()
        return norm

    def swap_averages(self) -> None:
        if self.config.zero_stage > 0:
            swap_partitioned_averages(self.optimizer)
        else:
            super().swap_averages()

    # -- copies ------------------------------------------------------------------------------------------

    def copied_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.config.zero_stage == 3:
            return
        for name, parameter in self.module.named_parameters():
            yield f"model.{name}", parameter.detach()
        if self.config.zero_stage == 0:
            for name, entries in self.optimizer.named_state():
                for entry, value in entries.items():
                    yield f"optimizer.{name}.{entry}", torch.as_tensor(value)

    def common_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        parameters = {name for name, _ in self.module.named_parameters()}
        return ((f"model.{name}", tensor) for name, tensor in self.named_tensors() if name not in parameters)

    # -- checkpoints -------------------------------------------------------------------------------------

    def layout(self) -> dict[str, Any]:
        layout = {**super().layout(), "zero_stage": self.config.zero_stage}
        if self.config.zero_stage == 0:  # whose file has numbers instead of names
            layout["optimizer"] = [name for name, _, _ in self.optimizer.named_parameters()]
        return layout

    def snapshot(self, *, copy: bool) -> Snapshot:
        self.files.contents = {}
        self.model.save_checkpoint("snapshot", tag=SUBDIRECTORY, save_latest=False)  # nothing is written to there
        contents, self.files.contents = self.files.contents, {}
        return Snapshot(self.host.copy(contents) if copy else contents, write_files)

    # DeepSpeed's own reader wants the same stage and number of ranks, and takes the options of the optimizer from the
    # file.
    def load(self, state: FullState) -> None:
        if self.config.zero_stage > 0:
            load_partitioned(self.optimizer, self.module, state, self.rank)
        else:
            super().load(state)

    def load_weights(self, state: FullState) -> None:
        if self.config.zero_stage > 0:
            load_partitioned_weights(self.optimizer, self.module, state, self.rank)
        else:
            super().load_weights(state)


# -- from full states into the partitions of ZeRO 1 to 3, at any number of ranks --------------------------------------
#
# In float32 the weights of the forward pass and those that the optimizer updates are equal, so that filling the former
# and copying is exact. Moments are laid out like the weights: one flat tensor for each group of the optimizer, of which
# a rank holds a part.

# (name of a tensor, its first element on this rank, number of elements, where they lie in the flat tensor)
_Fragment = tuple[str, int, int, int]


@torch.no_grad()
def load_partitioned(optimizer: Any, module: nn.Module, state: FullState, rank: int) -> None:
    """Loads weights, buffers and what the optimizer keeps; optimizer: DeepSpeed's, of stage 1, 2 or 3.

    Raises ValueError where one number of each kind for each group, all that DeepSpeed has room for, is not enough."""
    is_third, own = hasattr(optimizer, "fp16_partitioned_groups"), optimizer.optimizer
    parameters = dict(module.named_parameters())
    held = kept_entries(state, own, parameters)
    names = {parameter: name for name, parameter in parameters.items()}
    parts = list((_thirds if is_third else _partitions)(optimizer, names, rank))
    numbers = [_numbers(group, held, state) for _, group, _ in parts]
    load_partitioned_weights(optimizer, module, state, rank)
    for index, ((flat, group, fragments), of_group) in enumerate(zip(parts, numbers, strict=True)):
        entries = own.state[flat] = {}
        if not any(name in held for name in group):
            continue  # never updated
        options = own.param_groups[optimizer.sub_group_to_group_id[index] if is_third else index]
        for entry, tensor in own.whole_state(flat.detach(), options).items():
            if entry in (AVERAGE, STEPS) and STEPS not in of_group:
                continue  # it begins with the next step
            if entry == AVERAGE:
                tensor.copy_(flat)  # those that have none yet begin with the weights
            if tensor.shape:
                for name, start, numel, offset in fragments:
                    if name in held:
                        _copy(tensor, offset, state, f"{OPTIMIZER}{name}.{entry}", start, numel)
            else:
                tensor.fill_(of_group[entry])
            entries[entry] = tensor


@torch.no_grad()
def load_partitioned_weights(optimizer: Any, module: nn.Module, state: FullState, rank: int) -> None:
    """Fills the weights and buffers that `state` has; optimizer: DeepSpeed's, of stage 1, 2 or 3."""
    is_third = hasattr(optimizer, "fp16_partitioned_groups")
    if is_third:
        optimizer.checkpoint_event_prologue()  # partitions what is gathered at the moment
    for name, tensor in persistent_tensors(module):
        if MODEL + name not in state.entries:
            continue
        if hasattr(tensor, "ds_tensor"):
            part = tensor.ds_tensor.numel()
            numel = min(part, state.entries[MODEL + name].numel - rank * part)
            _copy(tensor.ds_tensor.data, 0, state, MODEL + name, rank * part, numel)
        else:
            fill(tensor.detach(), state, MODEL + name)
    optimizer.refresh_fp32_params()
    if is_third:
        optimizer.checkpoint_event_epilogue()


@torch.no_grad()
def swap_partitioned_averages(optimizer: Any) -> None:
    """Lets the weights that the optimizer updates and their averages change places, also for the forward pass;
    optimizer: DeepSpeed's, of stage 1, 2 or 3."""
    is_third = hasattr(optimizer, "fp16_partitioned_groups")
    groups = optimizer.fp32_partitioned_groups_flat if is_third else optimizer.single_partition_of_fp32_groups
    if is_third:
        optimizer.checkpoint_event_prologue()  # partitions what is gathered at the moment
    for flat in groups:
        swap_average(flat, optimizer.optimizer.state.get(flat))
    if is_third:
        for part, flat in zip(optimizer.fp16_partitioned_groups_flat, groups, strict=True):
            part.data.copy_(flat.data)  # which the parameters' parts are views of
        optimizer.checkpoint_event_epilogue()
    else:
        optimizer.update_lp_params()


def _numbers(group: list[str], held: Mapping[str, list[str]], state: FullState) -> dict[str, float]:
    """Returns the numbers, such as counts of steps, that the optimizer keeps of the tensors of a group."""
    updated = [name for name in group if name in held]
    agreed = {}
    for entry in held[updated[0]] if updated else ():
        if state.entries[f"{OPTIMIZER}{updated[0]}.{entry}"].shape:
            continue
        numbers = {state.read(f"{OPTIMIZER}{name}.{entry}").item() for name in updated}
        if len(numbers) > 1:
            raise ValueError(
                f"the checkpoint's parameters were updated unequally often ({min(numbers):.0f} to {max(numbers):.0f} "
                "times), which DeepSpeed cannot continue at engine.zero_stage >= 1; use stage 0, or "
                'engine.name = "fsdp2"'
            )
        agreed[entry] = numbers.pop()
    return agreed


def _copy(target: torch.Tensor, offset: int, state: FullState, key: str, start: int, numel: int) -> None:
    if numel > 0:
        target[offset : offset + numel].copy_(state.read(key, start, start + numel))


_Names = Mapping[torch.Tensor, str]
_Parts = Iterator[tuple[torch.Tensor, list[str], list[_Fragment]]]


def _partitions(optimizer: Any, names: _Names, _rank: int) -> _Parts:
    """Yields, for each group at stages 1 and 2, this rank's flat tensor, the names of all tensors of the group, and the
    fragments of them that lie here."""
    for group, flat in zip(optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups, strict=True):
        fragments = []
        for parameter in group:
            if parameter._hp_mapping is not None:
                here, there = parameter._hp_mapping.lp_fragment_address, parameter._hp_mapping.hp_fragment_address
                fragments.append((names[parameter], here.start, here.numel, there.start))
        yield flat, [names[parameter] for parameter in group], fragments


def _thirds(optimizer: Any, names: _Names, rank: int) -> _Parts:
    """Yields the same at stage 3, where each rank holds an equal part of each tensor, the last one padded."""
    for group, flat in zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True):
        fragments, offset = [], 0
        for parameter in group:
            part = parameter.partition_numel()
            numel = min(part, parameter.ds_numel - rank * part)
            fragments.append((names[parameter], rank * part, numel, offset))
            offset += part
        yield flat, [names[parameter] for parameter in group], fragments

"""Loads a full state into DeepSpeed's partitions (ZeRO 1 to 3), at any number of ranks.

In float32 the weights of the forward pass and those that the optimizer updates are equal, so that filling the
former and copying is exact. The moments are laid out like the weights: one flat tensor for each group of the
optimizer, of which a rank holds a part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from matmix.train.engine.base import persistent_tensors
from matmix.train.engine.full_state import MODEL, OPTIMIZER, FullState
from matmix.train.engine.loading import fill, kept_entries
from matmix.train.optim.averaging import AVERAGE, STEPS, swap_average

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
    """Lets the weights that the optimizer updates and their averages change places, and the forward pass have what is
    in the weights' place then; optimizer: DeepSpeed's, of stage 1, 2 or 3."""
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


def _partitions(
    optimizer: Any, names: Mapping[torch.Tensor, str], _rank: int
) -> Iterator[tuple[torch.Tensor, list[str], list[_Fragment]]]:
    """Of each group at stages 1 and 2: this rank's flat tensor, all tensors of the group, and what of them lies
    here."""
    for group, flat in zip(optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups, strict=True):
        fragments = []
        for parameter in group:
            if parameter._hp_mapping is not None:
                here, there = parameter._hp_mapping.lp_fragment_address, parameter._hp_mapping.hp_fragment_address
                fragments.append((names[parameter], here.start, here.numel, there.start))
        yield flat, [names[parameter] for parameter in group], fragments


def _thirds(
    optimizer: Any, names: Mapping[torch.Tensor, str], rank: int
) -> Iterator[tuple[torch.Tensor, list[str], list[_Fragment]]]:
    """The same at stage 3, where each rank holds an equal part of each tensor, the last one padded."""
    for group, flat in zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True):
        fragments, offset = [], 0
        for parameter in group:
            part = parameter.partition_numel()
            numel = min(part, parameter.ds_numel - rank * part)
            fragments.append((names[parameter], rank * part, numel, offset))
            offset += part
        yield flat, [names[parameter] for parameter in group], fragments

"""Clipping by groups: "clip_group" of the optimizer's groups says which parameters are clipped together, "clip" to
which norm; without, all are clipped to the norm of the run.

The norm that clips a step, or drops it, must be the same on every copy of the model, also where a device or a memory
changes bits: a copy that saw a NaN alone would drop its step alone.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from matmix.train.optim.base import OTHERS, local_part

Gradients = Mapping[str, Sequence[torch.Tensor]]
"""Name of a clipping group -> this rank's part of its gradients."""


def clip_limits(param_groups: Iterable[Mapping[str, Any]], max_norm: float) -> dict[str, float]:
    """Returns the norm that each clipping group is clipped to (0 = not), in the order of the optimizer's groups.
    max_norm: of those that no rule clips apart."""
    limits = {}
    for group in param_groups:
        name = group.get("clip_group", OTHERS)
        limits[name] = max_norm if name == OTHERS else group["clip"]
    return limits


def gradients_by_clip_group(
    param_groups: Iterable[Mapping[str, Any]], parameters: Iterable[torch.Tensor]
) -> dict[str, list[torch.Tensor]]:
    """Returns this rank's part of the gradients of each clipping group, maybe none, in the order of `parameters`."""
    groups = {p: group.get("clip_group", OTHERS) for group in param_groups for p in group["params"]}
    gradients: dict[str, list[torch.Tensor]] = {name: [] for name in groups.values()}
    for parameter in parameters:
        if parameter.grad is not None:
            gradients[groups[parameter]].append(local_part(parameter.grad))
    return gradients


def norms_of(gradients: Gradients, device: torch.device) -> torch.Tensor:
    """Returns the norm of each group, (groups,)."""
    none = torch.zeros((), device=device)
    norms = [torch._foreach_norm(tensors) if tensors else [none] for tensors in gradients.values()]
    return torch.stack([torch.linalg.vector_norm(torch.stack(of_group)) for of_group in norms])


def clip_groups(
    gradients: Gradients, norms: torch.Tensor, limits: Mapping[str, float], *, waits: bool = True
) -> tuple[torch.Tensor, bool | torch.Tensor, dict[str, torch.Tensor]]:
    """Scales the gradients of each group, in place, so that its norm is within its limit; where one is not finite, all
    are left alone. Returns the norm of all gradients before, 0-dim, whether it is finite, and the norms of the groups
    for a record, where there are several. waits: for the device; without, whether it is finite is a tensor, and
    gradients of a norm that is not are of no use."""
    whole = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(norms)
    is_finite = math.isfinite(whole.item()) if waits else torch.isfinite(whole)
    for (name, tensors), norm in zip(gradients.items(), norms, strict=True):
        if (not waits or is_finite) and tensors and limits[name] > 0:
            torch._foreach_mul_(tensors, torch.clamp(limits[name] / (norm + 1e-6), max=1.0))
    return whole, is_finite, dict(zip(limits, norms, strict=True)) if len(limits) > 1 else {}


def agree_on_norms(
    norms: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the largest of the copies' `norms`, a NaN above all, and whether their `own` norms differed, 0-dim bool.
    norms and own: float32, (n,) and (m,), never negative. group: the ranks with the copies. The host does not wait."""
    # The bits of floats that are not negative are in the order of the floats, those of a NaN above infinity's. What a
    # maximum of floats makes of a NaN differs between communication libraries.
    bits, own = _bits(norms), _bits(own)
    largest = torch.cat([bits, own, -own])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    agreed, high, low = largest.split([bits.numel(), own.numel(), own.numel()])
    return agreed.to(torch.int32).view(torch.float32), (high != -low).any()


def _bits(norms: torch.Tensor) -> torch.Tensor:
    return norms.float().contiguous().view(torch.int32).to(torch.int64) & 0x7FFFFFFF

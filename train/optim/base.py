"""The base class of optimizers: a torch optimizer that states what it keeps for each parameter."""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple, Self

import torch
import torch.distributed as dist

from matmix.train.arguments import NoOptions
from matmix.train.optim.config import OptimizerConfig

OTHERS = "others"
"""The clipping group of the parameters that no rule clips apart."""
State = dict[str, torch.Tensor]
"""The entries that an optimizer keeps of one parameter, by name."""


class StepCost(NamedTuple):
    """What a step takes, on the rank with the most to do, beside the update of each element by itself."""

    flops: float = 0.0
    """Of matrix products."""
    bytes: float = 0.0
    """Of buffers, when most are in use."""
    precision: str = "fp32"
    """What the products compute in, as engine.precision says it."""


class Optimizer(torch.optim.Optimizer):
    """An optimizer that a recipe can name. Engines, checkpoints and estimates ask it for what it keeps of each
    parameter.

    `param_groups` come with "lr", "weight_decay", the "param_names" of their "params" and what engines and the loop
    need; `step` reads them and changes parameters in place. Parameters may be parts of the model's: sharded (DTensor),
    or flat under DeepSpeed, where a group has one of them for all its names.
    """

    elementwise: bool = True
    """True where the update of an element depends on no other element. DeepSpeed from ZeRO stage 1 on hands an
    optimizer flat pieces of several parameters, and takes none whose updates are not elementwise."""
    of_linear_maps: ClassVar[bool] = False
    """True where it updates linear maps as wholes: it is given no matrix of which its mixer says that it is none, and
    updates apart what "blocks" of a group says to stand one below the other in each of its parameters."""
    steps_like_adamw: ClassVar[bool] = False
    """True where an element's steps have about the size of the rate, whatever the sizes of gradients and weights are:
    what the rules of `optimizer.mup_base_width` are made for."""
    cut: ClassVar[frozenset[str]] = frozenset()
    """Entries of other shapes than their parameter's of which ranks hold rows as they do of it; others of other shapes
    all ranks hold whole."""
    sent_bytes: int = 0
    """Bytes of an element that ranks send to the one that updates it; as many are sent back."""
    capturable: ClassVar[bool] = False
    """True where a CUDA graph can hold `step`: it reads nothing from the device, rates may be tensors, and it changes
    nothing where its attribute `found_inf`, float32 and 0-dim, is 1."""
    Options: ClassVar[type] = NoOptions
    """Frozen dataclass of its options in [optimizer.options]; every field has a default."""
    parts: Mapping[str, Optimizer] = types.MappingProxyType({})
    """The optimizers behind this object, by the names that recipes say; empty: itself alone."""
    also_kept: Callable[[torch.Tensor], State] = staticmethod(lambda parameter: {})
    """Makes the entries that others add to what it keeps of a parameter, such as an average."""

    # As torch wraps this one, it imports torch's compiler, which takes a second at the start of every run.
    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)

    @classmethod
    def from_config(cls, groups: list[dict[str, Any]], config: OptimizerConfig, options: Any) -> Self:
        """Makes the optimizer of a run; options: an instance of `Options`."""
        return cls(groups, lr=config.lr, **dataclasses.asdict(options))

    @classmethod
    def takes(cls, name: str, shape: torch.Size) -> bool:
        """Returns whether it can update the parameter `name` of this shape; AdamW updates what it cannot."""
        return True

    def new_state(self, parameter: torch.Tensor) -> State:
        """Makes all that is kept of `parameter` before the first step: new tensors on its device, maybe the meta
        device. Numbers, such as a count of steps, are 0-dim tensors. An entry in the parameter's shape comes from
        `torch.zeros_like(parameter)`, so that it is sharded as the parameter is."""
        raise NotImplementedError(f"{type(self).__name__} has no method new_state")

    def state_of(self, parameter: torch.Tensor) -> State:
        """Returns what is kept of `parameter`; for use in `step`."""
        if not self.state.get(parameter):
            self.state[parameter] = self.new_state(parameter)
        return self.state[parameter]

    def with_gradients(self) -> Iterator[tuple[torch.Tensor, State, dict[str, Any]]]:
        """Yields each parameter that has a gradient, what is kept of it, and its group; for use in `step`."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    yield parameter, self.state_of(parameter), group

    # -- for engines, checkpoints and estimates ----------------------------------------------------------

    def part_of(self, group: Mapping[str, Any]) -> Optimizer:
        """Returns the optimizer that updates the parameters of a group."""
        return self

    def whole_state(self, parameter: torch.Tensor, group: Mapping[str, Any]) -> State:
        """Makes `new_state` of a parameter of `group`, with what others add."""
        return {**self.part_of(group).new_state(parameter), **self.also_kept(parameter)}

    def step_cost(self, copies: int, parts: int) -> StepCost:
        """Returns what a step takes where ranks hold so many `copies` of each parameter, each in so many `parts`; the
        parameters may be on the meta device."""
        return StepCost()

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor, dict[str, Any]]]:
        """Yields the name, the parameter and its group, where parameters are not flat."""
        for group in self.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                yield name, parameter, group

    def named_state(self) -> Iterator[tuple[str, State]]:
        """Yields the name of each parameter that was updated and what is kept of it, where parameters are not flat."""
        return ((name, state) for name, one, _ in self.named_parameters() if (state := self.state.get(one)))

    def entries(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, State]:
        """Returns what is kept of each of the model's `parameters`, sharded or not, once it is updated: tensors on the
        meta device in the shapes of whole parameters."""
        return {
            name: self.whole_state(torch.empty(full_shape(parameters[name]), device="meta"), group)
            for group in self.param_groups
            for name in group["param_names"]
        }


class SeveralOptimizers(Optimizer):
    """Optimizers that each update some of the groups, as one object: one `step`, one list of groups, one state."""

    def __init__(self, parts: Mapping[str, Optimizer], groups: list[dict[str, Any]]) -> None:
        """parts: by the name that a group says in "optimizer"; groups: those of all parts, in the order of the run."""
        super().__init__(groups, {})
        self.parts = parts
        self.elementwise = all(part.elementwise for part in parts.values())

    def part_of(self, group: Mapping[str, Any]) -> Optimizer:
        return self.parts[group["optimizer"]]

    def step_cost(self, copies: int, parts: int) -> StepCost:
        costs = [part.step_cost(copies, parts) for part in self.parts.values()]
        return max(costs)._replace(bytes=max(cost.bytes for cost in costs))  # one has products, they step in turn

    def step(self, closure: None = None) -> None:
        for name, part in self.parts.items():
            # DeepSpeed puts other groups here for a while, one at a time.
            part.param_groups = [group for group in self.param_groups if group["optimizer"] == name]
            part.state = self.state
            if part.param_groups:
                part.step()


def is_sharded(tensor: torch.Tensor) -> bool:
    """Returns whether it is a DTensor, without the import of that class, which takes half a second of a start."""
    return hasattr(tensor, "to_local")


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Returns what this rank holds of a tensor, sharded or not."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def region(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shape of this rank's part of a tensor, and where it begins in the whole."""
    if not is_sharded(tensor):
        return tuple(tensor.shape), (0,) * tensor.dim()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)


def rows_here(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the first and behind the last row of a tensor of which this rank holds elements; (0, 1) for a number."""
    shape, offset = region(tensor)
    return (offset[0], offset[0] + shape[0]) if shape else (0, 1)


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor as a whole, gathered from the ranks that hold its parts if it is sharded: by all of them."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def copy_rows_here(tensor: torch.Tensor, whole: torch.Tensor) -> None:
    """Copies a whole tensor into what this rank holds of `tensor`, sharded along rows or not."""
    local_part(tensor).copy_(whole[slice(*rows_here(tensor))] if is_sharded(tensor) else whole)


def sum_over_parts(values: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Returns the sum of `values` over the ranks that hold other parts of `tensor`, if it is sharded: with the same
    bits on all of them, and so on all copies."""
    for dimension, placement in enumerate(getattr(tensor, "placements", ())):
        if placement.is_shard() and (size := tensor.device_mesh.size(dimension)) > 1:
            gathered = values.new_empty(size * values.numel())
            dist.all_gather_into_tensor(gathered, values.flatten(), group=tensor.device_mesh.get_group(dimension))
            values = gathered.view(size, *values.shape).sum(0)
    return values


def full_shape(tensor: torch.Tensor) -> torch.Size:
    """Returns the shape of the whole tensor, also under ZeRO-3, which leaves an empty tensor in its place."""
    return getattr(tensor, "ds_shape", tensor.shape)

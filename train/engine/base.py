"""The interface of an engine to the training loop, and snapshots: what a rank writes into a checkpoint."""

import abc
import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from matmix.data.loading.batch import Batch
from matmix.kernels.context import Context
from matmix.train.activation import (
    checkpoint_activations,
    compile_blocks,
    compute_in_bfloat16,
    compute_in_float8,
)
from matmix.train.engine.clipping import clip_groups, clip_limits, gradients_by_clip_group, norms_of
from matmix.train.engine.config import EngineConfig
from matmix.train.engine.full_state import MODEL, FullState, fill, state_to_fill
from matmix.train.engine.mesh import Mesh
from matmix.train.optim.averaging import swap_average
from matmix.train.optim.base import Optimizer, full_shape, is_sharded, local_part
from matmix.train.process.distributed import Distributed, is_distributed

State = TypeVar("State")
Initialize = Callable[[nn.Module], None]
MakeOptimizer = Callable[[nn.Module], Optimizer]


@dataclasses.dataclass(eq=False)
class Snapshot:
    """This rank's part of a checkpoint. It keeps its tensors alive: drop it when it is written."""

    state: Any
    writer: Callable[[Any, Path, dist.ProcessGroup | None], None]

    def write(self, directory: Path, group: dist.ProcessGroup | None = None) -> None:
        """Writes it below `directory` and to the disk, on all ranks together; in any thread, if `group` is its own (see
        `distributed.gather_objects`). Raises OSError where the storage failed, on that rank at least."""
        self.writer(self.state, directory, group)


class HostMemory:
    """Copies of nested states in host memory, which is kept: the next copy overwrites the last one. To map (and, for a
    GPU, to pin) fresh memory costs more than the copy. (Pinned tensors take up to twice their size.)"""

    def __init__(self) -> None:
        self._buffers: dict[int, torch.Tensor] = {}  # by the place of the tensor in the state

    @property
    def size(self) -> int:
        """Bytes that are kept."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def clear(self) -> None:
        """Gives the memory back."""
        self._buffers.clear()

    @torch.no_grad()
    def copy(self, state: State) -> State:
        """Returns a copy of `state` on the CPU that nothing changes until the next one; memory that tensors share is
        shared. state: dicts, lists and tuples in each other, with tensors, DTensors and anything that can be copied."""
        values, structure = tree_flatten(state)
        seen: dict[tuple[Any, ...], torch.Tensor] = {}
        for place, value in enumerate(values):
            if not isinstance(value, torch.Tensor):
                values[place] = copy.deepcopy(value)
                continue
            local = local_part(value)
            view = (local.data_ptr(), local.shape, local.stride(), local.dtype, local.device)
            if local.numel() == 0 or view not in seen:
                seen[view] = self._buffer(place, local).copy_(local, non_blocking=True)
            # A DTensor is laid out as the original is.
            host = seen[view]
            values[place] = type(value)(host, value._spec, requires_grad=False) if is_sharded(value) else host
        for device in {device for *_, device in seen if device.type == "cuda"}:
            torch.cuda.current_stream(device).synchronize()
        return tree_unflatten(values, structure)

    def _buffer(self, place: int, like: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers.get(place)
        if buffer is None or buffer.shape != like.shape or buffer.dtype != like.dtype:
            buffer = torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=like.is_cuda)
            self._buffers[place] = buffer
        return buffer


def find_os_error(error: BaseException | None) -> OSError | None:
    """Returns the OSError that `error` is, was caused by or hides (torch's failed writes are RuntimeErrors), if any."""
    seen = error
    while seen is not None:
        if isinstance(seen, OSError):
            return seen
        seen = seen.__cause__ or seen.__context__
    if isinstance(error, RuntimeError) and ("file write failed" in str(error) or "unexpected pos" in str(error)):
        return OSError(None, "the file could not be written whole")
    return None


class Engine(abc.ABC):
    """Runs one model on the devices of all ranks.

    The gradient of a step is the sum, over ranks and micro-batches, of the gradients of the losses given to
    `backward`: with loss = (local sum) / (global count) a step does not depend on how a batch is spread.
    Methods that are called on one rank must be called on all.
    """

    model: Callable[..., Any]
    """Runs the forward pass; nothing else may."""
    module: nn.Module
    """The model itself, for its attributes and the names of its parameters."""
    optimizer: Any
    """Has `param_groups`, whose "lr" the loop sets before each step."""
    clip_norms: Mapping[str, torch.Tensor]
    """The norm of each clipping group of the last step before clipping, 0-dim; empty where there is one group."""
    gradients_differ: torch.Tensor
    """True if norms of the last step's gradients differed between the copies of this rank's part, 0-dim."""

    def __init__(self, config: EngineConfig, distributed: Distributed, mesh: Mesh) -> None:
        self.config, self.mesh = config, mesh
        self.rank = distributed.rank
        self.world_size = distributed.world_size
        self.device = distributed.device
        self.host = HostMemory()
        self.clip_norms = {}
        self.gradients_differ = torch.zeros((), dtype=torch.bool, device=self.device)

    def prepare(self, model: nn.Module, initialize: Initialize, make_optimizer: MakeOptimizer) -> None:
        """Spreads `model` (with `.blocks`; on the meta device, or anywhere else) over the ranks and readies it.
        initialize: fills parameters and buffers in place, sharded (DTensor) or not; may leave alone what is not on the
        meta device. make_optimizer: builds the optimizer from the model as the engine left it."""
        config = self.config
        if config.context > 1:
            model.cut_rows(Context.of(self.mesh.group("context")))
        if config.fp8:
            compute_in_float8(model, config.fp8)
        # Scales of rows would be others where a compiled block runs again, rounded in other places (pytorch#150859).
        as_eager = {"options": {"emulate_precision_casts": True}} if config.fp8 == "rowwise" else {}
        mode, selective_by = config.activation_checkpointing, config.selective_by
        # Compiled together, what a whole block sends again would be in its backward graph, in an order that ranks need
        # not share; a compiled block that runs again sends in its own.
        apart = config.compile and config.context > 1 and selective_by == "block"
        if apart:
            compile_blocks(model, **as_eager)
        checkpoint_activations(model, mode, selective_by=selective_by, every=config.selective_every)
        if config.compile and not apart:
            compile_blocks(model, **as_eager)
        if config.precision == "bf16":
            compute_in_bfloat16(model, self.device)
        self.module = model
        self._place(model, initialize, make_optimizer)

    @abc.abstractmethod
    def _place(self, model: nn.Module, initialize: Initialize, make_optimizer: MakeOptimizer) -> None:
        """Shards and initialises the model and sets `model` and `optimizer`."""

    @abc.abstractmethod
    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Adds the gradients of a scalar `loss`; last: it is the step's last micro-batch, after which ranks sum."""

    @abc.abstractmethod
    def step(self, max_norm: float) -> torch.Tensor:
        """Clips to the norm `max_norm` (0 = off), but for groups that are clipped apart (`engine.clipping`), updates
        the weights and zeroes the gradients. Returns the norm of all gradients before clipping, 0-dim. If it is not
        finite, weights, moments and step counts stay as they are on every rank, and the gradients are dropped."""

    def clip(self, max_norm: float, over_ranks: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, Any]:
        """Clips the gradients that the parameters hold, sharded or not. Returns the norm of all before, 0-dim, and
        whether it is finite, in a graph as a tensor; over_ranks: makes norms over all ranks from those of this rank's
        parts."""
        groups = self.optimizer.param_groups
        gradients = gradients_by_clip_group(groups, self.module.parameters())
        norms = over_ranks(norms_of(gradients, self.device))
        limits, waits = clip_limits(groups, max_norm), not self.config.cuda_graph
        norm, is_finite, self.clip_norms = clip_groups(gradients, norms, limits, waits=waits)
        return norm, is_finite

    def swap_averages(self) -> None:
        """Lets the weights and the averages of them that the optimizer keeps change places."""
        for _, tensor in self.named_tensors():
            swap_average(tensor, self.optimizer.state.get(tensor))

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Gives the model the averages of its weights within the context, to be evaluated; after that it is as it was,
        bit for bit. Weights without an average stay. Needs memory for one tensor at a time."""
        self.swap_averages()
        try:
            yield
        finally:
            self.swap_averages()

    @abc.abstractmethod
    def snapshot(self, *, copy: bool) -> Snapshot:
        """Returns this rank's part of model and optimizer as they are now. copy: into host memory, where it stays as it
        is until the next one; without, it is good until the next step."""

    def load(self, state: FullState) -> None:
        """Takes over all that the state of any engine holds but the options of the optimizer; a rank reads what it
        needs. Raises ValueError, before anything changes, if there is no room for it."""
        wanted = state_to_fill(self.optimizer, dict(self.module.named_parameters()), state)
        self.load_weights(state)
        for key, tensor in wanted.items():
            fill(tensor, state, key)

    def load_weights(self, state: FullState) -> None:
        """Takes over the weights and buffers that `state` has; others stay as they are, as do rows that it lacks."""
        for name, tensor in self.named_tensors():
            if MODEL + name in state.entries:
                fill(tensor.detach(), state, MODEL + name)

    def layout(self) -> dict[str, Any]:
        """Returns what a checkpoint's reader must know: kind of engine, number of ranks, shapes of all tensors."""
        return {"engine": self.kind, "world_size": self.world_size, "shapes": self.shapes()}

    kind: str
    """Engines of one kind read each other's checkpoints."""

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields name and tensor, as this engine keeps it between steps, of each parameter and persistent buffer."""
        return persistent_tensors(self.module)

    def shapes(self) -> dict[str, list[int]]:
        """Returns the full shape of each parameter and persistent buffer."""
        return {name: list(full_shape(tensor)) for name, tensor in self.named_tensors()}

    @abc.abstractmethod
    def copied_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields name (as in a checkpoint) and this rank's part of what other ranks hold a copy of, bit for bit."""

    @abc.abstractmethod
    def common_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields name and tensor of what every rank holds as the same bits, however the model is spread."""

    def train(self) -> None:
        self.module.train()

    def eval(self) -> None:
        self.module.eval()

    def part_of_batch(self, batch: Batch) -> Batch:
        """Returns the part of a micro-batch that this rank computes, with counts that add up over the parts: all of it,
        unless the mesh has a dimension whose ranks compute parts of one batch."""
        return batch

    def sum_over_batches(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums over all ranks, in place, what each computed of its batch or part of one; a batch that several ranks
        compute counts once. Returns `tensor`."""
        return self.all_reduce_sum(tensor if self.mesh.is_counted else tensor.zero_())

    def sum_over_parts(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums over the ranks that share the rows of a micro-batch, in place; returns `tensor`."""
        if self.config.context > 1:
            dist.all_reduce(tensor, group=self.mesh.group("context"))
        return tensor

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums over all ranks, in place; returns `tensor`."""
        if is_distributed():
            dist.all_reduce(tensor)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns every rank's `tensor`, stacked in order of rank, on every rank; NaN and infinity arrive as such."""
        if not is_distributed():
            return tensor.unsqueeze(0)
        gathered = tensor.new_empty(self.world_size * tensor.numel())
        dist.all_gather_into_tensor(gathered, tensor.flatten())
        return gathered.view(self.world_size, *tensor.shape)


def persistent_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields name and tensor of each parameter and each persistent buffer; a tensor with several names only once."""
    yield from model.named_parameters()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def is_on_meta(model: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))

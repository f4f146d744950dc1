"""Estimates the memory that a training step takes at its peak by running one step, the real one, on fake tensors. After
every op the bytes that live are split into gradients and the rest (activations and temporaries)."""

import dataclasses
import functools
import weakref
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from matmix.data.config import DataConfig
from matmix.data.loading.batch import Batch
from matmix.model import build_model
from matmix.model.precision import round_weights
from matmix.train.activation import checkpoint_activations
from matmix.train.config import RunConfig
from matmix.train.engine.config import EngineConfig
from matmix.train.estimate.layers import Record, deepened, shallow

SIMULATED = 4  # most sequences that are run; other numbers follow from these and half of them
FLOAT = 4  # bytes of an element of weights, gradients and moments


class LiveBytes(TorchDispatchMode):
    """While active: counts bytes of living storages that ops have made, a record after every op, and the ops that
    compute. Freed storages report themselves, so that a step of thousands of ops costs no search."""

    def __init__(self, model: nn.Module, batch: Batch) -> None:
        super().__init__()
        self.live = 0
        self.gradients = 0
        self.on_host = 0  # all that was made on the device "meta", which stands for the host
        self.computed = 0
        self.records: list[tuple[int, int, int, int]] = []
        """After each op: live without gradients, gradients and on_host in bytes, computed."""
        self.forward: dict[int, int] = {}
        """Layer -> the op with which its forward pass begins."""
        self.backward: dict[int, int] = {}
        """Layer -> the op with which its first gradient is complete."""
        self._known: dict[int, Any] = {}
        inputs = (getattr(batch, field.name) for field in dataclasses.fields(batch))
        for tensor in (*model.parameters(), *model.buffers(), *inputs):
            if isinstance(tensor, torch.Tensor):
                self._watch(tensor.untyped_storage(), counts=False)
        layers = {}
        for index, block in enumerate(model.blocks):
            layers |= dict.fromkeys(block.parameters(), index)
            block.register_forward_pre_hook(functools.partial(self._note_layer, index))
        for parameter in model.parameters():
            note = functools.partial(self._note_gradient, layers.get(parameter))
            parameter.register_post_accumulate_grad_hook(note)

    def _watch(self, storage: torch.UntypedStorage, *, counts: bool) -> None:
        key = id(storage)
        if key in self._known:
            return
        size = storage.nbytes() if counts else 0

        def forget(_reference: Any) -> None:
            self._known.pop(key, None)
            self.live -= size

        self._known[key] = weakref.ref(storage, forget)
        self.live += size

    def _note_layer(self, index: int, _block: nn.Module, _args: Any) -> None:
        self.forward.setdefault(index, len(self.records))

    def _note_gradient(self, layer: int | None, parameter: torch.Tensor) -> None:
        self.gradients += parameter.grad.untyped_storage().nbytes()
        if layer is not None:
            self.backward.setdefault(layer, len(self.records))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                away = tensor.device.type == "meta"
                if away and id(tensor.untyped_storage()) not in self._known:
                    self.on_host += tensor.untyped_storage().nbytes()
                self._watch(tensor.untyped_storage(), counts=not away)
        self.computed += _computes(function, result)
        self.records.append((self.live - self.gradients, self.gradients, self.on_host, self.computed))
        return result


def _computes(function: Any, result: Any) -> bool:
    """Returns whether an op has to run something on the device: no views, and no questions about tensors."""
    is_view = getattr(function, "is_view", False) or function is torch.ops.aten._unsafe_view.default
    return not is_view and any(isinstance(one, torch.Tensor) for one in tree_leaves(result))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StepMemory:
    """Bytes of one micro-batch's forward and backward pass on one device, weights and moments left out."""

    kept: int  # activations that the forward pass leaves for the backward pass
    timeline: np.ndarray  # (ops, 2): activations and temporaries, and gradients, after each op
    computed: int  # ops that compute; a fused op counts as one
    on_host: int  # activations that were sent to the host's memory, and are read from there

    def peak(self, *, standing: float = 0.0, share: float = 1.0) -> tuple[float, float]:
        """(gradients, activations and temporaries) in bytes at the moment when their sum is greatest. standing: bytes
        of gradients from before that stay. share: how much of a complete gradient stays on this rank."""
        rest, gradients = self.timeline[:, 0], standing + share * self.timeline[:, 1]
        moment = int(np.argmax(rest + gradients))
        return float(gradients[moment]), float(rest[moment])


Mode = Literal["none", "selective", "selective by op", "full", "offload"]


def checkpointing_mode(config: RunConfig) -> Mode:
    """Returns how a config's blocks recompute activations."""
    mode = config.engine.activation_checkpointing
    return "selective by op" if mode == "selective" and config.engine.selective_by == "op" else mode


def simulate_step(config: RunConfig, batch: int, *, mode: Mode | None = None, gathers: bool = False) -> StepMemory:
    """Runs a forward and a backward pass over (batch, data.seqlen) tokens on fake tensors. config: with
    model.vocab_size set. mode: checkpointing, None = as the config says. gathers: weights are as ranks gather them for
    each other; else autocast makes its own copies of them, which count. What fused ops allocate and free inside
    themselves is not seen. The ops are those of a CPU: on a GPU fused kernels keep less."""
    record = _record(config, batch, mode or checkpointing_mode(config), gathers=gathers)
    return _step_memory(record.sums, record.kept)


def _step_memory(sums: np.ndarray, kept: int) -> StepMemory:
    on_host, computed = map(int, sums[-1, 2:])
    return StepMemory(kept, sums[:, :2], computed, on_host)


def _record(config: RunConfig, batch: int, mode: Mode, *, gathers: bool) -> Record:
    """Runs the step of `simulate_step`."""
    engine = config.engine
    with FakeTensorMode():
        model = build_model(config.model, device="cpu")
        if gathers:
            round_weights(model)
        kind, by = ("selective", "op") if mode == "selective by op" else (mode, "block")
        checkpoint_activations(model, kind, selective_by=by, every=engine.selective_every, host="meta")
        task = config.task()
        inputs = config.model.model_class.example_inputs(config.model, batch, config.data.seqlen)
        example = task.example_batch(inputs)
        with LiveBytes(model, example) as meter:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=engine.precision == "bf16"):
                loss = task.loss(model, example).total
            kept, turn = meter.live, len(meter.records)
            loss.backward()
    return Record(np.array(meter.records), turn, kept, meter.forward, meter.backward)


def _from_few_layers(config: RunConfig, batch: int, mode: Mode, *, gathers: bool) -> StepMemory:
    """Returns what `simulate_step` would, from a model with fewer layers where these repeat."""
    few, period, missing = shallow(config, config.engine.selective_every if mode == "selective" else 1)
    # An encoder and a decoder have n_layers each, and do not repeat as one.
    if missing and len(build_model(few.model, device="meta").blocks) == few.model.n_layers:
        longer = deepened(_record(few, batch, mode, gathers=gathers), period, missing)
        if longer is not None:
            return _step_memory(*longer)
    return simulate_step(config, batch, mode=mode, gathers=gathers)


_simulated: dict[str, StepMemory] = {}


def step_memory(config: RunConfig, batch: int, *, mode: Mode | None = None, gathers: bool = False) -> StepMemory:
    """Returns what `simulate_step` would, from two small batches and few layers, as memory is linear in their numbers.
    Cached."""
    # What does not change memory must not make another entry in the cache.
    same = RunConfig(
        model=config.model,
        objective=config.objective,
        data=DataConfig(seqlen=config.data.seqlen, packing=config.data.packing),
        engine=EngineConfig(precision=config.engine.precision, selective_every=config.engine.selective_every),
    )
    mode = mode or checkpointing_mode(config)
    both = []
    for size in (SIMULATED // 2, SIMULATED):
        key = f"{size} {mode} {gathers} {same}"
        if key not in _simulated:
            _simulated[key] = _from_few_layers(same, size, mode, gathers=gathers)
        both.append(_simulated[key])
    half, whole = both
    factor = (batch - SIMULATED) / (SIMULATED // 2)

    def extended(first: Any, second: Any) -> Any:
        return second + (second - first) * factor

    if len(half.timeline) == len(whole.timeline):
        rest = extended(half.timeline[:, 0], whole.timeline[:, 0])
        timeline = np.stack([rest, whole.timeline[:, 1]], axis=1)
    else:
        # Ops that loop over sequences make a longer record for more of them: only the greatest values can be compared.
        rest = extended(half.timeline[:, 0].max(), whole.timeline[:, 0].max())
        timeline = np.array([[rest, half.peak()[0]]])
    kept, on_host = int(extended(half.kept, whole.kept)), int(extended(half.on_host, whole.on_host))
    return StepMemory(kept, timeline, whole.computed, on_host)

"""What the ranks of a context send each other, counted: a layer of each kind is run, forward and backward, as one of so
many ranks, of which the others are not there. No mixer has to say beforehand what it sends."""

import contextlib
import dataclasses
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeProcessGroup, _create_work_from_future
from torch.futures import Future

from matmix.kernels.context import Context
from matmix.model import ModelConfig, build_model
from matmix.model.carrying import CarriedRows
from matmix.model.config import NO_MIXER
from matmix.train.activation import checkpoint_activations
from matmix.train.config import RunConfig
from matmix.train.engine.config import EngineConfig
from matmix.train.estimate import Mode, checkpointing_mode

_LENGTHS = 32, 64  # tokens of a part that are run: what is sent is a constant and a multiple of them


class _Counting(dist.ProcessGroup):
    """Ranks that are not there: adds up the bytes that this one sends them, and receives zeros."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__(rank, ranks)
        self.sent = 0.0
        # Answers operations of PyTorch's that come here past Python: few numbers, for people to watch.
        fake = FakeProcessGroup._create_internal(rank, ranks)
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, fake)

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def getBackendName(self) -> str:
        return "counting"

    def _done(self, sent: float, *received: Tensor) -> Any:
        self.sent += sent
        for tensor in received:
            tensor.zero_()
        future: Future = Future()
        future.set_result(None)
        return _create_work_from_future(future)

    def _allgather_base(self, output: Tensor, given: Tensor, _options: Any = None) -> Any:
        return self._done(given.nbytes * (self.size() - 1), output)

    def _reduce_scatter_base(self, output: Tensor, given: Tensor, _options: Any = None) -> Any:
        return self._done(output.nbytes * (self.size() - 1), output)

    def alltoall_base(self, output: Tensor, given: Tensor, _out: Any, parts: list[int], _options: Any = None) -> Any:
        kept = parts[self.rank()] / max(sum(parts), 1) if parts else 1 / self.size()
        return self._done(given.nbytes * (1 - kept), output)

    def allreduce(self, tensors: list[Tensor], _options: Any = None) -> Any:
        return self._done(2 * tensors[0].nbytes * (self.size() - 1) / self.size())

    def send(self, tensors: list[Tensor], _target: int, _tag: int) -> Any:
        return self._done(tensors[0].nbytes)

    def recv(self, tensors: list[Tensor], _source: int, _tag: int) -> Any:
        return self._done(0, *tensors)


dist.Backend.register_backend("counting", lambda _store, rank, ranks, _timeout: _Counting(rank, ranks), devices=["cpu"])


@contextlib.contextmanager
def _ranks_that_are_not_there(ranks: int) -> Iterator[_Counting]:
    assert not dist.is_initialized(), "what a context sends is counted before the ranks of a run meet"
    hook = sys.excepthook  # which is replaced, for errors to name the rank
    # One in the middle, which has neighbours on both sides.
    dist.init_process_group("counting", store=dist.HashStore(), rank=min(1, ranks - 1), world_size=ranks)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


_counted: dict[str, float] = {}


def context_bytes(config: RunConfig, *, mode: Mode | None = None) -> float:
    """Returns how many bytes a rank sends the others of its context for a micro-batch of config.micro_batch_size whole
    rows. mode: checkpointing, None = as the config says; what is recomputed is sent again."""
    engine, ranks = config.engine, config.engine.context
    if ranks == 1:
        return 0.0
    mode = mode or checkpointing_mode(config)
    tokens = config.micro_batch_size * config.positions / ranks
    carried = config.micro_batch_size * config.data.carry
    total = 0.0
    for (name, _), layers in Counter(config.model.layer_kinds()).items():
        again = layers / engine.selective_every if mode == "selective" else layers if mode == "full" else 0
        rest: Mode = "selective by op" if mode == "selective by op" else "none"
        model = dataclasses.replace(config.model, n_layers=1, layers=(name or NO_MIXER,), mlp_ratio=0)
        for one, share in (("full", again), (rest, layers - again)):
            short, long = (_of_layer(model, engine, length, one, carried) for length in _LENGTHS) if share else (0, 0)
            slope = (long - short) / (_LENGTHS[1] - _LENGTHS[0])
            total += share * (short + slope * (tokens - _LENGTHS[0]))
    return total


def _of_layer(model: ModelConfig, engine: EngineConfig, length: int, mode: Mode, carried: int) -> float:
    """Bytes that a part of so many tokens has sent by a model of one layer, which carries states of so many rows.
    Cached."""
    key = f"{model} {engine.context} {engine.precision} {length} {mode} {carried}"
    if key not in _counted:
        layer = build_model(dataclasses.replace(model, vocab_size=1), device="cpu")
        kind, by = ("selective", "op") if mode == "selective by op" else (mode, "block")
        checkpoint_activations(layer, kind, selective_by=by, every=1)
        x = torch.zeros(1, length, model.d_model, requires_grad=True)
        bounds = torch.tensor([-length, 2 * length], dtype=torch.int32) if carried else None
        rows = CarriedRows(continues=torch.zeros(carried, dtype=torch.bool)) if carried else None
        with _ranks_that_are_not_there(engine.context) as group:
            layer.cut_rows(Context.of(group))
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=engine.precision == "bf16"):
                states = rows and rows.of_layers(1, bounds, length, layer.context)
                y = layer.run_blocks(x, bounds, None, carried=states)
            y.sum().backward()
            if rows is not None:
                rows.take(states, layer.context)
            _counted[key] = group.sent
    return _counted[key]

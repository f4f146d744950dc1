"""DeepSpeed ZeRO behind the engine interface: stage 0 (copies) to stage 3 (everything sharded).

DeepSpeed runs in its float32 mode at every precision: bf16 is the same autocast as in the other engine, so
that weights and reductions stay float32 and both engines give the same losses (in bf16 up to its rounding:
stage 3 replaces torch's linear layer by one that keeps no gathered weights and rounds before it adds the
bias). Its averages over ranks are cancelled by multiplying the loss with the number of ranks; micro-batches
are counted here, never by DeepSpeed.

Weights are drawn in host memory, whole on every rank, and ZeRO-3 then moves and partitions them one tensor at
a time: `deepspeed.zero.Init` around the construction of a model would draw them per rank and in another
order. The price is a float32 copy of the model in host memory per rank while a run starts.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from matmix.train.distributed import Distributed, ensure_group, from_rank_zero, gather_objects
from matmix.train.engine.base import Engine, is_on_meta
from matmix.train.engine.config import EngineConfig
from matmix.train.engine.zero_files import SUBDIRECTORY, convert_to_universal, make_files

# Passed on to DeepSpeed as "zero_optimization", together with the stage.
ZERO_OPTIONS: dict[str, Any] = {}


def import_deepspeed(device: torch.device) -> ModuleType:
    """DeepSpeed, told before its import what it would otherwise find out with warnings and compilers."""
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
    mesh = None

    def __init__(self, config: EngineConfig, distributed: Distributed) -> None:
        super().__init__(config, distributed)
        self.deepspeed = import_deepspeed(distributed.device)
        # DeepSpeed insists on a process group and on torchrun's variable, also in a single process.
        ensure_group(distributed.device)
        os.environ.setdefault("LOCAL_RANK", str(distributed.local_rank))

    def _place(
        self,
        model: nn.Module,
        initialize: Callable[[nn.Module], None],
        make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    ) -> None:
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
        self.model, self.optimizer, _, _ = self.deepspeed.initialize(
            model=model, optimizer=make_optimizer(model), config=settings
        )
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
        self.optimizer.clip_grad = max_norm
        self.model.step()  # leaves everything as it is when the norm is not finite
        norm = math.inf if self.optimizer.overflow else self.model.get_global_grad_norm()
        return torch.as_tensor(norm, dtype=torch.float32, device=self.device)

    def _step_of_copies(self, max_norm: float) -> torch.Tensor:
        parameters = [p for p in self.module.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm([p.grad for p in parameters])
        if not math.isfinite(norm.item()):
            self.discard()
            return norm
        if max_norm > 0:
            nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        self.model.step()
        return norm

    def discard(self) -> None:
        self.model.zero_grad()
        if self.config.zero_stage == 0:
            return
        # What DeepSpeed itself does with the gradients of a step that overflowed.
        self.optimizer.zero_grad(set_to_none=True)
        if self.config.zero_stage == 3:
            self.optimizer.averaged_gradients = {}
            return
        for group in self.optimizer.averaged_gradients:
            self.optimizer.averaged_gradients[group] = None
        for group in self.optimizer.all_grad_tensors:
            self.optimizer.all_grad_tensors[group] = None

    # -- checkpoints -------------------------------------------------------------------------------------

    def layout(self) -> dict[str, Any]:
        return {**super().layout(), "zero_stage": self.config.zero_stage}

    def save(self, directory: Path) -> None:
        # DeepSpeed waits for all ranks after writing, so that a rank that raised would leave the others
        # waiting: `files` keeps a failure to itself until all ranks are through.
        self.files.failure = None
        self.model.save_checkpoint(
            str(directory),
            tag=SUBDIRECTORY,
            save_latest=False,
            client_state={"universal_checkpoint_info": {}},
        )
        failure = self.files.failure
        if isinstance(failure, OSError):
            own = (OSError, failure.errno, failure.strerror or str(failure))
        else:
            own = failure and (RuntimeError, repr(failure))
        for rank, found in enumerate(gather_objects(own)):
            if found:
                kind, *rest, text = found
                raise kind(*rest, f"{text} (rank {rank})")

    def load(self, directory: Path, layout: dict[str, Any]) -> None:
        stage, saved_stage = self.config.zero_stage, layout["zero_stage"]
        if stage != saved_stage and {stage, saved_stage} != {1, 2}:
            raise ValueError(
                f"checkpoint {directory} was made at engine.zero_stage = {saved_stage} and cannot be "
                f"continued at {stage}, whose files differ; set engine.zero_stage = {saved_stage}"
            )
        options = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        if stage == 0 or self.world_size == layout["world_size"]:
            self._load_from(directory)
        else:
            self._load_universal(directory)
        # The universal form gives every group the options of the first one (decay for all), and one tensor
        # shared by all groups as their step count, which each of them would then advance.
        for group, own in zip(self.optimizer.param_groups, options, strict=True):
            group.update(own)
        inner = getattr(self.optimizer, "optimizer", self.optimizer)
        for state in inner.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()

    def _load_from(self, directory: Path) -> None:
        self.model.load_checkpoint(str(directory), tag=SUBDIRECTORY, load_lr_scheduler_states=False)

    def _load_universal(self, directory: Path) -> None:
        """Converts to DeepSpeed's universal form, which any number of ranks can read."""
        universal = directory.parent / f".universal-{directory.name}"
        problem = None
        if self.rank == 0:
            try:
                convert_to_universal(directory, universal)
            except Exception as error:  # the other ranks wait for the word that it went wrong
                problem = f"checkpoint {directory} could not be converted for {self.world_size} ranks: {error}"
        try:
            problem = from_rank_zero(problem)
            if problem:
                raise ValueError(problem)
            self.model._config.load_universal_checkpoint = True
            self._load_from(universal)
        finally:
            self.model._config.load_universal_checkpoint = False
            gather_objects(None)  # until all have read it
            if self.rank == 0:
                shutil.rmtree(universal, ignore_errors=True)

    def portable_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.named_tensors():
            if hasattr(tensor, "ds_id"):
                with self.deepspeed.zero.GatheredParameters([tensor]):
                    full = tensor.detach().to("cpu", copy=True)
                yield name, full
            else:
                yield name, tensor.detach().to("cpu", copy=True)

"""DeepSpeed ZeRO behind the engine interface: stage 0 (copies) to stage 3 (everything sharded).

It runs in its float32 mode at every precision: bf16 is the same autocast as in the other engine, so that both give the
same losses (in bf16 up to rounding: stage 3 has a linear layer of its own). Its averages over ranks are cancelled by
multiplying the loss with the number of ranks; micro-batches are counted here. Weights are drawn in host memory, whole
on every rank, as `deepspeed.zero.Init` around the construction of a model would draw them in another order.
"""

import contextlib
import logging
import math
import os
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from matmix.model.precision import rounded_parameters
from matmix.train.engine.base import Engine, Initialize, MakeOptimizer, Snapshot, is_on_meta
from matmix.train.engine.clipping import agree_on_norms, clip_groups, clip_limits
from matmix.train.engine.config import EngineConfig
from matmix.train.engine.full_state import MODEL, OPTIMIZER, FullState, fill, kept_entries
from matmix.train.engine.kinds import BUCKET, REUSE, SMALL, check_optimizer
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


@contextlib.contextmanager
def _linear_of_stage_3() -> Iterator[None]:
    """Within it, linear layers keep no weight for the backward pass, where DeepSpeed gathers it once more."""
    from deepspeed.runtime.zero.linear import zero3_linear_wrap

    def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if bias is None or input.dim() == 2:
            return zero3_linear_wrap(input, weight, bias)
        # DeepSpeed's would add it in place: to a product that is kept, and once more where the layer runs again.
        output = zero3_linear_wrap(input, weight)
        return output + bias.to(output.dtype)

    before, functional.linear = functional.linear, linear
    try:
        yield
    finally:
        functional.linear = before


class ZeroEngine(Engine):
    """The engine behind `name = "deepspeed"` at stage 0, where every rank has a copy of everything."""

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
            "communication_data_type": self.config.reduce_dtype,
            "zero_optimization": {
                "stage": stage,
                # DeepSpeed would put its linear layer in the place of torch's for good, for other models, too.
                "memory_efficient_linear": False,
                "reduce_bucket_size": BUCKET,
                "stage3_param_persistence_threshold": SMALL,
                "stage3_max_reuse_distance": REUSE,
                **({"offload_optimizer": {"device": "cpu", "pin_memory": True}} if self.config.offload else {}),
                **ZERO_OPTIONS,
            },
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,  # which would be compiled, and none of the optimizers here
            "steps_per_print": None,
            "checkpoint": {"tag_validation": "Ignore"},
        }
        if stage == 3:
            if self.config.precision == "bf16":
                names = rounded_parameters(model)
                for name, parameter in model.named_parameters():
                    if name in names:
                        parameter.comm_dtype = torch.bfloat16  # as DeepSpeed's torch_autocast marks what it casts
            self.deepspeed.zero.Init(module=model, config_dict_or_path=settings, dtype=torch.float32)
            for module in model.modules():
                for name, buffer in module.named_buffers(recurse=False):
                    setattr(module, name, buffer.to(self.device))
            model.forward = _linear_of_stage_3()(model.forward)
        optimizer = make_optimizer(model)
        check_optimizer(self.config, optimizer)
        self.model, self.optimizer, _, _ = self.deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
        self.files = make_files()
        self.model.checkpoint_engine = self.files
        self.model._copy_recovery_script = lambda _path: None  # a script in every checkpoint is not wanted

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        self.model.set_gradient_accumulation_boundary(last)
        self.model.backward(loss * self.world_size)

    @torch.no_grad()
    def step(self, max_norm: float) -> torch.Tensor:
        norm, is_finite = self.clip(max_norm, self._agreed)
        self.model.step() if is_finite else self.model.zero_grad()
        return norm

    def _agreed(self, norms: torch.Tensor) -> torch.Tensor:
        if is_distributed():
            norms, self.gradients_differ = agree_on_norms(norms, norms, None)
        return norms

    def copied_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.module.named_parameters():
            yield MODEL + name, parameter.detach()
        for name, entries in self.optimizer.named_state():
            for entry, value in entries.items():
                yield f"{OPTIMIZER}{name}.{entry}", torch.as_tensor(value)

    def common_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        parameters = {name for name, _ in self.module.named_parameters()}
        return ((MODEL + name, tensor) for name, tensor in self.named_tensors() if name not in parameters)

    def layout(self) -> dict[str, Any]:
        # The optimizer's file has numbers instead of names.
        names = [name for name, _, _ in self.optimizer.named_parameters()]
        return {**super().layout(), "zero_stage": 0, "optimizer": names}

    def snapshot(self, *, copy: bool) -> Snapshot:
        self.files.contents = {}
        self.model.save_checkpoint("snapshot", tag=SUBDIRECTORY, save_latest=False)  # nothing is written to there
        contents, self.files.contents = self.files.contents, {}
        return Snapshot(self.host.copy(contents) if copy else contents, write_files)


class PartitionedEngine(ZeroEngine):
    """The same at stages 1 to 3, where the optimizer's groups are flat and each rank updates a part of each.

    In float32 the weights of the forward pass and those that the optimizer updates are equal, so that filling the
    former and copying is exact. What the optimizer keeps is laid out like the weights. DeepSpeed's own reader wants the
    same stage and number of ranks, and takes the options of the optimizer from the file.
    """

    @property
    def third(self) -> bool:
        return self.config.zero_stage == 3

    @property
    def flat(self) -> list[torch.Tensor]:
        """This rank's part of the weights that the optimizer updates, by group (at stage 3, by piece of one)."""
        optimizer = self.optimizer
        return optimizer.fp32_partitioned_groups_flat if self.third else optimizer.single_partition_of_fp32_groups

    def _group(self, index: int) -> dict[str, Any]:
        """Returns the group of the flat tensor of this number."""
        return self.optimizer.param_groups[self.optimizer.sub_group_to_group_id[index] if self.third else index]

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Lets weights be changed within the context: what stage 3 has gathered at the moment is partitioned before."""
        if self.third:
            self.optimizer.checkpoint_event_prologue()
        yield
        if self.third:
            self.optimizer.checkpoint_event_epilogue()

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        with _linear_of_stage_3() if self.third else contextlib.nullcontext():  # for blocks that run again
            super().backward(loss, last=last)

    @torch.no_grad()
    def step(self, max_norm: float) -> torch.Tensor:
        limits = clip_limits(self.optimizer.param_groups, max_norm)
        norm = None if len(limits) == 1 else self._clip_apart(limits)
        # Where the whole is one group, DeepSpeed clips it.
        self.optimizer.clip_grad = next(iter(limits.values())) if norm is None else 0.0
        self.model.step()  # leaves everything as it is when the norm is not finite
        if self.optimizer.overflow:
            norm = math.inf
        elif norm is None:
            norm = self.model.get_global_grad_norm()
        return torch.as_tensor(norm, dtype=torch.float32, device=self.device)

    def _clip_apart(self, limits: dict[str, float]) -> torch.Tensor:
        """Clips each clipping group, over all ranks, before DeepSpeed's own step, and returns the norm of all gradients
        before; if that is not finite, DeepSpeed sees it as well and drops the step."""
        optimizer, home = self.optimizer, torch.device("cpu") if self.config.offload else self.device
        gradients: dict[str, list[torch.Tensor]] = {name: [] for name in limits}
        squares = {name: torch.zeros((), device=home) for name in limits}
        if self.config.offload and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # gradients are still on their way to the host
        for index, part in enumerate(optimizer.fp16_groups if self.third else optimizer.params_in_partition):
            name = self._group(index).get("clip_group", OTHERS)
            # The norm is over all ranks, -1 where it is not finite.
            if self.config.offload:
                gradients[name].append(self.flat[index].grad)
                norm = optimizer.complete_grad_norm_calculation_for_cpu_offload(part).to(home)
            else:
                gradients[name] += (tensors := optimizer.averaged_gradients[index])
                norm = optimizer.get_grad_norm_direct(tensors, part)
            squares[name] += torch.where(norm < 0, math.inf, norm.square())
        norms = torch.stack(list(squares.values())).sqrt()
        norm, _, self.clip_norms = clip_groups(gradients, norms, limits)
        return norm

    @torch.no_grad()
    def swap_averages(self) -> None:
        with self._changing():
            for flat in self.flat:
                swap_average(flat, self.optimizer.optimizer.state.get(flat))
            if not self.third:
                self.optimizer.update_lp_params()
                return
            for part, flat in zip(self.optimizer.fp16_partitioned_groups_flat, self.flat, strict=True):
                part.data.copy_(flat.data)  # which the parameters' parts are views of

    def copied_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in () if self.third else self.module.named_parameters():
            yield MODEL + name, parameter.detach()

    def layout(self) -> dict[str, Any]:
        return {**Engine.layout(self), "zero_stage": self.config.zero_stage}

    @torch.no_grad()
    def load(self, state: FullState) -> None:
        """Raises ValueError also where a group needs more than one number of each kind, all that it has room for."""
        own, parameters = self.optimizer.optimizer, dict(self.module.named_parameters())
        held = kept_entries(state, own, parameters)
        names = {parameter: name for name, parameter in parameters.items()}
        groups = self.optimizer.fp16_groups if self.third else self.optimizer.bit16_groups
        updated = [[name for one in group if (name := names[one]) in held] for group in groups]
        numbers = [_numbers(group, held, state) for group in updated]
        self.load_weights(state)
        for index, (flat, group) in enumerate(zip(self.flat, groups, strict=True)):
            entries = own.state[flat] = {}
            if not updated[index]:
                continue
            for entry, tensor in own.whole_state(flat.detach(), self._group(index)).items():
                if entry in (AVERAGE, STEPS) and STEPS not in numbers[index]:
                    continue  # it begins with the next step
                if entry == AVERAGE:
                    tensor.copy_(flat)  # those that have none yet begin with the weights
                if tensor.shape:
                    for parameter, start, numel, offset in self._fragments(group):
                        if (name := names[parameter]) in held:
                            _copy(tensor, offset, state, f"{OPTIMIZER}{name}.{entry}", start, numel)
                else:
                    tensor.fill_(numbers[index][entry])
                entries[entry] = tensor

    @torch.no_grad()
    def load_weights(self, state: FullState) -> None:
        with self._changing():
            for name, tensor in self.named_tensors():
                if MODEL + name not in state.entries:
                    continue
                if hasattr(tensor, "ds_tensor"):
                    part = tensor.ds_tensor.numel()
                    numel = min(part, state.entries[MODEL + name].numel - self.rank * part)
                    _copy(tensor.ds_tensor.data, 0, state, MODEL + name, self.rank * part, numel)
                else:
                    fill(tensor.detach(), state, MODEL + name)
            self.optimizer.refresh_fp32_params()

    def _fragments(self, group: list[torch.Tensor]) -> Iterator[tuple[torch.Tensor, int, int, int]]:
        """Yields (parameter, start in it, elements, offset in the flat tensor) of what lies here of a group; at stage 3
        an equal part of each parameter, that of the last rank padded."""
        offset = 0
        for parameter in group:
            if self.third:
                part = parameter.partition_numel()
                start = self.rank * part
                yield parameter, start, min(part, parameter.ds_numel - start), offset
                offset += part
            elif parameter._hp_mapping is not None:
                here, there = parameter._hp_mapping.lp_fragment_address, parameter._hp_mapping.hp_fragment_address
                yield parameter, here.start, here.numel, there.start


def _numbers(updated: list[str], held: Mapping[str, list[str]], state: FullState) -> dict[str, float]:
    """Returns the numbers, such as counts of steps, that the optimizer keeps of the updated tensors of a group."""
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

"""Initial weights that depend on (seed, parameter name) and on nothing else.

Every parameter is drawn on the CPU, in float32, at its full shape, from a generator of its own, and then
copied into the parameter, sharded or not. Hence one and the same model for 1 or 64 ranks, for FSDP2 or
DeepSpeed, with or without torch.compile, and layers that differ from each other.
"""

import hashlib
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

INIT_STD = 0.02
"""Standard deviation of matrices without a rule of their own, where nothing else is given."""

InitRule = Callable[[torch.Size, torch.Generator], Tensor]
"""Draws one parameter: (full shape, CPU generator) -> float32 tensor. A function at the top of a module, or a partial
function of one: modules hold their rules, and what is defined within a function cannot be pickled with them."""


def normal_init(std: float) -> InitRule:
    """Gaussian values with mean 0."""
    return partial(draw_normal, std=std)


def draw_normal(shape: torch.Size, generator: torch.Generator, *, std: float) -> Tensor:
    """The rule of `normal_init`."""
    return torch.randn(shape, generator=generator) * std


def uniform_init(bound: float) -> InitRule:
    """Values from U[-bound, bound]."""
    return partial(draw_uniform, bound=bound)


def draw_uniform(shape: torch.Size, generator: torch.Generator, *, bound: float) -> Tensor:
    """The rule of `uniform_init`."""
    return (torch.rand(shape, generator=generator) * 2 - 1) * bound


def constant_init(value: float) -> InitRule:
    """One value everywhere."""
    return partial(draw_constant, value=value)


def draw_constant(shape: torch.Size, generator: torch.Generator, *, value: float) -> Tensor:
    """The rule of `constant_init`, which needs no generator."""
    return torch.full(shape, value)


def clean_parameter_name(name: str) -> str:
    """Removes from a parameter's name the prefixes that torch.compile, checkpoint wrappers, FSDP1 and DDP add to it."""
    wrappers = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
    parts = [part for part in name.split(".") if part not in wrappers]
    if parts and parts[0] == "module":
        parts = parts[1:]
    return ".".join(parts)


def initialize(model: nn.Module, seed: int, factors: Mapping[str, float] = MappingProxyType({})) -> None:
    """Fill every parameter of `model` in place.

    A module says how its own parameters start in `init_rules`, a dict from the parameter's name relative to
    that module to an `InitRule`; the outermost rule wins. Without a rule: LayerNorm 1 and 0, other biases 0,
    other matrices N(0, std^2), with the `matrix_std` of the model's config or 0.02. factors: on the values of some
    parameters, by name. Parameters may be sharded (DTensor): no communication takes place.
    """
    rules = init_rules_of(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            name = clean_parameter_name(name)
            values = rules[name](parameter.shape, parameter_generator(seed, name))
            copy_into_parameter(parameter, values * factors[name] if name in factors else values)


def init_rules_of(model: nn.Module) -> dict[str, InitRule]:
    """Returns the rule that each parameter of `model` is drawn by, as `initialize` has it."""
    std = getattr(getattr(model, "config", None), "matrix_std", INIT_STD)
    stated: dict[str, InitRule] = {}
    usual: dict[str, InitRule] = {}
    for prefix, module in model.named_modules():
        before = f"{prefix}." if prefix else ""
        for name, rule in getattr(module, "init_rules", {}).items():
            stated.setdefault(clean_parameter_name(before + name), rule)
        for name, _ in module.named_parameters(recurse=False):
            usual[clean_parameter_name(before + name)] = default_init_rule(module, name, std)
    return {name: stated.get(name, rule) for name, rule in usual.items()}


def parameter_generator(seed: int, name: str) -> torch.Generator:
    """A CPU generator seeded by a hash of (seed, name), the same on every machine."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def default_init_rule(module: nn.Module, name: str, std: float = INIT_STD) -> InitRule:
    """Returns the initial values of a parameter without a rule of its own."""
    if name == "bias":
        return constant_init(0.0)
    if isinstance(module, nn.LayerNorm):
        return constant_init(1.0)
    return normal_init(std)


def copy_into_parameter(parameter: Tensor, values: Tensor) -> None:
    """Copy the full float32 `values` into a plain or sharded parameter, each rank taking its own part."""
    if hasattr(parameter, "device_mesh"):
        from torch.distributed.tensor import distribute_tensor

        values = values.to(parameter.device, parameter.dtype)
        # src_data_rank=None: every rank drew the same values, so nothing needs to be sent.
        values = distribute_tensor(values, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(values)


class NoDraws(TorchFunctionMode):
    """Where torch's modules would draw their initial values, which `initialize` or loaded weights replace. For tensors
    without memory torch would import its compiler first, for a second."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__module__", None) == nn.init.__name__:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))

"""Lets torch.func's transforms (grad, vjp, jacrev, vmap and what is made of them) through the registered operations.

torch.library makes of an operation's gradient an autograd.Function whose `forward` fills its own context, which those
transforms refuse. The kernel that dispatches to it is called once for each level of transforms with the tensors of that
level, so that a Function of a single level belongs there. In all else it is what torch.library registers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch._library.custom_ops import OPDEFS, CustomOpDef
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from matmix.kernels.functions import call_each


def register_transforms() -> None:
    """For the operations registered as matmix::* that change none of their inputs."""
    for name, operation in list(OPDEFS.items()):
        if name.startswith("matmix::") and not operation._opoverload._schema.is_mutable:
            _replace_autograd(operation)
            operation.register_vmap(_vmap_rule(operation))


def _replace_autograd(operation: CustomOpDef) -> None:
    name = operation._name

    def below(keyset: Any, args: tuple) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operation._opoverload.redispatch(keyset & torch._C._after_autograd_keyset, *args)

    class Differentiable(_SingleLevelFunction):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            *args, keyset = args
            if torch._C._are_functorch_transforms_active():
                # This level must not follow what runs in here, but the levels around it must.
                with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
                    output = below(keyset, args)
            else:
                output = below(keyset, args)
            if operation._setup_context_fn is not None:
                with torch._C._AutoDispatchBelowAutograd():
                    operation._setup_context_fn(ctx=ctx, inputs=tuple(args), output=output)
            return output

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor | None) -> tuple:
            if operation._backward_fn is None:
                raise ValueError(
                    f"{name.removesuffix('_backward')}: a derivative of its gradient is asked for, and this op has "
                    "none; its definition (definition.py) has derivatives of all orders, in float64 and slowly"
                )
            return *operation._backward_fn(ctx, *gradients), None

        @staticmethod
        def jvp(ctx: Any, *tangents: Tensor | None) -> NoReturn:
            raise ValueError(
                f"{name}: an input has a tangent, and this op has no forward-mode derivative; use reverse mode "
                "(backward, torch.func.vjp or jacrev)"
            )

    def kernel(keyset: Any, *args: Any) -> Any:
        followed = torch.is_grad_enabled() and torch._C._any_requires_grad(*args)
        if not followed and forward_ad._current_level < 0:
            return below(keyset, args)
        if not torch._C._are_functorch_transforms_active():
            return Differentiable.apply(*args, keyset)
        with enable_single_level_autograd_function():
            return Differentiable.apply(*args, keyset)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        operation._lib.impl(name, kernel, "Autograd", with_keyset=True, allow_override=True)


def _vmap_rule(operation: CustomOpDef) -> Callable:
    def rule(info: Any, in_dims: tuple, *args: Any) -> tuple:
        return call_each(operation._opoverload, info.batch_size, in_dims, args)

    return rule

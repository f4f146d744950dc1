"""The layers as PyTorch sees them: schemas, fake tensors, compile, checkpointing, FLOP counts."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from compare import packed
from layers import layer_inputs
from nightly import nightly
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from matmix.kernels import gated_norm, lion_mixer, quasiseparable_scan, scan_layer, short_conv

SIZES = {"nheads": 2, "ngroups": 1, "d_state": 6}


def samples(device):
    """Calls in Triton as (op, tensors by name)."""
    bounds = packed([15, 1, 24]).to(device)
    hydra = layer_inputs(40, batch=1, states=True)
    one = layer_inputs(40, batch=1, directions=1, diagonal="constant", conv_bias=False)
    options = {"directions": 1, "norm_first": False, "recompute": True}
    lion = {"qkv": torch.randn(1, 40, 60), "gates": torch.randn(1, 40, 2)}
    found = {
        "hydra": (partial(scan_layer, **SIZES, cu_seqlens=bounds), hydra),
        "ssd": (partial(scan_layer, **SIZES, **options, conv_bias=None), one),
        "lion": (partial(lion_mixer, nheads=2, cu_seqlens=bounds), lion),
        "lion without gates": (partial(lion_mixer, gates=None, nheads=2), {"qkv": lion["qkv"]}),
    }
    return {
        name: (
            partial(op, backend="triton"),
            {n: x.to(device).requires_grad_() for n, x in inputs.items() if x is not None},
        )
        for name, (op, inputs) in found.items()
    }


# By day each operation once.
NAMES = [nightly("hydra"), "ssd", "lion", nightly("lion without gates")]


class Record(TorchDispatchMode):
    """Notes this project's registered ops and their arguments."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "matmix":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", NAMES)
def test_schema_fake_and_autograd_registration(interpreter, name):
    op, tensors = samples(interpreter)[name]
    with Record() as record:
        op(**tensors).sum().backward()
    assert len(record.calls) == (2 if name.startswith("lion") else 3)
    for func, args in record.calls:
        args = tuple(a.detach() if torch.is_tensor(a) else a for a in args)
        utils = ("test_schema", "test_faketensor", "test_autograd_registration")
        if func.name().split("::")[1] in ("scan_layer", "lion_mixer"):
            args = tuple(a.requires_grad_(a.is_floating_point()) if torch.is_tensor(a) else a for a in args)
        torch.library.opcheck(func, args, test_utils=utils)


@pytest.mark.parametrize("name", NAMES)
def test_compile_without_graph_breaks(interpreter, name):
    op, tensors = samples(interpreter)[name]
    wanted = op(**tensors)
    gradients = torch.autograd.grad(wanted.square().sum(), list(tensors.values()))
    torch.compiler.reset()
    compiled = torch.compile(lambda given: op(**given), fullgraph=True, backend="aot_eager")
    got = compiled(tensors)
    assert torch.equal(got, wanted)
    for a, b in zip(torch.autograd.grad(got.square().sum(), list(tensors.values())), gradients, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", NAMES)
def test_activation_checkpointing(interpreter, name):
    op, tensors = samples(interpreter)[name]
    wanted = torch.autograd.grad(op(**tensors).square().sum(), list(tensors.values()))
    again = checkpoint(lambda: op(**tensors), use_reentrant=False)
    for a, b in zip(torch.autograd.grad(again.square().sum(), list(tensors.values())), wanted, strict=True):
        assert torch.equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_each_sample(interpreter, name):
    """By vmap over grad, with parameters that the samples share."""
    op, tensors = samples(interpreter)[name]
    first = next(iter(tensors))
    values = {name: tensor.detach() for name, tensor in tensors.items()}
    rows = torch.stack((values[first], 0.9 * values[first]))
    dims = {name: 0 if name == first else None for name in values}
    each = torch.func.vmap(torch.func.grad(lambda given: op(**given).square().sum()), (dims,))(values | {first: rows})
    for number, row in enumerate(rows):
        given = tensors | {first: row.clone().requires_grad_()}
        wanted = torch.autograd.grad(op(**given).square().sum(), list(given.values()))
        for gradients, expected in zip(each.values(), wanted, strict=True):
            assert torch.equal(gradients[number], expected)


@pytest.mark.parametrize("name", NAMES)
def test_forward_mode_is_refused(interpreter, name):
    op, tensors = samples(interpreter)[name]
    first, x = next(iter(tensors.items()))
    values = {name: x.detach() for name, x in tensors.items()}
    with forward_ad.dual_level(), pytest.raises(ValueError, match="an input has a tangent"):
        op(**values | {first: forward_ad.make_dual(values[first], torch.ones_like(x))})


def flops(run, *inputs) -> tuple[int, int]:
    """Counted in a forward and a backward pass."""
    with FlopCounterMode(display=False) as forward:
        y = run(*inputs)
    with FlopCounterMode(display=False) as backward:
        y.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("recompute", [False, True])
def test_flops_are_those_of_the_parts(interpreter, recompute):
    given = {name: x for name, x in layer_inputs(40, batch=2).items() if x is not None}
    given = {name: x.to(interpreter).requires_grad_() for name, x in given.items()}
    found = flops(lambda: scan_layer(**given, **SIZES, recompute=recompute, backend="triton"))
    x, v, q, decay = (torch.randn(2, 40, *sizes, requires_grad=True) for sizes in ((48,), (2, 12), (1, 6), (2,)))
    weight, taps, scale = (torch.randn(*sizes, requires_grad=True) for sizes in ((2, 24), (48, 5), (24,)))
    decay = -decay.detach().abs()
    conv = flops(lambda: short_conv(x, taps, activation="silu"))
    product = flops(lambda: torch.nn.functional.linear(v.flatten(2), weight))
    scan = flops(lambda: quasiseparable_scan(v, q, q, q, q, decay, decay))
    norm = flops(lambda: gated_norm(v.flatten(2), scale, v.flatten(2)))
    again = conv[0] + product[0] if recompute else 0
    assert found == (sum(part[0] for part in (conv, product, scan, norm)),
                     sum(part[1] for part in (conv, product, scan, norm)) + again)  # fmt: skip


def test_flops_of_lion_are_those_of_the_scan(interpreter):
    qkv = torch.randn(2, 40, 60, device=interpreter, requires_grad=True)
    v = torch.randn(2, 40, 2, 10, requires_grad=True)
    form = {"shift": False, "self_term": "mean", "normalize": "row_sum"}
    scan = flops(lambda: quasiseparable_scan(v, v, v, v, v, None, None, **form))
    assert flops(lambda: lion_mixer(qkv, None, nheads=2, backend="triton")) == scan

"""What the Hydra layer keeps for its backward pass and allocates on the way, and that recomputing changes nothing."""

import functools
import importlib.util
import sys

import pytest
import torch
import torch.nn.functional as F
from storages import Storages
from torch.utils.checkpoint import checkpoint

from matmix.kernels.scan_layer.chunked import StepSizes, ValuesAndVectors
from matmix.model.interop.export.bundle import bundle
from matmix.model.mixers.scans.hydra import Hydra, HydraConfig
from matmix.train.activation import checkpoint_activations

PACKED = torch.tensor([0, 5, 6, 40], dtype=torch.int32)


@pytest.fixture
def make(randomize):
    def build(d_model=32, **options):
        config = HydraConfig(**{"headdim": 8, "d_state": 8} | options)
        return randomize(Hydra(d_model, config, causal=False, max_seqlen=64, output_std=0.02))

    return build


def bf16(enabled):
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled)


def gradients(layer, x, cu_seqlens=None, low_precision=False, call=None):
    """Output and all gradients."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    with bf16(low_precision):
        y = layer(x, cu_seqlens) if call is None else call(x, cu_seqlens)
    (y.float() * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum().backward()
    found = {"x": x.grad, **{name: parameter.grad.clone() for name, parameter in layer.named_parameters()}}
    assert all(gradient.abs().max() > 0 for gradient in found.values())
    return {"y": y.detach(), **found}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


# ---- what is kept


def kept_per_token(layer, low_precision):
    """Bytes per token that are held between forward and backward, by the op that made them; and copies of weights."""
    totals = []
    for length in (64, 128):
        x = torch.randn(1, length, layer.d_model, dtype=torch.bfloat16 if low_precision else torch.float32)
        with Storages() as storages, bf16(low_precision):
            y = layer(x.requires_grad_())
        assert y.grad_fn is not None
        found = {"input": x.nbytes}
        for allocation in storages.allocations:
            if allocation.alive and allocation.storage.cdata != y.untyped_storage()._weak_ref():
                name = allocation.op.removesuffix(".default")
                name = f"{name} {allocation.shape[-1]}" if name == "aten.mm" else name
                found[name] = found.get(name, 0) + allocation.bytes
        totals.append(found)
    short, long = totals
    per_token = {name: (long[name] - short[name]) / 64 for name in long}
    return {name: size for name, size in per_token.items() if size}, sum(short.values()) - 64 * sum(per_token.values())


@pytest.mark.parametrize("low_precision", [True, False])
def test_bytes_kept_per_token(low_precision):
    layer = Hydra(768, HydraConfig(), causal=False, max_seqlen=512, output_std=0.02)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    size = 2 if low_precision else 4
    always = {
        "input": 768 * size,
        "aten.mm 3376": 3376 * size,  # z, x, B and C of both directions, dt
        "matmix.quasiseparable_scan": 1536 * size,
    }
    small = {"aten.softplus": 2 * 24 * 4, "aten.mul.Tensor": 2 * 24 * 4, "aten.add.Tensor": 24 * 4}  # dt, dt A, D
    wide = {"matmix.short_conv": (1536 + 4 * 64) * size, "matmix.gated_norm": 1536 * size}
    plain, copies = kept_per_token(layer, low_precision)
    assert plain == always | small | wide
    assert sum(plain.values()) == (18496 if low_precision else 36512)  # figures in docs/training.md
    assert copies == (2 * 768 * (3376 + 1536) if low_precision else 0)
    layer.recompute = True
    recomputed, copies = kept_per_token(layer, low_precision)
    assert recomputed == always
    assert sum(recomputed.values()) == (11360 if low_precision else 22720)
    assert copies == (2 * 768 * 3376 if low_precision else 0)


# ---- what is allocated


def wide_tensors(storages, tokens, width):
    return [
        (allocation.op.removeprefix("matmix.").removeprefix("aten.").split(".")[0], allocation.shape[-1])
        for allocation in storages.allocations
        if allocation.bytes >= tokens * width * 4 and allocation.shape[-2:] != (16, 8)
    ] + [("scan", 0) for a in storages.allocations if a.shape[-2:] == (16, 8)]


def test_wide_tensors_of_a_forward_and_a_backward_pass(make):
    """Each tensor of the inner width (128) is one that an op has to return; the two `cat` gather what the splits
    gave away."""
    layer = make(d_model=64)
    x = torch.randn(2, 200, 64, requires_grad=True)
    forward = [("mm", 128 + 160 + 32), ("short_conv", 160), ("gated_norm", 128), ("scan", 0)]
    with Storages() as first:
        y = layer(x)
    assert wide_tensors(first, 400, 128) == forward
    with Storages() as second:
        y.sum().backward()
    backward = [
        ("mm", 128),  # of the norm's output
        ("gated_norm_backward", 128),  # of y
        ("gated_norm_backward", 128),  # of z
        ("cat", 160),  # of x, B and C, the share of D added in place
        ("short_conv_backward", 160),
        ("cat", 128 + 160 + 32),
        ("scan", 0),  # of x
    ]
    assert wide_tensors(second, 400, 128) == backward
    layer.recompute = True
    with Storages() as first:
        y = layer(x)
    with Storages() as second:
        y.sum().backward()
    assert wide_tensors(first, 400, 128) == forward
    assert wide_tensors(second, 400, 128) == [("short_conv", 160), ("gated_norm", 128), *backward]


# ---- that recomputing changes nothing

OPTIONS = [
    {},
    {"learnable_init_states": True, "ngroups": 2, "bias": True, "conv_bias": False},
    {"dt_limit_low": 0.6, "dt_limit_high": 0.8, "d_conv": 3, "expand": 1},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("packed", "low_precision"), [(False, False), (True, False), (True, True)])
def test_gradients_are_the_same_bit_for_bit(make, options, low_precision, packed):
    plain, again = make(**options), make(**options, recompute=True)
    x, cu_seqlens = torch.randn(1 if packed else 2, 40, 32), PACKED if packed else None
    expected = gradients(plain, x, cu_seqlens, low_precision)
    assert_equal(gradients(again, x, cu_seqlens, low_precision), expected)
    # In a checkpoint of a whole block, which computes everything again and then parts of it once more.
    nested = functools.partial(checkpoint, again, use_reentrant=False)
    assert_equal(gradients(again, x, cu_seqlens, low_precision, nested), expected)


@pytest.mark.slow
@pytest.mark.parametrize(("recompute", "low_precision"), [(False, False), (True, False), (True, True)])
def test_compiled(make, recompute, low_precision):
    layer = make(recompute=recompute)
    x = torch.randn(1, 64, 32)  # a whole chunk: the scan's output comes in a storage of whole chunks
    expected = gradients(layer, x, low_precision=low_precision)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    kept = {parameter.untyped_storage()._cdata: 0 for parameter in layer.parameters()}

    def note(tensor):
        kept.setdefault(tensor.untyped_storage()._cdata, tensor.untyped_storage().nbytes())
        return tensor

    def call(*inputs):
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            return compiled(*inputs)

    found = gradients(layer, x, None, low_precision, call)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5, msg=name)
    if recompute:
        size = 2 if low_precision else 4
        copies = 2 * 32 * 176 if low_precision else 0
        assert sum(kept.values()) - copies == 64 * size * (32 + 176 + 64)


@pytest.mark.parametrize(
    "options", [{"mode": "full"}, {"mode": "selective"}, {"mode": "selective", "selective_by": "op"}]
)
def test_with_checkpoints_of_blocks(small_model, options):
    model = small_model("encoder", ("hydra",), hydra=HydraConfig(headdim=8, d_state=4, recompute=True)).train()
    ids = torch.randint(61, (2, 24))

    def run():
        model.zero_grad()
        model(ids).square().mean().backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    expected = run()
    checkpoint_activations(model, **options)
    by_op = options.get("selective_by") == "op"
    all_blocks = by_op or options["mode"] == "full"
    assert [block.mixer.recompute for block in model.blocks] == [False, not all_blocks, False]
    assert_equal(run(), expected)


def test_nothing_is_recomputed_without_gradients(make):
    layer = make(recompute=True)
    x = torch.randn(1, 40, 32)
    with torch.no_grad(), Storages() as storages:
        y = layer(x)
    assert storages.live_bytes() == y.nbytes


def test_an_exported_layer_recomputes_too(make, tmp_path, monkeypatch):
    text = bundle([("matmix.model.mixers.scans.hydra", "Hydra")], header="# no package here", version="99.0.0")
    (tmp_path / "hydra_alone.py").write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("hydra_alone", tmp_path / "hydra_alone.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "hydra_alone", module)
    spec.loader.exec_module(module)
    assert module._KERNELS is None
    layer = make()
    config = module.HydraConfig(headdim=8, d_state=8, recompute=True)
    alone = module.Hydra(32, config, causal=False, max_seqlen=64, output_std=0.02)
    alone.load_state_dict(layer.state_dict())
    x = torch.randn(1, 40, 32)
    expected = gradients(layer, x, PACKED)
    for name, gradient in gradients(alone, x, PACKED).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5, msg=name)
    recomputed = gradients(alone, x, PACKED, True)
    alone.recompute = False
    assert_equal(gradients(alone, x, PACKED, True), recomputed)


# ---- the written-out gradients


@pytest.mark.parametrize("limits", [(0.0, float("inf")), (0.5, 1.0)])
def test_step_sizes(limits):
    raw, bias, A_log = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 5, 6), (3,), (3,))
    )
    dt, decay = StepSizes.apply(raw, bias, A_log, 2, *limits)
    expected = F.softplus(raw.unflatten(-1, (2, 3)) + bias).clamp(*limits)
    if limits[0]:
        assert {"low", "free", "high"} == {
            "low" if step == limits[0] else "high" if step == limits[1] else "free"
            for step in expected.flatten().tolist()
        }
    torch.testing.assert_close(dt, expected)
    torch.testing.assert_close(decay, -expected * A_log.exp())
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda *inputs: StepSizes.apply(*inputs, 2, *limits), (raw, bias, A_log))


def test_values_and_vectors():
    sizes = (6, 3, 3, 3, 3)
    vbc, weight, D = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 5, 6 + 4 * 3), (2, 6), (2,))
    )
    *parts, diagonal = ValuesAndVectors.apply(vbc, weight, D, sizes)
    assert torch.equal(torch.cat(parts, -1), vbc)
    torch.testing.assert_close(diagonal, F.linear(vbc[..., :6], weight) + D)
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda *inputs: ValuesAndVectors.apply(*inputs, sizes), (vbc, weight, D))

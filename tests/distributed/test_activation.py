"""Recomputing, compiling and bf16 are put on a model without renaming anything in it."""

import unittest.mock

import pytest
import scenarios
import torch
from harness import run_distributed
from torch.utils._python_dispatch import TorchDispatchMode

from matmix.train import activation
from matmix.train.activation import checkpoint_activations, compile_blocks, compute_in_bfloat16
from matmix.train.engine.config import EngineConfig

MODES = [
    {"activation_checkpointing": "full"},
    {"activation_checkpointing": "selective", "selective_every": 2},
    {"activation_checkpointing": "selective", "selective_by": "op"},
    {"activation_checkpointing": "offload"},
]


@pytest.mark.parametrize("options", MODES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_recomputing_changes_nothing(options, precision):
    def run(**chosen):
        scenarios.generators.seed_all(3, 0)
        engine = scenarios.make_engine(EngineConfig(precision=precision, **chosen), dropout=0.3)
        return scenarios.run_steps(engine, 0, 3, accumulation=2), scenarios.weights(engine)

    assert run(**options) == run()


class CountProducts(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.products = self.norms = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.products += function in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
        self.norms += function == torch.ops.aten.native_layer_norm.default
        return function(*args, **(kwargs or {}))


def count(mode, **options):
    model = scenarios.Toy(layers=4)
    scenarios.initialize(model)
    checkpoint_activations(model, mode, **options)
    tokens, targets = scenarios.batch_of(0)
    with CountProducts() as counted:
        model(tokens, targets).backward()
    return counted.products, counted.norms


def test_what_is_recomputed():
    products, norms = count("none")
    assert norms == 5  # one per block and the last one
    assert count("full") == (products + 4 * 2, norms + 4)
    assert count("selective", every=2) == (products + 2 * 2, norms + 2)
    assert count("selective", every=3) == (products + 2 * 2, norms + 2)
    assert count("selective", selective_by="op") == (products, norms + 4)


def test_what_blocks_keep_lies_elsewhere_and_weights_do_not_move():
    """Each tensor that a block keeps is copied once to the host, as it lies in memory, and read from there."""
    made, seen = torch.empty_like, []

    def empty_like(tensor, *, device, pin_memory):
        copy = made(tensor, device=device)
        seen.append((tensor.untyped_storage()._cdata, copy, tensor.stride(), pin_memory))
        return copy

    model, plain = scenarios.Toy(layers=2), scenarios.Toy(layers=2)
    for one in (model, plain):
        scenarios.initialize(one)
    checkpoint_activations(model, "offload")
    with unittest.mock.patch.object(torch, "empty_like", empty_like):
        loss = model(*scenarios.batch_of(0))
    assert len(seen) == 2 * 10  # norm 3, products and gelu 3, the factors 2, exponentials 2
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    assert not weights & {storage for storage, *_ in seen}
    assert all(copy.stride() == stride and not pinned for _, copy, stride, pinned in seen)
    plain(*scenarios.batch_of(0)).backward()
    loss.backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    # The copies are what the backward pass reads.
    model.zero_grad()
    with unittest.mock.patch.object(torch, "empty_like", empty_like):
        loss = model(*scenarios.batch_of(0))
    for _, copy, *_ in seen:
        copy.data.zero_()
    loss.backward()
    assert not model.blocks[0].down.weight.grad.any()


def test_offloading_is_refused_where_it_does_not_fit():
    for options, said in (
        ({"compile": True}, "excludes engine.compile"),
        ({"name": "deepspeed", "zero_stage": 3}, "does not work with DeepSpeed at engine.zero_stage = 3"),
    ):
        with pytest.raises(ValueError, match=f'engine.activation_checkpointing = "offload" {said}: use "full"'):
            EngineConfig(activation_checkpointing="offload", **options)
    for options, got in (({}, '"fsdp2"'), ({"name": "deepspeed", "zero_stage": 0}, '"deepspeed", stage 0')):
        with pytest.raises(ValueError, match=f'engine.offload needs engine.name = "deepspeed" at .*, got {got}$'):
            EngineConfig(offload=True, **options)


def test_this_projects_own_ops_are_saved():
    calls = []

    @torch.library.custom_op("matmix::counted_by_a_test", mutates_args=())
    def counted(x: torch.Tensor) -> torch.Tensor:
        calls.append(None)
        return x * 2

    counted.register_autograd(lambda context, gradient: gradient * 2)

    class Doubling(torch.nn.Module):
        def forward(self, x):
            return torch.sin(counted(torch.sin(x)))

    for by_op in (True, False):
        model = torch.nn.Module()
        model.blocks = torch.nn.ModuleList([Doubling()])
        checkpoint_activations(model, "selective", selective_by="op" if by_op else "block", every=1)
        calls.clear()
        model.blocks[0](torch.ones(3, requires_grad=True)).sum().backward()
        assert len(calls) == (1 if by_op else 2)


def test_names_stay():
    plain, changed = scenarios.Toy(), scenarios.Toy()
    checkpoint_activations(changed, "full")
    compile_blocks(changed)
    compute_in_bfloat16(changed, torch.device("cpu"))
    assert [name for name, _ in changed.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert list(changed.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in changed.named_modules()] == [name for name, _ in plain.named_modules()]


def test_no_recomputing_without_gradients():
    model = scenarios.Toy()
    scenarios.initialize(model)
    expected = model(*scenarios.batch_of(0)).item()
    checkpoint_activations(model, "full")
    with torch.no_grad(), CountProducts() as counted:
        assert model(*scenarios.batch_of(0)).item() == expected
    assert counted.products == 3 * 2 + 1


def test_bf16_leaves_parameters_alone():
    engine = scenarios.make_engine(EngineConfig(precision="bf16"))
    seen = {}

    def note(name, value):
        seen[name] = value.dtype

    block = engine.module.blocks[0]
    block.up.register_forward_hook(lambda _module, _inputs, output: note("product", output))
    block.register_forward_hook(lambda module, _inputs, _output: note("decay", torch.exp(module.A_log)))
    scenarios.train_step(engine, 0, accumulation=1)
    assert seen == {"product": torch.bfloat16, "decay": torch.float32}
    assert {parameter.dtype for parameter in engine.module.parameters()} == {torch.float32}


@pytest.mark.parametrize("options", [{}, {"activation_checkpointing": "full"}, MODES[2]])
def test_compiled_blocks(monkeypatch, options):
    """With the tracing and the autograd of the compiler, but not the minutes of its code generator."""
    compiled = torch.compile
    monkeypatch.setattr(activation.torch, "compile", lambda function: compiled(function, backend="aot_eager"))
    expected = scenarios.losses_of({"name": "fsdp2", **options}, 3, 2)
    history, weights = scenarios.losses_of({"name": "fsdp2", "compile": True, **options}, 3, 2)
    for got, want in zip(history, expected[0], strict=True):
        assert got == pytest.approx(want, abs=1e-5)
    for name, values in weights.items():
        assert values == pytest.approx(expected[1][name], abs=1e-5), name


def test_equal_blocks_are_compiled_once():
    from torch._dynamo.testing import CompileCounterWithBackend

    for mode in ("none", "full"):
        torch._dynamo.reset()
        model, counter = scenarios.Toy(layers=12), CompileCounterWithBackend("aot_eager")
        scenarios.initialize(model)
        checkpoint_activations(model, mode)
        compile_blocks(model, backend=counter)
        model(*scenarios.batch_of(0)).backward()
        assert counter.frame_count == 1


def test_recomputed_blocks_that_note_something_are_compiled_too():
    from torch._dynamo.testing import CompileCounterWithBackend

    class Noting(scenarios.Block):
        def forward(self, x):
            y = super().forward(x)
            self.noted = y.detach().amax()
            return y

    torch._dynamo.reset()
    model, counter = scenarios.Toy(), CompileCounterWithBackend("aot_eager")
    model.blocks = torch.nn.ModuleList([Noting(0.0) for _ in range(3)])
    scenarios.initialize(model)
    checkpoint_activations(model, "full")
    compile_blocks(model, backend=counter)
    model(*scenarios.batch_of(0)).backward()
    assert counter.frame_count == 1
    assert len({block.noted.item() for block in model.blocks}) == 3


@pytest.mark.slow
def test_compiled_for_real_on_two_ranks():
    options = {"activation_checkpointing": "selective", "selective_by": "op"}
    engines = [{"name": "fsdp2"}, {"name": "deepspeed", "zero_stage": 2}]
    runs = [({**engine, **extra}, 3, 1) for engine in engines for extra in (options, {"compile": True, **options})]
    # The first, which is not compiled, leaves nothing behind that the compiler would meet.
    runs.insert(0, ({"name": "deepspeed", "zero_stage": 3}, 3, 1))
    found = run_distributed(scenarios.losses_of_all, 2, arguments=(runs,), timeout=500)[0]
    for history, _ in found:
        for got, want in zip(history, found[0][0], strict=True):
            assert got == pytest.approx(want, abs=1e-5)

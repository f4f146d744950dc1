"""The MRU layer and a language model of such layers on the fused kernels: outputs and gradients of the parts."""

from __future__ import annotations

import functools

import pytest
import torch
from module_results import assert_close, results, rounding
from triton_on_cpu import names

from matmix.kernels.backend import takes_triton
from matmix.kernels.mru.op import no_kernel
from matmix.model.mixers import mru
from matmix.model.mixers.mru import MRU, MRUConfig
from matmix.train.activation import checkpoint_activations

PACKED = torch.tensor([0, 5, 5, 6, 40], dtype=torch.int32)


@pytest.fixture
def on_triton(interpreter, monkeypatch):
    """Makes the layer take the fused ops wherever a GPU would; returns the device."""

    def turn():
        monkeypatch.setattr(mru, "mru_mixer_is_fused", lambda *given: not no_kernel(*given))
        for name in ("mru_mixer", "mru_step"):
            monkeypatch.setattr(mru, name, functools.partial(getattr(mru, name), backend="triton"))
        return interpreter

    return turn


@pytest.mark.parametrize("cu_seqlens", [None, PACKED], ids=["rows", "packed"])
@pytest.mark.parametrize(
    "options",
    [
        {"construction": "cayley", "order": 4},
        {"construction": "ldu", "order": 4, "nheads": 2, "bias": True},
        {"construction": "identity_plus", "order": 8, "nheads": 1},
        {"construction": "identity_plus", "order": 4, "input": "chunked", "element_scale": 4.0},
        {"construction": "ldu", "order": 4, "nheads": 4, "input": "chunked", "element_scale": 5.0, "output_scale": 2.0},
    ],
)
def test_layer(on_triton, launched, randomize, options, cu_seqlens):
    layer = randomize(MRU(32, MRUConfig(**options), causal=True, max_seqlen=64, output_std=0.02))
    with torch.no_grad():
        (layer.in_proj.weight if hasattr(layer, "in_proj") else layer.state_up).mul_(0.1)
    x = torch.randn(1 if cu_seqlens is not None else 2, 40, 32)
    rounded = rounding(layer, x, cu_seqlens=cu_seqlens)
    wanted = results(layer, "cpu", x, cu_seqlens=cu_seqlens)
    norms = layer.log_norms
    assert not launched
    device = on_triton()
    assert_close(results(layer, device, x, cu_seqlens=cu_seqlens), wanted, rounded)
    # Cayley's matrices are made before each pass.
    passes = [name for name in names(launched) if name not in ("cayley_pass", "polish_pass")]
    assert passes == ["outputs_pass", "collect_pass", "gradients_pass"]
    assert ("cayley_pass" in names(launched)) == (options["construction"] == "cayley")
    # Both look at the last state of each document; only the kernels also at those of chunks.
    assert layer.log_norms[0] >= norms[0] - 1e-5


@pytest.mark.parametrize("options", [{"order": 3, "nheads": 1}, {"construction": "householder"}, {"decay": True}])
def test_what_has_no_kernel_takes_the_parts(on_triton, launched, randomize, options):
    layer = randomize(MRU(48, MRUConfig(**{"order": 4, **options}), causal=True, max_seqlen=64, output_std=0.02))
    x = torch.randn(1, 9, 48)
    rounded = rounding(layer, x)
    wanted = results(layer, "cpu", x)
    found = results(layer, on_triton(), x)
    assert "outputs_pass" not in names(launched)
    assert_close(found, wanted, rounded)


def test_dropout_in_training_takes_elements(on_triton, launched, randomize):
    """Chunked input with dropout has elements in memory in training, and the fused kernels take those."""
    options = MRUConfig(order=4, input="chunked", construction="identity_plus", dropout=0.5)
    layer = randomize(MRU(32, options, causal=True, max_seqlen=64, output_std=0.02)).to(on_triton())
    x = torch.randn(1, 5, 32).to(next(layer.parameters()).device)
    layer.train()(x)
    layer.eval()(x)
    assert names(launched) == ["outputs_pass", "outputs_pass"]
    assert [launch.constants["CHUNKED"] for launch in launched] == [False, True]


def test_language_model_with_recomputed_blocks(on_triton, launched, small_model):
    model = small_model("language_model", ("mru",), n_layers=2, d_model=16, mru=MRUConfig(order=4)).train()
    ids = torch.randint(61, (2, 21))
    rounded = rounding(model, ids)
    wanted = results(model, "cpu", ids)
    checkpoint_activations(model, "full")
    assert_close(results(model, on_triton(), ids), wanted, rounded)
    assert names(launched).count("outputs_pass") == 4


def test_generation_equals_the_parallel_form(on_triton, launched, small_model, randomize):
    model = randomize(small_model("language_model", ("mru",), n_layers=2, d_model=16, mru=MRUConfig(order=4)).eval())
    model.to(on_triton())
    ids = torch.randint(61, (2, 12))
    with torch.no_grad():
        whole = model(ids)
        logits, state = model.prefill(ids[:, :5])
        steps = [logits]
        for t in range(5, 12):
            logits, state = model.step(ids[:, t], state)
            steps.append(logits)
    torch.testing.assert_close(torch.stack(steps, 1), whole[:, 4:], rtol=1e-5, atol=1e-5)
    assert names(launched).count("outputs_pass") == 2 * (1 + 1 + 7)


def test_the_choice_of_kernels_is_traced(monkeypatch, randomize):
    """torch.compile must get through it on GPUs; the interpreter's switch makes a CPU look like one."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    layer = randomize(MRU(16, MRUConfig(order=4), causal=True, max_seqlen=64, output_std=0.02))
    chosen = []

    def choose(elements, *given):
        chosen.append(not no_kernel(elements, *given) and takes_triton("triton", elements))
        return False

    monkeypatch.setattr(mru, "mru_mixer_is_fused", choose)
    x = torch.randn(2, 9, 16)
    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))
    assert all(chosen)

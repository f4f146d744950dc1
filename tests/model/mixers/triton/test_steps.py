"""Steps of mixers on the kernels of a single token: a prompt of a batch and steps after it are the whole sequence."""

from __future__ import annotations

import functools

import pytest
import torch
from mixer_cases import D_MODEL, small_config
from triton_on_cpu import names

from matmix.model.mixers import MIXERS, base
from matmix.model.mixers.scans import lion

MODULES = (base, lion)
SCAN, CONV = "advance_state", "advance_window"
LAUNCHES = {
    "semiseparable": [CONV, SCAN],
    "retnet": [SCAN],
    "linear_attention": [SCAN],
    "sma_causal": [SCAN],
    "sma_decay": [SCAN],
    "sma_semiseparable": [SCAN],
    "convolution": [CONV],
    "hyena": [CONV],
    "gated_delta": [CONV],
}


@pytest.fixture
def on_triton(interpreter, monkeypatch):
    """Makes steps take their kernels wherever a GPU would; returns the device."""

    def turn():
        for module in MODULES:
            for name in ("semiseparable_step", "short_conv_step"):
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, functools.partial(getattr(module, name), backend="triton"))
        return interpreter

    return turn


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LAUNCHES)
@torch.no_grad()
def test_a_prompt_and_steps_are_the_whole_sequence(on_triton, launched, randomize, name, dtype):
    kind = MIXERS[name]
    mixer = randomize(kind(D_MODEL, small_config(name), causal=True, max_seqlen=16, output_std=0.1), std=0.3)
    x = torch.randn(3, 8, D_MODEL)
    whole = mixer(x)
    device = on_triton()
    mixer.to(device, dtype)
    x = x.to(device, dtype)
    y, state = mixer.forward_with_state(x[:, :4], mixer.initial_state(3))
    outputs = [y]
    launched.clear()
    for t in range(4, 8):
        y, state = mixer.step(x[:, t], state)
        outputs.append(y.unsqueeze(1))
    assert names(launched) == LAUNCHES[name] * 4
    y = torch.cat(outputs, 1).cpu().float()
    error = (y - whole).square().mean().sqrt() / whole.square().mean().sqrt()
    assert error < (1e-5 if dtype == torch.float32 else 5e-2)


@torch.no_grad()
def test_lions_recurrence(on_triton, launched, randomize):
    config = small_config("lion_s", form="recurrent")
    mixer = randomize(MIXERS["lion_s"](D_MODEL, config, causal=False, max_seqlen=16, output_std=0.1), std=0.3)
    x = torch.randn(2, 5, D_MODEL)
    wanted, device = mixer(x), on_triton()
    launched.clear()
    y = mixer.to(device)(x.to(device))
    assert names(launched) == [SCAN] * 5
    torch.testing.assert_close(y.cpu(), wanted, rtol=1e-4, atol=1e-5)

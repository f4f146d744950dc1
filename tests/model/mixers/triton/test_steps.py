"""Steps of mixers on the kernels of a single token: a prompt of a batch and steps after it are the whole sequence."""

from __future__ import annotations

import functools

import pytest
import torch
from mixer_cases import D_MODEL, small_config
from triton_on_cpu import names

from matmix.model.mixers import MIXERS
from matmix.model.mixers.attention import masked
from matmix.model.mixers.convolutions import hyena, short
from matmix.model.mixers.scans import gated_delta, linear_attention, lion_forms, retnet, semiseparable

MODULES = (masked, hyena, short, gated_delta, linear_attention, lion_forms, retnet, semiseparable)
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
    mixer = MIXERS["lion_s"](D_MODEL, small_config("lion_s"), causal=False, max_seqlen=16, output_std=0.1)
    x = torch.randn(2, 5, D_MODEL)
    wanted = randomize(mixer, std=0.3)(x)
    mixer.to(device := on_triton())
    launched.clear()
    found = {}
    for backward in (False, True):
        state, pieces = mixer.direction_state(2), []
        for token in (x.flip(1) if backward else x).to(device).unbind(1):
            y, c, state = mixer.direction_step(token, state, backward=backward)
            pieces.append((y, c))
        found[backward] = [torch.stack(p[::-1] if backward else p, 1) for p in zip(*pieces, strict=True)]
    assert names(launched) == [SCAN] * 10
    torch.testing.assert_close(mixer.merge_directions(found[False], found[True]).cpu(), wanted, rtol=1e-4, atol=1e-5)

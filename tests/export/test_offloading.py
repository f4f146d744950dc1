"""Layers of exports on several devices, with matmix installed."""

import pytest
import torch
from accelerate import dispatch_model
from bare_offloading import check_offloading
from transformers import AutoModelForCausalLM


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_offloaded_layers_give_what_they_give_in_memory(exports):
    check_offloading(exports)


@pytest.mark.parametrize("order", [("dispatch", "recompute"), ("recompute", "dispatch")])
def test_recomputing_layers_keeps_what_moves_their_inputs(exports, order):
    path, ids = exports / "mru" / "export", torch.arange(20, 32)[None]
    plain, model = (AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True).train() for _ in range(2))
    plain(ids, labels=ids).loss.backward()
    for step in order:
        if step == "dispatch":
            dispatch_model(model, {"": "cpu"}, force_hooks=True)
        else:
            model.gradient_checkpointing_enable()
    block, moved, mixed = model.model.blocks[0], [], []
    move = block._hf_hook.pre_forward
    block._hf_hook.pre_forward = lambda *inputs, **options: moved.append(1) or move(*inputs, **options)
    block.mixer.register_forward_hook(lambda *_: mixed.append(1))
    model(ids, labels=ids).loss.backward()
    assert (len(moved), len(mixed)) == (1, 2)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, plain.get_parameter(name).grad)
    model.gradient_checkpointing_disable()
    model(ids, labels=ids).loss.backward()
    assert (len(moved), len(mixed)) == (2, 3)

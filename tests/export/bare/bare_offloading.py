"""Checks that exported models work with layers that accelerate offloads; nothing of matmix."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from bare_loading import load
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

CHECKED = {"mru": AutoModelForCausalLM, "mixed": AutoModelForCausalLM, "hydra": AutoModelForMaskedLM}


def check_offloading(exports: Path) -> None:
    """Offloaded layers give what they give in memory, in the forward pass and in generation."""
    for name, auto_class in CHECKED.items():
        path = exports / name / "export"
        whole, _ = load(auto_class, path)
        ids = torch.arange(20, 44).view(2, 12)
        mask = torch.ones_like(ids)
        mask[0, :3] = 0
        blocks = [f"model.blocks.{index}" for index in range(len(whole.model.blocks))]
        ends = [f"model.{part}" for part, _ in whole.model.named_children() if part != "blocks"]
        most = sum(weight.numel() * weight.element_size() for weight in whole.parameters()) * 19 // 20
        # In the second the logits read weights of layers that are away.
        for options in (
            {"device_map": dict.fromkeys(ends, "cpu") | dict.fromkeys(blocks[:-1], "disk") | {blocks[-1]: "cpu"}},
            {"device_map": dict.fromkeys(ends, "disk") | dict.fromkeys(blocks, "cpu")},
            {"device_map": "auto", "max_memory": {"cpu": most}},
        ):
            with tempfile.TemporaryDirectory() as folder:
                part, _ = load(auto_class, path, offload_folder=folder, **options)
                away = sum(weight.is_meta for weight in part.parameters())
                assert 0 < away < len(list(part.parameters())), f"{name}: {options} offload {away} weights"
                compare(whole, part, {"input_ids": ids, "attention_mask": mask})


def compare(whole, part, batch: dict[str, torch.Tensor]) -> None:
    options = {"output_hidden_states": True, "return_dict": True}
    with torch.no_grad():
        expected, found = whole(**batch, **options), part(**batch, **options)
    assert torch.equal(found.logits, expected.logits)
    assert all(map(torch.equal, found.hidden_states, expected.hidden_states))
    if not whole.can_generate():
        return
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    for more in ({}, {"use_cache": False}, {"num_beams": 2}):
        expected, found = (model.generate(**batch, **options, **more) for model in (whole, part))
        assert torch.equal(found, expected), f"generation with {more} differs"
    options |= {"return_dict_in_generate": True, "output_hidden_states": True}
    expected, found = (model.generate(**batch, **options).hidden_states for model in (whole, part))
    for streams, others in zip(found, expected, strict=True):
        assert all(map(torch.equal, streams, others))

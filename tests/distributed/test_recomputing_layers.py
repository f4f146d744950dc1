"""Layers that compute parts of themselves again in the backward pass, with sharded weights."""

from __future__ import annotations

import pytest
import scenarios
import torch
from harness import run_distributed

from matmix.model import MixerOptions, ModelConfig, build_model, initialize
from matmix.model.mixers.scans.hydra import HydraConfig
from matmix.train.engine.build import build_engine
from matmix.train.engine.config import EngineConfig


def weights_after_two_steps(recompute: bool, **options) -> dict[str, list[float]]:
    """Every rank has half of four sequences."""
    hydra = HydraConfig(headdim=8, d_state=4, recompute=recompute)
    config = ModelConfig(
        architecture="encoder",
        vocab_size=33,
        d_model=16,
        n_layers=2,
        layers=("hydra",),
        mixers=MixerOptions(hydra=hydra),
    )
    engine = build_engine(EngineConfig(name="fsdp2", **options), scenarios.place())
    with torch.device("meta"):
        model = build_model(config)
    engine.prepare(model, lambda module: initialize(module, 0), scenarios.make_optimizer)
    share = 4 // engine.world_size
    for step in range(2):
        ids = torch.randint(33, (4, 12), generator=torch.Generator().manual_seed(step))
        own = ids[engine.rank * share : (engine.rank + 1) * share]
        engine.backward(engine.model(own).float().square().sum() / ids.numel(), last=True)
        engine.step(0.0)
    return {name: tensor.flatten().tolist() for name, tensor in scenarios.full_weights(engine)}


def runs() -> list[dict[str, list[float]]]:
    return [
        weights_after_two_steps(False),
        weights_after_two_steps(True),
        weights_after_two_steps(False, precision="bf16"),
        weights_after_two_steps(True, precision="bf16"),
        weights_after_two_steps(True, activation_checkpointing="selective"),
    ]


@pytest.mark.slow
def test_recomputing_with_sharded_weights():
    alone = weights_after_two_steps(True)
    for plain, again, low, low_again, mixed in run_distributed(runs, 2):
        assert again == plain
        assert low_again == low
        assert mixed == plain
        for name, values in plain.items():
            assert values == pytest.approx(alone[name], abs=1e-4), name

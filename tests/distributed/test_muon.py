"""Muon on ranks: the weights of one process, each map made orthogonal by one rank, and a momentum that is cut."""

from __future__ import annotations

import muon_scenario
import pytest
import torch
from harness import run_distributed
from muon_scenario import MAPS, STEPS

from matmix.train.engine.config import EngineConfig
from matmix.train.engine.kinds import Sizes, sent
from matmix.train.optim.owners import BATCH

RUNS = {
    2: [({"name": "fsdp2"}, 100), ({"name": "ddp"}, BATCH)],
    3: [
        ({"name": "fsdp2"}, BATCH),
        ({"name": "fsdp2", "reshard_after_forward": False}, 1),
        ({"name": "deepspeed", "zero_stage": 0}, BATCH),
    ],
    4: [({"name": "fsdp2", "replicate": 2}, BATCH), ({"name": "fsdp2"}, BATCH)],
}


@pytest.fixture(scope="module")
def whole():
    return muon_scenario.train({"name": "fsdp2"})


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_weights_are_those_of_one_process(ranks, whole):
    """After 20 steps to 1e-5: FSDP2 with rows that ranks do not divide and ranks without any, HSDP, DDP; maps on
    their way all at once and one after the other. What is sent is what plans say."""
    assert whole.count == STEPS * MAPS
    found = run_distributed(muon_scenario.train_all, ranks, arguments=(RUNS[ranks],))
    for number, (options, _) in enumerate(RUNS[ranks]):
        of_ranks = [muon_scenario.Trained(*one[number]) for one in found]
        for one in of_ranks:
            for name, values in whole.weights.items():
                near = {"rtol": 0, "atol": 1e-5, "msg": name}
                torch.testing.assert_close(torch.tensor(one.weights[name]), torch.tensor(values), **near)
        if options["name"] == "deepspeed":  # every rank holds all, and updates it by itself
            assert [(one.count, one.held, one.sent) for one in of_ranks] == ranks * [(whole.count, whole.held, 0)]
            continue
        counts = [one.count for one in of_ranks]
        assert sum(counts) == STEPS * MAPS
        assert all(0 < own < STEPS * MAPS for own in counts), counts
        copies = ranks if options["name"] == "ddp" else options.get("replicate", 1)
        assert sum(one.held for one in of_ranks) == copies * whole.held
        assert max(one.buffers for one in of_ranks) == pytest.approx(of_ranks[0].planned, rel=0.2)
        sizes = Sizes(weights=(), n_blocks=1, moments=0.0, accumulation=1, to_owners=whole.held)
        (planned,) = (one.sent for one in sent(EngineConfig(**options), ranks, sizes) if "whole" in one.what)
        # Of a map that lies with few ranks, the owner may be one of them or not.
        near = 0 if options["name"] == "ddp" else 0.25
        assert sum(one.sent for one in of_ranks) / ranks / STEPS == pytest.approx(planned, rel=near)

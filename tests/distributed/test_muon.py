"""Muon on ranks: the weights of one process, each map made orthogonal by one rank, and a momentum that is cut."""

from __future__ import annotations

import muon_scenario
import pytest
import torch
from harness import run_distributed
from muon_scenario import MAPS, STEPS

from matmix.train.optim.owners import BATCH

RUNS = {
    2: [({"name": "fsdp2"}, 100), ({"name": "ddp"}, BATCH)],
    3: [({"name": "fsdp2"}, BATCH), ({"name": "fsdp2", "reshard_after_forward": False}, 1)],
    4: [({"name": "fsdp2", "replicate": 2}, BATCH), ({"name": "fsdp2"}, BATCH)],
}


@pytest.fixture(scope="module")
def whole():
    return muon_scenario.train({"name": "fsdp2"})


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_weights_are_those_of_one_process(ranks, whole):
    """After 20 steps to 1e-5: FSDP2 with rows that ranks do not divide and ranks without any, HSDP, DDP; maps on
    their way all at once and one after the other."""
    weights, count, momenta = whole
    assert count == STEPS * MAPS
    found = run_distributed(muon_scenario.train_all, ranks, arguments=(RUNS[ranks],))
    for number, (options, _) in enumerate(RUNS[ranks]):
        of_ranks = [one[number] for one in found]
        for own, _, _ in of_ranks:
            for name, values in weights.items():
                torch.testing.assert_close(torch.tensor(own[name]), torch.tensor(values), rtol=0, atol=1e-5, msg=name)
        counts = [count for _, count, _ in of_ranks]
        assert sum(counts) == STEPS * MAPS
        assert all(0 < own < STEPS * MAPS for own in counts), counts
        copies = ranks if options["name"] == "ddp" else options.get("replicate", 1)
        assert sum(held for _, _, held in of_ranks) == copies * momenta

"""Products of matrices, the MRU mixer and delta rules over rows that several ranks hold parts of."""

from __future__ import annotations

import delta_scenario
import product_scenario
import pytest
import torch
from harness import run_distributed

LARGEST = {torch.float64: 1e-12, torch.float32: 1e-5}


@pytest.mark.parametrize("scenario", [product_scenario.products, product_scenario.mixers, delta_scenario.rules])
@pytest.mark.parametrize(("ranks", "dtype"), [*((n, torch.float64) for n in (2, 3, 4)), (3, torch.float32)])
def test_parts_are_parts_of_the_whole(scenario, ranks, dtype):
    for errors in run_distributed(scenario, ranks, arguments=(dtype,)):
        wrong = {name: case for name, case in errors.items() if not all(x <= LARGEST[dtype] for x in case.values())}
        assert not wrong, wrong


@pytest.mark.parametrize("ranks", [2, 3])
def test_log_norms_are_those_of_all_parts(ranks):
    for seen in run_distributed(product_scenario.log_norms, ranks):
        for whole, part in zip(seen[::2], seen[1::2], strict=True):
            assert part == pytest.approx(whole, rel=1e-6)

"""Products of matrices, the MRU mixer and delta rules over rows that several ranks hold parts of."""

from __future__ import annotations

import delta_scenario
import mixer_parts_scenario
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


def test_as_much_is_sent_whatever_the_length():
    """An MRU of 4 heads of order 4, whose affine maps are half the identity; 2 heads of 4 keys and 8 values; and of 8
    and 8."""
    names = ["mru", "gated_delta", "rwkv7"]
    for rank, sent in enumerate(run_distributed(mixer_parts_scenario.bytes_sent, 2, arguments=(names, [256, 1024]))):
        assert all(sent[name, 256] == sent[name, 1024] for name in names)
        gathered = {name: [size for kind, size in sent[name, 256] if kind != "batch_isend_irecv"] for name in names}
        half, flag = 4 * 4 * 2 * 4, 4
        assert gathered["mru"] == [half + flag, 2 * half + flag]
        # Backward goes what is a gradient of each rank's.
        assert gathered["gated_delta"] == [4 * 2 * 4 * (8 + 4), 2 * 4 * 2 * 4 * (8 + 4)]
        assert gathered["rwkv7"] == [4 * 2 * 8 * (8 + 8), 2 * 4 * 2 * 8 * (8 + 8)]
        # The token before the part, and back its gradient.
        rows = [size for kind, size in sent["mru", 256] if kind == "batch_isend_irecv"]
        assert rows == ([4 * 16, 0] if rank == 0 else [0, 4 * 16])

"""Rows that several ranks hold parts of: what the ranks send each other."""

import context_scenario
import pytest
import torch
from harness import run_distributed

from matmix.kernels.context import Crossing, carried, where_crossing


def test_ranks_send_each_other_parts_and_gradients():
    for rank, got in enumerate(run_distributed(context_scenario.gathers_and_exchanges, 3)):
        assert got["named"]
        assert got["gathered states"] == [[3, 2, 3], [0.5, 1.5, 2.5]]
        assert got["gathered"] == [0, 2, 10, 12, 20, 22]
        assert got["gradient"] == [6.0] * 4
        assert got["exchanged"] == [[1, 12, 2], True, [float(rank)]]
        assert got["neighbours"] == [max(rank - 0.5, 0), (rank + 1) % 3, None, max(rank - 1, 0)]


@pytest.mark.parametrize("rightwards", [True, False])
@pytest.mark.parametrize("rank", range(4))
def test_states_are_carried_as_the_recurrence_does(rank, rightwards):
    torch.manual_seed(0)
    added = torch.randn(4, 1, 2, 3, 5, dtype=torch.float64)
    passed = -torch.rand(4, 1, 2, dtype=torch.float64)
    passed[1, 0, 0] = -torch.inf
    added[0, 0, 0] = torch.nan  # a document that ends in the next part
    state = torch.zeros(1, 2, 3, 5, dtype=torch.float64)
    for one in range(rank) if rightwards else range(3, rank, -1):
        through = passed[one].exp()[..., None, None]
        state = torch.where(through == 0, 0, through * state) + added[one]
    got = carried(added, passed, rank, rightwards)
    torch.testing.assert_close(got, state, rtol=1e-14, atol=1e-14, equal_nan=True)


@pytest.mark.parametrize(
    ("bounds", "crossing"),
    [
        ([0, 8], (False, False, False)),
        ([-3, 8], (True, False, False)),
        ([-3, 20], (True, True, True)),
        ([-3, 2, 9], (True, True, False)),
        ([0, 9], (False, True, False)),
        ([-1, 0, 8, 12], (False, False, False)),
    ],
)
def test_documents_that_cross_edges(bounds, crossing):
    got = Crossing.of(torch.tensor(bounds, dtype=torch.int32), 8)
    assert tuple(bool(one) for one in got) == crossing
    assert where_crossing(got.left, torch.tensor([torch.nan])).isnan().item() == crossing[0]

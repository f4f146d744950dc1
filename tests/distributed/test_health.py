"""Ranks that check each other say the same and name the bad node."""

import health_scenario
from harness import run_distributed


def test_two_nodes(tmp_path):
    first, second = run_distributed(health_scenario.check, 2, arguments=(str(tmp_path),), alone=True)
    assert first == second
    assert first["sound"].startswith("2 ranks on 2 nodes healthy, all-reduce ")
    assert first["bandwidth is positive"] == "True"
    # Rank 1 sends a wrong number and expects one: the receiver on either side sees it.
    assert "node gpu01 (rank 0): 1 of 1048576 numbers from rank 1 arrived wrong" in first["bad memory"]
    # With two nodes nobody can say whose clock is right: both are an hour from the middle.
    assert "the clock of node gpu01 is 3600 s behind the others'" in first["bad clock"]

"""The check before training: what is fit passes, and what is not is named."""

import pytest
import torch

from matmix.train.errors import HealthError
from matmix.train.process import health
from matmix.train.process.distributed import Distributed
from matmix.train.process.health import NodeReport, check_health, describe, find_warnings


def test_one_process(tmp_path):
    (found,) = check_health(Distributed(), tmp_path / "not" / "yet" / "there")
    assert found.bandwidth == 0
    assert found.free_bytes > 0
    assert describe([found]) == f"1 rank on 1 node healthy, {found.free_bytes / 2**30:.0f} GiB free for the run"


def test_a_device_that_is_gone_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("MATMIX_NODE", "gpu17")

    def fail(*_args, **_kwargs):
        raise RuntimeError("CUDA error: device unavailable\nmore lines")

    monkeypatch.setattr(torch, "full", fail)
    with pytest.raises(
        HealthError,
        match=r"^health check failed: node gpu17 \(rank 0\): device cpu does not compute: CUDA error: device "
        r"unavailable; exclude the node and start again$",
    ):
        check_health(Distributed(), tmp_path)


def test_a_device_that_computes_wrong_is_named(tmp_path, monkeypatch):
    full = torch.full
    monkeypatch.setattr(torch, "full", lambda size, value, **options: full(size, value + 0.25, **options))
    with pytest.raises(HealthError, match=r"device cpu computes wrong: 147456\.0 in place of 65536\.0"):
        check_health(Distributed(), tmp_path)


def report(rank: int, **changes) -> NodeReport:
    return NodeReport(rank, f"node{rank // 2}", free_bytes=1 << 40, clock=1000.0, link_seconds=0.01, **changes)


def test_nothing_to_warn_of():
    assert find_warnings([report(rank) for rank in range(6)]) == []


def changed(rank: int, **changes) -> list[NodeReport]:
    import dataclasses

    return [dataclasses.replace(report(r), **(changes if r == rank else {})) for r in range(6)]


def test_a_clock_that_is_off():
    (text,) = find_warnings(changed(2, clock=1000.0 + 3600))
    assert text.startswith("the clock of node node1 is 3600 s ahead of the others'")
    (text,) = find_warnings(changed(4, clock=990.0))
    assert text.startswith("the clock of node node2 is 10 s behind the others'")


def test_a_disk_that_is_full():
    assert find_warnings(changed(2, free_bytes=5 << 20)) == ["node node1 sees only 5 MiB free where the run is written"]


def test_a_slow_link():
    assert find_warnings(changed(3, link_seconds=0.8)) == ["slow links into rank 3 (node node1): 0.80 s against 0.01 s"]


def test_many_bad_nodes_are_one_line():
    bad = [report(rank, problem="broken") for rank in range(6)]
    with pytest.raises(HealthError, match=r"node node0 \(rank 0\): broken; .* and 2 more; exclude"):
        health._raise_problems(bad)

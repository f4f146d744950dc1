"""Runs at a URL on several nodes, each of which sees its own folder only."""

from __future__ import annotations

import pytest
import remote_scenarios
from harness import run_distributed
from object_store import running_store
from runs import losses

ENGINES = {
    "fsdp2": ["--engine.name", "fsdp2"],
    "zero1": ["--engine.name", "deepspeed", "--engine.zero-stage", "1"],
    "zero3": ["--engine.name", "deepspeed", "--engine.zero-stage", "3"],
}


@pytest.fixture
def store(monkeypatch):
    with running_store(monkeypatch) as running:
        yield running


def manifests(store) -> list[str]:
    return sorted(name.split("/")[2] for name in store.names("run/checkpoints/") if name.endswith("checkpoint.json"))


@pytest.mark.parametrize(
    ("engine", "nodes", "ranks"),
    [
        pytest.param("fsdp2", 2, 1, marks=pytest.mark.slow),
        pytest.param("fsdp2", 2, 2, marks=pytest.mark.slow),
        pytest.param("zero1", 2, 2, marks=pytest.mark.slow),
        pytest.param("zero3", 2, 1, marks=pytest.mark.slow),
    ],
)
def test_nodes_that_share_nothing(engine, nodes, ranks, store, dataset, tmp_path):
    common = ["--data.path", dataset, "--device", "cpu", "--steps", "8", "--checkpoint.every", "2", *ENGINES[engine]]
    common += ["--logging.every", "1", "--evaluation.every", "0", "--data.workers", "0"]
    url = f"{store.url}/run"
    # At step 4 what the second node uploads is refused: no checkpoint, though the first node's part is there.
    victim = f"step-00000004/generators/rank-{ranks:05d}.json"
    store.refuse = lambda method, path: method == "PUT" and path.endswith(victim)
    starts = [
        ([], [*common, "--run-dir", str(tmp_path / "straight")]),
        ([], [*common, "--run-dir", url, "--stop-step", "3"]),
        ([1], [*common, "--run-dir", url, "--stop-step", "5"]),  # the second node is another one now
        ([0, 1], [*common, "--run-dir", url]),
    ]
    arguments = (store.environment(), str(tmp_path), ranks, starts)
    held = run_distributed(remote_scenarios.train_on_nodes, nodes * ranks, arguments=arguments, timeout=400, alone=True)
    assert manifests(store) == ["step-00000006", "step-00000008"]
    _, after_first, _, after_last = held[ranks]
    generators = {name.rpartition("/")[2] for name in after_first if "generators/rank" in name}
    assert generators == {f"rank-{rank:05d}.json" for rank in range(ranks, 2 * ranks)}
    assert not [name for name in after_first if name.endswith("metrics.jsonl")]
    assert any(name.endswith("config.toml") for name in after_last)
    straight = losses(tmp_path / "straight")
    assert len(straight) == 8
    metrics = tmp_path / "metrics"
    metrics.mkdir()
    (metrics / "metrics.jsonl").write_bytes(store.get("run/metrics.jsonl"))
    assert losses(metrics) == straight

"""Copies of the state on nodes that share nothing but the run's folder: what a lost node costs."""

from __future__ import annotations

import local_copies_scenario as scenario
import pytest
from harness import run_distributed
from local_copies_scenario import Start
from runs import losses, weights

ENGINES = {
    "fsdp2": [],
    "ddp": ["--engine.name", "ddp"],
    "hsdp": ["--engine.replicate", "2"],
    "zero1": ["--engine.name", "deepspeed", "--engine.zero-stage", "1"],
    "zero3": ["--engine.name", "deepspeed", "--engine.zero-stage", "3"],
}
ALONE = ("--checkpoint.local-peers", "False")
CHECKPOINT, COPY = "resumed from step-{:08d}: ", "going on from the node-local copy of step {}: "
BOTH_LOST = "warning: the node-local copy of step 11 is not used: 1 of its "
# Starts one after the other, and what each says first. Steps 5, 10 and 15 are saved.
STORY = [
    (Start(kill=4), None),
    (Start(kill=7), COPY.format(3)),
    (Start(kill=9, lost=(1,)), COPY.format(6)),
    (Start(kill=12, lost=(0,)), COPY.format(8)),
    (Start(kill=14, damaged=((0, "rank-00000.json"), (1, "rank-00000.json"))), BOTH_LOST),
    (Start(kill=14, damaged=((1, "rank-00000.json"),), begun=((1, "*.distcp"),)), COPY.format(13)),
    (Start(kill=17, overrides=ALONE), COPY.format(13)),
    (Start(kill=17, overrides=ALONE), COPY.format(16)),
    (Start(kill=19, overrides=ALONE), COPY.format(16)),
    (Start(lost=(1,), overrides=ALONE), "warning: the node-local copy of step 18 is not used: "),
]


@pytest.mark.parametrize(
    ("engine", "ranks"),
    [
        ("fsdp2", 1),
        *(
            pytest.param(name, 2 if name == "hsdp" else 1, marks=pytest.mark.slow)
            for name in ENGINES
            if name != "fsdp2"
        ),
        pytest.param("fsdp2", 2, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_a_lost_node_loses_nothing(engine, ranks, dataset, tmp_path):
    """Nor does a damaged copy, where the neighbour has another; what no node has any more is not used."""
    common = ["--data.path", dataset, "--device", "cpu", "--steps", "20", "--checkpoint.every", "5", *ENGINES[engine]]
    common += ["--logging.every", "1", "--evaluation.every", "0", "--data.workers", "0"]
    common += ["--run-dir", str(tmp_path / "run")]
    alone = ("--run-dir", str(tmp_path / "straight"), "--checkpoint.local-every", "0")
    starts = [Start(overrides=alone), *(start for start, _ in STORY)]
    arguments = (str(tmp_path), ranks, common, starts)
    found = run_distributed(scenario.train_on_nodes, 2 * ranks, arguments=arguments, timeout=500, alone=True)[0][1:]
    said = [lines for lines, _ in found]
    for lines, (start, first) in zip(said, STORY, strict=True):
        assert lines == [] if first is None else lines[0].startswith(first), (start, lines)
    assert said[4][1].startswith(CHECKPOINT.format(10))
    assert said[9][1].startswith(CHECKPOINT.format(15))
    if engine == "fsdp2":  # the same ranks need no shards but their own, once the node holds no neighbour's
        own = {f"{kind}__{rank}_0.distcp" for rank in range(ranks) for kind in ("", "moments")}
        assert {name for name in found[7][1] if name.endswith(".distcp")} == own
    assert losses(tmp_path / "run") == losses(tmp_path / "straight")
    assert len(losses(tmp_path / "run")) == 20
    expected = weights(tmp_path / "straight")
    assert all((tensor == expected[name]).all() for name, tensor in weights(tmp_path / "run").items())
    assert not list(tmp_path.glob("memory-*/*/*/*"))

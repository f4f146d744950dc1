"""An overflow on one rank is named by all of them."""

import json
from pathlib import Path

import overflow_scenario
import pytest
from harness import run_distributed
from scenarios import ENGINES


@pytest.mark.slow
def test_the_layer_that_overflows_on_the_other_rank_is_named(dataset, tmp_path):
    runs = {}
    for name in ("fsdp2", "ddp", "zero2", "zero3"):
        options = [part for key, value in ENGINES[name].items() for part in (f"--engine.{key}", str(value))]
        options += ["--data.path", dataset, "--device", "cpu", "--run-dir", str(tmp_path / name)]
        options += ["--model.mixers.mru.construction", "ldu", "--model.dropout", "0", "--evaluation.every", "0"]
        runs[name] = [*options, "--max-bad-steps", "2", "--checkpoint.every", "2", "--logging.every", "2"]
    found = run_distributed(overflow_scenario.overflow_on_the_last_rank, 2, arguments=(runs, 4, 1))
    where = "the states of layer 1 (mru, construction ldu) left the range of float32"
    for name in runs:
        for error, _ in (rank[name] for rank in found):
            assert f"2 steps in a row had a NaN or infinite loss or gradient (last: step 5, where {where})" in error
        assert f"step 4: {where}; loss nan" in found[0][name][1], name
        kept = sorted(path.name for path in (tmp_path / name / "checkpoints").iterdir())
        assert kept == ["step-00000002", "step-00000004"]
        lines = map(json.loads, (Path(tmp_path) / name / "metrics.jsonl").read_text().splitlines())
        largest = [line["monitor/blocks.1.log_norm_max"] for line in lines]
        assert [value is not None for value in largest] == [True, False]

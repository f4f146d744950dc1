"""Runs of two ranks that read directories of others go on, after a stop, as if there had been none."""

import json

import pytest
import run_scenarios
from foreign import write_tar
from harness import run_distributed
from streaming import MDSWriter

TEXTS = [f"text {number} " + "word " * (number % 40) for number in range(120)]
STOP, STEPS = 3, 6


@pytest.mark.slow
def test_runs_go_on_exactly(tmp_path):
    """Fetched from a URL, by two reading processes of each rank, with evaluations in between."""
    for name in ("train", "val"):
        (tmp_path / "tars" / name).mkdir(parents=True)
    write_tar(tmp_path / "tars/val/a.tar", {f"{n}.txt": text for n, text in enumerate(TEXTS[:30])})
    for shard in range(6):
        texts = enumerate(TEXTS[shard::6])
        write_tar(tmp_path / f"tars/train/{shard}.tar", {f"{n}.txt": text for n, text in texts})
    with MDSWriter(out=str(tmp_path / "mds/train"), columns={"text": "str"}, compression="zstd", size_limit=600) as out:
        for text in TEXTS:
            out.write({"text": text})
    with MDSWriter(out=str(tmp_path / "mds/val"), columns={"text": "str"}) as out:
        for text in TEXTS[:30]:
            out.write({"text": text})
    runs = []
    for reader, name in {"streaming": "mds", "webdataset": "tars"}.items():
        given = {"data.path": (tmp_path / name).as_uri(), "data.reader": reader, "data.tokenizer": "bytes"}
        given |= {"data.cache_dir": tmp_path / "cache", "steps": STEPS, "data.workers": 2, "evaluation.every": STOP}
        given |= {"checkpoint.every": STOP, "data.worker_start": "fork"}
        for run, stop in (("whole", 0), ("stopped", STOP), ("stopped", 0)):
            words = {**given, "run_dir": tmp_path / f"{reader}-{run}", "stop_step": stop}
            runs.append(("debug_mru", [word for key, value in words.items() for word in (f"--{key}", str(value))]))
    for rank in run_distributed(run_scenarios.train_all, 2, arguments=(runs,), alone=True):
        for whole, before, after in (rank[:3], rank[3:]):
            assert len({tuple(rows) for rows in whole.values()}) == STEPS
            assert {**before, **after} == whole
            assert (list(before), list(after)) == ([1, 2, 3], [4, 5, 6])
    for reader in ("streaming", "webdataset"):
        summaries = [
            json.loads((tmp_path / f"{reader}-{run}/summary.json").read_text()) for run in ("whole", "stopped")
        ]
        assert summaries[0] == summaries[1]

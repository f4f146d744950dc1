import json
from pathlib import Path

import matmix.kernels.benchmarks
from matmix.kernels.benchmarks.cases import CPU_CASES
from matmix.kernels.benchmarks.plot import draw


def test_the_committed_record_has_every_case_and_can_be_drawn(tmp_path):
    results = Path(matmix.kernels.benchmarks.__path__[0]) / "results"
    record = json.loads((results / "cpu.json").read_text())
    assert set(record["cases"]) == set(CPU_CASES)
    draw(record, tmp_path / "ratios.png")
    assert (tmp_path / "ratios.png").stat().st_size > 10_000

"""The benchmark of saving runs, and its numbers fit together."""

import json

import pytest

from matmix.benchmarks.__main__ import main
from matmix.benchmarks.saving import parse_size


@pytest.mark.slow
def test_table_and_record(tmp_path, capsys):
    record = tmp_path / "record.json"
    arguments = ["--sizes", "500k,1.5M", "--repeats", "1", "--device", "cpu", "--directory", str(tmp_path)]
    assert main(["saving", *arguments, "--json", str(record)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "stall/blocking" in lines[0]
    assert lines[-1] == f"written to {record}"
    assert len(lines[:-2]) == 3
    small, large = json.loads(record.read_text())["sizes"]
    assert 500_000 <= small["parameters"] < 1_500_000 <= large["parameters"]
    for row in (small, large):
        assert row["bytes"] > 12 * row["parameters"]  # weights and two moments in float32
        assert 0 < row["stall"] <= row["background"]
        assert 0 < row["copy_stall"] <= row["copy"]
        assert min(row["blocking"], row["verify"], row["load"]) > 0
    assert list(tmp_path.iterdir()) == [record]


def test_sizes():
    assert [parse_size(text) for text in ("10M", "1.5B", "200000", "3k")] == [10**7, 15 * 10**8, 200_000, 3000]
    for text in ("", "much", "0M"):
        with pytest.raises(ValueError, match="--sizes"):
            parse_size(text)

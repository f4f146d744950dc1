"""How much a folder takes: the disk's, or the memory's, of the machine and of the job."""

import shutil
from pathlib import Path

import psutil
import pytest

from matmix.train.checkpoint import nodes as room


def test_a_disk_has_what_it_says(tmp_path):
    if room.is_in_memory(tmp_path):
        pytest.skip("the tests' folder is in memory")
    assert room.free_bytes(tmp_path) == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.05)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no folder in memory")
def test_memory_has_limits(monkeypatch):
    assert room.is_in_memory(Path("/dev/shm"))
    assert room.free_bytes(Path("/dev/shm")) <= psutil.virtual_memory().available * 1.05
    monkeypatch.setattr(room, "_left_of_limits", lambda: iter([10_000, 500]))
    assert room.free_bytes(Path("/dev/shm")) == 500


@pytest.mark.parametrize("version", [1, 2])
def test_limits_of_a_job(version, tmp_path):
    """The least that the group of this process, or one above it, leaves; what caches files counts as free."""
    limit, use = (
        ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    )
    top = tmp_path / ("memory" if version == 1 else "")
    for name, most, used, cached in (
        ("job", 1000, 700, 100),
        ("job/step", 800, 700, 150),
        ("job/step/task", None, 9, 9),
    ):
        group = top / name
        group.mkdir(parents=True)
        (group / limit).write_text("max\n" if most is None else f"{most}\n")
        (group / use).write_text(f"{used}\n")
        (group / "memory.stat").write_text(f"anon 3\ninactive_file {cached}\nactive_file 0\n")
    groups = tmp_path / "cgroup"
    groups.write_text("9:memory:/job/step/task\n1:cpu:/other\n" if version == 1 else "0::/job/step/task\n")
    assert sorted(room._left_of_limits(groups, tmp_path)) == [250, 400]
    groups.write_text("0::/nothing/such\n")
    assert list(room._left_of_limits(groups, tmp_path)) == []
    assert list(room._left_of_limits(tmp_path / "missing", tmp_path)) == []

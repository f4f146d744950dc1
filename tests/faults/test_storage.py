"""Checkpoints that are damaged, disks that fill up, data that is gone."""

import shutil
from pathlib import Path

import pytest
from fault_harness import assert_same
from folders import flip_a_bit
from nightly import nightly

from matmix.train.process.exits import EXIT_FAILED, EXIT_USER


def _largest(checkpoint: Path) -> Path:
    return max((path for path in checkpoint.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def _truncate(checkpoint: Path) -> None:
    file = _largest(checkpoint)
    file.write_bytes(file.read_bytes()[:-100])


def _remove(checkpoint: Path) -> None:
    _largest(checkpoint).unlink()


def _flip_a_bit(checkpoint: Path) -> None:
    flip_a_bit(_largest(checkpoint))


def _empty_manifest(checkpoint: Path) -> None:
    (checkpoint / "checkpoint.json").write_bytes(b"")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        nightly(_truncate, "is truncated"),
        nightly(_remove, "is missing"),
        (_flip_a_bit, "does not match its checksum"),
        nightly(_empty_manifest, "its checkpoint.json cannot be read"),
    ],
)
def test_damaged_checkpoint(make_run, half_done, one_rank, damage, said):
    run = make_run()
    shutil.copytree(half_done.path, run.path)
    damage(run.newest())
    attempt = run.finish()
    assert said in attempt.text()
    assert "resumed from step-00000010" in attempt.text()
    assert_same(run, one_rank)


def test_no_valid_checkpoint_is_left(make_run, half_done):
    run = make_run()
    shutil.copytree(half_done.path, run.path)
    for checkpoint in (run.path / "checkpoints").iterdir():
        _flip_a_bit(checkpoint)
    metrics = run.records()
    attempt = run.start()
    assert attempt.wait() == [EXIT_USER]
    assert "is valid: restore one, or use another run_dir" in attempt.text()
    assert "Traceback" not in attempt.text()
    assert run.records() == metrics


@pytest.mark.slow
def test_disk_full_for_a_while(make_run, two_ranks):
    """It costs the checkpoints of that time, on all ranks alike, and nothing else."""
    run = make_run(ranks=2)
    attempt = run.finish(faults=[{"kind": "no_space", "first": 10, "last": 15, "rank": 1}])
    for step in (10, 15):
        assert f"no checkpoint at step {step}: No space left on device (rank 1)" in attempt.text(0)
    assert_same(run, two_ranks)


def test_disk_full_to_the_end(make_run, one_rank):
    """The run ends with code 1 because its last step is not saved; with room again it goes on from what was."""
    run = make_run("--checkpoint.asynchronous", "False")  # so that step 10 is saved when the disk fills up at step 12
    attempt = run.start(faults=[{"kind": "small_files", "step": 12, "limit": 3000}])
    assert attempt.wait() == [EXIT_FAILED]
    assert "Step 30 of 30 is not saved" in attempt.text()
    assert run.checkpoints() == ["step-00000005", "step-00000010"]
    run.finish()
    assert_same(run, one_rank)


@pytest.fixture
def harmed_data(dataset, tmp_path) -> tuple[Path, Path]:
    """A copy of the prepared data, which no reader has unpacked yet, and its shard."""
    folder = tmp_path / "data"
    shutil.copytree(dataset, folder, ignore=shutil.ignore_patterns(".cache"))
    return folder, next(path for path in sorted((folder / "train").iterdir()) if "shard" in path.name)


def test_missing_and_truncated_data(make_run, harmed_data):
    folder, shard = harmed_data
    run = make_run("--data.path", str(folder))
    for damage, said in (
        (lambda: shard.write_bytes(shard.read_bytes()[:-50]), "truncated"),
        (shard.unlink, "is missing"),
    ):
        damage()
        attempt = run.start()
        assert attempt.wait() == [EXIT_USER]
        errors = [line for line in attempt.text().splitlines() if line.startswith("matmix: error: ")]
        assert len(errors) == 1
        assert f"shard train/{shard.name}" in errors[0]
        assert said in errors[0]
        assert "Traceback" not in attempt.text()

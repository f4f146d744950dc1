"""Which checkpoints a folder holds, as launchers, runs and their copies see it."""

from __future__ import annotations

from matmix.train.checkpoint.steps import MANIFEST, list_steps, step_name, step_of
from matmix.train.run.outcome import newest_saved


def test_what_counts_as_a_checkpoint(tmp_path):
    folder = tmp_path / "checkpoints"
    assert list_steps(folder) == []
    assert newest_saved(tmp_path) is None
    for name in ("step-00000007", "step-00000040", "step-123456789", ".tmp-step-00000050", ".old-step-00000030"):
        (folder / name).mkdir(parents=True)
    for name in ("step-00000007", "step-00000040", ".tmp-step-00000050"):
        (folder / name / MANIFEST).touch()
    (folder / "step-7").mkdir()
    (folder / "step-00000008.json").touch()
    assert list_steps(folder) == [7, 40, 123456789]
    assert list_steps(folder, written=True) == [7, 40]
    assert newest_saved(tmp_path) == 40
    assert all(step_of(step_name(step)) == step for step in (0, 7, 123456789))

"""A rank that waits for another's part of a save is not taken to hang; one that does its own part is watched."""

from matmix.train.checkpoint import files as checkpoint_files
from matmix.train.checkpoint.files import together
from matmix.train.process.heartbeat import beat, last_beat


def test_waiting_for_others_is_not_silence(monkeypatch):
    seen = []

    def gather(value, group=None):
        seen.append(last_beat().waiting)
        return [value]

    monkeypatch.setattr(checkpoint_files, "gather_objects", gather)
    beat("before")
    assert together(lambda: seen.append(last_beat().waiting)) is None
    assert seen == [False, True]
    assert not last_beat().waiting

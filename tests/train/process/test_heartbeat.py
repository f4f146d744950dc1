"""A rank that waits for another's part of a save is not taken to hang; one that does its own part is watched."""

from matmix.train.process import distributed as agreement
from matmix.train.process.distributed import agree
from matmix.train.process.heartbeat import beat, last_beat


def test_waiting_for_others_is_not_silence(monkeypatch):
    seen = []

    def gather(value, group=None):
        seen.append(last_beat().waiting)
        return [value]

    monkeypatch.setattr(agreement, "gather_objects", gather)
    beat("before")
    assert agree(lambda: seen.append(last_beat().waiting)) == [None]
    assert seen == [False, True]
    assert not last_beat().waiting

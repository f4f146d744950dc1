"""The account of a run's time: every second once, through saves and restarts; what each start records of it."""

import json
import time
from pathlib import Path

import pytest
from runs import records, run_recipe

from matmix.launch.jobs.control import time_lines
from matmix.train.meters import speed
from matmix.train.meters.speed import CAUSES, Goodput, first_start


class _Clock:
    def __init__(self, monkeypatch) -> None:
        self.now, self.wall = 1000.0, 5e8
        monkeypatch.setattr(speed.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(speed.time, "time", lambda: self.wall)

    def pass_(self, seconds: float) -> None:
        self.now += seconds
        self.wall += seconds


@pytest.fixture
def clock(monkeypatch):
    return _Clock(monkeypatch)


def test_every_second_has_one_cause_and_a_restart_costs_what_was_lost(clock):
    account = Goodput()
    account.begin(clock.wall - 3)
    for seconds, cause in ((2, "data"), (30, "useful"), (4, "skipped"), (1, "saves")):
        clock.pass_(seconds)
        account.spend(cause)
    saved = json.loads(json.dumps(account.state_dict()))
    clock.pass_(20)
    account.spend("useful")  # killed here: these steps are done again
    clock.pass_(100)
    again = Goodput()
    again.load_state_dict(saved, "restarts")
    clock.pass_(40)
    again.spend("useful")
    expected = {"useful": 70, "data": 2, "saves": 1, "skipped": 4, "restarts": 3 + 120}
    assert {cause: seconds for cause, seconds in again.seconds.items() if seconds} == pytest.approx(expected)
    shares = again.shares()
    assert shares["seconds"] == pytest.approx(200)
    assert sum(shares[cause] for cause in CAUSES) == pytest.approx(1)
    assert shares["useful"] == pytest.approx(0.35)


def test_an_older_checkpoint_and_a_clock_that_is_behind_are_no_reason_to_fail(clock):
    account = Goodput()
    account.load_state_dict(None, "restarts")
    assert account.shares()["seconds"] == 0
    account.load_state_dict({"seconds": {"useful": 5.0}, "until": clock.wall + 3600}, "restarts")
    assert account.seconds["restarts"] == 0
    assert account.shares()["useful"] == 1


def test_the_first_start_is_remembered(tmp_path):
    (tmp_path / "launch").mkdir()
    mine = first_start(tmp_path, write=True)
    assert 0 < time.time() - mine < 86400
    (tmp_path / "launch" / "begun").write_text("12.5\n")
    assert first_start(tmp_path, write=True) == 12.5
    (tmp_path / "launch" / "begun").write_text("nonsense")
    assert first_start(tmp_path, write=False) == mine


def test_a_run_that_was_started_twice_says_where_its_time_went(dataset, tmp_path):
    path = tmp_path / "run"
    run_recipe("debug_mru", dataset, path, "--stop-step", "4")
    first = records(path)[-1]
    time.sleep(1.0)
    run_recipe("debug_mru", dataset, path, "--checkpoint.every", "2")
    last = records(path)[-1]
    names = {key for key in last if key.startswith("goodput/")}
    assert names == {f"goodput/{name}" for name in (*CAUSES, "seconds")}
    assert sum(last[f"goodput/{cause}"] for cause in CAUSES) == pytest.approx(1)
    lost = [record["goodput/restarts"] * record["goodput/seconds"] for record in (first, last)]
    assert lost[1] > lost[0] + 1.0
    assert last["goodput/evaluation"] > 0
    assert last["goodput/saves"] > 0
    [line] = time_lines(last)
    assert line.startswith("goodput      ")
    assert "in useful steps; lost: restarts " in line


def test_checkpoints_without_an_account_are_continued(dataset, tmp_path, monkeypatch):
    from matmix.train.loop import Trainer

    path = tmp_path / "run"
    save = Trainer.save

    def saved_by_an_older_version(self, **options):
        monkeypatch.setattr(self.goodput, "state_dict", lambda: None, raising=False)
        return save(self, **options)

    monkeypatch.setattr(Trainer, "save", saved_by_an_older_version)
    run_recipe("debug_mru", dataset, path, "--stop-step", "4")
    monkeypatch.undo()
    run_recipe("debug_mru", dataset, path)
    assert [record["step"] for record in records(path)] == list(range(1, 9))
    assert Path(path / "summary.json").is_file()

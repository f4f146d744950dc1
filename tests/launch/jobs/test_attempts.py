"""Which ends of an attempt lead to another one."""

import json
import subprocess
import sys
from pathlib import Path

from failures import each

from matmix.launch.jobs.attempts import (
    AGAIN,
    ENOUGH,
    FINISHED,
    PastAttempt,
    begin,
    decide,
    main,
    mark_cancelled,
    read_attempts,
)
from matmix.launch.jobs.launches import note_url
from matmix.train.run.outcome import local_folder, outcome_path, step_path


def attempts(*ends: tuple) -> list[PastAttempt]:
    """(code, step begun, step saved) each, code "told" for one that was told to stop and was killed."""
    return [
        PastAttempt(
            attempt=f"7.{number}",
            code=137 if code == "told" else code,
            step=step,
            saved_step=saved,
            signalled=code == "told",
        )
        for number, (code, step, saved) in enumerate(ends)
    ]


# The ends of a job's attempts; whether it goes on, with two restarts allowed; words of the reason.
TABLE = {
    "finished": ([(0, 8, 8)], False, "finished"),
    "stopped and saved": ([(75, 5, 5)], True, "newest checkpoint"),
    "told, but killed while saving": ([("told", 5, 4)], True, "SIGKILL"),
    "told before it could save, a while": ([("told", 5, 4)] * 10, True, "SIGKILL"),
    "told before it could save, for ever": ([("told", 5, 4)] * 11, False, "11 times in a row it was told to stop"),
    "told before it could save, but going on": ([("told", n, n) for n in range(12)], True, "SIGKILL"),
    "preempted often": ([(75, 5, 5)] * 9, True, "newest checkpoint"),
    "the user's mistake": ([(2, None, None)], False, "a mistake"),
    "data that is gone in the middle": ([(2, 5, 4)], True, "restart 1 of at most 2"),
    "data that stays away": ([(2, 5, 4), (2, 5, 4)], False, "step 5 failed twice"),
    "two Ctrl-C": ([(130, 5, 4)], False, "interrupted"),
    "failed once": ([(1, 5, 4)], True, "restart 1 of at most 2"),
    "hung": ([(76, 5, 4)], True, "hung"),
    "killed": ([(137, 5, 4)], True, "SIGKILL"),
    "a signal as Python counts": ([(-9, 5, 4)], True, "SIGKILL"),
    "failed at other steps": ([(1, 5, 4), (1, 6, 4)], True, "restart 2 of at most 2"),
    "too often": ([(1, 5, 4), (1, 6, 4), (1, 7, 4)], False, "3 times in a row"),
    "too often before the first step": ([(1, None, None)] * 3, False, "3 times in a row"),
    "failed at the same step": ([(1, 5, 4), (137, 5, 4)], False, "step 5 failed twice"),
    "the same step after a preemption": ([(1, 5, 4), (75, 4, 4), (1, 5, 4)], False, "step 5 failed twice"),
    "the same step, once passed": ([(1, 5, 4), (75, 6, 6), (1, 5, 6)], True, "restart 1"),
    "got further each time": ([(1, 5, 4), (1, 9, 8), (1, 13, 12), (1, 17, 16)], True, "restart 1 of at most 2"),
    "did not get further since": ([(1, 9, 8), (1, 10, 8), (1, 11, 8)], False, "3 times in a row"),
    "preemptions are no progress": ([(1, 5, 4), (75, 4, 4), (1, 6, 4), (1, 7, 4)], False, "3 times in a row"),
    "a node failed in between": ([(1, 5, 4), (None, 6, 4), (1, 7, 4)], False, "3 times in a row"),
}


@each("case", TABLE)
def test_decisions(case):
    ends, again, words = TABLE[case]
    decision = decide(attempts(*ends), max_requeues=2)
    assert decision.again == again, decision.why
    assert words in decision.why
    assert "\n" not in decision.why


def test_none_allowed():
    assert not decide(attempts((1, 5, 4)), max_requeues=0).again


def write_outcome(run, attempt: str, rank: int = 0, **values) -> None:
    path = outcome_path(run, attempt, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    facts = {"code": 1, "reason": "it broke", "step": 4, "saved_step": 4, "time": 10.0, "host": "node1", **values}
    path.write_text(json.dumps(facts))


def end(words: list[str]) -> int:
    """The decision after an attempt that a launcher began."""
    begin(Path(words[0]), words[2])
    return main(words)


def test_what_the_ranks_wrote_counts_more_than_the_exit_code(tmp_path, capsys):
    write_outcome(tmp_path, "7.0", code=75, reason="stopped by SIGUSR2")
    step_path(tmp_path, "7.0").write_text("5\n")
    # srun reports the code of a task that it killed because others had left.
    assert end([str(tmp_path), "--attempt", "7.0", "--code", "137"]) == AGAIN
    (line,) = capsys.readouterr().out.splitlines()
    assert "starting again" in line
    (attempt,) = read_attempts(tmp_path)
    assert (attempt.code, attempt.step, attempt.saved_step) == (75, 5, 4)


def test_the_rank_that_failed_first_is_named(tmp_path, capsys):
    write_outcome(tmp_path, "7.0", reason="another rank is gone", time=12.0)
    write_outcome(tmp_path, "7.0", rank=3, reason="disk full", time=11.0, host="node2")
    assert end([str(tmp_path), "--attempt", "7.0", "--code", "1"]) == AGAIN
    assert "rank 3 on node2: disk full" in capsys.readouterr().out


def test_a_finished_run(tmp_path):
    write_outcome(tmp_path, "7.0", code=0, reason="finished")
    assert end([str(tmp_path), "--attempt", "7.0", "--code", "1"]) == FINISHED


def test_an_attempt_that_nobody_saw_end_is_a_failure(tmp_path, capsys):
    begin(tmp_path, "7.0")
    step_path(tmp_path, "7.0").parent.mkdir(parents=True)
    step_path(tmp_path, "7.0").write_text("5\n")
    begin(tmp_path, "7.1")
    step_path(tmp_path, "7.1").write_text("5\n")
    assert end([str(tmp_path), "--attempt", "7.1", "--code", "1"]) == ENOUGH
    assert "step 5 failed twice" in capsys.readouterr().out


def test_an_attempt_of_several_phases_is_where_its_last_one_is(tmp_path, capsys):
    first, second = tmp_path / "phase-1", tmp_path / "phase-2"
    facts = {"code": 0, "reason": "Finished at step 90", "saved_step": 90}
    write_outcome(first, "7.0", **facts)
    step_path(first, "7.0").write_text("90\n")
    # Killed between two phases: that the first has finished is not the end.
    assert end([str(tmp_path), "--attempt", "7.0", "--code", "137"]) == AGAIN
    for number in (1, 2):
        write_outcome(second, f"7.{number}", rank=1, reason="disk full", saved_step=4)
        step_path(second, f"7.{number}").write_text("5\n")
    assert end([str(tmp_path), "--attempt", "7.1", "--code", "1"]) == AGAIN
    assert "restart 1 of at most 3" in capsys.readouterr().out.splitlines()[-1]  # a later phase is further
    assert end([str(tmp_path), "--attempt", "7.2", "--code", "1"]) == ENOUGH
    assert "step 5 of phase 2 failed twice in a row (rank 1 on node1: disk full)" in capsys.readouterr().out
    places = [(attempt.phase, attempt.step, attempt.saved_step) for attempt in read_attempts(tmp_path)]
    assert places == [(1, 90, 90), (2, 5, 4), (2, 5, 4)]
    write_outcome(second, "8.0", **facts)
    assert end([str(tmp_path), "--attempt", "8.0", "--code", "0"]) == FINISHED


def test_another_job_begins_anew(tmp_path):
    for number in range(3):
        assert end([str(tmp_path), "--attempt", f"7.{number}", "--code", "1", "--max-requeues", "3"]) == AGAIN
    assert end([str(tmp_path), "--attempt", "7.3", "--code", "1", "--max-requeues", "3"]) == ENOUGH
    assert end([str(tmp_path), "--attempt", "8.0", "--code", "1", "--max-requeues", "3"]) == AGAIN


def test_a_cancelled_job_does_not_come_back(tmp_path, capsys):
    write_outcome(tmp_path, "7_1.0", code=75, reason="stopped")
    write_outcome(tmp_path, "7_2.0", code=75, reason="stopped")
    mark_cancelled(tmp_path, "7_1")
    assert end([str(tmp_path), "--attempt", "7_1.0", "--code", "75"]) == ENOUGH
    assert "cancelled" in capsys.readouterr().out
    assert end([str(tmp_path), "--attempt", "7_2.0", "--code", "75"]) == AGAIN
    assert end([str(tmp_path), "--attempt", "7_2.1", "--code", "75", "--ending"]) == ENOUGH


def test_it_needs_no_torch(tmp_path):
    """It runs between two attempts, on a node that is paid for."""
    code = "import sys, matmix.launch.jobs.attempts; print('torch' in sys.modules, 'numpy' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert run.stdout.split() == ["False", "False"]


def test_ranks_of_a_run_in_an_object_store_write_to_their_node(tmp_path, monkeypatch):
    monkeypatch.setenv("MATMIX_SCRATCH", str(tmp_path / "scratch"))
    note_url(tmp_path / "run", "s3://bucket/run")
    write_outcome(local_folder("s3://bucket/run", 0), "7.0", code=75, reason="stopped")
    assert end([str(tmp_path / "run"), "--attempt", "7.0", "--code", "137"]) == AGAIN
    (attempt,) = read_attempts(tmp_path / "run")
    assert attempt.stopped


def test_a_run_that_is_not_at_its_path_any_more_is_left_alone(tmp_path, capsys):
    """It was moved away while it ran, maybe with another one in its place: nothing is started or written there."""
    words = [str(tmp_path / "run"), "--attempt", "7.0", "--code", "2"]
    begin(tmp_path / "run", "7.0")
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    assert main(words) == ENOUGH
    assert "is not the folder any more that the attempt began in" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()
    begin(tmp_path / "run", "8.0")
    assert main([*words[:-1], "75"]) == ENOUGH
    assert [attempt.attempt for attempt in read_attempts(tmp_path / "run")] == ["8.0"]

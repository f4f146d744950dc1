"""SIGTERM, Ctrl-C, SIGUSR1 and SIGUSR2 at any moment: all ranks agree on a step and save, the process ends with
EXIT_STOPPED, and the next start goes on as if nothing had happened, evaluations included."""

import os
import signal
import subprocess
import sys

import psutil
import pytest
from fault_harness import assert_same, python_path, wait_until
from nightly import nightly

from matmix.train.process.exits import EXIT_INTERRUPTED, EXIT_STOPPED
from matmix.train.run.outcome import read_last_step, read_outcomes

LOOP, TASK = "matmix.train.loop", "matmix.train.tasks.token_prediction"


def stop_at(run, fault: dict, number: int = signal.SIGUSR2, rank: int = -1):
    """Starts the run, signals one rank where the fault makes it stand still, and sees all of them stop and save."""
    rank %= run.ranks
    attempt = run.start(faults=[{**fault, "rank": rank, "markers": True}])
    name = fault.get("phase") or fault.get("function", "pause").split(":")[-1].split(".")[-1]
    attempt.wait_for_mark(name, rank)
    attempt.kill(rank, number=number)
    if rank == 0:
        wait_until(lambda: "the run will save and stop" in attempt.text(0), "the signal to be noted")
    attempt.set_mark("go")
    assert attempt.wait() == [EXIT_STOPPED] * run.ranks, attempt.text()
    assert "Traceback" not in attempt.text()
    return attempt


def outcome_of(run, number: int):
    outcomes = read_outcomes(run.path, f"attempt-{number}")
    assert list(outcomes) == [0]
    return outcomes[0]


@pytest.mark.slow
@pytest.mark.parametrize("goes_on", [False, nightly(True)])
def test_between_steps_on_one_rank_of_two(make_run, request, goes_on):
    run = make_run(ranks=2)
    stop_at(run, {"kind": "pause", "step": 7})
    outcome = outcome_of(run, 0)
    assert (outcome.code, outcome.saved_step) == (EXIT_STOPPED, outcome.step)
    assert outcome.step in (7, 8)  # one more where rank 1 notes the signal only after its part in step 7
    assert read_last_step(run.path, "attempt-0") == outcome.step
    if goes_on:
        run.finish()
        assert_same(run, request.getfixturevalue("two_ranks"))


@pytest.mark.slow
def test_while_the_parts_of_the_run_are_made(make_run, one_rank):
    run = make_run()
    stop_at(run, {"kind": "pause_in", "function": f"{LOOP}:make_loader"}, signal.SIGTERM)
    assert (outcome_of(run, 0).step, outcome_of(run, 0).saved_step) == (0, None)
    assert run.checkpoints() == []
    stop_at(run, {"kind": "pause", "step": 7}, signal.SIGUSR1)
    before = run.checkpoints()
    stop_at(run, {"kind": "pause_in", "function": f"{LOOP}:Trainer.restore"}, signal.SIGINT)
    assert run.checkpoints() == before  # nothing new to save
    assert outcome_of(run, 2).saved_step == outcome_of(run, 1).step
    run.finish()
    assert_same(run, one_rank)


@pytest.mark.slow
def test_in_the_first_step(make_run, one_rank):
    run = make_run()
    stop_at(run, {"kind": "pause_in", "function": f"{TASK}:TokenPrediction.loss"})
    assert outcome_of(run, 0).step in (1, 2)
    run.finish()
    assert_same(run, one_rank)


@pytest.mark.slow
def test_in_an_evaluation_on_one_rank_of_two(make_run, two_ranks):
    """It is given up without a record, and the next start begins with it; interrupted again, the one after that."""
    run = make_run(ranks=2)
    for _ in range(2):
        stop_at(run, {"kind": "pause_in", "function": f"{TASK}:row_losses"}, rank=0)
        assert run.records("validation") == []
        assert run.steps() == 15
    run.finish()
    assert_same(run, two_ranks)


@pytest.mark.slow
def test_in_the_final_evaluation(make_run, one_rank):
    run = make_run()
    run.finish("--stop-step", "20")
    stop_at(run, {"kind": "pause_in", "function": f"{TASK}:row_losses"})
    assert not (run.path / "summary.json").exists()
    assert len(run.records("validation")) == 1
    run.finish()
    assert (run.path / "summary.json").exists()
    assert_same(run, one_rank)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["writing", "rename"])
def test_in_a_save(phase, make_run, two_ranks):
    run = make_run(ranks=2)
    stop_at(run, {"kind": "pause_in_save", "phase": phase, "step": 10, "for_ever": False}, rank=0)
    assert outcome_of(run, 0).saved_step == outcome_of(run, 0).step >= 10
    run.finish()
    assert_same(run, two_ranks)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_to_every_process_of_the_run(number, make_run, one_rank):
    """As from a terminal or a scheduler, which do not spare the process that reads the data."""
    run = make_run("--data.workers", "1")
    attempt = run.start(faults=[{"kind": "pause", "step": 7, "markers": True}])
    attempt.wait_for_mark("pause")
    processes = psutil.Process(attempt.pids[0]).children(recursive=True)
    assert processes
    for process in [*processes, psutil.Process(attempt.pids[0])]:
        process.send_signal(number)
    wait_until(lambda: "the run will save and stop" in attempt.text(), "the signal to be noted")
    attempt.set_mark("go")
    assert attempt.wait() == [EXIT_STOPPED], attempt.text()
    assert "Traceback" not in attempt.text()
    assert outcome_of(run, 0).saved_step == 7
    assert not psutil.wait_procs(processes, timeout=60)[1]
    run.finish()
    assert_same(run, one_rank)


@pytest.mark.slow
def test_a_second_interrupt_leaves_at_once(make_run, one_rank):
    run = make_run()
    attempt = run.start(faults=[{"kind": "hang", "step": 7, "markers": True}])
    attempt.wait_for_mark("hang")
    attempt.kill(0, number=signal.SIGINT)
    wait_until(lambda: "the run will save and stop" in attempt.text(), "the signal to be noted")

    def interrupted() -> bool:
        attempt.kill(0, number=signal.SIGINT)
        return attempt.poll() != [None]

    wait_until(interrupted, "the process to leave")
    assert attempt.wait() == [EXIT_INTERRUPTED]
    run.finish()
    assert_same(run, one_rank)


# Stands still in the import of torch: what a signal meets in the first seconds of a process.
_SLOW_IMPORT = """
import pathlib, runpy, sys, time
folder = pathlib.Path(sys.argv.pop(1))

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            sys.meta_path.remove(self)
            (folder / "importing").touch()
            while not (folder / "go").exists():
                time.sleep(0.02)

sys.meta_path.insert(0, Slow())
runpy.run_module("matmix.train", run_name="__main__", alter_sys=True)
"""


@pytest.mark.slow
def test_during_imports(make_run, one_rank, tmp_path):
    run = make_run()
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", _SLOW_IMPORT, str(tmp_path), *run.command, *run.overrides],
        env={**os.environ, "MATMIX_ATTEMPT": "first", "PYTHONPATH": python_path(), "CUDA_VISIBLE_DEVICES": ""},
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(lambda: (tmp_path / "importing").exists() or process.poll() is not None, "the import to begin")
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        process.send_signal(number)
    (tmp_path / "go").touch()
    errors = process.communicate(timeout=120)[1]
    assert process.returncode == EXIT_STOPPED, errors
    assert "Traceback" not in errors
    run.finish()
    assert_same(run, one_rank)


@pytest.mark.slow
def test_during_compilation_to_every_process_of_the_run(make_run, tmp_path):
    """A scheduler's signal reaches the compilers, too."""
    settings = ("--engine.compile", "True", "--steps", "2", "--checkpoint.every", "0", "--evaluation.every", "0")
    run, reference = make_run(*settings), make_run(*settings)
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "matmix.train", *run.command, *run.overrides],
        env={
            **os.environ,
            "MATMIX_ATTEMPT": "first",
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),  # empty: everything is compiled
        },
        stderr=subprocess.PIPE,
        text=True,
    )
    whole = psutil.Process(process.pid)

    def compilers() -> list[psutil.Process]:
        assert process.poll() is None, process.stderr.read()
        return [child for child in whole.children(recursive=True) if child.name() in ("g++", "cc1plus", "c++")]

    for child in [*wait_until(compilers, "a compiler to run"), *whole.children(recursive=True), whole]:
        child.send_signal(signal.SIGTERM)
    errors = process.communicate(timeout=600)[1]
    assert process.returncode == EXIT_STOPPED, errors
    assert read_last_step(run.path, "first") == 1
    for each in (run, reference):
        assert each.start().wait(900) == [0]
    assert run.curve() == reference.curve()

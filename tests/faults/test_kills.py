"""SIGKILL of one rank, of all, of the launcher, at any time: the curve that follows is the one that would have been."""

import random
import shutil
import time

import pytest
from fault_harness import Run, assert_same, wait_until
from labelled import texts, write_jsonl
from nightly import nightly
from runs import run_recipe

from matmix.train.process.exits import EXIT_STOPPED
from matmix.train.run.outcome import read_last_step, read_outcomes

PHASES = ("staging", "writing", "checksums", "manifest", "rename", "prune")


def _pause(phase: str, step: int, rank: int = 0, **more: bool) -> list[dict]:
    return [{"kind": "pause_in_save", "phase": phase, "step": step, "rank": rank, "markers": True, **more}]


def _assert_survivor_ended_well(attempt, rank: int) -> None:
    """The rank that was left ended by itself, and said why in a line."""
    codes = attempt.wait()
    assert codes[rank] == 1, attempt.text(rank)
    assert "another rank is gone or does not answer" in attempt.text(rank)
    assert "Traceback" not in attempt.text(rank)


EACH_PHASE = (
    ("staging", 5, 1, False),
    ("writing", 5, 1, True),
    ("checksums", 10, 1, False),
    ("manifest", 10, 0, True),
    ("rename", 15, 0, False),
    ("prune", 15, 0, False),
)


@pytest.mark.slow
@pytest.mark.parametrize("phases", [(("writing", 5, 1, True), ("rename", 10, 0, False)), nightly(EACH_PHASE)])
def test_kills_in_phases_of_a_save(make_run, two_ranks, phases):
    run = make_run(ranks=2)
    _kill_in_phases(run, phases)
    assert_same(run, two_ranks)


def _kill_in_phases(run: Run, phases, **more: bool) -> None:
    """Kills all ranks, or one of them alone, in each phase (name, step, rank, whether alone); then finishes the run.

    The one that is killed alone stands in the phase; only rank 0 writes a checkpoint's manifest, renames and prunes.
    """
    for phase, step, rank, alone in phases:
        attempt = run.start(faults=_pause(phase, step, rank, **more))
        attempt.wait_for_mark(phase, rank)
        if alone:
            attempt.kill(rank)
            _assert_survivor_ended_well(attempt, 1 - rank)
        attempt.kill()
    run.finish()


@pytest.mark.slow
def test_one_of_the_ranks_that_share_rows_is_killed(make_run):
    """The others cannot go on without its part; the next start is on the same rows, with states that cross the cuts."""
    reference, run = (make_run("--engine.context", "2", ranks=2) for _ in range(2))
    reference.finish()
    attempt = run.start(faults=[{"kind": "pause", "step": 8, "rank": 1, "markers": True}])
    attempt.wait_for_mark("pause", 1)
    attempt.kill(1)
    _assert_survivor_ended_well(attempt, 0)
    attempt.kill()
    assert run.newest().name == "step-00000005"
    run.finish()
    assert len(run.curve()) == 30
    assert_same(run, reference)


@pytest.mark.slow
def test_a_fine_tuning_is_killed(zygote, dataset, tmp_path):
    """Between two saves and within one, on both ranks: weights and scores are those of the run that was left alone."""
    run_recipe("debug_hydra", dataset, tmp_path / "source", "--steps", "2", "--evaluation.every", "0")
    command = ("finetune", str(tmp_path / "source"), "sequence_classification")
    settings = ["--data.examples.train", write_jsonl(tmp_path / "train.jsonl", texts(53))]
    settings += ["--data.examples.validation", write_jsonl(tmp_path / "validation.jsonl", texts(31, seed=1))]
    settings += ["--global-batch-size", "8", "--epochs", "2", "--optimizer.lr", "1e-3", "--logging.every", "1"]
    settings += ["--checkpoint.every", "4", "--evaluation.every", "4"]
    reference, run = (
        Run(zygote, tmp_path / name, "", *settings, ranks=2, command=command) for name in ("reference", "killed")
    )
    try:
        reference.finish()
        for name, fault in (
            ("pause", {"kind": "pause", "step": 7, "markers": True}),
            ("writing", *_pause("writing", 8)),
        ):
            attempt = run.start(faults=[fault])
            attempt.wait_for_mark(name)
            attempt.kill()
        run.finish()
    finally:
        reference.close()
        run.close()
    assert len(reference.curve()) == 14, "2 epochs of 53 examples, 8 a step"
    assert_same(run, reference)
    scores = ("step", "loss", "accuracy", "f1", "matthews")
    ours, theirs = (
        [[record[score] for score in scores] for record in each.records("validation")] for each in (run, reference)
    )
    assert ours == theirs
    assert [step for step, *_ in ours] == [4, 8, 12, 14]


@pytest.mark.slow
def test_the_launcher_is_killed(make_run, two_ranks):
    """The ranks see that they are alone, save and stop; the next start goes on from there."""
    run = make_run(ranks=2)
    attempt = run.start(torchrun=True, faults=[{"kind": "pause", "step": 8, "markers": True}])
    attempt.wait_for_mark("pause", 0)
    attempt.wait_for_mark("pause", 1)
    attempt.launcher.kill()
    attempt.launcher.wait()
    attempt.set_mark("go")
    wait_until(lambda: not attempt.processes(), "the ranks to end")
    assert "the launcher of this run is gone" in attempt.text()
    assert read_outcomes(run.path, "attempt-0")[0].code == EXIT_STOPPED
    # The ranks agree on the step that they were in, or on the one after it where one of them has seen it late.
    assert run.newest().name in ("step-00000008", "step-00000009")
    run.finish()
    assert_same(run, two_ranks)


def _kill_somewhere(run: Run, draw: random.Random) -> bool:
    """Starts the run and sends SIGKILL to a part of it or all of it, a few steps on, or to its launcher while the ranks
    still import. False if it ended before."""
    how = draw.choice(["launcher", "imports"] if draw.random() < 0.2 else ["one", "all"])
    attempt = run.start(torchrun=how in ("launcher", "imports"))
    if how == "imports":
        time.sleep(draw.random() * 3)
        attempt.launcher.kill()
        attempt.launcher.wait()
        wait_until(lambda: not attempt.processes(), "the ranks to end")
        return True
    name = f"attempt-{len(run.attempts) - 1}"
    first = wait_until(lambda: read_last_step(run.path, name) or None not in attempt.poll(), "the first step")
    goal = first + draw.randint(0, 6)
    wait_until(
        lambda: (read_last_step(run.path, name) or 0) >= goal or None not in attempt.poll(), f"step {goal} to begin"
    )
    time.sleep(draw.random() * 0.1)
    if None not in attempt.poll():
        attempt.wait()
        return False
    if how == "launcher":
        attempt.launcher.kill()
        attempt.launcher.wait()
        wait_until(lambda: not attempt.processes(), "the ranks to end")
    elif how == "one":
        attempt.kill(draw.randrange(run.ranks))
        attempt.wait()
    attempt.kill()
    return True


def _kill_until_finished(make_run, reference: Run, seed: int, kills: int) -> None:
    """Harms runs until `kills` have been counted; each of them ends as the reference did. make_run: of two ranks; where
    they are two nodes with copies of the state, a node sometimes loses its memory."""
    print(f"seed of the kills: {seed}")
    draw = random.Random(seed)
    while kills > 0:
        run = make_run(ranks=2)
        for _ in range(min(kills, 7)):
            if not _kill_somewhere(run, draw):
                break
            kills -= 1
            if memories := sorted(run.folder.glob(f"{MEMORY}/*/*/*")):
                for lost in draw.sample(memories, k=draw.random() < 0.3):
                    shutil.rmtree(lost)
        run.finish()
        assert_same(run, reference)


MEMORY = "memory"


@pytest.fixture
def make_run_with_copies(make_run):
    """`make_run`, of two nodes that keep copies of the state as often as they can."""

    def make(**options) -> Run:
        run = make_run("--checkpoint.local-every", "1", nodes=2, **options)
        run.overrides += ["--checkpoint.local-dir", str(run.folder / MEMORY)]
        return run

    return make


@pytest.mark.slow
def test_kills_in_each_phase_of_a_local_copy(make_run_with_copies, two_ranks):
    run = make_run_with_copies(ranks=2)
    phases = (
        ("staging", 3, 1, False),
        ("writing", 3, 1, True),
        ("checksums", 6, 1, False),
        ("manifest", 8, 0, True),
        ("rename", 11, 1, False),
        ("sharing", 13, 0, False),
        ("sharing", 16, 1, True),
        ("prune", 18, 0, False),
    )
    _kill_in_phases(run, phases, local=True)
    assert_same(run, two_ranks)
    used = ["going on from the node-local copy of step" in attempt.text(0) for attempt in run.attempts]
    assert any(used)  # a copy is not begun while the one before it is being written
    assert not list((run.folder / MEMORY).glob("*/*/*"))


@pytest.mark.slow
def test_kills_at_random_times_with_local_copies(make_run_with_copies, two_ranks):
    _kill_until_finished(make_run_with_copies, two_ranks, seed=random.SystemRandom().randrange(2**32), kills=3)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_fifty_kills_at_random_times_with_local_copies(make_run_with_copies, two_ranks):
    _kill_until_finished(make_run_with_copies, two_ranks, seed=random.SystemRandom().randrange(2**32), kills=50)


@pytest.mark.slow
def test_kills_at_random_times(make_run, two_ranks):
    _kill_until_finished(make_run, two_ranks, seed=random.SystemRandom().randrange(2**32), kills=10)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_kills_at_random_times(make_run, two_ranks):
    _kill_until_finished(make_run, two_ranks, seed=random.SystemRandom().randrange(2**32), kills=100)


@pytest.mark.slow
def test_a_kill_before_the_last_checkpoints_were_cleared(make_run, two_ranks):
    """What the end of the run would have removed the next start removes."""
    run = make_run(ranks=2)
    run.finish("--stop-step", "25")
    attempt = run.start(faults=_pause("prune", 30))
    attempt.wait_for_mark("prune")
    attempt.kill()
    assert len(run.checkpoints()) == 3
    run.finish()
    assert_same(run, two_ranks)

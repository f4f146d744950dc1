"""However a run ends, it leaves behind how: exit code, reason, the step it came to and the one that is saved."""

import pytest
import torch
from failures import each

from matmix.train import entry, loop
from matmix.train.checkpoint import save as checkpoint_save
from matmix.train.process import stop
from matmix.train.process.exits import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_STOPPED, EXIT_USER
from matmix.train.run.outcome import Attempt, adopt_attempt, attempt_id, outcomes_folder, read_last_step, read_outcomes
from matmix.train.tasks.token_prediction import TokenPrediction


@pytest.fixture
def start(dataset, tmp_path, monkeypatch):
    """`start(*overrides, before={step: action})`: runs the command, each action called before its step (from 1)."""
    monkeypatch.setenv("MATMIX_ATTEMPT", "the-attempt")
    true_step = loop.Trainer.train_step

    def start(*overrides: str, before=None):
        def step(trainer, batches):
            (before or {}).get(trainer.state.step + 1, lambda: None)()
            true_step(trainer, batches)

        monkeypatch.setattr(loop.Trainer, "train_step", step)
        options = ["--data.path", dataset, "--run-dir", str(tmp_path / "run"), "--device", "cpu", *overrides]
        return entry.main(["debug_mru", *options])

    return start


def raising(error: BaseException):
    def action():
        raise error

    return action


def outcome(tmp_path, code: int, step: int, saved_step: int | None) -> str:
    """Checks the outcome of rank 0 and returns its reason."""
    (found,) = read_outcomes(tmp_path / "run", "the-attempt").values()
    assert (found.code, found.step, found.saved_step) == (code, step, saved_step)
    assert "\n" not in found.reason
    assert [path.name for path in outcomes_folder(tmp_path / "run").glob(".*")] == []
    return found.reason


def test_finished(start, tmp_path):
    assert start() == EXIT_OK
    assert "Finished at step 8" in outcome(tmp_path, EXIT_OK, 8, 8)
    assert read_last_step(tmp_path / "run", "the-attempt") == 8
    assert start() == EXIT_OK
    assert "Nothing to do" in outcome(tmp_path, EXIT_OK, 8, 8)


def test_stopped_and_saved(start, tmp_path, capsys):
    assert start(before={3: stop.request}) == EXIT_STOPPED
    assert "Stopped by SIGTERM at step 3 of 8, saved" in outcome(tmp_path, EXIT_STOPPED, 3, 3)
    assert read_last_step(tmp_path / "run", "the-attempt") == 3
    assert "Stopped by SIGTERM at step 3 of 8, saved. The same command goes on from there." in capsys.readouterr().out
    assert start() == EXIT_OK


def test_a_stop_that_cannot_be_saved_is_a_failure(start, tmp_path, monkeypatch):
    def stop_without_space():
        stop.request()
        monkeypatch.setattr(checkpoint_save, "write_manifest", lambda *_: raising(OSError(28, "No space left"))())

    options = ["--checkpoint.every", "2", "--checkpoint.asynchronous", "False"]
    assert start(*options, before={3: stop_without_space}) == EXIT_FAILED
    assert "Step 3 of 8 is not saved" in outcome(tmp_path, EXIT_FAILED, 3, 2)


def test_the_users_mistake(start, tmp_path):
    assert start("--stop-step", "2") == EXIT_OK
    assert start("--seed", "7") == EXIT_USER
    assert "seed: 0 there, 7 here" in outcome(tmp_path, EXIT_USER, 0, 2)


def test_diverged(start, tmp_path, monkeypatch):
    true_loss = TokenPrediction.loss

    def no_number(*arguments):
        loss = true_loss(*arguments)
        return loss._replace(total=loss.total * torch.nan)

    def diverge():
        monkeypatch.setattr(TokenPrediction, "loss", no_number)

    assert start("--checkpoint.every", "2", "--max-bad-steps", "2", before={4: diverge}) == EXIT_FAILED
    assert "2 steps in a row had a NaN or infinite loss" in outcome(tmp_path, EXIT_FAILED, 5, 4)
    assert read_last_step(tmp_path / "run", "the-attempt") == 5


def test_out_of_memory(start, tmp_path):
    assert start(before={6: raising(MemoryError())}) == EXIT_FAILED
    assert "out of memory" in outcome(tmp_path, EXIT_FAILED, 5, 4)


def test_a_mistake_of_ours_keeps_its_traceback(start, tmp_path):
    with pytest.raises(KeyError):
        start(before={2: raising(KeyError("surprise"))})
    assert outcome(tmp_path, EXIT_FAILED, 1, None) == "KeyError: 'surprise'"


def test_left_at_once(start, tmp_path):
    assert start(before={2: raising(KeyboardInterrupt())}) == EXIT_INTERRUPTED
    outcome(tmp_path, EXIT_INTERRUPTED, 1, None)


def test_output_that_nobody_reads_is_no_success(start, tmp_path):
    assert start(before={2: raising(BrokenPipeError(32, "Broken pipe"))}) == EXIT_FAILED
    assert "Broken pipe" in outcome(tmp_path, EXIT_FAILED, 1, None)


def test_what_is_no_run_is_left_alone(start, tmp_path):
    assert start("--global-batch-size", "0") == EXIT_USER
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("years of work")
    assert start() == EXIT_USER
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.txt"]


def test_other_ranks_speak_only_of_failures(tmp_path, monkeypatch):
    monkeypatch.setenv("MATMIX_ATTEMPT", "the-attempt")
    (tmp_path / "launch").mkdir()
    attempt = Attempt(tmp_path, rank=3)
    attempt.begin_step(5)
    attempt.end(EXIT_STOPPED, "stopped")
    assert read_outcomes(tmp_path, "the-attempt") == {}
    assert read_last_step(tmp_path, "the-attempt") is None
    attempt.end(EXIT_FAILED, "no\nluck")
    ((rank, found),) = read_outcomes(tmp_path, "the-attempt").items()
    assert (rank, found.code, found.reason, found.step) == (3, EXIT_FAILED, "no luck", 4)


@each("name", ["../elsewhere", "a b", ".hidden", "a/b"])
def test_the_name_of_an_attempt_is_a_file_name(name, monkeypatch):
    monkeypatch.setenv("MATMIX_ATTEMPT", name)
    with pytest.raises(ValueError, match="MATMIX_ATTEMPT"):
        attempt_id()


def test_ranks_whose_launchers_named_the_start_differently_take_rank_zeros_name(monkeypatch):
    monkeypatch.setenv("MATMIX_ATTEMPT", "second-node")
    adopt_attempt("first-node")
    assert attempt_id() == "first-node"

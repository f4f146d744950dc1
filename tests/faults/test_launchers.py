"""torchrun is killed before its ranks have begun: none lives on, and the next start at the same port succeeds."""

import time

import pytest
from fault_harness import Run, assert_same, free_port, wait_until

# A rank without its launcher lives no longer than this.
ORPHAN_SECONDS = 2.0


def _kill_torchrun(run: Run, port: int, delay: float) -> None:
    """Kills torchrun `delay` seconds after its ranks have started."""
    attempt = run.start(torchrun=True, port=port)
    wait_until(
        lambda: len(attempt.processes()) > run.ranks or attempt.launcher.poll() is not None, "ranks to be started"
    )
    time.sleep(delay)
    assert attempt.launcher.poll() is None, attempt.text()
    attempt.launcher.kill()
    attempt.launcher.wait()
    wait_until(lambda: not attempt.processes(), "its ranks to end", ORPHAN_SECONDS)


def _survives(make_run, reference: Run, delays: tuple[float, ...]) -> None:
    run, port = make_run(ranks=2), free_port()
    for delay in delays:
        _kill_torchrun(run, port, delay)
    run.finish(torchrun=True, port=port)
    assert_same(run, reference)


@pytest.mark.slow
def test_torchrun_is_killed_while_its_ranks_import(make_run, two_ranks):
    _survives(make_run, two_ranks, (0.02, 1.0))


@pytest.mark.slow
def test_torchrun_is_killed_at_any_moment_of_its_ranks_start(make_run, two_ranks):
    _survives(make_run, two_ranks, (0.02, 0.05, 0.1, 0.2, 0.5, 1.5, 2.0, 2.5))

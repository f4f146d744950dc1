"""What is said to people: where it is shown, by whom, and what of it is kept."""

import errno
import io
import logging
import os
import re
import sys

import pytest
from failures import each
from runs import losses, run_recipe
from tqdm import tqdm

from matmix.train.process import logs

logger = logging.getLogger("matmix.test")


def say(level, rank=0):
    with logs.shown(level, rank=rank):
        logger.debug("a detail")
        logger.info("a line")
        logger.warning("a doubt")
        logger.warning("of this rank", extra=logs.EVERY_RANK)


@each(
    "level, shown",
    [
        ("debug", ["a detail", "a line", "warning: a doubt", "warning: of this rank"]),
        ("info", ["a line", "warning: a doubt", "warning: of this rank"]),
        ("warning", ["warning: a doubt", "warning: of this rank"]),
        ("error", []),
    ],
)
def test_the_level_says_what_is_shown(level, shown, capsys):
    say(level)
    assert capsys.readouterr().err.splitlines() == shown


def test_other_ranks_are_silent(capsys):
    say("info", rank=1)
    assert capsys.readouterr().err.splitlines() == ["warning: of this rank"]


def test_nothing_is_said_twice(capsys):
    """Libraries give the root logger a handler; a run within a command has a console within a console."""
    handler = logging.StreamHandler(sys.stderr)
    logging.getLogger().addHandler(handler)
    try:
        with logs.shown("info"):
            say("error")
            with logs.shown("info"):
                logger.info("once")
            logger.info("again")
    finally:
        logging.getLogger().removeHandler(handler)
    assert capsys.readouterr().err.splitlines() == ["once", "again"]


def test_a_level_that_there_is_not():
    with pytest.raises(ValueError, match="must be one of debug, info, warning, error, got 'loud'"):
        say("loud")


def test_a_progress_bar_is_not_torn(monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    with logs.shown("info"), tqdm(total=10, file=terminal, ascii=True, ncols=40) as bar:
        bar.update(5)
        bar.refresh()
        logger.info("a line")
    # Before it the bar is wiped out; after it the bar is drawn anew on a line of its own.
    assert re.search(r"\r +\ra line\n\r +50%\|", terminal.getvalue())


def test_nobody_reads_any_more(monkeypatch):
    class Broken(io.StringIO):
        def write(self, text):
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    monkeypatch.setattr(sys, "stderr", Broken())
    say("info")


STAMPED = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4} (INFO|WARNING) .+"


def test_a_run_keeps_what_it_said(dataset, tmp_path, capsys):
    run_recipe("debug_mru", dataset, tmp_path / "run", "--stop-step", "4")
    first = (tmp_path / "run" / "messages.log").read_text()
    assert "step 4/" in first
    run_recipe("debug_mru", dataset, tmp_path / "run", "--logging.level", "info")
    both = (tmp_path / "run" / "messages.log").read_text()
    assert both.startswith(first)
    assert "INFO resumed from step-00000004" in both[len(first) :]
    assert all(re.fullmatch(STAMPED, line) for line in both.splitlines())
    assert "resumed from step-00000004" in capsys.readouterr().err


def test_a_run_that_says_warnings_only(dataset, tmp_path, capsys):
    run_recipe("debug_mru", dataset, tmp_path / "run", "--steps", "2", "--logging.level", "warning")
    assert capsys.readouterr().err == ""
    assert not (tmp_path / "run" / "messages.log").exists()


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no /dev/full")
@pytest.mark.parametrize("how", ["no space", "a folder is there"])
def test_a_file_that_cannot_be_written_ends_no_run(how, dataset, tmp_path, capsys):
    run_recipe("debug_mru", dataset, tmp_path / "whole")
    run_recipe("debug_mru", dataset, tmp_path / "run", "--stop-step", "2")
    path = tmp_path / "run" / "messages.log"
    path.unlink()
    path.symlink_to("/dev/full") if how == "no space" else path.mkdir()
    capsys.readouterr()
    assert run_recipe("debug_mru", dataset, tmp_path / "run").finished
    assert capsys.readouterr().err.count("messages.log cannot be written") == 1
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")

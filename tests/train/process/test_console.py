"""How commands end, as those see it who started them."""

from __future__ import annotations

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from matmix.train.process.console import guarded
from matmix.train.process.exits import EXIT_USER


@pytest.mark.parametrize("rank", ["0", "3"])
def test_torchrun_ends_with_what_was_wrong(rank, tmp_path, monkeypatch):
    """It prints what it finds in a file for each rank."""

    def fail() -> int:
        raise ValueError("data.seqlen is\nwrong")

    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    assert guarded(fail) == EXIT_USER
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=EXIT_USER, error_file=str(tmp_path / "error.json"))
    shown = str(ChildFailedError("matmix.train", {int(rank): failure})).strip().splitlines()
    assert shown[-2] == "  traceback : data.seqlen is wrong"

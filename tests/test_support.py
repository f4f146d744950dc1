"""What the tests rest on does what it says."""

import os

import pytest
import torch
from failures import Failures, each


def fail(error: Exception) -> None:
    raise error


def test_all_failures_of_a_test_are_reported():
    failures = Failures()
    for case, error in (("first", AssertionError("no first")), ("second", None), ("third", ValueError("no third"))):
        with failures.of(case):
            assert error is None or fail(error)
    with pytest.raises(AssertionError, match=r"(?s)^2 of 3 cases:\nfirst: .* no first .*\nthird: ValueError: no third"):
        failures.__exit__(None, None, None)
    with pytest.raises(AssertionError, match="no case was tried"):
        Failures().__exit__(None, None, None)


def test_each_case_of_one_test_has_its_own_start(tmp_path, monkeypatch):
    drawn, folders = [], []

    @each("one, other", [(1, 1), (2, 3), (4, 5)])
    @each("sign", [1, -1])
    def test(one, other, sign, tmp_path, monkeypatch):
        drawn.append(torch.rand(1).item())
        folders.append(tmp_path)
        monkeypatch.setenv("MATMIX_A_TEST", str(one))
        assert sign * one == sign * other

    with pytest.raises(AssertionError, match=r"(?s)^2 of 3 cases:\n2, 3: AssertionError: 2 of 2 cases:\n1: .*4, 5: "):
        test(tmp_path=tmp_path, monkeypatch=monkeypatch)
    assert len(set(folders)) == 6
    assert len(set(drawn)) == 1
    assert "MATMIX_A_TEST" not in os.environ

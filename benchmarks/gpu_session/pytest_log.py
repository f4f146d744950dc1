"""A plugin for pytest: writes each test's outcome into a file as soon as it is known, and leaves out given tests.

MATMIX_TEST_LOG: the file, a line [name, outcome] for each test and phase; MATMIX_TEST_SKIP: a file with the names to
leave out, a JSON list.
"""

from __future__ import annotations

import json
import os
from pathlib import Path


def pytest_collection_modifyitems(config, items) -> None:
    """Leave out what is done."""
    done = set(json.loads(Path(os.environ["MATMIX_TEST_SKIP"]).read_text()))
    kept = [item for item in items if item.nodeid not in done]
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in done])
    items[:] = kept


def pytest_runtest_logreport(report) -> None:
    """Only where all reports arrive: not in the processes of xdist."""
    if "PYTEST_XDIST_WORKER" in os.environ or (report.when != "call" and report.outcome == "passed"):
        return
    with open(os.environ["MATMIX_TEST_LOG"], "a", encoding="utf-8") as file:
        file.write(json.dumps([report.nodeid, report.outcome]) + "\n")

"""Files and folders of the repository that the pages name exist."""

from __future__ import annotations

import re

from pages import spans
from paths import ROOT

ROOMS = ("kernels", "model", "data", "train", "use", "launch", "tests")


def test_files_that_pages_name_exist():
    named = [(s.where, s.code.strip()) for room in ROOMS for s in spans(f"{room}/")]
    named = [(where, path) for where, path in named if re.fullmatch(r"[\w/.-]+(?:\.py|\.toml|/)", path)]
    assert len(named) > 60
    # Tables of tests leave tests/ out; launch/outcomes/ is in a run; the mixer comes into being on its page.
    known = {"launch/outcomes/", "model/mixers/gated_average.py"}
    lost = [(where, path) for where, path in named if not any((at / path).exists() for at in (ROOT, ROOT / "tests"))]
    assert [(where, path) for where, path in lost if path not in known] == []

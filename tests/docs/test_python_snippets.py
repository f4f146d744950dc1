"""Every Python snippet of the pages and of models' cards runs; those that load exports also where matmix is not, in
both versions of transformers, and nothing asks whether to run an export's code."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import Snippet, snippets, snippets_of

RUN = Path(__file__).with_name("run_snippets.py")
SNIPPETS = snippets("python")
# A Python of an environment with another (newer) transformers and no matmix.
OTHER_PYTHON = os.environ.get("MATMIX_TRANSFORMERS5_PYTHON", "")
_FOLDER = re.compile('"(DIR|PATH/TO/THIS/DIRECTORY)"')
_CLASS = re.compile(r"\bAutoModel\w*")
_MORE_THAN_TRANSFORMERS = re.compile(r"^\s*(?:import|from) (?:matmix|timm|sentence_transformers)\b", re.MULTILINE)


def runnable(found: list[Snippet], exported: dict[str, Path], folder: Path) -> list[dict]:
    """What `run_snippets.py` reads: each export that a snippet loads in place of DIR, by the class it loads."""

    def code(snippet: Snippet) -> str:
        named = _CLASS.search(snippet.code)
        usual = "AutoModelForImageClassification" if "timm" in snippet.code else "AutoModelForMaskedLM"
        usual = "AutoModelForCausalLM" if "matmix.generate(" in snippet.code else usual
        path = exported[named[0] if named else usual]
        return _FOLDER.sub(lambda match: json.dumps(str(path)), snippet.code)

    pages = itertools.groupby(sorted(found, key=lambda s: s.page), key=lambda s: s.page)
    return [
        {
            "name": page,
            "folder": str(folder),
            "snippets": [{"line": s.line, "code": code(s)} for s in rows if not s.not_run],
        }
        for page, rows in pages
    ]


def cards(exported: dict[str, Path], *, whole: bool) -> list[Snippet]:
    """The snippets of the models' cards, a page each; unless `whole`, up to what needs more than transformers."""
    found = []
    for name, path in exported.items():
        (card,) = snippets_of(path / "README.md")
        parts = card.code.split("\n\n")
        own = parts if whole else list(itertools.takewhile(lambda p: not _MORE_THAN_TRANSFORMERS.search(p), parts))
        assert name in own[1]
        found.append(Snippet(f"card of {name}", card.line, card.language, "\n\n".join(own)))
    return found


def run(pages: list[dict], python: list[str], site: str, work: Path) -> str:
    """Runs them in a process that nobody can answer; the last line that it prints."""
    file = work / "pages.json"
    file.write_text(json.dumps(pages))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH" or not site}
    environment |= {"HF_HOME": str(work / "home"), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [*python, str(RUN), str(file), *([site] if site else [])]
    done = subprocess.run(
        command, cwd=work, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300
    )
    said = done.stdout.splitlines()
    assert done.returncode == 0, "\n".join(line for line in said if not line.endswith(": ok")) + done.stderr[-2000:]
    assert "Do you wish to run" not in done.stdout + done.stderr
    assert sum(line.endswith(": ok") for line in said) == len(pages)
    return said[-1]


def test_there_are_reasons_where_snippets_are_not_run():
    left_out = {s.where: s.not_run for s in SNIPPETS if s.not_run}
    assert len(left_out) <= 3, left_out
    assert all(len(reason.split()) >= 4 for reason in left_out.values()), left_out


@pytest.mark.slow
def test_snippets_and_cards_run_where_matmix_is(exported, desk, tmp_path):
    pytest.importorskip("timm", reason="one snippet needs timm")
    found = [*SNIPPETS, *cards(exported, whole=False)]
    last = run(runnable(found, exported, desk), [sys.executable, "-P"], "", tmp_path)
    assert last.startswith("transformers 4.")


@pytest.mark.slow
def test_whole_cards_run_where_matmix_is(exported, desk, tmp_path):
    pytest.importorskip("sentence_transformers", reason="cards of encoders show sentence-transformers")
    run(runnable(cards(exported, whole=True), exported, desk), [sys.executable, "-P"], "", tmp_path)


def bare(exported: dict[str, Path], desk: Path) -> list[dict]:
    """The snippets that need transformers only."""
    found = [s for s in SNIPPETS if not _MORE_THAN_TRANSFORMERS.search(s.code) and "from_pretrained" in s.code]
    assert len(found) >= 4
    return runnable([*found, *cards(exported, whole=False)], exported, desk)


@pytest.mark.slow
def test_snippets_and_cards_run_with_transformers_and_torch_only(exported, desk, tmp_path):
    from bare_site import make_bare_site

    site = make_bare_site(tmp_path / "site", ("torch", "transformers", "pillow"))
    last = run(bare(exported, desk), [sys.executable, "-I", "-S"], str(site), tmp_path)
    assert last.startswith("transformers 4.")


@pytest.mark.slow
@pytest.mark.skipif(not OTHER_PYTHON, reason="MATMIX_TRANSFORMERS5_PYTHON names no Python with transformers 5")
def test_snippets_and_cards_run_with_newer_transformers(exported, desk, tmp_path):
    last = run(bare(exported, desk), [OTHER_PYTHON, "-I"], "none", tmp_path)
    assert not last.startswith("transformers 4.")

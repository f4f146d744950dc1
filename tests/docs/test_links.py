"""Links in the documents lead somewhere, on a code host, which shows the files, and on the site; so do names of tests.
Links to other hosts are not followed."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

import pytest
from failures import Failures
from paths import ROOT

DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob(".github/**/*.md"))]
_CODE = re.compile(r"^(```|~~~).*?^\1|(`+)(?!`).+?(?<!`)\2(?!`)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(\s*<?([^\s)>]+)>?(?:\s+\"[^\"]*\")?\s*\)|\b(?:href|src)=\"([^\"]+)\"")
_TEST = re.compile(r"`((?:[\w-]+/)+test_\w+\.py)")


def _links(text: str) -> list[str]:
    """Targets of the links and pictures of a document, in Markdown and HTML, code left out."""
    return [one or other for one, other in _LINK.findall(_CODE.sub("", text))]


def _headings(text: str) -> list[str]:
    without = re.sub(r"^(```|~~~).*?^\1", "", text, flags=re.MULTILINE | re.DOTALL)
    return [re.sub(r"\s*#*\s*$", "", line) for line in re.findall(r"^#{1,6}\s+(.+)$", without, re.MULTILINE)]


def _plain(heading: str) -> str:
    """The words that a reader sees."""
    return re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "")


def _numbered(slugs: list[str], separator: str) -> set[str]:
    """The second of two equal ones gets a number."""
    before = [slugs[:place].count(slug) for place, slug in enumerate(slugs)]
    return {f"{slug}{separator}{count}" if count else slug for slug, count in zip(slugs, before, strict=True)}


def _anchors_on_a_code_host(text: str) -> set[str]:
    slugs = [re.sub(r"[^\w\- ]", "", _plain(heading).strip().lower()).replace(" ", "-") for heading in _headings(text)]
    return _numbered(slugs, "-") | set(re.findall(r"\b(?:id|name)=\"([^\"]+)\"", text))


def _anchors_on_the_site(text: str) -> set[str]:
    toc = pytest.importorskip("markdown.extensions.toc", reason="the site's Markdown is not installed")
    slugs = [toc.slugify(_plain(heading), "-") for heading in _headings(text)]
    return _numbered(slugs, "_") | set(re.findall(r"\b(?:id|name)=\"([^\"]+)\"", text))


def _dead(document: Path, text: str) -> list[str]:
    """What is wrong with the links of a document, each with its target."""
    wrong = []
    for link in _links(text):
        if re.match(r"[a-z][a-z0-9+.-]*:", link):
            continue
        name, _, anchor = unquote(link).partition("#")
        target = (document.parent / name).resolve() if name else document
        if name.startswith("/") or not target.is_relative_to(ROOT):
            wrong.append(f"{link} leaves the repository")
        elif target != document and not target.exists():
            wrong.append(f"{link}: there is no such file")
        elif ROOT / "docs" in document.parents and ROOT / "docs" not in target.parents:
            wrong.append(f"{link} leaves docs/, and so leads nowhere on the site")
        elif anchor and target.suffix == ".md":
            there = target.read_text(encoding="utf-8") if target != document else text
            places = {"a code host": _anchors_on_a_code_host}
            if ROOT / "docs" in document.parents:
                places["the site"] = _anchors_on_the_site
            wrong += [
                f"{link}: no such heading on {where}" for where, find in places.items() if anchor not in find(there)
            ]
    return wrong


def test_links_lead_somewhere():
    with Failures() as failures:
        for document in DOCUMENTS:
            with failures.of(str(document.relative_to(ROOT))):
                text = document.read_text(encoding="utf-8")
                tests = [ROOT / "tests" / name.removeprefix("tests/") for name in _TEST.findall(text)]
                wrong = [*_dead(document, text), *(f"there is no {test}" for test in tests if not test.is_file())]
                assert not wrong, wrong


def test_all_documents_are_looked_at():
    names = {str(path.relative_to(ROOT)) for path in DOCUMENTS}
    assert {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/index.md", "docs/api/model.md"} <= names


DEAD_LINKS = [
    ("[a](nowhere.md)", 1),
    ("![a](pictures/nowhere.png)", 1),
    ('<img src="pictures/nowhere.png">', 1),
    ("[a](training.md#no-such-heading)", 2),
    ("[a](../README.md)", 1),
    ("[a](../../elsewhere.md)", 1),
    ("[a](#below)\n\n## Below\n", 0),
    ("[a](#a-b)\n\n## `A` B\n", 0),
    ("[a](#x_y)\n\n## X / Y\n", 2),
    ("[a](https://example.com/x) `[a](nowhere.md)`\n```\n[a](nowhere.md)\n```\n", 0),
    ("[a](training.md) [b](index.md)", 0),
]
"""Texts of a page, and how many dead links each has."""


def test_dead_links_are_found():
    for text, count in DEAD_LINKS:
        assert len(_dead(ROOT / "docs" / "page.md", text)) == count, text

"""The snippets of README.md and of the pages in docs/: fenced blocks, indented ones, and code in running text."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

from paths import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCE = re.compile(r"( *)```(\w*) *")
_INCLUDED = re.compile(r'--8<-- "(\S+)"')
_REASON = re.compile(r"<!-- not run: (.+) -->")


@dataclasses.dataclass(frozen=True, slots=True)
class Snippet:
    """A block of code on a page."""

    page: str
    """Path from the root."""
    line: int
    """Of the first line of the code, from 1."""
    language: str
    """As the fence names it; "" where it names none, and of indented blocks."""
    code: str
    not_run: str = ""
    """Why it is not run, from a comment `<!-- not run: WHY -->` in the last line above it that is not blank."""

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


def snippets(*languages: str) -> list[Snippet]:
    """The snippets of all pages in these languages, in order."""
    return [found for page in PAGES for found in snippets_of(page) if found.language in languages]


def snippets_of(page: Path) -> Iterator[Snippet]:
    """The snippets of one page, in order."""
    name = page.relative_to(ROOT).as_posix() if page.is_relative_to(ROOT) else page.name
    lines = page.read_text(encoding="utf-8").split("\n")
    above, number = "", 0
    while number < len(lines):
        start = number
        if fence := _FENCE.fullmatch(lines[number]):
            indent, language = fence.groups()
            end = next(n for n in range(number + 1, len(lines)) if lines[n].strip() == "```")
            code, start, number = lines[number + 1 : end], number + 1, end + 1
        elif lines[number].startswith("    ") and (not above or _REASON.fullmatch(above) or not lines[number - 1]):
            indent, language = "    ", ""
            while number < len(lines) and (lines[number].startswith("    ") or not lines[number].strip()):
                number += 1
            code = lines[start:number]
        else:
            above = lines[number].strip() or above
            number += 1
            continue
        code = [line for shown in code for line in included(shown)]
        reason = _REASON.fullmatch(above)
        text = "\n".join(line.removeprefix(indent) for line in code).rstrip() + "\n"
        yield Snippet(name, start + 1, language, text, reason[1] if reason else "")
        above = ""


def included(line: str) -> list[str]:
    """The lines of the file that a line of a page shows, or the line itself."""
    shown = _INCLUDED.fullmatch(line.strip())
    return (ROOT / shown[1]).read_text(encoding="utf-8").splitlines() if shown else [line]


def spans(start: str) -> list[Snippet]:
    """Code in running text that begins with `start`, of all pages."""
    found, blocks = [], re.compile(r"^ *```.*?^ *```$|^    [^\n]*$", flags=re.MULTILINE | re.DOTALL)
    for page in PAGES:
        text = blocks.sub(lambda block: "\n" * block[0].count("\n"), page.read_text(encoding="utf-8"))
        for match in re.finditer(rf"(?<!`)`({re.escape(start)}[^`]*)`(?!`)", text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(Snippet(page.relative_to(ROOT).as_posix(), line, "", " ".join(match[1].split()) + "\n"))
    return found

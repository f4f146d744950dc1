"""The messages that docs/troubleshooting.md quotes in its headings are those of the code."""

from __future__ import annotations

import ast
import functools
import re

from paths import ROOT

PAGE = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
HEADINGS = re.findall(r"^### (.+)$", PAGE, flags=re.MULTILINE)
QUOTED = [code for heading in HEADINGS for code in re.findall("`([^`]+)`", heading) if code != "loss nan"]
ROOMS = ("kernels", "model", "data", "train", "use", "launch")


@functools.cache
def messages() -> list[str]:
    """All strings of the code, "\\0" where something is put in."""
    found = []
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
                    found.append("".join(parts))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return found


def test_most_headings_quote_a_message():
    assert len(QUOTED) >= 30


def test_quoted_messages_are_in_the_code():
    lost = []
    for quoted in QUOTED:
        parts = [part.strip() for part in quoted.split("...") if part.strip(" (:;,")]
        pattern = re.compile(".*".join(map(re.escape, parts)), flags=re.DOTALL)
        if not any(pattern.search(message) for message in messages()):
            lost.append(quoted)
    assert not lost

"""The command lines in shell snippets of the pages."""

from __future__ import annotations

import dataclasses
import itertools
import re
import shlex
from collections.abc import Iterator

from pages import Snippet

PROGRAMS = ("matmix", "torchrun", "python", "pip", "make", "hf", "lm_eval")
"""What command lines on the pages begin with; other lines of a block are output, files and formulas."""
_USAGE = re.compile(r"\[(?:--key value |--option value |the same options|)?(?:\.\.\.)?\]")
_ENVIRONMENT = re.compile(r"[A-Z_]+=.*")


@dataclasses.dataclass(frozen=True, slots=True)
class CommandLine:
    """One command, as its words."""

    where: str
    words: tuple[str, ...]

    @property
    def page(self) -> str:
        """The path of its page from the root."""
        return self.where.rpartition(":")[0]

    @property
    def program(self) -> str:
        """Its name without the folder."""
        return self.words[0].rpartition("/")[2]


def command_lines(snippet: Snippet) -> Iterator[CommandLine]:
    """The commands of a snippet, in order. What explains a command behind "#" or two spaces is no part of it, nor are
    "...", the brackets around what can be left out, and the file that output goes into."""
    lines = snippet.code.split("\n")
    number = 0
    while number < len(lines):
        where, line = f"{snippet.page}:{snippet.line + number}", lines[number].removeprefix("$ ")
        number += 1
        if not _begins(line):
            continue
        while line.endswith("\\") or (line.count('"') % 2 and number < len(lines)):
            line = f"{line.removesuffix(chr(92)).rstrip()} {lines[number].strip()}"
            number += 1
        for words in _commands(_USAGE.sub("", re.split(r" {2,}", line)[0])):
            yield CommandLine(where, words)


def _begins(line: str) -> bool:
    words = [word for word in line.split() if not _ENVIRONMENT.fullmatch(word)]
    return bool(words) and (words[0].rpartition("/")[2] in PROGRAMS or words[0] == "for")


def _commands(line: str) -> Iterator[tuple[str, ...]]:
    lexer = shlex.shlex(re.sub(r"\b([\w-]+)\|[\w-]+", r"\1", line), posix=True, punctuation_chars=";&|")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if set(word) <= set(";&|"):
            words = [w for w in words if w not in ("...", "do")]
            while words and _ENVIRONMENT.fullmatch(words[0]):
                del words[0]
            if words and words[0].rpartition("/")[2] in PROGRAMS:
                yield tuple(itertools.takewhile(lambda word: word != ">", words))
            words = []
        else:
            word = word.removeprefix("[")
            words.append(word if "[" in word or "{" in word else word.removesuffix("]"))

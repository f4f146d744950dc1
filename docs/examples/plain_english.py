"""`python -P docs/examples/plain_english.py FILE.jsonl ... --out PLAIN.jsonl`: English that is at hand, in the form of
the newsgroups and Reuters texts of `labelled_texts`: words of small letters a to z, with nothing between but spaces.

It reads the corpora that come with matmix, the docstrings of Python's standard library, the manual pages of this
machine where there are some, and the texts of the files that are named. A text that occurs twice is written once.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import gzip
import json
import lzma
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import tyro

from matmix.data.artifacts import read_json_lines
from matmix.data.corpora import bundled_path
from matmix.data.storage.files import write_atomic
from matmix.train.arguments import parse_arguments
from matmix.train.process.console import guarded

LEAST = 20
"""Words of a text; shorter ones are left out."""
PART = 400
"""Words of a document; longer texts are cut into such parts."""
FAMILY = 200
"""Manual pages of one program that are read, such as git-add and git-commit: some have thousands, all much alike."""


def plain(text: str) -> list[str]:
    """The words of a text, as those of 20 Newsgroups in the package are."""
    return re.findall(r"[a-z]+", text.lower())


def bundled() -> Iterator[str]:
    """The works that come with matmix."""
    for corpus in ("shakespeare", "moby_dick"):
        with lzma.open(bundled_path(corpus), "rt", encoding="utf-8") as lines:
            yield from (json.loads(line)["text"] for line in lines)


def docstrings(library: Path) -> Iterator[str]:
    """The docstrings of the modules in a folder, those of one module as one text."""
    for path in sorted(library.rglob("*.py")):
        if {"site-packages", "test", "tests"} & set(path.relative_to(library).parts):
            continue
        try:
            nodes = list(ast.walk(ast.parse(path.read_bytes())))
        except (SyntaxError, ValueError):
            continue  # written for another Python, or to be refused
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        yield "\n".join(filter(None, (ast.get_docstring(node) for node in nodes if isinstance(node, kinds))))


def manual_pages(folder: Path) -> Iterator[str]:
    """The text of the English pages in a folder, without the words of their markup."""
    read: collections.Counter = collections.Counter()
    for path in sorted(folder.glob("man[1-8]/*.gz")):
        read[family := re.split(r"[-_.:]", path.name)[0]] += 1
        if read[family] > FAMILY:
            continue
        with gzip.open(path, "rt", encoding="utf-8", errors="replace") as lines:
            text = "".join(re.sub(r"^[.'](\\\".*|\s*[A-Za-z]+)", "", line) for line in lines)
        yield re.sub(r"\\(f[A-Z]|f\(..|\[..\]|\(..|.)", " ", text)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plain:
    """Writes English that is at hand as plain words."""

    files: tyro.conf.Positional[tuple[Path, ...]] = ()
    """Further texts, {"text": ...} in each line."""
    out: Path
    """The file to write."""
    manuals: Path = Path("/usr/share/man")
    """Where manual pages are."""
    library: Path = Path(sysconfig.get_path("stdlib"))
    """Where Python's standard library is."""

    def run(self) -> int:
        """Writes the file and says what is in it; the exit code."""
        sources = {
            "the corpora of matmix": bundled(),
            "docstrings": docstrings(self.library),
            "manual pages": manual_pages(self.manuals),
            **{str(path): (row["text"] for row in read_json_lines(path)) for path in self.files},
        }
        written: dict[str, None] = {}
        for name, texts in sources.items():
            before = sum(map(len, written))
            for words in map(plain, texts):
                for start in range(0, len(words), PART):
                    if len(part := words[start : start + PART]) >= LEAST:
                        written[" ".join(part)] = None
            print(f"{name}: {(sum(map(len, written)) - before) / 1e6:.1f} MB", flush=True)
        self.out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self.out, "".join(json.dumps({"text": text}) + "\n" for text in written))
        print(f"{self.out}: {len(written):,} texts of at most {PART} words")
        return 0


def main(arguments: list[str]) -> int:
    """Writes what the arguments name and returns the exit code."""
    prog = "python -P docs/examples/plain_english.py"
    return guarded(lambda: parse_arguments(Plain, arguments, prog=prog).run())


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

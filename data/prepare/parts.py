"""The parts of a preparation, which many processes make at the same time on a file system that they share.

    OUT/parts/options.json            what is prepared, and with which command; written after the tokenizer
    OUT/parts/tokenizer/              the files that all parts use (of text)
    OUT/parts/cuts.json               where each part begins and ends in the input
    OUT/parts/part-00003-of-00064/    part 3: a dataset of its own, part.json (what it has read) and sums.npy

The first process makes the first three under a lock, while the others wait. They are the same whoever makes them, and
appear under their names only when they are whole, so a file system without locks costs work and not correctness.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matmix.data.artifacts import artifact_path, one_line, parse_json, shell_line
from matmix.data.manifest import MANIFEST_NAME
from matmix.data.prepare.base import Position, Preparation
from matmix.data.prepare.workspace import PART_NAME, PARTS_NAME, WORK_NAME, compare_preparations, locked
from matmix.data.storage.files import sha256_of, write_atomic

MERGING_NAME = "merging"


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """The records from `start` up to `stop`: part `number` of `of`, counted from 1; number 0 is the whole input."""

    number: int
    of: int
    start: Position
    stop: Position


def read_spans(folder: Path) -> list[list[int]]:
    """Returns `Progress.spans` of a finished part. Raises ValueError (one line) if its part.json is damaged."""
    try:
        spans = parse_json((folder / PART_NAME).read_bytes(), PART_NAME)["spans"]
        if not all(len(span) == 6 and all(type(n) is int and n >= 0 for n in span) for span in spans):
            raise ValueError("its spans are no numbers")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{folder / PART_NAME} is missing or damaged ({one_line(error)}); delete {folder}") from None
    return spans


def missing_parts(out: str | Path, parts: int) -> list[int]:
    """Returns the numbers (1 to `parts`) of the unfinished parts in the folder `out`; none once the parts are joined.

    It looks at file names only: this is cheap, and true also while parts are being made.
    """
    folder = Path(out).expanduser()
    if (folder / MANIFEST_NAME).is_file():
        return []
    folder, numbers = folder / PARTS_NAME, range(1, parts + 1)
    return [number for number in numbers if not (folder / _name(number, parts) / MANIFEST_NAME).is_file()]


def _name(number: int, of: int) -> str:
    return f"part-{number:05}-of-{of:05}"


class Parts:
    """The folder OUT/parts of a preparation. kind: what it prepares."""

    def __init__(self, out: str | Path, kind: type[Preparation]) -> None:
        self.out = Path(out).expanduser()
        self.folder = self.out / PARTS_NAME
        self.kind = kind

    def part(self, number: int, of: int) -> Path:
        return self.folder / _name(number, of)

    def begin(self, preparation: Preparation) -> None:
        """Makes what all parts share, unless an earlier part has.

        Raises ValueError if OUT holds anything but parts of this preparation, or for an input of which nothing can be
        made; nothing is left behind then.
        """
        self._check_free()
        made = [path for path in (self.out, self.folder) if not path.exists()]
        self.folder.mkdir(parents=True, exist_ok=True)

        def begun() -> dict[str, Any]:
            preparation.ready(self.folder, is_part=True)
            preparation.save_shared(self.folder, alone=False)
            return {
                "options": preparation.wanted,
                "shared": {name: sha256_of(self.folder / name) for name in preparation.shared},
                "names": [source.name for source in preparation.sources],
                "paths": [str(Path(source.path).resolve()) for source in preparation.sources],
                "arguments": preparation.config.arguments(),
            }

        try:
            self._write_once("options.json", "begins with the parts", begun, indent=1)
        except (ValueError, FileNotFoundError):
            (self.folder / "lock").unlink(missing_ok=True)
            for path in reversed(made):
                with contextlib.suppress(OSError):
                    path.rmdir()
            raise
        facts = self.facts()
        compare_preparations(self.out, facts["options"], preparation.wanted)
        if (self.folder / MERGING_NAME).exists():
            merge = shell_line(*self.kind.verb.split(), "--merge", "--out", self.out)
            raise ValueError(f"{self.out} is being joined; finish that: {merge}")
        self.check_shared(self.folder, f"delete {self.folder}")

    def share(self, preparation: Preparation, number: int, of: int) -> Share:
        """Returns what belongs to a part. Raises ValueError if the folder is for another number of parts."""

        def cut() -> dict[str, Any]:
            cuts = [[cut.source, cut.offset] for cut in preparation.cuts(of)]
            return {"parts": of, "cuts": cuts, "ends": [source.end for source in preparation.sources]}

        self._write_once("cuts.json", "cuts the input", cut)
        parts = len(cuts := self.cuts()) - 1
        if parts != of:
            raise ValueError(
                f"{self.out} is prepared in {parts} parts; give --part k/{parts}, or delete {self.folder} to begin anew"
            )
        return Share(number, of, cuts[number - 1], cuts[number])

    def check_shared(self, folder: Path, advice: str) -> None:
        """Raises ValueError (one line) unless a folder has the shared files that the parts were begun with."""
        for name, digest in self.facts()["shared"].items():
            path = artifact_path(folder, name, "options.json", nested=True)
            if not path.is_file() or sha256_of(path) != digest:
                raise ValueError(f"{path} is not the file that the parts were begun with; {advice}")

    def facts(self) -> dict[str, Any]:
        """Returns the contents of options.json. Raises FileNotFoundError without parts, ValueError if it is damaged."""
        return self._read("options.json", _check_facts)

    def cuts(self) -> list[Position]:
        """Returns where each part begins, and the end of the last. Raises as `facts`."""
        return [Position(source, offset) for source, offset in self._read("cuts.json", _check_cuts)["cuts"]]

    def ends(self) -> list[int | None]:
        """Returns the offset at the end of each source, None where it is not known. Raises as `facts`."""
        return self._read("cuts.json", _check_cuts)["ends"]

    def _check_free(self) -> None:
        """Raises ValueError if OUT holds anything but parts."""
        if (self.folder / "options.json").exists():
            return
        for path in self.out.iterdir() if self.out.is_dir() else ():
            if path.name != PARTS_NAME:
                kind = "an unfinished preparation in one piece" if path.name == WORK_NAME else "something else"
                raise ValueError(f"{self.out} holds {kind} ({path.name}); choose another output folder")

    def _write_once(self, name: str, doing: str, make: Callable[[], dict[str, Any]], indent: int | None = None) -> None:
        """Writes a file unless it is there, one process at a time. doing: what another process may be doing."""
        path = self.folder / name
        if not path.exists():
            with locked(self.folder, f"waiting for another process, which {doing}", wait=True):
                if not path.exists():
                    write_atomic(path, json.dumps(make(), indent=indent).encode(), alone=False)

    def _read(self, name: str, check: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        path, kind = self.folder / name, self.kind.name
        try:
            raw = parse_json(path.read_bytes(), name)
            kind = raw.get("options", {}).get("kind", "text") if name == "options.json" else kind
            if kind == self.kind.name:
                check(raw)
        except FileNotFoundError:
            make = shell_line(*self.kind.verb.split(), "INPUT", "--out", self.out, "--part", "k/n")
            raise FileNotFoundError(f"{self.out} holds no parts; make each with {make}") from None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{path} is damaged ({one_line(error)}); delete {self.folder} and prepare the parts again"
            ) from None
        if kind != self.kind.name:
            raise ValueError(f"{self.out} holds parts of {one_line(kind)}, which {self.kind.verb} does not join")
        return raw


def _check_facts(raw: dict[str, Any]) -> None:
    options = raw["options"]
    inputs = [*options["inputs"], *options.get("validation", ())]
    texts = [*raw["names"], *raw["paths"], *raw["arguments"], options["format"], options["compression"]]
    fine = all(isinstance(text, str) for text in (*texts, *raw["shared"].values()))
    fine = fine and all(isinstance(raw[name], list) for name in ("names", "paths", "arguments"))
    fine = fine and len(raw["names"]) == len(raw["paths"]) == len(inputs)
    if not fine or not all(isinstance(entry, list) and len(entry) == 3 for entry in inputs):
        raise ValueError("it lacks a key, or a value is of another kind")


def _check_cuts(raw: dict[str, Any]) -> None:
    count, cuts, ends = raw["parts"], raw["cuts"], raw["ends"]
    numbers = [count, *(number for cut in cuts for number in cut), *(end for end in ends if end is not None)]
    fine = all(type(number) is int and number >= 0 for number in numbers) and all(len(cut) == 2 for cut in cuts)
    if not fine or len(cuts) != count + 1 or cuts != sorted(cuts) or cuts[-1][0] > len(ends):
        raise ValueError("its cuts are no positions in order")

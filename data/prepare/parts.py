"""The parts of a preparation that many processes make at the same time, on a file system that they share.

    OUT/parts/options.json            what is prepared, and with which command; written after the tokenizer
    OUT/parts/tokenizer/              what all parts use
    OUT/parts/cuts.json               where each part begins and ends in the input
    OUT/parts/part-00003-of-00064/    part 3: a dataset of its own, and part.json, which says what it read

Whoever comes first makes the first three, under a lock, while the others wait. Each is the same whoever makes it and
appears under its name only when it is whole, so a file system without locks costs work and not correctness.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from matmix.data.artifacts import one_line, parse_json, shell_line
from matmix.data.manifest import MANIFEST_NAME
from matmix.data.prepare.config import PrepareConfig
from matmix.data.prepare.sources import Position, Source
from matmix.data.prepare.workspace import PART_NAME, PARTS_NAME, WORK_NAME, compare_preparations, locked
from matmix.data.storage.files import write_atomic
from matmix.data.tokenizer import Tokenizer

MERGING_NAME = "merging"


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What a preparation reads: the records from `start` up to `stop`. number: of the part, from 1; 0 of the whole."""

    number: int
    start: Position
    stop: Position

    def name(self, sources: Sequence[Source]) -> list[Source]:
        """The sources, the one that this part enters in the middle with a name that says so: lines of text count from
        there."""
        renamed, first = list(sources), self.start.source
        if self.start.offset and sources[first].kind != "parquet":
            renamed[first] = replace(sources[first], name=f"{sources[first].name} from byte {self.start.offset:,}")
        return renamed


def write_spans(folder: Path, spans: list[list[int]]) -> None:
    """Write the part.json of a part whose shards are written. spans: as in `Progress`."""
    write_atomic(folder / PART_NAME, json.dumps({"spans": spans}).encode())


def read_spans(folder: Path) -> list[list[int]]:
    """What a finished part has read. Raises ValueError (one line) if its part.json is missing or damaged."""
    try:
        spans = parse_json((folder / PART_NAME).read_bytes(), PART_NAME)["spans"]
        if not all(len(span) == 6 and all(type(n) is int and n >= 0 for n in span) for span in spans):
            raise ValueError("its numbers are none")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{folder / PART_NAME} is missing or damaged ({one_line(error)}); delete {folder}") from None
    return spans


def _check_facts(raw: dict[str, Any]) -> None:
    inputs = raw["options"]["inputs"]
    lists = [raw["names"], raw["paths"], raw["arguments"]]
    fine = all(isinstance(texts, list) and all(isinstance(text, str) for text in texts) for texts in lists)
    fine = fine and isinstance(raw["tokenizer"], str) and len(raw["names"]) == len(raw["paths"]) == len(inputs)
    if not fine or not all(isinstance(entry, list) and len(entry) == 3 for entry in inputs):
        raise ValueError("it lacks a key, or a value is of another kind")


def _check_cuts(raw: dict[str, Any]) -> None:
    count, cuts = raw["parts"], raw["cuts"]
    numbers = [count, *(number for cut in cuts for number in cut)]
    fine = all(type(number) is int and number >= 0 for number in numbers) and all(len(cut) == 2 for cut in cuts)
    if not fine or len(cuts) != count + 1 or cuts != sorted(cuts):
        raise ValueError("its cuts are none")


def missing_parts(out: str | Path, parts: int) -> list[int]:
    """Numbers (1 to `parts`) of the parts of the preparation in folder `out` that are not finished; none once the
    parts are joined. A look at file names only: cheap, and true also while parts are being made.
    """
    folder = Path(out).expanduser()
    if (folder / MANIFEST_NAME).is_file():
        return []
    folder, numbers = folder / PARTS_NAME, range(1, parts + 1)
    return [number for number in numbers if not (folder / _name(number, parts) / MANIFEST_NAME).is_file()]


def _name(number: int, of: int) -> str:
    return f"part-{number:05}-of-{of:05}"


class Parts:
    """The folder OUT/parts of a preparation of text."""

    kind = "text"
    verb = "matmix prepare"

    def __init__(self, out: str | Path) -> None:
        self.out = Path(out).expanduser()
        self.folder = self.out / PARTS_NAME

    def part(self, number: int, of: int) -> Path:
        return self.folder / _name(number, of)

    def begin(
        self, config: PrepareConfig, wanted: dict[str, Any], sources: Sequence[Source], make: Callable[[], Tokenizer]
    ) -> Tokenizer:
        """The tokenizer of all parts, made by `make` if this is the first of them.

        wanted: the fingerprint of the whole. Raises ValueError if OUT holds anything but parts of this preparation,
        and what `make` raises; nothing is left behind then.
        """
        self._check_free()
        made = [path for path in (self.out, self.folder) if not path.exists()]
        self.folder.mkdir(parents=True, exist_ok=True)

        def begun() -> dict[str, Any]:
            tokenizer = make()
            tokenizer.save(self.folder / "tokenizer", alone=False)
            return {
                "options": wanted,
                "tokenizer": tokenizer.sha256,
                "names": [s.name for s in sources],
                "paths": [str(Path(s.path).resolve()) for s in sources],
                "arguments": config.arguments(),
            }

        try:
            self._write_once("options.json", "makes the tokenizer or cuts the input", begun, indent=1)
        except (ValueError, FileNotFoundError):
            (self.folder / "lock").unlink(missing_ok=True)
            for path in reversed(made):
                with contextlib.suppress(OSError):
                    path.rmdir()
            raise
        self._check_same(wanted)
        return self.tokenizer()

    def _check_free(self) -> None:
        """Raises ValueError if OUT holds anything but parts."""
        if (self.folder / "options.json").exists():
            return
        for path in self.out.iterdir() if self.out.is_dir() else ():
            if path.name != PARTS_NAME:
                kind = "an unfinished preparation in one piece" if path.name == WORK_NAME else "something else"
                raise ValueError(f"{self.out} holds {kind} ({path.name}); choose another output folder")

    def _check_same(self, wanted: dict[str, Any]) -> None:
        """Raises ValueError if the parts are those of another preparation, or are being joined."""
        compare_preparations(self.out, self.facts()["options"], wanted)
        if (self.folder / MERGING_NAME).exists():
            merge = shell_line(*self.verb.split(), "--merge", "--out", self.out)
            raise ValueError(f"{self.out} is being joined; finish that: {merge}")

    def _check_number(self, of: int, parts: int) -> None:
        """Raises ValueError if there are `parts` parts, and not the `of` that are asked for."""
        if parts != of:
            raise ValueError(
                f"{self.out} is prepared in {parts} parts; give --part k/{parts}, or delete {self.folder} to begin anew"
            )

    def facts(self) -> dict[str, Any]:
        """Contents of options.json. Raises FileNotFoundError if no part was begun, ValueError if it is damaged."""
        return self._read("options.json", _check_facts)

    def tokenizer(self) -> Tokenizer:
        """Raises ValueError if it is not the one that the parts were begun with."""
        tokenizer = Tokenizer.load(self.folder / "tokenizer")
        if tokenizer.sha256 != self.facts()["tokenizer"]:
            raise ValueError(f"{tokenizer.path} was changed since the parts were begun; delete {self.folder}")
        return tokenizer

    def share(self, number: int, of: int, make_cuts: Callable[[], list[Position]]) -> Share:
        """What belongs to a part. Raises ValueError if the parts in the folder are of another number."""

        def cut() -> dict[str, Any]:
            return {"parts": of, "cuts": [[cut.source, cut.offset] for cut in make_cuts()]}

        self._write_once("cuts.json", "cuts the input", cut)
        cuts = self.cuts()
        self._check_number(of, len(cuts) - 1)
        return Share(number=number, start=cuts[number - 1], stop=cuts[number])

    def cuts(self) -> list[Position]:
        """Where each part begins, and the end of the last. Raises as `facts`."""
        cuts = self._read("cuts.json", _check_cuts)["cuts"]
        return [Position(source=source, offset=offset) for source, offset in cuts]

    def _write_once(self, name: str, doing: str, make: Callable[[], dict[str, Any]], indent: int | None = None) -> None:
        """Write a file unless it is there, one process at a time. doing: what another process may be at."""
        path = self.folder / name
        if not path.exists():
            with locked(self.folder, f"waiting for another process, which {doing}", wait=True):
                if not path.exists():
                    write_atomic(path, json.dumps(make(), indent=indent).encode(), alone=False)

    def _read(self, name: str, check: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        path, kind = self.folder / name, self.kind
        try:
            raw = parse_json(path.read_bytes(), name)
            kind = raw.get("options", {}).get("kind", "text") if name == "options.json" else kind
            if kind == self.kind:
                check(raw)
        except FileNotFoundError:
            make = shell_line(*self.verb.split(), "INPUT", "--out", self.out, "--part", "k/n")
            raise FileNotFoundError(f"{self.out} holds no parts; make each with {make}") from None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{path} is damaged ({one_line(error)}); delete {self.folder} and prepare the parts again"
            ) from None
        if kind != self.kind:
            other = "matmix prepare-images" if kind == "images" else "matmix prepare"
            raise ValueError(f"{self.out} holds parts of {other}, not of {self.verb}")
        return raw

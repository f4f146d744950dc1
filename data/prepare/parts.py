"""The parts of a preparation, which many processes make at the same time on a file system that they share.

    OUT/parts/options.json            what is prepared, and with which command; written after the tokenizer
    OUT/parts/tokenizer/              the files that all parts use (of text)
    OUT/parts/cuts.json               where each part begins and ends in the input
    OUT/parts/findings-.../           what cleaning has found in each part, until cuts.json is there
    OUT/parts/part-00003-of-00064/    part 3: a dataset of its own, part.json (what it has read) and sums.npy

The first process makes the first three under a lock. They are the same whoever makes them, and appear whole, so a file
system without locks costs work and not correctness. Where the input is cleaned, processes first look at all parts: each
at its own, then at those that nobody is at work on, since some may not run before others have ended.
"""

import contextlib
import functools
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from matmix.data.artifacts import artifact_path, fits, one_line, parse_json, shell_line
from matmix.data.manifest import MANIFEST_NAME
from matmix.data.prepare.base import Position, Preparation, find_cuts
from matmix.data.prepare.workspace import PART_NAME, PARTS_NAME, WORK_NAME, compare_preparations, locked
from matmix.data.storage.files import sha256_of, write_atomic

MERGING_NAME = "merging"


class Share(NamedTuple):
    """The records from `start` up to `stop`: part `number` of `of`, counted from 1; number 0 is the whole input."""

    number: int
    of: int
    start: Position
    stop: Position


def read_spans(folder: Path) -> list[list[int]]:
    """Returns `Progress.spans` of a finished part. Raises ValueError (one line) if its part.json is damaged."""
    try:
        spans = parse_json((folder / PART_NAME).read_bytes(), PART_NAME)["spans"]
        if not fits(spans, [(int,) * 6]):
            raise ValueError("its spans are no numbers")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{folder / PART_NAME} is missing or damaged ({one_line(error)}); delete {folder}") from None
    return spans


def missing_parts(out: str | Path, parts: int) -> list[int]:
    """Returns the numbers (from 1) of the unfinished parts in `out`, by file names; none once they are joined."""
    folder = Path(out).expanduser()
    if (folder / MANIFEST_NAME).is_file():
        return []
    folder /= PARTS_NAME
    return [n for n in range(1, parts + 1) if not (folder / _name(n, parts) / MANIFEST_NAME).is_file()]


def _name(number: int, of: int) -> str:
    return f"part-{number:05}-of-{of:05}"


class Parts:
    """The folder OUT/parts of a preparation. kind: what it prepares."""

    def __init__(self, out: str | Path, kind: type[Preparation]) -> None:
        self.out = Path(out).expanduser()
        self.folder = self.out / PARTS_NAME
        self.kind = kind

    def part(self, share: Share) -> Path:
        return self.folder / _name(share.number, share.of)

    def begin(self, preparation: Preparation, number: int = 1, of: int = 1) -> None:
        """Makes what all parts share, unless an earlier part has. number, of: the part that is made, of so many. Raises
        ValueError if OUT holds anything but parts of this preparation, or for an input of which nothing can be made."""
        options, look = self.folder / "options.json", None
        if not options.exists():
            for path in self.out.iterdir() if self.out.is_dir() else ():
                if path.name != PARTS_NAME:
                    kind = "an unfinished preparation in one piece" if path.name == WORK_NAME else "something else"
                    raise ValueError(f"{self.out} holds {kind} ({path.name}); choose another output folder")
            look = preparation.examination(self.folder)
        findings = self._findings(preparation, of)
        made = [path for path in (self.out, self.folder, findings) if not path.exists()]
        (findings if look else self.folder).mkdir(parents=True, exist_ok=True)

        def begun() -> dict[str, Any]:
            preparation.ready(self.folder, is_part=True)
            preparation.save_shared(self.folder, alone=False)
            return {
                "options": preparation.wanted,
                "shared": {name: sha256_of(self.folder / name) for name in preparation.shared},
                "names": preparation.names,
                "paths": [source.place for source in preparation.sources],
                "arguments": preparation.config.arguments(),
            }

        try:
            if look:
                cuts = f"{findings.name}/cuts.json"
                self._write_once(cuts, "cuts the input", functools.partial(_cut, preparation, of))
                starts = [share.start for share in self.shares(cuts)]
                look(findings, [*starts, Position(len(preparation.sources))], number, options.exists)
            self._write_once("options.json", "begins with the parts", begun, indent=1)
        except (ValueError, FileNotFoundError):
            (self.folder / "lock").unlink(missing_ok=True)
            for path in reversed(made):
                with contextlib.suppress(OSError):
                    path.rmdir()
            raise
        compare_preparations(self.out, self.facts()["options"], preparation.wanted)
        if (self.folder / MERGING_NAME).exists():
            merge = shell_line(*self.kind.verb.split(), "--merge", "--out", self.out)
            raise ValueError(f"{self.out} is being joined; finish that: {merge}")
        self.check_shared(self.folder, f"delete {self.folder}")

    def share(self, preparation: Preparation, number: int, of: int) -> Share:
        """Returns what belongs to a part. Raises ValueError if the folder is for another number of parts."""
        made = self._findings(preparation, of) / "cuts.json"
        cut = (
            functools.partial(parse_json, made.read_bytes(), made)
            if made.exists()
            else functools.partial(_cut, preparation, of)
        )
        self._write_once("cuts.json", "cuts the input", cut)
        shares = self.shares()
        if len(shares) != of:
            raise ValueError(
                f"{self.out} is prepared in {len(shares)} parts; give --part k/{len(shares)}, or delete {self.folder} "
                "to begin anew"
            )
        for folder in self.folder.glob("findings-*"):
            shutil.rmtree(folder, ignore_errors=True)
        return shares[number - 1]

    def _findings(self, preparation: Preparation, of: int) -> Path:
        # Named after the preparation: until options.json is there, nothing else tells whose it is.
        return self.folder / f"findings-{of}-{preparation.digest[:16]}"

    def check_shared(self, folder: Path, advice: str) -> None:
        """Raises ValueError (one line) unless a folder has the shared files that the parts were begun with."""
        for name, digest in self.facts()["shared"].items():
            path = artifact_path(folder, name, "options.json", nested=True)
            if not path.is_file() or sha256_of(path) != digest:
                raise ValueError(f"{path} is not the file that the parts were begun with; {advice}")

    def facts(self) -> dict[str, Any]:
        """Returns the contents of options.json. Raises FileNotFoundError without parts, ValueError if it is damaged."""
        return self._read("options.json", _FACTS)

    def shares(self, name: str = "cuts.json") -> list[Share]:
        """Returns what belongs to each part. Raises as `facts`."""
        cuts = [Position(source, offset) for source, offset in self._read(name, _CUTS)["cuts"]]
        return [Share(number, len(cuts) - 1, *ends) for number, ends in enumerate(itertools.pairwise(cuts), start=1)]

    def ends(self) -> list[int | None]:
        """Returns the offset at the end of each source, None where it is not known. Raises as `facts`."""
        return self._read("cuts.json", _CUTS)["ends"]

    def _write_once(self, name: str, doing: str, make: Callable[[], dict[str, Any]], indent: int | None = None) -> None:
        """Writes a file unless it is there, one process at a time. doing: what another process may be doing."""
        path = self.folder / name
        if not path.exists():
            with locked(self.folder, f"waiting for another process, which {doing}", wait=True):
                if not path.exists():
                    write_atomic(path, json.dumps(make(), indent=indent).encode(), alone=False)

    def _read(self, name: str, form: dict[str, Any]) -> dict[str, Any]:
        path, kind = self.folder / name, self.kind.name
        try:
            raw = parse_json(path.read_bytes(), name)
            kind = raw.get("options", {}).get("kind", "text") if name == "options.json" else kind
            if kind == self.kind.name and not (fits(raw, form) and _agree(raw)):
                raise ValueError("it lacks a key, or a value is of another kind")
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


def _cut(preparation: Preparation, of: int) -> dict[str, Any]:
    cuts = [[cut.source, cut.offset] for cut in find_cuts(preparation.sources, of)]
    return {"parts": of, "cuts": cuts, "ends": [source.end for source in preparation.sources]}


_INPUTS = [(str, int, str)]
_OPTIONS = {"format": str, "compression": str, "inputs": _INPUTS}
_FACTS = {"options": _OPTIONS, "shared": dict, **{key: [str] for key in ("names", "paths", "arguments")}}
_CUTS = {"parts": int, "cuts": [(int, int)], "ends": [int | None]}


def _agree(raw: dict[str, Any]) -> bool:
    """Returns whether the lists in options.json, or in cuts.json, go together."""
    if "cuts" in raw:
        cuts = raw["cuts"]
        return len(cuts) == raw["parts"] + 1 and cuts == sorted(cuts) and cuts[-1][0] <= len(raw["ends"])
    held_out = raw["options"].get("validation", [])
    inputs = len(raw["options"]["inputs"]) + len(held_out)
    return fits(held_out, _INPUTS) and len(raw["names"]) == len(raw["paths"]) == inputs

"""What the study has measured: a folder with one JSON file for each result."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matmix.data.storage.files import write_atomic

Result = dict[str, Any]


def slug(*parts: str) -> str:
    """A file name for what these words name together."""
    return re.sub(r"[^A-Za-z0-9._+@-]+", "-", "-".join(parts)).strip("-.")


class Results:
    """A folder with one JSON file a result, whole or not there: <part>-<key>.json."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, part: str, key: str) -> Path:
        return self.folder / f"{part}-{slug(key)}.json"

    def weights(self, key: str) -> Path:
        """Where a run leaves its weights."""
        return self.folder / f"weights-{slug(key)}.pt"

    def measure(self, part: str, key: str, run: Callable[[], Result], *, again: bool = False) -> Result | None:
        """Keeps what `run` returns, and returns it; None where that is there already and not to be measured again."""
        path = self.path(part, key)
        if path.exists() and not again:
            return None
        result = run()
        write_atomic(path, json.dumps({"key": key, **result}))
        return result

    def read(self, part: str) -> dict[str, Result]:
        """All results of a part, by key."""
        found = (json.loads(path.read_text(encoding="utf-8")) for path in sorted(self.folder.glob(f"{part}-*.json")))
        return {result.pop("key"): result for result in found}

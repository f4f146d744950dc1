"""A small prepared dataset to be changed by those who mean harm."""

from __future__ import annotations

import functools
import hashlib
import json
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matmix.data.prepare.command import prepare
from matmix.data.prepare.text import PrepareConfig

_KEPT = tempfile.TemporaryDirectory()
_WORDS = ["the", "a", "king", "queen", "sword", "crown", "night", "day", "speaks", "rises", "falls", "gives", "takes"]


def prepared(folder: Path, **options: Any) -> Path:
    """A dataset of a few shards, in `folder`."""
    shutil.copytree(_made(tuple(sorted(options.items()))), folder / "data")
    return folder / "data"


@functools.cache
def _made(options: tuple[tuple[str, Any], ...]) -> Path:
    folder = Path(tempfile.mkdtemp(dir=_KEPT.name))
    draw = random.Random(0)
    verses = (" ".join(draw.choices(_WORDS, k=draw.randint(3, 40))) for _ in range(60))
    (folder / "verses.jsonl").write_text("".join(json.dumps({"text": verse}) + "\n" for verse in verses))
    values = {"vocab_size": 300, "validation_fraction": 0.2, "shard_megabytes": 0.001, "processes": 1, **dict(options)}
    prepare(PrepareConfig(inputs=(str(folder / "verses.jsonl"),), out=str(folder / "data"), **values), summary=False)
    return folder / "data"


def edit_manifest(path: Path, change: Callable[[dict[str, Any]], object], *, sign: bool = True) -> None:
    """Changes what the manifest says. sign: as someone does who means it, with the digest that fits."""
    file = path / "manifest.json"
    values = json.loads(file.read_text())
    change(values)
    file.write_text(signed(values) if sign else json.dumps(values))


def signed(values: Any) -> str:
    """The text of a manifest with these contents, and with the digest that fits them."""
    if not isinstance(values, dict):
        return json.dumps(values)
    values = {key: value for key, value in values.items() if key != "digest"}
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return json.dumps({**values, "digest": hashlib.sha256(text.encode()).hexdigest()})

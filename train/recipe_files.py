"""The files of recipes: where they are, and the tables in them. To read them needs no torch."""

import difflib
import tomllib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from matmix.data.artifacts import one_line
from matmix.data.storage.remote import RemoteFolder, refuse_secrets

_DEEPEST = 50
"""Tables in tables; no recipe has more than a few, and what walks them recurses."""


def _bundled() -> dict[str, Path]:
    folder = Path(str(resources.files("matmix.train.recipes")))
    return {path.stem: path for path in sorted(folder.rglob("*.toml"))}


def bundled_recipes() -> dict[str, Path]:
    """Finds the recipes that come with the package, for `matmix train`: name -> path."""
    return {name: path for name, path in _bundled().items() if "comparison" not in read_toml(path)}


def bundled_comparisons() -> dict[str, Path]:
    """Finds the recipes of comparisons that come with the package, for `matmix compare`: name -> path."""
    return {name: path for name, path in _bundled().items() if "comparison" in read_toml(path)}


def find_recipe(name_or_path: str, tasks: Sequence[str] = ()) -> Path:
    """Finds a recipe by its path or by a bundled recipe's name. tasks: names that could have been meant, too. Raises
    FileNotFoundError naming the nearest."""
    path = Path(name_or_path)
    if path.is_file():
        return path
    if path.is_dir() and (path / "config.toml").is_file():
        return path / "config.toml"
    if path.is_dir():
        raise FileNotFoundError(f"{path} is a folder without config.toml, so neither a recipe nor a run")
    recipes = _bundled()
    bundled = recipes.get(path.stem)  # also by the end of its path, as in train/recipes/lion.toml
    if bundled and bundled.with_suffix("").parts[-len(path.parts) :] == path.with_suffix("").parts:
        return bundled
    near = difflib.get_close_matches(path.stem, [*tasks, *recipes], n=1)
    known = {"tasks": tasks, "bundled recipes": recipes}
    lists = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in known.items() if names)
    hint = f'did you mean "{near[0]}"?' if near else lists
    raise FileNotFoundError(f"{'task or ' if tasks else ''}recipe not found: {name_or_path} ({hint})")


def read_toml(path: Path) -> dict[str, Any]:
    """Reads a TOML file into nested dicts. Raises ValueError (one line) naming file and line, also where a URL in it
    holds a password."""
    return _parse_toml(path.read_bytes(), str(path))


def read_remote_toml(url: str) -> dict[str, Any]:
    """Reads the config.toml of a run at a URL. Raises FileNotFoundError or ValueError (one line)."""
    raw = RemoteFolder(url).read("config.toml")
    if raw is None:
        raise FileNotFoundError(f"there is no run at {url}")
    return _parse_toml(raw, f"{url}/config.toml")


def _parse_toml(raw: bytes, where: str) -> dict[str, Any]:
    try:
        values = tomllib.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 (byte {error.start})") from None
    except RecursionError:
        raise ValueError(f"{where}: not valid TOML: nested too deeply") from None
    except ValueError as error:  # of numbers and dates, too
        raise ValueError(f"{where}: not valid TOML: {one_line(error)}") from None
    if _depth(values) > _DEEPEST:
        raise ValueError(f"{where}: nested too deeply")
    refuse_secrets(values, where)
    return values


def _depth(values: Any) -> int:
    """Counts how deeply tables and lists lie in each other, without recursion, as there may be thousands."""
    depth, level = 0, [values]
    while level := [
        inner
        for value in level
        if isinstance(value, dict | list)
        for inner in (value.values() if isinstance(value, dict) else value)
    ]:
        depth += 1
    return depth

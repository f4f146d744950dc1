"""Reads run configurations (defaults < recipe TOML < command line) and writes them back so that they can run again."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import tomllib
import typing
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import dacite
import tomli_w

from matmix.data.artifacts import errors_in_one_line, one_line
from matmix.data.storage.files import write_atomic
from matmix.data.storage.remote import RemoteFolder, is_url
from matmix.data.storage.urls import refuse_secrets
from matmix.model.architecture import ARCHITECTURES
from matmix.model.config import MixerOptions
from matmix.model.mixers import MIXERS
from matmix.train.arguments import DACITE, check_rows, parse_arguments, row_type, unknown_key
from matmix.train.config import RunConfig
from matmix.train.plugins import find_part

_DEEPEST = 50
"""Tables in tables; no recipe has more than a few, and what walks them recurses."""


def _bundled() -> dict[str, Path]:
    folder = Path(str(resources.files("matmix.train.recipes")))
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def bundled_recipes() -> dict[str, Path]:
    """Name -> path of the recipes that come with the package, for `matmix train`."""
    return {name: path for name, path in _bundled().items() if "comparison" not in read_toml(path)}


def bundled_comparisons() -> dict[str, Path]:
    """Name -> path of the recipes of comparisons that come with the package, for `matmix compare`."""
    return {name: path for name, path in _bundled().items() if "comparison" in read_toml(path)}


def find_recipe(name_or_path: str) -> Path:
    """A recipe's path from a path or from a bundled recipe's name. Raises FileNotFoundError naming the nearest."""
    path = Path(name_or_path)
    if path.is_file():
        return path
    if path.is_dir() and (path / "config.toml").is_file():
        return path / "config.toml"
    recipes = _bundled()
    if path.stem in recipes and path.parent in (Path(), Path("train/recipes")):
        return recipes[path.stem]
    near = difflib.get_close_matches(path.stem, recipes, n=1)
    hint = f'did you mean "{near[0]}"?' if near else f"bundled recipes: {', '.join(recipes)}"
    raise FileNotFoundError(f"recipe not found: {name_or_path} ({hint})")


def _check_keys(values: dict[str, Any], cls: type, where: str, prefix: str = "") -> None:
    hints = typing.get_type_hints(cls)
    for key, value in values.items():
        if key not in hints:
            raise unknown_key(prefix + key, RunConfig, where)
        if dataclasses.is_dataclass(hints[key]):
            if not isinstance(value, dict):
                raise ValueError(f'{where}: "{prefix}{key}" is a table, got {value!r}')
            _check_keys(value, hints[key], where, f"{prefix}{key}.")
        elif (row := row_type(hints[key])) is not None:
            check_rows(value, row, f"{where}: [[{prefix}{key}]]")
        elif typing.get_origin(hints[key]) is tuple and not isinstance(value, list | tuple):
            raise ValueError(f'{where}: "{prefix}{key}" is a list, got {value!r}')


@errors_in_one_line()
def config_from_dict(values: dict[str, Any], where: str) -> RunConfig:
    """Builds a config from nested dicts. Raises ValueError (one line, starting with `where`)."""
    _check_keys(values, RunConfig, where)
    try:
        return dacite.from_dict(RunConfig, values, DACITE)
    except dacite.WrongTypeError as error:
        wanted = getattr(error.field_type, "__name__", None) or str(error.field_type)
        if typing.get_origin(error.field_type) is typing.Literal:
            wanted = " or ".join(repr(choice) for choice in typing.get_args(error.field_type))
        raise ValueError(f'{where}: "{error.field_path}" should be {wanted}, got {error.value!r}') from None
    except dacite.DaciteError as error:
        raise ValueError(f"{where}: {error}") from None
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def read_toml(path: Path) -> dict[str, Any]:
    """Nested dicts of a TOML file. Raises ValueError (one line) naming file and line, also where a URL in it holds a
    password."""
    return _parse_toml(path.read_bytes(), str(path))


def _read_remote(url: str) -> dict[str, Any]:
    raw = RemoteFolder(url).read("config.toml")
    if raw is None:
        raise FileNotFoundError(f"there is no run at {url}")
    return _parse_toml(raw, f"{url}/config.toml")


def _parse_toml(raw: bytes, where: str) -> dict[str, Any]:
    try:
        values = tomllib.loads(raw.decode("utf-8"))
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
    """How deeply tables and lists lie in each other; counted without recursion, as there may be thousands."""
    depth, level = 0, [values]
    while level := [
        inner
        for value in level
        if isinstance(value, dict | list)
        for inner in (value.values() if isinstance(value, dict) else value)
    ]:
        depth += 1
    return depth


def load_config(recipe: str, overrides: list[str] | tuple[str, ...] = ()) -> RunConfig:
    """The run's config from a recipe (path or bundled name) or a run (folder or URL), and command-line overrides
    such as ``--optimizer.lr 3e-4``.

    Raises FileNotFoundError for a missing recipe and ValueError (one line) for a bad key, type or value.
    """
    path = Path(recipe) if is_url(recipe) else find_recipe(recipe)
    values = _read_remote(recipe) if is_url(recipe) else read_toml(path)
    if "comparison" in values:
        raise ValueError(f"{path} is a comparison of several models: matmix compare {recipe}")
    _import_architecture(values, overrides)
    config = config_from_dict(values, str(path))
    if is_url(recipe) or Path(recipe).is_dir():
        config = dataclasses.replace(config, run_dir=recipe)  # a run goes on where it lies, wherever it began
    # Of all mixers, `--help` shows those that the layers hold; to look at fewer fields is also several times faster.
    words = [word.replace("-", "_") for word in overrides]
    mixers = {name for name in MIXERS if name in config.model.layers or any(name in word for word in words)}
    only = (MixerOptions, mixers)
    config = parse_arguments(RunConfig, list(overrides), default=config, prog="matmix train RECIPE", only=only)
    if not config.run_dir:
        config = dataclasses.replace(config, run_dir=f"runs/{path.stem}")
    return config


def _import_architecture(values: dict[str, Any], overrides: Sequence[str]) -> None:
    """Python imports the architectures from outside that a recipe or its command line names, which registers them: a
    config can name registered ones only, so that reading somebody else's imports nothing."""
    model = values.get("model")
    names = [model.get("architecture")] if isinstance(model, dict) else []
    for word, following in itertools.pairwise([*overrides, ""]):
        key, equals, value = word.partition("=")
        names += [value if equals else following] if key == "--model.architecture" else []
    for name in names:
        if isinstance(name, str) and ":" in name and name not in ARCHITECTURES:
            find_part(name, ARCHITECTURES, "model.architecture")


def show_fields(read: Callable[[list[str]], tuple[Any, list[str]]], words: Sequence[str]) -> None:
    """Prints the fields of the recipe that the `words` of a verb name, which ask for help, with their values; where
    they name none, those that every recipe has, with their defaults.

    read: a verb with a `recipe`, and the words that it does not know, from words.
    """
    try:
        verb, rest = read([word for word in words if word not in ("-h", "--help")])
        load_config(verb.recipe, [*rest, "--help"])
    except (ValueError, FileNotFoundError):
        print(f"bundled recipes: {', '.join(bundled_recipes())}\n")
        parse_arguments(RunConfig, ["--help"], default=RunConfig(), prog="matmix train RECIPE", only=(MixerOptions, ()))


def config_to_dict(config: RunConfig) -> dict[str, Any]:
    """Nested plain dicts, ready for TOML and JSON; without the options of mixers that no layer is and nobody set."""
    values = _plain(dataclasses.asdict(config))
    unset, tables = MixerOptions(), values["model"]["mixers"]
    for name in MIXERS:
        if name not in config.model.layers and getattr(config.model.mixers, name) == getattr(unset, name):
            del tables[name]
    return values


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if item is not None}  # TOML has no None
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


def write_config(config: RunConfig, path: Path) -> None:
    """Writes the resolved config; the file is itself a recipe."""
    write_atomic(path, tomli_w.dumps(config_to_dict(config)))


def with_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """The plain values of a config that another version may have written: options that it did not know have their
    defaults, those that are no more are left out."""

    def filled(own: dict[str, Any], standard: dict[str, Any], cls: type) -> dict[str, Any]:
        # `config_to_dict` has the tables of those mixers only that it needs.
        hints, found = typing.get_type_hints(cls), {} if cls is MixerOptions else dict(standard)
        for key, value in own.items():
            if key in hints:
                deeper = dataclasses.is_dataclass(hints[key]) and isinstance(value, dict)
                found[key] = filled(value, standard.get(key, {}), hints[key]) if deeper else value
        return found

    return filled(values, _plain(dataclasses.asdict(RunConfig())), RunConfig)


def differences(old: dict[str, Any], new: RunConfig) -> list[tuple[str, Any, Any]]:
    """(dotted key, old value, new value) of every field that differs; old: as `config_to_dict` gives it."""

    def walk(a: Any, b: Any, prefix: str) -> list[tuple[str, Any, Any]]:
        found = []
        for key in sorted({*a, *b}):
            x, y = a.get(key), b.get(key)
            if isinstance(x, dict) and isinstance(y, dict):
                found += walk(x, y, f"{prefix}{key}.")
            elif x != y:
                found.append((prefix + key, x, y))
        return found

    return walk(old, config_to_dict(new), "")

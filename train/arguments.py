"""Command-line arguments into config dataclasses, with errors of one line."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import json
import os
import re
import tomllib
import typing
from collections.abc import Collection, Iterator
from typing import Any, TypeVar

import dacite
import tyro
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

Config = TypeVar("Config")
# A TOML integer is a fine value for a float field; a TOML array is a tuple.
DACITE = dacite.Config(
    strict=True,
    cast=[tuple],
    type_hooks={float: lambda value: float(value) if type(value) is int else value},
)
_STYLE = (tyro.conf.FlagConversionOff, tyro.conf.AvoidSubcommands)


def field_names(cls: type, prefix: str = "") -> list[str]:
    """All dotted keys of a config class, tables included."""
    names = []
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        names.append(prefix + field.name)
        if dataclasses.is_dataclass(hints[field.name]):
            names += field_names(hints[field.name], f"{prefix}{field.name}.")
    return names


def unknown_key(key: str, cls: type, where: str) -> ValueError:
    """The error for a key that `cls` does not have, naming the nearest one that it has."""
    known = field_names(cls)
    # The same last word in another table is a likelier slip than a similar spelling of the whole key.
    same_leaf = [name for name in known if name.split(".")[-1] == key.split(".")[-1]]
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.6) or same_leaf[:1]
    near = near or difflib.get_close_matches(key, known, n=1, cutoff=0.0)
    return ValueError(f'{where}: unknown key "{key}"; the nearest known key is "{near[0]}"')


@contextlib.contextmanager
def _wide_terminal() -> Iterator[None]:
    """tyro wraps its messages to the terminal's width; one error is one line here."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "1000"
    try:
        yield
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before


def _message(box: str) -> str:
    """What tyro's box says: its first line below the title."""
    lines = [line.strip("│╭╮╰╯─- ") for line in box.splitlines()]
    texts = [line for line in lines if line]
    return texts[1] if len(texts) > 1 else "arguments not understood"


def row_type(hint: Any) -> type | None:
    """The dataclass of the rows where a field is a list of tables, tuple[Row, ...]; None where it is none."""
    inner = typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else None
    return inner if dataclasses.is_dataclass(inner) else None


def check_rows(rows: Any, cls: type, where: str) -> None:
    """Raises ValueError (one line) unless `rows`, as read from TOML, are tables with the keys of `cls`."""
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{where} is a list of tables, got {rows!r}")
    unset = dataclasses.MISSING
    needed = [field.name for field in dataclasses.fields(cls) if field.default is field.default_factory is unset]
    for row in rows:
        for key in row:
            if key not in field_names(cls):
                raise unknown_key(key, cls, where)
        if missing := [key for key in needed if key not in row]:
            raise ValueError(f"{where} has no {missing[0]} in {row!r}")


def _with_tables() -> ConstructorRegistry:
    """Lets tyro read tables, and lists of them, as TOML's inline tables: {match = "*.weight", lr = 0.1}."""
    registry = ConstructorRegistry()

    @registry.primitive_rule
    def rows(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
        if (cls := row_type(info.type)) is None:
            return None
        return PrimitiveConstructorSpec(
            nargs="*",
            metavar="[{KEY = VALUE, ...} ...]",
            instance_from_str=lambda words: tuple(_read_row(word, cls) for word in words),
            is_instance=lambda value: isinstance(value, tuple) and all(isinstance(row, cls) for row in value),
            str_from_instance=lambda rows: [_inline(dataclasses.asdict(row)) for row in rows],
        )

    @registry.primitive_rule
    def table(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
        if info.type != dict[str, Any]:
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="{KEY = VALUE, ...}",
            instance_from_str=lambda words: _read_table(words[0]),
            is_instance=lambda value: isinstance(value, dict),
            str_from_instance=lambda table: [_inline(table)],
        )

    return registry


def _read_table(word: str) -> dict[str, Any]:
    try:
        [(_, table)] = tomllib.loads(f"table = {word}").items()
    except (ValueError, RecursionError):
        table = None
    if not isinstance(table, dict):
        raise ValueError(f"should be a table such as {{KEY = VALUE, ...}}, got {word}")
    return table


def _read_row(word: str, cls: type) -> Any:
    row = _read_table(word)
    check_rows([row], cls, word)
    try:
        return dacite.from_dict(cls, row, DACITE)
    except dacite.DaciteError as error:
        raise ValueError(f"{word}: {error}") from None


def _inline(value: Any) -> str:
    """A value as TOML writes it in one line; what is None or an empty table in a table is left out."""
    if isinstance(value, dict):
        kept = {key: item for key, item in value.items() if item is not None and item != {}}
        return "{" + ", ".join(f"{_key(key)} = {_inline(item)}" for key, item in kept.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_inline, value)) + "]"
    return str(value) if isinstance(value, float) else json.dumps(value)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[\w-]+", name, flags=re.ASCII) else json.dumps(name)


def _only(registry: ConstructorRegistry, table: type, names: Collection[str]) -> None:
    """Lets tyro see only these fields of `table`; the others keep their values."""

    @registry.struct_rule
    def rule(info: StructTypeInfo) -> StructConstructorSpec | None:
        if info.type is not table:
            return None
        hints = typing.get_type_hints(table)
        fields = tuple(
            StructFieldSpec(name=field.name, type=hints[field.name], default=getattr(info.default, field.name))
            for field in dataclasses.fields(table)
            if field.name in names
        )
        return StructConstructorSpec(lambda **values: dataclasses.replace(info.default, **values), fields)


def parse_arguments(
    cls: type[Config],
    arguments: list[str],
    *,
    prog: str,
    default: Any = tyro.MISSING_NONPROP,
    only: tuple[type, Collection[str]] | None = None,
) -> Config:
    """`arguments` (``--key value``, tables with dots) as a `cls`, what they leave out taken from `default`.

    only: a table and those of its fields that may be given and are shown by ``--help``; needs a `default`.

    Raises ValueError (one line); ``--help`` prints all fields with their docstrings and exits.
    """
    registry = _with_tables()
    if only is not None:
        _only(registry, *only)
    options = {"default": default, "config": _STYLE, "registry": registry}
    if "--help" in arguments or "-h" in arguments:
        return tyro.cli(cls, args=["--help"], prog=prog, **options)
    known = {name.replace("_", "-") for name in field_names(cls)}
    for argument in arguments:
        if argument.startswith("--"):
            key = argument[2:].split("=", 1)[0]
            if key.replace("_", "-") not in known:
                raise unknown_key(key.replace("-", "_"), cls, "command line")
    message = io.StringIO()
    try:
        with _wide_terminal(), contextlib.redirect_stderr(message), contextlib.redirect_stdout(message):
            return tyro.cli(cls, args=arguments, **options)
    except SystemExit:
        raise ValueError(f"command line: {_message(message.getvalue())} ({prog} --help lists all)") from None
    except ValueError as error:
        raise ValueError(f"command line: {error}") from None

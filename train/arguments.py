"""Command-line arguments into config dataclasses, with errors of one line."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import os
import typing
from collections.abc import Collection, Iterator
from typing import Any, TypeVar

import tyro
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructFieldSpec, StructTypeInfo

Config = TypeVar("Config")
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


def _only(table: type, names: Collection[str]) -> ConstructorRegistry:
    """Lets tyro see only these fields of `table`; the others keep their values."""
    registry = ConstructorRegistry()

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

    return registry


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
    options = {"default": default, "config": _STYLE, "registry": None if only is None else _only(*only)}
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

"""Reads options: words of the command line as config dataclasses and verbs (tyro, which writes the help, too), and
tables of TOML, whose values have types, as the same dataclasses (`read_table`). Errors are one line; no torch is
imported.

A verb is a dataclass whose fields are its options, and whose `run(rest, typed)` does the work and returns the exit
code: `rest` are the words that the verb does not know, fields of a recipe, and `typed` all words after `matmix`.
"""

import contextlib
import dataclasses
import difflib
import functools
import importlib
import io
import itertools
import json
import os
import re
import tomllib
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

import tyro
from tyro import constructors

Config = TypeVar("Config")
Result = TypeVar("Result")
_STYLE = (tyro.conf.FlagConversionOff, tyro.conf.AvoidSubcommands)


@functools.cache
def key_types(cls: type) -> dict[str, Any]:
    """Returns the keys of a config class and the types of their values. A key is the name of a field; the underscore
    after a word that Python keeps for itself, as in `from_`, is the field's only."""
    return {name.removesuffix("_"): hint for name, hint in typing.get_type_hints(cls).items()}


def field_names(cls: type, prefix: str = "") -> list[str]:
    """Lists all dotted keys of a config class, tables included."""
    names = []
    for key, hint in key_types(cls).items():
        names.append(prefix + key)
        if dataclasses.is_dataclass(hint):
            names += field_names(hint, f"{prefix}{key}.")
    return names


def given_keys(words: Sequence[str]) -> list[str]:
    """Lists the keys that words of a command line give, each once and as recipes write them: optimizer.weight_decay."""
    names = (word[2:].split("=", 1)[0] for word in words if word.startswith("--"))
    return list(dict.fromkeys(name.replace("-", "_") for name in names))


def _joined(words: Sequence[str], cls: type) -> list[str]:
    """Returns the words of a command line in which each list of tables is given once: later ones follow the first."""
    groups: dict[str, list[str]] = {"": []}
    group = groups[""]
    for word in words:
        key, equals, value = word.partition("=")
        [name] = given_keys([key]) or [""]
        if name and row_type(_hint(name, cls)) is not None:
            group = groups.setdefault(name, [key])
            group += [value] if equals else []
        elif name:
            group = groups[f"{len(groups)}"] = [word]
        else:
            group.append(word)
    return [word for group in groups.values() for word in group]


def _hint(key: str, cls: type) -> Any:
    """Returns the type of the values of a dotted key of a config class."""
    return functools.reduce(lambda of, part: key_types(of)[part], key.split("."), cls)


def unknown_key(key: str, cls: type, where: str) -> ValueError:
    """Returns the error for a key that `cls` does not have, naming the nearest one that it has."""
    known = field_names(cls)
    table, _, option = key.rpartition(".")
    if (_hint(table, cls) if table in known else None) == dict[str, Any]:
        return ValueError(f"{where}: \"{table}\" is given as one table, as in '{{{option} = VALUE}}'")
    # The same last word in another table is a likelier slip than a similar spelling of the whole key.
    same_leaf = [name for name in known if name.split(".")[-1] == key.split(".")[-1]]
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.6) or same_leaf[:1]
    near = near or difflib.get_close_matches(key, known, n=1, cutoff=0.0)
    return ValueError(f'{where}: unknown key "{key}"; the nearest known key is "{near[0]}"')


@contextlib.contextmanager
def _wide_terminal() -> Iterator[None]:
    """Keeps tyro from wrapping its messages to the terminal's width: one error is one line."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "1000"
    try:
        yield
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before


_NO_NUMBER = re.compile(
    r"Error parsing (\S+): (?:invalid literal for int\(\) with base 10|could not convert string to (float)): ('.*')"
)


def _message(box: str) -> str:
    """Returns the text of tyro's box below its title and above its advice, as one line, in plain words."""
    lines = [line.strip(" │╭╮╰╯") for line in box.splitlines()]
    body = itertools.dropwhile(lambda line: not line.strip("─-"), lines[1:])  # a terminal without boxes has rules
    said = itertools.takewhile(lambda line: line.strip("─-"), body)
    message = " ".join(" ".join(said).split()) or "arguments not understood"
    message = re.sub("^Error parsing [\\w.]+: ", "", message)  # a class says itself what it refuses
    message = message.replace("Failed to parse key-value pairs!", "takes pairs of words: NAME VALUE NAME VALUE ...")
    return _NO_NUMBER.sub(lambda m: f"{m[1]} takes {'a number' if m[2] else 'an integer'}, got {m[3]}", message)


_BOOLEANS = {"true": True, "yes": True, "false": False, "no": False}


def _read_boolean(word: str) -> bool:
    if (value := _BOOLEANS.get(word.lower())) is None:
        raise ValueError(f"should be True or False, got {word}")
    return value


def read_quietly(read: Callable[[], Result], prog: Callable[[], str]) -> Result:
    """Returns the result of a call of `tyro.cli`. Raises ValueError (one line) for mistakes in the user's words. prog:
    whose `--help` the message names."""
    shown = io.StringIO()
    try:
        with _wide_terminal(), contextlib.redirect_stderr(shown):
            return read()
    except SystemExit as end:
        if not end.code:
            raise  # after a --help
        raise ValueError(f"command line: {_message(shown.getvalue())} ({prog()} --help lists all)") from None
    except ValueError as error:
        raise ValueError(f"command line: {error}") from None


def read_table(cls: type[Config], values: Mapping[str, Any], where: str) -> Config:
    """Builds a config dataclass from a table as TOML has it: what is left out has its default, an integer is a fine
    value for a float, and an array is a tuple. Raises ValueError (one line that begins with `where`) for an unknown
    key, naming the nearest, for a value of another type, for one without a default that is missing, and where the class
    itself refuses values."""
    return _built(cls, values, where, "", cls)


def _built(cls: type[Config], values: Mapping[str, Any], where: str, prefix: str, root: type) -> Config:
    """prefix: of the keys of this table in errors; root: the class whose nearest key they name."""
    fields, hints, given = {f.name.removesuffix("_"): f for f in dataclasses.fields(cls)}, key_types(cls), {}
    for key, value in values.items():
        if key not in fields:
            raise unknown_key(prefix + key, root, where)
        given[fields[key].name] = _field(hints[key], value, where, prefix + key, root)
    for key, field in fields.items():
        if field.name not in given and field.default is field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{where} has no {prefix}{key}")
    try:
        return cls(**given)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _field(hint: Any, value: Any, where: str, key: str, root: type) -> Any:
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, dict):
            raise ValueError(f'{where}: "{key}" is a table, got {value!r}')
        return _built(hint, value, where, f"{key}.", root)
    if (row := row_type(hint)) is not None:
        table = f"{where}: [[{key}]]"
        if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
            raise ValueError(f"{table} is a list of tables, got {value!r}")
        return tuple(read_table(row, one, table) for one in value)
    if typing.get_origin(hint) is tuple and not isinstance(value, list | tuple):
        leaf = key.rpartition(".")[2]
        raise ValueError(f'{where}: "{key}" is a list, got {value!r}: write {leaf} = [{value!r}]')
    try:
        return as_type(hint, value)
    except TypeError:
        value = list(value) if isinstance(value, tuple) else value  # as it was written
        raise ValueError(f'{where}: "{key}" should be {_type_words(hint)}, got {value!r}') from None


def as_type(hint: Any, value: Any) -> Any:
    """Returns a value of TOML as a field of type `hint` holds it. Raises TypeError where that takes no such value."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin is typing.Literal:
        if any(type(value) is type(choice) and value == choice for choice in inner):
            return value
    elif origin in (typing.Union, types.UnionType):
        for one in inner:
            with contextlib.suppress(TypeError):
                return as_type(one, value)
    elif origin is tuple and isinstance(value, list | tuple):
        kinds = inner[:1] * len(value) if inner[-1] is Ellipsis else inner
        if len(kinds) == len(value):
            return tuple(map(as_type, kinds, value))
    elif origin is dict and isinstance(value, dict):
        return {key: as_type(inner[1], item) for key, item in value.items()}
    elif hint is float and type(value) is int:
        return float(value)
    elif origin is None and isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    raise TypeError


def _type_words(hint: Any) -> str:
    """Describes the values of a field in words."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return " or ".join(map(repr, inner))
    if origin is tuple:
        return f"a list of { {str: 'strings', int: 'integers', float: 'numbers'}.get(inner[0], 'values') }"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_words(one) for one in inner if one is not types.NoneType)
    return "a table" if origin is dict else hint.__name__


def row_type(hint: Any) -> type | None:
    """Returns the dataclass of the rows of a field that is a list of tables, tuple[Row, ...]; None for others."""
    inner = typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else None
    return inner if dataclasses.is_dataclass(inner) else None


def _registry() -> constructors.ConstructorRegistry:
    """Lets tyro take true and false in any of their common spellings, and tables, and lists of them, as TOML's inline
    tables: {match = "*.weight", lr = 0.1}."""
    registry = constructors.ConstructorRegistry()

    @registry.primitive_rule
    def rule(info: constructors.PrimitiveTypeInfo) -> constructors.PrimitiveConstructorSpec | None:
        if (cls := row_type(info.type)) is not None:
            return constructors.PrimitiveConstructorSpec(
                nargs="*",
                metavar="[{KEY = VALUE, ...} ...]",
                instance_from_str=lambda words: tuple(read_table(cls, _read_table(word), word) for word in words),
                is_instance=lambda value: isinstance(value, tuple) and all(isinstance(row, cls) for row in value),
                str_from_instance=lambda rows: [inline(dataclasses.asdict(row)) for row in rows],
            )
        if info.type is bool:
            kind, metavar, read, write = bool, "{True,False}", _read_boolean, str
        elif info.type == dict[str, Any]:
            kind, metavar, read, write = dict, "{KEY = VALUE, ...}", _read_table, inline
        else:
            return None
        return constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar=metavar,
            instance_from_str=lambda words: read(words[0]),
            is_instance=lambda value: isinstance(value, kind),
            str_from_instance=lambda value: [write(value)],
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


def inline(value: Any) -> str:
    """Writes a value as TOML in one line, without keys of a table that are None or empty tables."""
    if isinstance(value, dict):
        kept = {key: item for key, item in value.items() if item is not None and item != {}}
        return "{" + ", ".join(f"{_key(key)} = {inline(item)}" for key, item in kept.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(inline, value)) + "]"
    return str(value) if isinstance(value, float) else json.dumps(value)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[\w-]+", name, flags=re.ASCII) else json.dumps(name)


def _with_fields(
    registry: constructors.ConstructorRegistry,
    only: tuple[type, Collection[str]] | None,
    described: bool,
    named: Collection[str],
) -> None:
    """Tells tyro the fields of tables that have values: of the table `only` no others than these, which keep their
    values. Unless they are `described`, it is told those alone that the command line may mean, whose keys have these
    parts, and does not look for docstrings in the sources: with a hundred fields that is most of its time."""

    @registry.struct_rule
    def rule(info: constructors.StructTypeInfo) -> constructors.StructConstructorSpec | None:
        here = only is not None and info.type is only[0]
        if not (here or (not described and dataclasses.is_dataclass(info.default))):
            return None
        hints = typing.get_type_hints(info.type, include_extras=True)
        fields = tuple(
            constructors.StructFieldSpec(
                name=field.name,
                type=hints[field.name],
                default=getattr(info.default, field.name),
                helptext=None if described else "",
            )
            for field in dataclasses.fields(info.type)
            if (described or field.name.removesuffix("_") in named) and (not here or field.name in only[1])
        )
        return constructors.StructConstructorSpec(lambda **values: dataclasses.replace(info.default, **values), fields)


def parse_arguments(
    cls: type[Config],
    arguments: list[str],
    *,
    prog: str,
    default: Any = tyro.MISSING_NONPROP,
    only: tuple[type, Collection[str]] | None = None,
) -> Config:
    """Reads `arguments` (``--key value``, tables with dots) as a `cls`; `default` gives the others. only: a table and
    those of its fields that may be given and are shown by ``--help``; needs a `default`. Raises ValueError (one line);
    ``--help`` prints all fields with their docstrings and exits."""
    if not arguments and default is not tyro.MISSING_NONPROP:
        return default
    registry = _registry()
    described = "--help" in arguments or "-h" in arguments
    keys = given_keys(arguments)
    _with_fields(registry, only, described, {part for key in keys for part in key.split(".")})
    options = {"default": default, "config": _STYLE, "registry": registry}
    if described:
        return tyro.cli(cls, args=["--help"], prog=prog, **options)
    known = field_names(cls)
    for key in keys:
        if key not in known:
            raise unknown_key(key, cls, "command line")
    words = _joined(arguments, cls)
    return read_quietly(lambda: tyro.cli(cls, args=words, prog=prog, **options), lambda: prog)


# -- Verbs -------------------------------------------------------------------------------------------------------------

VERB_STYLE = (tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes)
Recipe = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RECIPE")]
"""The first word of a verb that starts from a recipe; "" where none is given."""

RunFolder = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN", help="Run directory or its URL.")]


class BorrowedOptions(dict):
    """Options of a verb that are the fields of another class, `described`, by name."""

    described: ClassVar[type]

    @classmethod
    def option(cls, field: constructors.StructFieldSpec) -> constructors.StructFieldSpec | None:
        """Returns a field as it is shown and read; None = not at all."""
        return field


def verb_registry() -> constructors.ConstructorRegistry:
    """Lets tyro read `BorrowedOptions`."""
    registry = _registry()

    @registry.struct_rule
    def rule(info: constructors.StructTypeInfo) -> constructors.StructConstructorSpec | None:
        if not (isinstance(info.type, type) and issubclass(info.type, BorrowedOptions)):
            return None
        spec = constructors.ConstructorRegistry.get_struct_spec(
            constructors.StructTypeInfo.make(info.type.described, tyro.MISSING_NONPROP, in_union_context=False)
        )
        assert isinstance(spec, constructors.StructConstructorSpec)
        return constructors.StructConstructorSpec(info.type, tuple(filter(None, map(info.type.option, spec.fields))))

    return registry


def read_verb(verb: type[Result], arguments: Sequence[str], *, prog: str) -> tuple[Result, list[str]]:
    """Reads `arguments` as a verb, and returns it with the words that it does not know. Raises ValueError (one
    line)."""
    options = {"prog": prog, "config": VERB_STYLE, "registry": verb_registry(), "return_unknown_args": True}
    read, rest = read_quietly(lambda: tyro.cli(verb, args=list(arguments), **options), lambda: prog)
    check_rest(read, list(arguments), rest, prog)
    return read, rest


def check_rest(verb: Any, arguments: list[str], rest: list[str], prog: str) -> None:
    """Raises ValueError for words that nobody knows: those a verb without a recipe does not, and those before one."""
    if hasattr(verb, "recipe"):
        # What follows an option that is not the verb's own may be its value.
        if verb.recipe not in (arguments[: arguments.index(rest[0])] if rest else arguments):
            what, usage = getattr(verb, "first", ("recipe", "RECIPE [--key value ...]"))
            raise ValueError(f"no {what} given: {prog} {usage}")
    elif rest:
        if rest[0].startswith("-"):
            raise _unknown_option(rest[0], _flags(verb), f" ({prog} --help lists all)")
        raise ValueError(f'unknown word "{rest[0]}" ({prog} --help explains)')


def check_overrides(verb: Any, overrides: Sequence[str], cls: type) -> None:
    """Raises ValueError for a key that neither the verb nor the config class `cls` has, naming the nearest of both."""
    known = {*_flags(verb), *(name.replace("_", "-") for name in field_names(cls))}
    for key in given_keys(overrides):
        if key.replace("_", "-") not in known:
            raise _unknown_option(key, known)


def _flags(verb: Any) -> set[str]:
    """Returns the names of a verb's options, without dashes."""
    values = {field.name: getattr(verb, field.name) for field in dataclasses.fields(verb)}
    names = [name for own, value in values.items() for name in (value if isinstance(value, BorrowedOptions) else [own])]
    return {name.replace("_", "-") for name in names}


def _unknown_option(word: str, known: Collection[str], advice: str = "") -> ValueError:
    key = word.lstrip("-").split("=", 1)[0].replace("_", "-")
    if key in known:
        return ValueError(f'"--{key}" is no option: give its value as a word of its own{advice}')
    near = difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.0)[0]
    return ValueError(f'unknown option "--{key}"; the nearest known one is "--{near}"{advice}')


Part = TypeVar("Part")


# -- Parts of a run that a recipe names -------------------------------------------------------------------------------


def find_part(name: str, known: Mapping[str, Part], kind: str, base: type | None = None) -> Part:
    """Returns what `name` stands for: an entry of `known`, or an attribute of a module that Python can import.

    kind: what it is for errors, such as "optimizer". base: the class that it must be a subclass of. Importing runs
    code, so only names from a recipe or the command line come here, never names from a dataset or somebody else's
    checkpoint. Raises ValueError (one line) if there is no such entry, module, attribute or subclass.
    """
    if name in known:
        return known[name]
    module, separator, attribute = name.partition(":")
    if not separator:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        there = f"there are {', '.join(known)}; " if known else ""
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown {kind} {name!r}{hint} ({there}your own: 'package.module:Name')")
    try:
        part = getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise ValueError(f"{kind} {name!r}: Python cannot import {module} ({error}); is it on PYTHONPATH?") from error
    except AttributeError as error:
        raise ValueError(f"{kind} {name!r}: {module} has no {attribute}") from error
    if base is not None and not (isinstance(part, type) and issubclass(part, base)):
        public = f"{base.__module__.removesuffix('.base')}.{base.__name__}"
        raise ValueError(f"{kind} {name!r} is not a subclass of {public}")
    return part


@dataclasses.dataclass(frozen=True, slots=True)
class NoOptions:
    """For parts that take no options."""


def read_options(values: Mapping[str, Any], cls: type[Part], where: str) -> Part:
    """Reads the options of a part from a recipe's table as the dataclass `cls`. where: the table, for errors. Raises
    ValueError (one line) for a key that `cls` does not have, a value of another type, or one without a default that is
    missing."""
    if values and not field_names(cls):
        raise ValueError(f'{where}: unknown key "{next(iter(values))}": there are no options')
    return read_table(cls, values, where)

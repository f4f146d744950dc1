"""Reads the words of a `matmix` command by a tree of verbs; the module of a verb is imported when the verb is used."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Union

import tyro
from tyro.constructors import StructConstructorSpec, StructFieldSpec, StructTypeInfo

from matmix.train.arguments import VERB_STYLE, check_rest, read_quietly, verb_registry


@dataclasses.dataclass(frozen=True, slots=True)
class Branch:
    """A verb by its class, "package.module:Class", or a group of verbs by their names; and what it does. The class
    holds the options. Its `run(rest, typed)` takes the words that are none of them, such as fields of a recipe, and all
    words; it returns the exit code, and raises FileNotFoundError or ValueError (one line) for mistakes. Its `begin()`,
    if it has one, prepares a process of its own, and returns an exit code, 0 = go on."""

    what: str
    verb: str | Mapping[str, Branch]


class _Lazy:
    """Stands for a branch until its options are needed."""

    branch: Branch
    path: tuple[str, ...]


class CommandTree:
    """Verbs by name, and groups of verbs by name."""

    def __init__(self, prog: str, description: str, verbs: Mapping[str, Branch]) -> None:
        self.prog, self.description, self.verbs = prog, description, verbs
        self.path: tuple[str, ...] = ()
        """The verb that was named last, from the root."""
        self.takes_recipe = False
        """Says whether that verb starts from a recipe, whose fields are options, too."""
        self._registry = verb_registry()
        self._registry.struct_rule(self._open)

    def read(self, words: Sequence[str]) -> tuple[Any, list[str]]:
        """Returns the verb that `words` name, with its options, and the words that it does not know; None for no verb.
        Raises ValueError (one line) for the user's mistakes, SystemExit after `--help`, which is shown."""
        self.path, self.takes_recipe = (), False
        options = {"prog": self.prog, "description": self.description, "default": None, "config": VERB_STYLE}
        options |= {"registry": self._registry, "return_unknown_args": True}
        verb, rest = read_quietly(
            lambda: tyro.cli(_any_of(self.verbs, ()), args=list(words), **options), lambda: self.named
        )
        if verb is not None:
            check_rest(verb, list(words), rest, self.named)
        elif rest:
            known = self.verbs
            for name in self.path:
                known = known[name].verb
            near = difflib.get_close_matches(rest[0], known, n=1, cutoff=0.0)[0]
            raise ValueError(f'unknown verb "{rest[0]}" of {self.named}; the nearest is "{near}" ({", ".join(known)})')
        return verb, rest

    @property
    def named(self) -> str:
        """The words up to the verb, such as "matmix launch local"."""
        return " ".join((self.prog, *self.path))

    def _open(self, info: StructTypeInfo) -> StructConstructorSpec | None:
        if not (isinstance(info.type, type) and issubclass(info.type, _Lazy)):
            return None
        self.path, branch = info.type.path, info.type.branch
        if isinstance(branch.verb, str):
            module, _, name = branch.verb.partition(":")
            kind = getattr(importlib.import_module(module), name)
            self.takes_recipe = hasattr(kind, "recipe")
            spec = type(self._registry).get_struct_spec(dataclasses.replace(info, type=kind))
            assert isinstance(spec, StructConstructorSpec)
            return spec

        def pick(verb: Any) -> Any:
            return verb

        pick.__doc__ = branch.what
        field = StructFieldSpec(name="verb", type=_any_of(branch.verb, self.path), default=None)
        return StructConstructorSpec(pick, (field,))


def _any_of(verbs: Mapping[str, Branch], path: tuple[str, ...]) -> Any:
    """Returns the type by which tyro reads one of these verbs, or None where no word names one."""
    kinds: list[Any] = [None]
    for name, branch in verbs.items():
        lazy = type(name, (_Lazy,), {"__doc__": branch.what, "branch": branch, "path": (*path, name)})
        kinds.append(Annotated[Any, tyro.conf.subcommand(name=name, constructor=lazy)])
    return tyro.conf.DisallowNone[tyro.conf.OmitSubcommandPrefixes[Union[tuple(kinds)]]]  # noqa: UP007

"""Writes one self-contained Python module with the given definitions and everything of this project that they need.

An exported model must run where matmix is not installed. Its modelling file is no second implementation: it consists of
definitions of the real sources, found by following every name through the project's imports, one module after the
other. A definition stands as in its source, but for imports of the project inside it, which are left out, and a name
which two modules define, which bears the name of its module in the second.
"""

import ast
import functools
import graphlib
import importlib.util
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from matmix.kernels import PYTORCH_FORMS

PROJECT = "matmix"
KERNELS = f"{PROJECT}.kernels"

Place = tuple[str, str | None]
"""A module and a name in it, or None for the module itself."""

# What the models import from matmix.kernels -> module and name of the PyTorch form that stands in for it in a bundle.
# None: a question whether there is a fused form, which there is not.
TORCH_FORMS: dict[str, tuple[str, str] | None] = {
    function.__name__: None if form is None else (form.__module__, form.__name__)
    for function, form in PYTORCH_FORMS.items()
}

_PREFER_INSTALLED = '''
def _installed_kernels():
    """matmix.kernels where {project} {series} is installed, else None.

    The definitions above need nothing but PyTorch. Where the package is installed its ops give the same
    answers faster (hand-written kernels on GPUs); another series may have other arguments, so it is left
    alone.
    """
    try:
        from importlib.metadata import version

        if not f"{{version({project!r})}}.".startswith({series!r} + "."):
            return None
        import {kernels}
    except ImportError:
        return None
    return {kernels}


def _outside_graphs(function):
    """torch.compile stops before `function` and goes on behind it: the gradients that it makes of functions whose
    gradients are written by hand were zero without a word (torch 2.11)."""
    import torch

    return torch.compiler.disable(function)


def _never_fused(*arguments, **options):
    return False


_KERNELS = _installed_kernels()
'''


@dataclass(frozen=True, slots=True)
class Definition:
    """A top-level statement of a module: the names that it binds, and its source."""

    names: tuple[str, ...]
    text: str


class ModuleSource:
    """Holds what a module of the project defines and imports."""

    def __init__(self, name: str) -> None:
        spec = importlib.util.find_spec(name)
        assert spec is not None, f"no module {name}"
        assert spec.origin is not None, f"{name} is not a file"
        text = Path(spec.origin).read_text(encoding="utf-8")
        self.name = name
        self.definitions: dict[str, Definition] = {}
        self.imports: dict[str, Place] = {}
        """Name here -> what it stands for, of the project and of libraries."""
        lines, body = text.splitlines(), _parsed(text).body
        for node, following in itertools.zip_longest(body, body[1:]):
            if isinstance(node, ast.Import | ast.ImportFrom):
                self.imports |= _imported(node)
            elif names := _bound_names(node):
                value = following.value if isinstance(following, ast.Expr) else None
                documented = isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(value, ast.Constant)
                self.define(Definition(tuple(names), _segment(lines, node, following if documented else node)))

    def define(self, definition: Definition) -> None:
        self.definitions |= dict.fromkeys(definition.names, definition)

    def mentions(self, definition: Definition) -> Iterator[tuple[ast.Name, Place]]:
        """Yields the names in a definition, as parsed from its own text, that stand for something at top level."""
        nodes = list(ast.walk(_parsed(definition.text)))
        known = {name: (self.name, name) for name in self.definitions} | self.imports
        for node in filter(_is_of_project, nodes):
            known |= _imported(node)
        for node in nodes:
            if isinstance(node, ast.Name) and node.id in known:
                yield node, known[node.id]


def bundle(
    roots: Iterable[tuple[str, str]],
    *,
    header: str,
    version: str,
    registries: dict[str, frozenset[str]] | None = None,
    siblings: dict[str, str] | None = None,
) -> str:
    """Returns the source of one module that defines the `roots` and all they need.

    Args:
        roots: (module, name) pairs, e.g. ("matmix.model.architectures.encoder", "Encoder"). They keep their names.
        header: comment and docstring at the top.
        version: version of matmix whose installed kernels may be used in place of the bundled ones.
        registries: dicts at module level, by name, and the keys of them to keep.
        siblings: modules that become files of their own beside the bundle -> the name to import them by.
    """
    made, roots = _Bundle(registries or {}, siblings or {}), list(roots)
    for place in roots:
        made.reserve(place, place[1])
    for place in roots:
        made.need(place, place[1])
    return made.write(header, version)


class _Bundle:
    def __init__(self, registries: dict[str, frozenset[str]], siblings: dict[str, str]) -> None:
        self.registries, self.siblings = registries, siblings
        self.sources: dict[str, ModuleSource] = {}
        self.wanted: dict[str, set[Definition]] = {}
        """Module -> its definitions that the bundle takes over."""
        self.names: dict[Place, str] = {}
        """What the bundle holds or imports -> its name there."""
        self.ops: dict[str, str] = {}
        """Operation -> the PyTorch form that it is where matmix is not installed."""

    def source(self, name: str) -> ModuleSource:
        if name not in self.sources:
            self.sources[name] = ModuleSource(name)
        return self.sources[name]

    def is_source(self, module: str) -> bool:
        """Returns True for modules whose definitions the bundle takes over."""
        return module.split(".")[0] == PROJECT and module not in self.siblings and module != KERNELS

    def find(self, place: Place) -> Place:
        """Follows imports of the project to where a name is defined, or to what is imported of others."""
        module, name = place
        while name and self.is_source(module) and name in (imports := self.source(module).imports):
            module, name = imports[name]
        return module, name

    def reserve(self, place: Place, wanted: str) -> None:
        """Gives what the bundle holds or imports a name that nothing else there has, `wanted` if that is free."""
        if place in self.names:
            return
        taken = {*self.names.values(), *TORCH_FORMS} if place[0] != KERNELS else ()
        while wanted in taken:
            wanted = f"{wanted}_{place[0].rpartition('.')[2]}"
        self.names[place] = wanted

    def need(self, place: Place, wanted: str) -> None:
        """Takes the definition of a name, and follows what it mentions. wanted: what it is called where it is used."""
        module, name = place = self.find(place)
        if not self.is_source(module):
            self.reserve(place, wanted)
            if module == KERNELS and name not in self.ops:
                assert name in TORCH_FORMS, f"{KERNELS}.{name} has no PyTorch form in TORCH_FORMS"
                self.ops[name] = "_never_fused"
                if form := TORCH_FORMS[name]:
                    self.need(form, form[1])
                    self.ops[name] = f"_outside_graphs({self.names[self.find(form)]})"
            return
        source = self.source(module)
        assert name in source.definitions, f"{module} does not define {name}"
        definition, taken = source.definitions[name], self.wanted.setdefault(module, set())
        if definition in taken:
            return
        if name in self.registries:
            definition = _cut_registry(definition, self.registries[name])
            source.define(definition)
        taken.add(definition)
        for own in definition.names:
            self.reserve((module, own), own)
        for mentioned, used in sorted({(place, node.id) for node, place in source.mentions(definition)}, key=str):
            self.need(mentioned, used)

    def write(self, header: str, version: str) -> str:
        series = ".".join(version.split(".")[:2])
        choice = _PREFER_INSTALLED.format(project=PROJECT, series=series, kernels=KERNELS).strip()
        lines = [f'{op} = getattr(_KERNELS, "{op}", {form})' for op, form in sorted(self.ops.items())]
        kernels, others = [], []
        for module in self._module_order():
            texts = [
                self._renamed(module, definition)
                for definition in dict.fromkeys(self.source(module).definitions.values())
                if definition in self.wanted[module]
            ]
            part = f"# ---- {module}\n\n" + "\n\n\n".join(texts)
            (kernels if module.startswith(f"{KERNELS}.") else others).append(part)
        parts = [*kernels, "\n".join([choice, *lines]) if lines else "", *others]
        sections = [header.rstrip(), "from __future__ import annotations", self._import_block(), *parts]
        return "\n\n\n".join(section for section in sections if section) + "\n"

    def _module_order(self) -> list[str]:
        """Returns imported modules before those that import them, also by way of modules that give nothing."""
        graph, waiting = {}, list(self.wanted)
        while waiting:
            if (name := waiting.pop()) not in graph:
                imports = self.source(name).imports.values()
                forms = (TORCH_FORMS[op] for place, op in imports if place == KERNELS and op in self.ops)
                used = dict.fromkeys(module for module, _ in (*imports, *filter(None, forms)))
                graph[name] = [module for module in used if self.is_source(module)]
                waiting += graph[name]
        return [name for name in graphlib.TopologicalSorter(graph).static_order() if name in self.wanted]

    def _renamed(self, module: str, definition: Definition) -> str:
        """Returns the text of a definition with the names of the bundle, without imports of the project."""
        named = ((node, self.names[self.find(place)]) for node, place in self.source(module).mentions(definition))
        edits = [(node, name) for node, name in named if name != node.id]
        tree = _parsed(definition.text)
        arguments = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
        clash = arguments & {node.id for node, _ in edits}
        assert not clash, f"{module}: {clash} are arguments of {definition.names[0]} and names at top level"
        for node in ast.walk(tree):
            for block in (getattr(node, name, ()) for name in ("body", "orelse", "finalbody")):
                ours = [inner for inner in block if _is_of_project(inner)] if isinstance(block, list) else []
                edits += [(inner, "pass" if len(ours) == len(block) else "") for inner in ours]
        text = _replaced(definition.text, edits)
        for own in definition.names:
            if (name := self.names[module, own]) != own:
                text = re.sub(rf"^(class|def) {own}\b", rf"\1 {name}", text, count=1, flags=re.MULTILINE)
        return text

    def _import_block(self) -> str:
        plain, grouped = [], {}
        for (module, attribute), name in self.names.items():
            if self.is_source(module) or module == KERNELS:
                continue
            if attribute is None:
                plain.append(f"import {module}" if name == module else f"import {module} as {name}")
            else:
                origin = self.siblings.get(module, module)
                grouped.setdefault(origin, []).append(attribute if name == attribute else f"{attribute} as {name}")
        froms = [f"from {module} import {', '.join(sorted(grouped[module]))}" for module in sorted(grouped)]
        return "\n".join([*sorted(plain), *sorted(froms, key=lambda line: line.startswith("from ."))])


@functools.cache
def _parsed(text: str) -> ast.Module:
    """Returns the tree of a source, which is read only. Exports have most definitions in common."""
    return ast.parse(text)


def _imported(node: ast.Import | ast.ImportFrom) -> dict[str, Place]:
    """Returns what the names that an import binds stand for."""
    if isinstance(node, ast.Import):
        return {alias.asname or alias.name: (alias.name, None) for alias in node.names}
    assert node.level == 0, f"line {node.lineno}: relative imports cannot be bundled"
    if node.module == "__future__":
        return {}
    return {alias.asname or alias.name: (str(node.module), alias.name) for alias in node.names}


def _is_of_project(node: ast.AST) -> bool:
    return isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PROJECT


def _bound_names(node: ast.stmt) -> list[str]:
    """Returns the names that a top-level statement binds; none for docstrings."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if not isinstance(node, ast.Assign | ast.AnnAssign | ast.Try | ast.If):
        return []
    names = [inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)]
    for inner in ast.walk(node):
        if isinstance(inner, ast.ImportFrom | ast.Import) and not _is_of_project(inner):
            names += [alias.asname or alias.name for alias in inner.names]
    return list(dict.fromkeys(names))


def _segment(lines: list[str], node: ast.stmt, last: ast.stmt) -> str:
    """Returns the source from a statement to the end of `last`, with decorators and the comment right above."""
    first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))]) - 1
    while first > 0 and lines[first - 1].startswith("#"):
        first -= 1
    return "\n".join(lines[first : last.end_lineno])


def _replaced(text: str, edits: list[tuple[ast.expr | ast.stmt, str]]) -> str:
    """Returns `text` with other words in place of nodes that were parsed from it, each on lines of its own or in one;
    a statement without words goes with its line."""
    lines = [line.encode() for line in text.split("\n")]
    for node, words in sorted(edits, key=lambda edit: (edit[0].lineno, edit[0].col_offset), reverse=True):
        first, last = node.lineno - 1, node.end_lineno - 1
        line = lines[first][: node.col_offset] + words.encode() + lines[last][node.end_col_offset :]
        lines[first : last + 1] = [line] if words else []
    return b"\n".join(lines).decode()


def _cut_registry(definition: Definition, keep: frozenset[str]) -> Definition:
    """Returns a dict literal with only some of its keys."""
    (node,) = [n for n in ast.parse(definition.text).body if isinstance(n, ast.Assign | ast.AnnAssign)]
    assert isinstance(node.value, ast.Dict), f"{definition.names[0]} is no dict literal"
    pairs = [(k, v) for k, v in zip(node.value.keys, node.value.values, strict=True) if k.value in keep]
    assert len(pairs) == len(keep), f"{definition.names[0]} lacks one of {sorted(keep)}"
    node.value.keys, node.value.values = [k for k, _ in pairs], [v for _, v in pairs]
    return Definition(definition.names, ast.unparse(node))

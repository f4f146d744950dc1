"""Writes one self-contained Python module with the given classes and functions and everything of this project that they
need.

An exported model must run where matmix is not installed. Its modelling file is not a second implementation: it consists
of the definitions of the real sources that the model needs. They are found by following every name through the
project's imports, and are written one module after the other, imported modules first. A definition stands as in its
source, except that imports of the project inside it are left out, and that a name which two modules define bears the
name of its module in the second.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
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
    """A top-level statement of a module, and the names that it binds."""

    names: tuple[str, ...]
    text: str
    position: int


@dataclass(slots=True)
class Module:
    """Holds what a source file defines and imports."""

    name: str
    definitions: list[Definition] = field(default_factory=list)
    by_name: dict[str, Definition] = field(default_factory=dict)
    imports: dict[str, Place] = field(default_factory=dict)
    """Name here -> what it stands for, of the project and of libraries."""

    def mentions(self, definition: Definition) -> Iterator[tuple[ast.Name, Place]]:
        """Yields the names in a definition, as parsed from its own text, that stand for something at top level."""
        tree = ast.parse(definition.text)
        imports = dict(self.imports)
        for node in ast.walk(tree):
            if _is_of_project(node):
                imports |= _imported(node)
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id in imports:
                yield node, imports[node.id]
            elif isinstance(node, ast.Name) and node.id in self.by_name:
                yield node, (self.name, node.id)


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
    collector = _Collector(registries or {}, siblings or {})
    roots = list(roots)
    for module, name in roots:
        collector.reserve((module, name), name)
    for module, name in roots:
        collector.need(module, name, name)
    return collector.write(header, version)


class _Collector:
    def __init__(self, registries: dict[str, frozenset[str]], siblings: dict[str, str]) -> None:
        self.registries, self.siblings = registries, siblings
        self.modules: dict[str, Module] = {}
        self.wanted: dict[str, set[int]] = {}
        self.order: list[str] = []
        self.names: dict[Place, str] = {}
        """What the bundle holds or imports -> its name there."""
        self.ops: dict[str, str] = {}
        """Operation -> the PyTorch form that it is where matmix is not installed."""

    def module(self, name: str) -> Module:
        if name not in self.modules:
            self.modules[name] = read_module(name)
        return self.modules[name]

    def find(self, module_name: str, name: str | None) -> Place:
        """Follows imports of the project to where a name is defined, or to what is imported of others."""
        while name and self.is_source(module_name) and name in (imports := self.module(module_name).imports):
            module_name, name = imports[name]
        return module_name, name

    def is_source(self, module_name: str) -> bool:
        """Returns True for modules whose definitions the bundle takes over."""
        return module_name.split(".")[0] == PROJECT and module_name not in self.siblings and module_name != KERNELS

    def reserve(self, place: Place, wanted: str) -> None:
        """Gives what the bundle holds or imports a name that nothing else there has, `wanted` if that is free."""
        if place in self.names:
            return
        taken = {*self.names.values(), *TORCH_FORMS} if place[0] != KERNELS else ()
        while wanted in taken:
            wanted = f"{wanted}_{place[0].rpartition('.')[2]}"
        self.names[place] = wanted

    def need(self, module_name: str, name: str | None, wanted: str) -> None:
        """Takes the definition of a name, and follows what it mentions. wanted: what it is called where it is used."""
        module_name, name = self.find(module_name, name)
        if not self.is_source(module_name):
            self.reserve((module_name, name), wanted)
            if module_name == KERNELS:
                self._need_operation(name)
            return
        module = self.module(module_name)
        assert name in module.by_name, f"{module_name} does not define {name}"
        definition = module.by_name[name]
        taken = self.wanted.setdefault(module_name, set())
        if definition.position in taken:
            return
        taken.add(definition.position)
        if name in self.registries:
            definition = _cut_registry(definition, self.registries[name])
            module.by_name[name] = module.definitions[definition.position] = definition
        for own in definition.names:
            self.reserve((module_name, own), own)
        for place, used in sorted({(place, node.id) for node, place in module.mentions(definition)}, key=str):
            self.need(*place, used)
        if module_name not in self.order:
            self.order.append(module_name)

    def _need_operation(self, name: str | None) -> None:
        assert name in TORCH_FORMS, f"{KERNELS}.{name} has no PyTorch form in TORCH_FORMS"
        if name in self.ops:
            return
        self.ops[name] = "_never_fused"
        if form := TORCH_FORMS[name]:
            self.need(*form, form[1])
            self.ops[name] = f"_outside_graphs({self.names[self.find(*form)]})"

    def write(self, header: str, version: str) -> str:
        parts, kernels_done = [], not self.ops
        for module_name in self._module_order():
            if not kernels_done and not module_name.startswith(f"{KERNELS}."):
                parts.append(self._kernel_choice(version))
                kernels_done = True
            definitions = self.module(module_name).definitions
            texts = [self._renamed(module_name, definitions[at]) for at in sorted(self.wanted[module_name])]
            parts.append(f"# ---- {module_name}\n\n" + "\n\n\n".join(texts))
        assert kernels_done or not self.ops
        sections = [header.rstrip(), "from __future__ import annotations", self._import_block(), *parts]
        return "\n\n\n".join(section for section in sections if section) + "\n"

    def _module_order(self) -> list[str]:
        """Returns imported modules before those that import them; kernels first, as nothing below them is project
        code."""
        order: list[str] = []

        def visit(name: str, path: tuple[str, ...] = ()) -> None:
            if name in order or not self.is_source(name):
                return
            assert name not in path, f"import cycle: {' -> '.join((*path, name))}"
            for imported, attribute in self.module(name).imports.values():
                form = TORCH_FORMS.get(attribute or "") if imported == KERNELS and attribute in self.ops else None
                visit(form[0] if form else imported, (*path, name))
            order.append(name)

        for name in self.order:
            visit(name)
        wanted = [name for name in order if name in self.wanted]
        return sorted(wanted, key=lambda name: not name.startswith(f"{KERNELS}."))

    def _renamed(self, module_name: str, definition: Definition) -> str:
        """Returns the text of a definition with the names of the bundle, without imports of the project."""
        edits = []
        for node, place in self.module(module_name).mentions(definition):
            if (name := self.names[self.find(*place)]) != node.id:
                edits.append((node, name))
        tree = ast.parse(definition.text)
        for node in ast.walk(tree):
            for block in (getattr(node, name, ()) for name in ("body", "orelse", "finalbody")):
                ours = [inner for inner in block if _is_of_project(inner)] if isinstance(block, list) else []
                edits += [(inner, "pass" if len(ours) == len(block) else "") for inner in ours]
        arguments = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
        clash = arguments & {node.id for node, _ in edits if isinstance(node, ast.Name)}
        assert not clash, f"{module_name}: {clash} are arguments of {definition.names[0]} and names at top level"
        text = _replaced(definition.text, edits)
        for own in definition.names:
            if (name := self.names[module_name, own]) != own:
                text = re.sub(rf"^(class|def) {own}\b", rf"\1 {name}", text, count=1, flags=re.MULTILINE)
        return text

    def _kernel_choice(self, version: str) -> str:
        series = ".".join(version.split(".")[:2])
        lines = [_PREFER_INSTALLED.format(project=PROJECT, series=series, kernels=KERNELS).strip()]
        lines += [f'{op} = getattr(_KERNELS, "{op}", {form})' for op, form in sorted(self.ops.items())]
        return "\n".join(lines)

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


def read_module(module_name: str) -> Module:
    """Parses a module of the project into definitions and imports."""
    spec = importlib.util.find_spec(module_name)
    assert spec is not None, f"no module {module_name}"
    assert spec.origin is not None, f"{module_name} is not a file"
    text = Path(spec.origin).read_text(encoding="utf-8")
    module = Module(module_name)
    lines, body = text.splitlines(), ast.parse(text).body
    for index, node in enumerate(body):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module.imports |= _imported(node)
        elif names := _bound_names(node):
            following = body[index + 1] if index + 1 < len(body) else None
            documented = following if isinstance(node, ast.Assign | ast.AnnAssign) and _is_text(following) else None
            definition = Definition(tuple(names), _segment(lines, node, documented), len(module.definitions))
            module.definitions.append(definition)
            module.by_name |= dict.fromkeys(names, definition)
    return module


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


def _is_text(node: ast.stmt | None) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _segment(lines: list[str], node: ast.stmt, documented: ast.stmt | None) -> str:
    """Returns the source of a statement as it stands, with decorators, the comment right above and the docstring
    below."""
    first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))]) - 1
    while first > 0 and lines[first - 1].startswith("#"):
        first -= 1
    return "\n".join(lines[first : (documented or node).end_lineno])


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
    return Definition(definition.names, ast.unparse(node), definition.position)

"""Writes one self-contained Python module with the given classes and functions and everything of this project that they
need.

An exported model must run where matmix is not installed. Its modelling file is not a second implementation: it consists
of the definitions of the real sources that the model needs. They are found by following every name through the
project's imports, and are written one module after the other, imported modules first. Nothing is renamed, so the
top-level names of all these modules must be unique (asserted).
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

PROJECT = "matmix"
KERNELS = f"{PROJECT}.kernels"

# What the models import from matmix.kernels -> the PyTorch form that stands in for it in a bundle.
TORCH_FORMS = {
    "gated_norm": ("gated_norm.chunked", "gated_norm_torch"),
    "lion_mixer": ("lion.chunked", "lion_mixer_torch"),
    "lion_mixer_is_fused": ("lion.chunked", "never_lion_mixer"),
    "matrix_product_scan": ("matrix_product.chunked", "matrix_product_chunked"),
    "mru_mixer": ("mru.chunked", "mru_mixer_torch"),
    "mru_mixer_is_fused": ("mru.chunked", "never_fused"),
    "mru_step": ("mru.chunked", "mru_step_torch"),
    "quasiseparable_scan": ("semiseparable.chunked", "quasiseparable_chunked"),
    "scan_layer": ("scan_layer.chunked", "scan_layer_torch"),
    "scan_layer_is_fused": ("scan_layer.chunked", "never_one_layer"),
    "semiseparable_scan": ("semiseparable.chunked", "semiseparable_chunked"),
    "semiseparable_step": ("semiseparable.chunked.step", "semiseparable_step_torch"),
    "short_conv": ("short_conv.chunked", "short_conv_torch"),
    "short_conv_step": ("short_conv.chunked", "short_conv_step_torch"),
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


_KERNELS = _installed_kernels()
'''


@dataclass(frozen=True, slots=True)
class Definition:
    """A top-level statement of a module: the names it binds and the names it mentions."""

    names: tuple[str, ...]
    uses: frozenset[str]
    text: str
    position: int


@dataclass(slots=True)
class Module:
    """What a source file defines and imports."""

    name: str
    definitions: list[Definition] = field(default_factory=list)
    by_name: dict[str, Definition] = field(default_factory=dict)
    project_imports: dict[str, tuple[str, str]] = field(default_factory=dict)
    """name here -> (module, name there)"""
    other_imports: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    """name here -> (module, attribute of it or None for the module itself)"""


def bundle(
    roots: Iterable[tuple[str, str]],
    *,
    header: str,
    version: str,
    registries: dict[str, frozenset[str]] | None = None,
    siblings: dict[str, str] | None = None,
) -> str:
    """The source of one module that defines the `roots` and all they need.

    Args:
        roots: (module, name) pairs, e.g. ("matmix.model.architectures.encoder", "Encoder").
        header: comment and docstring at the top.
        version: version of matmix whose installed kernels may be used in place of the bundled ones.
        registries: dicts at module level, by name, and the keys of them to keep.
        siblings: modules that become files of their own beside the bundle -> the name to import them by.
    """
    collector = _Collector(registries or {}, siblings or {})
    for module, name in roots:
        collector.need(module, name)
    return collector.write(header, version)


class _Collector:
    def __init__(self, registries: dict[str, frozenset[str]], siblings: dict[str, str]) -> None:
        self.registries, self.siblings = registries, siblings
        self.modules: dict[str, Module] = {}
        self.wanted: dict[str, set[int]] = {}
        self.imports: dict[str, tuple[str, str | None]] = {}
        self.sibling_names: dict[str, set[str]] = {}
        self.ops: dict[str, str] = {}
        self.order: list[str] = []

    def module(self, name: str) -> Module:
        if name not in self.modules:
            self.modules[name] = read_module(name)
        return self.modules[name]

    def need(self, module_name: str, name: str) -> None:
        """Take the definition of a name, and follow what it mentions."""
        if module_name in self.siblings:
            self.sibling_names.setdefault(module_name, set()).add(name)
            return
        if module_name == KERNELS:
            assert name in TORCH_FORMS, f"{KERNELS}.{name} has no PyTorch form in TORCH_FORMS"
            module_name, self.ops[name] = f"{KERNELS}.{TORCH_FORMS[name][0]}", TORCH_FORMS[name][1]
            name = self.ops[name]
        module = self.module(module_name)
        if name in module.project_imports:
            self.need(*module.project_imports[name])
            return
        assert name in module.by_name, f"{module_name} does not define {name}"
        definition = module.by_name[name]
        if name in self.registries:
            definition = _cut_registry(definition, self.registries[name])
            module.by_name[name] = module.definitions[definition.position] = definition
        taken = self.wanted.setdefault(module_name, set())
        if definition.position in taken:
            return
        taken.add(definition.position)
        for used in sorted(definition.uses):
            if used in module.by_name or used in module.project_imports:
                self.need(module_name, used)
            elif used in module.other_imports:
                self._import(used, module.other_imports[used], module_name)
        if module_name not in self.order:
            self.order.append(module_name)

    def _import(self, name: str, target: tuple[str, str | None], module_name: str) -> None:
        known = self.imports.setdefault(name, target)
        assert known == target, f"{module_name}: {name} is {target} here and {known} in another module"

    def write(self, header: str, version: str) -> str:
        order = self._module_order()
        bound: dict[str, str] = dict.fromkeys(self.imports, "an import")
        parts, kernels_done = [], not self.ops
        for module_name in order:
            if not kernels_done and not module_name.startswith(KERNELS + "."):
                parts.append(self._kernel_choice(version))
                kernels_done = True
            texts = []
            for position in sorted(self.wanted[module_name]):
                definition = self.module(module_name).definitions[position]
                for name in definition.names:
                    assert name not in bound, f"{name} is defined in {module_name} and in {bound[name]}"
                    bound[name] = module_name
                texts.append(definition.text)
            parts.append(f"# ---- {module_name}\n\n" + "\n\n\n".join(texts))
        assert kernels_done or not self.ops
        sections = [header.rstrip(), "from __future__ import annotations", self._import_block(), *parts]
        return "\n\n\n".join(section for section in sections if section) + "\n"

    def _module_order(self) -> list[str]:
        """Imported modules before those that import them; kernels first, as nothing below them is project
        code."""
        order: list[str] = []

        def visit(name: str, path: tuple[str, ...] = ()) -> None:
            if name in order or name in self.siblings:
                return
            assert name not in path, f"import cycle: {' -> '.join((*path, name))}"
            for imported, attribute in self.module(name).project_imports.values():
                if imported != KERNELS:
                    visit(imported, (*path, name))
                elif attribute in self.ops:
                    visit(f"{KERNELS}.{TORCH_FORMS[attribute][0]}", (*path, name))
            order.append(name)

        for name in self.order:
            visit(name)
        wanted = [name for name in order if name in self.wanted]
        return sorted(wanted, key=lambda name: not name.startswith(KERNELS + "."))

    def _kernel_choice(self, version: str) -> str:
        series = ".".join(version.split(".")[:2])
        lines = [_PREFER_INSTALLED.format(project=PROJECT, series=series, kernels=KERNELS).strip()]
        for op, form in sorted(self.ops.items()):
            own = form if op.endswith("_is_fused") else f"_outside_graphs({form})"
            lines.append(f'{op} = getattr(_KERNELS, "{op}", {own})')
        return "\n".join(lines)

    def _import_block(self) -> str:
        plain, grouped = [], {}
        for name, (module, attribute) in self.imports.items():
            if attribute is None:
                plain.append(f"import {module}" if name == module else f"import {module} as {name}")
            else:
                grouped.setdefault(module, []).append(attribute if name == attribute else f"{attribute} as {name}")
        lines = sorted(plain) + [
            f"from {module} import {', '.join(sorted(grouped[module]))}" for module in sorted(grouped)
        ]
        for module, names in sorted(self.sibling_names.items()):
            lines.append(f"from {self.siblings[module]} import {', '.join(sorted(names))}")
        return "\n".join(lines)


def read_module(module_name: str) -> Module:
    """Parse a module of the project into definitions and imports."""
    spec = importlib.util.find_spec(module_name)
    assert spec is not None, f"no module {module_name}"
    assert spec.origin is not None, f"{module_name} is not a file"
    text = Path(spec.origin).read_text(encoding="utf-8")
    module = Module(module_name)
    lines, body = text.splitlines(), ast.parse(text).body
    for index, node in enumerate(body):
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            _record_import(module, node)
            continue
        names = _bound_names(node)
        if not names:
            continue
        _refuse_inner_imports(module_name, node)
        following = body[index + 1] if index + 1 < len(body) else None
        documented = following if isinstance(node, ast.Assign | ast.AnnAssign) and _is_docstring(following) else None
        uses = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)} - set(names)
        definition = Definition(
            tuple(names), frozenset(uses), _segment(lines, node, documented), len(module.definitions)
        )
        module.definitions.append(definition)
        module.by_name |= dict.fromkeys(names, definition)
    return module


def _record_import(module: Module, node: ast.Import | ast.ImportFrom) -> None:
    for alias in node.names:
        if isinstance(node, ast.Import):
            assert not alias.name.startswith(PROJECT), f"{module.name}: import names from {alias.name}, not the module"
            assert alias.asname or "." not in alias.name, f"{module.name}: import {alias.name} needs a name of its own"
            module.other_imports[alias.asname or alias.name] = (alias.name, None)
            continue
        assert node.level == 0, f"{module.name}: relative imports cannot be bundled"
        assert node.module is not None
        if node.module.split(".")[0] == PROJECT:
            assert alias.asname is None, f"{module.name}: {alias.name} is imported under another name"
            module.project_imports[alias.name] = (node.module, alias.name)
        else:
            module.other_imports[alias.asname or alias.name] = (node.module, alias.name)


def _bound_names(node: ast.stmt) -> list[str]:
    """Names that a top-level statement binds; none for docstrings."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.Try | ast.If):
        names = [
            inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)
        ]
        for inner in ast.walk(node):
            if isinstance(inner, ast.ImportFrom | ast.Import):
                names += [alias.asname or alias.name for alias in inner.names]
        return list(dict.fromkeys(names))
    return []


def _refuse_inner_imports(module_name: str, node: ast.stmt) -> None:
    for inner in ast.walk(node):
        if isinstance(inner, ast.ImportFrom) and (inner.module or "").split(".")[0] == PROJECT:
            raise AssertionError(f"{module_name}: line {inner.lineno} imports project code inside a definition")


def _is_docstring(node: ast.stmt | None) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _segment(lines: list[str], node: ast.stmt, documented: ast.stmt | None) -> str:
    """The source of a statement as it stands, with decorators, the comment right above and the docstring
    below."""
    first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))]) - 1
    while first > 0 and lines[first - 1].startswith("#"):
        first -= 1
    return "\n".join(lines[first : (documented or node).end_lineno])


def _cut_registry(definition: Definition, keep: frozenset[str]) -> Definition:
    """A dict literal with only some of its keys."""
    (node,) = [n for n in ast.parse(definition.text).body if isinstance(n, ast.Assign | ast.AnnAssign)]
    assert isinstance(node.value, ast.Dict), f"{definition.names[0]} is no dict literal"
    pairs = [(k, v) for k, v in zip(node.value.keys, node.value.values, strict=True) if k.value in keep]
    assert len(pairs) == len(keep), f"{definition.names[0]} lacks one of {sorted(keep)}"
    node.value.keys, node.value.values = [k for k, _ in pairs], [v for _, v in pairs]
    uses = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)} - set(definition.names)
    return Definition(definition.names, frozenset(uses), ast.unparse(node), definition.position)

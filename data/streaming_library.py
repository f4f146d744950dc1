"""Modules of mosaicml-streaming, without all that its packages import first.

`import streaming` imports transformers, scikit-learn and scipy: more than half of what a start of training and each of
its reading processes would import, and no reader needs them.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any


class _Package(ModuleType):
    """A package whose own code runs when somebody asks for a name that is not there yet."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        self.__class__ = ModuleType
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)


def streaming_module(name: str) -> ModuleType:
    """The module `streaming.base.<name>`. To everybody else the library is what it always is, loaded when it is used.

    Raises ImportError where it is not installed.
    """
    for package in ("streaming", "streaming.base"):
        if package not in sys.modules and (spec := importlib.util.find_spec(package)):
            module = importlib.util.module_from_spec(spec)
            module.__class__ = _Package
            sys.modules[package] = module
            parent, _, child = package.rpartition(".")
            if parent:
                setattr(sys.modules[parent], child, module)
    return importlib.import_module(f"streaming.base.{name}")

"""Loads the scripts of docs/examples, which belong to no package."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType

from paths import ROOT


def example_script(name: str) -> ModuleType:
    """Returns docs/examples/NAME.py as a module that was imported anew."""
    spec = spec_from_file_location(name, ROOT / "docs" / "examples" / f"{name}.py")
    module = sys.modules[name] = module_from_spec(spec)  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module

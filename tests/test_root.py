"""The root of the repository, whose folders have common names, does not break a Python that is started in it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from paths import ROOT

OTHER_PYTHON = os.environ.get("MATMIX_TRANSFORMERS5_PYTHON", "")


def _run_in_root(code: str, *, python: str = sys.executable, path: str = "") -> str:
    """What Python prints in the root, which is first on sys.path there, as for a person who types `python`."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONSAFEPATH", "PYTHONPATH")}
    environment |= {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([python, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_kernels_looks_like_a_folder_without_python_where_matmix_is_not_installed():
    """transformers 5 asks for a package `kernels`, and takes one without version and file for none."""
    code = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder)]
sys.modules["matmix"] = None
import kernels
assert getattr(kernels, "__file__", None) is None and not hasattr(kernels, "__version__")
try:
    from kernels import get_kernel
except ImportError:
    print("none")
"""
    assert _run_in_root(code) == "none"


def test_the_root_itself_imports_nothing():
    """pytest, IDEs and others may import the __init__.py of a folder that they are started in, by any name."""
    code = """
import sys
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location("a_clone", "__init__.py")
module = module_from_spec(spec)
between = set(sys.modules)
spec.loader.exec_module(module)
assert set(sys.modules) == between, set(sys.modules) - between
print("nothing")
"""
    assert _run_in_root(code) == "nothing"


def test_a_package_kernels_that_is_installed_is_found_in_the_root(tmp_path):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("__version__ = '0.9'\nfrom kernels.layer import get_kernel\n")
    (tmp_path / "kernels" / "layer.py").write_text("get_kernel = 'of another'\n")
    code = "import kernels.layer; from kernels import get_kernel; print(kernels.__version__, kernels.layer.get_kernel)"
    assert _run_in_root(code, path=str(tmp_path)) == "0.9 of another"


_LOAD = "from transformers import AutoModel, PreTrainedModel, Trainer, __version__; print(__version__)"


@pytest.mark.slow
def test_transformers_is_imported_in_the_root():
    assert _run_in_root(_LOAD).startswith("4.")


@pytest.mark.slow
@pytest.mark.skipif(not OTHER_PYTHON, reason="MATMIX_TRANSFORMERS5_PYTHON names no Python with transformers 5")
def test_newer_transformers_is_imported_in_the_root():
    assert not _run_in_root(_LOAD, python=OTHER_PYTHON).startswith("4.")

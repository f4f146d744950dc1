"""Keeps torch's compiler out of processes that compile nothing.

torch runs the function behind a custom operation with its compiler switched off, and imports the compiler to do so.
That takes a second, as long as all else between the import of torch and the first step of a small model.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

from torch._library.custom_ops import OPDEFS


def import_compiler_late() -> None:
    """Lets the operations registered as matmix::* run without it for as long as nobody else has imported it."""
    for name, operation in list(OPDEFS.items()):
        if name.startswith("matmix::"):
            for run in operation._backend_fns.values():
                _run_plainly(inspect.unwrap(run))


def _run_plainly(function: Any) -> None:
    """Puts the function itself where torch keeps it with the compiler switched off, until the first call at which there
    is a compiler."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        from torch._dynamo import disable

        function.__dynamo_disable = disable(function, wrapping=False)
        return function.__dynamo_disable(*args, **kwargs)

    function.__dynamo_disable = run

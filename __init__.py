"""Distributed pretraining for models whose sequence mixer is a structured matrix.

Once installed, this file is `matmix/__init__.py`. It lies at the root of the repository because the rooms do, and it
imports nothing, so that a program that finds it there by another name takes no harm.
"""


def __getattr__(name: str) -> str:
    """The version, as `matmix --version` prints it, read when it is asked for."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import version

    return version("matmix")

"""Small public-domain texts that come with matmix (README.md says where they are from)."""

from pathlib import Path

_SUFFIX = ".jsonl.xz"


def bundled_names() -> list[str]:
    """Names of the bundled corpora."""
    return sorted(p.name.removesuffix(_SUFFIX) for p in Path(__file__).parent.glob(f"*{_SUFFIX}"))


def bundled_path(name: str) -> Path:
    """File of a bundled corpus. Raises ValueError for an unknown name."""
    if name not in bundled_names():
        raise ValueError(f"no bundled corpus is called {name!r}; there are: {', '.join(bundled_names())}")
    return Path(__file__).parent / f"{name}{_SUFFIX}"

"""A site-packages folder with some distributions and what they require, and nothing else."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement


def required_distributions(roots: tuple[str, ...]) -> list[str]:
    """The roots and everything they need, by normalised name; extras and other platforms left out."""
    found: dict[str, None] = {}
    pending = list(roots)
    while pending:
        name = re.sub(r"[-_.]+", "-", pending.pop()).lower()
        if name in found:
            continue
        try:
            requires = distribution(name).requires or []
        except PackageNotFoundError:
            continue  # an optional dependency on this platform
        found[name] = None
        for text in requires:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                pending.append(requirement.name)
    return list(found)


def make_bare_site(folder: Path, roots: tuple[str, ...] = ("torch", "transformers")) -> Path:
    """Fill `folder` with links to the installed files of `roots` and their requirements."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in required_distributions(roots):
        installed = distribution(name)
        for top in {file.parts[0] for file in installed.files or [] if file.parts[0] not in ("..", "__pycache__")}:
            link = folder / top
            if not link.exists() and not top.endswith(".pth"):
                link.symlink_to(Path(str(installed.locate_file(top))))
    return folder

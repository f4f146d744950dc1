"""The recipe of a comparison."""

from __future__ import annotations

import pytest


@pytest.fixture
def recipe(tmp_path):
    """Writes a comparison; returns its path."""

    def write(text: str) -> str:
        path = tmp_path / "mine.toml"
        path.write_text(text)
        return str(path)

    return write

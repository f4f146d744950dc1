"""A tiny encoder to fine-tune, and GLUE's files."""

from __future__ import annotations

from pathlib import Path

import pytest
from glue_files import write_glue
from runs import run_recipe


@pytest.fixture(scope="session")
def encoder(dataset, tmp_path_factory) -> Path:
    """The run of an encoder."""
    run = tmp_path_factory.mktemp("glue") / "tiny"
    run_recipe("debug_hydra", dataset, run, "--steps", "2", "--evaluation.every", "0")
    return run


@pytest.fixture(scope="session")
def glue(tmp_path_factory) -> Path:
    """A folder with all tasks. RTE has few examples, so that its runs stay close to where they begin."""
    folder = tmp_path_factory.mktemp("download") / "glue_data"
    write_glue(folder)
    write_glue(folder, ["MNLI"], train=60)
    write_glue(folder, ["RTE"], train=4)
    return folder

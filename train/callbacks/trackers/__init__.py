"""Trackers of experiments, one a file. They share the names of numbers, and RUN/trackers.json with the run at a service
that a resumed run goes on with."""

from __future__ import annotations

import importlib.util
import json
import logging
import math
from pathlib import Path
from typing import Any

from matmix.data.artifacts import read_json
from matmix.data.storage.files import set_aside, write_atomic
from matmix.train.callbacks.base import RunView
from matmix.train.run.directory import TRACKED

logger = logging.getLogger(__name__)


def check_installed(package: str, extra: str) -> None:
    """Raises ValueError (one line) where the package that an extra brings is not installed."""
    if importlib.util.find_spec(package) is None:
        raise ValueError(
            f'callback "{extra}" needs {package}, which is not installed: in the clone of matmix, pip install -c '
            f"constraints.txt -e '.[{extra}]'"
        )


def numbers(record: dict[str, Any]) -> dict[str, float]:
    """Returns the numbers of a record as "<kind>/<name>", without the step; NaN and infinity are left out and leave a
    gap in the curve."""
    named = {f"{record['kind']}/{name}": value for name, value in record.items() if name not in ("kind", "step")}
    return {name: value for name, value in named.items() if isinstance(value, int | float) and math.isfinite(value)}


def read_id(folder: Path, where: str) -> str | None:
    """Returns the id that the run in `folder` has at a service, or None where it was never there. where: the service
    and the project in it."""
    return _read(folder / TRACKED).get(where)


def keep_id(folder: Path, where: str, name: str) -> None:
    """Keeps the id for the next start. Raises OSError."""
    write_atomic(folder / TRACKED, json.dumps({**_read(folder / TRACKED), where: name}, indent=1) + "\n")


def _read(path: Path) -> dict[str, str]:
    try:
        ids = read_json(path)
        if not isinstance(ids, dict) or not all(isinstance(name, str) for name in ids.values()):
            raise ValueError
        return ids
    except FileNotFoundError:
        return {}
    except ValueError:
        logger.warning(f"{path} is damaged and moved to {set_aside(path).name}; trackers begin new runs")
        return {}


def ended(run: RunView) -> bool:
    """Returns whether the run has done all of its steps."""
    return run.state.step == run.config.last_step

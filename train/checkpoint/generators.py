"""Random generators of a process: seeding, and states that a checkpoint holds as JSON."""

from __future__ import annotations

import base64
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from matmix.data.artifacts import read_json
from matmix.train.process.distributed import rank_and_world_size


def seed_all(seed: int, rank: int) -> None:
    """Seeds Python, NumPy and torch (every device of this process), differently on every rank."""
    words = np.random.SeedSequence([seed, rank]).generate_state(4)
    random.seed(int(words[0]) << 32 | int(words[1]))
    np.random.seed(int(words[2]))
    torch.manual_seed(int(words[0]) << 31 ^ int(words[3]))


def get_state() -> dict[str, Any]:
    """States of the generators of Python, NumPy and torch (CPU, and the CUDA device in use), as JSON
    values."""
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    state: dict[str, Any] = {
        "python": [version, list(numbers), gauss],
        "numpy": [name, keys.tolist(), position, has_gauss, cached],
        "torch": _encode(torch.get_rng_state()),
    }
    if torch.cuda.is_initialized():
        state["cuda"] = _encode(torch.cuda.get_rng_state())
    return state


def check_state(state: Any) -> None:
    """Raises ValueError (one line) where `state` is none that `get_state` gives: `set_state` would stop half-way."""
    try:
        random.Random().setstate(_python_state(state))
        np.random.RandomState().set_state(_numpy_state(state))
        torch.Generator().set_state(_decode(state["torch"]))
        _decode(state.get("cuda", ""))
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RuntimeError) as error:
        text = " ".join(str(error).split())
        raise ValueError(f"it holds no state of random generators ({type(error).__name__}: {text})") from None


def set_state(state: dict[str, Any]) -> None:
    """Puts the generators back to a state from `get_state`; without CUDA in use its part is left out."""
    random.setstate(_python_state(state))
    np.random.set_state(_numpy_state(state))
    torch.set_rng_state(_decode(state["torch"]))
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(_decode(state["cuda"]))


def read_generators(directory: Path) -> tuple[dict[str, Any], bool]:
    """The state for this rank's random generators, and whether it is this rank's own. Raises ValueError."""
    rank, _ = rank_and_world_size()
    own = directory / f"rank-{rank:05d}.json"
    path = own if own.is_file() else directory / "rank-00000.json"
    state = read_json(path)
    try:
        check_state(state)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    return state, path == own


def restore_generators(generators: tuple[dict[str, Any], bool]) -> None:
    """Puts this rank's generators back to what `read_generators` returned."""
    state, is_own = generators
    set_state(state)
    if not is_own:
        # A rank that the saved run did not have: a stream of its own, fixed by the checkpoint.
        seed_all(int(torch.randint(2**62, ()).item()), rank_and_world_size()[0])


def _python_state(state: dict[str, Any]) -> tuple[Any, ...]:
    version, numbers, gauss = state["python"]
    return version, tuple(numbers), gauss


def _numpy_state(state: dict[str, Any]) -> tuple[Any, ...]:
    name, keys, position, has_gauss, cached = state["numpy"]
    return name, np.array(keys, dtype=np.uint32), position, has_gauss, cached


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _decode(text: str) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), dtype=np.uint8).copy())

"""Runs that begin with the weights of another model, for the processes of a test."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from beginnings import first_weights
from saved_weights import read_weights

from matmix.train.checkpoint.manifest import read_manifest
from matmix.train.engine import kinds
from matmix.train.engine.full_state import MODEL, FullState
from matmix.train.engine.kinds import open_full
from matmix.train.engine.sharded_files import ShardedFiles
from matmix.train.entry import main
from matmix.train.init import InitSource, source_of, start


class _Counting(FullState):
    """A state that counts the elements of each tensor that are read."""

    def __init__(self, state: FullState) -> None:
        self.entries, self.state, self.read_elements = state.entries, state, Counter()

    def read(self, key: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        found = self.state.read(key, start, stop)
        self.read_elements[key] += found.numel()
        return found


def begin_all(runs: list[tuple[str, list[str]]]) -> tuple[dict[str, dict], dict[str, dict[str, int]]]:
    """By the name of each run: its first weights, as lists, and how many elements of each of the source's tensors this
    rank has read."""
    weights, read = {}, {}
    for name, arguments in runs:
        states: list[_Counting] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(start, "source_of", _counted(states))
            found = first_weights("debug_hydra", arguments)
        weights[name] = {key: tensor.tolist() for key, tensor in found.items()}
        read[name] = dict(states[0].read_elements)
    return weights, read


def _counted(states: list[_Counting]) -> Callable[..., InitSource]:
    def source(*arguments: object) -> InitSource:
        found = source_of(*arguments)
        states.append(_Counting(found.state))
        return dataclasses.replace(found, state=states[-1])

    return source


def train_phases(phases: list[str]) -> int:
    """The exit code of a recipe with phases."""
    return main(phases)


def train_and_begin(source: list[str], begin: list[str]) -> tuple[bool, int, int]:
    """Trains a run on all ranks, and begins another with its weights: whether these are the same, how many bytes of the
    source's files this rank has read for that, and how many bytes all of its weights have there."""
    assert main(["debug_hydra", *source, "--device", "cpu"]) == 0
    lengths: list[int] = []

    class Reader(ShardedFiles):
        def _load(self, chunk):
            if source[-1] in str(self.directory):
                lengths.append(chunk.length)
            return super()._load(chunk)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(kinds._READERS, "torch", Reader)
        found = first_weights("debug_hydra", begin)
    checkpoint = max(Path(source[-1]).glob("checkpoints/step-*"))
    expected = dict(read_weights(checkpoint))
    same = found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    chunks = open_full(checkpoint, read_manifest(checkpoint)["layout"]).chunks
    stored = sum(chunk.length for key, parts in chunks.items() if key.startswith(MODEL) for chunk in parts)
    return same, sum(lengths), stored

"""Runs that begin with the weights of another model, for the processes of a test."""

from __future__ import annotations

from beginnings import first_weights

from matmix.train.entry import main


def begin_all(runs: list[tuple[str, list[str]]], phases: list[str]) -> tuple[dict[str, dict], int]:
    """The first weights of each run, as lists, by its name; and the exit code of a recipe with phases."""
    found = {name: first_weights("debug_hydra", arguments) for name, arguments in runs}
    as_lists = {name: {key: tensor.tolist() for key, tensor in weights.items()} for name, weights in found.items()}
    return as_lists, main(phases)

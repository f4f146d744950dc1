"""`matmix prepare INPUT ... --out DIR [--option value ...]`."""

from __future__ import annotations

from matmix.data.prepare import prepare
from matmix.data.prepare_config import PrepareConfig
from matmix.train.arguments import parse_arguments
from matmix.train.console import guarded


def main(arguments: list[str]) -> int:
    """Entry point of the verb; returns the exit code."""
    inputs = []
    for argument in arguments:
        if argument.startswith("-"):
            break
        inputs.append(argument)
    options = arguments[len(inputs) :]
    if inputs:
        options = ["--inputs", *inputs, *options]

    def run() -> int:
        prepare(parse_arguments(PrepareConfig, options, prog="matmix prepare INPUT ... --out DIR"))
        return 0

    return guarded(run)

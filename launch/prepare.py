"""`matmix prepare INPUT ... --out DIR [--option value ...]`."""

from __future__ import annotations

from matmix.data.prepare import prepare
from matmix.data.prepare_config import PrepareConfig
from matmix.train.arguments import parse_arguments
from matmix.train.console import report

_USAGE = "matmix prepare INPUT ... --out DIR"


def main(arguments: list[str]) -> int:
    """Entry point of the verb; returns the exit code. Raises ValueError (one line) for the user's mistakes."""
    inputs = []
    for argument in arguments:
        if argument.startswith("-"):
            break
        inputs.append(argument)
    options = arguments[len(inputs) :]
    if inputs:
        options = ["--inputs", *inputs, *options]

    if "--help" not in options and "-h" not in options:
        for flag, what in (("--inputs", "input"), ("--out", "output folder")):
            if not any(option.split("=")[0] == flag for option in options):
                raise ValueError(f"no {what} given: {_USAGE} [--option value ...]")
    config = parse_arguments(PrepareConfig, options, prog=_USAGE)
    try:
        prepare(config)
    except RuntimeError as error:  # a tokenising process was killed, for lack of memory for example
        report(error)
        return 1
    return 0

"""`matmix prepare INPUT ... --out DIR [--option value ...]`."""

from __future__ import annotations

from matmix.data.prepare import prepare
from matmix.data.prepare_config import PrepareConfig
from matmix.train.arguments import parse_arguments
from matmix.train.console import guarded, report


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
        usage = "matmix prepare INPUT ... --out DIR [--option value ...]"
        if "--help" not in options and "-h" not in options:
            for flag, what in (("--inputs", "input"), ("--out", "output folder")):
                if not any(option.split("=")[0] == flag for option in options):
                    raise ValueError(f"no {what} given: {usage}")
        config = parse_arguments(PrepareConfig, options, prog="matmix prepare INPUT ... --out DIR")
        try:
            prepare(config)
        except RuntimeError as error:  # a tokenising process was killed, for lack of memory for example
            report(error)
            return 1
        return 0

    return guarded(run)

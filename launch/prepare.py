"""`matmix prepare INPUT ... --out DIR [--option value ...]`, and `matmix prepare --merge --out DIR`."""

from __future__ import annotations

from matmix.data.prepare.command import prepare, prepare_tokenizer
from matmix.data.prepare.config import PrepareConfig
from matmix.data.prepare.merge import MergeConfig, merge
from matmix.data.prepare.upload import prepare_to_url
from matmix.data.storage.remote import is_url
from matmix.train.arguments import parse_arguments
from matmix.train.process.console import report

_USAGE = "matmix prepare INPUT ... --out DIR"
_MERGE_USAGE = "matmix prepare --merge --out DIR"


def main(arguments: list[str]) -> int:
    """Entry point of the verb; returns the exit code. Raises ValueError (one line) for the user's mistakes."""
    if "--merge" in arguments:
        return _merge([argument for argument in arguments if argument != "--merge"])
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
    config = parse_arguments(PrepareConfig, _spell_out(options, "--tokenizer-only"), prog=_USAGE)
    if is_url(config.out) and (config.part or config.tokenizer_only):
        raise ValueError(f"parts are made in a folder that all machines share, not at a URL such as {config.out}")
    try:
        if config.tokenizer_only:
            tokenizer = prepare_tokenizer(config)
            print(f"tokenizer of all parts: {tokenizer.path} ({tokenizer.kind}, {tokenizer.vocab_size:,} ids)")
            return 0
        (prepare_to_url if is_url(config.out) else prepare)(config)
    except RuntimeError as error:  # a tokenising process was killed, for lack of memory for example
        report(error)
        return 1
    return 0


def _merge(options: list[str]) -> int:
    if options and not options[0].startswith("-"):
        raise ValueError(f"the parts know their input, leave it out: {_MERGE_USAGE}")
    if "--help" not in options and not any(option.split("=")[0] == "--out" for option in options):
        raise ValueError(f"no output folder given: {_MERGE_USAGE}")
    config = parse_arguments(MergeConfig, _spell_out(options, "--dry-run"), prog=_MERGE_USAGE)
    if is_url(config.out):
        raise ValueError(f"parts are joined in the folder where they were made, not at a URL such as {config.out}")
    merge(config)
    return 0


def _spell_out(options: list[str], flag: str) -> list[str]:
    """A flag without a value means True."""
    spelled = []
    for option, following in zip(options, [*options[1:], "--"], strict=True):
        spelled += [option, "True"] if option == flag and following.startswith("--") else [option]
    return spelled

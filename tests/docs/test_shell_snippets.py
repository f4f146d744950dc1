"""Every command on the pages exists: the real command line reads it, with its verb, options and recipe."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import re
import tomllib
import typing
from collections.abc import Sequence
from pathlib import Path

import pytest
from command_lines import CommandLine, command_lines
from example_scripts import example_script
from failures import Failures
from pages import snippets, spans
from paths import ROOT

from matmix.launch.cli import TREE, VERBS
from matmix.launch.jobs.slurm.options import slurm_options
from matmix.launch.jobs.slurm.submit import plan_preparation
from matmix.launch.jobs.sweep import parse_sweep
from matmix.launch.lab.compare.config import given_values, read_comparison, tasks_of
from matmix.launch.lab.ladder.sizes import LadderConfig
from matmix.train.arguments import BorrowedOptions, field_names
from matmix.train.config import RunConfig
from matmix.train.recipe import find_recipe, load_phases
from matmix.train.tasks import TASKS

SHELL = snippets("", "sh")
COMMANDS = [command for snippet in SHELL if not snippet.not_run for command in command_lines(snippet)]
MENTIONED = [command for span in spans("matmix ") for command in command_lines(span)]


PAGES = sorted({command.page for command in (*COMMANDS, *MENTIONED)})


def test_there_are_reasons_where_commands_are_not_read():
    left_out = {s.where: s.not_run for s in SHELL if s.not_run}
    assert len(left_out) <= 5, left_out
    assert all(len(reason.split()) >= 4 for reason in left_out.values()), left_out


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_are_read(page):
    with Failures() as failures:
        for command in COMMANDS:
            if command.page == page:
                with (
                    failures.of(f"{command.where} {command.words[1:4]}"),
                    pytest.MonkeyPatch.context() as patch,
                ):
                    read(command, patch)
        for command in MENTIONED:
            if command.page == page:
                with failures.of(f"{command.where} {command.words[1:4]}"):
                    look_up(command)


def read(command: CommandLine, monkeypatch) -> None:
    """Reads a command of a block as its program does. Raises what the program would say, where it is none."""
    words = list(command.words[1:])
    match command.program:
        case "matmix":
            read_matmix(words)
        case "torchrun":
            read_torchrun(words)
        case "python":
            read_python(words, monkeypatch)
        case "pip":
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            assert {name for word in words if word.startswith(".[") for name in word[2:-1].split(",")} <= set(extras)
        case "make":
            targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
            assert words[0] in targets


def look_up(command: CommandLine) -> None:
    """Checks that the verb and the options of a command in running text exist."""
    known, rest = VERBS, list(command.words[1:])
    if rest[0] == "VERB" or rest[0].startswith("--"):
        return
    while isinstance(known, dict) and rest:
        known = known[rest.pop(0)].verb
    if isinstance(known, str):
        module, _, name = known.partition(":")
        options = {word.partition("=")[0] for word in rest if word.startswith("--")} - {"--help"}
        assert options <= options_of(getattr(importlib.import_module(module), name))


def options_of(verb: type) -> set[str]:
    """--key of all options of a verb; with those of recipes, where it takes them."""
    found = {f"--{name.replace('_', '-')}" for name in field_names(RunConfig)} if hasattr(verb, "recipe") else set()
    for name, hint in typing.get_type_hints(verb).items():
        described = isinstance(hint, type) and issubclass(hint, BorrowedOptions)
        names = [field.name for field in dataclasses.fields(hint.described)] if described else [name]
        found |= {f"--{own.replace('_', '-')}" for own in names}
    return found


# -- Reading -----------------------------------------------------------------------------------------------------------


def read_matmix(words: list[str]) -> None:
    """Words after `matmix`. Raises ValueError or FileNotFoundError where the command would, files that a user has
    aside."""
    if words[0] in ("--version", "--tyro-write-completion"):
        return
    verb, rest = TREE.read([word for word in words if word != "--help"])
    assert verb is not None, "no verb"
    match TREE.path:
        case ("compare",):
            comparison = read_comparison(stand_in(verb.recipe, "quickstart"), others(rest, "--glue."))
            assert tasks_of(comparison, verb.only if "/" in verb.recipe or verb.recipe.islower() else ())
            slurm_options(verb.profile, verb.slurm_options)
        case ("ladder",):
            assert read_comparison(stand_in(verb.recipe, "ladder_small"), rest).entries
            assert verb.sizes is None or LadderConfig(sizes=verb.sizes).counts
        case ("finetune",):
            assert verb.recipe in TASKS or find_recipe(stand_in(verb.recipe, "finetune"))
            given_values(rest)
        case ("glue",) | ("show-mixer",):
            given_values(rest)
        case ("launch", "slurm") if verb.prepare:
            plan_preparation([verb.recipe, *rest], verb.parts, slurm_options(verb.profile, verb.slurm), words)
        case _ if TREE.takes_recipe:
            assert load_phases(stand_in(verb.recipe, "debug_mru"), rest)
            if TREE.path == ("launch", "slurm"):
                slurm_options(verb.profile, verb.slurm)
                assert all(
                    key in field_names(RunConfig)
                    for run in parse_sweep(verb.sweep, None)
                    for key in keys(run.overrides)
                )
        case _:
            assert not rest


def keys(words: Sequence[str]) -> list[str]:
    """Keys that the words give."""
    return [word.removeprefix("--").partition("=")[0].replace("-", "_") for word in words if word.startswith("--")]


def others(words: Sequence[str], prefix: str) -> list[str]:
    return [word for word in words if not word.startswith(prefix)]


def stand_in(recipe: str, usual: str) -> str:
    """A recipe as it is written, or one of docs/examples; `usual` in place of one that a user has, as RECIPE, mine.toml
    or runs/mine."""
    name = Path(recipe).name
    if (example := ROOT / "docs/examples" / name).is_file():
        return str(example)
    own = recipe.isupper() or recipe.startswith(("s3://", "<")) or name != recipe
    try:
        return str(find_recipe(name))
    except FileNotFoundError:
        if own or recipe.endswith(".toml"):
            return usual
        raise


def read_torchrun(words: list[str]) -> None:
    """Words after `torchrun`: its own, and those of the module that it runs."""
    from torch.distributed.run import parse_args

    options = parse_args(words)
    assert options.module
    assert options.training_script in ("matmix.train", "matmix.launch.cli"), options.training_script
    rest = options.training_script_args
    read_matmix(rest if options.training_script == "matmix.launch.cli" else ["train", *rest])


class Read(BaseException):
    """The words were understood, and the work would begin."""


def read_python(words: list[str], monkeypatch) -> None:
    """Words after `python`: a module of ours, whose `main` reads them, or pytest, or a script."""
    words = [word for word in words if word != "-P"]
    if words[:2] == ["-m", "pytest"]:
        assert all((ROOT / word).exists() for word in words[2:] if word.startswith("tests/"))
        return
    if words[0] == "-m":
        name, rest = words[1], words[2:]
        is_package = importlib.util.find_spec(name).submodule_search_locations is not None
        module = importlib.import_module(f"{name}.__main__" if is_package else name)
    elif words[0].startswith("docs/examples/"):
        module, rest = example_script(Path(words[0]).stem), words[1:]
    else:
        assert (ROOT / words[0]).exists() or words[0].startswith("my_")
        return
    parse = argparse.ArgumentParser.parse_known_args

    def understood(found):
        raise Read

    def parse_known_args(self, args=None, namespace=None):
        unknown = parse(self, args, namespace)[1]
        assert not unknown, unknown
        raise Read

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse_known_args)
    if hasattr(module, "read_verb"):
        read_verb = module.read_verb
        monkeypatch.setattr(module, "read_verb", lambda *a, **k: understood(read_verb(*a, **k)))
    if hasattr(module, "parse_arguments"):
        given = module.parse_arguments
        monkeypatch.setattr(module, "parse_arguments", lambda *a, **k: understood(given(*a, **k)))
    with pytest.raises((Read, FileNotFoundError)):  # some look for their data while they read
        module.main(rest)


# -- Keys of recipes ---------------------------------------------------------------------------------------------------


def keys_in_text() -> list[tuple[str, str]]:
    """Where a key of a recipe stands in running text, and the key; what Python and files are called so is none. Pages
    that add something name what is not there yet."""
    tables = {name.partition(".")[0] for name in field_names(RunConfig) if "." in name}
    found = []
    for span in (span for span in spans("") if not span.page.startswith("docs/adding-")):
        for match in re.finditer(r"(?<![\w./-])(?:--)?((\w+)(?:\.[\w-]+)+)(?![\w./(<:*])", span.code):
            key = re.sub(r"\.options\..*", ".options", match[1].replace("-", "_"))
            if match[2] in tables and not re.search(r"\.(py|md|toml|json|jsonl|safetensors|png|forward|step)$", key):
                found.append((span.where, key))
    return found


def test_keys_in_running_text_exist():
    found = keys_in_text()
    assert len(found) > 100
    known = set(field_names(RunConfig))
    assert not (unknown := [f"{where} {key}" for where, key in found if key not in known]), "\n".join(unknown)

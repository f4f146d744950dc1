"""Commands that the product prints can be pasted, whatever characters the paths in them have."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from failures import each

import matmix
from matmix.data.artifacts import shell_line
from matmix.data.prepare.command import prepare
from matmix.data.prepare.text import PrepareConfig
from matmix.launch.cli import TREE, VERBS
from matmix.launch.tree import Branch
from matmix.train.command import _closing_words
from matmix.train.recipe import load_config
from matmix.train.state import Result

PRODUCT = Path(matmix.__file__).parent
ROOMS = ("data", "kernels", "launch", "model", "train")
HOLE = "\0"  # where a value is put into a text
AWKWARD = "it's my $HOME/a;b"
METRICS = {"loss": 1.0, "chance_accuracy": 0.5, "perplexity": 2.7, "masked_accuracy": 0.5}


def paths_of(branches: dict[str, Branch], before: str = "") -> Iterator[str]:
    for name, branch in branches.items():
        yield before + name
        if isinstance(branch.verb, dict):
            yield from paths_of(branch.verb, f"{before}{name} ")


_VERB = "|".join(sorted(paths_of(VERBS), key=len, reverse=True))
# A command with a value among its words: verb, options, words in capitals that a person replaces, values.
_COMMAND = re.compile(rf"matmix (?:{_VERB}|{HOLE})(?: (?:--[\w.-]+|[A-Z][A-Z.a-z]*))* {HOLE}")
# An option with a value, unless the text begins with it: that names what somebody typed, or is one word of a list.
_OPTION = re.compile(rf"(?<=.)--[a-z][\w.-]*[ =]{HOLE}")


def texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The texts of a file that values are put into, as line and text with holes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr | ast.BinOp):
            yield node.lineno, _with_holes(node)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
            yield node.lineno, re.sub(r"\{.*?\}", HOLE, _with_holes(node.func.value))


def _with_holes(node: ast.AST) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_with_holes, node.values))
    if isinstance(node, ast.BinOp):
        joined = isinstance(node.op, ast.Add)
        return _with_holes(node.left) + _with_holes(node.right) if joined else HOLE
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else HOLE


def by_hand(code: str) -> list[int]:
    """Lines of commands with values that are not from `shell_line`."""
    found = []
    for line, text in texts(ast.parse(code)):
        if _COMMAND.search(text) or _OPTION.search(text):
            found.append(line)
    return found


def test_every_printed_command_is_written_by_one_function():
    files = [path for room in ROOMS for path in (PRODUCT / room).rglob("*.py")]
    codes = {path.relative_to(PRODUCT).as_posix(): path.read_text(encoding="utf-8") for path in files}
    assert {name: lines for name, code in codes.items() if (lines := by_hand(code))} == {}
    assert [name for name, code in codes.items() if re.search(r"^\s*(import|from) shlex", code, re.M)] == [
        "data/artifacts.py"
    ]


@each(
    "code",
    [
        'f"next: matmix train RECIPE.toml --data.path {out}"',
        'f"matmix export {run} --out DIR"',
        '"finish that: matmix prepare --merge --out " + out',
        '"matmix launch resubmit {}".format(home)',
        'f"{verb} --merge --out {out}"',
        'f"set --micro-batch-size={half}"',
    ],
)
def test_commands_by_hand_are_found(code):
    assert by_hand(code) == [1]


def test_the_words_come_back_from_the_shell():
    words = ["matmix", "train", "RECIPE.toml", "--data.path", AWKWARD, "", "a b", "*"]
    line = shell_line(*words, Path("x y"), 3)
    assert shlex.split(line) == [*words, "x y", "3"]
    assert line.startswith("matmix train RECIPE.toml --data.path ")


def test_what_comes_after_a_preparation_is_read_back(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("t.txt").write_text("".join(f"words of line {line}\n" for line in range(40)))
    prepare(PrepareConfig(inputs=("t.txt",), out=AWKWARD, model_type="char", text_documents="line", processes=1))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("next: ")]
    verb, rest = TREE.read(shlex.split(line.removeprefix("next: "))[1:])
    assert (verb.recipe, rest) == ("RECIPE.toml", ["--data.path", AWKWARD])


@pytest.mark.parametrize(
    ("recipe", "steps", "words"),
    [("debug_mru", 0, []), ("debug_hydra", 0, []), ("debug_hydra", 64, ["--objective.name", "masked_diffusion"])],
)
def test_what_comes_after_a_training_is_read_back(recipe, steps, words):
    config = load_config(recipe, ["--run-dir", AWKWARD, *words])
    ended = Result(
        step=1,
        steps=1,
        steps_done=1,
        finished=True,
        stopped=False,
        signal=0,
        saved=True,
        unigram_entropy=None,
        metrics=METRICS,
    )
    line = _closing_words(config, ended).splitlines()[-1]
    look, export = line.removeprefix("Next: ").split(", or ")
    verb, _ = TREE.read(shlex.split(look)[1:])
    assert (verb.source, verb.prompt) == (AWKWARD, ("TEXT" if config.model.causal else "TEXT <mask> TEXT",))
    assert verb.steps == steps
    assert TREE.read(shlex.split(export)[1:])[0].source == AWKWARD

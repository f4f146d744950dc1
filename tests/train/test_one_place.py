"""What is special about one engine, optimizer, task or mixer is said in its own files: others ask them."""

import ast
from collections.abc import Iterator
from pathlib import Path

from failures import each

import matmix.train
from matmix.model.mixers import MIXERS

TRAIN = Path(matmix.train.__file__).parent
ROOM_ABOVE = TRAIN.with_name("launch")


def words(path: Path) -> Iterator[str]:
    """All names and strings of a file's code, without its docstrings and comments."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told:
            yield node.value
        elif isinstance(node, ast.Name | ast.Attribute | ast.alias):
            yield node.id if isinstance(node, ast.Name) else getattr(node, "attr", "") or node.name
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def files_with(wanted, *folders: Path) -> list[str]:
    """The files of these folders in which a word is wanted."""
    paths = [path for folder in folders for path in folder.rglob("*.py")]
    found = [path for path in paths if any(wanted(word.lower()) for word in words(path))]
    return [path.relative_to(TRAIN.parent).as_posix() for path in found]


@each(
    "word, places",
    [
        ("deepspeed", ("train/engine/",)),
        ("zero_stage", ("train/engine/",)),
        ("exp_avg", ("train/optim/",)),
        ("masked_lm", ("train/tasks/",)),
    ],
)
def test_a_name_stands_with_what_it_names(word, places):
    found = files_with(lambda text: word in text, TRAIN, ROOM_ABOVE)
    assert found, "the word is looked for where it stands"
    assert [path for path in found if not path.startswith(places)] == []


def test_no_mixer_is_named_where_models_are_trained():
    assert files_with(lambda text: text in MIXERS, TRAIN) == []

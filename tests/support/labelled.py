"""Small files of labelled examples, and a tokenizer of whole words for them."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

SPECIAL = ("<pad>", "<unk>", "<s>", "</s>", "[CLS]", "[SEP]", "[MASK]")
WORDS = tuple(f"word{number}" for number in range(57))
CLASSES = ("bad", "fine", "good")
FIRST = len(SPECIAL)


def write_tokenizer(folder: Path) -> str:
    """tokenizer.json whose tokens are the WORDS."""
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


def texts(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Texts of 1 to 12 of nine words; the class is that of the first word, number modulo 3."""
    draw, found = random.Random(seed), []
    for _ in range(count):
        numbers = [draw.randrange(9) for _ in range(draw.randint(1, 12))]
        found.append({"text": " ".join(WORDS[number] for number in numbers), "label": CLASSES[numbers[0] % 3]})
    return found


def write_jsonl(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_tsv(path: Path, rows: list[dict]) -> str:
    lines = ["\t".join(rows[0]), *("\t".join(str(value) for value in row.values()) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


MODEL = """
steps = 12
global_batch_size = 8

[model]
architecture = "sequence_classifier"
d_model = 32
n_layers = 2
layers = ["hydra", "attention"]
mlp_ratio = 2.0
dropout = 0.1
head = { outputs = 3 }

[model.mixers.hydra]
d_state = 8
headdim = 16

[model.mixers.attention]
nheads = 2

[data]
seqlen = 32
prefix = "cls"
suffix = "sep"
workers = 0

[objective]
name = "sequence_classification"

[optimizer]
lr = 1e-2

[schedule]
name = "linear"
warmup = 2

[evaluation]
every = 6

[checkpoint]
every = 6

[logging]
every = 1
tensorboard = false
progress = false
picture = false
"""
"""A recipe without examples."""


def write_recipe(folder: Path, train: list[dict], validation: list[dict], *, more: str = "") -> str:
    """A recipe of MODEL on these examples; `more`: lines of [data.examples]."""
    paths = {
        "train": write_jsonl(folder / "train.jsonl", train),
        "validation": write_jsonl(folder / "validation.jsonl", validation),
        "tokenizer": write_tokenizer(folder / "tokenizer"),
    }
    lines = "".join(f"{name} = {json.dumps(path)}\n" for name, path in paths.items())
    (folder / "recipe.toml").write_text(f"{MODEL}\n[data.examples]\n{lines}{more}")
    return str(folder / "recipe.toml")

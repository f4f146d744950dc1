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


def paired(count: int, seed: int) -> list[dict]:
    """A text, and the same words in another order."""
    draw, found = random.Random(seed), []
    for _ in range(count):
        words = [draw.choice(WORDS) for _ in range(6)]
        found.append({"text": " ".join(words), "pair": " ".join(draw.sample(words, 6))})
    return found


def tagged(count: int, seed: int) -> list[dict]:
    """Each word has a class, its number modulo 3."""
    return [
        {"text": row["text"], "label": ["BIO"[WORDS.index(word) % 3] for word in row["text"].split()]}
        for row in texts(count, seed)
    ]


def entities(count: int, seed: int) -> list[dict]:
    """The same with the tags of entities."""
    names = {"B": "B-X", "I": "I-X", "O": "O"}
    return [{**row, "label": [names[label] for label in row["label"]]} for row in tagged(count, seed)]


def questions(count: int, seed: int) -> list[dict]:
    """The answer is the word that the question names, in texts longer than a window."""
    draw, found = random.Random(seed), []
    for _ in range(count):
        words = draw.sample(WORDS, 40)
        answer = draw.choice(words)
        found.append({"text": answer, "pair": " ".join(words), "label": answer})
    return found


def choosing(count: int, seed: int) -> list[dict]:
    """The right one is among the first ten words, the others are not."""
    draw, found = random.Random(seed), []
    for _ in range(count):
        text, *choices = draw.sample(WORDS[10:], 4)
        label = draw.randrange(3)
        choices[label] = draw.choice(WORDS[:10])
        found.append({"text": text, "choices": choices, "label": label})
    return found


def measured(count: int, seed: int) -> list[dict]:
    """The value is the number of words."""
    return [{**row, "label": len(row["text"].split()) / 12} for row in texts(count, seed)]


def several(count: int, seed: int) -> list[dict]:
    """The classes are those of all words."""
    return [
        {**row, "label": sorted({CLASSES[WORDS.index(word) % 3] for word in row["text"].split()})}
        for row in texts(count, seed)
    ]


EXAMPLES = {
    "sequence_classification": (texts, "sequence_classifier", 3),
    "multi_label": (several, "sequence_classifier", 3),
    "regression": (measured, "sequence_classifier", 1),
    "token_classification": (tagged, "token_classifier", 3),
    "question_answering": (questions, "span_classifier", 2),
    "multiple_choice": (choosing, "sequence_classifier", 1),
    "embedding": (paired, "text_embedder", 2),
}
"""Task -> examples of it by count and seed, and the architecture and outputs of a model for them."""


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


def write_task(folder: Path, task: str) -> list[str]:
    """A recipe of a task with 53 examples to train on and 31 to validate, and the options that belong to it."""
    rows, architecture, outputs = EXAMPLES[task]
    folder.mkdir(exist_ok=True)
    more = "stride = 4\n" if task == "question_answering" else ""
    recipe = write_recipe(folder, rows(53, 0), rows(31, 1), more=more)
    options = ["--model.architecture", architecture, "--model.head.outputs", str(outputs), "--device", "cpu"]
    return [recipe, *options, "--objective.name", task]

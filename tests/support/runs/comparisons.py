"""A comparison of two encoders that train in a second: a plain recipe, and what makes a comparison of it, also in two
variants; runs that look as if they were finished, and what reports say of them."""

import csv
import json
from pathlib import Path

from matmix.train.recipe import write_config

TINY = """
steps = 4
global_batch_size = 4
device = "cpu"
[model]
architecture = "encoder"
d_model = 16
n_layers = 2
mlp_ratio = 0.0
layers = ["attention"]
mixers.attention.nheads = 2
mixers.attention.headdim = 8
mixers.hydra = { headdim = 8, d_state = 4 }
[data]
seqlen = 32
workers = 0
[objective]
name = "masked_lm"
[optimizer]
lr = 1e-2
[evaluation]
batches = 1
[checkpoint]
every = 0
[logging]
every = 1
tensorboard = false
progress = false
"""
ENTRIES = """
[comparison]
seeds = [0, 1]
tolerance = 0.1
controls = false
[[comparison.entry]]
name = "attention"
[[comparison.entry]]
name = "Hydra, 2 x"
model.layers = ["hydra"]
"""
VARIANTS = """
[[comparison.variant]]
name = "short rows"
data.seqlen = 16
steps = 3
[[comparison.variant]]
name = "deep"
model.n_layers = 3
"""


def finish(task, validation: dict[str, float], **summary) -> None:
    """Leaves behind what a finished run does: its config and records, and a summary with these metrics."""
    task.run.path.mkdir(parents=True)
    write_config(task.config, task.run.config_path)
    text = json.dumps({"step": task.config.last_step, "validation": validation, **summary})
    (task.run.path / "summary.json").write_text(text)
    records = [{"kind": "train", "step": step, "loss": 5.0 - step} for step in range(1, 5)]
    (task.run.path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def printed_table(text: str) -> dict[str, dict[str, str]]:
    """The last table of entries in a printed text: entry -> column -> cell."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    start = max(number for number, line in enumerate(lines) if line.startswith("| entry"))
    header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines[start:])
    return {row[0]: dict(zip(header, row, strict=True)) for row in rows}


def csv_rows(home: Path) -> dict[str, dict[str, str]]:
    """The report's table.csv: entry -> column -> value."""
    with (home / "report" / "table.csv").open() as file:
        return {row["entry"]: row for row in csv.DictReader(file)}

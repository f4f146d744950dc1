"""What trackers of experiments are to have got of a run."""

import json
from pathlib import Path


def written(folder: Path, separator: str = "/") -> dict[tuple[str, int], float]:
    """The finite numbers of metrics.jsonl by name, as trackers call them, and step. separator: what stands for a slash
    within the names of metrics.jsonl."""
    found = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        kind, step = record.pop("kind"), record.pop("step")
        numbers = {name: value for name, value in record.items() if value is not None}
        found |= {(f"{kind}/{name.replace('/', separator)}", step): value for name, value in numbers.items()}
    assert len(found) > 20
    return found

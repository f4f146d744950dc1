"""The grid of runs: every variant on every dataset at every learning rate, then more seeds of the best rate; and the
folder that keeps the results of all parts of the study."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from matmix.data.storage.files import write_atomic
from matmix.launch.many.runs import time_left
from matmix.launch.many.scores import spread
from matmix.model.initialization import INIT_STD
from matmix.studies.mru.runs import run
from matmix.studies.mru.variants import RATES, configs

PART = "grid"
FOLLOWED = "characters"
"""The dataset, by its name, whose runs keep their weights, to be followed along longer texts."""

T = TypeVar("T")
Result = dict[str, Any]
Shard = tuple[int, int]
"""Its number, from 1, and the number of shards."""


class Results:
    """A folder with one JSON file a result, whole or not there: <part>-<key>.json."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, part: str, key: str, end: str = "json") -> Path:
        slug = re.sub(r"[^A-Za-z0-9._+@-]+", "-", key).strip("-.")
        return self.folder / f"{part}-{slug}.{end}"

    def weights(self, key: str) -> Path:
        """Returns the file in which a run leaves its weights."""
        return self.path("weights", key, "pt")

    def write(self, part: str, key: str, result: Result) -> None:
        write_atomic(self.path(part, key), json.dumps({"key": key, **result}))

    def measure(self, part: str, key: str, run: Callable[[], Result]) -> Result | None:
        """Keeps what `run` returns, and returns it; None where that is there already."""
        if self.path(part, key).exists():
            return None
        self.write(part, key, result := run())
        return result

    def read(self, part: str) -> dict[str, Result]:
        files = (json.loads(path.read_text(encoding="utf-8")) for path in sorted(self.folder.glob(f"{part}-*.json")))
        return {result.pop("key"): result for result in files}


class Grid:
    """The finished runs of the grid."""

    def __init__(self, runs: Mapping[str, Result]) -> None:
        self.results = list(runs.values())
        self.best = best_runs(runs)
        self.datasets = sorted({result["data"] for result in self.results})

    def runs(self, **facts: Any) -> list[Result]:
        """Returns runs with these facts, such as their variant, by rate and seed."""
        same = [result for result in self.results if facts.items() <= result.items()]
        return sorted(same, key=lambda result: (result["rate"], result["seed"]))

    def seeds(self, best: Result) -> list[float]:
        """Returns losses of all seeds at the rate of a best run."""
        return [loss_of(run) for run in self.runs(**{name: best[name] for name in ("data", "variant", "rate")})]

    def ranked(self, data: str) -> list[str]:
        """Returns variants with runs on a dataset, the lowest mean loss over seeds first, those with a loss of NaN
        last."""

        def loss(variant: str) -> float:
            mean = spread(self.seeds(self.best[data, variant])).mean if (data, variant) in self.best else math.nan
            return math.inf if math.isnan(mean) else mean

        return sorted(dict.fromkeys(run["variant"] for run in self.runs(data=data)), key=loss)


def loss_of(result: Result) -> float:
    """Returns the validation loss of a run, NaN of one that diverged."""
    return math.nan if result["loss"] is None else result["loss"]


def share(items: Sequence[T], shard: Shard) -> list[T]:
    return list(items[shard[0] - 1 :: shard[1]])


def run_key(data: str, variant: str, rate: float, seed: int) -> str:
    return f"{data}, {variant} @{rate:g} seed {seed}"


def best_runs(runs: Mapping[str, Result]) -> dict[tuple[str, str], Result]:
    """Returns (dataset, variant) -> the run of seed 0 with the lowest loss; none where no loss is a number."""
    known = [result for result in runs.values() if result["seed"] == 0 and result["loss"] is not None]
    known.sort(key=lambda result: (result["loss"], result["rate"]), reverse=True)
    return {(result["data"], result["variant"]): result for result in known}  # the last one stays


def run_grid(
    results: Results,
    data: Mapping[str, str],
    variants: Sequence[str],
    *,
    steps: int,
    seeds: int,
    shard: Shard,
    init_std: float = INIT_STD,
) -> None:
    """Runs what is not there yet; data: name -> folder; init_std: with which matrices start that have no rule.

    A shard has whole variants, as their further seeds run at the rate that their first seed found best; so no two
    shards have a run in common. Raises ValueError where results of other settings are there.
    """
    settings = {"steps": steps, "init_std": init_std}
    for key, result in results.read(PART).items():
        for name, value in settings.items():
            other = result.get(name, INIT_STD)  # early results name steps only
            if other != value:
                raise ValueError(
                    f"{results.folder} holds {key} with {name} = {other}, and not {value}: give another --work"
                )
    cells = share([(name, variant) for name in data for variant in variants], shard)
    by_data = {
        name: configs(data[name], {"steps": steps, "model": {"init_std": init_std}})
        for name in {name for name, _ in cells}
    }
    total, took = len(cells) * (len(RATES) + seeds - 1), []
    print(f"{PART}: shard {shard[0]} of {shard[1]}, {total} runs", flush=True)

    def wanted() -> Iterator[tuple[str, str, float, int]]:
        yield from ((name, variant, rate, 0) for name, variant in cells for rate in RATES)
        best = best_runs(results.read(PART))  # of the runs so far
        for cell in cells:
            if cell in best:
                yield from ((*cell, best[cell]["rate"], seed) for seed in range(1, seeds))

    for done, (name, variant, rate, seed) in enumerate(wanted(), 1):
        key = run_key(name, variant, rate, seed)
        weights = results.weights(key) if name == FOLLOWED and seed == 0 else None
        config = by_data[name][variant]
        config = dataclasses.replace(config, seed=seed, optimizer=dataclasses.replace(config.optimizer, lr=rate))
        facts = {"data": name, "variant": variant, "rate": rate, "seed": seed, "init_std": init_std}
        if result := results.measure(PART, key, lambda c=config, w=weights, f=facts: {**f, **run(c, w)}):
            took.append(result["seconds"])
            loss = "NaN" if result["loss"] is None else f"{result['loss']:.4f}"
            left = time_left(took, [], total - done)
            print(f"[{done}/{total}] {key}: loss {loss}, {result['seconds']:.0f} s; about {left} left", flush=True)

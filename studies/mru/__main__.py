"""`python -P -m matmix.studies.mru PART`: the parts of the study."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import tyro

from matmix.data.storage.files import write_atomic
from matmix.launch.lab.measuring import environment
from matmix.model.initialization import INIT_STD
from matmix.studies.mru import grid, growth, pictures, speed, tables
from matmix.studies.mru.grid import Result, Results
from matmix.studies.mru.variants import MRU_VARIANTS, VARIANTS
from matmix.train.arguments import parse_arguments
from matmix.train.process.console import guarded


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """Which MRU learns most from its context, what makes it so, and what stays in the range of float32.

        matmix prepare bundled:shakespeare --out datasets/shakespeare_char --model-type char --byte-fallback False \\
            --max-document-chars 4000 --validation-fraction 0.03
        matmix prepare bundled:shakespeare --out datasets/shakespeare --vocab-size 2048 --max-document-chars 4000 \\
            --validation-fraction 0.03
        matmix prepare bundled:shakespeare --out datasets/plays_char --tokenizer datasets/shakespeare_char/tokenizer \\
            --validation-fraction 0.1
        OMP_NUM_THREADS=1 python -P -m matmix.studies.mru grid --seeds 2 --shard 1/2 &
        OMP_NUM_THREADS=1 python -P -m matmix.studies.mru grid --seeds 2 --shard 2/2; wait
        python -P -m matmix.studies.mru growth; python -P -m matmix.studies.mru beyond
        python -P -m matmix.studies.mru speed; python -P -m matmix.studies.mru report

    Parts: `grid`, every variant on both datasets at four learning rates, and further seeds of the best rate; `growth`
    of norms along random tokens in layers that were not trained; `beyond`, the best models on characters along 8,192
    tokens of whole plays; `speed` of one layer, beside other mixers; `report`, which gathers what is there into one
    JSON, draws pictures and writes tables. Every result is a file in the folder `--work`; what is there is not measured
    again, except times. Processes that work at the same time are given a shard each.
    """

    part: tyro.conf.Positional[Literal["grid", "growth", "beyond", "speed", "report"]]
    """The part of the study."""
    data: tuple[str, ...] = ("characters=datasets/shakespeare_char", "subwords=datasets/shakespeare")
    """NAME=FOLDER of each dataset of `grid`."""
    plays: str = "datasets/plays_char"
    """Long documents in characters, of `beyond`."""
    work: Path = Path("runs/study_mru")
    """Folder of results and weights."""
    out: Path = Path("docs/pictures")
    """Folder of the pictures and the JSON."""
    variants: tuple[str, ...] = tuple(VARIANTS)
    """Of `grid` and `beyond`; mru = all MRUs."""
    steps: int = 400
    """Steps of a run of `grid`."""
    seeds: int = 1
    """Of `grid`: 1 + those that run at the best rate only."""
    init_std: float = INIT_STD
    """Of `grid`: the standard deviation with which matrices start that have no rule of their own."""
    shard: str = "1/1"
    """I/N: do the I-th of N parts of the work."""

    def __post_init__(self) -> None:
        if wrong := [text for text in self.data if not re.fullmatch("[^=]+=.+", text)]:
            raise ValueError(f"--data: {wrong[0]!r} should be NAME=FOLDER")
        if not re.fullmatch(r"\d+/\d+", self.shard) or not 1 <= self.place[0] <= self.place[1]:
            raise ValueError(f"--shard: {self.shard!r} should be I/N, I from 1 to N")
        if unknown := [name for name in self.names if name not in VARIANTS]:
            raise ValueError(f"--variants: unknown {'; '.join(unknown)}; known: {'; '.join(VARIANTS)}")
        if self.seeds < 1 or self.steps < 1:
            raise ValueError("--seeds and --steps are 1 or more")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(MRU_VARIANTS) if self.variants == ("mru",) else self.variants

    @property
    def place(self) -> tuple[int, ...]:
        """Returns the number of the shard, from 1, and the number of shards."""
        return tuple(map(int, self.shard.split("/")))

    def run(self) -> int:
        getattr(self, self.part)(Results(self.work))
        return 0

    def grid(self, results: Results) -> None:
        data = dict(text.split("=", 1) for text in self.data)
        grid.run_grid(
            results, data, self.names, steps=self.steps, seeds=self.seeds, shard=self.place, init_std=self.init_std
        )

    def growth(self, results: Results) -> None:
        for name, case in grid.share(list(growth.CASES.items()), self.place):
            _measure(results, "growth", name, lambda case=case: growth.growth(case))

    def beyond(self, results: Results) -> None:
        best = grid.best_runs(results.read(grid.PART))
        for name in grid.share([name for name in self.names if (grid.FOLLOWED, name) in best], self.place):
            facts = {"variant": name, "rate": best[grid.FOLLOWED, name]["rate"]}
            key = grid.run_key(grid.FOLLOWED, name, facts["rate"], 0)
            _measure(results, "beyond", key, lambda k=key, f=facts: f | growth.beyond(results.weights(k), self.plays))

    def speed(self, results: Results) -> None:
        """Measured again each time: times belong beside those of the same minutes."""
        for name, times in speed.speed().items():
            results.write("speed", name, times)

    def report(self, results: Results) -> None:
        """Gathers what is there, writes the record and the pictures to `out` and the tables to the folder of the
        results, and prints the tables. Raises ValueError where there is no result at all."""
        parts = {part: results.read(part) for part in (grid.PART, "growth", "beyond", "speed")}
        if not any(parts.values()):
            raise ValueError(f"{results.folder} holds no results: run another part first")
        self.out.mkdir(parents=True, exist_ok=True)
        write_atomic(self.out / "mru_study.json", json.dumps(record_of(parts), separators=(",", ":")) + "\n")
        text = tables.tables(parts)
        write_atomic(results.folder / "tables.md", text + "\n")
        print(text)
        for name, png in pictures.pictures(parts).items():
            write_atomic(self.out / f"mru_{name}.png", png)


def _measure(results: Results, part: str, key: str, run: Callable[[], Result]) -> None:
    if results.measure(part, key, run) is not None:
        print(f"{part}: {key}", flush=True)


def record_of(parts: dict[str, Any]) -> dict[str, Any]:
    """Returns the record that is committed: all results, with curves for the runs that are drawn only, and with losses
    by position for the best run of each variant only."""
    best = grid.best_runs(parts[grid.PART]).values()

    def kept(result: Result) -> Result:
        keep = {"position_loss": result in best, "curve": result in best and result["variant"] in pictures.DRAWN}
        return {name: value for name, value in result.items() if keep.get(name, True)}

    return {"environment": environment(), **parts, grid.PART: [kept(result) for result in parts[grid.PART].values()]}


def main(arguments: list[str]) -> int:
    prog = "python -P -m matmix.studies.mru"
    return guarded(lambda: parse_arguments(Study, arguments, prog=prog).run())


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

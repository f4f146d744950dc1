"""Which MRU learns most from its context, what makes it so, and what stays in the range of float32.

    matmix prepare bundled:shakespeare --out datasets/shakespeare_char --model-type char --byte-fallback False \\
        --max-document-chars 4000 --validation-fraction 0.03
    matmix prepare bundled:shakespeare --out datasets/shakespeare --vocab-size 2048 --max-document-chars 4000 \\
        --validation-fraction 0.03
    matmix prepare bundled:shakespeare --out datasets/plays_char --tokenizer datasets/shakespeare_char/tokenizer \\
        --validation-fraction 0.1
    OMP_NUM_THREADS=1 python -P -m matmix.launch.lab.studies.mru grid --seeds 2 --shard 1/2 &
    OMP_NUM_THREADS=1 python -P -m matmix.launch.lab.studies.mru grid --seeds 2 --shard 2/2; wait
    python -P -m matmix.launch.lab.studies.mru growth; python -P -m matmix.launch.lab.studies.mru beyond
    python -P -m matmix.launch.lab.studies.mru speed; python -P -m matmix.launch.lab.studies.mru report

Parts: `grid`, every variant on both datasets at four learning rates, and further seeds of the best rate; `growth` of
norms along random tokens in layers that were not trained; `beyond`, the best models on characters along 8,192 tokens of
whole plays; `speed` of one layer, beside other mixers; `report`, which gathers what is there into one JSON, draws
pictures and writes tables. Every result is a file in the folder `--work`; what is there is not measured again, except
times. Processes that work at the same time are given a shard each.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matmix.data.storage.files import write_atomic
from matmix.launch.lab.benchmarks.measuring.environment import environment
from matmix.launch.lab.studies.mru import beyond, grid, growth, pictures, speed, tables
from matmix.launch.lab.studies.mru.grid import Result, Results
from matmix.launch.lab.studies.mru.variants import MRU_VARIANTS, VARIANTS
from matmix.train.process.console import guarded

DATA = ("characters=datasets/shakespeare_char", "subwords=datasets/shakespeare")


def run_grid(results: Results, options: argparse.Namespace) -> None:
    wanted = {"steps": options.steps, "seeds": options.seeds, "shard": options.shard}
    grid.run_grid(results, options.data, options.variants, **wanted)


def run_growth(results: Results, options: argparse.Namespace) -> None:
    for name, case in grid.share(list(growth.CASES.items()), options.shard):
        _measure(results, "growth", name, lambda case=case: growth.growth(case))


def run_beyond(results: Results, options: argparse.Namespace) -> None:
    best = grid.best_runs(results.read(grid.PART))
    for name in grid.share([name for name in options.variants if (grid.FOLLOWED, name) in best], options.shard):
        facts = {"variant": name, "rate": best[grid.FOLLOWED, name]["rate"]}
        key = grid.run_key(grid.FOLLOWED, name, facts["rate"], 0)
        weights = results.weights(key)
        _measure(results, "beyond", key, lambda w=weights, f=facts: {**f, **beyond.beyond(w, options.plays)})


def _measure(results: Results, part: str, key: str, run: Callable[[], Result]) -> None:
    if results.measure(part, key, run) is not None:
        print(f"{part}: {key}", flush=True)


def run_speed(results: Results, options: argparse.Namespace) -> None:
    for name, found in speed.speed(speed.CASES).items():
        # Times belong beside those of the same minutes.
        results.measure("speed", name, lambda found=found: found, again=True)


def run_report(results: Results, options: argparse.Namespace) -> None:
    """Gathers what is there, writes the record and the pictures to `--out` and the tables to the folder of the results,
    and prints the tables. Raises ValueError where there is no result at all."""
    found = {part: results.read(part) for part in PARTS if part != "report"}
    if not any(found.values()):
        raise ValueError(f"{results.folder} holds no results: run another part first")
    options.out.mkdir(parents=True, exist_ok=True)
    write_atomic(options.out / "mru_study.json", json.dumps(record_of(found), separators=(",", ":")) + "\n")
    text = tables.tables(found)
    write_atomic(results.folder / "tables.md", text + "\n")
    print(text)
    for name, png in pictures.pictures(found).items():
        write_atomic(options.out / f"mru_{name}.png", png)


def record_of(found: dict[str, Any]) -> dict[str, Any]:
    """What is committed: curves of the runs that are drawn, losses by position of each variant's best."""
    best = grid.best_runs(found[grid.PART]).values()
    runs = []
    for result in found[grid.PART].values():
        left_out = () if result in best else ("position_loss",)
        if result not in best or result["variant"] not in pictures.DRAWN:
            left_out += ("curve",)
        runs.append({name: value for name, value in result.items() if name not in left_out})
    return {"environment": environment(), **found, grid.PART: runs}


PARTS: dict[str, Callable[[Results, argparse.Namespace], None]] = {
    "grid": run_grid,
    "growth": run_growth,
    "beyond": run_beyond,
    "speed": run_speed,
    "report": run_report,
}


def _dataset(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise argparse.ArgumentTypeError(f"{text!r} should be NAME=FOLDER")
    return name, path


def _shard(text: str) -> tuple[int, int]:
    if (found := re.fullmatch(r"(\d+)/(\d+)", text)) and 1 <= int(found[1]) <= int(found[2]):
        return int(found[1]), int(found[2])
    raise argparse.ArgumentTypeError(f"{text!r} should be I/N, I from 1 to N")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -P -m matmix.launch.lab.studies.mru",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("part", choices=PARTS)
    parser.add_argument(
        "--data", nargs="+", type=_dataset, default=[_dataset(text) for text in DATA], metavar="NAME=FOLDER",
        help=f"datasets of `grid` (default: {' '.join(DATA)})",
    )  # fmt: skip
    parser.add_argument("--plays", default="datasets/plays_char", help="long documents in characters, of `beyond`")
    parser.add_argument("--work", type=Path, default=Path("runs/study_mru"), help="folder of results and weights")
    parser.add_argument("--out", type=Path, default=Path("docs/pictures"), help="folder of the pictures and the JSON")
    parser.add_argument(
        "--variants", nargs="+", default=list(VARIANTS), metavar="NAME", help="of `grid` and `beyond`; mru = all MRUs"
    )
    parser.add_argument("--steps", type=int, default=400, help="steps of a run of `grid`")
    parser.add_argument("--seeds", type=int, default=1, help="of `grid`: 1 + those that run at the best rate only")
    parser.add_argument(
        "--shard", type=_shard, default=(1, 1), metavar="I/N", help="do the I-th of N parts of the work"
    )
    options = parser.parse_args(arguments)

    def run() -> int:
        options.data = dict(options.data)
        if options.variants == ["mru"]:
            options.variants = list(MRU_VARIANTS)
        if unknown := [name for name in options.variants if name not in VARIANTS]:
            raise ValueError(f"--variants: unknown {'; '.join(unknown)}; known: {'; '.join(VARIANTS)}")
        if options.seeds < 1 or options.steps < 1:
            raise ValueError("--seeds and --steps are 1 or more")
        PARTS[options.part](Results(options.work), options)
        return 0

    return guarded(run)


if __name__ == "__main__":
    raise SystemExit(main())

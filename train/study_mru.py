"""Which constructions of MRU state matrices stay within the range of float32, and what they cost and learn.

    matmix prepare bundled:shakespeare --out datasets/shakespeare --vocab-size 2048 --max-document-chars 4000 \\
        --validation-fraction 0.03
    matmix prepare bundled:shakespeare --out datasets/plays --tokenizer datasets/shakespeare/tokenizer \\
        --validation-fraction 0.1
    python -P -m matmix.train.study_mru all --data datasets/shakespeare --plays datasets/plays

Parts: `growth` of the norm along random tokens at given sizes of the weights; `train`, the quickstart with every
variant for equal tokens; `longer`, the bounded ones for four times as many; `beyond`, norms of the trained models along
8,192 tokens; `long`, training at 8,192 tokens; `speed` of one layer; `report`, which gathers what is there into one
JSON, draws pictures and prints tables. Every result is a file in the folder `--work`; what is there is not measured
again, except times.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matmix.kernels.mru.constructions import BOUNDED_CONSTRUCTIONS
from matmix.train.console import guarded

VARIANTS = (
    "cayley",
    "householder",
    "ldu_newton_schulz",
    "ldu",
    "qr",
    "identity_plus",
    "ldu+decay",
    "identity_plus+decay",
    "cayley+decay",
)
"""Constructions, and some with `decay`."""

LONGER = 4
"""`longer` takes so many times the steps of `train`."""

NO_MIXER = "none"
"""The model without its MRU layers, in `train`: what a token by itself says of the next."""

RATES = (3e-3, 1e-3, 3e-4, 1e-4)
"""Learning rates: the quickstart's, and the next one where steps or the validation gave NaN; all for the default."""


def options_of(variant: str) -> dict[str, Any]:
    """`construction` and `decay` of MRUConfig."""
    construction, _, decay = variant.partition("+")
    return {"construction": construction, "decay": decay == "decay"}


class Results:
    """A folder with one JSON file a result."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, part: str, key: str) -> Path:
        return self.folder / f"{part}-{key}.json"

    def weights(self, key: str) -> Path:
        """Where a run of `train` leaves its weights."""
        return self.folder / f"weights-{key}.pt"

    def measure(self, part: str, key: str, run: Callable[[], dict[str, Any]]) -> None:
        """Keep what `run` returns, unless it is there already."""
        path = self.path(part, key)
        if path.exists():
            return
        print(f"{part} {key}", flush=True)
        result = run()
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text(json.dumps(result), encoding="utf-8")
        os.replace(temporary, path)

    def read(self, part: str) -> dict[str, dict[str, Any]]:
        """All results of a part, by key, in the order of the variants."""
        found = {path.stem.removeprefix(f"{part}-"): path for path in self.folder.glob(f"{part}-*.json")}
        return {key: json.loads(found[key].read_text(encoding="utf-8")) for key in sorted(found, key=place)}


def place(key: str) -> tuple[int, float]:
    """Where a result stands among others: by variant, then from the largest learning rate down."""
    variant, _, rate = key.partition("@")
    return (VARIANTS.index(variant) if variant in VARIANTS else len(VARIANTS)), -float(rate or 0)


def run_part(part: str, options: argparse.Namespace) -> None:
    """One part for all variants asked for."""
    from matmix.train import study_mru_measures, study_mru_report, study_mru_training

    results, variants = Results(options.work), tuple(options.variants.split(","))
    if part == "growth":
        for variant in variants:
            results.measure(part, variant, lambda variant=variant: study_mru_measures.growth(options_of(variant)))
    elif part == "train":
        for variant in (*variants, NO_MIXER):
            for rate in RATES:
                key = f"{variant}@{rate:g}"
                arguments = (options_of(variant), rate, options.data, options.steps, results.weights(key))
                results.measure(part, key, lambda arguments=arguments: study_mru_training.train_short(*arguments))
                found = results.read(part)[key]
                if variant != "cayley" and not found["skipped"] and found["validation_loss"] is not None:
                    break
    elif part == "longer":
        for variant in (*(name for name in variants if name in BOUNDED_CONSTRUCTIONS), NO_MIXER):
            key = f"{variant}@{RATES[0]:g}"
            weights = results.weights(f"longer-{key}")
            arguments = (options_of(variant), RATES[0], options.data, LONGER * options.steps, weights)
            results.measure(part, key, lambda arguments=arguments: study_mru_training.train_short(*arguments))
    elif part == "beyond":
        for key, result in results.read("train").items():
            if key.split("@")[0] in variants and result["validation_loss"] is not None:
                path = results.weights(key)
                results.measure(part, key, lambda path=path: study_mru_measures.beyond(path, options.plays))
    elif part == "long":
        for variant in variants:
            arguments = (options_of(variant), options.plays, options.long_steps)
            results.measure(part, variant, lambda arguments=arguments: study_mru_training.train_long(*arguments))
    elif part == "speed":
        for key, result in study_mru_measures.speed({name: options_of(name) for name in variants}).items():
            results.path(part, key).unlink(missing_ok=True)  # a time belongs beside those of the same minutes
            results.measure(part, key, lambda result=result: result)
    else:
        study_mru_report.report(results, options.out)


PARTS = ("growth", "train", "longer", "beyond", "long", "speed", "report")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m matmix.train.study_mru",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("part", choices=[*PARTS, "all"])
    parser.add_argument("--data", default="datasets/shakespeare", help="dataset of `train`")
    parser.add_argument("--plays", default="datasets/plays", help="dataset with long documents, of `beyond` and `long`")
    parser.add_argument("--work", type=Path, default=Path("runs/study_mru"), help="folder of results and weights")
    parser.add_argument("--out", type=Path, default=Path("docs/pictures"), help="folder of the pictures and the JSON")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="separated by commas")
    parser.add_argument("--steps", type=int, default=250, help="steps of `train`")
    parser.add_argument("--long-steps", type=int, default=30, help="steps of `long`")
    options = parser.parse_args(arguments)

    def run() -> int:
        unknown = [name for name in options.variants.split(",") if name not in VARIANTS]
        if unknown:
            raise ValueError(f"--variants: unknown {', '.join(unknown)}; known: {', '.join(VARIANTS)}")
        for part in PARTS if options.part == "all" else [options.part]:
            run_part(part, options)
        return 0

    return guarded(run)


if __name__ == "__main__":
    raise SystemExit(main())

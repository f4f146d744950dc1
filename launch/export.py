"""`matmix export RUN --out DIR` and `matmix import --from KIND FILE OUT`: write directories that transformers loads.
`matmix average RUN` writes a run."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Literal

import tyro

from matmix.data.artifacts import shell_line
from matmix.train.arguments import RunFolder
from matmix.train.state import Weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export:
    """Write a run's weights as a directory that transformers loads by itself."""

    source: RunFolder = ""
    out: str | None = None
    """Directory to write (must not hold anything else)."""
    check: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None
    """Compare the files of an export with their hashes."""
    step: int | None = None
    """Checkpoint to export; default: the newest."""
    weights: Weights = "raw"
    """The weights that the run goes on with, or with ema their average. What is not asked for is not averaged: whether
    the average is the better one depends on its decay and the steps, and evaluations tell."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Number format of the weights."""
    max_shard_bytes: int = 5 * 10**9
    """Size of a weight file."""
    license: str = ""
    """License of the weights for the model card, such as apache-2.0; default: unknown."""
    language: tuple[str, ...] = ()
    """Languages of the texts for the model card, such as en; default: unknown."""
    onnx: bool = False
    """Also write model.onnx, of models of texts; needs the extra onnx."""
    control: tuple[RunFolder, ...] = ()
    """Runs on the same data whose validation losses the model card puts beside that of the model. Those that a
    comparison trained beside it are found without."""

    def run(self, rest: Sequence[str], typed: Sequence[str]) -> int:
        from matmix.use.exporting import check_export, export_run

        if self.check is not None:
            if self.source or self.out is not None:
                raise ValueError("--check DIR looks at an export that is there: leave RUN and --out out")
            check_export(self.check)
            return 0
        if not self.source or self.out is None:
            raise ValueError("matmix export RUN --out DIR, or matmix export --check DIR")
        options = {name: getattr(self, name) for name in ("step", "weights", "dtype", "max_shard_bytes", "onnx")}
        card = {"licence": self.license, "languages": self.language, "controls": self.control}
        export_run(self.source, self.out, **options, **card)
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Average:
    """Make a run of the mean of the weights of a run's last checkpoints, and evaluate it beside the newest of them.

    evaluate, export, generate and init.from take it as any run. Sums are in float64; the optimizer's state is that of
    the newest checkpoint.
    """

    source: RunFolder
    last: int = 5
    """Number of checkpoints, the newest of the run."""
    out: Annotated[str, tyro.conf.arg(metavar="OTHER_RUN")] = ""
    """Run to make (must not hold anything else); default: RUN-last-N."""

    def run(self, rest: Sequence[str], typed: Sequence[str]) -> int:
        from matmix.use.averaging import average_run

        out = self.out or f"{self.source.rstrip('/')}-last-{self.last}"
        lines = average_run(self.source, out, last=self.last)
        export = shell_line("matmix", "export", out, "--out", "DIR")
        print("\n".join([*lines, f"The mean is the run {out}. Next: {export}"]))
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Import:
    """Turn a checkpoint of another project into an export directory."""

    kind: Annotated[Literal["hydra", "mru-lm"], tyro.conf.arg(name="from")]
    """Whose it is."""
    file: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="FILE")]
    """.safetensors, .pt, .bin or a directory in transformers' layout."""
    out: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="OUT")]
    """Directory to write."""

    def run(self, rest: Sequence[str], typed: Sequence[str]) -> int:
        from matmix.use.exporting import import_reference

        import_reference(self.kind, self.file, self.out)
        return 0

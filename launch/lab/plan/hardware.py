"""The hardware of a plan: vendors' figures for GPUs, and a file of your own for everything else."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import dacite

from matmix.data.artifacts import shell_line
from matmix.train.arguments import unknown_key
from matmix.train.meters.speed import PEAK_FLOPS, Arithmetic
from matmix.train.recipe_files import read_toml

GB = 10**9

# One failure for every 50,700 GPU-hours: the 419 unexpected interruptions that Llama 3's training on 16,384 H100 met in
# 54 days (arXiv 2407.21783, section 3.3.4).
MTBF_GPU_HOURS = 50_700.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Hardware of a run, of one rank where nothing else is said. The file of `--cluster` sets these in a TOML table."""

    gpu: str
    """Name, for people."""
    peak_tflops: float
    """Dense bf16 peak of a GPU in 10^12 FLOP/s."""
    peak_tflops_tf32: float | None = None
    """The same in tf32, for recipes in fp32 where torch is set to compute in it."""
    peak_tflops_fp32: float | None = None
    """The same in fp32."""
    memory_gb: float
    """Memory of a GPU in 10^9 bytes."""
    gpus_per_node: int = 8
    """GPUs that the fast links join."""
    node_gb_per_s: float
    """What a GPU sends to others in its node, 10^9 bytes/s in one direction."""
    network_gb_per_s: float = 50.0
    """What a GPU sends to other nodes; 50 is one 400 Gb/s adapter for each GPU."""
    host_gb_per_s: float = 25.0
    """Copies from a GPU to its host's memory, which training waits for when it saves."""
    launch_microseconds: float = 5.0
    """What the host needs to launch a kernel from PyTorch; assumed, not measured."""
    mtbf_gpu_hours: float = MTBF_GPU_HOURS
    """GPU-hours between failures."""
    restart_minutes: float = 5.0
    """From a failure to the first new step: requeue, start, load."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and value <= 0:
                raise ValueError(f"{field.name} must be positive, got {value}")

    def peak(self, kind: Arithmetic) -> float:
        """Dense peak of a GPU in FLOP/s. Raises ValueError where it is not known."""
        name = "peak_tflops" if kind == "bf16" else f"peak_tflops_{kind}"
        if (tflops := getattr(self, name)) is None:
            raise ValueError(
                f"the recipe computes in {kind}, and the peak of {self.gpu} in that is not known: set {name} in the "
                f"file of --cluster, or plan with {shell_line('--engine.precision', 'bf16')}"
            )
        return tflops * 1e12


def _known(name: str, memory_gb: float, node_gb_per_s: float, network_gb_per_s: float = 50.0) -> Cluster:
    peaks = {kind: peak / 1e12 for kind, peak in PEAK_FLOPS[name].items()}
    return Cluster(
        gpu=name,
        peak_tflops=peaks["bf16"],
        peak_tflops_tf32=peaks["tf32"],
        peak_tflops_fp32=peaks["fp32"],
        memory_gb=memory_gb,
        node_gb_per_s=node_gb_per_s,
        network_gb_per_s=network_gb_per_s,
    )


# Data sheets: memory, and half of the links' total of both directions (NVLink 3, 4, 5; Infinity Fabric). A100 systems
# came with 200 Gb/s adapters.
GPUS = {
    "a100": _known("A100", 80, 300, 25),
    "h100": _known("H100", 80, 450),
    "h200": _known("H200", 141, 450),
    "b200": _known("B200", 180, 900),
    "mi300x": _known("MI300X", 192, 448),
}


def read_cluster(path: Path, gpu: str | None = None) -> Cluster:
    """A cluster from a TOML file whose keys are Cluster's fields; `gpu` names one of GPUS that fills in the rest.

    Raises FileNotFoundError, or ValueError (one line) for an unknown key, a missing or a bad value.
    """
    if not path.is_file():
        raise FileNotFoundError(f"cluster file not found: {path}")
    values = read_toml(path)
    known = {field.name for field in dataclasses.fields(Cluster)}
    for key in values:
        if key not in known:
            raise unknown_key(key, Cluster, str(path))
    named = (gpu or str(values.get("gpu", ""))).lower()
    base = dataclasses.asdict(GPUS[named]) if named in GPUS else {}
    values.pop("gpu", None) if named in GPUS else None
    try:
        return dacite.from_dict(
            Cluster, {**base, **values}, dacite.Config(strict=True, type_hooks={float: _number}, check_types=True)
        )
    except (dacite.DaciteError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None


def _number(value: object) -> object:
    return float(value) if type(value) is int else value


def find_gpu(name: str) -> Cluster:
    """The entry of GPUS. Raises ValueError that lists them."""
    if name.lower() not in GPUS:
        raise ValueError(f"--gpu {name} is not known: use one of {', '.join(GPUS)}, or describe it with --cluster FILE")
    return GPUS[name.lower()]

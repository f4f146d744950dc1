"""How long a step and a run take on a cluster: exchanges between GPUs, failures and checkpoints, and which engine,
micro-batch and checkpointing are fastest there."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from matmix.data.artifacts import read_json_lines, shell_line
from matmix.train.arguments import read_table
from matmix.train.config import RunConfig
from matmix.train.engine.kinds import parts_to_save
from matmix.train.estimate import FLOAT, Mode, checkpointing_mode
from matmix.train.estimate.plan import Plan, exchanged, make_plan
from matmix.train.meters.speed import PEAK_FLOPS, Arithmetic, arithmetic
from matmix.train.recipe_files import read_toml

GB = 10**9
# Assumed where nobody has measured: what well-tuned attention models reach in bf16 on such GPUs.
ASSUMED_EFFICIENCY = 0.35
USABLE = 0.92  # share of a GPU's memory that a plan may fill: the CUDA context and fragments take the rest
MODES: tuple[Mode, ...] = ("none", "selective by op", "selective", "full")  # by what they recompute


class Collective(NamedTuple):
    """One kind of exchange."""

    what: str
    bytes: float  # sent by each rank in a step
    ranks: int  # that take part
    within_node: bool

    def seconds(self, cluster: Cluster) -> float:
        speed = cluster.node_gb_per_s if self.within_node else cluster.network_gb_per_s
        return self.bytes / (speed * GB)


def collectives(config: RunConfig, plan: Plan, gpus_per_node: int, mode: Mode | None = None) -> list[Collective]:
    """Returns the exchanges of the engine of `config` in a step of `plan`; mode: of checkpointing activations."""
    exchanges = exchanged(config, plan, mode=mode)
    return [Collective(one.what, FLOAT * one.sent, one.ranks, one.span <= gpus_per_node) for one in exchanges]


class Risk(NamedTuple):
    """Seconds, but for `lost`, a share of the time."""

    mtbf: float  # mean time between failures of the whole run
    stall: float  # training waits for each save
    interval: float  # between saves as configured
    best_interval: float  # sqrt(2 stall mtbf): Young (1974), Daly (2006)
    restart: float

    def lost(self, interval: float) -> float:
        """Returns the share of the time that saving, work done again and restarts cost, to first order (Daly's eq.
        9)."""
        return self.stall / interval + (interval / 2 + self.restart) / self.mtbf


def assess(config: RunConfig, plan: Plan, cluster: Cluster, step_seconds: float, stall: float | None = None) -> Risk:
    """stall: seconds that a save stops training, as measured; None = the copy of a rank's part to its host."""
    if stall is None:
        # Weights and what the optimizer keeps; every rank copies its part.
        elements = plan.sizes.parameters + plan.sizes.moments
        stall = elements * FLOAT / parts_to_save(config.engine, plan.ranks) / (cluster.host_gb_per_s * GB)
    mtbf = cluster.mtbf_gpu_hours * 3600 / plan.ranks
    interval = (config.checkpoint.every or config.steps) * step_seconds
    return Risk(mtbf, stall, interval, math.sqrt(2 * stall * mtbf), 60 * cluster.restart_minutes)


class Estimate(NamedTuple):
    """A plan on a cluster."""

    config: RunConfig
    plan: Plan
    mode: Mode
    traffic: list[Collective]
    arithmetic: Arithmetic
    compute_seconds: float  # of a step, with the optimizer's
    update_seconds: float  # of the optimizer's matrix products
    copy_seconds: float  # to the host's memory and back, which the arithmetic waits for
    traffic_seconds: float
    launch_seconds: float  # at least; of the host
    fits: bool

    @property
    def step_seconds(self) -> float:
        """Exchanges run beside the arithmetic, and the host launches both ahead of them: the slowest counts."""
        return max(self.compute_seconds + self.copy_seconds, self.traffic_seconds, self.launch_seconds)

    @property
    def units_per_second(self) -> float:
        """Tokens or images, as the plan says."""
        return self.plan.units_per_step / self.step_seconds

    @property
    def seconds(self) -> float:
        """Seconds of the whole run."""
        return self.step_seconds * self.plan.steps


def measured_efficiency(run: Path) -> float:
    """Returns the median utilisation that a run recorded over its second half. Raises ValueError where it has none."""
    path = run / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"--measured {run}: there is no metrics.jsonl; name the directory of a run")
    records = read_json_lines(path)
    shares = [record["mfu"] for record in records if record.get("kind") == "train" and record.get("mfu")]
    if not shares:
        raise ValueError(f"--measured {run}: it recorded no utilisation, as its device has no known peak; give --mfu")
    return statistics.median(shares[len(shares) // 2 :])


def estimate(config: RunConfig, ranks: int, cluster: Cluster, efficiency: float, mode: Mode | None = None) -> Estimate:
    """Returns the plan of `config` with its times. Raises ValueError where the batch does not divide over the ranks."""
    mode = mode or checkpointing_mode(config)
    plan = make_plan(config, ranks, mode=mode)
    kind = arithmetic(config.engine.precision)
    # Forward, backward and what checkpointing runs again; by op matrix products are kept, and only they count.
    forwards = 3 + {"selective": 1 / config.engine.selective_every, "full": 1.0}.get(mode, 0.0)
    flops = forwards * plan.flops_per_unit * plan.units_per_step
    traffic = collectives(config, plan, cluster.gpus_per_node, mode)
    update = plan.update.flops and plan.update.flops / (cluster.peak(arithmetic(plan.update.precision)) * efficiency)
    compute = flops / (ranks * cluster.peak(kind) * efficiency) + update
    # Compiled blocks launch fewer kernels than they have ops, nobody knows beforehand how many.
    launches = 0.0 if config.engine.compile else plan.computed_ops * cluster.launch_microseconds * 1e-6
    exchanging = sum(part.seconds(cluster) for part in traffic)
    copying = plan.copied / (cluster.host_gb_per_s * GB)
    seconds = {"compute_seconds": compute, "update_seconds": update, "copy_seconds": copying}
    seconds |= {"traffic_seconds": exchanging, "launch_seconds": launches}
    return Estimate(config, plan, mode, traffic, kind, **seconds, fits=fits(plan, cluster))


def fits(plan: Plan, cluster: Cluster) -> bool:
    """Returns whether a rank's memory holds what it needs."""
    return plan.total_bytes <= USABLE * cluster.memory_gb * 1e9


def candidates(config: RunConfig, ranks: int, cluster: Cluster) -> list[RunConfig]:
    """Returns the configs that a suggestion chooses from: engines, meshes and micro-batches, but the same global batch
    and context."""
    context = config.engine.context
    rows, rest = divmod(config.global_batch_size * context, ranks)
    if rest or ranks % context:
        return []
    engines = [("fsdp2", 1)]
    node = max(cluster.gpus_per_node, context)
    if 1 < node < ranks and ranks % node == 0:
        engines.append(("fsdp2", ranks // node))
    if ranks > 1:
        engines.append(("ddp", 1))
    micros = [size for size in range(1, rows + 1) if rows % size == 0 and size * config.positions % context == 0]
    # The largest, and some down to the smallest, where only those fit.
    micros = sorted({*micros[-6:], *(micros[len(micros) * sixth // 6] for sixth in range(6) if micros)})
    return [
        replace(
            config, engine=replace(config.engine, name=name, replicate=replicas, offload=False), micro_batch_size=micro
        )
        for (name, replicas), micro in itertools.product(engines, micros)
    ]


def in_contexts(config: RunConfig, ranks: int) -> Iterator[RunConfig]:
    """Yields `config`, and then in larger contexts, which hold less of each row on a rank, where its model and data can
    be cut so."""
    yield config
    context = config.engine.context
    while (context := 2 * context) <= ranks:
        try:
            yield replace(
                config, engine=replace(config.engine, name="fsdp2", replicate=1, context=context, offload=False)
            )
        except ValueError:
            return


def suggest(config: RunConfig, ranks: int, cluster: Cluster, efficiency: float) -> list[Estimate]:
    """Returns the estimates that fit, the fastest first; among equals the one that computes least, then the larger
    micro-batch, then less memory. Where none fits, those in the smallest larger context in which some do."""

    def order(one: Estimate) -> tuple:
        last = -one.plan.micro_batch_size, one.plan.total_bytes
        return round(one.step_seconds, 6), one.compute_seconds, MODES.index(one.mode), *last

    for wider in in_contexts(config, ranks):
        choices = itertools.product(candidates(wider, ranks, cluster), MODES)
        estimates = [estimate(candidate, ranks, cluster, efficiency, mode=mode) for candidate, mode in choices]
        if fitting := [one for one in estimates if one.fits]:
            return sorted(fitting, key=order)
    return []


def options_of(one: Estimate, config: RunConfig) -> list[str]:
    """Returns the command-line options that turn `config` into an estimate's config, as words; [] for none."""
    engine, old = one.config.engine, config.engine
    by = {"none": ("none", old.selective_by), "full": ("full", old.selective_by)}
    mode, selective_by = by.get(one.mode, ("selective", "op" if one.mode == "selective by op" else "block"))
    changes = {
        "engine.name": (old.name, engine.name),
        "engine.replicate": (old.replicate, engine.replicate),
        "engine.offload": (old.offload, engine.offload),
        "engine.context": (old.context, engine.context),
        "micro-batch-size": (config.micro_batch_size, one.plan.micro_batch_size),
        "engine.activation-checkpointing": (old.activation_checkpointing, mode),
        "engine.selective-by": (old.selective_by, selective_by),
    }
    return [word for name, (before, new) in changes.items() if before != new for word in (f"--{name}", str(new))]


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
    """Bytes that a GPU sends to others in its node, 10^9 bytes/s in one direction."""
    network_gb_per_s: float = 50.0
    """Bytes that a GPU sends to other nodes, likewise; 50 is one 400 Gb/s adapter for each GPU."""
    host_gb_per_s: float = 25.0
    """Copies between a GPU and its host's memory, which training waits for when it saves or offloads."""
    launch_microseconds: float = 5.0
    """Time in which the host launches a kernel from PyTorch; assumed, not measured."""
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
        """Returns the dense peak of a GPU in FLOP/s. Raises ValueError where it is not known."""
        name = "peak_tflops" if kind == "bf16" else f"peak_tflops_{kind}"
        if (tflops := getattr(self, name)) is None:
            advice = f"set {name} in the file of --cluster, or plan with {shell_line('--engine.precision', 'bf16')}"
            raise ValueError(
                f"the recipe computes in {kind}, and the peak of {self.gpu} in that is not known: {advice}"
            )
        return tflops * 1e12


def _known(name: str, memory_gb: float, node_gb_per_s: float, **options: float) -> Cluster:
    peaks = {f"peak_tflops_{kind}": peak / 1e12 for kind, peak in PEAK_FLOPS[name].items()}
    options |= {"peak_tflops": peaks.pop("peak_tflops_bf16"), **peaks}
    return Cluster(gpu=name, memory_gb=memory_gb, node_gb_per_s=node_gb_per_s, **options)


# Data sheets: memory, and half of the links' total of both directions (NVLink 3, 4, 5; Infinity Fabric). A100 systems
# came with 200 Gb/s adapters.
GPUS = {
    "a100": _known("A100", 80, 300, network_gb_per_s=25.0),
    "h100": _known("H100", 80, 450),
    "h200": _known("H200", 141, 450),
    "b200": _known("B200", 180, 900),
    "mi300x": _known("MI300X", 192, 448),
}


def read_cluster(path: Path, gpu: str | None = None) -> Cluster:
    """Reads a cluster from a TOML file whose keys are Cluster's fields; `gpu` names one of GPUS that fills in the rest.
    Raises FileNotFoundError, or ValueError (one line) for an unknown key, a missing or a bad value."""
    if not path.is_file():
        raise FileNotFoundError(f"cluster file not found: {path}")
    values = read_toml(path)
    named = (gpu or str(values.get("gpu", ""))).lower()
    if named in GPUS:
        values = {**dataclasses.asdict(GPUS[named]), **values, "gpu": GPUS[named].gpu}
    return read_table(Cluster, values, str(path))


def find_gpu(name: str) -> Cluster:
    """Returns the entry of GPUS. Raises ValueError that lists them."""
    if name.lower() not in GPUS:
        raise ValueError(f"--gpu {name} is not known: use one of {', '.join(GPUS)}, or describe it with --cluster FILE")
    return GPUS[name.lower()]

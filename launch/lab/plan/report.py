"""Describes a plan: memory, traffic, time, risk, warnings, and the fastest settings that fit."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matmix.data.artifacts import shell_line
from matmix.launch.lab.plan import estimate as plans
from matmix.launch.lab.plan.estimate import Cluster, Estimate, Risk
from matmix.model.flops import flops_by_part
from matmix.train.config import RunConfig
from matmix.train.estimate.plan import Plan, make_plan, vocabulary_words, with_steps_of_epochs, with_vocabulary
from matmix.train.words import duration, short_number

FEW_TOKENS = 2048  # a pass over fewer leaves most of a large GPU idle
_POSITIONS = {"tokens": "tokens", "images": "patches"}
"""Unit of a task -> what the positions of its sequences are."""
WORTH_A_WARNING = 0.01  # share of the run's time
WORTH_SECONDS = 60  # of it; below, nobody waits for them
MANY_EPOCHS = 4  # up to about four passes repeated data are nearly as good as new (arXiv 2305.16264)


def find_warnings(one: Estimate, cluster: Cluster, risk: Risk) -> list[str]:
    """Returns the warnings about an estimate, one line each."""
    config, plan = one.config, one.plan
    tokens = plan.micro_batch_size * config.positions // config.engine.context
    computing, exchanging = duration(one.compute_seconds), duration(one.traffic_seconds)
    host, launches = duration(one.launch_seconds), one.launch_seconds > max(one.compute_seconds, one.traffic_seconds)
    notes = {
        f"a rank needs {plan.total_bytes / 1e9:.0f} GB of the {cluster.memory_gb * plans.USABLE:.0f} GB that can "
        f"be used of a {cluster.gpu}: take a smaller micro-batch, checkpointing, or a suggestion below": not one.fits,
        f"global batch too small for the mesh: a rank sees {tokens} {_POSITIONS.get(plan.unit, plan.unit)} in a pass, "
        f"which leaves most of a {cluster.gpu} idle; use fewer GPUs or a larger global_batch_size": tokens < FEW_TOKENS,
        f"exchanges between GPUs ({exchanging} a step) take longer than arithmetic ({computing}): the batch is too "
        "small for the mesh, or the mesh too wide": one.traffic_seconds > one.compute_seconds,
        f"a step is too small for one {cluster.gpu}: to launch its kernels takes the host {host}, their "
        f"arithmetic {computing}; a larger micro_batch_size, or --engine.compile, launches fewer": launches,
    }
    warnings = [note for note, holds in notes.items() if holds]
    if config.engine.context > 1 and (whole := _whole_rows(one, cluster)):
        warnings.append(
            f"whole rows fit into a rank's memory ({whole.total_bytes / 1e9:.0f} GB): without engine.context = "
            f"{config.engine.context} layers send nothing, and a pass has as many tokens with a smaller micro-batch"
        )
    available, needed = config.modality.size(config.data), plan.units_per_step * plan.steps
    # None where the data is not on this machine, or has no end.
    if available is not None and needed > MANY_EPOCHS * available:
        reads = f"the run reads {needed / available:.1f} times the {available:,} {plan.unit} of the training split"
        less = f"beyond about {MANY_EPOCHS} passes repeated data teach less and less"
        warnings.append(f"data repeats: {reads}; {less}")
    best = min(risk.best_interval, one.seconds)
    more = risk.lost(risk.interval) - risk.lost(best)
    if more > WORTH_A_WARNING and more * one.seconds > WORTH_SECONDS:
        steps = max(1, round(best / one.step_seconds))
        digits = max(0, int(math.log10(steps)) - 1)
        steps = min(round(steps, -digits), config.steps)
        every = f"{config.checkpoint.every or config.steps} steps ({duration(risk.interval)})"
        lost = f"{risk.lost(risk.interval):.1%} of the time to failures, one every {duration(risk.mtbf)}"
        better = f"every {duration(best)} is best: {shell_line('--checkpoint.every', steps)}"
        warnings.append(f"a checkpoint every {every} loses {lost}; {better}")
    return warnings


def _whole_rows(one: Estimate, cluster: Cluster) -> Plan | None:
    """Returns the plan of passes of one row without a context, if the global batch has rows enough and they fit."""
    engine = dataclasses.replace(one.config.engine, context=1)
    config = dataclasses.replace(one.config, engine=engine, micro_batch_size=1)
    if config.global_batch_size % one.plan.ranks:
        return None
    plan = make_plan(config, one.plan.ranks, mode=one.mode)
    return plan if plans.fits(plan, cluster) else None


SUGGESTIONS = 3


def describe_plan(given: RunConfig, overrides: Sequence[str], verb: Any, *, is_phase: bool = False) -> list[str]:
    """Returns the lines that `matmix plan` prints. given: the config of the recipe with the overrides; verb: the
    `PlanRun`; is_phase: it is one of several, which no command starts. Raises FileNotFoundError or ValueError (one
    line)."""
    hardware = plans.read_cluster(Path(verb.cluster), verb.gpu) if verb.cluster else plans.find_gpu(verb.gpu or "h100")
    config, counted = with_steps_of_epochs(with_vocabulary(given))
    config = dataclasses.replace(config, micro_batch_size=config.micro_batch(config.data_size(verb.gpus)))
    if verb.mfu is not None:
        efficiency, source = verb.mfu, "as given"
    elif verb.measured is not None:
        efficiency, source = plans.measured_efficiency(Path(verb.measured)), f"measured by {verb.measured}"
    else:
        source = f"assumed, not measured on {hardware.gpu}s: give --mfu, or --measured RUN of a short run"
        efficiency = plans.ASSUMED_EFFICIENCY
    one = plans.estimate(config, verb.gpus, hardware, efficiency)
    risk = plans.assess(config, one.plan, hardware, one.step_seconds, verb.save_stall)
    reached = f"{efficiency:.0%} of {hardware.peak(one.arithmetic) / 1e12:.0f} TFLOP/s in {one.arithmetic} ({source})"
    lines = [words] if (words := given.micro_batch_words(given.data_size(verb.gpus))) else []
    lines += _describe(one, hardware, risk, reached, given, f" ({counted})" if counted else "")
    lines += [f"warning: {warning}" for warning in find_warnings(one, hardware, risk)]
    best = plans.suggest(config, verb.gpus, hardware, efficiency)[:SUGGESTIONS]
    if not best:
        smaller = "shorter sequences" if config.model.model_class.inputs == "tokens" else "smaller images"
        return [*lines, f"nothing fits: use more GPUs, larger ones, or {smaller}"]
    lines += ["", "fastest that fit:"]
    for other in best:
        options = shell_line(*plans.options_of(other, config)) or "as configured"
        memory = f"{other.plan.total_bytes / 2**30:.1f} GiB a rank"
        lines.append(f"  {short_number(other.units_per_second)} {other.plan.unit}/s, {memory}: {options}")
    if is_phase:
        return lines
    return [*lines, "", "to start the fastest:", launch_command(verb.recipe, overrides, best[0], given, hardware)]


def _describe(one: Estimate, cluster: Cluster, risk: Risk, reached: str, given: RunConfig, counted: str) -> list[str]:
    config, plan, gib = one.config, one.plan, 2**30
    parts = flops_by_part(config.model, config.positions, head_share=config.task().target_share)
    if plan.unit == "images":
        parts = {name: value * config.positions for name, value in parts.items()}
    work = ", ".join(f"{short_number(value)} {name}" for name, value in parts.items())
    memory = ", ".join(f"{size / gib:.2f} {name}" for name, size in plan.parts.items() if size)
    launching = f", launches {duration(one.launch_seconds)}" if one.launch_seconds else ""
    nodes = -(-plan.ranks // cluster.gpus_per_node)
    units = plan.units_per_step * plan.steps
    rows = {
        "cluster": f"{plan.ranks} x {cluster.gpu} on {nodes} node{'s' if nodes > 1 else ''}",
        "parameters": f"{short_number(plan.parameters)} ({vocabulary_words(given)})",
        f"FLOPs per {plan.unit[:-1]}": f"{short_number(plan.flops_per_unit)} forward: {work}",
        "batch": f"{plan.batch_words(config)}; {plan.accumulation} x {plan.micro_batch_size} a rank",
        "engine": config.engine.words,
        "memory per rank": f"{plan.total_bytes / gib:.2f} of {cluster.memory_gb * 1e9 / gib:.0f} GiB: {memory}",
        **({"host memory": f"{plan.host_words}; copies {duration(one.copy_seconds)}"} if plan.host_words else {}),
        **{
            part.what: f"{short_number(part.bytes)}B a step and rank over {part.ranks} ranks, "
            f"{'within nodes' if part.within_node else 'between nodes'}, {duration(part.seconds(cluster))}"
            for part in one.traffic
        },
        "utilisation": reached,
        **({"optimizer": _describe_update(one)} if plan.update.flops else {}),
        "launches": f"{plan.computed_ops:,} or more kernels a step and rank, {cluster.launch_microseconds:g} µs of the "
        "host for each (assumed, not measured)",
        "step": f"{duration(one.step_seconds)} (arithmetic {duration(one.compute_seconds)}, "
        f"exchanges {duration(one.traffic_seconds)} beside it{launching})",
        "speed": f"{short_number(one.units_per_second)} {one.plan.unit}/s",
        "time": f"{duration(one.seconds)} for {plan.steps:,} steps{counted}, "
        f"{short_number(units)} {plan.unit}, {3 * plan.flops_per_unit * units:.3g} FLOPs",
        "failures": _describe_failures(one, risk),
    }
    width = max(map(len, rows))
    return [f"{name:<{width}}  {text}" for name, text in rows.items()]


def _describe_update(one: Estimate) -> str:
    flops, kind = short_number(one.plan.update.flops), one.plan.update.precision
    return (
        f"{flops} FLOPs a step of the rank with the most, in {kind}: {duration(one.update_seconds)} of the arithmetic"
    )


def _describe_failures(one: Estimate, risk: Risk) -> str:
    text = f"one every {duration(risk.mtbf)} expected; "
    if risk.best_interval > one.seconds:
        text += f"the run is shorter than the best interval between checkpoints, {duration(risk.best_interval)}"
    else:
        text += f"a checkpoint every {duration(risk.best_interval)} is best"
    text += f" (Young-Daly), which costs {risk.lost(min(risk.best_interval, one.seconds)):.2%} of the time"
    return f"{text}; as configured every {duration(risk.interval)}: {risk.lost(risk.interval):.2%}"


def launch_command(recipe: str, overrides: Sequence[str], one: Estimate, config: RunConfig, cluster: Cluster) -> str:
    """Returns the command that starts a recipe as an estimate has it: on this host if one node is enough, or by Slurm.
    overrides: what the command line changes of the recipe, which gives `config`."""
    ranks = one.plan.ranks
    words = ["matmix", "launch", "local", recipe, "--nproc", str(ranks)]
    if ranks > cluster.gpus_per_node:
        each = next(size for size in range(cluster.gpus_per_node, 0, -1) if ranks % size == 0)
        words = ["matmix", "launch", "slurm", recipe, "--nodes", str(ranks // each), "--gpus-per-node", str(each)]
    options = plans.options_of(one, config)
    return f"  {shell_line(*words, *_without(overrides, options), *options)}"


def _without(overrides: Sequence[str], options: Sequence[str]) -> list[str]:
    """Returns the overrides less those of what the options set."""
    set_there = {word.replace("_", "-") for word in options if word.startswith("--")}
    kept, keep = [], True
    for word in overrides:
        if word.startswith("--"):
            keep = word.split("=")[0].replace("_", "-") not in set_there
        kept += [word] if keep else []
    return kept

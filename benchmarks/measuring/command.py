"""Runs one speed command: bandwidth, cases, table, JSON and picture. The commands differ in their cases only."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Any

import torch

from matmix.benchmarks.measuring import report
from matmix.benchmarks.measuring.per_token import per_token, table
from matmix.benchmarks.measuring.settings import LENGTHS, Settings, add_arguments, settings_from
from matmix.benchmarks.measuring.small import measure_small
from matmix.benchmarks.measuring.suite import Case, run_cases
from matmix.benchmarks.measuring.timing import Clock, copy_bandwidth


def parser_of(command: str, description: str, lengths: str = LENGTHS, *, width: bool = True) -> argparse.ArgumentParser:
    """A command's parser with the common arguments; width: whether it has --d-model."""
    parser = argparse.ArgumentParser(prog=f"python -P -m matmix.benchmarks {command}", description=description)
    add_arguments(parser, lengths, width=width)
    return parser


def run_command(
    command: str,
    options: argparse.Namespace,
    cases: Callable[[Settings], Iterable[Case]],
    small: Callable[[Settings], Case] | None = None,
    *,
    floors: bool = True,
    linear: bool = False,
) -> dict[str, Any]:
    """Measure, print, write and draw; returns the record. Raises ValueError for options that cannot be.

    small: a case for which CUDA graphs are compared; floors: whether the cases' candidates have floors; linear: whether
    ours should cost the same per token at all lengths, so that it is shown whether it does.
    """
    settings = settings_from(command, options)
    if settings.device.type == "cuda":
        torch.cuda.set_device(settings.device)
    clock = Clock(settings.device)
    bandwidth = copy_bandwidth(clock)
    where = report.where_and_with_what(settings)
    print(report.opening(settings, bandwidth, where, floors), flush=True)
    record: dict[str, Any] = {
        "command": command,
        "environment": where,
        "tokens": settings.tokens,
        "d_model": settings.d_model,
        "copy_bandwidth": bandwidth,
        "cases": run_cases(cases(settings), settings, clock, bandwidth, report.show),
    }
    if linear and (costs := per_token(record["cases"])):
        record["per_token"] = costs
        print(table(costs, report.NAME_WIDTH), flush=True)
    if small is not None:
        record["small"] = measure_small(small(settings), clock, settings)
    report.write(settings, record)
    return record

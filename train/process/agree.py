"""Work that all ranks do together: if it fails on one rank, the error is raised on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from matmix.data.artifacts import panics_as_errors
from matmix.train.process.distributed import gather_objects, rank_and_world_size
from matmix.train.process.heartbeat import beat, others_at_work

Result = TypeVar("Result")


def agree(
    action: Callable[[], Result], *, here: bool = True, group: dist.ProcessGroup | None = None
) -> list[Result | None]:
    """Runs `action` on the ranks that say `here`. Called on all ranks; returns the result of each, in order of rank,
    on every rank, None where it did not run.

    An OSError or ValueError, which says what is wrong with the storage or with what the user gave, is raised on every
    rank: that of the first rank which failed, noted with its number. Any other error is a mistake in the program: it is
    raised as it is where it happened, and as RuntimeError on the other ranks. group: what the ranks agree over, as for
    `gather_objects`.
    """
    rank, world_size = rank_and_world_size()
    result, error, told = None, None, None
    beat("work on the storage")
    try:
        with panics_as_errors():
            result = action() if here else None
    except (OSError, ValueError) as raised:
        error = told = raised
        if world_size > 1 and "(rank " not in complaint(error):
            error.add_note(f"(rank {rank})")
    except Exception as raised:
        error, told = raised, RuntimeError(f"rank {rank} failed: {raised!r}")
    with others_at_work("work on the storage that is done here"):
        outcomes = gather_objects((result, told), group)
    if error is not told:
        raise error
    for number, (_, failure) in enumerate(outcomes):
        if failure is not None:
            raise error if number == rank else failure
    return [found for found, _ in outcomes]


def complaint(error: OSError | ValueError) -> str:
    """What an error says, with the number of the rank that `agree` noted."""
    text = getattr(error, "strerror", None) or str(error)
    return " ".join([text, *getattr(error, "__notes__", [])[:1]])

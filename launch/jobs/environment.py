"""Environment variables that every rank starts with, each with its reason; what the user has set always wins."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from matmix.data.cores import cores
from matmix.train.process.node_folders import cache_variables

_EVERYWHERE = {
    # Sequences of many lengths fragment the memory of a GPU; growing segments keep it whole.
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    # Says why a connection failed; INFO writes thousands of lines.
    "NCCL_DEBUG": "WARN",
    # A rank whose peer has died ends instead of waiting for ever, so that the job can be started again.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    # Keeps the last collectives of each rank, which tell who was late in a hang.
    "TORCH_FR_BUFFER_SIZE": "2000",
    # Writes them when a collective times out.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    # torch's warnings on sockets that connect at a second try alarm for nothing.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


def threads_of_each(ranks: int) -> int:
    """Threads of each rank, so that its node's ranks share the cores; each would otherwise start one for every core."""
    return max(1, cores() // max(1, ranks))


def defaults(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The defaults of what is not set in `environment`, for a rank whose variables of torchrun are there.

    Makes the folders of the caches. Raises ValueError where one that the user has named cannot be trusted.
    """
    # Kernels are compiled once per node: a home folder on a network drive is slow and its locks unreliable, and where
    # torch itself would keep them another user can be the first.
    found = cache_variables(environment) | _EVERYWHERE
    found["OMP_NUM_THREADS"] = str(threads_of_each(int(environment.get("LOCAL_WORLD_SIZE", "1"))))
    world_size = environment.get("WORLD_SIZE", "1")
    one_host = environment.get("LOCAL_WORLD_SIZE") == world_size
    master = "127.0.0.1" if one_host else environment.get("MASTER_ADDR", "")
    if int(world_size) > 1 and master and (interface := interface_towards(master)):
        # gloo would take the address of the host's name, which on many systems is 127.0.1.1.
        found["GLOO_SOCKET_IFNAME"] = interface
        if one_host:  # nobody else is to reach the ranks
            found["NCCL_SOCKET_IFNAME"] = interface
    return {name: value for name, value in found.items() if name not in environment}


def way_to(host: str) -> tuple[str, str]:
    """The address of this node from which its way to `host` begins, and the address of `host`.

    Raises OSError where there is no way, socket.gaierror where `host` does not resolve.
    """
    family, _, _, _, target = socket.getaddrinfo(host.strip("[]"), 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # chooses the way and sends nothing
        return probe.getsockname()[0], target[0]


def interface_towards(host: str) -> str | None:
    """Name of the network interface whose address this node would use to reach `host`; None if there is no way."""
    import psutil

    try:
        own, _ = way_to(host)
    except OSError:
        return None
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, all_of in interfaces if any(one.address.split("%")[0] == own for one in all_of)), None)

"""Environment variables that every rank starts with, each with its reason; what the user has set always wins."""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Mapping, MutableMapping

from matmix.train.process.caches import cache_variables


@dataclasses.dataclass(frozen=True, slots=True)
class Default:
    """A variable, its value on this node, and why."""

    name: str
    value: str
    reason: str


_WHY_THREADS = "the node's cores shared among its ranks: each rank would otherwise start a thread for every core"
_WHY_CACHES = (
    "compiled once per node; a home folder on a network drive is slow and its locks unreliable, and where torch itself "
    "would keep it another user can be the first"
)
_FRAGMENTS = "sequences of many lengths fragment the memory of a GPU; growing segments keep it whole"
_DEAD_PEER = "a rank whose peer has died ends instead of waiting for ever, so that the job can be started again"
_RECORDS = "keeps the last collectives of each rank, which tell who was late in a hang"
_SOCKETS = "torch's warnings on sockets that connect at a second try alarm for nothing"
_EVERYWHERE = [
    Default("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", _FRAGMENTS),
    Default("NCCL_DEBUG", "WARN", "says why a connection failed; INFO writes thousands of lines"),
    Default("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1", _DEAD_PEER),
    Default("TORCH_FR_BUFFER_SIZE", "2000", _RECORDS),
    Default("TORCH_NCCL_DUMP_ON_TIMEOUT", "1", "writes them when a collective times out"),
    Default("TORCH_CPP_LOG_LEVEL", "ERROR", _SOCKETS),
]


def defaults(environment: Mapping[str, str] = os.environ) -> list[Default]:
    """The defaults for a rank with torchrun's variables in `environment`.

    Makes the folders of the caches. Raises ValueError where one that the user has named cannot be trusted.
    """
    ranks_here = max(1, int(environment.get("LOCAL_WORLD_SIZE", "1")))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    found = [Default(name, value, _WHY_CACHES) for name, value in cache_variables(environment).items()]
    found += [Default("OMP_NUM_THREADS", str(max(1, cores // ranks_here)), _WHY_THREADS), *_EVERYWHERE]
    world_size = environment.get("WORLD_SIZE", "1")
    one_host = environment.get("LOCAL_WORLD_SIZE") == world_size
    master = "127.0.0.1" if one_host else environment.get("MASTER_ADDR", "")
    interface = interface_towards(master) if int(world_size) > 1 and master else None
    if interface and one_host:
        reason = "the ranks are all on this host, and nobody else is to reach them"
        found += [Default("GLOO_SOCKET_IFNAME", interface, reason), Default("NCCL_SOCKET_IFNAME", interface, reason)]
    elif interface:
        found.append(
            Default(
                "GLOO_SOCKET_IFNAME",
                interface,
                "the interface that leads to rank 0: gloo would take the address of the host's name, which on "
                "many systems is 127.0.1.1",
            )
        )
    return found


def apply_defaults(environment: MutableMapping[str, str] = os.environ) -> list[Default]:
    """Sets what is not set; returns what it has set."""
    added = [default for default in defaults(environment) if default.name not in environment]
    environment.update({default.name: default.value for default in added})
    return added


def own_address(family: int, target: tuple) -> str:
    """The address of this node from which its way to `target` (a pair or more of getaddrinfo's) begins. Raises OSError
    where there is no way."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # chooses the way and sends nothing
        return probe.getsockname()[0]


def interface_towards(host: str) -> str | None:
    """Name of the network interface whose address this node would use to reach `host`; None if there is no way."""
    import psutil

    try:
        family, _, _, _, target = socket.getaddrinfo(host.strip("[]"), 9, type=socket.SOCK_DGRAM)[0]
        own = own_address(family, target)
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.split("%")[0] == own for address in addresses):
            return name
    return None

"""Connects the processes of a run within a minute, or reports why not. Ranks of one host meet in a file of their user's
or at the loopback interface; those of several trust the network between them: the TCPStore knows no passwords."""

from __future__ import annotations

import dataclasses
import datetime
import os
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch.distributed as dist

from matmix.train.errors import RendezvousError, require
from matmix.train.process.launched import SECRET_VARIABLE, STORE_VARIABLE, as_ranges, nodes_of, wait_for_port

_VARIABLE = "MATMIX_RENDEZVOUS_SECONDS"
_LATE = 8.0  # how much longer a rank waits for rank 0's verdict than rank 0 waits for the ranks


@dataclasses.dataclass(frozen=True, slots=True)
class Meeting:
    """Holds what a process knows before it has met the others."""

    rank: int
    world_size: int
    host: str
    port: int
    serves: bool  # whether this process runs the store; torchrun's agent does so for its workers
    attempt: str  # keys of another attempt, or of another start, in the same store are not ours
    one_host: bool = False
    file: str = ""  # of a store that is a file, for ranks of one host; "" = a server at host and port

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Meeting:
        """Reads torchrun's variables, and ours. Raises ValueError for a wrong or missing MASTER_ADDR or MASTER_PORT."""
        rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        one_host = environment.get("LOCAL_WORLD_SIZE") == str(world_size)
        by_agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        attempt = f"{_start_mark(environment, one_host)}/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        if file := environment.get(STORE_VARIABLE):
            return cls(rank, world_size, "", 0, serves=False, attempt=attempt, one_host=True, file=file)
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
        if missing:
            raise ValueError(
                f"WORLD_SIZE is {world_size} but {' and '.join(missing)} {'are' if missing[1:] else 'is'} not set: "
                f"start with torchrun or `matmix launch`, or set them to the address of rank 0"
            )
        port = environment["MASTER_PORT"]
        is_port = port.isdigit() and 0 < int(port) < 65536
        require(is_port, f"MASTER_PORT must be a port between 1 and 65535, got {port!r}")
        host = environment["MASTER_ADDR"].strip("[]")
        if one_host and not by_agent and host != "::1":
            host = "127.0.0.1"  # nobody else is to reach the store
        return cls(rank, world_size, host, int(port), rank == 0 and not by_agent, attempt, one_host)

    @property
    def address(self) -> str:
        return self.file or (f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}")


def _start_mark(environment: Mapping[str, str], one_host: bool) -> str:
    """Returns a word that no other start's processes know, which keeps apart those that might meet in one store."""
    if secret := environment.get(SECRET_VARIABLE):
        return secret
    # A folder of torchrun's with a random name: .../torchelastic_RANDOM/ID_RANDOM/attempt_0/0/error.json.
    report = environment.get("TORCHELASTIC_ERROR_FILE", "")
    return "-".join(Path(report).parts[-5:-3]) if report and one_host else ""


def patience() -> float:
    """Returns the seconds to wait for all processes. Raises ValueError if MATMIX_RENDEZVOUS_SECONDS is no number."""
    text = os.environ.get(_VARIABLE, "45")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    require(seconds > 0, f"{_VARIABLE} must be a positive number of seconds, got {text!r}")
    return seconds


def meet(meeting: Meeting, seconds: float) -> dist.Store:
    """Returns the store that all ranks share, once all are there. Raises RendezvousError (one line) on every rank that
    came, after about `seconds`, when some did not; at once for a host that does not resolve or a port that is taken."""
    deadline, rank = time.monotonic() + seconds, meeting.rank
    store = dist.PrefixStore(f"matmix/{meeting.attempt}", _open_store(meeting, seconds))
    if store.add(f"claims/{rank}", 1) > 1:
        raise RendezvousError(
            f"another process is rank {rank} at {meeting.address}: a second start uses the same address, or "
            f"processes of an earlier one still live (end them, or take another port)"
        )
    store.set(f"arrived/{rank}", "")
    if rank == 0:
        missing = _without(store, "arrived", range(meeting.world_size), deadline)
        store.set("verdict", "go" if not missing else _describe_missing(missing, meeting.world_size, seconds))
    try:
        store.wait(["verdict"], datetime.timedelta(seconds=max(1.0, deadline - time.monotonic()) + _LATE))
        verdict = store.get("verdict").decode()
    except RuntimeError as error:  # torch has no narrower class for a store that fell silent
        raise RendezvousError(
            f"rank {rank} on {socket.gethostname()} reached {meeting.address} but heard no more of rank 0: "
            f"{_first(error)}"
        ) from None
    if verdict != "go":
        store.set(f"heard/{rank}", "")
        if rank == 0:
            # The store ends with rank 0, and who has not read by then would only know that it lost rank 0.
            _without(store, "heard", {*range(meeting.world_size)} - {*missing}, time.monotonic() + _LATE)
        raise RendezvousError(verdict)
    return store


def _open_store(meeting: Meeting, seconds: float) -> dist.Store:
    if meeting.file:
        return dist.FileStore(meeting.file, meeting.world_size)
    here, host, port = socket.gethostname(), meeting.host, meeting.port
    unreachable = f"rank {meeting.rank} on {here} cannot reach rank 0 at {meeting.address}"
    try:
        own = None
        if not meeting.serves:
            wait_for_port(host, port, seconds)
        elif meeting.one_host:
            # By itself torch listens on every interface, and anybody may read and write what lies in its store.
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            own = socket.create_server((host, port), family=family).detach()
        options = {"timeout": datetime.timedelta(seconds=seconds), "wait_for_workers": False, "master_listen_fd": own}
        return dist.TCPStore(host, port, meeting.world_size, is_master=meeting.serves, **options)
    except socket.gaierror as error:
        reason = (
            f"{unreachable}: the name {host} does not resolve here ({error.strerror}); give an address with "
            f"--master-addr or MASTER_ADDR"
        )
    except TimeoutError as error:
        reason = (
            f"{unreachable}: {error}; either that node did not start, or a firewall closes the port, "
            f"or MASTER_ADDR names the wrong interface ({_VARIABLE} sets how long to wait)"
        )
    except (OSError, RuntimeError) as error:  # torch's DistNetworkError and its relatives
        reason = f"rank {meeting.rank} on {here} lost rank 0 at {meeting.address}: {_first(error)}"
        if meeting.serves:
            reason = f"port {port} on {here} cannot be opened: {_first(error)}; is another job using it?"
    raise RendezvousError(reason)


def _without(store: dist.Store, key: str, ranks: Iterable[int], deadline: float) -> list[int]:
    """Returns those of the ranks that have not set their `key` by `deadline`, a time.monotonic()."""
    while True:
        ranks = [rank for rank in ranks if not store.check([f"{key}/{rank}"])]
        if not ranks or time.monotonic() > deadline:
            return ranks
        time.sleep(0.05)


def _describe_missing(missing: list[int], world_size: int, seconds: float) -> str:
    nodes = nodes_of(missing)
    where = f" of node{'s' if len(nodes) > 1 else ''} {', '.join(nodes)}" if nodes else ""
    return (
        f"{len(missing)} of {world_size} ranks did not arrive within {seconds:.0f} s: "
        f"rank{'s' if len(missing) > 1 else ''} {as_ranges(missing)}{where}; look at the logs of these ranks, "
        f"and exclude the node if it stays away ({_VARIABLE} sets how long to wait)"
    )


def _first(error: BaseException) -> str:
    """Returns the first line of an error, which in torch's is the only one for people."""
    return (str(error).splitlines() or [type(error).__name__])[0]

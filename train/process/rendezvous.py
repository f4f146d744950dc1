"""Connects the processes of a run within a minute, or reports why not.

torch's own `env://` waits as long as a collective may take, half an hour here, for a node that never came, and then
shows a stack of C++ frames. Here every rank announces itself in a TCPStore; rank 0 waits for all of them a short time
and then tells everybody to go on, or who is missing.

The TCPStore knows no passwords. Ranks of one host meet in a file that only their user can open (MATMIX_STORE, from
`matmix launch local`), or in a store that listens on the loopback interface alone; ranks of several hosts trust the
network between them, as NCCL does. MATMIX_SECRET keeps the starts apart that might meet in one store.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist

from matmix.train.errors import RendezvousError
from matmix.train.process.launched import SECRET_VARIABLE, STORE_VARIABLE, as_ranges, node_name, nodes_of, wait_for_port

DEFAULT_SECONDS = 45.0
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
        """Reads torchrun's variables, and ours. Raises ValueError where MASTER_ADDR or MASTER_PORT is missing or no
        port, unless MATMIX_STORE names a file."""
        rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        one_host = environment.get("LOCAL_WORLD_SIZE") == str(world_size)
        by_agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        attempt = f"{_start_mark(environment, one_host)}/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        if file := environment.get(STORE_VARIABLE):
            return cls(rank, world_size, "", 0, serves=False, attempt=attempt, one_host=True, file=file)
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
        if missing:
            names = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'}"
            raise ValueError(
                f"WORLD_SIZE is {world_size} but {names} not set: "
                f"start with torchrun or `matmix launch`, or set them to the address of rank 0"
            )
        port = environment["MASTER_PORT"]
        if not port.isdigit() or not 0 < int(port) < 65536:
            raise ValueError(f"MASTER_PORT must be a port between 1 and 65535, got {port!r}")
        host = environment["MASTER_ADDR"].strip("[]")
        if one_host and not by_agent and host != "::1":
            host = "127.0.0.1"  # nobody else is to reach the store
        return cls(rank, world_size, host, int(port), rank == 0 and not by_agent, attempt, one_host)

    @property
    def address(self) -> str:
        if self.file:
            return self.file
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def patience() -> float:
    """Seconds to wait for all processes: MATMIX_RENDEZVOUS_SECONDS, or 45. Raises ValueError if that is no number."""
    text = os.environ.get(_VARIABLE, str(DEFAULT_SECONDS))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ValueError(f"{_VARIABLE} must be a positive number of seconds, got {text!r}")
    return seconds


def meet(meeting: Meeting, seconds: float) -> dist.Store:
    """The store that all ranks share, once all are there.

    Raises RendezvousError (one line) on every rank that came, after about `seconds`, when some did not; at once where
    the name of rank 0's host does not resolve, or its port is taken.
    """
    deadline = time.monotonic() + seconds
    here = socket.gethostname()
    if not meeting.serves and not meeting.file:
        _wait_until_reachable(meeting, here, seconds)
    store = dist.PrefixStore(f"matmix/{meeting.attempt}", _open_store(meeting, here, seconds))
    if store.add(f"claims/{meeting.rank}", 1) > 1:
        raise RendezvousError(
            f"another process is rank {meeting.rank} at {meeting.address}: a second start uses the same address, or "
            f"processes of an earlier one still live (end them, or take another port)"
        )
    store.set(f"arrived/{meeting.rank}", node_name())
    if meeting.rank == 0:
        missing = _wait_for_all(store, meeting.world_size, deadline)
        store.set("verdict", "go" if not missing else _describe_missing(missing, meeting.world_size, seconds))
    try:
        store.wait(["verdict"], datetime.timedelta(seconds=max(1.0, deadline - time.monotonic()) + _LATE))
        verdict = store.get("verdict").decode()
    except RuntimeError as error:  # torch has no narrower class for a store that fell silent
        raise RendezvousError(
            f"rank {meeting.rank} on {here} reached {meeting.address} but heard no more of rank 0: {_first(error)}"
        ) from None
    if verdict != "go":
        if meeting.rank == 0:
            _wait_until_heard(store, sorted({*range(1, meeting.world_size)} - {*missing}))
        else:
            store.set(f"heard/{meeting.rank}", "")
        raise RendezvousError(verdict)
    return store


def _wait_until_reachable(meeting: Meeting, here: str, seconds: float) -> None:
    """Returns when rank 0's port answers."""
    start = f"rank {meeting.rank} on {here} cannot reach rank 0 at {meeting.address}"
    try:
        wait_for_port(meeting.host, meeting.port, seconds)
    except socket.gaierror as error:
        raise RendezvousError(
            f"{start}: the name {meeting.host} does not resolve here ({error.strerror}); give an address with "
            f"--master-addr or MASTER_ADDR"
        ) from None
    except TimeoutError as error:
        raise RendezvousError(
            f"{start}: {error}; either that node did not start, or a firewall closes the port, "
            f"or MASTER_ADDR names the wrong interface ({_VARIABLE} sets how long to wait)"
        ) from None


def _start_mark(environment: Mapping[str, str], one_host: bool) -> str:
    """Returns a word that no other start's processes know: their keys in the store are not ours, nor ours theirs."""
    if secret := environment.get(SECRET_VARIABLE):
        return secret
    # A folder of torchrun's with a random name: .../torchelastic_RANDOM/ID_RANDOM/attempt_0/0/error.json.
    report = environment.get("TORCHELASTIC_ERROR_FILE", "")
    return "-".join(Path(report).parts[-5:-3]) if report and one_host else ""


def _open_store(meeting: Meeting, here: str, seconds: float) -> dist.Store:
    if meeting.file:
        return dist.FileStore(meeting.file, meeting.world_size)
    try:
        # By itself torch listens on every interface, and anybody may read and write what lies in its store.
        own = _listen(meeting) if meeting.serves and meeting.one_host else None
        return dist.TCPStore(
            meeting.host,
            meeting.port,
            meeting.world_size,
            is_master=meeting.serves,
            timeout=datetime.timedelta(seconds=seconds),
            wait_for_workers=False,
            master_listen_fd=own,
        )
    except (OSError, RuntimeError) as error:  # torch's DistNetworkError and its relatives
        if meeting.serves:
            reason = f"port {meeting.port} on {here} cannot be opened: {_first(error)}; is another job using it?"
        else:
            reason = f"rank {meeting.rank} on {here} lost rank 0 at {meeting.address}: {_first(error)}"
        raise RendezvousError(reason) from None


def _listen(meeting: Meeting) -> int:
    """A socket of this host alone, for the store, which will close it."""
    family = socket.AF_INET6 if ":" in meeting.host else socket.AF_INET
    return socket.create_server((meeting.host, meeting.port), family=family).detach()


def _wait_for_all(store: dist.Store, world_size: int, deadline: float) -> list[int]:
    """The ranks that have not come by `deadline`, a time.monotonic()."""
    missing = list(range(world_size))
    while True:
        missing = [rank for rank in missing if not store.check([f"arrived/{rank}"])]
        if not missing or time.monotonic() > deadline:
            return missing
        time.sleep(0.05)


def _wait_until_heard(store: dist.Store, ranks: list[int]) -> None:
    """Returns when these have read the verdict, or late: the store ends with rank 0, and who has not read by then would
    only know that it lost rank 0."""
    deadline = time.monotonic() + _LATE
    while ranks and time.monotonic() < deadline:
        time.sleep(0.05)
        ranks = [rank for rank in ranks if not store.check([f"heard/{rank}"])]


def _describe_missing(missing: list[int], world_size: int, seconds: float) -> str:
    nodes = nodes_of(missing)
    where = f" of node{'s' if len(nodes) > 1 else ''} {', '.join(nodes)}" if nodes else ""
    return (
        f"{len(missing)} of {world_size} ranks did not arrive within {seconds:.0f} s: "
        f"rank{'s' if len(missing) > 1 else ''} {as_ranges(missing)}{where}; look at the logs of these ranks, "
        f"and exclude the node if it stays away ({_VARIABLE} sets how long to wait)"
    )


def _first(error: BaseException) -> str:
    """The first line of an error, which in torch's is the only one for people."""
    return (str(error).splitlines() or [type(error).__name__])[0]

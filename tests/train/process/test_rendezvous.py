"""All ranks come together within a short time, or every one of them says why not."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from failures import each

from matmix.train.errors import RendezvousError
from matmix.train.process.launched import as_ranges
from matmix.train.process.rendezvous import Meeting, meet, patience


def free_port(host: str = "127.0.0.1") -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def meeting(rank: int, world_size: int, port: int, host: str = "127.0.0.1", attempt: str = "0") -> Meeting:
    return Meeting(rank=rank, world_size=world_size, host=host, port=port, serves=rank == 0, attempt=attempt)


def outcomes(meetings: list[Meeting], seconds: float) -> list[str]:
    """What each rank got, all at the same time: "met", or the error."""

    def try_one(one: Meeting) -> tuple[str, object]:
        try:
            return "met", meet(one, seconds)
        except RendezvousError as error:
            return str(error), None

    with ThreadPoolExecutor(len(meetings)) as pool:
        found = list(pool.map(try_one, meetings))
    return [text for text, _ in found]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_ranks_meet(host):
    if host == "::1" and not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    port = free_port(host)
    assert outcomes([meeting(rank, 3, port, host) for rank in (2, 1, 0)], 20) == ["met"] * 3


def test_several_runs_meet_side_by_side():
    first, second = free_port(), free_port()
    meetings = [meeting(rank, 2, port) for rank in (0, 1) for port in (first, second)]
    assert outcomes(meetings, 20) == ["met"] * 4


def test_every_rank_hears_who_is_missing():
    port = free_port()
    began = time.monotonic()
    found = outcomes([meeting(rank, 6, port) for rank in (0, 1, 5)], 1.5)
    assert len(set(found)) == 1
    assert found[0].startswith("3 of 6 ranks did not arrive within 2 s: ranks 2-4;")
    assert time.monotonic() - began < 60


def test_missing_nodes_are_named_where_the_launcher_names_nodes(monkeypatch):
    monkeypatch.setenv("MATMIX_NODES", "gpu07,gpu08,gpu11")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    port = free_port()
    found = outcomes([meeting(rank, 6, port) for rank in (0, 1, 4, 5)], 1.0)
    assert "ranks 2-3 of node gpu08;" in found[0]


def test_rank_zero_is_away():
    found = outcomes([meeting(1, 2, port := free_port())], 0.5)
    assert f"rank 1 on {socket.gethostname()} cannot reach rank 0 at 127.0.0.1:{port}: Connection refused" in found[0]


def listening(port: int) -> set[str]:
    """The addresses at which this process listens to a port."""
    found = psutil.Process().net_connections("inet")
    return {c.laddr.ip for c in found if c.status == psutil.CONN_LISTEN and c.laddr.port == port}


@each("address", ["127.0.0.1", "0.0.0.0", "::1", "no-such-node.invalid"])
def test_the_store_of_one_host_is_for_this_host_alone(address):
    variables = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": str(free_port())}
    first, second = (Meeting.from_environment({**variables, "RANK": rank}) for rank in "01")
    with ThreadPoolExecutor(2) as pool:
        stores = list(pool.map(lambda one: meet(one, 20), (first, second)))
    assert len(stores) == 2
    assert listening(first.port) == {"::1" if address == "::1" else "127.0.0.1"}


def test_ranks_of_one_host_meet_in_a_file(tmp_path):
    variables = {"WORLD_SIZE": "3", "MATMIX_STORE": str(tmp_path / "store"), "MATMIX_SECRET": "a1"}
    meetings = [Meeting.from_environment({**variables, "RANK": rank}) for rank in "012"]
    assert outcomes(meetings, 20) == ["met"] * 3
    away = [Meeting.from_environment({**variables, "RANK": "0", "MATMIX_STORE": str(tmp_path / "other")})]
    assert outcomes(away, 1.0)[0].startswith("2 of 3 ranks did not arrive within 1 s: ranks 1-2;")


def test_ranks_of_another_start_are_not_met():
    """A rank 1 that an earlier start left reaches the store of the next one, whose own rank 1 never came."""
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    new = Meeting.from_environment({**variables, "RANK": "0", "MATMIX_SECRET": "new"})
    orphan = Meeting.from_environment({**variables, "RANK": "1", "MATMIX_SECRET": "old"})
    found = outcomes([new, orphan], 2.0)
    assert found[0].startswith("1 of 2 ranks did not arrive")
    assert "met" not in found


def test_torchrun_gives_each_start_a_mark(tmp_path):
    variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "n", "MASTER_PORT": "1"}
    errors = [f"/tmp/torchelastic_{start}/none_{start}/attempt_0/{rank}/error.json" for start in "ab" for rank in "01"]
    marks = [Meeting.from_environment({**variables, "TORCHELASTIC_ERROR_FILE": error}).attempt for error in errors]
    assert marks[0] == marks[1] != marks[2] == marks[3]


def test_two_processes_of_one_rank_are_not_mixed():
    port = free_port()
    found = outcomes([meeting(0, 2, port), meeting(1, 2, port), meeting(1, 2, port)], 5)
    assert sorted(text[:7] for text in found) == ["another", "met", "met"]


def test_a_name_that_does_not_resolve():
    found = outcomes([meeting(1, 2, 4321, host="no-such-node.invalid")], 1.0)
    assert "rank 0 at no-such-node.invalid:4321: the name no-such-node.invalid does not resolve here" in found[0]
    assert "--master-addr" in found[0]


def test_a_port_in_use_is_named():
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        port = other.getsockname()[1]
        found = outcomes([meeting(0, 2, port)], 1.0)
    assert f"port {port} on {socket.gethostname()} cannot be opened" in found[0]
    assert "is another job using it?" in found[0]


def environment(**changes: str) -> dict[str, str]:
    return {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "[fd00::2]", "MASTER_PORT": "29500", **changes}


def test_what_torchrun_says():
    found = Meeting.from_environment(environment())
    assert (found.rank, found.world_size, found.host, found.port, found.serves) == (1, 2, "fd00::2", 29500, False)
    assert found.address == "[fd00::2]:29500"
    assert Meeting.from_environment(environment(RANK="0")).serves
    by_agent = environment(RANK="0", TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="2")
    found = Meeting.from_environment(by_agent)
    assert (found.serves, found.attempt) == (False, "/2")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"MASTER_PORT": ""}, "MASTER_PORT is not set: start with torchrun or `matmix launch`"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT must be a port between 1 and 65535, got 'http'"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT must be a port"),
    ],
)
def test_bad_variables(changes, message):
    with pytest.raises(ValueError, match=message):
        Meeting.from_environment(environment(**changes))


def test_patience(monkeypatch):
    monkeypatch.delenv("MATMIX_RENDEZVOUS_SECONDS", raising=False)
    assert 0 < patience() < 60
    monkeypatch.setenv("MATMIX_RENDEZVOUS_SECONDS", "120")
    assert patience() == 120
    for bad in ("soon", "0", "nan"):
        monkeypatch.setenv("MATMIX_RENDEZVOUS_SECONDS", bad)
        with pytest.raises(ValueError, match="MATMIX_RENDEZVOUS_SECONDS must be a positive number of seconds"):
            patience()


def test_ranges():
    assert as_ranges([5, 0, 1, 2, 9, 8]) == "0-2, 5, 8-9"
    assert as_ranges([3]) == "3"

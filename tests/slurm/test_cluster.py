"""The cluster that the other tests rely on: jobs run on two nodes, come back after a failure, and leave nothing."""

from __future__ import annotations

import psutil
import pytest
from cluster import Cluster, wait_until, why_unavailable

SLEEPER = "#!/bin/sh\necho start ${SLURM_RESTART_COUNT:-0}\nsrun sleep 1000\n"


def test_a_failed_node_moves_its_job(cluster):
    cluster.wait_for_nodes("idle", cluster.nodes["shaky"])
    job = cluster.submit(SLEEPER, "-p", "shaky", "-N2", "--ntasks-per-node=1", "--open-mode=append")
    cluster.wait_for(job, "RUNNING")
    first, second, third = cluster.nodes["shaky"]
    wait_until(lambda: len(_named(cluster, "sleep", second)) == 1, "a task on the second node")
    cluster.set_down(second)
    try:
        info = cluster.wait_for(job, "RUNNING", restarts=1)
        assert cluster.hostnames(info["NodeList"]) == [first, third]
        wait_until(lambda: "start 1" in cluster.output(job), "the script to start again")
    finally:
        cluster.run("scancel", job)
        cluster.resume(second)
    wait_until(lambda: not _named(cluster, "sleep"), "the tasks to be gone")


def test_nothing_outlives_the_cluster(tmp_path):
    if reason := why_unavailable():
        pytest.skip(reason)
    with Cluster.started(tmp_path / "other", {"main": 2}) as cluster:
        job = cluster.submit(SLEEPER, "-N2", "--ntasks-per-node=1")
        cluster.wait_for(job, "RUNNING")
        wait_until(lambda: len(_named(cluster, "sleep")) == 2, "both tasks")
        started = cluster.processes()
        with pytest.raises(AssertionError, match=r"waited 0 s in vain for job .* to be COMPLETED"):
            cluster.wait_for(job, "COMPLETED", seconds=0)
    _, alive = psutil.wait_procs(started, timeout=30)  # what has been killed, init still has to fetch
    assert not alive
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])]


def _named(cluster: Cluster, name: str, node: str | None = None) -> list[psutil.Process]:
    found = []
    for process in cluster.processes(node):
        try:
            found += [process] if process.name() == name else []
        except psutil.Error:
            continue  # gone in the meantime
    return found

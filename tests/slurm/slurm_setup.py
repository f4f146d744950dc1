"""What a Slurm cluster on one host needs: the programs, and a configuration without root, munge and systemd."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

_PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "scontrol")

# cred_expire bounds how soon a job starts again after a requeue (121 s by default; 5 is the least that Slurm accepts).
# ReturnToService = 1: a node that was set down stays down until it is resumed.
_CONFIG = """
ClusterName=matmix
SlurmctldHost=localhost
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdSpoolDir={spool}/%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
ReturnToService=1
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
MinJobAge=7200
SlurmdTimeout=10
KillWait=5
"""


def why_unavailable() -> str | None:
    """Why no cluster can be started here and what to install, or None if one can."""
    missing = [name for name in _PROGRAMS if find_program(name) is None]
    if not missing:
        return None
    return f"Slurm is not installed ({', '.join(missing)} not found): apt-get install slurmctld slurmd slurm-client"


def find_program(name: str) -> str | None:
    """Path of a Slurm program; Debian puts the daemons where only root's PATH looks."""
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin:/sbin")


def slurm_conf(folder: Path, spool: Path, partitions: Mapping[str, Sequence[str]], cpus: int) -> str:
    """Text of a slurm.conf for partitions of named nodes, all on this host, and the partition "urgent" of them all."""
    nodes = [node for names in partitions.values() for node in names]
    ports = _free_ports(1 + len(nodes))
    lines = [_CONFIG.format(port=ports.pop(), user=getpass.getuser(), folder=folder, spool=spool)]
    for node in nodes:
        place = f"NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports.pop()}"
        lines.append(f"NodeName={node} {place} CPUs={cpus} RealMemory=2000\n")
    for index, (partition, names) in enumerate(partitions.items()):
        default = "YES" if index == 0 else "NO"
        lines.append(f"PartitionName={partition} Nodes={','.join(names)} Default={default} GraceTime=20\n")
    lines.append("PartitionName=urgent Nodes=ALL PriorityTier=10\n")
    return "".join(lines)


def _free_ports(count: int) -> list[int]:
    """Ports that nothing listens on. They lie below those that the system gives to outgoing connections."""
    ports: list[int] = []
    candidate = 10000 + os.getpid() * 37 % 15000
    while len(ports) < count:
        candidate = candidate + 1 if candidate < 30000 else 10000
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", candidate))
            ports.append(candidate)
    return ports

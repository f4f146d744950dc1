"""Who a process is, what its environment is, and where its output goes, before anything heavy is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from matmix.launch.jobs.rank import defaults, find_run_dir, interface_towards, log_path, rank_variables
from matmix.train.run.outcome import local_folder

SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_TASKS_PER_NODE": "2(x3),1",
}


def test_slurm_says_who_it_is():
    expected = {"RANK": "5", "WORLD_SIZE": "7", "LOCAL_RANK": "1", "GROUP_RANK": "2", "LOCAL_WORLD_SIZE": "2"}
    assert rank_variables(SLURM) == expected
    last = rank_variables({**SLURM, "SLURM_PROCID": "6", "SLURM_NODEID": "3", "SLURM_LOCALID": "0"})
    assert last["LOCAL_WORLD_SIZE"] == "1"


def test_a_step_smaller_than_its_job():
    step = {"SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_TASKS_PER_NODE": "2(x3)"}
    assert rank_variables({**SLURM, **step})["WORLD_SIZE"] == "6"
    assert rank_variables({**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}) == {}


def test_torchrun_and_single_processes_are_left_alone():
    assert rank_variables({**SLURM, "RANK": "0"}) == {}
    assert rank_variables({"SLURM_NTASKS": "4"}) == {}  # a shell inside a job


def test_incomplete_slurm_variables():
    with pytest.raises(ValueError, match="SLURM_PROCID is set but SLURM_LOCALID is not: start the ranks with srun"):
        rank_variables({key: value for key, value in SLURM.items() if key != "SLURM_LOCALID"})


def test_what_is_set_wins():
    environment = {"NCCL_DEBUG": "INFO", "LOCAL_WORLD_SIZE": "2"}
    added = defaults(environment)
    assert "NCCL_DEBUG" not in added
    assert "TORCH_NCCL_DUMP_ON_TIMEOUT" in added
    assert int(added["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 2)


def test_caches_lie_on_the_node(tmp_path):
    found = defaults({"MATMIX_NODE_DISK": str(tmp_path)})
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        assert found[name].startswith(f"{tmp_path}/matmix-")


def test_the_interface_that_leads_to_rank_zero():
    loopback = interface_towards("127.0.0.1")
    assert loopback is not None
    assert interface_towards("no-such-node.invalid") is None
    many = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2"}
    assert defaults(many)["GLOO_SOCKET_IFNAME"] == loopback
    assert "GLOO_SOCKET_IFNAME" not in defaults({**many, "WORLD_SIZE": "1"})


def test_every_default_is_described():
    page = (Path(__file__).parents[3] / "docs" / "clusters.md").read_text()
    assert [name for name in defaults({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}) if f"`{name}" not in page] == []


def test_the_run_directory_is_found_as_training_finds_it(tmp_path):
    recipe = tmp_path / "mine.toml"
    recipe.write_text('\ufeffrun_dir = "runs/from-recipe"\n')
    assert find_run_dir([str(recipe)]) == "runs/from-recipe"
    assert find_run_dir([str(recipe), "--steps", "3", "--run-dir", "other"]) == "other"
    assert find_run_dir([str(recipe), "--run_dir=other"]) == "other"
    assert find_run_dir([str(tmp_path)]) == str(tmp_path)
    assert find_run_dir(["debug_mru", "--steps", "3"]) == "runs/debug_mru"
    assert find_run_dir(["s3://bucket/runs/a", "--steps", "3"]) == "s3://bucket/runs/a"
    assert find_run_dir(["s3://bucket/runs/a", "--run-dir", "other"]) == "other"


def test_logs():
    environment = {"RANK": "3", "MATMIX_ATTEMPT": "17.1", "MATMIX_NODE_DISK": "/local"}
    assert log_path("runs/a", environment) == Path("runs/a/logs/17.1/rank-00003.log")
    node = local_folder("s3://bucket/runs/a", 1)
    assert log_path("s3://bucket/runs/a", {**environment, "GROUP_RANK": "1"}) == node / "logs/17.1/rank-00003.log"


def test_errors_of_other_ranks_reach_their_log_and_the_job(tmp_path):
    environment = {**os.environ, "RANK": "1", "WORLD_SIZE": "2", "MATMIX_ATTEMPT": "7.0"}
    environment.pop("MASTER_ADDR", None)
    command = [sys.executable, "-P", "-m", "matmix.launch.jobs.rank", "debug_mru", "--run-dir", str(tmp_path / "run")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    expected = "matmix: error: [rank 1] WORLD_SIZE is 2 but MASTER_ADDR and MASTER_PORT are not set"
    assert done.returncode == 2
    assert done.stderr.startswith(expected)
    assert (tmp_path / "run/logs/7.0/rank-00001.log").read_text().startswith(expected)

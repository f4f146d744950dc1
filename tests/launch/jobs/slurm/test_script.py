"""Batch scripts: what bash and sbatch read is what was meant, whatever characters it holds."""

import socket
import subprocess

import pytest
from failures import each

from matmix.launch.cli import main
from matmix.launch.jobs.slurm.submit import array_option, render, sbatch_value

ODD = 'it\'s "odd" $HOME `x` 100%'


@pytest.fixture
def dry_run(tmp_path, monkeypatch, capsys):
    """Renders `matmix launch slurm debug_mru ... --dry-run`; returns the script."""
    monkeypatch.setenv("MATMIX_CLUSTERS", str(tmp_path / "clusters.toml"))
    monkeypatch.delenv("MATMIX_MASTER_ADDR", raising=False)
    (tmp_path / "clusters.toml").write_text("")

    def call(*words: str, recipe: bool = True) -> str:
        capsys.readouterr()
        kind = ["debug_mru", "--run-dir", str(tmp_path / "run")] if recipe else []
        code = main(["launch", "slurm", *kind, *words, "--dry-run"])
        output = capsys.readouterr()
        assert code == 0, output.err
        syntax = subprocess.run(["bash", "-n"], input=output.out, capture_output=True, text=True)
        assert syntax.returncode == 0, syntax.stderr
        return output.out

    return call


def test_every_option_has_its_line(dry_run, tmp_path):
    script = dry_run(
        *("--nodes", "2", "--gpus-per-node", "h100:2", "--partition", "gpu", "--account", "ab01", "--qos", "high"),
        *("--time", "2-00:00:00", "--dependency", "singleton", "--cpus-per-task", "12", "--mem", "0"),
        *("--sbatch-option", "exclusive", "--sbatch-option=--constraint=a|b", "--job-name", "long"),
    )
    lines = script.splitlines()
    for line in (
        *("--nodes=2", "--ntasks-per-node=2", "--gres=gpu:h100:2", "--partition=gpu", "--account=ab01", "--qos=high"),
        *("--time=2-00:00:00", "--dependency=singleton", "--cpus-per-task=12", "--mem=0", "--exclusive"),
        *('--constraint="a|b"', "--job-name=long", "--signal=B:USR2@180", "--requeue", "--open-mode=append"),
        f"--output={tmp_path}/run/logs/slurm-%j.out",
    ):
        assert f"#SBATCH {line}" in lines
    assert not (tmp_path / "run").exists()


def test_values_reach_the_job_unchanged(dry_run, tmp_path):
    """The lines that set variables, run by bash as the job would."""
    script = dry_run(
        "--tasks-per-node", "2", "--env", f"ODD={ODD}", "--env", "EMPTY=", "--run-dir", str(tmp_path / ODD)
    )
    wanted = ("launch=", "run=", "export ODD=", "export EMPTY=")
    settings = "\n".join(line for line in script.splitlines() if line.startswith(wanted))
    shown = settings + '\nprintf "%s\\n" "$run" "${launch%/*}" "$ODD" "${EMPTY-unset}"'
    printed = subprocess.run(["bash", "-c", shown], capture_output=True, text=True, check=True).stdout.splitlines()
    assert printed == [str(tmp_path / ODD), str(tmp_path / ODD / "launch"), ODD, ""]
    assert f'{tmp_path}/it\'s \\"odd\\" $HOME `x` 100%%/logs/slurm-%j.out' in script


def test_a_variable_named_alone_is_required_and_not_written(dry_run, monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "hunter2")
    script = dry_run("--tasks-per-node", "1", "--env", "SECRET_KEY")
    assert "hunter2" not in script
    (line,) = [line for line in script.splitlines() if line.startswith(": ")]
    assert subprocess.run(["bash", "-c", line], env={"SECRET_KEY": "x"}).returncode == 0
    failed = subprocess.run(["bash", "-c", line], env={}, capture_output=True, text=True)
    assert failed.returncode != 0
    assert "--env SECRET_KEY" in failed.stderr


def test_the_ranks_run_inside_the_container(dry_run, tmp_path):
    pyxis = dry_run("--gpus-per-node", "2", "--container", "nvcr.io#nvidia/pytorch", "--container-mount", "/scratch:/s")
    assert "--container-image='nvcr.io#nvidia/pytorch'" in pyxis
    assert f"{tmp_path}/run:{tmp_path}/run" in pyxis
    assert ",/scratch:/s" in pyxis
    apptainer = dry_run("--gpus-per-node", "2", "--container", "image.sif", "--container-python", "/opt/python")
    assert "inside=(apptainer exec --nv --bind " in apptainer
    assert "python=/opt/python" in apptainer


def test_the_address_of_rank_0_can_be_given(dry_run, tmp_path, monkeypatch):
    assert "master_addr=''" in dry_run("--tasks-per-node", "1")
    (tmp_path / "clusters.toml").write_text('default = "here"\n[here]\nmaster_addr = "10.0.0.1"\ntasks_per_node = 1\n')
    assert "master_addr=10.0.0.1" in dry_run()
    monkeypatch.setenv("MATMIX_MASTER_ADDR", "10.0.0.2")
    assert "master_addr=10.0.0.2" in dry_run()
    assert "master_addr=::1" in dry_run("--master-addr", "::1")


def test_a_port_in_use_is_passed_over(dry_run):
    script = dry_run("--tasks-per-node", "1")
    start, end = script.index("port_in_use() {"), script.index("export MASTER_ADDR MASTER_PORT")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        lines = script[start:end].splitlines()
        check = f"{lines[0]}\nport_in_use {taken.getsockname()[1]} && echo taken"
        assert subprocess.run(["bash", "-c", check], capture_output=True, text=True).stdout == "taken\n"
    ports = set()
    for job, restarts in ((7, 0), (8, 0), (7, 1)):
        text = f"SLURM_JOB_ID={job}; restarts={restarts}\n{script[start:end]}\necho $MASTER_PORT"
        ports.add(int(subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True).stdout))
    assert len(ports) == 3
    assert all(20000 <= port < 32000 for port in ports)


@each(
    "status, code, ending, ends",
    [
        (0, 1, "", None),
        (10, 0, "", 0),
        (11, 75, "", 75),
        (11, 0, "", 1),
        (1, 1, "", 1),
        (1, 75, "", None),
        (1, 75, "--ending", 75),
    ],
)
def test_a_saved_run_goes_on_though_nothing_could_decide(dry_run, status, code, ending, ends):
    script = dry_run("--tasks-per-node", "1")
    decision = script[script.index("case $? in") : script.index("# Slurm ends this script")]
    shown = f"code={code} ending={ending}\n(exit {status})\n{decision}\nexit 42"
    assert subprocess.run(["bash", "-c", shown]).returncode == (42 if ends is None else ends)


def test_a_template_of_the_users(dry_run, tmp_path, capsys):
    own = tmp_path / "own.sbatch"
    own.write_text("#!/bin/bash\n# {{ tasks_per_node }} ranks\ncd {{ run | sh }}\n")
    script = dry_run("--tasks-per-node", "4", "--template", str(own))
    assert script == f"#!/bin/bash\n# 4 ranks\ncd {tmp_path}/run\n"
    own.write_text("{{ tasks }}\n")
    assert main(["launch", "slurm", "debug_mru", "--tasks-per-node", "1", "--template", str(own), "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert "own.sbatch" in error
    assert "'tasks' is undefined" in error
    assert "tasks_per_node" in error


def test_preparation_is_an_array_and_a_merge(dry_run, tmp_path):
    scripts = dry_run(
        *("--prepare", "--parts", "5", str(tmp_path / "some text.jsonl"), "--out", str(tmp_path / "out")),
        *("--vocab-size", "320", "--time", "60", "--array-limit", "2"),
        recipe=False,
    )
    parts, merge = scripts.split("#!/bin/bash\n")[1:]
    assert "#SBATCH --array=1-5%2\n" in parts
    assert f"prepare '{tmp_path}/some text.jsonl' --out {tmp_path}/out --vocab-size 320" in parts
    assert '--part "$SLURM_ARRAY_TASK_ID/5"' in parts
    assert "#SBATCH --array" not in merge
    assert f"prepare --merge --out {tmp_path}/out" in merge
    assert "#SBATCH --kill-on-invalid-dep=yes\n" in merge


def test_some_tasks_of_an_array_keep_its_limit(tmp_path):
    script = tmp_path / "job.sbatch"
    script.write_text("#SBATCH --nodes=1\n#SBATCH --array=0-7%3\n")
    assert array_option(script, [2, 5]) == "--array=2,5%3"


def test_line_breaks_cannot_stand_in_an_option():
    with pytest.raises(ValueError, match="line break"):
        sbatch_value("a\nb")


def test_the_bundled_templates_name_nothing_unknown():
    with pytest.raises(ValueError, match="it may use title"):
        render("train.sbatch", {"title": "x"})


MISTAKES = {
    "no ranks": ([], ["--gpus-per-node", "--tasks-per-node"]),
    "time": (["--tasks-per-node", "1", "--time", "soon"], ["soon", "24:00:00"]),
    "time to save": (["--tasks-per-node", "1", "--time", "3"], ["time 3", "save_seconds = 180"]),
    "batch": (["--nodes", "3", "--tasks-per-node", "1"], ["global_batch_size = 8", "3 ranks"]),
    "option": (["--tasks-per-node", "1", "--partitoin", "gpu"], ["--partitoin", "--partition"]),
    "recipe key": (["--tasks-per-node", "1", "--optimizer.lrr", "1"], ["optimizer.lrr", "optimizer.lr"]),
    "profile": (["--profile", "jupiter"], ["jupiter"]),
    "variable": (["--tasks-per-node", "1", "--env", "A-B=1"], ["A-B"]),
}


@each("case", MISTAKES)
def test_mistakes_are_one_line(case, dry_run, tmp_path, capsys):
    words, expected = MISTAKES[case]
    assert main(["launch", "slurm", "debug_mru", "--run-dir", str(tmp_path / "run"), *words]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    for word in expected:
        assert word in error
    assert not (tmp_path / "run").exists()


def test_without_slurm_it_says_so(dry_run, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["launch", "slurm", "debug_mru", "--tasks-per-node", "1", "--run-dir", str(tmp_path / "run")]) == 2
    assert "sbatch not found" in capsys.readouterr().err

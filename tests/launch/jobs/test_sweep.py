"""Sweeps: which runs, and under which names."""

import pytest
from failures import each

from matmix.launch.jobs.launches import launch_home
from matmix.launch.jobs.slurm.options import SlurmOptions
from matmix.launch.jobs.slurm.submit import plan_launch
from matmix.launch.jobs.sweep import parse_sweep
from matmix.train.recipe import load_config, load_phases


def test_the_product_in_order():
    points = parse_sweep(["optimizer.lr=1e-3,3e-4", "model.layers=mru,attention"])
    assert [point.name for point in points] == [
        "lr=1e-3,layers=mru",
        "lr=1e-3,layers=attention",
        "lr=3e-4,layers=mru",
        "lr=3e-4,layers=attention",
    ]
    assert points[1].overrides == ("--optimizer.lr", "1e-3", "--model.layers", "attention")
    assert parse_sweep([]) == []


def test_names_tell_keys_with_the_same_last_word_apart():
    (point,) = parse_sweep(["evaluation.every=10", "checkpoint.every=20"])
    assert point.name == "evaluation.every=10,checkpoint.every=20"


def test_runs_from_a_file(tmp_path):
    file = tmp_path / "runs.toml"
    file.write_text(
        '[[run]]\nname = "wide"\nmodel.d_model = 64\nmodel.layers = ["mru", "attention"]\n'
        '[[run]]\nmodel = { d_model = 32 }\n"optimizer.lr" = 1e-3\n'
    )
    named, unnamed = parse_sweep([], str(file))
    assert named.name == "wide"
    assert named.overrides == ("--model.d_model", "64", "--model.layers", "mru", "attention")
    assert unnamed.name == "d_model=32,lr=0.001"
    names = [point.name for point in parse_sweep(["seed=0,1"], str(file))]
    assert names == ["wide,seed=0", "wide,seed=1", "d_model=32,lr=0.001,seed=0", "d_model=32,lr=0.001,seed=1"]


def test_a_file_holds_tables_and_values_with_spaces(tmp_path):
    file = tmp_path / "runs.toml"
    file.write_text(
        '[[run]]\nname = "one"\ndata.path = "my data"\nmodel.architecture = "sequence_classifier"\n'
        'objective = { name = "sequence_classification", options = { label_smoothing = 0.1 } }\n'
        '[[run.optimizer.rule]]\nmatch = "*.weight"\nlr = 0.1\n[[run.optimizer.rule]]\nmatch = "*.bias"\nlr = 0.2\n'
    )
    (point,) = parse_sweep([], str(file))
    config = load_config("debug_hydra", point.overrides)
    assert config.data.path == "my data"
    assert config.objective.options == {"label_smoothing": 0.1}
    assert [(rule.match, rule.lr) for rule in config.optimizer.rule] == [("*.weight", 0.1), ("*.bias", 0.2)]


@each(
    "axes, words",
    [
        (["optimizer.rule={match = 'a', lr = 1}"], "has a table: write it into a file"),
        (["optimizer.lr"], "KEY=VALUE"),
        (["optimizer.lr="], "KEY=VALUE"),
        (["seed=1", "seed=2"], "given twice"),
        (["seed=1,1"], "names a value twice"),
        (["data.path=a/b,a-b"], "share the directory"),
    ],
)
def test_mistakes(axes, words):
    with pytest.raises(ValueError, match=words):
        parse_sweep(axes)


def test_each_task_has_a_config_and_a_directory_of_its_own(tmp_path):
    home = tmp_path / "sweep"
    points = parse_sweep(["optimizer.lr=1e-2,1e-3", "seed=5"])
    options = SlurmOptions(tasks_per_node=2, array_limit=1)
    launch = plan_launch("debug_mru", ["--run-dir", str(home)], points, options, ["launch", "slurm"])
    script = launch.scripts["job.sbatch"]
    assert "#SBATCH --array=0-1%1\n" in script
    assert f"#SBATCH --output={home}/logs/slurm-%A_%a.out\n" in script
    launch.write()
    for number, rate in enumerate(("1e-2", "1e-3")):
        config = load_config(str(launch.folder / "tasks" / str(number) / "config.toml"))
        assert (config.optimizer.lr, config.seed) == (float(rate), 5)
        assert config.run_dir == str(home / f"lr={rate},seed=5")
        assert config.run_dir in script
    assert (home / "logs").is_dir()


def test_phases_are_one_job_and_a_sweep_of_them_one_array(tmp_path):
    home, options = tmp_path / "run", SlurmOptions(tasks_per_node=2)
    alone = plan_launch("hydra_modern_base", ["--run-dir", str(home)], [], options, [])
    assert f"\nrun={home}\n" in alone.scripts["job.sbatch"]
    alone.write()
    assert load_phases(str(alone.folder / "config.toml")) == load_phases("hydra_modern_base", ["--run-dir", str(home)])
    assert sorted(path.name for path in home.iterdir()) == ["launch", "logs", "phase-1", "phase-2", "phase-3"]

    swept = plan_launch("hydra_modern_base", ["--run-dir", str(home)], parse_sweep(["model.n_layers=1,2"]), options, [])
    swept.write()  # in the same second, maybe
    for number in range(2):
        phases = load_phases(str(swept.folder / f"tasks/{number}/config.toml"))
        folders = [f"{home}/n_layers={number + 1}/phase-{phase}" for phase in (1, 2, 3)]
        assert [one.run_dir for one in phases] == folders
        assert [one.init.from_ for one in phases] == ["", *folders[:2]]
        assert {one.model.n_layers for one in phases} == {number + 1}


def test_a_run_is_no_place_for_a_sweep(tmp_path):
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(ValueError, match="is a run"):
        plan_launch(
            "debug_mru", ["--run-dir", str(tmp_path)], parse_sweep(["seed=1,2"]), SlurmOptions(tasks_per_node=1), []
        )


def test_run_directories_are_absolute_and_keep_links(tmp_path, monkeypatch):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.chdir(tmp_path)
    assert launch_home("link/run") == tmp_path / "link" / "run"
    assert launch_home("s3://bucket/runs/a b") == tmp_path / "runs" / "bucket-runs-a-b"

"""Trackers of experiments: the records of metrics.jsonl, one run at the service for all starts of a run, and training
that goes on where the service is away. Packages of the services are stood in for; test_real_trackers.py has the real
ones."""

import importlib.machinery
import math
import sys
import types

import pytest
from runs import run_recipe
from tracked import written

from matmix.launch.cli import main
from matmix.train.callbacks import trackers

WANDB = ["--callback", '{name = "wandb", options = {project = "p", tags = ["a"]}}']
MLFLOW = ["--callback", '{name = "mlflow", options = {uri = "http://nowhere:5000", experiment = "e"}}']
SHORT = ["--evaluation.every", "2", "--checkpoint.every", "2", "--logging.every", "1", "--logging.tensorboard", "False"]


class Module(types.ModuleType):
    """A package that stands in for one that is not installed."""

    def __init__(self, name, **parts):
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)
        self.__dict__.update(parts)


class TrackedRun:
    def __init__(self, options):
        self.options, self.logged, self.axes, self.code = options, [], [], None
        self.offline, self.url = options["mode"] == "offline", "https://there/run"

    def define_metric(self, name, step_metric=None):
        self.axes.append((name, step_metric))

    def log(self, values):
        self.logged.append(values)

    def finish(self, exit_code):
        self.code = exit_code


@pytest.fixture
def wandb(monkeypatch):
    """A package `wandb` that keeps what it is given; `away` makes all but offline runs fail."""
    runs = []

    def init(**options):
        if module.away and options["mode"] != "offline":
            raise RuntimeError("no route to\nhost")
        runs.append(TrackedRun(options))
        return runs[-1]

    module = Module("wandb", init=init, Settings=dict, teardown=lambda: None, runs=runs, away=False)
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


class Server:
    """An MLflow server, with the client of each uri in one."""

    def __init__(self, **_):
        pass

    runs, experiments, tries, away = {}, {}, 0, 0

    @classmethod
    def reset(cls, away):
        cls.runs, cls.experiments, cls.tries, cls.away = {}, {}, 0, away

    def _answer(self):
        Server.tries += 1
        if Server.tries <= Server.away:
            raise ConnectionError("connection\nrefused")

    def get_experiment_by_name(self, name):
        self._answer()
        return types.SimpleNamespace(experiment_id=name) if name in self.experiments else None

    def create_experiment(self, name):
        self.experiments[name] = True
        return name

    def create_run(self, experiment, run_name):
        name = f"{experiment}-{len(self.runs)}"
        self.runs[name] = {"name": run_name, "metrics": [], "params": {}, "states": ["RUNNING"]}
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=name))

    def update_run(self, name, status):
        self._answer()
        self.runs[name]["states"].append(status)

    def log_batch(self, name, metrics=(), params=()):
        self._answer()
        assert len(metrics) <= 1000
        assert len(params) <= 100
        self.runs[name]["metrics"] += metrics
        assert not self.runs[name]["params"].keys() & dict(params)
        self.runs[name]["params"] |= dict(params)

    def set_terminated(self, name, state):
        self._answer()
        self.runs[name]["states"].append(state)


@pytest.fixture
def mlflow(monkeypatch):
    entities = Module("mlflow.entities", Metric=lambda *values: values, Param=lambda *values: values)
    monkeypatch.setitem(sys.modules, "mlflow", Module("mlflow", MlflowClient=Server, entities=entities))
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    monkeypatch.setattr(trackers, "_PAUSE_SECONDS", 0.01)
    Server.reset(away=0)
    return Server


def test_wandb_gets_the_records_and_goes_on_with_its_run(wandb, dataset, tmp_path):
    for steps in ("2", "4"):
        run_recipe("debug_mru", dataset, tmp_path, "--stop-step", steps, "--steps", "4", *SHORT, *WANDB)
    first, second = wandb.runs
    sent = {(n, line["step"]): v for run in (first, second) for line in run.logged for n, v in line.items()}
    sent = {key: value for key, value in sent.items() if key[0] != "step"}
    assert sent == written(tmp_path)
    assert first.options["id"] == second.options["id"]
    assert second.options["resume"] == "allow"
    assert first.options["config"]["optimizer"]["lr"] > 0
    assert (first.options["project"], first.options["tags"], first.options["name"]) == ("p", ("a",), tmp_path.name)
    assert first.axes == [("step", None), ("*", "step")]
    assert second.code == 0
    run_recipe("debug_mru", dataset, tmp_path / "other", "--steps", "1", *SHORT, *WANDB)
    assert wandb.runs[-1].options["id"] != first.options["id"]


def test_without_the_service_wandb_keeps_the_records_and_says_so_once(wandb, dataset, tmp_path, capfd):
    wandb.away = True
    run_recipe("debug_mru", dataset, tmp_path, "--steps", "2", *SHORT, *WANDB)
    (run,) = wandb.runs
    assert run.offline
    assert len(run.logged) >= 2
    said = [line for line in capfd.readouterr().err.splitlines() if "Weights & Biases cannot" in line]
    assert len(said) == 1
    assert "no route to host" in said[0]


def test_mlflow_gets_the_records_and_goes_on_with_its_run(mlflow, dataset, tmp_path):
    for steps in ("2", "4"):
        run_recipe("debug_mru", dataset, tmp_path, "--stop-step", steps, "--steps", "4", *SHORT, *MLFLOW)
    ((name, run),) = mlflow.runs.items()
    assert name == "e-0"
    assert run["name"] == tmp_path.name
    assert run["params"]["model.layers"] == '["mru"]'
    assert {(metric, step): value for metric, value, _, step in run["metrics"]} == written(tmp_path, ".")
    assert run["states"][-2:] == ["RUNNING", "FINISHED"]


def test_what_a_server_that_is_away_does_not_take_is_sent_later(mlflow, dataset, tmp_path, capfd):
    mlflow.reset(away=3)
    run_recipe("debug_mru", dataset, tmp_path, "--steps", "4", *SHORT, *MLFLOW)
    (run,) = mlflow.runs.values()
    assert {(metric, step): value for metric, value, _, step in run["metrics"]} == written(tmp_path, ".")
    said = capfd.readouterr().err
    assert said.count("takes no records now (connection refused); they wait") == 1


def test_a_server_that_never_comes_back_holds_nothing_up(mlflow, dataset, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(trackers, "_PAUSE_SECONDS", 60.0)
    mlflow.reset(away=math.inf)
    result = run_recipe("debug_mru", dataset, tmp_path, "--steps", "3", *SHORT, *MLFLOW)
    assert result.step == 3
    said = capfd.readouterr().err
    assert said.count("takes no records now") == 1
    assert f"{len(written(tmp_path)):,} numbers were not sent to MLflow" in said


def test_a_damaged_file_of_names_begins_new_runs(mlflow, dataset, tmp_path, capfd):
    run_recipe("debug_mru", dataset, tmp_path, "--stop-step", "2", "--steps", "4", *SHORT, *MLFLOW)
    (tmp_path / "trackers.json").write_text("{")
    run_recipe("debug_mru", dataset, tmp_path, "--steps", "4", *SHORT, *MLFLOW)
    assert list(mlflow.runs) == ["e-0", "e-1"]
    assert "trackers.json is damaged and moved to trackers.json.aside-1" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("callback", "said"),
    [
        ('{name = "wandb"}', "needs wandb, which is not installed"),
        ('{name = "mlflow", options = {uri = "http://a"}}', "needs mlflow, which is not installed"),
        ('{name = "wandbb"}', "did you mean 'wandb'?"),
    ],
)
def test_mistakes_are_one_line(callback, said, dataset, tmp_path, capsys, monkeypatch):
    for package in ("wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, package, None)
    words = ["train", "debug_mru", "--data.path", dataset, "--run-dir", str(tmp_path / "run"), "--device", "cpu"]
    assert main([*words, "--callback", callback]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert len(errors) == 1
    assert said in errors[0]


def test_options_of_mlflow_are_checked(mlflow, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(ValueError, match="give a tracking server as uri"):
        trackers.MLflowOptions()
    with pytest.raises(ValueError, match="may not hold a password"):
        trackers.MLflowOptions(uri="https://me:secret@host")

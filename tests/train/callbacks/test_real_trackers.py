"""The trackers with the packages of the services, offline: what those keep on disk, in two starts of one run.

MATMIX_TRACKERS names a folder that `pip install --target` filled with wandb and mlflow-skinny, which together are too
large for the tests' environment.
"""

import json
import os
import sys

import pytest
from runs import run_recipe
from tracked import written

FOLDER = os.environ.get("MATMIX_TRACKERS")
SHORT = ["--evaluation.every", "2", "--checkpoint.every", "2", "--logging.every", "1", "--logging.tensorboard", "False"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDER, reason="MATMIX_TRACKERS names no folder with wandb and mlflow-skinny"),
]


@pytest.fixture(autouse=True)
def _packages(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, FOLDER])


def two_starts(dataset, folder, callback):
    for stop in ("2", "4"):
        arguments = ["--stop-step", stop, "--steps", "4", *SHORT, "--callback", callback]
        run_recipe("debug_mru", dataset, folder, *arguments)


def wandb_records(raw, block=1 << 15):
    """The records of a .wandb file: a header of 7 bytes, then LevelDB's log, whose records are cut at blocks."""
    assert raw[:4] == b":W&B"
    place, parts = 7, []
    while place + 7 <= len(raw):
        if block - place % block < 7:
            place += block - place % block
            continue
        size, kind = int.from_bytes(raw[place + 4 : place + 6], "little"), raw[place + 6]
        parts.append(raw[place + 7 : place + 7 + size])
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part of one
            yield b"".join(parts)
            parts.clear()


def test_wandb_offline(dataset, tmp_path, capfd):
    two_starts(dataset, tmp_path, '{name = "wandb", options = {mode = "offline"}}')
    own = json.loads((tmp_path / "trackers.json").read_text())["wandb /matmix"]
    files = sorted((tmp_path / "wandb").glob(f"offline-run-*/run-{own}.wandb"))
    assert len(files) == 2
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # as at the end of a process: waits for what is still being written
    sent, configs = {}, []
    for file in files:
        for data in wandb_records(file.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            if record.HasField("run"):
                assert record.run.run_id == own
                configs.append({item.key for item in record.run.config.update})
            if record.HasField("history"):
                values = {(one.key or one.nested_key[0]): one.value_json for one in record.history.item}
                step = json.loads(values.pop("step"))
                sent |= {(name, step): json.loads(value) for name, value in values.items() if name[0] != "_"}
    assert sent == pytest.approx(written(tmp_path))
    assert {"model", "optimizer", "data"} <= configs[0]
    assert "wandb sync" in capfd.readouterr().err


def test_wandb_without_a_network_trains_on_and_keeps_the_records(dataset, tmp_path, capfd, monkeypatch):
    from matmix.train.callbacks import trackers

    monkeypatch.setattr(trackers, "_START_SECONDS", 2)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    result = run_recipe("debug_mru", dataset, tmp_path, "--steps", "2", *SHORT, "--callback", '{name = "wandb"}')
    assert result.step == 2
    said = [line for line in capfd.readouterr().err.splitlines() if "Weights & Biases cannot be used now" in line]
    assert len(said) == 1
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))


def test_mlflow_in_a_folder(dataset, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    two_starts(dataset, tmp_path / "run", '{name = "mlflow"}')
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=(tmp_path / "store").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("matmix").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "run"
    assert run.data.params["optimizer.name"] == "adamw"
    histories = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    sent = {(name, one.step): one.value for name, history in histories.items() for one in history}
    assert sent == pytest.approx(written(tmp_path / "run", "."))


def test_mlflow_without_its_server_trains_on(dataset, tmp_path, capfd, monkeypatch):
    from matmix.train.callbacks import trackers

    monkeypatch.setattr(trackers, "_END_SECONDS", 10.0)
    callback = '{name = "mlflow", options = {uri = "http://127.0.0.1:9"}}'
    result = run_recipe("debug_mru", dataset, tmp_path, "--steps", "2", *SHORT, "--callback", callback)
    assert result.step == 2
    said = capfd.readouterr().err
    assert said.count("takes no records now") == 1
    assert "numbers were not sent to MLflow" in said

"""Runs at URLs, against a real S3-compatible server: what is uploaded when, and going on from it elsewhere."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import pytest
from folders import contents
from object_store import running_store
from runs import losses, run_recipe
from saved_weights import read_weights

from matmix.train import loop
from matmix.train.checkpoint.manager import CheckpointManager
from matmix.train.run import lock as lease
from matmix.train.run import remote, trained
from matmix.train.run.directory import MovedError
from matmix.train.run.outcome import local_folder
from matmix.train.run.sync import RunSync
from matmix.train.run.trained import fetch_run, local_outline

STEPS = ("--steps", "12", "--checkpoint.every", "4", "--logging.every", "1", "--evaluation.every", "0")


@pytest.fixture
def store(monkeypatch, tmp_path):
    monkeypatch.setenv("MATMIX_SCRATCH", str(tmp_path / "scratch"))
    monkeypatch.setattr(lease, "SETTLE_SECONDS", 0.0)
    with running_store(monkeypatch) as running:
        yield running


@pytest.fixture
def url(store) -> str:
    return f"{store.url}/runs/a"


@pytest.fixture(scope="module")
def straight(tmp_path_factory, dataset):
    """The run as it is in a folder, uninterrupted."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    run_recipe("debug_mru", dataset, folder, *STEPS)
    return folder


def elsewhere(tmp_path) -> None:
    """As if the next start were on another machine."""
    shutil.rmtree(tmp_path / "scratch")


def said(capsys) -> str:
    output = capsys.readouterr()
    return output.out + output.err


def warnings_in(output: str) -> list[str]:
    # These steps take no time, so that they may have to wait for uploads.
    return [line for line in output.splitlines() if "warning" in line and "still being written" not in line]


def steps_at(store) -> list[str]:
    return sorted(name.split("/")[3] for name in store.names("runs/a/checkpoints/") if name.endswith("checkpoint.json"))


def weights_at(url: str, step: int) -> dict:
    return dict(read_weights(CheckpointManager(fetch_run(url)[0] / "checkpoints").path(step)))


def test_a_run_goes_on_elsewhere_as_if_nothing_had_happened(store, url, dataset, tmp_path, straight, capsys):
    run_recipe("debug_mru", dataset, url, *STEPS, "--stop-step", "8")
    assert steps_at(store) == ["step-00000004", "step-00000008"]
    _assert_the_manifest_is_uploaded_last(store)
    elsewhere(tmp_path)
    capsys.readouterr()
    assert run_recipe("debug_mru", dataset, url, *STEPS, "--logging.tensorboard", "True").finished
    assert "resumed from step-00000008" in said(capsys)
    assert losses(local_folder(url)) == losses(straight)
    expected = dict(read_weights(straight / "checkpoints" / "step-00000012"))
    found = weights_at(url, 12)
    assert all((found[name] == value).all() for name, value in expected.items())
    # Old ones are gone from the store, and everything else of the run is there.
    assert steps_at(store) == ["step-00000008", "step-00000012"]
    names = {name.removeprefix("runs/a/") for name in store.names("runs/a/")}
    assert {"config.toml", "metrics.jsonl", "summary.json", "leases/00000002.json"} <= names
    assert any(name.startswith("tokenizer/") for name in names)
    assert any(name.startswith("tensorboard/") for name in names)
    records = [name for name in names if not name.startswith("checkpoints/")]
    assert not [name for name in records if "lock" in name or "/." in name or name.startswith(".")]
    assert store.get("runs/a/metrics.jsonl") == (local_folder(url) / "metrics.jsonl").read_bytes()
    local = [path.read_bytes() for path in (tmp_path / "scratch").rglob("*") if path.is_file()]
    for content in [*local, *(store.get(name) for name in store.names())]:
        assert b"a-secret-access-key" not in content
        assert b"an-access-key-id" not in content
    # Started once more, it finds nothing to do, also on a machine that has seen nothing.
    elsewhere(tmp_path)
    assert run_recipe("debug_mru", dataset, url, *STEPS).steps_done == 0


def _assert_the_manifest_is_uploaded_last(store) -> None:
    writes = [path.split("/runs/a/")[1] for method, path in store.requests if method == "PUT" and "/runs/a/" in path]
    files = [name for name in writes if name.startswith("checkpoints/step-00000004/")]
    assert len(files) > 2
    assert files.index("checkpoints/step-00000004/checkpoint.json") == len(files) - 1
    # What a reader needs besides is there before a checkpoint counts.
    assert {"config.toml", "metrics.jsonl"} < set(writes[: writes.index(files[-1])])


@pytest.mark.slow
def test_a_failed_upload_costs_one_line_and_no_checkpoint(store, url, dataset, tmp_path, straight, capsys):
    store.refuse = lambda method, path: method == "PUT" and "step-00000008" in path
    assert run_recipe("debug_mru", dataset, url, *STEPS, "--stop-step", "10").saved
    warnings = warnings_in(said(capsys))
    assert len(warnings) == 1
    assert f"no checkpoint at step 8: cannot upload {url}/checkpoints/step-00000008/" in warnings[0]
    assert "training goes on, the last valid one is step-00000004" in warnings[0]
    assert steps_at(store) == ["step-00000004", "step-00000010"]
    store.refuse = lambda method, path: False
    elsewhere(tmp_path)
    assert run_recipe("debug_mru", dataset, url, *STEPS).finished
    assert losses(local_folder(url)) == losses(straight)


@pytest.mark.slow
def test_a_node_whose_folder_is_moved_uploads_what_it_has_and_ends(store, url, dataset, tmp_path, monkeypatch):
    true = loop.Trainer.compute_step

    def step(trainer, batches):
        if trainer.state.step == 5:
            local_folder(url).rename(tmp_path / "moved")
        true(trainer, batches)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "compute_step", step)
        with pytest.raises(MovedError, match=f"^this node's folder of {url} was moved to {tmp_path / 'moved'} while"):
            run_recipe("debug_mru", dataset, url, *STEPS)
    assert steps_at(store)[-1] == "step-00000006"
    assert store.get("runs/a/metrics.jsonl") == (tmp_path / "moved" / "metrics.jsonl").read_bytes()
    assert not local_folder(url).exists()
    assert run_recipe("debug_mru", dataset, url, *STEPS).steps_done == 6


@pytest.mark.slow
def test_uploads_that_fail_until_the_end_leave_the_last_one_valid(store, url, dataset, tmp_path, straight, capsys):
    store.refuse = lambda method, path: method == "PUT" and "checkpoints/step" in path and "step-00000004" not in path
    assert not run_recipe("debug_mru", dataset, url, *STEPS, "--stop-step", "10").saved
    assert steps_at(store) == ["step-00000004"]
    store.refuse = lambda method, path: False
    # On the same machine the step that it holds is uploaded now, and the run goes on from there.
    keep = tmp_path / "keep"
    shutil.copytree(tmp_path / "scratch", keep)
    capsys.readouterr()
    run_recipe("debug_mru", dataset, url, *STEPS, "--stop-step", "11")
    output = said(capsys)
    assert "uploaded the checkpoint of step 10, which the last start of this run could not" in output
    assert "resumed from step-00000010" in output
    # A machine that held a step, but was not there the last time, does not bring it back.
    elsewhere(tmp_path)
    shutil.copytree(keep, tmp_path / "scratch")
    run_recipe("debug_mru", dataset, url, *STEPS)
    assert "resumed from step-00000011" in said(capsys)
    assert losses(local_folder(url)) == losses(straight)


@pytest.mark.slow
def test_a_store_that_is_away_for_a_moment_is_not_noticed(store, url, dataset, monkeypatch, straight, capsys):
    monkeypatch.setenv("MATMIX_RETRY_SECONDS", "120")
    real, started = RunSync.push, threading.Event()

    def push(self, step):
        if step == 4 and not started.is_set():
            started.set()
            store.stop()
            threading.Timer(1.5, store.start).start()
        real(self, step)

    monkeypatch.setattr(RunSync, "push", push)
    assert run_recipe("debug_mru", dataset, url, *STEPS).finished
    assert started.is_set()
    assert not warnings_in(said(capsys))
    assert steps_at(store) == ["step-00000008", "step-00000012"]
    assert losses(local_folder(url)) == losses(straight)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_reported_and_the_previous_one_used(
    store, url, dataset, tmp_path, straight, capsys, told
):
    run_recipe("debug_mru", dataset, url, *STEPS, "--stop-step", "8")
    manifest = "runs/a/checkpoints/step-00000008/checkpoint.json"
    files = json.loads(store.get(manifest))["files"]
    name = max(files, key=lambda name: files[name][0])
    victim = f"runs/a/checkpoints/step-00000008/{name}"
    whole = {key: store.get(key) for key in (manifest, victim)}
    flipped = bytearray(whole[victim])
    flipped[len(flipped) // 2] ^= 1
    for key, content, problem in (
        (manifest, b'{"version": 1, "fi', "its checkpoint.json cannot be read"),
        (victim, None, f"{name} is missing"),
        (victim, whole[victim][:-10], f"{name} is truncated ({files[name][0] - 10} of {files[name][0]} bytes)"),
        (victim, bytes(flipped), f"{name} does not match its checksum"),
    ):
        elsewhere(tmp_path)
        for other, before in whole.items():
            store.put(other, before)
        store.delete(key) if content is None else store.put(key, content)
        sync = RunSync(url, local_folder(url))
        store_there = remote.UploadedStore(sync, up_to_date=False, keep_last=2)
        checkpoints = CheckpointManager(store_there)
        told.clear()
        assert checkpoints.latest_valid().name == "step-00000004"
        expected = f"warning: skipping a checkpoint: checkpoint {url}/checkpoints/step-00000008 is damaged: {problem}"
        assert [line for line in told if "warning" in line] == [expected]
    capsys.readouterr()
    assert run_recipe("debug_mru", dataset, url, *STEPS).finished
    output = said(capsys)
    assert len(warnings_in(output)) == 1
    assert "resumed from step-00000004" in output
    assert losses(local_folder(url)) == losses(straight)
    assert steps_at(store) == ["step-00000008", "step-00000012"]


@pytest.mark.slow
def test_it_does_not_start_from_scratch_where_no_checkpoint_is_valid(store, url, dataset, tmp_path):
    run_recipe("debug_mru", dataset, url, *STEPS, "--stop-step", "4")
    elsewhere(tmp_path)
    victim = next(name for name in store.names("runs/a/checkpoints/") if not name.endswith("checkpoint.json"))
    store.delete(victim)
    with pytest.raises(ValueError, match=rf"is missing; no checkpoint in {url}/checkpoints is valid: restore one, or"):
        run_recipe("debug_mru", dataset, url, *STEPS)
    store.stop()
    with pytest.raises(OSError, match=rf"^cannot \w+ {url}.*: \w+: "):
        run_recipe("debug_mru", dataset, url, *STEPS)
    assert not list(local_folder(url).glob("checkpoints/step-*/checkpoint.json"))


@pytest.mark.slow
def test_what_is_no_run_is_left_alone(store, url, dataset):
    store.put("runs/a/photos/one.jpg", b"...")
    with pytest.raises(ValueError, match=rf"^run_dir {url} is not empty and not a run; choose another run_dir$"):
        run_recipe("debug_mru", dataset, url, *STEPS)
    assert store.names() == ["runs/a/photos/one.jpg"]
    other = f"{store.url}/b"
    run_recipe("debug_mru", dataset, other, *STEPS, "--stop-step", "1", "--seed", "7")
    with pytest.raises(ValueError, match=rf"^run_dir {other} belongs to a run with another config \(seed: 7 there"):
        run_recipe("debug_mru", dataset, other, *STEPS)


@pytest.mark.slow
def test_a_second_job_is_refused_and_harms_nothing(store, url, dataset, monkeypatch, straight):
    from matmix.train import loop

    monkeypatch.setattr(lease, "RENEWAL_SECONDS", 0.1)
    real, complaints = loop.Trainer.train_step, []

    def start_again() -> None:
        monkeypatch.setenv("GROUP_RANK", "7")  # another machine: another folder
        try:
            run_recipe("debug_mru", dataset, url, *STEPS)
        except ValueError as error:
            complaints.append(str(error))
        finally:
            monkeypatch.delenv("GROUP_RANK")

    def step(trainer, batches):
        if trainer.state.step == 3 and not complaints:
            second = threading.Thread(target=start_again)
            second.start()
            second.join()
        real(trainer, batches)

    monkeypatch.setattr(loop.Trainer, "train_step", step)
    assert run_recipe("debug_mru", dataset, url, *STEPS).finished
    assert len(complaints) == 1
    assert f"run_dir {url} is in use by another job (host " in complaints[0]
    assert losses(local_folder(url)) == losses(straight)


def test_who_lost_the_run_to_another_job_does_not_touch_it(store, url, dataset, monkeypatch):
    monkeypatch.setattr(lease, "RENEWAL_SECONDS", 600.0)
    real = remote.UploadedStore.publish

    def publish(self, step, group):
        if step == 8:
            store.put("runs/a/metrics.jsonl", b"of the other job")
            other = json.loads(store.get("runs/a/leases/00000001.json"))
            taken = {**other, "token": "x", "owner": {"host": "node-9"}}
            store.put("runs/a/leases/00000002.json", json.dumps(taken).encode())
        return real(self, step, group)

    monkeypatch.setattr(remote.UploadedStore, "publish", publish)
    with pytest.raises(lease.LeaseLostError, match=r"taken over by another job \(host node-9"):
        run_recipe("debug_mru", dataset, url, *STEPS)
    assert steps_at(store) == ["step-00000004"]
    assert json.loads(store.get("runs/a/leases/00000002.json"))["token"] == "x"
    assert store.get("runs/a/metrics.jsonl") == b"of the other job"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["file", "memory"])
def test_other_urls(kind, dataset, tmp_path, monkeypatch, straight):
    monkeypatch.setenv("MATMIX_SCRATCH", str(tmp_path / "scratch"))
    monkeypatch.setattr(lease, "SETTLE_SECONDS", 0.0)
    url = (tmp_path / "mounted" / "run").as_uri() if kind == "file" else f"memory://{tmp_path.name}/run"
    run_recipe("debug_mru", dataset, url, *STEPS, "--stop-step", "8")
    elsewhere(tmp_path)
    assert run_recipe("debug_mru", dataset, url, *STEPS).finished
    assert losses(local_folder(url)) == losses(straight)


@pytest.mark.slow
def test_verbs_take_the_url_of_a_run(store, url, dataset, tmp_path, capsys):
    """Through the command line, which also leaves at the URL how each start of the run ended."""
    from matmix.launch.cli import main

    recipe = ["--data.path", dataset, "--device", "cpu", *STEPS]
    assert main(["train", "debug_mru", "--run-dir", url, "--stop-step", "8", *recipe]) == 0
    elsewhere(tmp_path)
    assert main(["train", url]) == 0  # its config is at the URL
    outcomes = [name for name in store.names("runs/a/launch/outcomes/") if name.endswith(".json")]
    assert [json.loads(store.get(name))["code"] for name in outcomes] == [0]  # both starts are of this process
    elsewhere(tmp_path)
    capsys.readouterr()
    assert main(["generate", url, "--prompt", "the king", "--max-new-tokens", "5", "--temperature", "0"]) == 0
    text = capsys.readouterr().out
    assert main(["export", url, "--out", str(tmp_path / "export"), "--step", "12"]) == 0
    assert main(["generate", str(tmp_path / "export"), "--prompt", "the king", "--max-new-tokens", "5"]) == 0
    assert main(["checkpoints", "convert", url, "--out", str(tmp_path / "converted")]) == 0
    assert (tmp_path / "converted" / "checkpoints" / "step-00000012").is_dir()
    capsys.readouterr()
    assert text.startswith("the king")
    downloads = len([1 for method, path in store.requests if method == "GET" and path.endswith(".distcp")])
    assert main(["checkpoints", url]) == 0
    listed = capsys.readouterr().out
    assert all(word in listed for word in ("8", "12"))
    assert len([1 for method, path in store.requests if method == "GET" and path.endswith(".distcp")]) == downloads
    assert main(["checkpoints", url, "--verify"]) == 0
    victim = next(name for name in store.names("runs/a/checkpoints/step-00000012/") if ".json" not in name)
    store.put(victim, store.get(victim)[:-1])
    capsys.readouterr()
    assert main(["checkpoints", url]) == 1
    listed = capsys.readouterr().out
    assert "is truncated (" in listed
    assert "a resume would use step-00000008" in listed
    assert str(tmp_path) not in listed
    assert main(["generate", url, "--step", "5"]) == 2
    assert main(["generate", f"{store.url}/nothing"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert f"matmix: error: {url} has no checkpoint of step 5; there are: 8, 12" in errors
    assert f"matmix: error: there is no run at {store.url}/nothing" in errors


@pytest.mark.slow
def test_what_somebody_reads_stays_as_it_is_whatever_others_read(store, url, dataset, tmp_path):
    """Listings, other checkpoints and other processes leave a copy alone for as long as its reader runs."""
    run_recipe("debug_mru", dataset, url, *STEPS)
    own = fetch_run(url, step=8)[0]
    checkpoint = own / "checkpoints" / "step-00000008"
    before = contents(checkpoint)
    assert local_outline(url) != own
    assert (fetch_run(url, step=12)[0] / "checkpoints" / "step-00000012").is_dir()
    assert contents(checkpoint) == before
    program = (
        "import sys; from matmix.train.run.trained import fetch_run, local_outline; url = sys.argv[1];"
        "local_outline(url); print(fetch_run(url, step=12)[0])"
    )
    environment = {**os.environ, **store.environment(), "MATMIX_SCRATCH": str(tmp_path / "scratch")}
    found = subprocess.run(
        [sys.executable, "-P", "-c", program, url], env=environment, capture_output=True, text=True, check=True
    )
    other = Path(found.stdout.strip())
    assert other != own
    assert (other / "checkpoints" / "step-00000012").is_dir()
    assert contents(checkpoint) == before


@pytest.mark.slow
def test_generate_and_export_fetch_and_hash_only_what_holds_weights_and_that_once(
    store, url, dataset, tmp_path, monkeypatch, straight
):
    from matmix.train.checkpoint import manifest
    from matmix.use.exporting import convert_run, export_run
    from matmix.use.opening import open_model

    hashed: list[str] = []
    real = manifest.sha256
    monkeypatch.setattr(manifest, "sha256", lambda path: hashed.append(path.name) or real(path))
    run_recipe("debug_mru", dataset, url, *STEPS)
    convert_run(straight, tmp_path / "converted")
    for run in (straight, tmp_path / "converted", url):
        for use in (open_model, lambda run: export_run(run, tmp_path / uuid.uuid4().hex)):
            shutil.rmtree(tmp_path / "scratch", ignore_errors=True)
            trained._reader.cache_clear()
            hashed.clear()
            store.requests.clear()
            use(run)
            names = [name for name in hashed if name.endswith((".distcp", ".safetensors"))]
            assert len(names) == 1  # the file of the weights
            assert "moments" not in names[0]
            assert len(hashed) == len(set(hashed))
            fetched = [path for method, path in store.requests if method == "GET" and "/checkpoints/step-" in path]
            assert len(fetched) == len(set(fetched))
            assert not [path for path in fetched if "moments" in path]
            assert bool(fetched) == (run == url)
    moments = [n for n in store.names("runs/a/checkpoints/step-00000012/") if "moments" in n]
    assert moments  # they lie in files of their own


@pytest.mark.slow
def test_old_checkpoints_that_cannot_be_removed_here_do_not_end_the_run(store, url, dataset, monkeypatch, capsys):
    """Also where an upload has just failed: what one rank alone would raise there leaves the others waiting."""
    store.refuse = lambda method, path: method == "PUT" and "step-00000008" in path
    real = shutil.rmtree

    def rmtree(path, *arguments, **options):
        if Path(path).name == ".old-step-00000004" and not options.get("ignore_errors"):
            raise OSError(errno.EIO, "Input/output error")
        real(path, *arguments, **options)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    assert run_recipe("debug_mru", dataset, url, *STEPS, "--checkpoint.keep-last", "1").finished
    output = said(capsys)
    assert "no checkpoint at step 8: cannot upload" in output
    assert "could not be removed: [Errno 5] Input/output error" in output

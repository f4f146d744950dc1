"""What lies in a run's folder beside its checkpoints: edits are noticed, damage of records costs records only."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from failures import each
from nightly import nightly
from runs import losses, records, run_recipe

from matmix.launch.generate import Generate
from matmix.train.entry import main
from matmix.use.exporting import convert_run, export_run


@pytest.fixture(scope="module")
def half(dataset, tmp_path_factory) -> Path:
    """Four of eight steps; never changed: tests copy it."""
    run = tmp_path_factory.mktemp("runs") / "half"
    run_recipe("debug_mru", dataset, run, "--stop-step", "4", "--checkpoint.every", "2")
    return run


@pytest.fixture(scope="module")
def whole(dataset, tmp_path_factory) -> list[float]:
    run = tmp_path_factory.mktemp("runs") / "whole"
    run_recipe("debug_mru", dataset, run)
    return losses(run)


@pytest.fixture
def run(half, tmp_path) -> Path:
    return shutil.copytree(half, tmp_path / "run")


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.slow
def test_a_rate_that_was_edited_by_hand_is_told(run, told, capsys) -> None:
    edit(run / "config.toml", "lr = 0.01", "lr = 0.5")
    export_run(run, run.parent / "export")
    assert any("config.toml has changed since step-00000004: optimizer.lr 0.01 -> 0.5" in line for line in told)
    assert main([str(run)]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "changes" in line]
    assert said == ["continuing with changes: optimizer.lr 0.01 -> 0.5"]
    [change] = [json.loads(line) for line in (run / "changes.jsonl").read_text().splitlines()]
    assert (change["step"], change["key"], change["old"], change["new"]) == (4, "optimizer.lr", 0.01, 0.5)


def test_a_model_that_was_edited_by_hand_is_refused(run, capsys) -> None:
    edit(run / "config.toml", 'construction = "cayley"', 'construction = "ldu"')
    kept = (run / "metrics.jsonl").read_bytes()
    words = "model.mixers.mru.construction: 'cayley' there, 'ldu' here"
    assert main([str(run)]) == 2
    assert words in capsys.readouterr().err
    for look in (
        lambda: export_run(run, run.parent / "export"),
        lambda: convert_run(run, run.parent / "converted"),
        lambda: Generate(source=str(run), max_new_tokens=1).print(["a"], print),
    ):
        with pytest.raises(ValueError, match="is not the config that the run's checkpoint was made with") as caught:
            look()
        assert words in str(caught.value)
    assert (run / "metrics.jsonl").read_bytes() == kept


def test_a_flipped_bit_in_the_tokenizer_is_refused(run, capsys) -> None:
    path = next((run / "tokenizer").iterdir())
    content = bytearray(path.read_bytes())
    content[content.index("▁".encode()) + 3] ^= 1  # a letter of a piece becomes another one
    path.write_bytes(content)
    for look in (
        lambda: export_run(run, run.parent / "export"),
        lambda: Generate(source=str(run), max_new_tokens=1).print(["a"], print),
    ):
        with pytest.raises(ValueError, match=r"is not the tokenizer that .*step-00000004 was trained with") as caught:
            look()
        assert "\n" not in str(caught.value)
    assert main([str(run)]) == 2
    assert "tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize("vanish", [nightly("checkpoints"), "checkpoints/step-*"])
def test_vanished_checkpoints_are_no_new_run(run, whole, capsys, vanish) -> None:
    for path in run.glob(vanish):
        shutil.rmtree(path)
    kept = (run / "metrics.jsonl").read_bytes()
    assert main([str(run)]) == 2
    said = capsys.readouterr().err
    assert "this run has saved a checkpoint of step 4, but" in said
    assert "--checkpoint.start-over True" in said
    assert "Traceback" not in said
    assert (run / "metrics.jsonl").read_bytes() == kept

    assert main([str(run), "--checkpoint.start-over", "True"]) == 0
    assert losses(run) == whole
    assert (run / "metrics.jsonl.aside-1").read_bytes() == kept
    # It held for that one start.
    shutil.rmtree(run / "checkpoints")
    assert main([str(run)]) == 2


def test_starting_over_leaves_a_run_with_checkpoints_alone(run, whole) -> None:
    assert main([str(run), "--checkpoint.start-over", "True"]) == 0
    assert losses(run) == whole
    assert not list(run.glob("*.aside-*"))


@pytest.mark.slow
@each(
    "bad", [b"\xff\xfe\n", b"5\n", b"[1]\n", b"{}\n", b'{"step": "x", "kind": []}\n', b"[" * 10**5 + b"\n"], fresh="run"
)
def test_damaged_metrics_do_not_stop_a_start(run, whole, capsys, bad) -> None:
    path = run / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    damaged = b"".join([lines[0], bad, *lines[1:]])
    path.write_bytes(damaged)
    assert main([str(run)]) == 0
    assert "metrics.jsonl is damaged in line 2 and moved to metrics.jsonl.aside-1" in capsys.readouterr().err
    assert (run / "metrics.jsonl.aside-1").read_bytes() == damaged
    assert losses(run) == whole


def test_a_line_that_a_kill_cut_off_is_no_damage(run, whole, capsys) -> None:
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"kind": "train", "st')
    assert main([str(run)]) == 0
    assert "damaged" not in capsys.readouterr().err
    assert losses(run) == whole
    assert not list(run.glob("*.aside-*"))


@pytest.mark.slow
def test_a_damaged_summary_is_written_again(dataset, whole, tmp_path) -> None:
    run_recipe("debug_mru", dataset, tmp_path / "run")
    path = tmp_path / "run" / "summary.json"
    summary = path.read_bytes()
    for bad in (b"\xff\xfe", b"5", b"[1]", b"{}", b'{"step": 8}', b"[" * 10**5):
        path.write_bytes(bad)
        assert main([str(tmp_path / "run")]) == 0
        assert path.read_bytes() == summary, bad[:9]


def test_records_of_a_full_disk_are_written_later(dataset, whole, tmp_path, monkeypatch, capsys) -> None:
    from matmix.train.callbacks.records import MetricsFile

    write = MetricsFile._write

    def full(callback, trainer) -> None:
        if 2 <= trainer.state.step < 6:
            raise OSError(28, "No space left on device")
        write(callback, trainer)

    monkeypatch.setattr(MetricsFile, "_write", full)
    run_recipe("debug_mru", dataset, tmp_path / "run")
    said = capsys.readouterr().err
    assert said.count("MetricsFile cannot write") == 1
    assert "6 records that could not be written before are in metrics.jsonl now" in said
    assert losses(tmp_path / "run") == whole
    assert [record["step"] for record in records(tmp_path / "run")] == list(range(1, 9))

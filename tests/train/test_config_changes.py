"""What may change when a run is started again, what that does, and how it is recorded."""

import json

import pytest
from failures import each
from runs import losses, records, run_recipe

from matmix.train.recipe import load_config, write_config
from matmix.train.run.directory import RunDirectory


def changes(run_dir) -> list[tuple]:
    path = run_dir / "changes.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    assert all(set(line) == {"time", "step", "key", "old", "new"} for line in lines)
    return [(line["step"], line["key"], line["old"], line["new"]) for line in lines]


def test_the_steps_to_come_follow_the_new_values(dataset, tmp_path, capsys):
    run = tmp_path / "run"
    run_recipe("debug_mru", dataset, run, "--stop-step", "3")
    assert changes(run) == []
    capsys.readouterr()
    new = ["--optimizer.lr", "0.001", "--schedule.name", "constant", "--schedule.warmup", "0", "--steps", "6"]
    result = run_recipe("debug_mru", dataset, run, *new)
    assert (result.step, result.finished) == (6, True)
    said = [line for line in capsys.readouterr().err.splitlines() if "changes" in line]
    assert len(said) == 1
    assert said[0].startswith("continuing with changes: optimizer.lr 0.01 -> 0.001, schedule.name linear -> constant")
    rates = [record["lr"] for record in records(run)]
    assert rates[3:] == [0.001] * 3
    old = load_config("debug_mru")
    assert changes(run) == [
        (3, "optimizer.lr", 0.01, 0.001),
        (3, "schedule.name", old.schedule.name, "constant"),
        (3, "schedule.warmup", old.schedule.warmup, 0.0),
        (3, "steps", 8, 6),
    ]
    assert RunDirectory(run).read_config().optimizer.lr == 0.001


@pytest.mark.slow
def test_weight_decay_and_clipping_take_effect(dataset, tmp_path):
    for name, options in {
        "as it was": [],
        "decay": ["--optimizer.weight-decay", "10"],
        "clipping": ["--optimizer.max-grad-norm", "0.01"],
    }.items():
        run_recipe("debug_mru", dataset, tmp_path / name, "--stop-step", "3")
        run_recipe("debug_mru", dataset, tmp_path / name, *options)
    whole = losses(tmp_path / "as it was")
    for name in ("decay", "clipping"):
        found = losses(tmp_path / name)
        assert found[:4] == whole[:4]  # the loss of step 4 is that of the weights after step 3
        assert found[4] != whole[4]


def test_the_recipe_again_means_its_own_values_again(dataset, tmp_path):
    run = tmp_path / "run"
    run_recipe("debug_mru", dataset, run, "--stop-step", "2")
    run_recipe("debug_mru", dataset, run, "--stop-step", "4", "--optimizer.lr", "0.001")
    run_recipe("debug_mru", dataset, run, "--stop-step", "4", "--optimizer.lr", "0.001")
    run_recipe("debug_mru", dataset, run)
    assert changes(run) == [(2, "optimizer.lr", 0.01, 0.001), (4, "optimizer.lr", 0.001, 0.01)]


def test_more_steps_for_a_finished_run(dataset, tmp_path):
    run = tmp_path / "run"
    first = run_recipe("debug_mru", dataset, run)
    assert first.finished
    again = run_recipe("debug_mru", dataset, run, "--steps", "12")
    assert (again.steps_done, again.finished) == (4, True)
    assert json.loads((run / "summary.json").read_text())["step"] == 12
    assert [record["step"] for record in records(run)] == list(range(1, 13))
    assert [record["step"] for record in records(run, "validation")] == [4, 8, 12]


def test_fewer_steps_than_are_done(dataset, tmp_path):
    run = tmp_path / "run"
    run_recipe("debug_mru", dataset, run, "--stop-step", "6")
    before = (run / "config.toml").read_bytes()
    with pytest.raises(ValueError, match=r"steps = 5 is less than the 6 that .* has done; set steps to 6 or more"):
        run_recipe("debug_mru", dataset, run, "--steps", "5")
    assert (run / "config.toml").read_bytes() == before
    assert changes(run) == []


@each(
    "options, difference",
    [
        (["--seed", "7"], "seed: 0 there, 7 here"),
        (["--optimizer.betas", "0.9", "0.99"], "optimizer.betas"),
        (["--global-batch-size", "4"], "global_batch_size: 8 there, 4 here"),
        (["--data.seqlen", "16"], "data.seqlen: 32 there, 16 here"),
        (["--model.mlp-ratio", "4"], "model.mlp_ratio"),
        (["--engine.precision", "bf16"], "engine.precision: 'fp32' there, 'bf16' here"),
    ],
)
def test_what_defines_the_numbers_is_refused_with_the_difference(options, difference, dataset, tmp_path):
    run = tmp_path / "run"
    config = load_config("debug_mru", ["--data.path", dataset, "--run-dir", str(run)])
    run.mkdir()
    write_config(config, run / "config.toml")
    changed = load_config("debug_mru", ["--data.path", dataset, "--run-dir", str(run), *options])
    with pytest.raises(ValueError, match="belongs to a run with another config") as error:
        RunDirectory(run).check(changed)
    assert difference in str(error.value)
    assert "optimizer.lr" not in str(error.value)

"""Rules through the loop: runs that are resumed under other rules, records, and what the user is told."""

import json
import shutil

import pytest
from runs import losses, records, run_recipe

from matmix.train.checkpoint.manifest import read_manifest
from matmix.train.entry import main
from matmix.train.recipe import load_config
from matmix.use.exporting import convert_run

RULE = '{match = "*.in_proj.weight", lr = 0.5, clip = 0.01}'


def files_of(run) -> dict[str, bytes]:
    kept = [*(run / "checkpoints" / "step-00000003").rglob("*"), run / "config.toml"]
    return {str(path.relative_to(run)): path.read_bytes() for path in kept if path.is_file()}


@pytest.fixture(scope="module")
def without_rules(dataset, tmp_path_factory):
    """Three steps of a run without the rules of mixers."""
    run = tmp_path_factory.mktemp("runs") / "run"
    run_recipe("debug_mru", dataset, run, "--stop-step", "3", "--optimizer.mixer-rules", "False")
    return run


def test_a_run_goes_on_with_the_rules_of_mixers_and_says_so(without_rules, dataset, tmp_path, capsys):
    run = shutil.copytree(without_rules, tmp_path / "run")
    before, curve = files_of(run), losses(run)
    result = run_recipe("debug_mru", dataset, run, "--checkpoint.keep-last", "9")
    assert (result.step, result.finished) == (8, True)
    said = [line for line in capsys.readouterr().err.splitlines() if "other rules" in line]
    assert len(said) == 1
    assert "blocks.*.mixer.in_proj.weight of 2 layers: learning rate x 0.0625, clipped apart (mru) at 4" in said[0]
    assert losses(run)[:3] == curve
    assert files_of(run) == {**before, "config.toml": files_of(run)["config.toml"]}
    run_recipe("debug_mru", dataset, run, "--checkpoint.keep-last", "9")
    run_recipe("debug_mru", dataset, run, "--checkpoint.keep-last", "9", "--steps", "9")
    assert "other rules" not in capsys.readouterr().err  # the newer checkpoint knows them


@pytest.mark.slow
def test_resuming_with_rules_is_bit_identical(dataset, tmp_path, capsys):
    options = ["--optimizer.rule", RULE]
    run_recipe("debug_mru", dataset, tmp_path / "whole", *options)
    run_recipe("debug_mru", dataset, tmp_path / "parts", *options, "--stop-step", "3")
    run_recipe("debug_mru", dataset, tmp_path / "parts", *options)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert "other rules" not in capsys.readouterr().err


def test_rules_may_change_between_starts(dataset, tmp_path, capsys):
    run_recipe("debug_mru", dataset, tmp_path / "run", "--stop-step", "3")
    capsys.readouterr()
    run_recipe("debug_mru", dataset, tmp_path / "run", "--optimizer.rule", RULE)
    said = capsys.readouterr().err
    assert "learning rate x 0.5, clipped apart (in_proj.weight) at 0.01" in said
    [change] = [json.loads(line) for line in (tmp_path / "run" / "changes.jsonl").read_text().splitlines()]
    assert (change["key"], change["old"]) == ("optimizer.rule", [])
    assert change["new"] == [{"match": "*.in_proj.weight", "lr": 0.5, "clip": 0.01}]


def test_records_have_the_norm_of_each_clipping_group(dataset, tmp_path):
    run_recipe("debug_mru", dataset, tmp_path / "mru", "--steps", "2")
    run_recipe("debug_hydra", dataset, tmp_path / "hydra", "--steps", "2")
    for record in records(tmp_path / "mru"):
        parts = record["grad_norm/others"], record["grad_norm/mru"]
        assert record["grad_norm"] == pytest.approx(sum(part**2 for part in parts) ** 0.5, rel=1e-5)
    assert not any(key.startswith("grad_norm/") for record in records(tmp_path / "hydra") for key in record)


def test_a_converted_run_keeps_its_record_of_rules(without_rules, dataset, tmp_path):
    run = shutil.copytree(without_rules, tmp_path / "run")
    run_recipe("debug_mru", dataset, run, "--steps", "4")
    for name in ("run", "converted"):
        kept = read_manifest(tmp_path / name / "checkpoints" / "step-00000004")["extra"]["parameter_rules"]
        assert kept == {f"blocks.{layer}.mixer.in_proj.weight": [0.0625, 4.0] for layer in (0, 1)}
        if name == "run":
            convert_run(run, tmp_path / "converted")


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ('{match = "*.in_prj.weight", lr = 1}', ["*.in_prj.weight", "nearest: blocks.0.mixer.in_proj.weight"]),
        ('{match = "*norm*", weight_decay = 1}', ["cannot apply to blocks.0.norm_mixer.weight"]),
    ],
)
@pytest.mark.parametrize("dry", [["--dry-run"], []])
def test_a_rule_that_cannot_be_is_one_line_and_leaves_nothing(rule, words, dry, dataset, tmp_path, capsys):
    options = ["--data.path", dataset, "--run-dir", str(tmp_path / "run"), "--device", "cpu"]
    assert main(["debug_mru", *options, "--optimizer.rule", rule, *dry]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("matmix: error: optimizer.rule")
    assert len(err.splitlines()) == 1
    for word in words:
        assert word in err
    assert not (tmp_path / "run" / "config.toml").exists()
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_run_is_not_touched_by_a_rule_that_cannot_be(without_rules, dataset, tmp_path, capsys):
    run = shutil.copytree(without_rules, tmp_path / "run")
    before = files_of(run)
    options = ["--data.path", dataset, "--run-dir", str(run), "--device", "cpu"]
    assert main(["debug_mru", *options, "--optimizer.rule", '{match = "*.nothing", lr = 1}']) == 2
    assert files_of(run) == before


def test_the_dry_run_prints_the_groups(capsys):
    assert main(["debug_mru", "--dry-run", "--optimizer.rule", '{match = "embedding.*", weight_decay = 0}']) == 0
    lines = [line[18:] for line in capsys.readouterr().out.split("updated")[1].splitlines()]
    lines[0] = lines[0] or "updated"
    assert len(lines) == 3
    assert "clipped at 1 with the others, weight decay 0.1" in lines[0]
    assert 'not decayed (by optimizer.rule "embedding.*")' in lines[1]
    assert lines[2].endswith(
        "in 2 tensors, learning rate x 0.0625, clipped apart (mru) at 4, weight decay 0.1 (by mru): "
        "blocks.*.mixer.in_proj.weight of 2 layers"
    )


def test_config_of_a_run_is_a_recipe_with_the_same_rules(dataset, tmp_path):
    rules = [
        RULE,
        '{match = ["*.up.weight", "embedding.*"], weight_decay = 0}',
        '{match = "*.down.weight", clip = inf}',
    ]
    run_recipe("debug_mru", dataset, tmp_path / "run", "--steps", "1", "--optimizer.rule", *rules)
    config = load_config(str(tmp_path / "run"))
    assert [rule.patterns for rule in config.optimizer.rule] == [
        ("*.in_proj.weight",),
        ("*.up.weight", "embedding.*"),
        ("*.down.weight",),
    ]
    assert config.optimizer.rule[2].clip == float("inf")
    assert run_recipe(str(tmp_path / "run"), dataset, tmp_path / "run", "--steps", "2").finished

"""Checkpoints in the form that every engine reads: contents, readers, and runs that change their engine by them."""

import re
import shutil

import convert_scenarios
import pytest
import run_scenarios
import scenarios
import torch
from convert_scenarios import contents
from harness import run_distributed
from runs import records
from safetensors.torch import load_file
from saved_weights import read_weights

from matmix.launch import cli
from matmix.train.checkpoint.files import find_problem
from matmix.train.checkpoint.manager import CheckpointManager
from matmix.train.checkpoint.manifest import list_checkpoints, read_manifest
from matmix.train.engine.config import EngineConfig
from matmix.train.run.directory import RunDirectory
from matmix.use.exporting import convert_checkpoint, convert_run

NAMES = list(scenarios.ENGINES)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint after three steps on two ranks by every engine: directory, and the curve from there."""
    directory = tmp_path_factory.mktemp("saved")
    found = run_distributed(convert_scenarios.save_all, 2, arguments=(NAMES, str(directory)), timeout=300)
    for name in NAMES:
        convert_checkpoint(directory / name / "step-00000003", directory / f"{name}-portable" / "step-00000003")
    return directory, found[0]


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key


@pytest.mark.parametrize("name", NAMES)
def test_a_portable_checkpoint_holds_all_there_is(name, saved):
    """Weights as the engine itself has them; moments and step counts of every parameter."""
    directory, (_, weights) = saved[0], saved[1][name]
    found = contents(directory / f"{name}-portable" / "step-00000003")
    assert_equal(found, contents(directory / name / "step-00000003"))
    shapes = scenarios.make_engine(EngineConfig()).shapes()
    parameters = [key for key in shapes if key != "scale"]
    assert {key: list(tensor.shape) for key, tensor in found.items()} == {
        **{f"model.{key}": shape for key, shape in shapes.items()},
        **{f"optimizer.{key}.exp_avg": shapes[key] for key in parameters},
        **{f"optimizer.{key}.exp_avg_sq": shapes[key] for key in parameters},
        **{f"optimizer.{key}.step": [] for key in parameters},
    }
    assert {key: found[f"model.{key}"].flatten().tolist() for key in shapes} == weights
    for key in parameters:
        assert found[f"optimizer.{key}.step"] == 3
        assert found[f"optimizer.{key}.exp_avg_sq"].min() >= 0
        assert found[f"optimizer.{key}.exp_avg"].abs().max() > 0


def test_engines_keep_the_same_moments(saved):
    """Nothing is taken for another tensor's, nothing scaled: up to rounding, all engines say the same."""
    expected = contents(saved[0] / "fsdp2" / "step-00000003")
    for name in NAMES:
        for key, tensor in contents(saved[0] / name / "step-00000003").items():
            torch.testing.assert_close(tensor, expected[key], rtol=1e-3, atol=2e-6, msg=f"{name} {key}")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_engine_takes_it_up_exactly(ranks, saved, tmp_path):
    """Loaded and saved again by another engine, at another number of ranks, it is the same; and it goes on."""
    pairs = [("fsdp2", "zero2"), ("fsdp2", "zero3"), ("zero3", "fsdp2"), ("zero1", "ddp"), ("ddp", "zero1")]
    pairs += [("zero2", "zero0"), ("zero0", "fsdp2")]
    arguments = (pairs, str(saved[0]), str(tmp_path))
    found = run_distributed(convert_scenarios.take_up_all, ranks, arguments=arguments, timeout=300)
    for source, engine in pairs:
        again = contents(tmp_path / f"{source}-{engine}" / "step-00000003")
        assert_equal(again, contents(saved[0] / source / "step-00000003"))
        if ranks == 2:
            for got, want in zip(found[0][source, engine], saved[1][source][0], strict=True):
                assert got == pytest.approx(want, abs=2e-5), (source, engine)


def test_the_files_are_plain_safetensors_of_bounded_size(saved, tmp_path):
    source = saved[0] / "zero2" / "step-00000003"
    convert_checkpoint(source, tmp_path / "step-00000003", max_file_bytes=4000)
    paths = sorted((tmp_path / "step-00000003" / "portable").iterdir())
    weights = [path.name for path in paths if path.name.startswith("weights")]
    assert [path.name for path in paths] == [
        *(f"moments-{n + 1:05d}.safetensors" for n in range(len(paths) - len(weights))),
        *(f"weights-{n + 1:05d}.safetensors" for n in range(len(weights))),
    ]
    assert len(paths) > 3
    assert max(path.stat().st_size for path in paths) < 4000 + 5000  # a header names up to 75 tensors
    read = {}
    for path in paths:
        held = load_file(path)
        assert held.keys().isdisjoint(read)
        assert all(key.startswith("model.") == path.name.startswith("weights") for key in held)
        read |= held
    assert_equal(read, contents(source))
    assert_equal(dict(read_weights(tmp_path / "step-00000003")), dict(read_weights(source)))


def test_damage_is_found(saved, tmp_path):
    checkpoint = shutil.copytree(saved[0] / "ddp-portable", tmp_path / "checkpoints") / "step-00000003"
    assert find_problem(checkpoint) is None
    path = checkpoint / "portable" / "weights-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"weights-00001\.safetensors does not match its checksum"):
        CheckpointManager(tmp_path / "checkpoints").load(checkpoint, scenarios.make_engine(EngineConfig()))


@pytest.mark.slow
def test_one_step_count_for_each_parameter(saved):
    """Engines that keep one of a group say so instead of taking any."""
    checkpoint = saved[0] / "fsdp2" / "step-00000003"
    state = convert_scenarios.Unequal(checkpoint)
    engine = scenarios.make_engine(EngineConfig())
    engine.load(state)
    names = {parameter: name for name, parameter in engine.module.named_parameters()}
    steps = {names[parameter]: float(kept["step"]) for parameter, kept in engine.optimizer.state.items()}
    assert steps == {name: 4.0 if name == "norm.bias" else 3.0 for name in names.values()}
    [problem] = run_distributed(convert_scenarios.refuse, 1, arguments=(str(checkpoint),))
    assert "updated unequally often (3 to 4 times)" in problem


@pytest.mark.slow
def test_a_run_changes_its_engine_again_and_again(dataset, tmp_path):
    """FSDP2 -> ZeRO-2 -> ZeRO-3 -> FSDP2, two steps each: the curve is that of FSDP2 alone."""
    options = ["--data.path", dataset, "--device", "cpu", "--model.dropout", "0", "--data.workers", "0"]
    options += [
        "--steps",
        "8",
        "--checkpoint.every",
        "0",
        "--evaluation.every",
        "0",
        "--logging.progress",
        "False",
        "--gc-every",
        "0",
    ]
    engines = {"a": ("fsdp2", "2"), "b": ("deepspeed", "2"), "c": ("deepspeed", "3"), "d": ("fsdp2", "2")}
    runs = [("debug_mru", [*options, "--run-dir", str(tmp_path / "whole")])]
    expected, found, recipe = {}, {}, "debug_mru"
    for number, (name, (engine, stage)) in enumerate(engines.items(), start=1):
        leg = ["--engine.name", engine, "--engine.zero-stage", stage, "--stop-step", str(2 * number)]
        runs.append((recipe, [*options, *leg, "--run-dir", str(tmp_path / name)]))
        *whole, read = run_distributed(run_scenarios.train_all, 2, arguments=(runs,), timeout=300)[0]
        assert list(read) == [2 * number - 1, 2 * number]
        expected, found, runs = whole[0] if whole else expected, found | read, []
        recipe = str(tmp_path / chr(ord(name) + 1))
        convert_run(tmp_path / name, recipe)
    assert found == expected
    curves = [[(r["loss"], r["grad_norm"], r["tokens"]) for r in records(tmp_path / name)] for name in ("whole", "d")]
    assert len(curves[0]) == 8
    for step, (got, want) in enumerate(zip(curves[1], curves[0], strict=True)):
        assert got == pytest.approx(want, rel=2e-4), step


@pytest.fixture(scope="module")
def run(dataset, tmp_path_factory):
    """A run with checkpoints of steps 1 and 2."""
    directory = tmp_path_factory.mktemp("runs") / "run"
    options = ["--data.path", dataset, "--device", "cpu", "--run-dir", str(directory), "--checkpoint.every", "1"]
    run_scenarios.train_all([("debug_mru", [*options, "--stop-step", "2", "--evaluation.every", "0"])])
    return directory


def test_the_verb(run, tmp_path, capsys):
    out = tmp_path / "new" / "portable"
    assert cli.main(["checkpoints", "convert", str(run), "--out", str(out), "--step", "1"]) == 0
    assert (
        capsys.readouterr().out
        == f"Converted step-00000001 of {run} to {out}; `matmix train {out}` goes on from there.\n"
    )
    assert sorted(path.name for path in out.iterdir()) == ["checkpoints", "config.toml", "metrics.jsonl", "tokenizer"]
    assert [path.name for path in out.parent.iterdir()] == ["portable"]
    old, new = (read_manifest(path / "checkpoints" / "step-00000001") for path in (run, out))
    assert new["extra"] == old["extra"]
    assert new["step"] == 1
    assert RunDirectory(out).read_config().run_dir == str(out)
    [facts] = list_checkpoints(RunDirectory(out).checkpoints, verify=find_problem).checkpoints
    assert (facts.step, facts.problem, facts.engine, facts.ranks) == (1, None, "portable", 1)


def test_another_kind_of_engine_says_what_to_type(run, tmp_path):
    engine = scenarios.make_engine(EngineConfig())
    engine.kind = "deepspeed"
    copy = shutil.copytree(run, tmp_path / "run")
    with pytest.raises(ValueError, match='cannot be continued with "deepspeed" as it is') as error:
        CheckpointManager(copy / "checkpoints").load(copy / "checkpoints" / "step-00000002", engine)
    command = re.search("`matmix (checkpoints .*)`", str(error.value))[1]
    assert cli.main(command.split()) == 0
    assert list_checkpoints(tmp_path / "run-converted" / "checkpoints").resumed.engine == "portable"


def test_one_process_goes_on_bit_for_bit(run, tmp_path):
    """The generators are carried over too: dropout is on."""
    convert_run(run, tmp_path / "converted")
    shutil.copytree(run, tmp_path / "same")
    for name in ("converted", "same"):
        run_scenarios.train_all([(str(tmp_path / name), ["--logging.progress", "False"])])
    curves = [[record["loss"] for record in records(tmp_path / name)] for name in ("converted", "same")]
    assert len(curves[0]) == 8
    assert curves[0] == curves[1]


def test_nothing_is_overwritten(run, tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="exists and is not an empty directory"):
        convert_run(run, tmp_path)
    with pytest.raises(ValueError, match="exists and is not an empty directory"):
        convert_run(run, run)
    with pytest.raises(ValueError, match="exists and is not an empty directory"):
        convert_run(run, tmp_path / "thesis.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    (tmp_path / "empty").mkdir()
    convert_run(run, tmp_path / "empty")
    assert list_checkpoints(tmp_path / "empty" / "checkpoints").resumed.step == 2


def test_a_failed_conversion_leaves_nothing(run, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="has no checkpoint of step 7; there are: 1, 2"):
        convert_run(run, tmp_path / "out", step=7)
    broken = shutil.copytree(run, tmp_path / "broken")
    next((broken / "checkpoints" / "step-00000002" / "sharded").glob("*.distcp")).write_bytes(b"x")
    with pytest.raises(ValueError, match="step-00000002 is damaged"):
        convert_run(broken, tmp_path / "out", step=2)

    def full_disk(*_arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("matmix.train.checkpoint.manifest.write_manifest", full_disk)
    with pytest.raises(OSError, match="No space left"):
        convert_run(run, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken"]

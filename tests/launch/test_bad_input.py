"""The user's mistakes, by the command itself: exit code 2, one line of error, nothing written."""

import json
import resource
import shutil
from pathlib import Path

import pytest
from failures import each
from runs import run_recipe

from matmix.launch.cli import TREE, main
from matmix.model.interop.importing.foreign import read_torch


def _fails(capsys, arguments: list[str], *words: str) -> None:
    capsys.readouterr()
    assert main(arguments) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert len(errors) == 1
    assert errors[0].startswith("matmix: error: ")
    for word in words:
        assert word in errors[0]


TRAIN = {
    "unknown key": (["--optimizer.lrr", "1"], ["optimizer.lrr", "optimizer.lr"]),
    "wrong type": (["--optimizer.lr", "fast"], ["--optimizer.lr", "fast"]),
    "no data": (["--data.path", "nowhere"], ["nowhere"]),
    "sequence length": (["--data.seqlen", "0"], ["data.seqlen", "1"]),
    "too long": (["--data.seqlen", "100000"], ["data.seqlen"]),
    "batch": (["--global-batch-size", "0"], ["global_batch_size", "1"]),
    "cuda": (["--device", "cuda"], ["cuda", "--device cpu"]),
    "vocabulary": (["--model.vocab-size", "5"], ["model.vocab_size = 5", "320"]),
    "mixer": (["--model.layers", "hydra"], ["hydra", "language_model"]),
}


@each("case", TRAIN)
def test_train(case, dataset, tmp_path, capsys):
    overrides, words = TRAIN[case]
    arguments = ["train", "debug_mru", "--run-dir", str(tmp_path / "run"), "--data.path", dataset, *overrides]
    _fails(capsys, arguments, *words)
    assert not (tmp_path / "run").exists()


def test_a_length_that_the_model_does_not_take(tmp_path, capsys):
    overrides = ["--model.position-embeddings", "True", "--model.max-seqlen", "16", "--data.seqlen", "32"]
    _fails(capsys, ["train", "debug_hydra", *overrides], "32", "16", "model.max_seqlen")


def test_another_config_shows_the_difference(dataset, tmp_path, capsys):
    run = str(tmp_path / "run")
    run_recipe("debug_mru", dataset, run, "--stop-step", "1")
    _fails(capsys, ["train", "debug_mru", "--data.path", dataset, "--run-dir", run, "--seed", "7"], "seed: 0 there, 7")
    _fails(
        capsys, ["train", "debug_hydra", "--data.path", dataset, "--run-dir", run], "data.prefix: 'bos' there", " more)"
    )


def test_data_with_another_tokenizer(dataset, tmp_path, capsys):
    """A run directory of another model, which the recipe names by itself, and data of one's own; and such validation
    data."""
    run, other = str(tmp_path / "run"), str(tmp_path / "other")
    run_recipe("debug_mru", dataset, run, "--stop-step", "1")
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": f"{n} words"}) + "\n" for n in range(50)))
    assert main(["prepare", str(tmp_path / "text.jsonl"), "--out", other, "--vocab-size", "285"]) == 0
    arguments = ["train", "debug_mru", "--data.path", other, "--run-dir", run]
    _fails(capsys, arguments, "another tokenizer", "choose another --run-dir", "--tokenizer RUN/tokenizer")
    arguments = ["train", "debug_mru", "--data.path", dataset, "--run-dir", str(tmp_path / "new")]
    _fails(capsys, [*arguments, "--data.validation-path", other], "another tokenizer")


def test_the_status_of_a_launch_that_was_not_submitted(tmp_path, capsys):
    (tmp_path / "run" / "launch" / "20260101-000000").mkdir(parents=True)
    assert main(["launch", "status", str(tmp_path / "run")]) == 0
    assert "nothing was submitted" in capsys.readouterr().out
    (tmp_path / "run" / "config.toml").write_text("")  # it was trained without a launch
    assert main(["launch", "status", str(tmp_path / "run")]) == 0
    assert "submitted" not in capsys.readouterr().out


@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_a_damaged_checkpoint_names_the_file(damage, dataset, tmp_path, capsys):
    """Training reads all of it; an export reads the weights, and does not look at the optimizer's moments."""
    run = tmp_path / "run"
    run_recipe("debug_mru", dataset, run, "--stop-step", "1")
    (checkpoint,) = (run / "checkpoints").iterdir()
    before = sorted(path.name for path in checkpoint.rglob("*"))
    train = ["train", "debug_mru", "--data.path", dataset, "--run-dir", str(run)]
    export = ["export", str(run), "--out", str(tmp_path / "out")]
    for kind, names in {"moments": "moments__*.distcp", "weights": "__*.distcp"}.items():
        (victim,) = checkpoint.rglob(names)
        content = victim.read_bytes()
        victim.unlink() if damage == "missing" else victim.write_bytes(content[:-100])
        _fails(capsys, train, victim.name, damage[:5])
        if kind == "weights":
            _fails(capsys, export, victim.name)
        found = sorted(path.name for path in checkpoint.rglob("*"))
        assert found == [name for name in before if damage != "missing" or name != victim.name]
        victim.write_bytes(content)
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_of_another_architecture_names_what_differs(dataset, tmp_path, capsys):
    narrow, wide = tmp_path / "narrow", tmp_path / "wide"
    run_recipe("debug_mru", dataset, narrow, "--stop-step", "1")
    run_recipe("debug_mru", dataset, wide, "--stop-step", "1", "--model.mlp-ratio", "4")
    shutil.rmtree(wide / "checkpoints")
    shutil.copytree(narrow / "checkpoints", wide / "checkpoints")
    arguments = ["train", "debug_mru", "--data.path", dataset, "--run-dir", str(wide), "--model.mlp-ratio", "4"]
    _fails(capsys, arguments, "model.mlp_ratio: 2.0 there, 4.0 here")


PREPARE = {
    "empty": (b"", ["no "]),
    "not utf-8": (b'{"text": "fine"}\n{"text": "caf\xe9"}\n', ["UTF-8", "input.jsonl"]),
    "vocabulary": (b'{"text": "a small text"}\n{"text": "about very little"}\n', ["vocab"]),
    "malformed": (b'{"text": "fine"}\n{"text": "find me, fine one"}\nnot json\n', ["malformed", "input.jsonl"]),
}


@each("case", PREPARE)
def test_prepare(case, tmp_path, capsys):
    content, words = PREPARE[case]
    (tmp_path / "input.jsonl").write_bytes(content)
    size = "8192" if case == "vocabulary" else "280"
    arguments = ["prepare", str(tmp_path / "input.jsonl"), "--out", str(tmp_path / "out"), "--vocab-size", size]
    _fails(capsys, arguments, *words)
    assert not (tmp_path / "out" / "manifest.json").exists()


@each(
    "arguments, words",
    [
        (["prepare"], ["no input given", "INPUT"]),
        (["prepare", "a.txt"], ["no output folder given"]),
        (["export"], ["RUN", "--out"]),
        (["generate", "run", "--temperature", "hot"], ["--temperature", "hot"]),
        (["import", "--from", "gpt", "a", "b"], ["gpt", "hydra"]),
        (["train", "mru_shakespear"], ["mru_shakespeare"]),
        (["train", "--optimizer.lr", "3", "debug_mru"], ["no recipe given", "matmix train RECIPE"]),
        (["trian", "debug_mru"], ["trian", "train"]),
        (["launch", "trochrun"], ["trochrun", "torchrun"]),
        (["launch", "local", "debug_mru"], ["--nproc", "matmix launch local --help"]),
        (["launch", "local", "debug_mru", "--nproc", "2", "--nprocs", "1"], ["--nprocs", '"--nproc"']),
        (["launch", "slurm", "debug_mru", "--optimizer.lrr", "1"], ["--optimizer.lrr", '"--optimizer.lr"']),
        (["launch", "slurm", "--prepare", "--parts", "3"], ["no input given", "--prepare --parts N INPUT"]),
        (["generate", "run", "--prompts", "to be"], ["--prompts", '"--prompt"']),
        (["prepare", "--merge", "--out", "data", "--vocab-size", "300"], ["--vocab-size", "--merge"]),
        (["checkpoints"], ["RUN", "convert"]),
        (["train", "debug_mru", "--data.seqlen", "abc"], ["--data.seqlen takes an integer, got 'abc'"]),
        (["train", "debug_mru", "--optimizer.lr", "fast"], ["--optimizer.lr takes a number, got 'fast'"]),
        (["evaluate", "run", "a.csv", "--columns", "text"], ["--columns: takes pairs of words: NAME VALUE"]),
        (
            ["train", "debug_mru", "--objective.options.class-weights", "1", "2"],
            ['"objective.options" is given as one table', "'{class_weights = VALUE}'"],
        ),
        (["prepare", "https://host.invalid/a/b.jsonl", "--out", "o"], ["https://host.invalid/a/b.jsonl is a URL"]),
        (["prepare", "bundled:shakespeare", "--out", "o", "--tokenizer", "gpt2"], ["gpt2", "no file or folder", "hub"]),
        (["train", "."], [". is a folder without config.toml"]),
    ],
)
def test_command_lines(arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _fails(capsys, arguments, *words)
    assert not list(Path().iterdir())


def test_a_prompt_that_is_no_text(dataset, tmp_path, capsys):
    """A terminal in another encoding: Python keeps the bytes as characters that no text may have."""
    run_recipe("debug_mru", dataset, tmp_path / "run", "--stop-step", "1")
    _fails(capsys, ["generate", str(tmp_path / "run"), "--prompt", "caf\udce9"], "--prompt is not UTF-8 (character 4)")


def test_names_that_are_no_text(tmp_path, capsys):
    """Files of another system: no manifest and no config could hold their names."""
    told = r"caf\xe9.txt is not UTF-8"
    _fails(capsys, ["prepare", f"{tmp_path}/caf\udce9.txt", "--out", str(tmp_path / "out")], told, "rename")
    _fails(capsys, ["train", "debug_mru", "--run-dir", "runs/caf\udce9.txt"], told, "rename")
    (tmp_path / "caf\udce9.txt").write_text("to be")
    _fails(capsys, ["prepare", str(tmp_path), "--out", str(tmp_path / "out")], told, "rename")
    (tmp_path / "a" / "b\udce9").mkdir(parents=True)
    (tmp_path / "a" / "b\udce9" / "x.png").write_bytes(b"")
    _fails(
        capsys, ["prepare-images", str(tmp_path / "a"), "--out", str(tmp_path / "out")], r"b\xe9/x.png is not", "rename"
    )


@pytest.mark.parametrize("device", ["gpu", "cuda:99"])
def test_a_device_that_is_not_there(device, tmp_path, capsys):
    _fails(capsys, ["generate", str(tmp_path), "--prompt", "to be", "--device", device], f"--device {device} cannot")


def test_damaged_weights_of_an_export(dataset, tmp_path, capsys):
    run, out = tmp_path / "run", tmp_path / "out"
    run_recipe("debug_mru", dataset, run, "--stop-step", "1")
    assert main(["export", str(run), "--out", str(out)]) == 0
    weights = out / "model.safetensors"
    content = weights.read_bytes()
    for damaged in (content[:-100], b"\xff" * 8 + content[8:], b""):
        weights.write_bytes(damaged)
        _fails(capsys, ["generate", str(out), "--prompt", "to be"], "model.safetensors")


def test_an_export_that_the_disk_has_no_room_for(dataset, tmp_path, capsys):
    """The size of files is limited, which ends a write as a full disk does."""
    run_recipe("debug_mru", dataset, tmp_path / "run", "--stop-step", "1")
    capsys.readouterr()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "out")]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    errors = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert len(errors) == 1
    assert "part-00001.safetensors cannot be written" in errors[0]
    assert not (tmp_path / "out").exists()


def test_a_boolean_of_a_verb_in_lower_case():
    verb, _ = TREE.read(["prepare", "a.txt", "--out", "o", "--byte-fallback", "false"])
    assert verb.config().byte_fallback is False


@pytest.mark.parametrize("kind", ["hydra", "mru-lm"])
def test_a_checkpoint_to_import_that_is_none(kind, tmp_path, capsys):
    """torch would advise to run the code in it."""
    (tmp_path / "garbage.pt").write_bytes(b"{}")
    _fails(
        capsys, ["import", "--from", kind, str(tmp_path / "garbage.pt"), str(tmp_path / "out")], "garbage.pt", "torch"
    )
    with pytest.raises(ValueError, match="cannot be read as plain tensors") as error:
        read_torch(tmp_path / "garbage.pt")
    assert "weights_only" not in str(error.value)


def test_help_lists_the_options_of_the_verb_and_of_the_recipe(capsys):
    with pytest.raises(SystemExit):
        main(["launch", "slurm", "debug_mru", "--help"])
    shown = capsys.readouterr().out
    for option in ("--gpus-per-node", "--sweep", "--sbatch-option", "--optimizer.lr", "--model.mixers.mru."):
        assert option in shown

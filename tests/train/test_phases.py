"""Recipes of several phases."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tomli_w
import torch
from failures import each
from runs import losses, records, weights
from saved_weights import read_weights

from matmix.launch.cli import main as matmix
from matmix.train.entry import main
from matmix.train.loop import train
from matmix.train.optim.config import ScheduleConfig, rate_share
from matmix.train.recipe import load_config, load_phases, merged, run_dir_of, write_phases
from matmix.train.recipe_files import find_recipe, read_toml
from matmix.train.run.directory import RunDirectory
from matmix.use.opening import open_model

TEXT = """
seed = 3
steps = 3
global_batch_size = 4
device = "cpu"
[model]
d_model = 16
n_layers = 1
layers = ["attention"]
mixers.attention = { nheads = 2, headdim = 8 }
[data]
path = "{data}"
seqlen = 16
workers = 0
[evaluation]
batches = 1
ablation_batches = 0
[logging]
every = 1
tensorboard = false
picture = false
[[phase]]
[[phase]]
steps = 2
data.seqlen = 32
optimizer.lr = 1e-4
"""


@pytest.fixture
def recipe(tmp_path, dataset):
    def write(text: str = "") -> str:
        path = tmp_path / "mine.toml"
        path.write_text(TEXT.replace("{data}", dataset) + text)
        return str(path)

    return write


def test_a_phase_begins_with_the_weights_of_the_one_before_and_a_killed_one_is_resumed(recipe, tmp_path, capsys):
    path, run = recipe(), tmp_path / "run"
    assert main([path, "--run-dir", str(run), "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    begins = [line.split("  ", 1)[1].strip() for line in lines if line.startswith("begins with")]
    assert begins == ["weights drawn by the seed", f"the weights that {run}/phase-1 will end with"]
    assert not run.exists()

    assert main([path, "--run-dir", str(run)]) == 0
    assert capsys.readouterr().out.count("Next: ") == 1
    assert [len(losses(run / f"phase-{number}")) for number in (1, 2)] == [3, 2]
    second = RunDirectory(run / "phase-2").read_config()
    assert (second.data.seqlen, second.steps, second.seed) == (32, 2, 3)
    assert second.init.from_ == f"{run}/phase-1"
    whole = losses(run / "phase-2")

    # Stopped within a phase, killed between two, stopped in the next one whose beginning is gone by then.
    parts = tmp_path / "parts"
    assert main([path, "--run-dir", str(parts), "--stop-step", "1"]) == 0
    assert not (parts / "phase-2").exists()
    first = load_phases(path, ["--run-dir", str(parts)])[0]
    train(first)
    assert main([path, "--run-dir", str(parts), "--stop-step", "1"]) == 0
    shutil.rmtree(parts / "phase-1")
    assert main([path, "--run-dir", str(parts)]) == 0
    assert not (parts / "phase-1").exists()
    assert losses(parts / "phase-2") == whole
    expected = weights(run / "phase-2")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(parts / "phase-2").items())

    run.rename(tmp_path / "moved")
    assert main([path, "--run-dir", str(tmp_path / "moved"), "--steps", "4"]) == 0
    assert [len(losses(tmp_path / f"moved/phase-{number}")) for number in (1, 2)] == [3, 4]


@each(
    "text, message",
    [
        ("init.from = 'runs/a'", r"phase 2: it begins with the weights of phase 1: leave init\.from out"),
        ("run_dir = 'runs/a'", r"phase 2: run_dir is that of the recipe"),
        ("optimiser.lr = 1", r'phase 2: unknown key "optimiser"; the nearest known key is "optimizer"'),
        ("[[phase]]\nsteps = 0", r"phase 3: steps must be >= 1"),
    ],
)
def test_mistakes_in_a_phase_are_refused_with_its_number(recipe, text, message):
    with pytest.raises(ValueError, match=message):
        load_phases(recipe(text))


def test_steps_of_a_phase_stand_in_place_of_the_recipes_epochs(recipe):
    first, second = load_phases(recipe(), ["--seed", "1"])
    assert (first.steps, second.steps) == (3, 2)
    path = Path(recipe())
    path.write_text(path.read_text().replace("steps = 3", "epochs = 2.0"))
    first, second = load_phases(str(path))
    assert (first.epochs, second.epochs, second.steps) == (2, 0, 2)


@pytest.mark.parametrize("ends", ["epochs = 2.0", "steps = 9\nevaluation = { best = 'loss', patience = 1 }"])
def test_a_phase_goes_on_wherever_the_one_before_it_ended(recipe, ends):
    path = Path(recipe())
    own = (
        path.read_text().partition("[[phase]]")[0].replace("steps = 3\n", "").replace("[evaluation]\nbatches = 1\n", "")
    )
    own = own.replace("ablation_batches = 0\n", "")
    after = f"[[phase]]\n{ends}\n[[phase]]\nsteps = 20\ninit.resume = true\n"
    path.write_text(own + after)
    (_, second) = load_phases(str(path))
    assert (second.init.resume, second.init.step) == (True, 0)
    path.write_text(own + after.replace("init.resume = true", "init = { decay = 4, step = 7 }"))
    assert load_phases(str(path))[1].steps == 11
    path.write_text(own + after.replace("init.resume = true", "init.decay = 4"))
    with pytest.raises(ValueError, match=r"phase 2: init\.decay begins with a known step, but phase 1 ends by epochs"):
        load_phases(str(path))


def test_help_shows_the_fields_of_the_first_phase(recipe, capsys):
    with pytest.raises(SystemExit):
        main([recipe(), "--help"])
    described = capsys.readouterr().out.partition("--data.seqlen ")[2].partition("--")[0]
    assert "(default: 16)" in described


def test_other_commands_refuse_phases(recipe):
    with pytest.raises(
        ValueError,
        match=r"has several phases \(\[\[phase\]\]\), which matmix train .*, matmix plan and matmix launch take;",
    ):
        load_config(recipe())


RAMP = """
[ramp]
tokens = 192
global_batch_size = [2, 4]
seqlen = [8, 16]
"""


def ramp(recipe, text=RAMP):
    """The recipe without its phases, with a ramp in front of its own 4 x 32 tokens a step."""
    path = recipe()
    plain = TEXT.partition("[[phase]]")[0].replace("seqlen = 16", "seqlen = 32").replace("steps = 3", "steps = 12")
    (Path(path)).write_text(plain.replace("{data}", load_phases(path)[0].data.path) + text)
    return path


def test_a_ramp_is_phases_that_go_on_in_tokens(recipe):
    phases = load_phases(ramp(recipe))
    assert [(one.steps, one.global_batch_size, one.data.seqlen, one.data.window) for one in phases] == [
        (6, 2, 8, 32),  # 96 tokens by 16
        (8, 4, 16, 32),  # and 96 by 64, as near as whole steps come
        (12, 4, 32, 32),
    ]
    assert {one.schedule.steps for one in phases} == {12}
    assert [(one.init.step, one.init.resume) for one in phases] == [(0, False), (6, True), (8, True)]


def test_phases_that_are_written_are_read_as_they_were(recipe, tmp_path):
    """As a launch keeps them, for jobs that begin later."""
    branch = "init.resume = true\nsteps = 5\nschedule = { name = 'wsd', decay = 2, decay_shape = '1-sqrt' }\n"
    for make in (lambda: recipe("[[phase]]\n" + branch), lambda: ramp(recipe), lambda: "debug_hydra"):
        phases = load_phases(make(), ["--init.from", "runs/before", "--run-dir", "runs/mine"])
        write_phases(phases, tmp_path / "written.toml")
        assert load_phases(str(tmp_path / "written.toml")) == phases
        assert run_dir_of(phases) == "runs/mine"


def test_a_ramp_reads_the_text_once_and_is_resumed_in_the_middle(recipe, tmp_path):
    path, run, parts = ramp(recipe), tmp_path / "run", tmp_path / "parts"
    assert main([path, "--run-dir", str(run)]) == 0
    assert main([path, "--run-dir", str(parts), "--stop-step", "7"]) == 0
    assert not (parts / "phase-3").exists()
    assert main([path, "--run-dir", str(parts)]) == 0
    folders = [f"phase-{number}" for number in (1, 2, 3)]
    steps = [record for folder in folders for record in records(run / folder)]
    assert [record["step"] for record in steps] == list(range(1, 13))
    assert [record["tokens"] for record in steps][5::2] == [96, 224, 480, 736]
    rates = [rate_share(step, 12, ScheduleConfig()) for step in range(1, 13)]
    assert [record["lr"] for record in steps] == pytest.approx([3e-4 * rate for rate in rates])
    assert [losses(parts / folder) for folder in folders] == [losses(run / folder) for folder in folders]
    expected = weights(run / "phase-3")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(parts / "phase-3").items())


@each(
    "text, message",
    [
        (
            RAMP.replace("192", "9999"),
            r"ramp ends beyond the run: its 9,999 tokens take at least \d+ of the 12 steps; low",
        ),
        (RAMP.replace("[8, 16]", "[8, 0]"), r"ramp\.seqlen must hold numbers from 1 on, got \[8, 0\]"),
        ("[ramp]\ntokens = 8\nglobal_batch_size = [0, -2]", r"ramp\.global_batch_size must .*, got \[0, -2\]"),
        (RAMP.replace("[8, 16]", "[8]"), r"ramp needs .* of the same length if several are given$"),
        (RAMP.replace("[8, 16]", "[12, 16]"), r"data\.window = 32 must be a multiple of data\.seqlen = 12"),
        (RAMP + "[[phase]]\n", r"has both \[ramp\] and \[\[phase\]\]: keep one of them$"),
        ("[ramp]\nglobal_batch_size = [2]", r"\[ramp\] has no tokens$"),
    ],
)
def test_a_ramp_that_does_not_fit_is_refused_in_a_line(recipe, text, message):
    with pytest.raises(ValueError, match=message):
        load_phases(ramp(recipe, text))


def tables(name: str) -> tuple[dict, list[dict]]:
    values = read_toml(find_recipe(name))
    return values, values.pop("phase")


def keys(table: dict, prefix: str = "") -> set[str]:
    return {
        key
        for name, value in table.items()
        for key in (keys(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name})
    }


def test_the_toy_has_the_structure_of_hydra_modern_base():
    (toy, toys), (base, phases) = tables("hydra_modern_shakespeare"), tables("hydra_modern_base")
    assert [keys(one) for one in toys] == [keys(one) for one in phases]
    assert [one.get("objective") for one in toys] == [one.get("objective") for one in phases]
    sizes = {"vocab_size", "d_model", "n_layers", "mixers"}
    assert {key: toy["model"].get(key) for key in base["model"].keys() - sizes} == {
        key: value for key, value in base["model"].items() if key not in sizes
    }
    assert {**toy["optimizer"], "lr": 0} == {**base["optimizer"], "lr": 0}
    assert toy["objective"] == base["objective"]
    assert [phase["data"]["seqlen"] / toy["data"]["seqlen"] for phase in toys[1:]] == [8, 8]
    assert [phase["data"]["seqlen"] / base["data"]["seqlen"] for phase in phases[1:]] == [8, 8]


LOADED = """
import sys, torch
from transformers import AutoModelForMaskedLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
model = AutoModelForMaskedLM.from_pretrained(sys.argv[1], trust_remote_code=True)
inputs = tokenizer(sys.argv[2].replace("<mask>", tokenizer.mask_token), return_tensors="pt")
with torch.no_grad():
    logits = model(**inputs).logits
place = inputs["input_ids"][0].tolist().index(tokenizer.mask_token_id)
torch.save((inputs["input_ids"], logits, place), sys.argv[3])
"""


@pytest.mark.slow
def test_the_phases_of_hydra_modern_base_from_start_to_averaged_export(dataset, tmp_path, capsys):
    """At toy size: the decay is worth its steps, the mean of its checkpoints and the export of that are one model,
    which a process of its own loads, and the same without mixers learns less."""
    values, phases = tables("hydra_modern_shakespeare")
    small = {
        "steps": 200,
        "global_batch_size": 32,
        "micro_batch_size": 32,
        "device": "cpu",
        "model": {"d_model": 32, "n_layers": 1, "mixers": {"hydra": {"d_state": 8, "headdim": 16}}},
        "data": {"path": dataset, "seqlen": 16, "workers": 0},
        "evaluation": {"every": 0},
        "checkpoint": {"every": 5, "keep_last": 3, "keep_every": 20},
        "logging": {"tensorboard": False, "picture": False},
    }
    changes = (
        {},
        {"steps": 40, "data": {"seqlen": 128}},
        {"steps": 60, "data": {"seqlen": 128}, "schedule": {"decay": 20}},
    )
    phases = [merged(phase, change) for phase, change in zip(phases, changes, strict=True)]
    path, run = tmp_path / "toy.toml", tmp_path / "run"
    path.write_text(tomli_w.dumps({**merged(values, small), "phase": phases}))
    assert main([str(path), "--run-dir", str(run)]) == 0
    assert main([str(path), "--run-dir", str(tmp_path / "plain"), "--model.layers", "none"]) == 0

    def loss(folder: Path) -> float:
        return records(folder, "validation")[-1]["loss"]

    stable, decayed = loss(run / "phase-2"), loss(run / "phase-3")
    start = ["--init.from", str(run / "phase-2/checkpoints/step-00000020"), "--init.decay", "20"]
    shape = ["--schedule.decay-shape", "1-sqrt", "--schedule.final", "0", "--run-dir", str(tmp_path / "branch")]
    assert main([str(run / "phase-2"), *start, *shape]) == 0
    assert decayed < stable - 0.01
    last = records(tmp_path / "branch")[-1]
    assert (last["step"], last["lr"]) == (40, 0)
    assert decayed < loss(tmp_path / "plain/phase-3") - 0.1

    averaged, exported = tmp_path / "averaged", tmp_path / "exported"
    assert matmix(["average", str(run / "phase-3"), "--last", "3", "--out", str(averaged)]) == 0
    states = [dict(read_weights(run / f"phase-3/checkpoints/step-{step:08d}")) for step in (50, 55, 60)]
    for name, tensor in weights(averaged).items():
        assert torch.equal(tensor, torch.stack([one[name].double() for one in states]).mean(0).float()), name
    assert matmix(["export", str(averaged), "--out", str(exported), "--control", str(tmp_path / "plain/phase-3")]) == 0
    card = (exported / "README.md").read_text()
    assert "| begins with | all of step 40 of run/phase-2 |" in card
    assert "| weights | mean of the checkpoints of steps 50, 55, 60 |" in card
    assert "gradients not clipped" in card
    assert "| control: no mixer" in card
    assert "Traceback" not in capsys.readouterr().err
    words = [sys.executable, "-P", "-c", LOADED, str(exported), "the <mask> of", str(tmp_path / "found.pt")]
    done = subprocess.run(
        words,
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    ids, logits, place = torch.load(tmp_path / "found.pt")
    with torch.no_grad():
        expected = open_model(averaged, device="cpu").model(ids)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    assert logits[0, place].std() > 0.1  # some tokens are likelier than others

"""Training on generated tasks: whole runs, their scores at several lengths, and what cannot be run."""

import json
import math

import pytest
import torch
from failures import each
from runs import losses, records, weights

from matmix.data.loading.masking import IGNORED
from matmix.launch.cli import main
from matmix.launch.lab.show_mixer.subject import fresh
from matmix.model import build_model, initialize
from matmix.model.mixers.mru import MRUConfig
from matmix.train.engine.build import build_engine
from matmix.train.evaluators import Evaluation, evaluate
from matmix.train.evaluators.lengths import AccuracyByLength, multiples, words_on_accuracy
from matmix.train.loaders import make_loader, with_data_facts
from matmix.train.loop import train
from matmix.train.optim.groups import make_optimizer
from matmix.train.process.distributed import Distributed
from matmix.train.recipe import load_config

PARITY = """
steps = 60
global_batch_size = 16
micro_batch_size = 8
device = "cpu"
[model]
d_model = 16
n_layers = 1
layers = ["mru"]
mlp_ratio = 2.0
[model.mixers.mru]
order = 4
construction = "identity_plus"
[data]
packing = "rows"
seqlen = 4
workers = 0
[data.synthetic]
task = "parity"
validation_samples = 20
[optimizer]
lr = 1e-2
weight_decay = 0.0
mixer_rules = false # so small a model learns faster without
[evaluation]
every = 30
[checkpoint]
every = 20
[logging]
every = 1
tensorboard = false
progress = false
"""
RECALL = [
    *("--model.architecture", "encoder", "--objective.name", "masked_lm", "--model.layers", "hydra"),
    *("--model.mixers.hydra.headdim", "8", "--model.mixers.hydra.d-state", "4"),
    *("--data.synthetic.task", "mqar", "--data.synthetic.items", "2", "--data.seqlen", "8"),
]
FIXED = ["--model.layers", "dense", "--model.mixers.dense.headdim", "8", "--model.max-seqlen", "8"]
PICTURES = [*RECALL, "--data.synthetic.task", "pathfinder", "--data.synthetic.dashes", "3", "--data.seqlen", "626"]
POSITIONS = ["--model.position-embeddings", "True", "--model.max-seqlen", "16"]


@pytest.fixture
def parity(tmp_path):
    path = tmp_path / "parity.toml"
    path.write_text(PARITY)
    return str(path)


def config_of(recipe, run_dir, *overrides):
    return load_config(recipe, ["--run-dir", str(run_dir), *overrides])


@pytest.mark.slow
def test_a_run_learns_parity_and_tells_how_far_it_holds(parity, tmp_path, capsys):
    run = tmp_path / "run"
    words = ["train", parity, "--run-dir", str(run), "--steps", "120"]
    assert main(words) == 0
    said = capsys.readouterr().out
    first, *_, last = records(run, "validation")
    assert losses(run)[-1] < 0.1 < 0.5 < losses(run)[0]
    assert last["accuracy"] > 0.95
    assert last["sequence_accuracy"] > 0.9
    assert last["chance_accuracy"] == 0.5
    assert {"accuracy_x2", "accuracy_x4", "accuracy_x8"} <= set(last)
    assert "bits_per_byte" not in last
    assert "accuracy_x2" not in first  # longer samples come at the end
    assert f"Accuracy by tokens in a sample: {last['accuracy']:.1%} at 4, {last['accuracy_x2']:.1%} at 8, " in said
    assert "the best constant guess has 50.0%" in said
    assert json.loads((run / "summary.json").read_text())["validation"]["accuracy_x8"] == last["accuracy_x8"]
    capsys.readouterr()
    assert main(["generate", str(run), "--prompt", "1 0 1 1", "--max-new-tokens", "1", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.split() == ["1", "0", "1", "1", "1"]
    assert main(["export", str(run), "--out", str(tmp_path / "out")]) == 0


def test_resuming_in_the_middle_is_bit_identical(parity, tmp_path):
    short = ["--steps", "12", "--evaluation.every", "6", "--checkpoint.every", "4"]
    train(config_of(parity, tmp_path / "whole", *short))
    parts = tmp_path / "parts"
    assert train(config_of(parity, parts, *short, "--stop-step", "5")).step == 5
    result = train(config_of(parity, parts, *short, "--data.workers", "1", "--data.synthetic.validation-samples", "30"))
    assert (result.steps_done, result.finished) == (7, True)
    assert losses(parts) == losses(tmp_path / "whole")
    expected = weights(tmp_path / "whole")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(parts).items())


@pytest.mark.slow
def test_a_model_without_mixers_stays_at_chance(parity, tmp_path):
    metrics = train(config_of(parity, tmp_path / "run", "--model.layers", "mlp", "--data.seqlen", "16")).metrics
    # Of 320 answers 16 or more are right by more than chance once in thirteen; the first of each sample is its bit.
    assert metrics["accuracy"] < 0.5 + 1 / 16 + 0.1
    assert metrics["sequence_accuracy"] == 0
    assert metrics["loss"] > math.log(2) * (15 / 16) - 0.05


COPYING = [
    *("--data.synthetic.task", "selective_copying", "--data.synthetic.items", "2", "--data.synthetic.symbols", "4"),
    *("--data.seqlen", "8", "--model.d-model", "32", "--steps", "150", "--evaluation.every", "0"),
]


@pytest.mark.slow
def test_the_default_mru_copies_what_a_model_without_mixers_cannot(parity, tmp_path):
    default = ["--model.mixers.mru.construction", MRUConfig().construction]
    mixing = train(config_of(parity, tmp_path / "mru", *COPYING, *default)).metrics
    without = train(config_of(parity, tmp_path / "none", *COPYING, "--model.layers", "none")).metrics
    assert mixing["loss"] < without["loss"] - 0.5
    assert mixing["accuracy"] > 0.6
    assert without["accuracy"] < 0.4  # chance is a quarter


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("batches", [0, 1])
def test_scores_are_those_of_single_samples(masked, batches, parity, tmp_path):
    options = RECALL if masked else ["--data.synthetic.eval-lengths", "2", "1"]
    config = config_of(parity, tmp_path / "run", *options, "--evaluation.batches", str(batches))
    config = with_data_facts(config, make_loader(config, "train", 0, 1))
    with Distributed.from_environment("cpu") as distributed:
        engine = build_engine(config.engine, distributed)
        engine.prepare(
            build_model(config.model, device="meta"),
            initialize=lambda model: initialize(model, 0),
            make_optimizer=lambda model: make_optimizer(model, config.optimizer, config.data.seqlen),
        )
        task = config.task()
        evaluators, loader = [AccuracyByLength(config, task, None)], make_loader(config, "validation", 0, 1)
        parts = {"engine": engine, "task": task, "loader": loader}
        found = evaluate(evaluators, Evaluation(**parts), config)
        assert evaluate(evaluators, Evaluation(**parts, interrupted=lambda: True), config) is None
    assert engine.module.training
    for multiple in multiples(config):
        longer = config_of(parity, tmp_path, *options, "--data.seqlen", str(multiple * config.data.seqlen))
        right, whole = [], []
        for batch in make_loader(longer, "validation", 0, 1):
            for ids, labels in zip(batch.input_ids, batch.labels, strict=True):
                if (labels != IGNORED).any():
                    guesses = engine.module.eval()(ids[None])[0].argmax(-1)
                    right.append((guesses == labels)[labels != IGNORED].double())
                    whole.append(right[-1].min().item())
        assert len(whole) == 20
        first = 16 if batches else 20
        ending = "" if multiple == 1 else f"_x{multiple}"
        assert found[f"accuracy{ending}"] == pytest.approx(torch.cat(right[:first]).mean().item())
        assert found[f"sequence_accuracy{ending}"] == pytest.approx(sum(whole[:first]) / first)


def test_encoders_are_scored_where_the_masks_are(parity, tmp_path):
    metrics = train(config_of(parity, tmp_path / "run", *RECALL, "--steps", "2")).metrics
    assert metrics["accuracy"] == metrics["masked_accuracy"]
    assert metrics["chance_accuracy"] == 1 / 32
    assert {"accuracy_x2", "accuracy_x4", "accuracy_x8"} <= set(metrics)


def test_lengths_that_are_given_are_multiples_of_the_length_of_training(parity, tmp_path):
    """Up to the last position that the model knows."""
    given = [*RECALL, *POSITIONS, "--data.synthetic.eval-lengths", "1", "2", "--steps", "2"]
    metrics = train(config_of(parity, tmp_path / "run", *given)).metrics
    assert {name for name in metrics if name.startswith("accuracy")} == {"accuracy", "accuracy_x2"}


def test_lengths_are_those_that_the_model_takes(parity, tmp_path):
    assert multiples(config_of(parity, tmp_path)) == [1, 2, 4, 8]
    assert multiples(config_of(parity, tmp_path, "--data.synthetic.eval-lengths", "3", "1")) == [1, 3]
    assert multiples(config_of(parity, tmp_path, *RECALL, *POSITIONS)) == [1, 2]
    assert multiples(config_of(parity, tmp_path, *RECALL, *FIXED)) == [1]
    assert multiples(config_of(parity, tmp_path, *PICTURES)) == [1]


def test_words():
    metrics = {"accuracy": 0.5, "accuracy_x10": 0.25, "accuracy_x2": 1.0, "chance_accuracy": 0.125}
    assert words_on_accuracy(metrics, 100) == (
        "Accuracy by tokens in a sample: 50.0% at 100, 100.0% at 200, 25.0% at 1,000; "
        "the best constant guess has 12.5%."
    )


def test_a_recipe_shows_its_initial_mixers_on_the_tokens_of_its_task(parity):
    subject = fresh(parity, "(12) (12)(13) (123)", None, ["--data.synthetic.task", "s3"])
    assert subject.pieces == ["(12)", "<unk>", "(123)"]
    pieces = fresh(parity, "k3 v7 <mask>", None, RECALL).pieces
    assert pieces == ["k3", "v7", "<mask>"]


@each(
    "options, words",
    [
        (["--data.synthetic.task", "s6"], ["data.synthetic.task = 's6'", "s5"]),
        (["--data.synthetic.task", "mqar"], ["data.seqlen = 4", "too short for mqar", "32"]),
        (["--data.path", "somewhere"], ["data.path and data.synthetic.task"]),
        (["--model.vocab-size", "4"], ["model.vocab_size = 4", "5 pieces"]),
        (
            [*RECALL, "--data.synthetic.task", "parity"],
            ['"parity" has no form for models that read the whole sequence', "objective.name"],
        ),
        (
            [*RECALL, *FIXED, "--data.synthetic.eval-lengths", "1", "2"],
            ["data.synthetic.eval_lengths: 2 x data.seqlen", "dense", "model.max_seqlen = 8", "16"],
        ),
        (
            [*RECALL, *POSITIONS, "--data.synthetic.eval-lengths", "4"],
            ["data.synthetic.eval_lengths: 4 x data.seqlen", "32", "16"],
        ),
        (
            [*PICTURES, "--data.synthetic.eval-lengths", "1", "4"],
            ["data.synthetic.eval_lengths: 4 x data.seqlen", "2504 is not a square picture"],
        ),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(options, words, parity, tmp_path, capsys):
    assert main(["train", parity, "--run-dir", str(tmp_path / "run"), *options]) == 2
    (error,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    for word in words:
        assert word in error
    assert not (tmp_path / "run").exists()


def test_another_task_is_another_run(parity, tmp_path, capsys):
    run = str(tmp_path / "run")
    train(config_of(parity, run, "--stop-step", "1"))
    assert main(["train", parity, "--run-dir", run, "--data.synthetic.task", "s3"]) == 2
    assert "data.synthetic.task: 'parity' there, 's3' here" in capsys.readouterr().err

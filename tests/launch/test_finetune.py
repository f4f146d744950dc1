"""From a pretrained encoder to a classifier in one command."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from failures import each
from labelled import texts, write_jsonl
from paths import ROOT
from runs import losses, records, run_recipe, weights

from matmix.launch.cli import main
from matmix.train.recipe import load_config
from matmix.train.recipe_files import find_recipe
from matmix.use.finetuning import counted, finetuning_config, fitted_rate, planned_config


@pytest.fixture(scope="module")
def pretrained(dataset, tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "encoder"
    run_recipe("debug_hydra", dataset, run, "--steps", "2", "--evaluation.every", "0")
    return run


@pytest.fixture
def command(pretrained, tmp_path):
    files = ["--data.examples.train", write_jsonl(tmp_path / "train.jsonl", texts(53))]
    files += ["--data.examples.validation", write_jsonl(tmp_path / "validation.jsonl", texts(31, seed=1))]
    fast = ["--device", "cpu", "--global-batch-size", "8", "--epochs", "2", "--logging.every", "1"]
    return [str(pretrained), "sequence_classification", *files, *fast, "--optimizer.lr", "1e-3"]


def test_a_run_becomes_a_classifier_and_is_resumed_bit_for_bit(command, pretrained, tmp_path, capsys):
    assert main(["finetune", *command, "--run-dir", str(tmp_path / "whole")]) == 0
    assert len(losses(tmp_path / "whole")) == 14  # 2 epochs of 53 examples, 8 a step
    assert "accuracy" in records(tmp_path / "whole", "validation")[-1]
    assert main(["finetune", *command, "--run-dir", str(tmp_path / "parts"), "--stop-step", "5"]) == 0
    assert main(["finetune", *command, "--run-dir", str(tmp_path / "parts"), "--stop-step", "0"]) == 0
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    expected = weights(tmp_path / "whole")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(tmp_path / "parts").items())


def test_the_model_is_that_of_the_source(command, pretrained):
    config = finetuning_config(command[0], command[1], command[2:])
    assert (config.model.architecture, config.model.head.outputs) == ("sequence_classifier", 3)
    assert (config.model.d_model, config.model.layers) == (32, ("hydra", "attention"))
    assert (config.data.prefix, config.data.suffix) == ("cls", "sep")
    assert config.init.from_ == str(pretrained)
    assert config.run_dir == "runs/encoder-sequence_classification"
    assert (
        finetuning_config(
            command[0], "token_classification", [*command[2:6], "--model.head.outputs", "5", "--epochs", "1"]
        ).model.head.outputs
        == 5
    )


def test_rate_and_steps_that_nobody_gives_fit_the_model_and_the_examples(command, caplog):
    files = command[2:6]
    with caplog.at_level("INFO", logger="matmix"):
        config = finetuning_config(*command[:2], files)
    assert config.optimizer.lr == fitted_rate(32) == 2e-3
    assert (config.epochs, counted(config).steps) == (181.2, 301)
    assert "53 examples are few: 181.2 epochs in place of 3, so that there are 300 steps" in caplog.text
    assert finetuning_config(*command[:2], [*files, "--global-batch-size", "1"]).epochs == 5.7
    many = finetuning_config(*command[:2], [files[0], write_jsonl(Path(files[1]), texts(120)), "--global-batch-size=1"])
    assert (many.epochs, counted(many).steps) == (3, 360)


@pytest.mark.slow
def test_a_first_try_learns_something(pretrained, tmp_path):
    """With no more than a task and 120 examples, the class of each is that of its first word."""
    files = ["--data.examples.train", write_jsonl(tmp_path / "train.jsonl", texts(120))]
    files += ["--data.examples.validation", write_jsonl(tmp_path / "validation.jsonl", texts(60, seed=1))]
    words = [*files, "--device", "cpu", "--run-dir", str(tmp_path / "run"), "--logging.picture", "False"]
    assert main(["finetune", str(pretrained), "sequence_classification", *words]) == 0
    found = records(tmp_path / "run", "validation")[-1]
    assert found["accuracy"] > found["control_accuracy"] + 0.2, found


def test_the_mean_is_classified_unless_the_source_has_a_head(command, tmp_path):
    """What training on masked tokens puts into the first position is about that position."""
    options = command[2:]
    assert finetuning_config(*command[:2], options).model.head.pooling == "mean"
    given = [*options, "--model.head.pooling", "cls"]
    assert finetuning_config(*command[:2], given).model.head.pooling == "cls"
    assert main(["finetune", *command[:2], *given, "--run-dir", str(tmp_path / "run"), "--stop-step", "1"]) == 0
    assert finetuning_config(str(tmp_path / "run"), command[1], options).model.head.pooling == "cls"
    assert planned_config("glue_rte", load_config("hydra_base_c4").model, "an encoder").model.head.pooling == "cls"


def test_rates_fall_with_the_width_to_those_of_base_models():
    assert [fitted_rate(width) for width in (64, 128, 256, 768, 1024)] == [2e-3, 1.8e-3, 4.5e-4, 5e-5, 2.8e-5]
    assert fitted_rate(768, on_images=True) == 1e-4


@each(
    "words, epochs, steps, rate",
    [
        (["--epochs", "2"], 2, 4, 2e-3),
        (["--epochs=2"], 2, 4, 2e-3),
        (["--steps", "7"], 0, 7, 2e-3),
        (["--epochs", "0", "--steps", "7"], 0, 7, 2e-3),
        (["--epochs", "2", "--optimizer.lr", "5e-5"], 2, 4, 5e-5),
    ],
)
def test_what_the_command_line_gives_counts(command, words, epochs, steps, rate):
    config = counted(finetuning_config(*command[:2], [*command[2:6], *words]))
    assert (config.epochs, config.steps, config.optimizer.lr) == (epochs, steps, rate)


@each(
    "line, words, found",
    [
        ("epochs = 1.0", [], (1, 2, 1e-4)),
        ("steps = 9", [], (0, 9, 1e-4)),
        ("epochs = 1.0", ["--steps", "9"], (0, 9, 1e-4)),
        ("steps = 9", ["--epochs", "2", "--optimizer.lr", "1e-3"], (2, 4, 1e-3)),
    ],
)
def test_what_a_recipe_gives_counts(command, tmp_path, line, words, found):
    recipe = tmp_path / "mine.toml"
    recipe.write_text(
        f"{line}\n" + find_recipe("finetune").read_text().replace("[optimizer]", "[optimizer]\nlr = 1e-4")
    )
    config = counted(finetuning_config(command[0], str(recipe), [*command[2:6], *words]))
    assert (config.epochs, config.steps, config.optimizer.lr) == found


def test_a_dry_run_counts_the_steps_of_the_epochs(command, capsys):
    assert main(["finetune", *command, "--dry-run"]) == 0
    assert "steps             14 (epochs = 2)\n" in capsys.readouterr().out
    assert main(["finetune", *command[:6], "--seeds", "0", "1", "--dry-run"]) == 0
    said = capsys.readouterr()
    assert "steps             301 (epochs = 181.2)\n" in said.out
    assert "53 examples are few" in said.err


def test_steps_and_epochs_are_not_both_given(command, capsys):
    assert main(["finetune", *command, "--steps", "5"]) == 2
    assert capsys.readouterr().err.strip() == "matmix: error: --steps and --epochs are both given: keep one of them"


def test_from_scratch_takes_the_model_and_no_weights(command, tmp_path):
    """What pretraining bought is seen beside the same model, tokens and data order."""
    pretrained = finetuning_config(command[0], command[1], command[2:])
    config = finetuning_config(command[0], command[1], command[2:], from_scratch=True)
    assert (config.model, config.data, config.seed) == (pretrained.model, pretrained.data, pretrained.seed)
    assert config.init.from_ == ""
    assert config.run_dir == "runs/encoder-sequence_classification-from-scratch"
    assert main(["finetune", *command, "--from-scratch", "--run-dir", str(tmp_path / "run"), "--stop-step", "1"]) == 0
    assert "weights from" not in (tmp_path / "run" / "messages.log").read_text()


@each("task", sorted(path.stem for path in (ROOT / "train/recipes/finetuning").glob("*.toml")))
def test_bundled_recipes_fit_an_encoder(task):
    """Found by name; their model is that of the source but for the head."""
    encoder = load_config("hydra_base_c4").model
    config = planned_config(task, encoder, "an encoder")
    assert config.model.architecture == config.task().architectures[0]
    assert (config.model.d_model, config.model.layers) == (encoder.d_model, encoder.layers)
    assert task in config.data.examples.train


@each(
    "change, message",
    [
        ({1: "masked_lm"}, "is no task on labelled examples: matmix train RECIPE --init.from"),
        ({1: "causal_lm"}, '"causal_lm" trains architecture language_model or encoder_decoder, and'),
        ({1: "causal_lm"}, "has architecture encoder: matmix finetune takes sequence_classification, multi_label, "),
        ({1: "causal_lm"}, "goes on with masked_lm"),
        ({1: "sequence_clasification"}, 'not found: sequence_clasification (did you mean "sequence_classification"?)'),
        ({1: "glue_rta"}, 'task or recipe not found: glue_rta (did you mean "glue_rte"?)'),
        ({1: "foo"}, "not found: foo (tasks: image_classification, sequence_classification, multi_label, "),
        ({0: "no/run"}, "no run or export at no/run"),
        ({3: "no.jsonl"}, "examples not found: no.jsonl"),
    ],
)
def test_mistakes_are_one_line(command, change, message, capsys):
    words = [change.get(number, word) for number, word in enumerate(command)]
    assert main(["finetune", *words]) == 2
    said = capsys.readouterr().err.strip()
    assert message in said
    assert len(said.splitlines()) == 1


def test_examples_of_one_class_teach_nothing(command, capsys):
    write_jsonl(Path(command[3]), [{"text": "word1", "label": "pos"}] * 40)
    assert main(["finetune", *command]) == 2
    said = capsys.readouterr().err.strip()
    assert f'{command[3]}: all 40 training examples have the label "pos": there is nothing to learn' in said
    assert len(said.splitlines()) == 1


@pytest.fixture(scope="module")
def language_model(dataset, tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "lm"
    run_recipe("debug_mru", dataset, run, "--steps", "1", "--evaluation.every", "0")
    return run


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("sequence_classification", "which sees no later tokens: give an encoder; matmix train RECIPE --init.from"),
        (
            "masked_lm",
            '"masked_lm" trains architecture encoder or strand_encoder, and {} has architecture language_model: '
            "matmix train RECIPE",
        ),
        ("causal_lm", '"causal_lm" is no task on labelled examples: matmix train RECIPE --init.from {} goes on'),
    ],
)
def test_a_language_model_is_no_encoder(language_model, command, task, message, capsys):
    assert main(["finetune", str(language_model), task, *command[2:]]) == 2
    said = capsys.readouterr().err.strip()
    assert message.format(language_model) in said
    assert len(said.splitlines()) == 1
    assert ("goes on with causal_lm" in said) == (task != "causal_lm")

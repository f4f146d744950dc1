"""Exported classifiers and embedders: losses as transformers has them, other libraries, and the way back."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from failures import each
from nightly import nightly
from safetensors.torch import load_file
from small_models import HEADS, random_model, with_head
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)
from transformers.loss.loss_utils import ForQuestionAnsweringLoss, ForSequenceClassificationLoss

from matmix.data.examples.base import Encoder
from matmix.model.architecture import Outputs
from matmix.model.interop import read_export
from matmix.model.interop.export.directory import export_model
from matmix.model.interop.export.inputs import classification_loss, span_loss


@each(
    "problem, outputs, labels",
    [
        ("regression", 1, torch.tensor([0.5, -1.0, 2.0, 0.0])),
        ("regression", 3, torch.randn(4, 3)),
        ("single_label_classification", 3, torch.tensor([0, 2, 1, 0])),
        ("multi_label_classification", 3, torch.tensor([[1.0, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0]])),
    ],
)
def test_losses_are_those_of_transformers(problem, outputs, labels):
    """Also where the problem is not told, as far as transformers finds it out."""
    logits = torch.randn(4, outputs)
    config = AutoConfig.for_model("bert", num_labels=outputs, problem_type=problem)
    config.num_labels = outputs
    expected = ForSequenceClassificationLoss(labels, logits, config)
    torch.testing.assert_close(classification_loss(logits, labels, problem), expected)
    if (problem, outputs) != ("regression", 3):
        torch.testing.assert_close(classification_loss(logits, labels, None), expected)


def test_values_that_are_not_counted_are_refused():
    labels = torch.tensor([0.5, -100.0])
    assert torch.isfinite(classification_loss(torch.zeros(2, 1), labels, "regression"))
    with pytest.raises(ValueError, match="the value -100, which Trainer does not count"):
        classification_loss(torch.zeros(2, 1), labels, "regression", count=1)


def test_answers_that_were_cut_off_do_not_count():
    start, end = torch.randn(4, 12), torch.randn(4, 12)
    starts, ends = torch.tensor([3, 0, 5, 11]), torch.tensor([4, 2, 99, 12])
    expected = ForQuestionAnsweringLoss(start, end, starts, ends)
    torch.testing.assert_close((span_loss(start, starts) + span_loss(end, ends)) / 2, expected)


@pytest.mark.parametrize("name", ["classes", "tokens", "spans"])
def test_the_output_layer_can_be_trained_alone(head_exports, name):
    """As the page on exports says."""
    from bare_libraries import TRAINED  # and Trainer with it, which takes a second, also where no test here runs

    model = TRAINED[name][0].from_pretrained(head_exports / name / "export", trust_remote_code=True)
    model.requires_grad_(False)
    model.model.classifier.requires_grad_(True)
    sum(output.sum() for output in model(torch.arange(8, 20)[None]).to_tuple()).backward()
    reached = {part for part, parameter in model.named_parameters() if parameter.grad is not None}
    assert reached == {f"model.classifier.{part}" for part, _ in model.model.classifier.named_parameters()}


def test_words_with_their_spaces_are_read_as_in_training(head_exports, tokenizer):
    """As the page on exports and the card of the model write it."""
    words = ["the", "king", "of", "naïve", "rivers,", "x"]
    export = head_exports / "tokens" / "export"
    spaced = [words[0], *(f" {word}" for word in words[1:])]
    found = AutoTokenizer.from_pretrained(export)(spaced, is_split_into_words=True)
    special = tokenizer.special["cls"], tokenizer.special["sep"]
    pieces = Encoder(tokenizer=tokenizer, prefix=special[0], suffix=special[1], max_length=99, truncate=False).words(
        words
    )
    assert found["input_ids"] == [special[0], *(token for piece in pieces for token in piece), special[1]]
    numbers = [number for number, piece in enumerate(pieces) for _ in piece]
    assert found.word_ids() == [None, *numbers, None]
    assert 'spaced = [words[0], *(f" {word}" for word in words[1:])]' in (export / "README.md").read_text()


def test_masks_that_would_be_added_to_scores_are_refused(head_exports):
    """Their zeros are the tokens."""
    export = head_exports / "classes" / "export"
    model = AutoModelForSequenceClassification.from_pretrained(export, trust_remote_code=True).eval()
    ids, mask = torch.arange(8, 32).view(2, 12), torch.tensor([[1.0] * 12, [1.0] * 7 + [0.0] * 5])
    assert torch.equal(model(ids, attention_mask=mask).logits, model(ids, attention_mask=mask.long()).logits)
    with pytest.raises(ValueError, match=r"^attention_mask has values below 0, .*: give 1 at tokens, 0 at padding$"):
        model(ids, attention_mask=(1 - mask) * torch.finfo(torch.float32).min)


def test_the_configuration_says_what_the_weights_are(exports):
    """Embeddings that are not those of the weights are refused; what computes attention makes no difference."""
    path = exports / "mixed" / "export"
    ids = torch.arange(8, 20)[None]
    logits = []
    for name in ("sdpa", "eager"):
        model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True, attn_implementation=name)
        logits.append(model.eval()(ids).logits)
    assert torch.equal(*logits)
    for name, tied in (("mixed", True), ("mru", False), ("hydra", False)):
        auto_class = AutoModelForMaskedLM if name == "hydra" else AutoModelForCausalLM
        with pytest.raises(ValueError, match=f"tie_word_embeddings = {tied}: the model has {not tied}"):
            auto_class.from_pretrained(exports / name / "export", trust_remote_code=True, tie_word_embeddings=tied)


def test_an_export_says_what_its_outputs_are(head_exports):
    fields = json.loads((head_exports / "classes" / "export" / "config.json").read_text())
    assert fields["id2label"] == {"0": "bad", "1": "fair", "2": "good"}
    assert fields["label2id"] == {"bad": 0, "fair": 1, "good": 2}
    assert fields["problem_type"] == "single_label_classification"
    assert fields["architectures"] == ["MatmixForSequenceClassification"]
    card = (head_exports / "classes" / "export" / "README.md").read_text()
    assert "3 outputs, computed from the first position of a text: bad, fair, good." in card
    assert "AutoModelForSequenceClassification.from_pretrained" in card
    fields = json.loads((head_exports / "choices" / "export" / "config.json").read_text())
    assert fields["architectures"] == ["MatmixForMultipleChoice"]
    config = with_head("token_classifier", outputs=3)
    with pytest.raises(ValueError, match="there are 2 names of labels for a model with 3 outputs"):
        export_model(
            config, random_model(config).state_dict(), None, head_exports / "none", outputs=Outputs(labels=("a", "b"))
        )
    assert not (head_exports / "none").exists()


@each("name", HEADS)
def test_an_export_is_read_back(head_exports, name):
    model = read_export(head_exports / name / "export").eval()
    assert model.config.head == HEADS[name][0].head
    reference = load_file(head_exports / name / "reference.safetensors")
    found = model(reference["input_ids"], attention_mask=reference["mask"])
    torch.testing.assert_close(found, reference["outputs"])


@pytest.mark.parametrize("auto_class", [AutoModelForSequenceClassification, AutoModelForTokenClassification])
def test_what_transformers_saves_is_read_back(exports, auto_class, tmp_path):
    """A pretrained encoder with a new head, trained elsewhere, is a model of the architecture of that name here."""
    model = auto_class.from_pretrained(exports / "hydra" / "export", trust_remote_code=True, num_labels=5).eval()
    model.save_pretrained(tmp_path)
    again = read_export(tmp_path).eval()
    assert again.config.head.outputs == 5
    assert again.config.head.pooling == "mean"
    ids = torch.randint(8, 420, (2, 12))
    torch.testing.assert_close(again(ids), model(ids).logits, rtol=1e-5, atol=1e-5)


def test_a_configuration_says_what_the_model_has_become(head_exports, tmp_path):
    """A classifier's body with the output of an encoder is an encoder."""
    from matmix.model.interop.export.config import MatmixEncoderConfig
    from matmix.model.interop.export.encoder import MatmixForMaskedLM

    config = MatmixEncoderConfig.from_pretrained(head_exports / "classes" / "export")
    model = MatmixForMaskedLM(config).eval()
    model.save_pretrained(tmp_path)
    ids = torch.randint(8, 420, (2, 12))
    torch.testing.assert_close(read_export(tmp_path).eval()(ids), model(ids).logits)


@pytest.mark.parametrize("name", ["classes", *map(nightly, ("tokens", "spans", "choices"))])
def test_trainer_continues(head_exports, name, tmp_path):
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate, which is not installed")
    from bare_libraries import check_trainer

    saved = check_trainer(head_exports, name, tmp_path)
    found, expected = read_export(saved).config, HEADS[name][0]
    head = dataclasses.replace(expected.head, outputs=expected.head.count)  # which an export always says
    assert (found.architecture, found.head) == (expected.architecture, head)


@pytest.mark.parametrize("name", ["embedder", "hydra"])
def test_sentence_transformers_gives_the_vectors(exports, head_exports, name):
    pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    from bare_libraries import check_sentence_transformer

    check_sentence_transformer((head_exports if name == "embedder" else exports) / name)


def test_the_layout_of_sentence_transformers_is_there_where_it_can_be_used(exports, head_exports):
    for work, name, pooling in ((head_exports, "embedder", "cls_token"), (exports, "hydra", "mean_tokens")):
        modules = json.loads((work / name / "export" / "modules.json").read_text())
        assert [module["path"] for module in modules] == ["", "1_Pooling"]
        fields = json.loads((work / name / "export" / "1_Pooling" / "config.json").read_text())
        assert [key for key, value in fields.items() if value is True] == [f"pooling_mode_{pooling}"]
        assert fields["word_embedding_dimension"] == 32
        card = (work / name / "export" / "README.md").read_text()
        assert "SentenceTransformer(" in card
    for work, name in ((exports, "mru"), (head_exports, "classes")):
        assert not (work / name / "export" / "modules.json").exists()

"""Checks of exported classifiers and embedders, where transformers and PyTorch are installed and matmix is not."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from bare_arguments import check_packing, check_signature
from bare_loading import (
    check_embeddings,
    check_hidden_states,
    check_no_attentions,
    check_recomputing,
    fine_tune,
    largest,
    load,
    reshaped,
)
from safetensors.torch import load_file
from transformers import AutoModel

TOLERANCE = 1e-5
# Auto class -> labels for a batch of 4 rows of 12 tokens, of which a row has 1 to 12.
LABELS = {
    "AutoModelForSequenceClassification": {"labels": torch.tensor([0, 2, 1, 0])},
    "AutoModelForTokenClassification": {
        "labels": (torch.arange(48).view(4, 12) % 4).masked_fill_(torch.eye(4, 12) > 0, -100)
    },
    "AutoModelForQuestionAnswering": {
        "start_positions": torch.tensor([3, 0, 5, 0]),
        "end_positions": torch.tensor([4, 2, 99, 0]),
    },
    "AutoModelForMultipleChoice": {"labels": torch.tensor([1, 0])},
}
# Auto class -> the shape of its outputs for that batch, where there are three labels.
SHAPES = {
    "AutoModelForSequenceClassification": (4, 3),
    "AutoModelForTokenClassification": (4, 12, 3),
    "AutoModelForQuestionAnswering": (4, 12, 2),
    "AutoModelForMultipleChoice": (2, 2),
}


def outputs_of(model, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The outputs of any of the classes for 4 rows; for multiple choice these are 2 pairs of choices."""
    kind = type(model).__name__
    with torch.no_grad():
        if kind == "MatmixForMultipleChoice":
            return model(ids.view(2, 2, -1), attention_mask=mask.view(2, 2, -1)).logits
        found = model(ids, attention_mask=mask)
    if kind == "MatmixForQuestionAnswering":
        return torch.stack((found.start_logits, found.end_logits), dim=-1)
    return found.last_hidden_state if kind == "MatmixEncoderModel" else found.logits


def check_head(folder: Path, saved: Path, tokenizer) -> None:
    """A fine-tuned model gives the outputs that it had, is trained on, and is the same after saving and loading."""
    path = folder / "export"
    fields = json.loads((path / "config.json").read_text(encoding="utf-8"))
    own = f"modeling_matmix.{fields['architectures'][0]}"
    name = next(name for name, target in fields["auto_map"].items() if target == own)
    model, problems = load(getattr(transformers, name), path)
    assert not problems, problems
    reference = load_file(folder / "reference.safetensors")
    ids, mask, expected = reference["input_ids"], reference["mask"], reference["outputs"]
    found = outputs_of(model, ids, mask)
    if name == "AutoModel":  # an embedder: the features of the first token
        found = found[:, 0]
    real = mask.bool() if found.dim() == 3 else slice(None)
    difference = largest(found[real], expected.view(found.shape)[real])
    assert difference <= TOLERANCE, f"{name}: outputs differ by {difference}"
    body, problems = load(AutoModel, path)
    assert not problems, problems
    assert body(ids, attention_mask=mask).last_hidden_state.shape == (*ids.shape, body.config.hidden_size)
    check_hidden_states(model, body, ids, TOLERANCE)
    check_embeddings(model, ids, TOLERANCE)
    check_no_attentions(model, input_ids=reshaped(model, ids))
    pair = tokenizer("one", "two", return_tensors="pt")
    assert pair["token_type_ids"].sum() > 0
    if name == "AutoModel":
        return
    if "id2label" in fields:
        assert list(model.config.id2label.values()) == list(fields["id2label"].values())
        assert model.config.num_labels == len(fields["id2label"])
    batch = {"input_ids": ids, "attention_mask": mask} | LABELS[name]
    if name == "AutoModelForMultipleChoice":
        batch |= {key: batch[key].view(2, 2, -1) for key in ("input_ids", "attention_mask")}
    if model.config.problem_type == "regression":
        batch["labels"] = torch.tensor([0.5, -1.0, 2.0, 0.0])
    check_recomputing(model, **batch)
    fine_tune(model, name, **batch)
    check_saved(model, name, ids, mask, saved)


def check_new_heads(path: Path, batch, saved: Path) -> None:
    """A pretrained encoder gets any head, new where nothing else is, and of the kind that is asked for."""
    ids, mask = torch.arange(8, 56).view(4, 12), (torch.arange(12) < torch.tensor([[12], [5], [9], [1]])).long()
    linear = {"model.classifier.output.weight", "model.classifier.output.bias"}
    for index, (name, shape) in enumerate(SHAPES.items()):
        # Linear layers on the mean, unless one asks for the published head.
        published = {"classifier_pooling": "cls", "classifier_hidden": True} if index % 2 else {}
        hidden = {"model.classifier.dense.weight", "model.classifier.dense.bias"} if published else set()
        model, problems = load(getattr(transformers, name), path, num_labels=3, **published)
        assert set(problems) == {"missing_keys"}, problems
        assert set(problems["missing_keys"]) == linear | hidden, problems
        weight = model.model.classifier.output.weight
        assert 0.01 < weight.std() < 0.04, f"{name}: the new head starts with weights of {weight.std()}"
        assert outputs_of(model, ids, mask).shape == shape, name
        check_signature(model, input_ids=reshaped(model, ids))
        check_packing(model, ids)
        check_saved(model, name, ids, mask, saved / name)
    classifier, _ = load(transformers.AutoModelForSequenceClassification, path, num_labels=3)
    fine_tune(classifier, "classes", **batch, labels=torch.tensor([0, 2]))


def check_saved(model, name: str, ids: torch.Tensor, mask: torch.Tensor, saved: Path) -> None:
    model.eval().save_pretrained(saved)
    again, problems = load(getattr(transformers, name), saved)
    assert not problems, problems
    difference = largest(outputs_of(again, ids, mask), outputs_of(model, ids, mask))
    assert difference == 0, f"{name}: saving and loading again changes outputs by {difference}"

"""Checks that a step of transformers' Trainer does not depend on how its batch is cut: into micro-batches, or between
processes. Nothing of matmix.

    python bare_steps.py EXPORT WORK
    torchrun --nproc-per-node 2 bare_steps.py EXPORT WORK

write the step of one process, and of two, as WORK/whole.pt, WORK/0.pt and WORK/1.pt.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from bare_loading import load
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.trainer_pt_utils import LabelSmoother

# Of float32; batches that are averaged wrongly are off by a tenth and more.
TOLERANCE = 5e-6
SMOOTHING = 0.2
# Numbers of tokens of four texts in rows of 16, so that each micro-batch has another number of targets.
LENGTHS = (3, 16, 9, 1)


def rows_of_texts(labels: torch.Tensor | None) -> list[dict]:
    """Four padded texts. labels (4, 16) or (4, ...), or None for the tokens themselves."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(8, 400, (4, 16), generator=generator)
    mask = (torch.arange(16) < torch.tensor(LENGTHS).unsqueeze(1)).long()
    labels = ids if labels is None else labels
    if labels.dim() == 2 and labels.shape[1] == 16:
        labels = labels.masked_fill(mask == 0, -100)
    return [{"input_ids": ids[i], "attention_mask": mask[i], "labels": labels[i]} for i in range(4)]


def _spans() -> list[dict]:
    rows = rows_of_texts(torch.zeros(4))
    for index, row in enumerate(rows):
        del row["labels"]
        row |= {"start_positions": torch.tensor(index), "end_positions": torch.tensor(index + 3)}
    return rows


def _choices() -> list[dict]:
    first, second = rows_of_texts(torch.tensor([0, 1, 1, 0])), rows_of_texts(torch.zeros(4))[::-1]
    names = ("input_ids", "attention_mask")
    return [
        {name: torch.stack((a[name], b[name])) for name in names} | {"labels": a["labels"]}
        for a, b in zip(first, second, strict=True)
    ]


# Name of a kind of model -> its class, how it is loaded, and four examples.
KINDS = {
    "next tokens": ("AutoModelForCausalLM", {}, lambda: rows_of_texts(None)),
    "masked tokens": ("AutoModelForMaskedLM", {}, lambda: rows_of_texts(None)),
    "tokens": ("AutoModelForTokenClassification", {}, lambda: rows_of_texts(torch.arange(64).view(4, 16) % 3)),
    "classes": ("AutoModelForSequenceClassification", {}, lambda: rows_of_texts(torch.tensor([0, 2, 1, 0]))),
    "values": (
        "AutoModelForSequenceClassification",
        {"num_labels": 1},
        lambda: rows_of_texts(torch.tensor([0.5, -1.0, 2.0, 0.0])),
    ),
    "several classes": (
        "AutoModelForSequenceClassification",
        {"problem_type": "multi_label_classification"},
        lambda: rows_of_texts(torch.eye(4)[:, :3]),
    ),
    "spans": ("AutoModelForQuestionAnswering", {}, _spans),
    "choices": ("AutoModelForMultipleChoice", {}, _choices),
}


def make_model(kind: str, path: Path):
    torch.manual_seed(0)  # of new heads
    auto_class, options, _ = KINDS[kind]
    options = {"num_labels": 3, **options} if "LM" not in auto_class else options
    return without_dropout(load(getattr(transformers, auto_class), path, **options)[0])


def without_dropout(model):
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def step(model, rows: list[dict], batch: int, **options) -> torch.Tensor:
    """What one step at rate 1 of the four examples, `batch` of them at once, takes from the weights: their gradient."""
    compute_loss_func = options.pop("compute_loss_func", None)
    options = {"gradient_accumulation_steps": 4 // batch, "per_device_train_batch_size": batch, **options}
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with tempfile.TemporaryDirectory() as work:
        arguments = TrainingArguments(
            work,
            max_steps=1,
            learning_rate=1.0,
            optim="sgd",
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            **options,
        )
        more = {"compute_loss_func": compute_loss_func}
        trainer = Trainer(model=model, args=arguments, train_dataset=rows, data_collator=stacked, **more)
        trainer.train()
    return torch.cat([(b - p.detach()).flatten() for b, p in zip(before, model.parameters(), strict=True)])


def stacked(rows: list[dict]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Their difference as a share of what is expected."""
    return ((found - expected).norm() / expected.norm()).item()


def gradient(model, loss: torch.Tensor) -> torch.Tensor:
    """Of a loss, by all weights."""
    parts = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([part.flatten() for part in parts])


def check_steps(make, rows: list[dict], kind: str) -> None:
    """Four micro-batches make the step of two and of the whole batch, which is the gradient of the loss that the
    model gives."""
    model = make()
    batch = stacked(rows)
    loss = model(**batch).loss
    # Version 4.57 counts the first token of each text as well, which nothing predicts.
    share = 1 - 4 / sum(LENGTHS) if kind == "next tokens" and not counts_predictions() else 1.0
    expected = gradient(model, loss) * share
    with tempfile.TemporaryDirectory() as work:
        arguments = TrainingArguments(work, report_to=[], use_cpu=True, disable_tqdm=True)
        trainer = Trainer(model=make(), args=arguments, data_collator=stacked)
        evaluated = trainer.evaluate(rows)["eval_loss"]
    assert abs(evaluated - loss.item() * share) <= 1e-5, f"{kind}: evaluation gives {evaluated}"
    whole = step(make(), rows, 4)
    assert apart(whole, expected) <= 1e-5, f"{kind}: the step is {apart(whole, expected)} off the loss's gradient"
    for size in (1, 2):
        found = apart(step(make(), rows, size), whole)
        assert found <= TOLERANCE, f"{kind}: {4 // size} micro-batches make another step, by {found}"


def counts_predictions() -> bool:
    """Whether this version of Trainer leaves first tokens out of its count."""
    return "_loss_shifts_labels" in Trainer.__init__.__code__.co_names


def smoothed_loss(outputs, labels: torch.Tensor, num_items_in_batch=None) -> torch.Tensor:
    """What Trainer's label smoothing shall compute for next tokens, divided by what it counts."""
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return F.cross_entropy(logits, targets, label_smoothing=SMOOTHING, reduction="sum") / num_items_in_batch


def check_smoothing(make, rows: list[dict]) -> None:
    """Smoothed labels are those of the next tokens; where the loss is divided by the count, parts make the step of the
    whole batch, and where it is not, the model says so."""
    model = make()
    batch = stacked(rows)
    predictions = int((batch["labels"][:, 1:] >= 0).sum())
    expected = gradient(model, smoothed_loss(model(**batch), batch["labels"], predictions))
    own = {"label_smoothing_factor": SMOOTHING}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        whole = step(make(), rows, 4, **own)
    assert apart(whole, expected) <= 1e-5, f"smoothed labels are other tokens: {apart(whole, expected)}"
    divides = "num_items_in_batch" in LabelSmoother.__call__.__code__.co_varnames
    assert any("without labels" in str(warning.message) for warning in told) != divides
    if divides:
        assert apart(step(make(), rows, 1, **own), whole) <= TOLERANCE
    function = {"compute_loss_func": smoothed_loss}
    assert apart(step(make(), rows, 1, **function), step(make(), rows, 4, **function)) <= TOLERANCE


def check_every_kind(language_model: Path, encoder: Path) -> None:
    for kind, (_, _, rows) in KINDS.items():
        path = language_model if kind == "next tokens" else encoder
        check_steps(lambda kind=kind, path=path: make_model(kind, path), rows(), kind)
    check_smoothing(lambda: make_model("next tokens", language_model), KINDS["next tokens"][2]())


def check_image_steps(path: Path, pixels: torch.Tensor) -> None:
    """`check_steps` of an image classifier on four pictures made from one."""
    rows = [{"pixel_values": pixels / (1 + index), "labels": torch.tensor(index % 3)} for index in range(4)]
    check_steps(lambda: without_dropout(load(transformers.AutoModelForImageClassification, path)[0]), rows, "images")


def main(path: Path, work: Path) -> None:
    """One process takes the four texts at once; of two, each takes two of them, one after the other."""
    rank, cut = os.environ.get("RANK"), {"gradient_accumulation_steps": 2, "ddp_backend": "gloo"}
    kind = "next tokens"
    found = step(make_model(kind, path), KINDS[kind][2](), 4 if rank is None else 1, **({} if rank is None else cut))
    torch.save(found, work / f"{rank or 'whole'}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), Path(sys.argv[2]))

"""Checks that other libraries take exported models: transformers' Trainer, which needs accelerate, and
sentence-transformers. Nothing of matmix."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from bare_loading import largest, load
from bare_offloading import check_offloading
from bare_steps import check_every_kind
from transformers import (
    AutoModel,
    AutoModelForMultipleChoice,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    DataCollatorForMultipleChoice,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    pipeline,
)

TEXTS = ["one two three", "a longer row of text, summer nights", "kings", "the ship that no sea ever crossed"]


def _classes(tokenizer) -> list[dict]:
    return [{**tokenizer(text), "labels": index % 3} for index, text in enumerate(TEXTS)]


def _tokens(tokenizer) -> list[dict]:
    rows = [tokenizer(text) for text in TEXTS]
    return [{**row, "labels": [-100, *(place % 4 for place in range(len(row["input_ids"]) - 1))]} for row in rows]


def _spans(tokenizer) -> list[dict]:
    rows = [tokenizer("which one", text) for text in TEXTS]
    return [{**row, "start_positions": index, "end_positions": index + 2} for index, row in enumerate(rows)]


def _choices(tokenizer) -> list[dict]:
    """The right choice is the same text, which stands at another place in each example."""
    orders = [TEXTS[index:] + TEXTS[:index] for index in range(4)]
    return [{**tokenizer(["which one"] * 4, texts), "label": texts.index("kings")} for texts in orders]


# Name of a head -> its class, four examples, and what makes a batch of them.
TRAINED = {
    "classes": (AutoModelForSequenceClassification, _classes, DataCollatorWithPadding),
    "tokens": (AutoModelForTokenClassification, _tokens, DataCollatorForTokenClassification),
    "spans": (AutoModelForQuestionAnswering, _spans, DataCollatorWithPadding),
    "choices": (AutoModelForMultipleChoice, _choices, DataCollatorForMultipleChoice),
}


def check_libraries(exports: Path, heads: Path, work: Path) -> list[str]:
    """Runs the checks for which there are libraries; their names."""
    checks = {
        "accelerate": lambda: (
            check_every_kind(exports / "mru" / "export", exports / "hydra" / "export"),
            check_offloading(exports),
            [check_trainer(heads, name, work / name) for name in TRAINED],
        ),
        "sentence_transformers": lambda: check_sentence_transformer(heads / "embedder"),
    }
    used = [name for name in checks if importlib.util.find_spec(name) is not None]
    for name in used:
        checks[name]()
    return used


def check_trainer(heads: Path, name: str, work: Path) -> Path:
    """Trainer goes on with a fine-tuned model, and what it saves is that model; returns where."""
    auto_class, examples, collator = TRAINED[name]
    path = heads / name / "export"
    model, _ = load(auto_class, path)
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=True)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    arguments = TrainingArguments(
        output_dir=str(work / "trainer"),
        max_steps=4,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        gradient_checkpointing=name == "spans",
        disable_tqdm=True,
    )
    rows = examples(tokenizer)
    together = collator(tokenizer)
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, data_collator=together)
    trainer.train()
    assert model.is_gradient_checkpointing == (name == "spans")
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 4, losses
    assert losses[3] < losses[0], f"Trainer's steps on {name} do not lower the loss: {losses}"
    still = [name for name, parameter in model.named_parameters() if torch.equal(parameter.cpu(), before[name])]
    assert not still, f"Trainer does not reach {still}"
    saved = work / "saved"
    trainer.save_model(str(saved))
    again, problems = load(auto_class, saved)
    assert not problems, problems
    batch = {key: value for key, value in together(rows).items() if key in ("input_ids", "attention_mask")}
    with torch.no_grad():
        for found, expected in zip(again(**batch).to_tuple(), model.eval()(**batch).to_tuple(), strict=True):
            assert largest(found, expected) == 0
    if name == "classes":
        classify = pipeline("text-classification", model=again, tokenizer=tokenizer)
        assert {row["label"] for row in classify(TEXTS)} <= {"bad", "fair", "good"}
    return saved


def check_sentence_transformer(folder: Path) -> None:
    """SentenceTransformer gives the vectors of the model, whatever else is in the batch."""
    from sentence_transformers import SentenceTransformer

    path = folder / "export"
    encoder = SentenceTransformer(str(path), trust_remote_code=True, device="cpu")
    found = torch.as_tensor(encoder.encode(TEXTS, batch_size=3))
    body, _ = load(AutoModel, path)
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=True)
    with torch.no_grad():
        features = [body(**tokenizer(text, return_tensors="pt")).last_hidden_state[0] for text in TEXTS]
    first_token = body.config.matmix["architecture"] == "text_embedder"
    expected = torch.stack([rows[0] if first_token else rows.mean(0) for rows in features])
    assert largest(found, expected) <= 1e-5, f"vectors differ by {largest(found, expected)}"
    assert encoder.max_seq_length == body.config.max_position_embeddings
    assert encoder.similarity(found[:1], found[:1]).item() > 0.999

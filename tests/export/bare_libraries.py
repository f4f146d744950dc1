"""Checks that other libraries take exported models: transformers' Trainer, which needs accelerate, and
sentence-transformers. Nothing of matmix."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from bare_loading import largest, load
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
    pipeline,
)

TEXTS = ["one two three", "a longer row of text, summer nights", "kings", "the ship that no sea ever crossed"]


def check_libraries(heads: Path, work: Path) -> list[str]:
    """Runs the checks for which there are libraries; their names."""
    checks = {
        "accelerate": lambda: check_trainer(heads / "classes" / "export", work),
        "sentence_transformers": lambda: check_sentence_transformer(heads / "embedder"),
    }
    used = [name for name in checks if importlib.util.find_spec(name) is not None]
    for name in used:
        checks[name]()
    return used


def check_trainer(path: Path, work: Path) -> Path:
    """Trainer goes on with a fine-tuned model, and what it saves is that model; returns where."""
    model, _ = load(AutoModelForSequenceClassification, path)
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=True)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    rows = [{**tokenizer(text), "labels": index % 3} for index, text in enumerate(TEXTS)]
    arguments = TrainingArguments(
        output_dir=str(work / "trainer"),
        max_steps=2,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, processing_class=tokenizer)
    loss = trainer.train().training_loss
    assert 0.1 < loss < 10, loss
    still = [name for name, parameter in model.named_parameters() if torch.equal(parameter.cpu(), before[name])]
    assert not still, f"Trainer does not reach {still}"
    saved = work / "saved"
    trainer.save_model(str(saved))
    again, problems = load(AutoModelForSequenceClassification, saved)
    assert not problems, problems
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        assert largest(again(**batch).logits, model.eval()(**batch).logits) == 0
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

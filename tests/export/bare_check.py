"""Runs where transformers and PyTorch are installed and matmix is not; checks exported models there.

    python -I -S bare_check.py WORK [SITE]

WORK holds one folder for each export: `export/` itself, `reference.safetensors` (input_ids, logits) and
`texts.json` ([text, ids] pairs). SITE is put on the import path. Prints "ok" and the versions at the end.
"""

# ruff: noqa: E402  (the import path is set up first)

import importlib.util
import json
import os
import sys
from pathlib import Path

if len(sys.argv) > 2:
    sys.path.insert(0, sys.argv[2])
for missing in ("matmix", "sentencepiece"):
    assert importlib.util.find_spec(missing) is None, f"{missing} must not be importable here"

import torch
import transformers
from safetensors.torch import load_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

# Logits of about 1 in float32, summed in another order; what padding let through would be off by 1e-2.
TOLERANCE = 1e-4


def largest(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a.float() - b.float()).abs().max().item()


def load(auto_class, path, **options):
    """A model, after checking that every weight was there and had a place."""
    model, info = auto_class.from_pretrained(path, trust_remote_code=True, output_loading_info=True, **options)
    problems = {name: list(keys) for name, keys in info.items() if keys}
    return model.eval(), problems


def check_tokenizer(folder: Path, saved: Path):
    tokenizer = AutoTokenizer.from_pretrained(folder / "export")
    tokenizer.save_pretrained(saved)
    again = AutoTokenizer.from_pretrained(saved)
    for text, ids in json.loads((folder / "texts.json").read_text(encoding="utf-8")):
        for candidate in (tokenizer, again):
            found = candidate(text, add_special_tokens=False)["input_ids"]
            assert found == ids, f"ids of {text!r}: {found}, expected {ids}"
            assert candidate.decode(ids) == text, f"{candidate.decode(ids)!r} is not {text!r}"
    return tokenizer


def check_padding(model, ids: torch.Tensor, pad: int) -> None:
    """A row's logits do not depend on padding on either side, nor on what the padding is."""
    short = ids.shape[1] - 4
    expected = model(ids[:1, :short]).logits
    for start in (0, 4):
        batch, mask = ids.clone(), torch.ones_like(ids)
        batch[0], mask[0] = pad, 0
        batch[0, start : start + short], mask[0, start : start + short] = ids[0, :short], 1
        difference = largest(model(batch, attention_mask=mask).logits[0, start : start + short], expected[0])
        assert difference <= TOLERANCE, f"padding changes logits by {difference}"
        batch[mask == 0] = (pad + 5) % model.config.vocab_size
        difference = largest(model(batch, attention_mask=mask).logits[0, start : start + short], expected[0])
        assert difference <= TOLERANCE, f"the content of padding changes logits by {difference}"


def fine_tune(model, labels_name: str, **batch) -> None:
    """Two steps lower the loss."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(3):
        loss = model(**batch).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    assert losses[2] < losses[0], f"two steps of fine-tuning on {labels_name} do not lower the loss: {losses}"


def check_saved(model, auto_class, ids: torch.Tensor, saved: Path) -> None:
    model.save_pretrained(saved)
    again, problems = load(auto_class, saved)
    assert not problems, problems
    difference = largest(again(ids).logits, model(ids).logits)
    assert difference == 0, f"saving and loading again changes logits by {difference}"


def check_tied(model) -> None:
    into, out = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert model.config.tie_word_embeddings == (into.data_ptr() == out.data_ptr()), "tied weights came apart"


def greedy(model, ids: torch.Tensor, count: int) -> torch.Tensor:
    """Reference generation: the whole text again for each token."""
    for _ in range(count):
        ids = torch.cat((ids, model(ids).logits[:, -1].argmax(-1, keepdim=True)), 1)
    return ids


def check_generation(model, ids: torch.Tensor, pad: int) -> None:
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": pad, "eos_token_id": None}
    expected = greedy(model, ids, 6)
    mask = torch.ones_like(ids)
    for cached in (True, False):
        found = model.generate(ids, attention_mask=mask, use_cache=cached, **options)
        assert torch.equal(found, expected), f"generate(use_cache={cached}) differs from greedy decoding"
    # Rows of different lengths, padded on the left.
    short = ids.shape[1] - 3
    batch, mask = ids.clone(), mask.clone()
    batch[0, :3], batch[0, 3:], mask[0, :3] = pad, ids[0, :short], 0
    expected = torch.cat((greedy(model, ids[:1, :short], 6)[:, short:], greedy(model, ids[1:], 6)[:, -6:]))
    for cached in (True, False):
        found = model.generate(batch, attention_mask=mask, use_cache=cached, **options)[:, -6:]
        assert torch.equal(found, expected), f"padding on the left changes generation, use_cache={cached}"
    beams = [
        model.generate(batch, attention_mask=mask, use_cache=cached, num_beams=3, **options) for cached in (True, False)
    ]
    assert torch.equal(*beams), "beam search with and without carried state differ"
    torch.manual_seed(0)
    sampled = model.generate(
        batch, attention_mask=mask, do_sample=True, num_return_sequences=2, max_new_tokens=3, pad_token_id=pad
    )
    assert sampled.shape[0] == 2 * batch.shape[0]
    first = model(ids[:, :5], use_cache=True)
    second = model(ids[:, 5:], past_key_values=first.past_key_values)
    difference = largest(torch.cat((first.logits, second.logits), 1), model(ids).logits)
    assert difference <= TOLERANCE, f"continuing from a carried state changes logits by {difference}"


def check_language_model(folder: Path, saved: Path, tokenizer) -> None:
    path = folder / "export"
    model, problems = load(AutoModelForCausalLM, path)
    assert not problems, problems
    reference = load_file(folder / "reference.safetensors")
    ids, pad = reference["input_ids"], tokenizer.pad_token_id
    difference = largest(model(ids).logits, reference["logits"])
    assert difference <= TOLERANCE, f"logits differ by {difference}"
    check_tied(model)
    with torch.no_grad():
        check_padding(model, ids, pad)
        check_generation(model, ids, pad)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    kept = model(ids, logits_to_keep=2).logits
    assert largest(kept, model(ids).logits[:, -2:]) <= TOLERANCE
    backbone, problems = load(AutoModel, path)
    assert not problems, problems
    assert backbone(ids).last_hidden_state.shape == (*ids.shape, model.config.hidden_size)
    fine_tune(model, "next tokens", input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)
    check_saved(model, AutoModelForCausalLM, ids, saved)
    check_tied(model)


def check_encoder(folder: Path, saved: Path, tokenizer) -> None:
    path = folder / "export"
    model, problems = load(AutoModelForMaskedLM, path)
    assert not problems, problems
    reference = load_file(folder / "reference.safetensors")
    ids = reference["input_ids"]
    difference = largest(model(ids).logits, reference["logits"])
    assert difference <= TOLERANCE, f"logits differ by {difference}"
    check_tied(model)
    with torch.no_grad():
        check_padding(model, ids, tokenizer.pad_token_id)
    batch = tokenizer(["one <mask> three", "a longer row of text, <mask> it"], padding=True, return_tensors="pt")
    assert (batch["input_ids"] == tokenizer.mask_token_id).sum() == 2
    assert (batch["input_ids"][:, 0] == tokenizer.cls_token_id).all()
    assert batch["attention_mask"][0, -1] == 0
    assert model(**batch).logits.shape[:2] == batch["input_ids"].shape
    masked = torch.where(torch.arange(ids.shape[1]) % 3 == 0, tokenizer.mask_token_id, ids)
    labels = ids.masked_fill(masked == ids, -100)
    fine_tune(model, "masked tokens", input_ids=masked, labels=labels)
    check_saved(model, AutoModelForMaskedLM, ids, saved)
    check_tied(model)
    backbone, problems = load(AutoModel, path)
    assert not problems, problems
    assert backbone(**batch).last_hidden_state.shape[-1] == backbone.config.hidden_size
    classifier, problems = load(AutoModelForSequenceClassification, path, num_labels=3)
    assert set(problems) == {"missing_keys"}, problems
    assert sorted(problems["missing_keys"]) == ["classifier.bias", "classifier.weight"], problems
    fine_tune(classifier, "classes", **batch, labels=torch.tensor([0, 2]))
    assert all(parameter.grad is None for parameter in classifier.parameters())
    check_saved(classifier, AutoModelForSequenceClassification, ids, saved.with_name("classifier"))


def check_resizing(folder: Path, auto_class, saved: Path) -> None:
    """New tokens can be added, and are there after saving and loading."""
    model, _ = load(auto_class, folder / "export")
    size = model.config.vocab_size + 7
    model.resize_token_embeddings(size)
    model.save_pretrained(saved)
    again, problems = load(auto_class, saved)
    assert not problems, problems
    assert again(torch.tensor([[1, size - 1]])).logits.shape[-1] == size


def main(work: Path) -> None:
    transformers.logging.set_verbosity_error()
    for folder in sorted(path for path in work.iterdir() if (path / "export").is_dir()):
        saved = folder / f"saved-{transformers.__version__}"
        tokenizer = check_tokenizer(folder, saved / "tokenizer")
        config = json.loads((folder / "export" / "config.json").read_text(encoding="utf-8"))
        encoder = config["matmix"]["architecture"] == "encoder"
        (check_encoder if encoder else check_language_model)(folder, saved / "model", tokenizer)
        check_resizing(folder, AutoModelForMaskedLM if encoder else AutoModelForCausalLM, saved / "resized")
        print(f"{folder.name}: ok")
    print(f"ok: transformers {transformers.__version__}, torch {torch.__version__}")


if __name__ == "__main__":
    assert os.environ.get("HF_HUB_OFFLINE") == "1"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    main(Path(sys.argv[1]))

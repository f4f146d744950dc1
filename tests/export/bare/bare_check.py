"""Runs where transformers and PyTorch are installed and matmix is not; checks exported models there.

    python -I -S bare_check.py WORK HEADS [SITE]

WORK and HEADS hold one folder for each export: `export/` itself, `reference.safetensors` and `texts.json` ([text, ids]
pairs). Those in HEADS are models with a head. SITE is put on the import path. Prints "ok" and the versions at the end.
"""

# ruff: noqa: E402  (the import path is set up first)

import copy
import importlib.util
import io
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
if len(sys.argv) > 3:
    sys.path.insert(0, sys.argv[3])
else:
    # An environment that takes PyTorch from the one of the tests has these, too: it must do without.
    sys.modules |= dict.fromkeys(("matmix", "sentencepiece"))
for missing in ("matmix", "sentencepiece"):
    assert importlib.util.find_spec(missing) is None, f"{missing} must not be importable here"

import torch
import transformers
from bare_arguments import check_kept_columns, check_packing, check_signature, check_states, refusal
from bare_heads import check_head, check_new_heads
from bare_libraries import check_libraries
from bare_loading import (
    check_compiled,
    check_embeddings,
    check_hidden_states,
    check_no_attentions,
    check_recomputing,
    fine_tune,
    largest,
    load,
)
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer, DynamicCache

# Logits of about 1 in float32, summed in another order; what padding let through would be off by 1e-2.
TOLERANCE = 1e-4


def check_tokenizer(folder: Path, saved: Path):
    # Newer versions of transformers read the model's configuration to find the tokenizer.
    tokenizer = AutoTokenizer.from_pretrained(folder / "export", trust_remote_code=True)
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


def check_saved(model, auto_class, ids: torch.Tensor, saved: Path) -> None:
    model.save_pretrained(saved)
    again, problems = load(auto_class, saved)
    assert not problems, problems
    difference = largest(again(ids).logits, model(ids).logits)
    assert difference == 0, f"saving and loading again changes logits by {difference}"


def check_pickled(model, ids: torch.Tensor) -> None:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    difference = largest(torch.load(file, weights_only=False)(ids).logits, model(ids).logits)
    assert difference == 0, f"pickling changes logits by {difference}"


def check_gradients_of_rows(model, ids: torch.Tensor) -> None:
    """By vmap over grad, as by backward() for each row."""
    parameters = dict(model.named_parameters())

    def loss(given: dict, row: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, given, (row.unsqueeze(0),)).logits.square().mean()

    detached = {name: value.detach() for name, value in parameters.items()}
    found = torch.func.vmap(torch.func.grad(loss), (None, 0))(detached, ids[:2])
    for number, row in enumerate(ids[:2]):
        wanted = torch.autograd.grad(loss(parameters, row), list(parameters.values()), materialize_grads=True)
        for (name, gradients), expected in zip(found.items(), wanted, strict=True):
            error = largest(gradients[number], expected)
            assert error <= 1e-4 * expected.abs().max() + 1e-7, f"the gradient of {name} differs by {error}"


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
    check_generated_states(model, batch, mask, options)
    first = model(ids[:, :5], use_cache=True)
    second = model(ids[:, 5:], past_key_values=first.past_key_values)
    difference = largest(torch.cat((first.logits, second.logits), 1), model(ids).logits)
    assert difference <= TOLERANCE, f"continuing from a carried state changes logits by {difference}"
    check_continued(model, ids, options)


def check_continued(model, ids: torch.Tensor, options: dict) -> None:
    """`generate` goes on from a state that was carried before, which the same texts have again and again; other numbers
    of texts and other caches than its own are refused."""
    start, expected = ids[:1, :8], model.generate(ids[:1], **options)
    state = model(start, use_cache=True).past_key_values
    for _ in range(2):
        assert torch.equal(model.generate(ids[:1], past_key_values=state, **options), expected)
    result = model.generate(start, return_dict_in_generate=True, **options)
    further = torch.cat((result.sequences, ids[:1, 8:10]), 1)
    assert torch.equal(
        model.generate(further, past_key_values=result.past_key_values, **options), model.generate(further, **options)
    )
    several, three = copy.deepcopy(state), ids[:1].expand(3, -1)
    several.batch_repeat_interleave(3)
    assert torch.equal(model.generate(three, past_key_values=several, **options), expected.expand(3, -1))
    # Vectors that an adapter of PEFT puts before the text are in the state, and not among the columns.
    vectors = model.get_input_embeddings()(ids[:1, :9])
    state_of_more = model(inputs_embeds=torch.cat((vectors[:, :4], vectors[:, :8]), 1), use_cache=True).past_key_values
    for step in ({"next_sequence_length": 1}, {"cache_position": torch.tensor([8])}):
        inputs = {"past_key_values": state_of_more, "attention_mask": torch.ones(1, 9), **step}
        assert torch.equal(model.prepare_inputs_for_generation(ids[:1, :9], **inputs)["input_ids"], ids[:1, 8:9])
    wrong = {
        "1 rows and the batch has 3": lambda: model(three[:, 8:], past_key_values=state),
        "1 rows and the batch has 2": lambda: model.generate(
            ids[:1], past_key_values=state, **{**options, "do_sample": True, "num_return_sequences": 2}
        ),
        "nothing comes after": lambda: model.generate(start, past_key_values=state, **options),
        "is a DynamicCache": lambda: model.generate(start, past_key_values=DynamicCache(), **options),
    }
    for words, call in wrong.items():
        message = refusal(call)
        assert words in message, message


def check_generated_states(model, ids: torch.Tensor, mask: torch.Tensor, options: dict) -> None:
    """`generate` gives the hidden states of each step, the same with and without carried state, and goes on from
    vectors as from the ids that they stand for."""
    options = {**options, "attention_mask": mask, "return_dict_in_generate": True, "output_hidden_states": True}
    expected = model.generate(ids, use_cache=False, **options)
    vectors = model.get_input_embeddings()(ids)
    for inputs in ({"input_ids": ids}, {"inputs_embeds": vectors}):
        found = model.generate(**inputs, **options)
        assert torch.equal(found.sequences[:, -6:], expected.sequences[:, -6:])
        for step, (streams, others) in enumerate(zip(found.hidden_states, expected.hidden_states, strict=True)):
            assert len(streams) == model.config.num_hidden_layers + 1
            new = 1 if step else ids.shape[1]
            assert streams[0].shape == (len(ids), new, model.config.hidden_size)
            assert all(largest(a, b[:, -new:]) <= TOLERANCE for a, b in zip(streams, others, strict=True))


def check_language_model(folder: Path, saved: Path, tokenizer) -> None:
    path = folder / "export"
    model, problems = load(AutoModelForCausalLM, path)
    assert not problems, problems
    reference = load_file(folder / "reference.safetensors")
    ids, pad = reference["input_ids"], tokenizer.pad_token_id
    difference = largest(model(ids).logits, reference["logits"])
    assert difference <= TOLERANCE, f"logits differ by {difference}"
    check_tied(model)
    check_pickled(model, ids)
    check_gradients_of_rows(model, ids)
    with torch.no_grad():
        check_padding(model, ids, pad)
        check_generation(model, ids, pad)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    backbone, problems = load(AutoModel, path)
    assert not problems, problems
    assert backbone(ids).last_hidden_state.shape == (*ids.shape, model.config.hidden_size)
    check_hidden_states(model, backbone, ids, TOLERANCE)
    check_embeddings(model, ids, TOLERANCE)
    check_embeddings(backbone, ids, TOLERANCE)
    check_no_attentions(model, input_ids=ids)
    if folder.name == "mru":
        for own in (model, backbone):
            check_signature(own, input_ids=ids)
            check_packing(own, ids)
        check_kept_columns(model, ids)
        check_states(model, ids)
    if folder.name == "mru" and (folder.parent / "mru_first").exists():  # by day an encoder is compiled, and no more
        check_compiled(model, input_ids=ids, labels=ids)
    if folder.name != "without_mixers":
        check_recomputing(model, input_ids=ids, labels=ids)
    fine_tune(model, "next tokens", input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)
    check_saved(model, AutoModelForCausalLM, ids, saved)
    check_tied(model)


def check_unmasking(model, batch, tokenizer) -> None:
    """Masks are filled in, the same alone and in a batch, and no other token changes."""
    hidden, never = tokenizer.mask_token_id, tokenizer.all_special_ids
    ids = torch.where(torch.arange(batch["input_ids"].shape[1]) == 2, hidden, batch["input_ids"])
    options = {"mask_token_id": hidden, "never": never, "steps": 2, "temperature": 0.7, "seed": 3}
    for order in ("random", "confidence"):
        filled = model.unmask(ids, attention_mask=batch["attention_mask"], order=order, **options)
        assert torch.equal(filled[ids != hidden], ids[ids != hidden])
        assert not set(filled[ids == hidden].tolist()) & set(never)
        alone = ids[:1, batch["attention_mask"][0].bool()]
        assert torch.equal(model.unmask(alone, order=order, **options)[0], filled[0, : alone.shape[1]])


def check_encoder(folder: Path, saved: Path, tokenizer) -> None:
    path = folder / "export"
    model, problems = load(AutoModelForMaskedLM, path)
    assert not problems, problems
    reference = load_file(folder / "reference.safetensors")
    ids = reference["input_ids"]
    difference = largest(model(ids).logits, reference["logits"])
    assert difference <= TOLERANCE, f"logits differ by {difference}"
    check_tied(model)
    check_pickled(model, ids)
    check_gradients_of_rows(model, ids)
    with torch.no_grad():
        check_padding(model, ids, tokenizer.pad_token_id)
    batch = tokenizer(["one <mask> three", "a longer row of text, <mask> it"], padding=True, return_tensors="pt")
    assert (batch["input_ids"] == tokenizer.mask_token_id).sum() == 2
    assert (batch["input_ids"][:, 0] == tokenizer.cls_token_id).all()
    assert batch["attention_mask"][0, -1] == 0
    assert model(**batch).logits.shape[:2] == batch["input_ids"].shape
    check_unmasking(model, batch, tokenizer)
    backbone, problems = load(AutoModel, path)
    assert not problems, problems
    assert backbone(**batch).last_hidden_state.shape[-1] == backbone.config.hidden_size
    check_hidden_states(model, backbone, ids, TOLERANCE)
    check_embeddings(model, ids, TOLERANCE)
    check_no_attentions(model, input_ids=ids)
    check_recomputing(model, input_ids=ids, labels=ids)
    masked = torch.where(torch.arange(ids.shape[1]) % 3 == 0, tokenizer.mask_token_id, ids)
    labels = ids.masked_fill(masked == ids, -100)
    fine_tune(model, "masked tokens", input_ids=masked, labels=labels)
    check_saved(model, AutoModelForMaskedLM, ids, saved)
    check_tied(model)
    if folder.name == "hydra":  # heads are the same on all encoders
        padded = {"attention_mask": (torch.arange(ids.shape[1]) < torch.tensor([[5], [99]])).long()}
        check_compiled(model, input_ids=ids, labels=ids, **padded)
        for own in (model, backbone):
            check_signature(own, input_ids=ids)
            check_packing(own, ids)
        check_new_heads(path, batch, saved.with_name("heads"))


def check_resizing(folder: Path, auto_class, saved: Path) -> None:
    """New tokens can be added, and are there after saving and loading."""
    model, _ = load(auto_class, folder / "export")
    size = model.config.vocab_size + 7
    model.resize_token_embeddings(size)
    model.save_pretrained(saved)
    again, problems = load(auto_class, saved)
    assert not problems, problems
    assert again(torch.tensor([[1, size - 1]])).logits.shape[-1] == size


def main(work: Path, heads: Path) -> None:
    transformers.logging.set_verbosity_error()
    for folder in sorted(path for path in work.iterdir() if (path / "export").is_dir()):
        saved = folder / f"saved-{transformers.__version__}"
        tokenizer = check_tokenizer(folder, saved / "tokenizer")
        config = json.loads((folder / "export" / "config.json").read_text(encoding="utf-8"))
        encoder = config["matmix"]["architecture"] == "encoder"
        (check_encoder if encoder else check_language_model)(folder, saved / "model", tokenizer)
        check_resizing(folder, AutoModelForMaskedLM if encoder else AutoModelForCausalLM, saved / "resized")
        print(f"{folder.name}: ok")
    for folder in sorted(heads.iterdir()):
        saved = folder / f"saved-{transformers.__version__}"
        check_head(folder, saved / "model", check_tokenizer(folder, saved / "tokenizer"))
        print(f"{folder.name}: ok")
    used = check_libraries(work, heads, heads / "classes" / f"trained-{transformers.__version__}")
    print(
        f"ok: transformers {transformers.__version__}, torch {torch.__version__}, {', '.join(used) or 'nothing else'}"
    )


if __name__ == "__main__":
    assert os.environ.get("HF_HUB_OFFLINE") == "1"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    main(Path(sys.argv[1]), Path(sys.argv[2]))

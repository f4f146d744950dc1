"""Checks what exported models make of the arguments of transformers' own classes. Nothing of matmix."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import transformers
from bare_loading import largest, reshaped
from transformers import DataCollatorWithFlattening
from transformers.utils import TransformersKwargs

TOLERANCE = 1e-4
# Class of an export -> classes of transformers with the same output.
THEIRS = {
    "MatmixModel": ("LlamaModel", "Mamba2Model"),
    "MatmixForCausalLM": ("LlamaForCausalLM", "Mamba2ForCausalLM"),
    "MatmixEncoderModel": ("BertModel", "ModernBertModel"),
    "MatmixForMaskedLM": ("BertForMaskedLM", "ModernBertForMaskedLM"),
    "MatmixForSequenceClassification": ("BertForSequenceClassification", "ModernBertForSequenceClassification"),
    "MatmixForTokenClassification": ("BertForTokenClassification", "ModernBertForTokenClassification"),
    "MatmixForQuestionAnswering": ("BertForQuestionAnswering", "ModernBertForQuestionAnswering"),
    "MatmixForMultipleChoice": ("BertForMultipleChoice", "ModernBertForMultipleChoice"),
    "MatmixImageModel": ("ViTModel",),
    "MatmixForImageClassification": ("ViTForImageClassification",),
}
# Of these the other checks, and those of losses, say what they do.
INPUTS = {"input_ids", "inputs_embeds", "pixel_values", "labels", "start_positions", "end_positions"}


def refusal(function: Callable[[], Any]) -> str:
    """The one line of a ValueError."""
    words = ""
    try:
        function()
    except ValueError as error:
        words = str(error)
    assert words, "it is not refused"
    assert "\n" not in words
    return words


def check_signature(model, **inputs: torch.Tensor) -> None:
    """Each argument of transformers' own classes changes nothing where it says what holds anyway, and is refused in one
    line that names it where the model cannot follow it; and what no class knows is refused."""
    texts = "input_ids" in inputs
    causal, shape = "CausalLM" in type(model).__name__, tuple(next(iter(inputs.values())).shape)
    positions = torch.arange(shape[-1]).expand(shape)
    same: dict[str, Any] = {"num_items_in_batch": 5, "output_hidden_states": False, "is_causal": model.model.causal}
    same["skip_logits"] = True  # which Trainer adds in evaluations
    if texts:
        same |= {"attention_mask": torch.ones(shape, dtype=torch.long), "position_ids": positions}
    if type(model).__name__ not in ("MatmixForCausalLM", "MatmixModel") and texts:
        same["token_type_ids"] = torch.zeros(shape, dtype=torch.long)
    if causal:
        same |= {"use_cache": True, "logits_to_keep": shape[-1], "cache_position": positions[0]}
    with torch.no_grad():
        expected = model(**inputs).to_tuple()[0]
        names = set(inspect.get_annotations(TransformersKwargs)) | {"return_dict", "attention_maks", "skip_logits"}
        for theirs in THEIRS[type(model).__name__]:
            names |= set(inspect.signature(getattr(transformers, theirs).forward).parameters)
        handled = {"output_attentions", "past_key_values", "cache", "return_dict"} & names if causal else set()
        bounds = {"cu_seq_lens_q", "cu_seq_lens_k"} if texts else set()
        for name in sorted(names - INPUTS - {"self", "kwargs"} - handled - bounds):
            if name in ("output_attentions", "return_dict") or (texts and name.startswith("max_length_")):
                continue
            if name in same:
                found = model(**inputs, **{name: same[name]}).to_tuple()[0]
                assert largest(found, expected) <= TOLERANCE, f"{name} changes outputs"
            else:
                assert name in refusal(lambda name=name: model(**inputs, **{name: torch.ones(1)})), name
            found = model(**inputs, **{name: None} if name != "logits_to_keep" else {}).to_tuple()[0]
            assert torch.equal(found, expected), f"{name} = None changes outputs"
        assert "is_causal" in refusal(lambda: model(**inputs, is_causal=not model.model.causal))
        assert "use_cache" in refusal(lambda: model(**inputs, use_cache=True)) if not causal else True
        unnamed = model(**inputs, return_dict=False)
        assert isinstance(unnamed, tuple)
        assert torch.equal(unnamed[0], expected)
        model.config.return_dict = False
        assert isinstance(model(**inputs), tuple)
        model.config.return_dict = True
    if texts:
        order = list(inspect.signature(model.forward).parameters)
        theirs = list(inspect.signature(getattr(transformers, THEIRS[type(model).__name__][0]).forward).parameters)
        shared = [name for name in theirs if name in order and name not in ("self", "kwargs", "cache")]
        assert [name for name in order if name in shared] == shared, "positional arguments stand in another order"


def check_packing(model, ids: torch.Tensor) -> None:
    """Texts that stand in one row give what they give in rows of their own, whichever way their bounds are told."""
    kind = type(model).__name__
    length = ids.shape[1]
    row = ids[:1].clone()
    positions = torch.cat((torch.arange(5), torch.arange(length - 5))).unsqueeze(0)
    bounds = torch.tensor([0, 5, length], dtype=torch.int32)
    words = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": length - 5, "max_length_k": length - 5}
    with torch.no_grad():
        if kind in ("MatmixForSequenceClassification", "MatmixForMultipleChoice", "MatmixForQuestionAnswering"):
            given = {"input_ids": reshaped(model, ids), "position_ids": reshaped(model, positions.expand(ids.shape))}
            assert "a row of its own" in refusal(lambda: model(**given))
            return
        expected = torch.cat([model(part).to_tuple()[0] for part in (row[:, :5], row[:, 5:])], 1)
        assert largest(model(row).to_tuple()[0], expected) > 1e-3, "texts do not depend on each other anyway"
        both = {"position_ids": positions, **words, "attention_mask": torch.ones_like(row)}
        for told in ({"position_ids": positions}, words, both):
            found = model(row, **told).to_tuple()[0]
            assert largest(found, expected) <= TOLERANCE, f"texts in one row differ: {sorted(told)}"
        left = torch.ones_like(ids)
        left[0, :3] = 0
        padded = (left.cumsum(1) - 1).masked_fill(left == 0, 1)
        a, b = (model(ids, attention_mask=left, **more).to_tuple()[0] for more in ({}, {"position_ids": padded}))
        assert torch.equal(a, b), "positions of padded rows change outputs"
        wrong = {
            "position_ids": (
                {"position_ids": positions + 1},
                {"position_ids": positions[:, 1:]},
                {"position_ids": positions, "attention_mask": left[:1]},
            ),
            "cu_seq_lens_q": (
                {**words, "cu_seq_lens_q": bounds[1:]},
                {"cu_seq_lens_q": bounds},
                {"cu_seq_lens_q": bounds - 1, "cu_seq_lens_k": bounds - 1},
                {**words, "position_ids": positions.flip(1).sort().values.clamp(max=0)},
                {**words, "attention_mask": left[:1]},
            ),
            "attention_mask": (
                {"attention_mask": torch.ones(1, length + 2)},
                {"attention_mask": torch.ones(1, 1, length, length)},
            ),
        }
        for name, given in wrong.items():
            for one in given:
                assert name in refusal(lambda one=one: model(row, **one)), (name, one)
    if kind == "MatmixForCausalLM":
        texts = row[:, :5], row[:, 5:]
        batch = DataCollatorWithFlattening(return_flash_attn_kwargs=True)([{"input_ids": t[0].tolist()} for t in texts])
        losses = [model(text, labels=text).loss for text in texts]
        expected = (losses[0] * 4 + losses[1] * (length - 6)) / (length - 2)
        assert largest(model(**batch).loss, expected) <= TOLERANCE


def check_kept_columns(model, ids: torch.Tensor) -> None:
    """logits_to_keep is a number of last columns or a tensor of columns, also where a state is carried."""
    length = ids.shape[1]
    each = torch.tensor([[0, 4, 4], [length - 1, 2, -2]])
    first, rest = ids[:, :5], ids[:, 5:]
    with torch.no_grad():
        logits = model(ids).logits
        state = model(first, use_cache=True)
        assert state.logits.shape[1] == 5
        for keep, columns in (
            (2, [-2, -1]),
            (length + 3, list(range(length))),
            (torch.tensor([1, 3]), [1, 3]),
            (torch.tensor([-1, 0]), [-1, 0]),
            (torch.arange(length) % 3 == 1, list(range(1, length, 3))),
        ):
            for cached in (False, True):
                found = model(ids, logits_to_keep=keep, use_cache=cached).logits
                assert largest(found, logits[:, columns]) <= TOLERANCE, (keep, cached)
        for cached in (False, True):
            found = model(ids, logits_to_keep=each, use_cache=cached).logits
            assert (
                largest(found, torch.stack([row[index] for row, index in zip(logits, each, strict=True)])) <= TOLERANCE
            )
        for keep in (1, torch.tensor([-1])):
            more = {"past_key_values": state.past_key_values, "logits_to_keep": keep}
            assert largest(model(rest, **more).logits, logits[:, -1:]) <= TOLERANCE
        mask = torch.ones_like(ids)
        mask[0, :3] = 0
        whole = model(ids, attention_mask=mask, use_cache=True).logits
        for keep in (torch.tensor([4, 7]), each):
            found = model(ids, attention_mask=mask, use_cache=True, logits_to_keep=keep).logits
            wanted = keep.remainder(length).expand(2, -1).unsqueeze(-1)
            assert largest(found, whole.take_along_dim(wanted, 1)) <= TOLERANCE
        for keep in (-1, torch.tensor([length]), torch.tensor(3), torch.ones(2, length) > 0, torch.ones(3)):
            assert "logits_to_keep" in refusal(lambda keep=keep: model(ids, logits_to_keep=keep)), keep
        found = model(ids, labels=ids[:, -4:], logits_to_keep=4).loss
        shift = {"shift_labels": ids[:, -3:].roll(-1, 1).index_fill(1, torch.tensor([2]), -100), "logits_to_keep": 3}
        expected = torch.nn.functional.cross_entropy(logits[:, -4:-1].flatten(0, 1), ids[:, -3:].flatten())
        assert largest(found, expected) <= TOLERANCE
        last = torch.nn.functional.cross_entropy(logits[:, -3:-1].flatten(0, 1), ids[:, -2:].flatten())
        assert largest(model(ids, **shift).loss, last) <= TOLERANCE
        assert "labels" in refusal(lambda: model(ids, labels=ids, logits_to_keep=4))


def check_states(model, ids: torch.Tensor) -> None:
    """A state is what an earlier call gave, and goes on where that ended."""
    with torch.no_grad():
        state = model(ids[:, :5], use_cache=True).past_key_values
        expected = model(ids[:, 5:], past_key_values=state).logits
        more = {"cache_position": torch.arange(5, ids.shape[1]), "position_ids": torch.arange(5, ids.shape[1])[None]}
        assert torch.equal(model(ids[:, 5:], past_key_values=state, **more).logits, expected)
        assert torch.equal(model(ids[:, 5:], cache=state).logits, expected)
        for name, given in {
            "cache_position": {"past_key_values": state, "cache_position": torch.arange(ids.shape[1] - 5)},
            "position_ids": {"past_key_values": state, "position_ids": torch.zeros(1, ids.shape[1] - 5)},
            "past_key_values": {"past_key_values": transformers.DynamicCache()},
            "attention_maks": {"past_key_values": state, "attention_maks": ids},
        }.items():
            assert name in refusal(lambda given=given: model(ids[:, 5:], **given)), name
        packed = torch.cat((torch.arange(5), torch.arange(ids.shape[1] - 5))).unsqueeze(0)
        assert "a row of its own" in refusal(lambda: model(ids[:1], position_ids=packed, use_cache=True))
        options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        expected, positions = model.generate(ids, **options), torch.arange(ids.shape[1]).expand(ids.shape)
        for cached in (True, False):
            more = {"use_cache": cached, **options}
            assert torch.equal(model.generate(ids, position_ids=positions, **more), expected)
            words = refusal(lambda more=more: model.generate(ids, position_ids=positions + 1, **more))
            assert "position_ids" in words, words

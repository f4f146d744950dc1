"""Continues prompts with a language model, several at once: each further token is one step for the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from matmix.model.architectures.language_model import LanguageModel
from matmix.model.interop.export.generation_state import map_state, state_shapes


class _Rows(NamedTuple):
    """Prompts that are one batch."""

    numbers: list[int]
    logits: torch.Tensor
    """(n, vocab_size) of what comes next."""
    state: Any


@torch.inference_mode()
def decode(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    draw: Callable[[int, torch.Tensor], int],
    *,
    max_new_tokens: int,
    end: int | None = None,
) -> Iterator[dict[int, int]]:
    """The tokens that follow each prompt, step by step: number of the prompt -> its next token.

    The prompts are read in groups of one length, so that no padding enters a state. Groups whose states have the same
    shape, which is all where all layers are recurrent, then go on as one batch; a prompt leaves it with its last token.
    The answers are those to each prompt alone, up to rounding.

    Args:
        model: in eval mode.
        prompts: token ids, at least one each.
        draw: chooses a token, given the number of the prompt and logits (vocab_size,) on the model's device.
        max_new_tokens: of each prompt.
        end: the token that ends an answer; it is not given out.

    Raises:
        ValueError: a prompt has no tokens.
        OverflowError: the states of an MRU stop being finite.
    """
    for number, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"prompt {number} has no tokens; every prompt needs one to start from")
    device, batches = model.output_projection()[0].device, []
    for length in sorted({len(prompt) for prompt in prompts}):
        numbers = [number for number, prompt in enumerate(prompts) if len(prompt) == length]
        ids = torch.tensor([list(prompts[number]) for number in numbers], device=device)
        batches.append(_Rows(numbers, *model.prefill(ids)))
    batches = _joined(batches)
    for step in range(max_new_tokens):
        found = [[draw(number, row) for number, row in zip(x.numbers, x.logits, strict=True)] for x in batches]
        kept = [[at for at, token in enumerate(tokens) if token != end] for tokens in found]
        if not any(kept):
            return
        yield {x.numbers[at]: found[n][at] for n, x in enumerate(batches) for at in kept[n]}
        if step + 1 == max_new_tokens:
            return
        following = []
        for rows, tokens, stay in zip(batches, found, kept, strict=True):
            if stay:
                state = rows.state if len(stay) == len(tokens) else _picked(rows.state, stay, device)
                token_ids = torch.tensor([tokens[at] for at in stay], device=device)
                following.append(_Rows([rows.numbers[at] for at in stay], *model.step(token_ids, state)))
        batches = following


def _picked(state: Any, rows: list[int], device: torch.device) -> Any:
    """These rows of a state."""
    index = torch.tensor(rows, device=device)
    return map_state(lambda tensor: tensor[index], state)


def _joined(batches: list[_Rows]) -> list[_Rows]:
    """Batches whose states have the same shape become one."""
    alike: dict[tuple, list[_Rows]] = {}
    for rows in batches:
        alike.setdefault(state_shapes(rows.state), []).append(rows)
    return [
        _Rows(
            [number for rows in members for number in rows.numbers],
            torch.cat([rows.logits for rows in members]),
            map_state(lambda *tensors: torch.cat(tensors), *(rows.state for rows in members)),
        )
        for members in alike.values()
    ]

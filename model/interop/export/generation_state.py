"""Generation state of a language model for transformers' `generate`: what the layers carry from token to
token.

Rows of a padded batch have different lengths, and padding must not enter a state. So the prompt is read
in groups of rows of one length, without the padding, and a group keeps a state of its own; groups whose
states have the same shape (all layers recurrent) are joined, so that each further token is one step for
the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from matmix.model.architectures.language_model import LanguageModel
from matmix.model.interop.export.inputs import Columns, take_columns


def map_state(function: Callable[..., torch.Tensor], *states: Any) -> Any:
    """Apply a function to the tensors of nested lists and tuples of the same form; None stays None."""
    if isinstance(states[0], list | tuple):
        return type(states[0])(map_state(function, *parts) for parts in zip(*states, strict=True))
    return None if states[0] is None else function(*states)


def picked_rows(state: Any, rows: torch.Tensor) -> Any:
    """The state of some rows (n,) int64 of a batch; layers, and so their states, may be on several devices."""
    return map_state(lambda tensor: tensor[rows.to(tensor.device)], state)


def state_shapes(state: Any) -> tuple:
    """Shapes of the tensors of a state without their first dimension, the batch."""
    shapes: list[torch.Size] = []
    map_state(lambda tensor: shapes.append(tensor.shape[1:]) or tensor, state)
    return tuple(shapes)


class CarriedState:
    """Carries a model's state through `generate` as `past_key_values`: for each group of rows, their numbers and their
    state.

    What transformers asks of its own caches is here under its names. Continuing leaves a state as it is and gives a new
    one, so that a state of a beginning can be continued in many ways.
    """

    is_compileable = False
    is_croppable = False
    # Newer versions of transformers ask each layer, and then leave it to `prepare_inputs_for_generation` to find what
    # is new.
    is_linear = (True,)

    def __init__(self, groups: list[tuple[torch.Tensor, Any]], seen: int):
        self.groups = groups
        self.seen = seen

    def __len__(self) -> int:
        """Rows of the batch."""
        return sum(rows.numel() for rows, _ in self.groups)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns of the batch that have been read, padding included."""
        return self.seen

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i becomes what row beam_idx[i] was (beam search); beam_idx may have any length."""
        groups, count = [], len(self)
        for rows, state in self.groups:
            place = torch.full((count,), -1, device=beam_idx.device)
            place[rows] = torch.arange(rows.numel(), device=beam_idx.device)
            source = place[beam_idx]
            new_rows = (source >= 0).nonzero().squeeze(1)
            if new_rows.numel():
                groups.append((new_rows, picked_rows(state, source[new_rows])))
        self.groups = groups

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row becomes `repeats` rows of the same."""
        rows = torch.arange(len(self), device=self.groups[0][0].device)
        self.reorder_cache(rows.repeat_interleave(repeats))


def check_cache_position(cache_position: torch.Tensor | None, new: int, carried: CarriedState | None) -> None:
    """Raises ValueError (one line) where cache_position (new,) is not that of the next columns."""
    seen = 0 if carried is None else carried.get_seq_length()
    if cache_position is not None and cache_position.tolist() != list(range(seen, seen + new)):
        raise ValueError(f"cache_position is not {seen} to {seen + new - 1}, what comes next: leave it out")


def check_state(carried: Any, rows: int, new: int) -> None:
    """Raises ValueError (one line) where `new` columns of so many rows do not continue a state."""
    if not isinstance(carried, CarriedState):
        kind = type(carried).__name__
        raise ValueError(
            f"past_key_values is a {kind}, not what a call with use_cache=True gave: leave it out at first"
        )
    if len(carried) != rows:
        raise ValueError(
            f"past_key_values is the state of {len(carried)} rows and the batch has {rows}: give as many, "
            "batch_repeat_interleave(n) of a state makes n of each row"
        )
    if new < 1:
        raise ValueError(
            f"past_key_values has read {carried.seen} columns, and nothing comes after them: give at least one more"
        )


def check_continuation(
    carried: CarriedState,
    shape: tuple[int, int],
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
) -> None:
    """Raises ValueError (one line) where inputs of `shape` (B, new) cannot be read after a state."""
    rows, new = shape
    check_state(carried, rows, new)
    if attention_mask is not None and new > 1 and not bool(attention_mask[:, -new:].all()):
        raise ValueError("tokens that continue a state cannot be padded; pad only the first prompt")
    if position_ids is not None and not bool((position_ids[:, 1:] == position_ids[:, :-1] + 1).all()):
        raise ValueError("position_ids of tokens that continue a state count on one by one: leave them out")


def advance(
    model: LanguageModel, inputs: torch.Tensor, state: Any, columns: Columns, streams: list[torch.Tensor] | None = None
) -> tuple[torch.Tensor, Any]:
    """Logits (n, kept, vocab_size) of the columns of inputs (n, length), token ids or embeddings (n, length, d_model),
    and the new state. streams: as of `Backbone.forward`."""
    if inputs.shape[1] == 1 and streams is None:
        logits, state = model(inputs[:, 0], state, method="step")
        logits = take_columns(logits.unsqueeze(1), columns)
    else:
        take = partial(take_columns, columns=columns)
        logits, state = model(inputs, state, take, streams=streams, method="read")
    return logits.to(inputs.device), state


def read_prompt(
    model: LanguageModel,
    inputs: torch.Tensor,
    attention_mask: torch.Tensor | None,
    columns: Columns,
    streams: list[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, CarriedState]:
    """Logits and state after a batch of prompts with padding anywhere.

    Args: inputs: token ids (B, L) or embeddings (B, L, d_model); attention_mask (B, L) or None; columns: of which
        there shall be logits; streams: as of `Backbone.forward`.
    Returns: logits (B, columns, vocab_size); at padding they are those of the row's last token before it,
        so that the last column always predicts a row's next token.
    Raises ValueError if a row has no tokens.
    """
    length = inputs.shape[1]
    if attention_mask is None:
        attention_mask = torch.ones(inputs.shape[:2], device=inputs.device)
    mask = attention_mask.ne(0).long()
    counts = mask.sum(1).tolist()
    if 0 in counts:
        raise ValueError(f"row {counts.index(0)} of attention_mask has no tokens; every prompt needs one")
    tokens_first = mask.argsort(dim=1, descending=True, stable=True)
    # For each wanted column the number of tokens of its row up to there, as an index into the row's tokens.
    wanted = take_columns((mask.cumsum(1) - 1).clamp(min=0), columns)
    last_only = columns == slice(length - 1, length)
    logits, groups = None, []
    for count in sorted(set(counts)):
        rows = torch.tensor([row for row, n in enumerate(counts) if n == count], device=inputs.device)
        places = (rows.unsqueeze(1), tokens_first[rows, :count])
        found: list[torch.Tensor] | None = None if streams is None else []
        of_group = slice(count - 1 if last_only else 0, count)
        state = model.initial_state(rows.numel(), inputs.device)
        part, state = advance(model, inputs[places], state, of_group, found)
        put_streams(streams, found, places, mask.shape)
        if not last_only:
            part = part.take_along_dim(wanted[rows].unsqueeze(-1), dim=1)
        logits = part.new_empty(len(counts), *part.shape[1:]) if logits is None else logits
        logits = logits.index_copy(0, rows, part)
        groups.append((rows, state))
    assert logits is not None
    return logits, CarriedState(join_groups(groups), length)


def put_streams(
    streams: list[torch.Tensor] | None,
    parts: list[torch.Tensor] | None,
    places: tuple[torch.Tensor, torch.Tensor],
    shape: torch.Size,
) -> None:
    """Put the streams (n, count, d_model) of a group of rows at their places, rows (n, 1) and columns (n, count), of
    those of the batch, of `shape` (B, L), which are zero elsewhere."""
    if streams is None or parts is None:
        return
    if not streams:
        streams += [part.new_zeros(*shape, part.shape[-1]) for part in parts]
    for index, part in enumerate(parts):
        streams[index] = streams[index].index_put(tuple(place.to(part.device) for place in places), part)


def join_groups(groups: list[tuple[torch.Tensor, Any]]) -> list[tuple[torch.Tensor, Any]]:
    """Groups with states of the same shape become one."""
    joined: dict[tuple, list[tuple[torch.Tensor, Any]]] = {}
    for rows, state in groups:
        joined.setdefault(state_shapes(state), []).append((rows, state))
    return [
        (
            torch.cat([rows for rows, _ in members]),
            map_state(lambda *tensors: torch.cat(tensors), *(state for _, state in members)),
        )
        for members in joined.values()
    ]


def continue_state(
    model: LanguageModel,
    inputs: torch.Tensor,
    carried: CarriedState,
    columns: Columns,
    streams: list[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, CarriedState]:
    """Logits (B, columns, vocab_size) and state after inputs (B, n) more tokens, or their embeddings, none of them
    padding. streams: as of `Backbone.forward`, of the new tokens."""
    logits, groups = None, []
    new = torch.arange(inputs.shape[1], device=inputs.device)
    for rows, state in carried.groups:
        found: list[torch.Tensor] | None = None if streams is None else []
        of_group = columns if isinstance(columns, slice) or columns.dim() == 1 else columns[rows]
        part, state = advance(model, inputs[rows], state, of_group, found)
        put_streams(streams, found, (rows.unsqueeze(1), new), inputs.shape[:2])
        logits = part.new_empty(inputs.shape[0], *part.shape[1:]) if logits is None else logits
        logits = logits.index_copy(0, rows, part)
        groups.append((rows, state))
    assert logits is not None
    return logits, CarriedState(groups, carried.seen + inputs.shape[1])

"""Generation state of a language model for transformers' `generate`: what the layers carry from token to token.

Rows of a padded batch have different lengths, and padding must not enter a state. So the prompt is read in groups of
rows of one length, without the padding, each with a state of its own; groups whose states have the same shape (all
layers recurrent) are joined, so that each further token is one step for the whole batch.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from matmix.model.architectures.language_model import LanguageModel
from matmix.model.interop.export.inputs import Columns, take_columns

Streams = list[Tensor] | None
"""A list that the residual streams of a pass are put into, as of `Backbone.forward`; None = they are not kept."""


def map_state(function: Callable[..., Tensor], *states: Any) -> Any:
    """Apply a function to the tensors of nested lists and tuples of the same form; None stays None."""
    if isinstance(states[0], list | tuple):
        return type(states[0])(map_state(function, *parts) for parts in zip(*states, strict=True))
    return None if states[0] is None else function(*states)


def picked_rows(state: Any, rows: Tensor) -> Any:
    """The state of some rows (n,) int64 of a batch; layers, and so their states, may be on several devices."""
    return map_state(lambda tensor: tensor[rows.to(tensor.device)], state)


def state_shapes(state: Any) -> tuple:
    """Shapes of the tensors of a state without their first dimension, the batch."""
    shapes: list[torch.Size] = []
    map_state(lambda tensor: shapes.append(tensor.shape[1:]) or tensor, state)
    return tuple(shapes)


class CarriedState:
    """Carries a model's state through `generate` as `past_key_values`: numbers and state of each group of rows.
    Continuing leaves a state as it is and gives a new one, so that a beginning can be continued in many ways."""

    is_compileable = False
    is_croppable = False
    # Newer versions of transformers ask each layer, and then leave it to `prepare_inputs_for_generation` to find what
    # is new.
    is_linear = (True,)

    def __init__(self, groups: list[tuple[Tensor, Any]], seen: int):
        self.groups = groups
        self.seen = seen

    def __len__(self) -> int:
        """Rows of the batch."""
        return sum(rows.numel() for rows, _ in self.groups)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns of the batch that have been read, padding included."""
        return self.seen

    def reorder_cache(self, beam_idx: Tensor) -> None:
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
    carried: CarriedState | None,
    shape: tuple[int, int],
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    cache_position: Tensor | None,
) -> None:
    """Raises ValueError (one line) where inputs of `shape` (B, new) cannot be read after a state, or at first."""
    rows, new = shape
    seen = 0
    if carried is not None:
        check_state(carried, rows, new)
        seen = carried.seen
        if attention_mask is not None and new > 1 and not bool(attention_mask[:, -new:].all()):
            raise ValueError("tokens that continue a state cannot be padded; pad only the first prompt")
        if position_ids is not None and not bool((position_ids[:, 1:] == position_ids[:, :-1] + 1).all()):
            raise ValueError("position_ids of tokens that continue a state count on one by one: leave them out")
    if cache_position is not None and cache_position.tolist() != list(range(seen, seen + new)):
        raise ValueError(f"cache_position is not {seen} to {seen + new - 1}, what comes next: leave it out")


def advance(
    model: LanguageModel, inputs: Tensor, state: Any, columns: Columns, streams: Streams = None
) -> tuple[Tensor, Any]:
    """Returns logits (n, kept, vocab_size) of the columns of inputs (n, length), token ids or embeddings
    (n, length, d_model), and the new state."""
    if inputs.shape[1] == 1 and streams is None:
        logits, state = model(inputs[:, 0], state, method="step")
        logits = take_columns(logits.unsqueeze(1), columns)
    else:
        take = partial(take_columns, columns=columns)
        logits, state = model(inputs, state, take, streams=streams, method="read")
    return logits.to(inputs.device), state


def read_prompt(
    model: LanguageModel, inputs: Tensor, attention_mask: Tensor | None, columns: Columns, streams: Streams = None
) -> tuple[Tensor, CarriedState]:
    """Returns logits (B, columns, vocab_size) and the state after a batch of prompts with padding anywhere.

    inputs: token ids (B, L) or embeddings (B, L, d_model). Where a column is padding, it has the logits of the token
    before it (or of the row's first token), so that the last column always predicts a row's next token. Streams are
    zero at padding. Raises ValueError if a row has no tokens.
    """
    shape = inputs.shape[:2]
    mask = torch.ones(shape, device=inputs.device) if attention_mask is None else attention_mask
    mask = mask.ne(0).long()
    counts = mask.sum(1).tolist()
    if 0 in counts:
        raise ValueError(f"row {counts.index(0)} of attention_mask has no tokens; every prompt needs one")
    model.config.check_seqlen(max(counts, default=1))
    tokens_first = mask.argsort(dim=1, descending=True, stable=True)
    # For each wanted column the number of tokens of its row up to there, as an index into the row's tokens.
    wanted = take_columns((mask.cumsum(1) - 1).clamp(min=0), columns)
    groups = []
    for count in sorted(set(counts)):
        rows = torch.tensor([row for row, n in enumerate(counts) if n == count], device=inputs.device)
        state = model.initial_state(rows.numel(), inputs.device)
        groups.append((rows, tokens_first[rows, :count], state, wanted[rows]))
    logits, states = advance_groups(model, inputs, groups, streams)
    return logits, CarriedState(join_groups(states), shape[1])


def continue_state(
    model: LanguageModel, inputs: Tensor, carried: CarriedState, columns: Columns, streams: Streams = None
) -> tuple[Tensor, CarriedState]:
    """Returns logits (B, columns, vocab_size) and the state after inputs (B, n) more tokens, or their embeddings, none
    of them padding. Streams are of the new tokens. Raises ValueError where the text is longer than a layer takes."""
    model.config.check_seqlen(carried.seen + inputs.shape[1])
    new = torch.arange(inputs.shape[1], device=inputs.device)
    in_rows = isinstance(columns, Tensor) and columns.dim() == 2
    groups = [(rows, new, state, columns[rows] if in_rows else columns) for rows, state in carried.groups]
    logits, states = advance_groups(model, inputs, groups, streams)
    return logits, CarriedState(states, carried.seen + inputs.shape[1])


def advance_groups(
    model: LanguageModel, inputs: Tensor, groups: list[tuple[Tensor, Tensor, Any, Columns]], streams: Streams
) -> tuple[Tensor, list[tuple[Tensor, Any]]]:
    """Advances each group of rows of a batch on its own; returns logits (B, kept, vocab_size) and rows with new states.

    groups: rows (n,), the columns of their tokens (n, count) or (count,), their state, and which tokens get logits.
    """
    logits, states = None, []
    for rows, tokens, state, wanted in groups:
        places, parts = (rows.unsqueeze(1), tokens), None if streams is None else []
        part, state = advance(model, inputs[places], state, wanted, parts)
        states.append((rows, state))
        logits = part.new_empty(inputs.shape[0], *part.shape[1:]) if logits is None else logits
        logits = logits.index_copy(0, rows, part)
        for index, stream in enumerate(parts or ()):
            if len(streams) == index:
                streams.append(stream.new_zeros(*inputs.shape[:2], stream.shape[-1]))
            streams[index] = streams[index].index_put(tuple(place.to(stream.device) for place in places), stream)
    assert logits is not None
    return logits, states


def join_groups(groups: list[tuple[Tensor, Any]]) -> list[tuple[Tensor, Any]]:
    """Makes one group of those with states of the same shape."""
    joined: dict[tuple, list[tuple[Tensor, Any]]] = {}
    for group in groups:
        joined.setdefault(state_shapes(group[1]), []).append(group)
    pairs = (zip(*members, strict=True) for members in joined.values())
    return [(torch.cat(rows), map_state(lambda *tensors: torch.cat(tensors), *states)) for rows, states in pairs]

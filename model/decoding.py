"""Continues prompts with a language model, several at once: each further token is one step for the whole batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from matmix.kernels.checks import values_wanted
from matmix.model.architectures.language_model import LanguageModel
from matmix.model.calls import is_hooked
from matmix.model.interop.export.generation_state import map_state, state_shapes
from matmix.model.mixers.base import Mixer, overwrite


@torch.inference_mode()
def decode(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    draw: Callable[[int, Tensor], int],
    *,
    max_new_tokens: int,
    end: int | None = None,
    static: bool | None = None,
) -> Iterator[dict[int, int]]:
    """The tokens that follow each prompt, step by step: number of the prompt -> its next token.

    The prompts are read in groups of one length, so that no padding enters a state. Groups whose states have the same
    shape, which is all where all layers are recurrent, then go on as one batch; a prompt leaves it with its last token.
    The answers are those to each prompt alone, up to rounding.

    Args:
        model: in eval mode.
        prompts: token ids, at least one each.
        draw: chooses a token, given the number of the prompt and logits (vocab_size,) on the CPU.
        max_new_tokens: of each prompt.
        end: the token that ends an answer; it is not given out.
        static: whether steps run in buffers that stay where they are, on a GPU as replays of a CUDA graph. A batch then
            keeps its size, with copies of other rows in place of prompts that have left. None: on CUDA devices, for
            models that can (see `has_static_step`).

    Raises:
        ValueError: a prompt has no tokens, text would be longer than a layer takes, or `static` is asked of a model
            that has no such step.
        OverflowError: the states of an MRU stop being finite.
    """
    for number, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"prompt {number} has no tokens; every prompt needs one to start from")
    # The last new token is not read.
    model.config.check_seqlen(max(map(len, prompts), default=1) + max(max_new_tokens - 1, 0))
    device, batches = model.output_projection()[0].device, []
    if static is None:
        static = takes_graphs(device) and has_static_step(model)
    elif static and not has_static_step(model):
        raise ValueError("static: the state of a layer of this model grows with the text; leave static out")
    kind = _StaticRows if static else _Rows
    for length in sorted({len(prompt) for prompt in prompts}):
        numbers = [number for number, prompt in enumerate(prompts) if len(prompt) == length]
        ids = torch.tensor([list(prompts[number]) for number in numbers], device=device)
        batches.append(kind(model, numbers, *model(ids, method="prefill")))
    alike: dict[tuple, list[_Rows]] = {}
    for rows in batches:
        alike.setdefault(state_shapes(rows.state), []).append(rows)
    batches = [kind.joined(members) for members in alike.values()]
    for step in range(max_new_tokens):
        drawn = [[draw(n, row) for n, row in zip(x.numbers, x.logits.cpu(), strict=True)] for x in batches]
        kept = [[at for at, token in enumerate(tokens) if token != end] for tokens in drawn]
        if not any(kept):
            return
        yield {x.numbers[at]: drawn[n][at] for n, x in enumerate(batches) for at in kept[n]}
        if step + 1 == max_new_tokens:
            return
        following = []
        for rows, tokens, stay in zip(batches, drawn, kept, strict=True):
            if stay:
                rows.advance(tokens, stay)
                following.append(rows)
        batches = following


class _Rows:
    """Prompts that are one batch."""

    def __init__(self, model: LanguageModel, numbers: list[int], logits: Tensor, state: Any) -> None:
        self.model, self.numbers, self.state = model, numbers, state
        self.logits = logits
        """(n, vocab_size) of what comes next."""

    @classmethod
    def joined(cls, members: Sequence[_Rows]) -> _Rows:
        """One batch of several whose states have the same shape."""
        numbers = [number for rows in members for number in rows.numbers]
        logits = torch.cat([rows.logits for rows in members])
        state = map_state(lambda *tensors: torch.cat(tensors), *(rows.state for rows in members))
        return cls(members[0].model, numbers, logits, state)

    def advance(self, tokens: list[int], stay: list[int]) -> None:
        """Read the tokens of the rows that stay, and forget the others."""
        if len(stay) < len(tokens):
            self.leave(stay)
        token_ids = torch.tensor([tokens[at] for at in stay], device=self.logits.device)
        self.logits, self.state = self.model(token_ids, self.state, method="step")

    def leave(self, stay: list[int]) -> None:
        """Only the rows `stay` are left."""
        index = torch.tensor(stay, device=self.logits.device)
        self.state = map_state(lambda tensor: tensor[index], self.state)
        self.numbers = [self.numbers[at] for at in stay]


class _StaticRows(_Rows):
    """Prompts that are one batch, whose steps run in buffers that stay where they are.

    Once the first step has made the buffers, a row that leaves goes on as a copy of one that stays. It costs nothing
    that the batch did not cost before, and what happens to it happens to a row that is wanted.
    """

    step: StaticStep | None = None

    def advance(self, tokens: list[int], stay: list[int]) -> None:
        if self.step is None:
            if len(stay) < len(tokens):
                self.leave(stay)
            self.step = StaticStep(self.model, self.state, len(stay))
            self.state = None
            self.places = self.source = list(range(len(stay)))
        elif len(stay) < len(tokens):
            self.numbers, self.places = ([x[at] for at in stay] for x in (self.numbers, self.places))
            self.source = [at if at in self.places else self.places[0] for at in range(len(self.source))]
            self.step.pick(self.source)
        token_of = dict(zip(self.places, (tokens[at] for at in stay), strict=True))
        self.logits = self.step.step(torch.tensor([token_of[at] for at in self.source]))[self.places]


# -- static step --------------------------------------------------------------------------------


def has_static_step(model: LanguageModel) -> bool:
    """Returns True where a step of the model keeps all shapes and reads nothing back from the device: layers of
    attention, whose states grow, do not, and MATMIX_CHECK_VALUES=1 reads all values. Nor may anything wait for calls of
    its modules, which a graph does not replay."""
    return all(mixer.static_step for mixer in _mixers(model)) and not values_wanted() and not is_hooked(model)


class StaticStep:
    """One token after the other for a batch of fixed size: the same numbers as those of `LanguageModel.step`."""

    def __init__(self, model: LanguageModel, state: list[Any], batch_size: int) -> None:
        """
        Args:
            model: in eval mode, with `has_static_step`.
            state: after the tokens that have been read, of `batch_size` rows; it is copied.
        """
        device = model.output_projection()[0].device
        self.model = model
        self.token_ids = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self.state = map_state(lambda x: x.clone(memory_format=torch.contiguous_format), state)
        self.logits: Tensor | None = None
        """(batch_size, vocab_size) of what follows the last token; None before the first step."""
        self._watched: Tensor | None = None
        self._graph = self._capture(device) if takes_graphs(device) else None

    def step(self, token_ids: Tensor) -> Tensor:
        """Logits (batch_size, vocab_size) after one more token for each row, token_ids (batch_size,) on any device; the
        next step overwrites them. Raises OverflowError where a state does not stay finite."""
        self.token_ids.copy_(token_ids)
        if self._graph is None:
            self.advance()
        else:
            self._graph.replay()
        if self._watched is not None:
            watching = [mixer for mixer in _mixers(self.model) if mixer.watched() is not None]
            for mixer, value in zip(watching, self._watched.tolist(), strict=True):
                mixer.refuse(value)
        assert self.logits is not None
        return self.logits

    def pick(self, rows: Sequence[int]) -> None:
        """Row i goes on as a copy of row rows[i]."""
        index = torch.tensor(rows, device=self.token_ids.device)
        map_state(lambda x: x.copy_(x[index]), self.state)

    def advance(self) -> None:
        """Does the work that the graph holds: from the buffers of tokens and states to those of logits and states."""
        logits = self.model(self.token_ids, self.state, method="step_in_place")
        watched = [x for mixer in _mixers(self.model) if (x := mixer.watched()) is not None]
        self.logits = _kept(self.logits, logits)
        if watched:
            self._watched = _kept(self._watched, torch.stack(watched))

    def _capture(self, device: torch.device) -> torch.cuda.CUDAGraph | None:
        """`advance` as a graph, which leaves the state as it was; None, with a warning, where CUDA refuses."""
        before = map_state(torch.clone, self.state)
        try:
            graph = captured(self.advance, device)
        except RuntimeError as error:
            reason, graph = (str(error).splitlines() or [type(error).__name__])[0], None
            text = (
                f"a step could not be captured as a CUDA graph ({reason}); its operations run one by one, more slowly"
            )
            warnings.warn(text, RuntimeWarning, stacklevel=3)
        overwrite(self.state, before)
        return graph


def takes_graphs(device: torch.device) -> bool:
    """Returns True where steps on this device are captured."""
    return device.type == "cuda"


def captured(run: Callable[[], None], device: torch.device) -> torch.cuda.CUDAGraph:
    """Captures what `run` launches as a graph, after two runs that load kernels. Raises RuntimeError if it cannot."""
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
    return graph


def _mixers(model: LanguageModel) -> list[Mixer]:
    return [block.mixer for block in model.blocks if block.mixer is not None]


def _kept(buffer: Tensor | None, new: Tensor) -> Tensor:
    """The buffer with these numbers in it, which the first ones are."""
    return new.clone() if buffer is None else buffer.copy_(new)

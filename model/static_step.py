"""The step of one token in buffers that stay where they are, which on a GPU is captured once and then replayed.

Launching the kernels of a step one by one takes a host longer than a GPU needs to run them. A CUDA graph launches them
all at once, but reads and writes the same memory at every replay.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from matmix.kernels.checks import values_wanted
from matmix.model.architectures.language_model import LanguageModel
from matmix.model.calls import is_hooked
from matmix.model.interop.export.generation_state import map_state
from matmix.model.mixers.base import Mixer, overwrite


def has_static_step(model: LanguageModel) -> bool:
    """Whether a step of the model keeps all shapes and reads nothing back from the device: layers of attention, whose
    states grow, do not, and MATMIX_CHECK_VALUES=1 reads all values. Nor may anything wait for calls of its modules,
    which a graph does not replay."""
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
        self.logits: torch.Tensor | None = None
        """(batch_size, vocab_size) of what follows the last token; None before the first step."""
        self._watched: torch.Tensor | None = None
        self._graph = self._capture(device) if takes_graphs(device) else None

    def step(self, token_ids: torch.Tensor) -> torch.Tensor:
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
        """What the graph holds: from the buffers of tokens and states to those of logits and states."""
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
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            text = (
                f"a step could not be captured as a CUDA graph ({reason}); its operations run one by one, more slowly"
            )
            warnings.warn(text, RuntimeWarning, stacklevel=3)
            graph = None
        overwrite(self.state, before)
        return graph


def takes_graphs(device: torch.device) -> bool:
    """Whether steps on this device are captured."""
    return device.type == "cuda"


def captured(run: Callable[[], None], device: torch.device) -> torch.cuda.CUDAGraph:
    """What `run` launches, as a graph. It is run twice before, so that kernels are compiled and loaded, on a stream of
    its own as PyTorch asks. Raises RuntimeError for what cannot be captured."""
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


def _kept(buffer: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
    """The buffer with these numbers in it, which the first ones are."""
    return new.clone() if buffer is None else buffer.copy_(new)

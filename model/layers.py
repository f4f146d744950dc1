"""Mixers as layers of any PyTorch model: y = layer(x), both of shape (batch, seqlen, d_model)."""

import dataclasses
import difflib
import functools
from typing import Any

import torch

from matmix.model.config import ModelConfig
from matmix.model.initialization import INIT_STD, initialize
from matmix.model.mixers import MIXERS, Mixer


def mixer(name: str, d_model: int, **options: Any) -> Mixer:
    """Returns a new layer by the name of its mixer, such as "hydra"; `options` as of `layer_class`.

    Raises ValueError (one line) for a name, an option or a value that there is not.
    """
    return layer_class(name)(d_model, **options)


@functools.cache
def layer_class(name: str) -> type[Mixer]:
    """Returns the class of a mixer with a constructor that needs only the width, and draws the weights.

    Layer(d_model, *, causal=None, max_seqlen=None, seed=None, output_std=0.02, **options):
        d_model: width of inputs and outputs.
        causal: whether no output may depend on later tokens; None = only for a mixer that has no other form.
        max_seqlen: the length of all sequences, which mixers with parameters for every position need; some
            others scale positions by it, or what they start from; None = that of `ModelConfig`.
        seed: of the weights; None = drawn from torch's default generator.
        output_std: standard deviation of the initial output projection.
        options: fields of the mixer's `Config`, such as d_state=16.

    Raises ValueError (one line) where there is no such mixer.
    """
    if name not in MIXERS:
        raise ValueError(f"there is no mixer {name!r}; {_nearest(name, MIXERS)}")
    base = MIXERS[name]

    def build(
        self: Mixer,
        d_model: int,
        *,
        causal: bool | None = None,
        max_seqlen: int | None = None,
        seed: int | None = None,
        output_std: float = INIT_STD,
        **options: Any,
    ) -> None:
        for argument, value in (("d_model", d_model), ("max_seqlen", max_seqlen)):
            if value is not None and value < 1:
                raise ValueError(f"{name}: {argument} = {value}: must be 1 or more")
        causal = not base.bidirectional_form if causal is None else causal
        if not (base.causal_form if causal else base.bidirectional_form):
            raise ValueError(f"{name} has no {'causal' if causal else 'bidirectional'} form: leave causal out")
        if base.fixed_length and max_seqlen is None:
            raise ValueError(f"{name} has parameters for every position: give the length of all sequences, max_seqlen")
        config = _config(name, options)
        base.check(d_model, config)
        base.check_scans(config, 1, False)
        longest = ModelConfig().max_seqlen if max_seqlen is None else max_seqlen
        base.__init__(self, d_model, config, causal=causal, max_seqlen=longest, output_std=output_std)
        initialize(self, int(torch.randint(2**62, ())) if seed is None else seed)

    doc = f"{base.__doc__}\n\nLayer(d_model, *, causal, max_seqlen, seed, output_std, **options): see `layer_class`."
    facts = {"__init__": build, "__reduce__": lambda self: (_empty, (name,), self.__dict__), "__doc__": doc}
    return type(base.__name__, (base,), {**facts, "__module__": __name__})


def _empty(name: str) -> Mixer:
    """Returns a layer without content, which pickle fills: its class is no attribute of a module."""
    kind = layer_class(name)
    return kind.__new__(kind)


def _config(name: str, options: dict[str, Any]) -> Any:
    config = MIXERS[name].Config
    known = [field.name for field in dataclasses.fields(config)]
    for option in options:
        if option not in known:
            raise ValueError(f"{name} has no option {option!r}; {_nearest(option, known)}")
    return config(**options)


def _nearest(word: str, known: Any) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known) or 'none'}"

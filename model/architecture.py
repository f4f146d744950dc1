"""The base class of architectures, with the facts that each states before a model is built, and the registry of all of
them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class NoOptions:
    """The options of an architecture that takes none from `model.options`."""


class Architecture(nn.Module):
    """A kind of model: what it reads, which mixers it takes, what it predicts, and what both ends cost.

    An architecture is one file with a subclass of `matmix.model.backbone.Backbone` below `register_architecture`.
    """

    causal: ClassVar[bool]
    """Whether outputs may depend on earlier positions only; the layers then take causal mixers."""
    inputs: ClassVar[str] = "tokens"
    """What it reads, by the word that the data has for it: "tokens", "images", or "values" for other numbers. Of
    tokens, training takes the size of the vocabulary from the data, and an export takes the tokenizer along."""
    per_document: ClassVar[bool] = False
    """Gives one output for each document instead of one for each position."""
    strands: ClassVar[int] = 1
    """So many documents go through the blocks for each one that it reads."""
    separated: ClassVar[bool] = False
    """Documents are a source and a target, which is predicted from the whole source: no state carries it on."""
    takes_head: ClassVar[bool] = False
    """Its output is shaped by model.head, and predicts no tokens."""
    new_parameters: ClassVar[tuple[str, ...]] = ()
    """Prefixes of the names of parameters that a pretrained model does not have: they may start anew."""
    head_parameters: ClassVar[tuple[str, ...]] = ()
    """Prefixes of the names of parameters that models with another output have no use for."""
    growing_parameters: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Parameters that have a row for each token, position and so on -> the field of the configuration that says how
    many. A model with more of them can start from the rows of one with fewer."""
    Options: ClassVar[type] = NoOptions
    """Frozen dataclass of its options in `model.options`; every field has a default."""

    @classmethod
    def options(cls, config: Any) -> Any:
        """The `Options` that model.options gives. Raises ValueError (one line) for an unknown name or another type than
        that of the default."""
        defaults = {field.name: field.default for field in fields(cls.Options)}
        for name, value in config.options.items():
            if name not in defaults:
                known = ", ".join(defaults) or "none"
                raise ValueError(f"model.options.{name}: {config.architecture} has no such option; it has {known}")
            wanted = type(defaults[name])
            if type(value) not in ((int, float) if wanted is float else (wanted,)):
                raise ValueError(f"model.options.{name} = {value!r}: must be of type {wanted.__name__}")
        return cls.Options(**config.options)

    @classmethod
    def check(cls, config: Any) -> None:
        """Raises a ValueError of one line when a `ModelConfig` of this architecture does not fit together."""
        cls.options(config)

    @classmethod
    def check_seqlen(cls, config: Any, seqlen: int) -> None:
        """Raises a ValueError of one line when embedding or output cannot take documents of `seqlen` positions."""

    @classmethod
    def sequence_length(cls, config: Any, seqlen: int) -> int:
        """The number of positions that the blocks see of a document of data.seqlen = `seqlen`."""
        return seqlen

    @classmethod
    def scans(cls, config: Any) -> tuple[int, bool]:
        """In how many orders mixers read the positions, and whether one position is outside of them."""
        return 1, False

    @classmethod
    def resized_parameter(cls, name: str, value: Tensor, config: Any) -> Tensor:
        """A parameter of a model that was trained on inputs of another size, as a model of `config` begins with it."""
        return value

    @classmethod
    def example_inputs(cls, config: Any, batch_size: int, seqlen: int) -> Tensor:
        """Returns zeros (batch_size, seqlen, ...) like inputs of `forward`, on the default device; for estimates."""
        assert cls.inputs == "tokens", f"{cls.__name__} reads no tokens and says not what instead"
        return torch.zeros(batch_size, seqlen, dtype=torch.long)

    @classmethod
    def input_flops(cls, config: Any) -> float:
        """Forward floating-point operations (2 per multiply-add) of the embedding for one position; look-ups cost 0."""
        return 0.0

    @classmethod
    def output_flops(cls, config: Any) -> float:
        """Forward floating-point operations of features and output projection for one output: a position, or a document
        where there is one output for each."""
        predicts_tokens = cls.inputs == "tokens" and not cls.takes_head
        assert predicts_tokens, f"{cls.__name__} predicts no tokens and says not what that costs"
        return 2.0 * config.vocab_size * config.d_model


ARCHITECTURES: dict[str, type[Architecture]] = {}
"""Name in a configuration -> class. `register_architecture` adds to it."""

AnyArchitecture = TypeVar("AnyArchitecture", bound=type[Architecture])


def register_architecture(name: str) -> Callable[[AnyArchitecture], AnyArchitecture]:
    """Class decorator: `model.architecture = name` stands for the class.

    Raises ValueError (one line) where it is no architecture, or the name is that of another one.
    """

    def register(architecture: AnyArchitecture) -> AnyArchitecture:
        if not (isinstance(architecture, type) and issubclass(architecture, Architecture)):
            raise ValueError(f"{name!r} is no architecture: make it a subclass of matmix.model.backbone.Backbone")
        known = ARCHITECTURES.get(name, architecture)
        if (known.__module__, known.__qualname__) != (architecture.__module__, architecture.__qualname__):
            raise ValueError(f"there is an architecture {name!r} already: {known.__module__}.{known.__qualname__}")
        ARCHITECTURES[name] = architecture
        return architecture

    return register


# -- what the outputs of a classifier stand for: the model has numbers only, exports and reports have names ----------


@dataclass(frozen=True, kw_only=True, slots=True)
class Outputs:
    """Names the outputs of a classifier, as the task that trained it knows them."""

    labels: tuple[str, ...] = ()
    """Names of the classes or values, in their order; () = LABEL_0, LABEL_1 and so on."""
    problem_type: Literal["regression", "single_label_classification", "multi_label_classification"] | None = None
    """What transformers computes a sequence classifier's loss by."""
    multiple_choice: bool = False
    """A sequence classifier's one output is the score of a choice."""

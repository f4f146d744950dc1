"""The configuration of a model: frozen dataclasses, validated when made, the same for training and export."""

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, make_dataclass
from typing import Any, Literal

from matmix.model.architecture import ARCHITECTURES, Architecture
from matmix.model.images.config import ImageConfig
from matmix.model.mixers import MIXERS
from matmix.model.mixers.structured.channels import CHANNEL_MAPS
from matmix.model.options import check_words

MixerOptions = make_dataclass(
    "MixerOptions",
    [(name, mixer.Config, field(default=mixer.Config())) for name, mixer in MIXERS.items()],
    frozen=True,
    kw_only=True,
    slots=True,
    namespace={"__doc__": "Options of every registered mixer, by its name.", "__module__": __name__},
)

_MOST_LAYERS = 10_000  # a recipe of others must not fill the memory before anything is built


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadConfig:
    """Says what classifiers and embedders make of the features of the last layer."""

    outputs: int = 0
    """Classes, or values to predict; 1 for multiple choice. 0 = as many as the training data has."""
    pooling: Literal["cls", "mean"] = "cls"
    """sequence_classifier, text_embedder: takes the features of the first position of a document, or the mean over all
    its positions. Of images model.image.pooling says it."""
    hidden: bool = True
    """dense -> tanh -> dropout before the last linear layer, as published for whole texts; false: dropout alone."""
    dropout: float = 0.1
    """Dropout before the last linear layer."""

    def __post_init__(self) -> None:
        if self.outputs < 0:
            raise ValueError(f"model.head.outputs = {self.outputs}: must be 1 or more, or 0 to take it from the data")
        check_words(self, "model.head.")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"model.head.dropout = {self.dropout}: must be at least 0 and below 1")

    @property
    def count(self) -> int:
        """Outputs that a model is built with: 2 where no data has said how many."""
        return self.outputs or 2


MLP_LAYER = "mlp"
"""In `layers`: a layer that is an MLP and no mixer."""

NO_MIXER = "none"
"""In `layers`: a layer without a mixer (a control); where MLPs follow mixers, its MLP stays."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Shape and kind of a model."""

    architecture: str = "language_model"
    """language_model predicts the next token and is causal; encoder_decoder predicts a target from a source before
    it; encoder sees both sides and fills in masked tokens; sequence_classifier, token_classifier, span_classifier and
    text_embedder are encoders with another output; strand_encoder reads both strands of DNA alike; image_classifier
    and masked_image read images; your own: "my_package.module:MyModel"."""
    options: dict[str, int | float | bool | str] = field(default_factory=dict)
    """Options of encoder_decoder, strand_encoder, or of an architecture of your own, by name."""
    vocab_size: int = 0
    """Number of tokens; 0 = taken from the data."""
    d_model: int = 256
    """Width of the residual stream."""
    n_layers: int = 6
    """Number of layers."""
    layers: tuple[str, ...] = ("matrix_memory",)
    """Pattern of mixers, repeated over the depth: ("hydra", "hydra", "attention") has attention in every
    third layer. With "mlp" in the pattern the MLPs stand exactly there, as layers of their own; otherwise one
    follows each mixer. "none" stands for a mixer that is taken out, a control in comparisons."""
    causal_mixers: bool = False
    """encoder and models of images: allows causal mixers, as controls in comparisons."""
    mlp_ratio: float = 4.0
    """Hidden width of the MLPs over d_model; 0 = no MLPs."""
    mlp: Literal["dense", "block_diagonal", "btt", "low_rank", "monarch"] = "dense"
    """Matrices of the MLPs. btt: block tensor trains of two cores (arXiv 2406.06248)."""
    mlp_rank: int = 0
    """btt, low_rank: rank of these matrices; 0 = 1 in btt, sqrt(d_model) in low_rank."""
    mlp_blocks: int = 0
    """block_diagonal, monarch: blocks of these matrices, or of each of their two factors; 0 = 4."""
    mlp_bias: bool = False
    """Biases in the MLPs."""
    mlp_gate: bool = False
    """MLPs are down(activation(gate(x)) * up(x)), arXiv 2002.05202: GeGLU with gelu, SwiGLU with silu. They have a
    matrix more, so that two thirds of the mlp_ratio are as many weights."""
    activation: Literal["gelu", "gelu_tanh", "relu", "silu"] = "gelu"
    """Activation of the MLPs."""
    norm: Literal["pre", "post"] = "pre"
    """pre: x + f(norm(x)) with a final norm; post: norm(x + f(x)), as in the published Hydra encoder."""
    norm_kind: Literal["layer", "rms", "instance"] = "layer"
    """LayerNorm, RMSNorm (arXiv 1910.07467), which subtracts no mean and has no biases, or instance: the norms in the
    layers are of each channel over all positions of a document (arXiv 1607.08022), the others LayerNorms."""
    norm_eps: float = 1e-5
    """Epsilon of the norms in the layers."""
    norm_bias: bool = False
    """Biases in the LayerNorms of the layers and in the final one."""
    final_norm: bool = True
    """A norm before the output (norm = "pre"); the first mru-lm has none."""
    final_norm_eps: float = 1e-5
    """Epsilon of the final norm (norm = "pre")."""
    init_std: float = 0.0
    """Standard deviation with which matrices start that have no rule of their own; 0 = sqrt(2 / (5 d_model))
    (arXiv 1910.05895), 0.023 at a width of 768 and 0.079 at 64, where models learn little from GPT-2's 0.02."""
    dropout: float = 0.0
    """Dropout on what each mixer and MLP adds."""
    drop_path: float = 0.0
    """Models of images: in training the last layer is left out for this share of the images, earlier layers for less,
    growing from 0 (stochastic depth)."""
    layer_scale: float = 0.0
    """What each mixer and MLP adds is multiplied by a learned factor for each channel, which starts here; 0 = none."""
    embedding_dropout: float = 0.0
    """Dropout on the embeddings."""
    max_seqlen: int = 1024
    """Longest document; binding only with position embeddings and for mixers of a fixed length."""
    tie_embeddings: bool = True
    """Word embeddings and output projection are one matrix."""
    logit_softcap: float = 0.0
    """Logits of tokens are softcap tanh(logits / softcap) (arXiv 2408.00118), in training and after; 0 = not capped."""
    type_vocab_size: int = 2
    """encoder: number of token types; 0 = no token-type embeddings."""
    position_embeddings: bool = False
    """encoder: learned absolute positions, counted from 0 in every document."""
    embedding_norm: Literal["auto", "layers", "none"] = "auto"
    """What follows the embeddings of tokens: in encoders a LayerNorm with biases, as BERT's, and in language models
    nothing (auto); a norm as those of the layers; or none."""
    embedding_norm_eps: float = 1e-12
    """Epsilon of the norm after the embeddings."""
    head_activation: Literal["gelu", "gelu_tanh", "relu", "silu"] = "gelu"
    """encoder: activation in the masked-LM head."""
    head_norm_eps: float = 1e-12
    """encoder: epsilon of the norm in the masked-LM head."""
    head_bias: bool = True
    """encoder: biases in the dense layer and the LayerNorm of the masked-LM head; the output has one in any case."""
    head: HeadConfig = field(default_factory=HeadConfig)
    """The output of classifiers and embedders."""
    image: ImageConfig = field(default_factory=ImageConfig)
    """Models of images: how these are read."""
    mixers: MixerOptions = field(default_factory=MixerOptions)
    """Options of each kind of mixer."""

    def __post_init__(self) -> None:
        shares = ("dropout", "embedding_dropout", "drop_path")
        epsilons = ("norm_eps", "final_norm_eps", "embedding_norm_eps", "head_norm_eps")
        for names, fits, must in (
            (("d_model", "n_layers", "max_seqlen"), lambda x: x >= 1, "1 or more"),
            (("vocab_size", "mlp_rank", "mlp_blocks"), lambda x: x >= 0, "0 or more"),
            (("mlp_ratio", *epsilons), lambda x: 0 <= x < math.inf, "0 or more, and finite"),
            (("layer_scale", "logit_softcap"), lambda x: 0 <= x < math.inf, "0 (none) or more"),
            (("init_std",), lambda x: 0 <= x < math.inf, "0 (automatic) or more"),
            (shares, lambda x: 0 <= x < 1, "at least 0 and below 1"),
            (("n_layers",), lambda x: x <= _MOST_LAYERS, f"at most {_MOST_LAYERS:,}"),
        ):
            for name in names:
                if not fits(getattr(self, name)):
                    raise ValueError(f"model.{name} = {getattr(self, name)}: must be {must}")
        check_words(self, "model.")
        if self.architecture not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            hint = "" if ":" not in self.architecture else "; import the module that registers it first"
            raise ValueError(f"model.architecture = {self.architecture!r}; known: {known}{hint}")
        if not self.layers:
            raise ValueError('model.layers is empty: name at least one mixer, for example ["matrix_memory"]')
        for name in self.layers:
            self._check_layer(name)
        if MLP_LAYER in self.layers and self.mlp_ratio == 0:
            raise ValueError('model.layers places "mlp" layers, but model.mlp_ratio is 0; set one of the two')
        self._check_mlp()
        if self.norm_bias and self.norm_kind == "rms":
            raise ValueError('model.norm_bias = true: RMSNorm has no biases; set it to false, or norm_kind to "layer"')
        if self.norm_kind == "instance" and (why := self._why_no_instance_norm()):
            raise ValueError(f'model.norm_kind = "instance": {why}; set it to "layer"')
        if self.embedding_norm != "auto":
            self._check_use("embedding_norm", lambda known: known.inputs == "tokens")
        # The latter: runs of version 0.1.0 say so, whatever their architecture.
        if self.head not in (HeadConfig(), HeadConfig(outputs=2)):
            self._check_use("head", lambda known: known.takes_head)
        if self.image != ImageConfig() or self.drop_path:
            self._check_use("drop_path" if self.drop_path else "image", lambda known: known.inputs == "images")
        self.model_class.check(self)

    def _check_use(self, option: str, uses: Callable[[type[Architecture]], bool]) -> None:
        if not uses(self.model_class):
            able = ", ".join(name for name, known in ARCHITECTURES.items() if uses(known))
            raise ValueError(
                f"model.{option} is of no use to model.architecture = {self.architecture!r}, but to {able}"
            )

    def _why_no_instance_norm(self) -> str:
        if self.norm == "post":
            return 'after each sum (model.norm = "post") it would take away what positions have in common'
        if self.causal:
            return f"{self.architecture} predicts from earlier positions, and it reads all of a document"
        return ""

    def _check_mlp(self) -> None:
        for option in ("mlp_rank", "mlp_blocks"):
            able = [name for name, known in CHANNEL_MAPS.items() if known.option == option]
            if getattr(self, option) and self.mlp not in able:
                raise ValueError(
                    f"model.{option} is of no use to model.mlp = {self.mlp!r}, but to {' and '.join(able)}"
                )
        if self.mlp == "dense":
            return
        if self.mlp_ratio == 0:
            raise ValueError(
                f"model.mlp = {self.mlp!r}, but model.mlp_ratio is 0: there are no MLPs; set one of the two"
            )
        kind = CHANNEL_MAPS[self.mlp]
        try:
            kind.factors(self.d_model, self.mlp_width, self.mlp_size)
        except ValueError as error:
            raise ValueError(f"model.{kind.option} = {self.mlp_size} (model.mlp = {self.mlp!r}): {error}") from None

    def _check_layer(self, name: str) -> None:
        if name in (MLP_LAYER, NO_MIXER):
            return
        if name not in MIXERS:
            known = [*MIXERS, MLP_LAYER, NO_MIXER]
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise ValueError(f"model.layers names {name!r}, which is no mixer; {hint}")
        mixer, causal = MIXERS[name], self.causal
        if causal and not mixer.causal_form:
            raise ValueError(
                f"model.layers: {name!r} sees tokens to come, so a causal {self.architecture} cannot use it; "
                'use a causal mixer, or a bidirectional architecture such as "encoder"'
            )
        if not causal and not mixer.bidirectional_form and not self.causal_mixers:
            raise ValueError(
                f"model.layers: {name!r} sees only earlier tokens, so a bidirectional {self.architecture} cannot use "
                'it; use a bidirectional mixer or a causal architecture such as "language_model", or say '
                "model.causal_mixers = true if you mean it"
            )
        mixer.check(self.d_model, self.mixer_config(name))
        mixer.check_scans(self.mixer_config(name), *self.model_class.scans(self))

    @property
    def matrix_std(self) -> float:
        """Standard deviation with which matrices without a rule of their own start."""
        return self.init_std or math.sqrt(2 / (5 * self.d_model))

    @property
    def mlp_width(self) -> int:
        """Hidden width of the MLPs."""
        return round(self.d_model * self.mlp_ratio)

    @property
    def mlp_size(self) -> int:
        """Rank, or number of blocks, of the matrices of MLPs that are not dense."""
        kind = CHANNEL_MAPS[self.mlp]
        return getattr(self, kind.option) or kind.default(self.d_model)

    @property
    def causal(self) -> bool:
        """True where no output may depend on later tokens."""
        return self.model_class.causal

    @property
    def model_class(self) -> type[Architecture]:
        """The class that `architecture` names."""
        return ARCHITECTURES[self.architecture]

    def mixer_is_causal(self, name: str) -> bool:
        """Returns True where a mixer is built in its causal form."""
        return self.causal or not MIXERS[name].bidirectional_form

    def mixer_config(self, name: str) -> Any:
        """The options of one kind of mixer."""
        return getattr(self.mixers, name)

    def mixer_names(self) -> list[str]:
        """The kinds of mixers that the layers hold, sorted."""
        return sorted({name for name, _ in self.layer_kinds() if name is not None})

    def fixed_length_mixers(self) -> list[str]:
        """The kinds of mixers that the layers hold and that take sequences of exactly `max_seqlen` tokens."""
        return [name for name in self.mixer_names() if MIXERS[name].fixed_length]

    def layer_kinds(self) -> list[tuple[str | None, bool]]:
        """For each layer: its mixer (None for an "mlp" or "none" layer) and whether it has an MLP."""
        names = [self.layers[index % len(self.layers)] for index in range(self.n_layers)]
        follows = MLP_LAYER not in self.layers and self.mlp_ratio > 0
        kinds = {MLP_LAYER: (None, True), NO_MIXER: (None, follows)}
        return [kinds.get(name, (name, follows)) for name in names]

    @property
    def longest(self) -> int:
        """Positions of the longest document that mixers are built for: `max_seqlen`, or those of an image."""
        return self.model_class.sequence_length(self, self.max_seqlen)

    def check_seqlen(self, seqlen: int) -> None:
        """Raise a one-line ValueError when the model cannot take documents of `seqlen` tokens."""
        if seqlen < 1:
            raise ValueError(f"sequence length {seqlen}: must be 1 or more")
        self.model_class.check_seqlen(self, seqlen)
        seqlen = self.model_class.sequence_length(self, seqlen)
        for name in self.mixer_names():
            MIXERS[name].check_seqlen(self.mixer_config(name), seqlen, self.longest)


def used_mixers(config: ModelConfig) -> frozenset[str]:
    """Names of the mixers in the model's pattern of layers."""
    return frozenset(name for name in config.layers if name in MIXERS)


def model_config_to_dict(config: ModelConfig) -> dict[str, Any]:
    """A configuration as nested plain values, for JSON, with the options of those mixers only that the model has, and
    of a head and of images only where it takes them."""
    values = asdict(config)
    if not config.model_class.takes_head:
        del values["head"]
    if config.model_class.inputs != "images":
        del values["image"]
    used = used_mixers(config)
    values["mixers"] = {name: options for name, options in values["mixers"].items() if name in used}
    return values


def model_config_from_dict(values: Mapping[str, Any], **changes: Any) -> ModelConfig:
    """The inverse of `model_config_to_dict`, with some fields changed.

    Raises ValueError if a value is not allowed or not known.
    """

    def frozen(value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    values = {name: frozen(value) for name, value in {**values, **changes}.items()}
    options = values.pop("mixers", {})
    try:
        head, image = HeadConfig(**values.pop("head", {})), ImageConfig(**values.pop("image", {}))
        mixers = {
            name: MIXERS[name].Config(**{key: frozen(value) for key, value in given.items()})
            for name, given in options.items()
        }
        return ModelConfig(**values, head=head, image=image, mixers=MixerOptions(**mixers))
    except (KeyError, TypeError) as error:
        raise ValueError(f"this configuration of a model cannot be built by this version: {error}") from None

"""The configuration classes of transformers: each holds a `ModelConfig` as plain values."""

from dataclasses import dataclass
from typing import Any, ClassVar

from transformers import PretrainedConfig

from matmix.model.architecture import Outputs
from matmix.model.config import ModelConfig


class MatmixConfig(PretrainedConfig):
    """Configuration of an exported language model.

    `matmix` is the whole `ModelConfig` as nested plain values, from which the model is built, except for `vocab_size`,
    which `resize_token_embeddings` may change. `max_position_embeddings` is where other tools cut texts.
    """

    model_type = "matmix"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "cache"]

    def __init__(
        self,
        matmix: dict[str, Any] | None = None,
        vocab_size: int | None = None,
        max_position_embeddings: int | None = None,
        **kwargs: Any,
    ):
        self.matmix = dict(matmix or {})
        self.vocab_size = self.matmix.get("vocab_size", 0) if vocab_size is None else vocab_size
        longest = self.matmix.get("max_seqlen", 0)
        self.max_position_embeddings = longest if max_position_embeddings is None else max_position_embeddings
        kwargs.setdefault("tie_word_embeddings", self.matmix.get("tie_embeddings", True))
        super().__init__(**kwargs)

    @property
    def hidden_size(self) -> int:
        return self.matmix.get("d_model", 0)

    @property
    def num_hidden_layers(self) -> int:
        return self.matmix.get("n_layers", 0)


class MatmixEncoderConfig(MatmixConfig):
    """Configuration of an exported encoder.

    The values that start with `classifier_` shape the heads of classifiers, as `HeadConfig` does. A new head of a
    pretrained encoder is a linear layer on the mean of all tokens unless these say otherwise.
    """

    model_type = "matmix-encoder"

    def __init__(
        self,
        classifier_pooling: str = "mean",
        classifier_hidden: bool = False,
        classifier_dropout: float = 0.1,
        **kwargs: Any,
    ):
        self.classifier_pooling = classifier_pooling
        self.classifier_hidden = classifier_hidden
        self.classifier_dropout = classifier_dropout
        super().__init__(**kwargs)


def _of_images(name: str) -> property:
    return property(lambda config: config.matmix.get("image", {}).get(name, 0))


class MatmixImageConfig(MatmixConfig):
    """Configuration of an exported image classifier. num_labels is the number of its classes."""

    model_type = "matmix-image"
    image_size, patch_size, num_channels = map(_of_images, ("size", "patch", "channels"))


# -- forms --------------------------------------------------------------------------------


EXPORT = "matmix.model.interop.export"


@dataclass(frozen=True, slots=True)
class TransformersForm:
    """The classes by which transformers loads the models of an architecture."""

    config_class: type[MatmixConfig]
    source: str
    """The module in `EXPORT` that they are in."""
    body: str
    """The class of AutoModel."""
    heads: tuple[str, ...]
    """X of each AutoModelForX, which is MatmixForX; the first one, or else AutoModel, loads the model as it was
    trained."""
    pipeline: str
    library: str = "transformers"

    @property
    def classes(self) -> dict[str, str]:
        """Class of transformers -> ours, the main one first but for AutoModel."""
        return {"AutoModel": self.body, **{f"AutoModelFor{head}": f"MatmixFor{head}" for head in self.heads}}


_OF_TEXTS = (MatmixEncoderConfig, "encoder", "MatmixEncoderModel")
_HEADS = ("SequenceClassification", "TokenClassification", "QuestionAnswering", "MultipleChoice")

FORMS = {
    "language_model": TransformersForm(MatmixConfig, "language_model", "MatmixModel", ("CausalLM",), "text-generation"),
    "encoder": TransformersForm(*_OF_TEXTS, ("MaskedLM", *_HEADS), "fill-mask"),
    "sequence_classifier": TransformersForm(
        *_OF_TEXTS, ("SequenceClassification", "MultipleChoice"), "text-classification"
    ),
    "token_classifier": TransformersForm(*_OF_TEXTS, ("TokenClassification",), "token-classification"),
    "span_classifier": TransformersForm(*_OF_TEXTS, ("QuestionAnswering",), "question-answering"),
    "image_classifier": TransformersForm(
        MatmixImageConfig, "images", "MatmixImageModel", ("ImageClassification",), "image-classification"
    ),
    "text_embedder": TransformersForm(*_OF_TEXTS, (), "sentence-similarity", "sentence-transformers"),
}
"""Architecture -> its form. Others are exported as weights and configuration, which `read_export` reads."""


def main_class(config: ModelConfig, outputs: Outputs) -> str:
    """Returns the class of transformers that loads a model as it was trained."""
    if config.architecture == "sequence_classifier" and outputs.multiple_choice:
        return "AutoModelForMultipleChoice"
    return "".join(["AutoModel", *(f"For{head}" for head in FORMS[config.architecture].heads[:1])])


def head_fields(config: ModelConfig, outputs: Outputs) -> dict[str, Any]:
    """Returns the fields of config.json for a head. Raises ValueError where the names do not fit the outputs."""
    if not config.model_class.takes_head:
        return {}
    head, labels = config.head, outputs.labels or tuple(f"LABEL_{index}" for index in range(config.head.count))
    if len(labels) != head.count:
        raise ValueError(f"there are {len(labels)} names of labels for a model with {head.count} outputs")
    fields: dict[str, Any] = {}
    if config.model_class.inputs != "images":  # of which the head is in the configuration of the model alone
        fields |= {f"classifier_{name}": getattr(head, name) for name in ("pooling", "hidden", "dropout")}
    if config.architecture in ("sequence_classifier", "token_classifier", "image_classifier"):
        fields["id2label"] = {str(index): label for index, label in enumerate(labels)}
        fields["label2id"] = {label: index for index, label in enumerate(labels)}
    return fields if outputs.problem_type is None else {**fields, "problem_type": outputs.problem_type}

"""The classes by which transformers loads the models of each architecture, and what their outputs are called there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from matmix.model.config import ModelConfig
from matmix.model.outputs import Outputs

EXPORT = "matmix.model.interop.export"


@dataclass(frozen=True, slots=True)
class TransformersForm:
    """The classes by which transformers loads the models of an architecture."""

    model_type: str
    config_class: str
    auto_classes: dict[str, str]
    """Class of transformers -> "module:class" in `EXPORT`."""
    main: str
    """Which of them loads the model as it was trained."""
    pipeline: str
    library: str = "transformers"


_HEADS = {
    "AutoModelForSequenceClassification": "encoder_heads:MatmixForSequenceClassification",
    "AutoModelForTokenClassification": "encoder_heads:MatmixForTokenClassification",
    "AutoModelForQuestionAnswering": "encoder_heads:MatmixForQuestionAnswering",
    "AutoModelForMultipleChoice": "encoder_heads:MatmixForMultipleChoice",
}


def _encoder_form(
    *names: str, pipeline: str, masked_lm: bool = False, library: str = "transformers"
) -> TransformersForm:
    """The form of an architecture with an encoder's body: AutoModel, and `names` of `_HEADS`, the main one first."""
    heads = {"AutoModelForMaskedLM": "encoder:MatmixForMaskedLM"} if masked_lm else {}
    heads |= {name: _HEADS[name] for name in names}
    return TransformersForm(
        model_type="matmix-encoder",
        config_class="MatmixEncoderConfig",
        auto_classes={"AutoModel": "encoder:MatmixEncoderModel", **heads},
        main=next(iter(heads), "AutoModel"),
        pipeline=pipeline,
        library=library,
    )


FORMS = {
    "language_model": TransformersForm(
        model_type="matmix",
        config_class="MatmixConfig",
        auto_classes={
            "AutoModel": "language_model:MatmixModel",
            "AutoModelForCausalLM": "language_model:MatmixForCausalLM",
        },
        main="AutoModelForCausalLM",
        pipeline="text-generation",
    ),
    "encoder": _encoder_form(*_HEADS, masked_lm=True, pipeline="fill-mask"),
    "sequence_classifier": _encoder_form(
        "AutoModelForSequenceClassification", "AutoModelForMultipleChoice", pipeline="text-classification"
    ),
    "token_classifier": _encoder_form("AutoModelForTokenClassification", pipeline="token-classification"),
    "span_classifier": _encoder_form("AutoModelForQuestionAnswering", pipeline="question-answering"),
    "image_classifier": TransformersForm(
        model_type="matmix-image",
        config_class="MatmixImageConfig",
        auto_classes={
            "AutoModel": "image_classifier:MatmixImageModel",
            "AutoModelForImageClassification": "image_classifier:MatmixForImageClassification",
        },
        main="AutoModelForImageClassification",
        pipeline="image-classification",
    ),
    "text_embedder": _encoder_form(pipeline="sentence-similarity", library="sentence-transformers"),
}
"""Architecture -> its form. Others are exported as weights and configuration, which `read_export` reads."""


def main_class(config: ModelConfig, outputs: Outputs) -> str:
    """The class of transformers that loads a model as it was trained."""
    if config.architecture == "sequence_classifier" and outputs.multiple_choice:
        return "AutoModelForMultipleChoice"
    return FORMS[config.architecture].main


def head_fields(config: ModelConfig, outputs: Outputs) -> dict[str, Any]:
    """What config.json says of a head. Raises ValueError (one line) where the names do not fit the outputs."""
    if not config.model_class.takes_head:
        return {}
    head, labels = config.head, outputs.labels or tuple(f"LABEL_{index}" for index in range(config.head.count))
    if len(labels) != head.count:
        raise ValueError(f"there are {len(labels)} names of labels for a model with {head.count} outputs")
    fields: dict[str, Any] = {}
    if not config.model_class.takes_images:  # of which the head is in the configuration of the model alone
        fields = {
            "classifier_pooling": head.pooling,
            "classifier_hidden": head.hidden,
            "classifier_dropout": head.dropout,
        }
    if config.architecture in ("sequence_classifier", "token_classifier", "image_classifier"):
        fields["id2label"] = {str(index): label for index, label in enumerate(labels)}
        fields["label2id"] = {label: index for index, label in enumerate(labels)}
    if outputs.problem_type is not None:
        fields["problem_type"] = outputs.problem_type
    return fields

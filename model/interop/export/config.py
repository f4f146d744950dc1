"""The configuration classes of transformers: each holds a `ModelConfig` as plain values."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import PretrainedConfig


class MatmixConfig(PretrainedConfig):
    """Configuration of an exported language model.

    `matmix` is the whole `ModelConfig` as nested plain values; it is what the model is built from, except for
    `vocab_size`, which `resize_token_embeddings` may change. `max_position_embeddings` is where other tools cut texts:
    the length of the training, or of what bounds a text.
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

    The values that start with `classifier_` shape the heads of classifiers, as `HeadConfig` in `ModelConfig` does.
    Where a pretrained encoder gets a new head, it is a linear layer on the mean of all tokens unless these say
    otherwise.
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


class MatmixImageConfig(MatmixConfig):
    """Configuration of an exported image classifier. num_labels is the number of its classes."""

    model_type = "matmix-image"

    @property
    def image_size(self) -> int:
        return self.matmix.get("image", {}).get("size", 0)

    @property
    def patch_size(self) -> int:
        return self.matmix.get("image", {}).get("patch", 0)

    @property
    def num_channels(self) -> int:
        return self.matmix.get("image", {}).get("channels", 0)

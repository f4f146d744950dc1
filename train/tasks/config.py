"""The table [objective] of a recipe: which task a model is trained on, and its options."""

import dataclasses
from typing import Any

from matmix.data.loading.masking import MaskingConfig
from matmix.data.storage.remote import refuse_secrets


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveConfig:
    """The objective."""

    name: str = "causal_lm"
    """causal_lm: next-token prediction, for language models; masked_lm: prediction of masked tokens, for encoders;
    masked_diffusion: the same at every rate of masking, so that an encoder writes;
    causal_distillation, masked_distillation: to be as another model is, for language models and encoders;
    image_classification: classes of images; masked_image: pixels of hidden parts of images; on labelled examples:
    sequence_classification, multi_label, regression, token_classification, question_answering, multiple_choice,
    embedding; "my_package.module:MyTask": your own."""
    teacher: str = ""
    """What a distillation learns from: a run (folder or URL; its newest checkpoint, or RUN/checkpoints/step-...), an
    export, or a checkpoint of the published Hydra or mru-lm code. It is read at every start."""
    z_loss: float = 0.0
    """Weight of the mean squared log-partition function (PaLM, arXiv 2204.02311); 0 = off, 1e-4 is usual."""
    masking: MaskingConfig = dataclasses.field(default_factory=MaskingConfig)
    """How training batches are masked (masked_lm only)."""
    evaluation_masking: MaskingConfig = dataclasses.field(default_factory=lambda: MaskingConfig(probability=0.15))
    """How validation batches are masked (masked_lm only); left out, 15 % of single tokens, however training masks."""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """A table with the options of your own task."""

    def __post_init__(self) -> None:
        refuse_secrets(self.teacher, "objective.teacher")
        if self.z_loss < 0:
            raise ValueError(f"objective.z_loss must be >= 0, got {self.z_loss}")

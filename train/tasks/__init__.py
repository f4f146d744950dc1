"""Tasks: what a model is trained on. Each task is one file and one line in `TASKS`."""

from matmix.data.modalities import MODALITIES
from matmix.model.config import ModelConfig
from matmix.train.arguments import find_part
from matmix.train.tasks.base import Costs, Loss, Metric, Task
from matmix.train.tasks.config import ObjectiveConfig
from matmix.train.tasks.distillation import CausalDistillation, MaskedDistillation
from matmix.train.tasks.finetuning.classification import MultiLabel, MultipleChoice, Regression, SequenceClassification
from matmix.train.tasks.finetuning.embedding import Embedding
from matmix.train.tasks.finetuning.question_answering import QuestionAnswering
from matmix.train.tasks.finetuning.token_classification import TokenClassification
from matmix.train.tasks.image_classification import ImageClassification
from matmix.train.tasks.masked_diffusion import MaskedDiffusion
from matmix.train.tasks.masked_image import MaskedImage
from matmix.train.tasks.sample_classification import SampleClassification
from matmix.train.tasks.token_prediction import CausalLM, MaskedLM

__all__ = ["TASKS", "Costs", "Loss", "Metric", "ObjectiveConfig", "Task", "make_task", "unit_of"]

TASKS: dict[str, type[Task]] = {
    "causal_lm": CausalLM,
    "masked_lm": MaskedLM,
    "masked_diffusion": MaskedDiffusion,
    "causal_distillation": CausalDistillation,
    "masked_distillation": MaskedDistillation,
    "image_classification": ImageClassification,
    "masked_image": MaskedImage,
    "sample_classification": SampleClassification,
    "sequence_classification": SequenceClassification,
    "multi_label": MultiLabel,
    "regression": Regression,
    "token_classification": TokenClassification,
    "question_answering": QuestionAnswering,
    "multiple_choice": MultipleChoice,
    "embedding": Embedding,
}
"""The names that `objective.name` may have, besides "my_package.module:MyTask"."""


def make_task(objective: ObjectiveConfig, model: ModelConfig) -> Task:
    """Returns the task that `objective` names. Raises ValueError (one line) where none trains such a model."""
    kind = find_part(objective.name, TASKS, "objective.name", Task)
    if kind.architectures and model.architecture not in kind.architectures:
        needs = " or ".join(f'"{name}"' for name in kind.architectures)
        raise ValueError(
            f'objective.name = "{objective.name}" trains model.architecture = {needs}, '
            f'but the model is "{model.architecture}"; change one of the two'
        )
    return kind(objective)


def unit_of(objective: str) -> str:
    """Returns the unit of the counters of a run with this objective.name. An objective from outside is not imported for
    that, and taken to count tokens."""
    return MODALITIES[TASKS.get(objective, Task).modalities[0]].unit

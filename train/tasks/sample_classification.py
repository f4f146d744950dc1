"""Classes of whole generated samples, such as the value of an expression: what the field's long-range tasks ask for."""

from typing import Any

import torch
from torch import Tensor, nn

from matmix.data.config import DataConfig
from matmix.data.loading.batch import Batch
from matmix.data.loading.loader import Loader
from matmix.data.loading.masking import IGNORED, MaskingConfig
from matmix.train.errors import require
from matmix.train.tasks.base import Costs, Loss, Task
from matmix.train.tasks.finetuning.base import MOST_FREQUENT, ClassOptions, class_cost
from matmix.train.tasks.metrics import as_controls, share


class SampleClassification(Task):
    """The answer of a generated sample that has only one, as the class of the whole sample. The mask stands where the
    answer belongs, at the end. The model may read it from the mean over all positions, of which a mixer with a short
    reach sees as much as any."""

    architectures = ("sequence_classifier",)
    modalities = ("samples",)
    target_share = 0.0
    recorded = ("accuracy",)
    metrics = (share("accuracy", "accuracy", MOST_FREQUENT),)

    def asks(self, split: str) -> dict[str, MaskingConfig]:
        return {"masking": MaskingConfig()}  # any: the samples know where their mask stands

    def make_loader(self, data: DataConfig, *, split: str, **options: Any) -> Loader:
        loader = super().make_loader(data, split=split, **options)
        several = f'the samples of data.synthetic.task = "{data.synthetic.task}" have no answer that is one of their '
        require(loader.facts.outputs is not None, f'{several}whole; set objective.name = "masked_lm"')
        return loader

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        return class_cost(self.forward(model, batch).float(), batch.labels[:, -1], ClassOptions())

    @torch.no_grad()
    def costs(self, model: nn.Module, batch: Batch) -> Costs:
        logits, labels = self.forward(model, batch).float(), batch.labels[:, -1]
        loss = nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")
        return Costs(loss, {"accuracy": (logits.argmax(1) == labels).float()})

    def example_batch(self, inputs: Tensor) -> Batch:
        batch = super().example_batch(inputs)
        batch.labels = torch.zeros_like(inputs)
        return batch

    def measures(self, means: dict[str, float], loader: Loader) -> dict[str, float]:
        return means | as_controls({"accuracy": loader.facts.chance_accuracy})

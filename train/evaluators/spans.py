"""Measures what is predicted in the midst of masked spans: the loss by distance to the nearest token that is seen."""

import torch
from torch import Tensor

from matmix.data.loading.batch import Batch
from matmix.data.loading.masking import IGNORED
from matmix.train.config import RunConfig
from matmix.train.evaluators.base import Evaluation, Evaluator
from matmix.train.evaluators.context import binned_sums, finite
from matmix.train.tasks.base import Costs, Task
from matmix.train.tasks.token_prediction import MaskedLM

PREFIX = "span_loss/"


class SpanLoss(Evaluator):
    """`span_loss/<distance>`, nats per target of the validation split, where `objective.evaluation_masking` has spans:
    1 is next to a token that is not predicted, 2-3 is one or two tokens further in, and so on by powers of 2."""

    @classmethod
    def applies(cls, config: RunConfig, task: Task) -> bool:
        return isinstance(task, MaskedLM) and config.objective.evaluation_masking.span > 1

    def begin(self, evaluation: Evaluation) -> None:
        # Of spans without a longest length the last bin holds all that is further in.
        self.bins = ((self.config.objective.evaluation_masking.span + 1) // 2).bit_length()
        self.sums = torch.zeros(2, self.bins, dtype=torch.float64, device=evaluation.engine.device)

    def observe(self, batch: Batch, costs: Costs, targets: int) -> None:
        self.sums += binned_sums(batch, costs.loss, distances(batch.labels).flatten(), self.bins)

    def finish(self, evaluation: Evaluation) -> dict[str, float]:
        sums = evaluation.sum_over_ranks(self.sums)
        metrics = {}
        for k, (loss, count) in enumerate(sums.T.tolist()):
            last = k == self.bins - 1
            name = f"{2**k}+" if last else f"{2**k}-{2 ** (k + 1) - 1}" if k else "1"
            if count:
                metrics[PREFIX + name] = loss / count
        return finite(metrics)


def distances(labels: Tensor) -> Tensor:
    """Returns how far the nearest token of its row is that is not predicted, of each token: int64 like labels (B, L).
    It is 0 of those themselves, and L where all tokens of a row are predicted."""
    length = labels.shape[1]
    places = torch.arange(length, device=labels.device).expand_as(labels)
    seen = labels == IGNORED
    before = torch.where(seen, places, -length).cummax(1).values
    behind = torch.where(seen, places, 2 * length).flip(1).cummin(1).values.flip(1)
    return torch.minimum(places - before, behind - places).clamp(max=length)

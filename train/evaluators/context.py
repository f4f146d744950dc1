"""Measures whether a model uses its context: the loss by position in the document, and a sentence about it."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from matmix.data.loading.batch import Batch
from matmix.data.loading.masking import IGNORED
from matmix.model.positions import document_positions
from matmix.train.config import RunConfig
from matmix.train.evaluators.base import Evaluation, Evaluator
from matmix.train.tasks.base import Costs, Metric, Task
from matmix.train.tasks.token_prediction import TokenPrediction

PREFIX = "position_loss/"
_FIRST_BINS = 2  # positions 1 to 3
# Nats of `mixing_gain` below which the mixers are said to do nothing: the layers around them make up for as much.
NOTHING = 0.02


class ContextGain(Evaluator):
    """`position_metrics` of the validation split."""

    metrics = (Metric(name="context_gain", title="context gain", unit="nats", higher_is_better=True, digits=3),)

    @classmethod
    def applies(cls, config: RunConfig, task: Task) -> bool:
        return isinstance(task, TokenPrediction)

    def begin(self, evaluation: Evaluation) -> None:
        bins = self.config.data.seqlen.bit_length()
        self.sums = torch.zeros(2, bins, dtype=torch.float64, device=evaluation.engine.device)

    def observe(self, batch: Batch, costs: Costs, targets: int) -> None:
        self.sums += position_sums(batch, costs.loss, self.config.data.seqlen)

    def finish(self, evaluation: Evaluation) -> dict[str, float]:
        return position_metrics(evaluation.sum_over_ranks(self.sums), self.config.data.seqlen)

    def summary(self, metrics: Mapping[str, float]) -> list[str]:
        return context_words(metrics)


def position_sums(batch: Batch, losses: Tensor, seqlen: int) -> Tensor:
    """Returns the losses (row 0) and targets (row 1) of a micro-batch by bins of position: (2, bins) float64.

    losses: those of `Task.costs`. The position of a target is the number of tokens of its document, as far as that lies
    in the row, up to and with the one that predicts it: what a causal model has read. Of a masked token it is its own
    place. Bin k holds the positions 2^k to 2^(k + 1) - 1.
    """
    batch_size, length = batch.labels.shape
    if batch.cu_seqlens is None:  # padding lies behind the tokens
        positions = torch.arange(length, device=losses.device).repeat(batch_size)
    else:
        positions = document_positions(batch_size * length, batch.cu_seqlens, losses.device)
    return binned_sums(batch, losses, positions + 1, seqlen.bit_length())


def binned_sums(batch: Batch, losses: Tensor, places: Tensor, bins: int) -> Tensor:
    """Returns the losses (row 0) and targets (row 1) of a micro-batch by bins: (2, bins) float64.

    losses: those of `Task.costs`. places: of all tokens of the batch, flat, from 1 on; bin k holds those from 2^k to
    2^(k + 1) - 1, and the last one those above.
    """
    kept = batch.labels.flatten() != IGNORED
    if batch.weights is not None:
        kept = kept * batch.weights.flatten()
    if batch.select is not None:
        places, kept = places[batch.select], kept[batch.select]
    borders = 2 ** torch.arange(1, bins, device=losses.device)
    places = torch.bucketize(places, borders, right=True)
    sums = torch.zeros(2, bins, dtype=torch.float64, device=losses.device)
    return sums.index_add_(1, places, torch.stack([losses.double(), kept.double()]))


def position_metrics(sums: Tensor, seqlen: int) -> dict[str, float]:
    """Returns `position_loss/<first>-<last position>` (nats per target) and `context_gain` from the sums of all
    batches.

    Bins without a target, and losses that are no finite numbers, are left out. The last bin takes in those behind it
    that hold fewer targets than the positions 1 to 3 together, so that neither the position at which rows are cut nor
    the few longest documents make a bin of noise. The gain is the loss at positions 1 to 3 minus the loss in the last
    bin; there is none where no other bin holds as many targets as those positions.
    """
    losses, counts = (row.tolist() for row in sums.cpu())
    begins = [2**k for k in range(len(counts))]
    ends = [min(2 * begin - 1, seqlen) for begin in begins]
    while counts and not counts[-1]:
        counts.pop()
    few = sum(counts[:_FIRST_BINS])
    while len(counts) > _FIRST_BINS + 1 and counts[-1] < few:
        last = len(counts) - 1
        counts[last - 1 :] = [counts[last - 1] + counts[last]]
        losses[last - 1 :] = [losses[last - 1] + losses[last]]
        ends[last - 1 :] = [ends[last]]
    metrics = {}
    for loss, count, begin, end in zip(losses, counts, begins, ends, strict=False):
        if count:
            metrics[f"{PREFIX}{begin}-{end}" if end > begin else f"{PREFIX}{begin}"] = loss / count
    if few and len(counts) > _FIRST_BINS and counts[-1] >= few:
        first = sum(losses[:_FIRST_BINS]) / few
        metrics["context_gain"] = first - losses[len(counts) - 1] / counts[-1]
    return finite(metrics)


def finite(metrics: dict[str, float]) -> dict[str, float]:
    """Returns the metrics without NaN and infinities, which JSON cannot hold."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def context_words(metrics: Mapping[str, float]) -> list[str]:
    """Returns the results of an evaluation about context, as lines for a person."""
    parts = []
    if "context_gain" in metrics:
        begin, _, end = [name for name in metrics if name.startswith(PREFIX)][-1].removeprefix(PREFIX).partition("-")
        where = f"{begin} to {end}" if end else begin
        difference = _difference(-metrics["context_gain"], "less", "more")
        if "masked_accuracy" in metrics:
            parts.append(f"a masked token at places {where} of its document costs {difference} than at the first 3")
        else:
            parts.append(f"a token after {where} others of its document costs {difference} than after 1 to 3")
    gain = metrics.get("mixing_gain")
    if gain is not None:
        parts.append(
            f"with the mixers' outputs replaced by their means the loss is {_difference(gain, 'lower', 'higher')}"
        )
    lines = [f"Context: {'; '.join(parts)}."] if parts else []
    if gain is not None and gain < NOTHING:
        so = "; what differs between the positions is the text, not what is known of it" if len(parts) > 1 else ""
        lines.append(
            f"Warning: the mixers contribute nothing: constants in their place change the loss by {gain:+.3f} nats{so}."
        )
    return lines


def _difference(value: float, less: str, more: str) -> str:
    return f"{abs(value):.2f} nats {less if value < 0 else more}"

"""Generated tasks at several lengths: how many answers are right at 1, 2, 4 and 8 times the length of training."""

import dataclasses
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from matmix.data.loading.batch import Batch
from matmix.data.loading.masking import IGNORED
from matmix.train.config import RunConfig
from matmix.train.engine.base import Engine
from matmix.train.evaluators.base import Evaluation, Evaluator
from matmix.train.loaders import make_loader
from matmix.train.tasks.base import Task, forward
from matmix.train.tasks.token_prediction import TokenPrediction

USUAL_MULTIPLES = (1, 2, 4, 8)


class AccuracyByLength(Evaluator):
    """Per multiple k of the length: `accuracy_xk`, the share of answers that are right, and `sequence_accuracy_xk`, the
    share of samples all of whose answers are; without the ending for k = 1."""

    @classmethod
    def applies(cls, config: RunConfig, task: Task) -> bool:
        longer = task.modality(config.data).stretched(config.data, 1)
        return longer is not None and isinstance(task, TokenPrediction)

    def finish(self, evaluation: Evaluation) -> dict[str, float]:
        metrics, mesh = {}, evaluation.engine.mesh
        for multiple in multiples(self.config):
            longer = _at_multiple(self.config, multiple, mesh.data_size)
            loader = make_loader(longer, "validation", mesh.data_rank, mesh.data_size, part=mesh.part)
            sums = torch.zeros(4, dtype=torch.float64)
            for batch in dataclasses.replace(evaluation, loader=loader).batches(longer.evaluation.batches):
                sums += _counts(evaluation.engine, batch, longer.data.seqlen)
            right, answers, whole, samples = evaluation.sum_over_ranks(sums.to(evaluation.engine.device)).tolist()
            ending = "" if multiple == 1 else f"_x{multiple}"
            metrics |= {f"accuracy{ending}": right / answers, f"sequence_accuracy{ending}": whole / samples}
        return metrics

    def summary(self, metrics: Mapping[str, float]) -> list[str]:
        return [words_on_accuracy(metrics, self.config.data.seqlen)]


def multiples(config: RunConfig) -> list[int]:
    """Returns the multiples of data.seqlen to score: those of the config, or those usual ones that fit."""

    def fits(multiple: int) -> bool:
        try:
            config.check_multiple(multiple)
        except ValueError:
            return False
        return True

    return sorted(set(config.data.synthetic.eval_lengths)) or list(filter(fits, USUAL_MULTIPLES))


def words_on_accuracy(metrics: Mapping[str, float], seqlen: int) -> str:
    """Returns a sentence with the accuracies of `AccuracyByLength`."""
    shares = {1: metrics["accuracy"]}
    shares |= {int(key.removeprefix("accuracy_x")): metrics[key] for key in metrics if key.startswith("accuracy_x")}
    listed = ", ".join(f"{value:.1%} at {multiple * seqlen:,}" for multiple, value in sorted(shares.items()))
    return f"Accuracy by tokens in a sample: {listed}; the best constant guess has {metrics['chance_accuracy']:.1%}."


def _at_multiple(config: RunConfig, multiple: int, data_size: int) -> RunConfig:
    """Returns the run on samples so many times as long, in micro-batches of at most as many tokens."""
    micro = config.micro_batch(data_size)
    fitting = [size for size in range(1, micro + 1) if micro % size == 0 and size * multiple <= micro]
    data = config.modality.stretched(config.data, multiple)
    return dataclasses.replace(config, data=data, micro_batch_size=max(fitting, default=1))


def _counts(engine: Engine, batch: Batch, seqlen: int) -> Tensor:
    """Returns float64 (4,): right answers, answers, samples with right answers only, samples, of a micro-batch of
    samples of `seqlen` tokens; of one that several ranks share on the first of them, and zeros on the others."""
    part, labels = engine.mesh.part, batch.labels.flatten()
    places = torch.nonzero(labels != IGNORED)[:, 0]
    device = dataclasses.replace(batch, select=places).to(engine.device)
    guesses = forward(engine.model, device, lambda *given: F.linear(*given).argmax(dim=-1)).cpu()
    rows = (part.number * labels.numel() + places) // seqlen
    wrong = rows[guesses != labels[places]]
    counts = [torch.bincount(some, minlength=part.parts * labels.numel() // seqlen) for some in (rows, wrong)]
    answers, wrong = engine.sum_over_parts(torch.stack(counts).to(engine.device)).cpu()
    there = answers > 0
    own = [answers.sum() - wrong.sum(), answers.sum(), (there & (wrong == 0)).sum(), there.sum()]
    return torch.stack(own).double() * (part.number == 0)

"""Distillation of a trained model, such as a Transformer, into one whose mixers are others, in the three stages of
MOHAWK (arXiv 2408.10189): the matrices of the mixers, the hidden states behind each layer, the predictions."""

import dataclasses
import math
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from matmix.data.config import DataConfig
from matmix.data.loading.batch import Batch
from matmix.data.loading.loader import Loader
from matmix.data.loading.masking import IGNORED
from matmix.model.config import ModelConfig
from matmix.model.positions import in_one_row
from matmix.train.errors import require
from matmix.train.tasks.base import Loss, forward
from matmix.train.tasks.config import ObjectiveConfig
from matmix.train.tasks.cross_entropy import linear_cross_entropy
from matmix.train.tasks.token_prediction import CausalLM, MaskedLM, TokenPrediction, asked_of


@dataclasses.dataclass(frozen=True, slots=True)
class DistillationOptions:
    stage: Literal["matrices", "hidden", "logits"] = "logits"
    """What is to be as the teacher has it. matrices: those of the mixers, for the teacher's input of each; hidden: what
    each layer makes of the teacher's input of it; logits: the predictions of the whole model."""
    temperature: float = 1.0
    """By what logits are divided, of both models (stage logits)."""

    def __post_init__(self) -> None:
        heat = self.temperature
        require(0 < heat < math.inf, f"objective.options.temperature must be above 0 and finite, got {heat}")


class Distillation(TokenPrediction):
    """Trains a model to be near to another one, which is in eval mode and has no gradients. The loss of training is the
    distance of the stage; that of evaluations is the model's own cross-entropy, as without a teacher."""

    Options = DistillationOptions
    modalities = ("text",)
    takes_teacher = True
    teacher: nn.Module | None = None
    """None in estimates, which are those of the model by itself."""

    def __init__(self, objective: ObjectiveConfig) -> None:
        super().__init__(objective)
        needs = f'objective.name = "{objective.name}" needs a trained model to learn from'
        require(bool(objective.teacher), f"{needs}: set objective.teacher to a run or an export")
        require(not objective.z_loss, f'objective.z_loss is not for objective.name = "{objective.name}": leave it out')

    def make_loader(self, data: DataConfig, *, split: str, **options: Any) -> Loader:
        """Raises ValueError (one line) for rows that the teacher, or a layer by itself, would not see as they are."""
        stage, packing = self.options.stage, self.modality(data).packing(data)
        fits = {"matrices": ("rows",), "hidden": ("rows", "concat")}.get(stage, (packing,))
        words = " or ".join(f'"{word}"' for word in fits)
        require(
            packing in fits,
            f'objective.options.stage = "{stage}" needs data.packing = {words}, not "{packing}"',
        )
        require(not data.carry, "data.carry: a teacher's states are not carried from row to row; set it to false")
        return super().make_loader(data, split=split, **options)

    def learn_from(self, teacher: nn.Module, words: str, student: ModelConfig) -> None:
        theirs, stage = teacher.config, self.options.stage
        alike = ("architecture", "vocab_size", *(() if stage == "logits" else ("d_model", "n_layers")))
        for key in alike:
            there, here = getattr(theirs, key), getattr(student, key)
            both = f"{words} has model.{key} = {there!r}, and the model that learns from it {here!r}"
            require(there == here, f"objective.teacher: {both}; set both to the same")
        mixed = [[mixer is not None for mixer, _ in config.layer_kinds()] for config in (theirs, student)]
        require(
            stage != "matrices" or mixed[0] == mixed[1],
            f'objective.options.stage = "matrices": layers with a mixer are not the same ones as in {words}; '
            "change model.layers, or leave that stage out",
        )
        self.teacher = teacher.eval().requires_grad_(False)

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        if self.teacher is None:
            return super().loss(model, batch)
        asked, stage, streams = asked_of(batch), self.options.stage, []
        with torch.no_grad():
            read = _logits if stage == "logits" else _nothing
            theirs = forward(partial(self.teacher, streams=streams), batch, read)
        blocks = getattr(model, "module", model).blocks  # DeepSpeed's engine stands around the model

        def readout(features: Tensor, weight: Tensor, bias: Tensor | None, **capped: float) -> tuple[Tensor, ...]:
            own = (features.detach(), weight.detach(), None if bias is None else bias.detach())
            correct = linear_cross_entropy(*own, **asked, **capped, fused=not self.captured).correct
            if stage == "logits":
                return self._divergence(_logits(features, weight, bias, **capped), theirs, asked["targets"]), correct
            # Of no row: a zero with gradients, also where sharded weights wait for theirs.
            zero = linear_cross_entropy(features[:0], weight, bias, asked["targets"][:0], **capped).total
            distance = self._between_matrices if stage == "matrices" else self._between_layers
            return zero + self.target_share * distance(blocks, streams, batch), correct

        total, correct = self.forward(model, batch, readout)
        return Loss(total, total.detach(), {"accuracy": correct})

    def _divergence(self, ours: Tensor, theirs: Tensor, targets: Tensor) -> Tensor:
        """The sum over positions (n,) with a target of KL(teacher || model) in nats, times the squared temperature
        (arXiv 1503.02531); logits (n, vocab)."""
        heat = self.options.temperature
        ours, theirs = (logits.div(heat).log_softmax(-1) for logits in (ours, theirs))
        rows = F.kl_div(ours, theirs, reduction="none", log_target=True).sum(-1)
        return heat**2 * (rows * (targets != IGNORED)).sum()

    def _between_layers(self, blocks: nn.ModuleList, streams: list[Tensor], batch: Batch) -> Tensor:
        """The sum over positions, mean over layers, of the squared distance between what a layer and the teacher's make
        of the teacher's stream, as a share of the squared norm of what the teacher's adds to it: that of a layer which
        adds nothing is 1. streams: (B, L, d_model) before the first layer and behind each."""
        if batch.cu_seqlens is not None:
            streams = [in_one_row(stream, None) for stream in streams]
        total = streams[0].new_zeros((), dtype=torch.float32)
        for block, before, after in zip(blocks, streams, streams[1:], strict=False):
            error = (block(before, batch.cu_seqlens, batch.max_seqlen) - after).float().square().sum(-1)
            added = (after - before).float().square().sum(-1)
            total = total + (error / added.clamp(min=torch.finfo(added.dtype).tiny)).sum()
        return total / len(blocks)

    def _between_matrices(self, blocks: nn.ModuleList, streams: list[Tensor], batch: Batch) -> Tensor:
        """The sum over rows of the matrices, mean over heads and layers, of the squared distance between those of a
        layer and of the teacher's for the teacher's stream. streams: as of `_between_layers`."""
        total, mixing = streams[0].new_zeros((), dtype=torch.float32), 0
        for block, teacher, stream in zip(blocks, self.teacher.blocks, streams, strict=False):
            if block.mixer is None:
                continue
            with torch.no_grad():
                theirs = teacher(stream, method="matrix").float()
            ours = block(stream, method="matrix").float()
            heads = f"{block.mixer.name} has {ours.shape[1]} matrices, and the teacher's layer {theirs.shape[1]}"
            alike = ours.shape[1] == theirs.shape[1]
            require(alike, f'objective.options.stage = "matrices": {heads}; give the mixer as many heads')
            rows = (ours - theirs).square().sum(-1).mean(1)
            total, mixing = total + rows.expand(stream.shape[:2]).sum(), mixing + 1
        return total / max(mixing, 1)


class CausalDistillation(Distillation, CausalLM):
    """Of language models."""

    architectures = ("language_model",)


class MaskedDistillation(Distillation, MaskedLM):
    """Of encoders. Predictions are compared where tokens are masked; matrices and layers at all positions, which
    weigh as much together as those that are masked in the mean."""


def _logits(features: Tensor, weight: Tensor, bias: Tensor | None, softcap: float = 0.0) -> Tensor:
    logits = F.linear(features, weight, bias).float()
    return softcap * (logits / softcap).tanh() if softcap else logits


def _nothing(*_: Any, **__: Any) -> None:
    """Reads no predictions."""

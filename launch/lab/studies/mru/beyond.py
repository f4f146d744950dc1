"""Beyond: trained models along texts many times as long as what they were trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from matmix.data.config import DataConfig
from matmix.data.loading.loader import build_loader
from matmix.data.loading.masking import IGNORED
from matmix.launch.lab.studies.mru.growth import curve, overflow
from matmix.launch.lab.studies.mru.runs import finite
from matmix.model import build_model
from matmix.model.config import model_config_from_dict
from matmix.model.mixers.mru import MRU

LENGTH = 8192
"""Tokens that are predicted."""

ROWS = 8
"""Stretches of text, over which losses are averaged."""

BIN = 256
"""Tokens in a point of the curves."""


@torch.no_grad()
def beyond(weights: Path, data: str) -> dict[str, Any]:
    """The loss of a trained model, and the largest log-norm of any of its states, along documents of a dataset.

    Raises ValueError where the dataset has another tokenizer or no document of so many tokens.
    """
    saved = torch.load(weights, weights_only=True)
    model = build_model(model_config_from_dict(saved["model"]))
    model.load_state_dict(saved["state"])
    model.eval()
    tokens = tuple(range(BIN, LENGTH + 1, BIN))
    norms: list[list[float | None]] = []
    overflows: list[int] = []

    def look(mixer: MRU, inputs: tuple[Tensor, ...]) -> None:
        states, _ = mixer.mixed(mixer.elements(inputs[0]))
        norms.append(curve(states, tokens)["largest"])
        if (first := overflow(states)) is not None:
            overflows.append(first)

    for module in model.modules():
        if isinstance(module, MRU):
            module.register_forward_pre_hook(look)
    rows = []
    for ids, labels in documents(data, saved["tokenizer"]):
        rows.append(F.cross_entropy(model(ids).squeeze(0).float(), labels.squeeze(0), reduction="none"))
    losses = torch.stack(rows).mean(0)
    return {
        "tokens": tokens,
        "loss": [finite(value, 4) for value in losses.view(-1, BIN).mean(1).tolist()],
        "start": finite(float(losses[:64].mean()), 4),
        "last_quarter": finite(float(losses[-LENGTH // 4 :].mean()), 4),
        "log_norm_max": [None if None in column else max(column) for column in zip(*norms, strict=True)],
        "overflow": min(overflows, default=None),
    }


def documents(data: str, tokenizer_sha256: str) -> list[tuple[Tensor, Tensor]]:
    """Stretches of LENGTH tokens of the validation split, each within one document, and the tokens to predict: pairs of
    (1, LENGTH) int64."""
    config = DataConfig(path=data, seqlen=LENGTH, workers=0, prefix="bos")
    loader = build_loader(
        config, split="validation", global_batch_size=1, micro_batch_size=1, rank=0, world_size=1, seed=0, masking=None,
        one_pass=True, tokenizer_sha256=tokenizer_sha256,
    )  # fmt: skip
    found: list[tuple[Tensor, Tensor]] = []
    try:
        for batch in loader:
            if len(found) < ROWS and bool((batch.labels != IGNORED).all()):  # nothing predicts where a document begins
                found.append((batch.input_ids, batch.labels))
    finally:
        loader.close()
    if not found:
        raise ValueError(f"{data}: no document of the validation split has {LENGTH + 1:,} tokens; give other --plays")
    return found

"""Texts many times as long as those of the training: how norms of states grow in layers that were not trained, and what
trained models make of them."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from matmix.data.config import DataConfig
from matmix.data.loading.masking import IGNORED
from matmix.data.modalities import build_loader
from matmix.kernels.mru.chunked import log_norms
from matmix.kernels.mru.constructions import CONSTRUCTIONS
from matmix.model import build_model, initialize
from matmix.model.config import model_config_from_dict
from matmix.model.mixers.mru import MRU, MRUConfig
from matmix.studies.mru.runs import finite

LENGTH = 8192
"""Tokens along which norms are followed, and that trained models predict."""
ROWS, BIN = 8, 256
"""Stretches of text over which losses of trained models are averaged, and tokens in a point of their curves."""
STDS = (0.0, 0.03, 0.1, 0.3)
"""Standard deviations of what a token adds to the elements; it starts at 0 and grows in the first steps."""
WIDTH, ORDER = 192, 8
CASES = {
    f"{construction}, {form}": {"construction": construction, "input": form, "gate": "none", "shift": "none"}
    for construction in CONSTRUCTIONS
    for form in ("dense", "chunked")
}
"""Name -> options of the mixer."""


def curve(states: Tensor, tokens: tuple[int, ...]) -> dict[str, list[float | None]]:
    """Returns largest and mean log-norm over rows and heads at these tokens, counted from 1, of (B, L, H, o, o); None
    after an overflow."""
    norms = log_norms(states[:, torch.tensor(tokens) - 1]).transpose(0, 1).flatten(1)
    over = {"largest": norms.amax(1), "mean": norms.mean(1)}
    return {name: [finite(value, 2) for value in values.tolist()] for name, values in over.items()}


def overflow(states: Tensor) -> int | None:
    """Returns the first token, counted from 1, at which a state (B, L, H, o, o) is not finite."""
    bad = ~states.isfinite().all(-1).all(-1).all(-1).all(0)
    return int(bad.int().argmax()) + 1 if bad.any() else None


@torch.no_grad()
def growth(options: dict[str, Any]) -> dict[str, Any]:
    """Norms along two rows of normal inputs, for elements of several sizes."""
    layer = MRU(WIDTH, MRUConfig(order=ORDER, **options), causal=True, max_seqlen=LENGTH, output_std=0.02)
    initialize(layer, 0)
    weight = layer.state_up if options["input"] == "chunked" else layer.in_proj.weight
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(weight.shape, generator=generator)
    x = torch.randn(2, LENGTH, WIDTH, generator=generator)
    still = layer.elements(x)  # what they are before a token adds anything
    weight.copy_(direction)
    direction /= (layer.elements(x) - still).std()
    # Four an octave, as growth may take 10 tokens or 10,000.
    tokens = tuple(sorted({round(2 ** (i / 4)) for i in range(4 * LENGTH.bit_length() - 3)}))
    sizes = {}
    for std in STDS:
        weight.copy_(direction * std)
        states, _ = layer.mixed(layer.elements(x))
        sizes[f"{std:g}"] = {**curve(states, tokens), "overflow": overflow(states)}
    return {"tokens": tokens, "sizes": sizes}


@torch.no_grad()
def beyond(weights: Path, data: str) -> dict[str, Any]:
    """The loss of a trained model, and the largest log-norm of any of its states, along documents of a dataset.

    Raises ValueError where the dataset has another tokenizer or no document of so many tokens.
    """
    saved = torch.load(weights, weights_only=True)
    model = build_model(model_config_from_dict(saved["model"]))
    model.load_state_dict(saved["state"])
    model.eval()
    ends = tuple(range(BIN, LENGTH + 1, BIN))
    norms: list[list[float | None]] = []
    overflows: list[int | None] = []

    def look(mixer: MRU, inputs: tuple[Tensor, ...]) -> None:
        states, _ = mixer.mixed(mixer.elements(inputs[0]))
        norms.append(curve(states, ends)["largest"])
        overflows.append(overflow(states))

    for module in model.modules():
        if isinstance(module, MRU):
            module.register_forward_pre_hook(look)
    rows = documents(data, saved["tokenizer"])
    losses = torch.stack([F.cross_entropy(model(x)[0].float(), y[0], reduction="none") for x, y in rows]).mean(0)
    return {
        "tokens": ends,
        "loss": [finite(value, 4) for value in losses.view(-1, BIN).mean(1).tolist()],
        "start": finite(float(losses[:64].mean()), 4),
        "last_quarter": finite(float(losses[-LENGTH // 4 :].mean()), 4),
        "log_norm_max": [None if None in column else max(column) for column in zip(*norms, strict=True)],
        "overflow": min((first for first in overflows if first), default=None),
    }


def documents(data: str, tokenizer_sha256: str) -> list[tuple[Tensor, Tensor]]:
    """Stretches of LENGTH tokens of the validation split, each within one document, and the tokens to predict: pairs of
    (1, LENGTH) int64."""
    config = DataConfig(path=data, seqlen=LENGTH, workers=0, prefix="bos")
    loader = build_loader(
        config, split="validation", global_batch_size=1, micro_batch_size=1, seed=0, masking=None,
        one_pass=True, tokenizer_sha256=tokenizer_sha256,
    )  # fmt: skip
    with contextlib.closing(loader):
        # Nothing predicts where a document begins.
        whole = ((batch.input_ids, batch.labels) for batch in loader if bool((batch.labels != IGNORED).all()))
        rows = list(itertools.islice(whole, ROWS))
    if not rows:
        raise ValueError(f"{data}: no document of the validation split has {LENGTH + 1:,} tokens; give other --plays")
    return rows

"""`layer`, `encoder` and `language_model`: layers and whole models against the published ones and against attention.

Weights are float32 and products run in bfloat16 under autocast, as in training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from matmix.benchmarks import peers
from matmix.benchmarks.measure import Candidate, Case, Speed, device_of
from matmix.benchmarks.operations import flash_only
from matmix.data.loading.batch import Batch
from matmix.data.loading.masking import IGNORED
from matmix.kernels import gated_norm
from matmix.model import ModelConfig, build_model, initialize
from matmix.model.build import count_parameters
from matmix.model.mixers import MIXERS
from matmix.model.mixers.scans.hydra import Hydra
from matmix.train.activation import compile_blocks, compute_in_bfloat16
from matmix.train.config import ObjectiveConfig
from matmix.train.process.node_folders import use_caches
from matmix.train.recipe import load_config
from matmix.train.tasks import make_task

SIZES = {"tinystories": (8, 4, 8192), "small": (16, 12, 50304)}
"""Name -> order of the states, blocks, words of the vocabulary (GPT-2's 50,257 rounded up to whole tiles)."""
MLP_STEP = 64
"""The GPT's MLPs are a multiple of this wide: whole tiles of matrix units."""


@dataclass(frozen=True, kw_only=True)
class Layer(Speed):
    """One Hydra layer against the published way of computing it and against attention of the same width.

    The published way takes the weights of our layer: convolution by conv1d, reversed copies that double the batch,
    mamba-ssm's SSD, roll, reversal, sum, and mamba-ssm's gated norm.
    """

    with_small: ClassVar[bool] = True
    lengths: str = "128,512,2048,8192,32768,131072"
    """Sequence lengths, L,L,..."""

    def case(self, seqlen: int) -> Case:
        torch.manual_seed(0)
        device = device_of(self.device)
        u, cotangent = (torch.randn(self.batch(seqlen), seqlen, self.d_model, **self.like) for _ in range(2))
        u.requires_grad_()
        hydra, attention = self._mixer("hydra", seqlen), self._mixer("attention", seqlen)
        if self.compile:
            use_caches()

        def candidate(name: str, forward: Callable[[Tensor], Tensor], of: nn.Module = hydra) -> Candidate:
            def run() -> Tensor:
                low = self.dtype != "float32"
                with torch.autocast(device.type, u.dtype, enabled=low), flash_only(device):
                    return forward(u).to(u.dtype)

            leaves = [u, *of.parameters()]
            return Candidate(name=name, run=run, leaves=leaves, cotangent=cotangent, compared=of is hydra)

        candidates = [
            candidate("ours", hydra),
            candidate("ours, compiled", torch.compile(hydra, dynamic=False)),
            candidate("published way (mamba-ssm)", published_layer(hydra, peers.mamba_causal, peers.mamba_norm)),
            candidate("published way, our causal scan", published_layer(hydra, peers.our_causal, gated_norm)),
            candidate("attention layer", attention, attention),
            candidate("attention layer, compiled", torch.compile(attention, dynamic=False), attention),
        ]
        return self.case_of(seqlen, candidates)

    def _mixer(self, name: str, seqlen: int) -> nn.Module:
        mixer = MIXERS[name]
        with torch.device(device_of(self.device)):
            layer = mixer(self.d_model, mixer.Config(), causal=False, max_seqlen=seqlen, output_std=0.02)
        initialize(layer, 0)
        return layer


def published_layer(layer: Hydra, causal: peers.CausalScan, norm: peers.Op) -> Callable[[Tensor], Tensor]:
    """Returns u (batch, seqlen, d_model) -> the same, with the weights of `layer`, as the authors' module goes about
    it. norm: (x, weight, gate) -> rmsnorm(x) weight silu(gate)."""
    mix = peers.flipped(causal)
    vectors = (layer.config.ngroups, layer.config.d_state)

    def forward(u: Tensor) -> Tensor:
        inner, group = layer.form.inner, layer.form.group_width
        widths = [inner, inner + 4 * group, layer.nheads, layer.nheads]
        z, xbc, dt_forward, dt_backward = layer.in_proj(u).split(widths, -1)
        decay = -torch.exp(layer.A_log.float())
        steps = [F.softplus(dt + layer.dt_bias) for dt in (dt_forward, dt_backward)]
        conv, padding = layer.conv1d, layer.config.d_conv // 2
        xbc = F.conv1d(xbc.transpose(1, 2), conv.weight, conv.bias, padding=padding, groups=conv.groups)
        x, *bc = F.silu(xbc.transpose(1, 2)).split([inner, *[group] * 4], -1)
        k_forward, q_forward, k_backward, q_backward = (part.unflatten(-1, vectors) for part in bc)
        diagonal = F.linear(x, layer.fc_D.weight, layer.D)
        v = x.unflatten(-1, (layer.nheads, -1))
        y = mix(v, q_forward, k_forward, q_backward, k_backward, *steps, decay, diagonal)
        return layer.out_proj(norm(y.flatten(-2), layer.norm.weight, z))

    return forward


@dataclass(frozen=True, kw_only=True)
class Step(Speed):
    """Training steps of whole models, forward and backward without the optimizer."""

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of products; training knows no float16."""
    tokens: int = 32768
    """Tokens of a case."""
    layers: int | None = None
    """Depth of all models; default: their own."""

    def check(self) -> None:
        Speed.check(self)
        if self.layers is not None and self.layers < 1:
            raise ValueError(f"--layers {self.layers}: must be 1 or more")

    def step_case(
        self, ids: Tensor, labels: Tensor, models: dict[str, ModelConfig], objective: ObjectiveConfig, kind: str = ""
    ) -> Case:
        """Returns the case of tokens (batch, seqlen), with two candidates per model, the second with compiled
        blocks."""
        select = None if objective.name == "causal_lm" else (labels.flatten() != IGNORED).nonzero().squeeze(1)
        batch = Batch(ids, labels, None, None, ids.shape[1], select, ids.numel()).to(device_of(self.device))
        titles = [(name, config, words) for name, config in models.items() for words in (name, f"{name}, compiled")]
        candidates = [self._step(*one, objective, batch) for one in titles if self.wanted(one[-1])]
        return self.case_of(ids.shape[1], candidates, kind)

    def _step(self, name: str, config: ModelConfig, title: str, objective: ObjectiveConfig, batch: Batch) -> Candidate:
        device = device_of(self.device)
        model = build_model(config, device=device)
        initialize(model, 0)
        if title != name:
            compile_blocks(model, dynamic=False)
        if self.dtype != "float32":
            compute_in_bfloat16(model, device)
        task = make_task(objective, config)
        targets = task.count_targets(batch)

        def run() -> Tensor:
            with flash_only(device):
                return task.loss(model, batch).total / targets

        leaves = list(model.parameters())
        facts = {"parameters": sum(leaf.numel() for leaf in leaves)}
        return Candidate(name=title, run=run, leaves=leaves, compared=name == "ours", record=facts)


@dataclass(frozen=True, kw_only=True)
class Encoder(Step):
    """A training step, forward and backward without the optimizer, of the recipes' Hydra and BERT encoders.

    The models are those of hydra_base_c4 (23 layers of Hydra, 112M parameters) and bert_base_c4 (12 blocks of flash
    attention and MLP), the loss is masked-token prediction at the recipes' 30 % of random tokens.
    """

    lengths: str = "512,8192"
    """Sequence lengths, L,L,..."""

    def cases(self) -> Iterator[Case]:
        recipes = {"ours": load_config("hydra_base_c4"), "BERT, flash attention": load_config("bert_base_c4")}
        objective, models = recipes["ours"].objective, {}
        for name, recipe in recipes.items():
            attention = replace(recipe.model.mixers.attention, nheads=self.d_model // 64)
            sizes = {"d_model": self.d_model, "n_layers": self.layers or recipe.model.n_layers}
            models[name] = replace(recipe.model, mixers=replace(recipe.model.mixers, attention=attention), **sizes)
        for seqlen in self.seqlens:
            torch.manual_seed(0)
            ids = torch.randint(models["ours"].vocab_size, (self.batch(seqlen), seqlen))
            chosen = torch.rand(ids.shape) < objective.masking.probability
            chosen[0, 0] = True
            yield self.step_case(ids, torch.where(chosen, ids, IGNORED), models, objective)


@dataclass(frozen=True, kw_only=True)
class LanguageModel(Step):
    """A training step, forward and backward without the optimizer, of an MRU language model and of a GPT of its size.

    Two sizes: `tinystories` (4 blocks of width 768, 12 heads with 8 x 8 states, 8,192 words) and `small`, like GPT-2
    small (12 blocks of width 768, 50,304 words) with 3 heads of 16 x 16 states. The GPT has flash attention and rotary
    positions in the MRU's place, and MLPs as wide as gives it the same number of parameters. The loss is next-token
    prediction on full sequences.
    """

    lengths: str = "1024,4096,16384"
    """Sequence lengths, L,L,..."""
    size: Literal["both", "tinystories", "small"] = "both"
    """Of the models."""

    def cases(self) -> Iterator[Case]:
        for size in SIZES if self.size == "both" else (self.size,):
            mru = self.mru_model(size)
            gpt = same_size_gpt(mru)
            ours, theirs = (f"{count_parameters(model) / 1e6:.1f}M" for model in (mru, gpt))
            hidden = round(gpt.mlp_ratio * gpt.d_model)
            kind = f"{size}: MRU of {ours}, GPT of {theirs} parameters (MLPs {hidden:,} wide)"
            for seqlen in self.seqlens:
                torch.manual_seed(0)
                ids = torch.randint(mru.vocab_size, (self.batch(seqlen), seqlen))
                labels = F.pad(ids[:, 1:], (0, 1), value=IGNORED)
                yield self.step_case(ids, labels, {"ours": mru, "GPT, flash attention": gpt}, ObjectiveConfig(), kind)

    def mru_model(self, size: str) -> ModelConfig:
        """Returns the model of mru_tinystories with orthogonal state matrices and the size's depth, states and
        vocabulary, in the width and depth asked for."""
        model = load_config("mru_tinystories").model
        order, layers, words = SIZES[size]
        heads = max(1, self.d_model // order**2)
        mru = replace(model.mixers.mru, order=order, nheads=heads, construction="cayley")
        sizes = {"d_model": self.d_model, "n_layers": self.layers or layers, "vocab_size": words}
        return replace(model, mixers=replace(model.mixers, mru=mru), **sizes)


def same_size_gpt(mru: ModelConfig) -> ModelConfig:
    """Returns attention in place of the MRU, and MLPs whose width makes up for the difference in parameters."""
    gpt = replace(mru, layers=("attention",))
    surplus = count_parameters(gpt) - count_parameters(mru)
    width = round(gpt.d_model * gpt.mlp_ratio) - surplus / (2 * gpt.d_model * gpt.n_layers)
    width = max(MLP_STEP, round(width / MLP_STEP) * MLP_STEP)
    return replace(gpt, mlp_ratio=width / gpt.d_model)

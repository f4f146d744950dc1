"""Mixers that know no way to go on from part to part: ranks of a context exchange tokens for heads, or gather keys."""

import pytest
import whole_rows_scenario
from harness import run_distributed

from matmix.model import MixerOptions, ModelConfig
from matmix.model.backbone import check_context
from matmix.model.mixers.attention.packed import numbers_received
from matmix.model.mixers.attention.softmax_attention import AttentionConfig

OF_HEADS = [
    "attention",
    "attention_dd",
    "cauchy_dd",
    "dft",
    "hyena",
    "hyena-residual",
    "s4d",
    "sma_fourier",
    "toeplitz_dd",
    "vandermonde_dd",
]
ATTENTION = {"attention-causal": (2, 8, 8), "attention-five-heads-causal": (5, 4, 4), "attention-one-head": (1, 8, 4)}
"""Numbers of heads, and channels of keys and of values."""


def test_nan_stays_in_its_document():
    names = [*OF_HEADS, *ATTENTION, "hyena-causal", "s4d-causal", "mru", "matrix_memory", "gated_delta", "rwkv7"]
    assert run_distributed(whole_rows_scenario.leaks, 3, arguments=(names,)) == [[]] * 3


@pytest.mark.parametrize("ranks", [2, 3])
def test_attention_sends_what_is_less(ranks):
    """Two or five heads are exchanged on two ranks, five on three; else keys and values are gathered. Where work is
    causal, also if more is sent."""
    counted = run_distributed(whole_rows_scenario.numbers_from_others, ranks, arguments=(list(ATTENTION),))
    exchanging = []
    for (name, (heads, *widths)), *by_rank in zip(ATTENTION.items(), *counted, strict=True):
        by_heads, by_keys = numbers_received(48 // ranks, heads, *widths, ranks)
        least = by_heads if name.endswith("causal") else min(by_heads, by_keys)
        assert max(by_rank) == (by_keys if heads < ranks else least)
        exchanging += [name] * (max(by_rank) == by_heads)
    assert exchanging == ["attention-causal", "attention-five-heads-causal"][ranks - 2 :]


def test_each_rank_keeps_its_share():
    """For the backward pass; but for what grows with the root of the length, or not at all."""
    for shares in run_distributed(whole_rows_scenario.kept, 2, arguments=(OF_HEADS, 1024)):
        assert {name: share for name, share in shares.items() if not share <= 1.1 / 2} == {}


def test_models_count_positions_from_the_beginning_of_a_document():
    """Learned positions of an encoder, rotary ones of a language model."""
    attention = AttentionConfig(headdim=4)
    small = {"vocab_size": 29, "d_model": 24, "n_layers": 2, "layers": ("attention",), "max_seqlen": 32}
    encoder = ModelConfig(**small, mixers=MixerOptions(attention=attention), position_embeddings=True)
    decoder = ModelConfig(**small, mixers=MixerOptions(attention=attention), architecture="language_model")
    for got in run_distributed(whole_rows_scenario.models, 3, arguments=([encoder, decoder],)):
        assert max(got) <= 1e-12


@pytest.mark.parametrize(
    ("architecture", "why"),
    [("text_embedder", "one output for each document"), ("masked_image", "whole images")],
)
def test_models_without_outputs_for_tokens_are_refused(architecture, why):
    config = ModelConfig(architecture=architecture, vocab_size=29, d_model=64, n_layers=1, layers=("attention",))
    with pytest.raises(ValueError, match=rf"^engine.context: {architecture} .*{why}.*$"):
        check_context(config)

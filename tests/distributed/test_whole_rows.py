"""Mixers that know no way to go on from part to part: ranks of a context exchange tokens for heads, or gather keys."""

import pytest
import torch
import whole_rows_scenario
from harness import run_distributed
from nightly import nightly

from matmix.model import MixerOptions, ModelConfig
from matmix.model.backbone import check_context
from matmix.model.mixers.attention.over_ranks import numbers_received
from matmix.model.mixers.attention.softmax_attention import AttentionConfig

ATTENTION = [
    ("attention", {"headdim": 4}, True),
    ("attention", {"headdim": 4, "value_headdim": 2, "position": "xpos"}, False),
    ("attention", {"headdim": 8, "nheads": 1}, True),  # fewer heads than ranks: keys and values are gathered
    ("attention", {"headdim": 8, "nheads": 1, "value_headdim": 4}, False),
    ("attention", {"headdim": 4, "nheads": 5}, True),  # not as many heads on every rank
]
OTHERS = [
    ("s4d", {"d_state": 4}, True),
    ("s4d", {"d_state": 4}, False),
    ("hyena", {"filter_width": 8}, True),
    ("hyena", {"filter_width": 8, "d_conv": 7}, False),
    ("sma_fourier", {"headdim": 8}, False),
    ("attention_dd", {"headdim": 8, "qk_dim": 3}, False),
    ("cauchy_dd", {"headdim": 8, "qk_dim": 3}, False),
    ("dft", {"headdim": 16, "d_conv": 1}, False),  # on four ranks one is left without a head
    ("toeplitz_dd", {"headdim": 8}, False),
    ("toeplitz_dd", {"headdim": 24, "offset": "published"}, False),
    ("vandermonde_dd", {"headdim": 8, "qk_dim": 3}, False),
]
CASES = ATTENTION + OTHERS


@pytest.mark.parametrize("ranks", [nightly(2), 3, nightly(4)])
def test_parts_give_what_whole_rows_give(ranks):
    for got in run_distributed(whole_rows_scenario.differences, ranks, arguments=(CASES, torch.float64)):
        assert {case: far for case, (far, _) in got.items() if not far <= 1e-12} == {}
        assert len(got) == 5 * len(CASES)


def test_parts_in_float32_and_documents_beside_nan():
    for got in run_distributed(whole_rows_scenario.differences, 3, arguments=(CASES, torch.float32)):
        assert {case: far for case, (far, whole) in got.items() if not far <= max(1e-5, 3 * whole)} == {}
    assert run_distributed(whole_rows_scenario.leaks, 3, arguments=(CASES,)) == [[]] * 3


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


def test_attention_sends_what_is_less():
    """12 heads of 64 channels on 4 ranks: three heads of all tokens, or the keys and values of all."""
    assert numbers_received(1000, 12, 64, 64, 4) == (3 * 1000 * 3 * 3 * 64 + 1000 * 9 * 64, 3 * 1000 * 12 * 2 * 64)
    by_heads, by_keys = numbers_received(1000, 3, 64, 64, 2)
    assert by_keys < by_heads

import dataclasses

import pytest
import torch
from failures import each
from torch.utils.flop_counter import FlopCounterMode

from matmix.model import ModelConfig, build_model, flops_per_token
from matmix.model.mixers.attention.softmax_attention import LocalAttention, LocalAttentionConfig


def test_a_window_costs_what_it_sees():
    for seqlen, window in ((1, 3), (4, 3), (5, 3), (9, 3), (40, 8)):
        options = LocalAttentionConfig(headdim=8, window=window)
        near = [[abs(t - s) <= window for s in range(seqlen)] for t in range(seqlen)]
        both = sum(map(sum, near)) / seqlen
        before = sum(sum(row[: t + 1]) for t, row in enumerate(near)) / seqlen
        assert LocalAttention.mixing_flops(32, options, seqlen, False) == pytest.approx(2 * 2 * 32 * both)
        assert LocalAttention.mixing_flops(32, options, seqlen, True) == pytest.approx(2 * 2 * 32 * before)


@each("gate", [False, True])
def test_the_attention_encoder_agrees_with_torchs_counter(small_config, gate):
    config = small_config("encoder", ("attention",), norm="post", mlp_gate=gate)
    model = build_model(config, device="meta")
    ids = torch.zeros(1, 48, dtype=torch.int64, device="meta")
    with FlopCounterMode(display=False) as counter:
        model(ids)
    assert flops_per_token(config, 48) * 48 == counter.get_total_flops()


def test_linear_mixers_cost_the_same_per_token_at_any_length(small_config):
    for config in (small_config(), small_config("encoder", ("hydra",))):
        assert flops_per_token(config, 128) == flops_per_token(config, 65536)
    causal = small_config(layers=("attention",))
    growth = flops_per_token(causal, 2049) - flops_per_token(causal, 1025)
    assert growth == pytest.approx(2 * 2 * 512 * 32 * 3)


def test_the_head_counts_by_the_share_of_tokens_that_reach_it():
    config = ModelConfig(vocab_size=1000, n_layers=1)
    difference = flops_per_token(config, 64) - flops_per_token(config, 64, head_share=0.25)
    assert difference == 0.75 * 2 * 1000 * 256
    assert flops_per_token(dataclasses.replace(config, n_layers=2), 64) > flops_per_token(config, 64)

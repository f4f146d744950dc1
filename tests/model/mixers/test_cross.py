"""Cross mixing of T positions and S others: the fast forms, the matrices, and formulas of a few lines."""

import pytest
import torch
import torch.nn.functional as F
from failures import each

from matmix.model.mixers import MIXERS
from matmix.model.mixers.attention.cross import (
    CrossAttention,
    CrossAttentionConfig,
    CrossLinearAttention,
    CrossLinearAttentionConfig,
)

D_MODEL, D_SOURCE, HEADDIM = 16, 10, 8
MAPS = ("elu", "silu", "silu_norm", "performer", "rfa", "polynomial")


def _make(randomize, feature_map="", d_source=D_SOURCE, **options):
    """Softmax without a feature map."""
    if not feature_map:
        module = CrossAttention(D_MODEL, d_source, CrossAttentionConfig(headdim=HEADDIM, **options))
    else:
        options |= {"feature_map": feature_map, "random_features": 64}
        module = CrossLinearAttention(D_MODEL, d_source, CrossLinearAttentionConfig(headdim=HEADDIM, **options))
    return randomize(module, 0.5, torch.float64)


def _draw(targets=5, sources=9, d_source=D_SOURCE):
    return torch.randn(2, targets, D_MODEL).double(), torch.randn(2, sources, d_source).double()


WEIGHTS = {
    "": lambda q, k: (q @ k / HEADDIM**0.5).exp(),
    "elu": lambda q, k: (F.elu(q) + 1) @ (F.elu(k) + 1),
    "polynomial": lambda q, k: (1 + q @ k / HEADDIM**0.5) ** 2,
}


@each("feature_map", WEIGHTS)
def test_outputs_are_weighted_means_of_the_source(randomize, feature_map):
    """Token by token, with the formulas of the papers."""
    module, (x, source) = _make(randomize, feature_map, bias=True), _draw()
    layers = ((module.q_proj, x), (module.k_proj, source), (module.v_proj, source))
    queries, keys, values = (layer(part)[1].unflatten(-1, (2, HEADDIM)) for layer, part in layers)
    for t in range(5):
        rows = []
        for head in range(2):
            q, k, v = queries[t, head], keys[:, head], values[:, head]
            weights = torch.stack([WEIGHTS[feature_map](q, key) for key in k])
            rows.append((weights.unsqueeze(-1) * v).sum(0) / weights.sum())
        torch.testing.assert_close(module(x, source)[1, t], module.out_proj(torch.cat(rows)), rtol=1e-5, atol=1e-5)


@each("feature_map", ["", *MAPS])
def test_forward_is_matrix_times_values_and_padding_is_not_read(randomize, feature_map):
    """With the gradients of all parameters; the padding is NaN."""
    module, (x, source) = _make(randomize, feature_map), _draw()
    real = torch.arange(9) < torch.tensor([[9], [4]])
    padded = source.masked_fill(~real.unsqueeze(-1), float("nan"))
    for given, mask in ((source, None), (padded, real)):
        v = module.keys_and_values(given, mask)[1]
        matrix = module.matrix(x, given, mask)
        assert matrix.shape == (2, 2, 5, 9)
        y, wanted = module(x, given, mask), module.combine(torch.einsum("bhts,bshp->bthp", matrix, v))
        leaves = list(module.parameters())
        found, expected = ((part, *torch.autograd.grad(part.pow(3).sum(), leaves)) for part in (y, wanted))
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(y[1], module(x[1:], source[1:, :4])[0], rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(module.read(x[:, 2:3], module.memory(padded, real)), y[:, 2:3], rtol=1e-8, atol=1e-9)


def test_a_sequence_that_reads_itself_is_the_mixer(randomize):
    """With the mixer's own weights: bidirectional attention without positions; the last token of linear attention,
    which sees all. Linear attention keeps as much of a long source as of a short one."""
    x, _ = _draw(7)
    attention, linear = (
        randomize(MIXERS[name](D_MODEL, config, causal=causal, max_seqlen=8, output_std=0.02), 0.5, torch.float64)
        for name, config, causal in (
            ("attention", MIXERS["attention"].Config(headdim=HEADDIM, position="none"), False),
            ("linear_attention", MIXERS["linear_attention"].Config(headdim=HEADDIM), True),
        )
    )
    cross, cross_linear = _make(randomize, "", D_MODEL), _make(randomize, "elu", D_MODEL)
    cross.load_state_dict(attention.state_dict())
    cross_linear.load_state_dict(linear.state_dict())
    torch.testing.assert_close(cross(x, x), attention(x))
    torch.testing.assert_close(cross_linear(x[:, -1:], x), linear(x)[:, -1:])
    assert cross_linear.memory(x).shape == cross_linear.memory(x[:, :2]).shape == (2, 2, HEADDIM, HEADDIM + 1)


def test_mistakes_are_one_line(randomize):
    x, source = _draw()
    with pytest.raises(ValueError, match=r"^cross attention: real is torch\.int64 \(2, 9\); give bool \(2, 9\)$"):
        _make(randomize)(x, source, torch.ones(2, 9, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"^cross attention: headdim = 5, nheads = 0 fit no width d_model = 16"):
        CrossAttention(16, 16, CrossAttentionConfig(headdim=5))
    with pytest.raises(ValueError, match=r"^cross attention: feature_map = 'cosformer'; known: elu, silu"):
        _make(randomize, "cosformer")

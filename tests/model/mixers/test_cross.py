"""Cross mixing of T positions and S others: the fast forms, the matrices, and formulas of a few lines."""

import pytest
import torch
import torch.nn.functional as F
from failures import each
from torch import nn

from matmix.model.initialization import initialize
from matmix.model.mixers import MIXERS
from matmix.model.mixers.attention.cross import (
    CrossAttention,
    CrossAttentionConfig,
    CrossLinearAttention,
    CrossLinearAttentionConfig,
)

D_MODEL, D_SOURCE, HEADDIM, SYMBOLS = 16, 10, 8, 8
MAPS = ("elu", "silu", "silu_norm", "performer", "rfa", "polynomial", "taylor")


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
    with pytest.raises(ValueError, match=r"^cross attention: taylor_order = 3: must be even"):
        _make(randomize, "taylor", taylor_order=3)


class _EncoderDecoder(nn.Module):
    """A Hydra layer reads 8 symbols, a causal layer what was written so far, and a cross layer mixes the first into
    the second."""

    def __init__(self, cross):
        super().__init__()
        self.source, self.target = (nn.Embedding(SYMBOLS + 1, D_MODEL) for _ in range(2))
        self.places = nn.Parameter(0.5 * torch.randn(2, 8, D_MODEL))
        kinds = (("hydra", {"headdim": HEADDIM, "d_state": 8}, False), ("linear_attention", {"headdim": HEADDIM}, True))
        self.encoder, self.decoder = (
            MIXERS[name](D_MODEL, MIXERS[name].Config(**options), causal=causal, max_seqlen=8, output_std=0.1)
            for name, options, causal in kinds
        )
        self.cross, self.head = cross, nn.Linear(D_MODEL, SYMBOLS)
        initialize(self.encoder, seed=0)
        initialize(self.decoder, seed=0)

    def forward(self, source, written):
        x = self.source(source) + self.places[0]
        y = self.target(written) + self.places[1, : written.shape[1]]
        x = x + self.encoder(x)
        y = y + self.decoder(y)
        if self.cross is not None:
            y = y + self.cross(F.layer_norm(y, (D_MODEL,)), F.layer_norm(x, (D_MODEL,)))
        return self.head(F.layer_norm(y, (D_MODEL,)))


@pytest.mark.slow
def test_a_decoder_learns_to_read_an_encoder():
    """Of 8 random symbols every second one is written from the end to the beginning: 4 targets for 8 sources. Without
    cross mixing a decoder can only guess."""
    crosses = {
        "softmax": lambda: CrossAttention(D_MODEL, D_MODEL, CrossAttentionConfig(headdim=HEADDIM)),
        "linear": lambda: CrossLinearAttention(D_MODEL, D_MODEL, CrossLinearAttentionConfig(headdim=HEADDIM)),
        "none": lambda: None,
    }
    right = {}
    for name, make in crosses.items():
        torch.manual_seed(0)
        model = _EncoderDecoder(make())
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
        for _ in range(400):
            source = torch.randint(SYMBOLS, (64, 8))
            target = source.flip(1)[:, ::2]
            written = F.pad(target[:, :-1], (1, 0), value=SYMBOLS)
            logits = model(source, written)
            optimizer.zero_grad()
            F.cross_entropy(logits.flatten(0, 1), target.flatten()).backward()
            optimizer.step()
        right[name] = (logits.argmax(-1) == target).float().mean().item()
    assert right["softmax"] > 0.9, right
    assert right["linear"] > 0.9, right
    assert right["none"] < 0.25, right

import itertools

import pytest
import torch
import torch.nn.functional as F
from failures import each
from torch.utils.flop_counter import FlopCounterMode

from matmix.model import build_model, initialize
from matmix.model.flops import flops_by_part
from matmix.model.mixers.structured.butterfly import monarch_matrix
from matmix.model.mixers.structured.channels import CHANNEL_MAPS

MAPS = [
    ("block_diagonal", 12, 30, 3),
    ("btt", 12, 30, 1),
    ("btt", 30, 12, 3),
    ("btt", 7, 10, 2),
    ("low_rank", 12, 30, 5),
    ("monarch", 16, 48, 2),
    ("monarch", 36, 18, 3),
    ("monarch", 16, 16, 4),
]


def make_map(kind, inputs, outputs, size, std=0.02, bias=True):
    layer = CHANNEL_MAPS[kind](inputs, outputs, size, bias=bias, std=std)
    initialize(layer, 0)
    return layer


def entries(kind, layer, inputs, outputs, size):
    """W number by number, from the texts that define it."""
    w = torch.zeros(outputs, inputs, dtype=torch.float64)
    for i, j in itertools.product(range(outputs), range(inputs)):
        if kind == "low_rank":
            w[i, j] = sum(layer.second[i, r] * layer.first[r, j] for r in range(size))
        elif kind == "block_diagonal":
            (block, row), (other, column) = divmod(i, outputs // size), divmod(j, inputs // size)
            w[i, j] = layer.weight[block, row, column] if block == other else 0
        else:
            rows, columns = layer.second.shape[0], layer.first.shape[1]
            a, b = divmod(i, outputs // rows) if kind == "btt" else reversed(divmod(i, rows))
            c, d = divmod(j, columns)
            w[i, j] = layer.second[a, c, :, b] @ layer.first[c, d, a]
    return w


@each("kind, inputs, outputs, size", MAPS)
def test_maps_are_their_matrices(kind, inputs, outputs, size):
    layer = make_map(kind, inputs, outputs, size).double()
    with torch.no_grad():
        layer.bias.normal_()
        torch.testing.assert_close(layer.matrix(), entries(kind, layer, inputs, outputs, size))
    for shape in ((2, 3), (5,), (2, 0), ()):
        x = torch.randn(*shape, inputs, dtype=torch.float64, requires_grad=True)
        of = [x, *layer.parameters()]
        y, wanted = layer(x), F.linear(x, layer.matrix(), layer.bias)
        torch.testing.assert_close(y, wanted)
        weights = torch.randn_like(y)
        found, expected = (torch.autograd.grad((out * weights).sum(), of) for out in (y, wanted))
        torch.testing.assert_close(found, expected)


def test_monarch_is_the_product_of_the_published_factors():
    """blkdiag1 (k, q, p) and blkdiag2 (k, s, q) of k blocks; hidden number n is in block n % k of the second."""
    k, layer = 2, make_map("monarch", 16, 48, 2, bias=False).double()
    first = layer.first.permute(0, 3, 2, 1).flatten(1, 2)
    second = layer.second.permute(0, 3, 1, 2).flatten(2)
    x = torch.randn(5, 16, dtype=torch.float64)
    hidden = torch.einsum("bkp,kqp->bkq", x.view(5, k, -1), first).flatten(1)
    y = torch.einsum("blr,lsr->bls", hidden.view(5, -1, k).mT, second).mT.flatten(1)
    torch.testing.assert_close(layer(x), y)
    square = make_map("monarch", 16, 16, 4)
    factors = square.first.squeeze(-1).mT, square.second.squeeze(2).mT
    torch.testing.assert_close(square.matrix(), monarch_matrix(*(part.unsqueeze(0) for part in factors), 16)[0])


@each("kind, size", [("block_diagonal", 4), ("btt", 1), ("btt", 3), ("low_rank", 16), ("monarch", 4)])
def test_outputs_start_as_large_as_those_of_dense_maps(kind, size):
    x = torch.randn(256, 256)
    for outputs in (64, 1024):
        layer = make_map(kind, 256, outputs, size, std=0.05)
        # What it adds up are hundreds of numbers at the least, more where ranks are high.
        assert layer(x).std().item() == pytest.approx(0.05 * 16, rel=0.15)
        assert sum(p.numel() for name, p in layer.named_parameters() if name != "bias") == CHANNEL_MAPS[kind].weights(
            256, outputs, size
        )


@each("kind", CHANNEL_MAPS)
@each("gate", [False, True])
def test_models_of_them(kind, gate, small_config):
    """They cost what they say, train, and compute in bfloat16 what they do in float32."""
    config = small_config("encoder", ("none",), n_layers=2, mlp=kind, mlp_gate=gate, mlp_bias=True)
    model = build_model(config)
    initialize(model, 0)
    ids = torch.randint(61, (2, 12))
    with FlopCounterMode(display=False) as counter:
        logits = model(ids)
    parts = flops_by_part(config, 12)
    assert parts["mlp"] + parts["readout"] == counter.get_total_flops() / ids.numel()
    logits.square().mean().backward()
    assert all(p.grad.abs().max() > 0 for name, p in model.blocks.named_parameters())
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(ids).float(), logits, rtol=0.05, atol=0.02)
    torch.testing.assert_close(model.bfloat16()(ids).float(), logits, rtol=0.05, atol=0.02)


@each(
    "changes, message",
    [
        ({"mlp": "btt", "mlp_ratio": 0}, "model.mlp = 'btt', but model.mlp_ratio is 0: there are no MLPs"),
        ({"mlp": "block_diagonal", "mlp_blocks": 5}, "model.mlp_blocks = 5 .*: must divide the widths .* 32 and 64"),
        ({"mlp": "monarch", "mlp_blocks": 8}, "model.mlp_blocks = 8 .*: its square must divide the narrower"),
        (
            {"mlp": "btt", "mlp_blocks": 4},
            "model.mlp_blocks is of no use to model.mlp = 'btt', but to block_diagonal and",
        ),
        ({"mlp_rank": 4}, "model.mlp_rank is of no use to model.mlp = 'dense', but to btt and low_rank"),
        ({"mlp": "sparse"}, "model.mlp = 'sparse'; known: dense, block_diagonal"),
    ],
)
def test_impossible_maps_are_refused(changes, message, small_config):
    with pytest.raises(ValueError, match=message):
        small_config(**changes)

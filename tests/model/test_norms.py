"""Norms over the positions of a document."""

import pytest
import torch
import torch.nn.functional as F
from failures import each

from matmix.model.backbone import check_context
from matmix.model.norms import InstanceNorm

WIDTH = 5


@pytest.fixture
def norm():
    made = InstanceNorm(WIDTH, eps=1e-3, bias=True).double()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    return made


def lengths_of(*lengths):
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def test_rows_are_those_of_pytorch(norm):
    x = torch.randn(3, 7, WIDTH, dtype=torch.float64)
    wanted = F.instance_norm(x.mT, weight=norm.weight, bias=norm.bias, eps=norm.eps).mT
    torch.testing.assert_close(norm(x), wanted)


def test_packed_documents_are_normalised_each_by_itself(norm):
    """Empty ones and those of one position too, forward and every gradient."""
    lengths = (4, 0, 1, 9, 1)
    packed = torch.randn(1, sum(lengths), WIDTH, dtype=torch.float64, requires_grad=True)
    alone = packed.detach().clone().requires_grad_()
    outputs = norm(packed, lengths_of(*lengths))
    documents = torch.cat([norm(part) for part in alone.split(lengths, 1) if part.shape[1]], 1)
    torch.testing.assert_close(outputs, documents)
    upstream = torch.randn_like(outputs)
    gradients = [
        torch.autograd.grad(y, (x, *norm.parameters()), upstream) for y, x in ((outputs, packed), (documents, alone))
    ]
    torch.testing.assert_close(*gradients)
    assert torch.equal(outputs[0, 4], norm.bias)


def test_half_precision_is_computed_in_float32(norm):
    x = (100 + torch.randn(2, 64, WIDTH)).bfloat16()
    torch.testing.assert_close(norm.float()(x), norm(x.float()).bfloat16())


@each("architecture", ["encoder", "sequence_classifier"])
def test_neither_neighbours_nor_padding_change_a_document(small_model, architecture):
    """Nor does reading it in a row of its own."""
    kind = {"norm_kind": "instance", "norm_bias": True, "dtype": torch.float64}
    model = small_model(architecture, ("hydra", "attention"), **kind)
    first, second = torch.randint(61, (1, 6)), torch.randint(61, (1, 9))
    packed = model(torch.cat([first, second], 1), cu_seqlens=lengths_of(6, 9))
    padded = torch.cat([F.pad(first, (0, 3)), second])
    mask = torch.tensor([[1] * 6 + [0] * 3, [1] * 9])
    masked = model(padded, attention_mask=mask)
    own = [model(first)[0], model(second)[0]]
    if architecture == "encoder":
        packed, masked = packed[0].split([6, 9]), (masked[0, :6], masked[1])
    torch.testing.assert_close(list(packed), own)
    torch.testing.assert_close(list(masked), own)


def test_every_parameter_learns(small_model):
    model = small_model("sequence_classifier", ("hydra",), norm_kind="instance", norm_bias=True)
    model(torch.randint(61, (4, 12))).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


def test_ranks_cannot_share_its_rows(small_config):
    with pytest.raises(
        ValueError, match=r"context: encoder normalises over whole documents \(model\.norm_kind\); set it to 1$"
    ):
        check_context(small_config("encoder", ("hydra",), norm_kind="instance"))

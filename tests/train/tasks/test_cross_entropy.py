"""The chunked cross-entropy against PyTorch's, values and gradients."""

import pytest
import torch
from failures import each
from torch.nn import functional as F

from matmix.train.tasks import cross_entropy
from matmix.train.tasks.cross_entropy import linear_cross_entropy, row_cross_entropy


def _inputs(rows: int, d_model: int, vocab: int, with_bias: bool):
    generator = torch.Generator().manual_seed(rows)
    features = torch.randn(rows, d_model, generator=generator, requires_grad=True)
    weight = torch.randn(vocab, d_model, generator=generator).div_(4).requires_grad_()
    bias = torch.randn(vocab, generator=generator, requires_grad=True) if with_bias else None
    targets = torch.randint(0, vocab, (rows,), generator=generator)
    targets[::3] = -100
    return features, weight, bias, targets


class _Number(float):
    def to(self, dtype):
        return self


def _logits(features, weight, bias, softcap):
    logits = F.linear(features, weight, bias)
    return softcap * torch.tanh(logits / softcap) if softcap else logits


@each("with_bias", [True, False])
@each("z_loss", [0.0, 1e-2])
@each("softcap", [0.0, 1.5])
@each("rows", [1, 7, 64, 129])
def test_equals_pytorch_in_value_and_gradient(monkeypatch, rows, softcap, z_loss, with_bias):
    monkeypatch.setattr(cross_entropy, "_CHUNK_BYTES", 4 * 50 * 16)  # 16 rows a chunk: several chunks, a ragged last
    features, weight, bias, targets = inputs = _inputs(rows, 12, 50, with_bias)
    result = linear_cross_entropy(features, weight, bias, targets, z_loss=z_loss, softcap=softcap)
    leaves = [tensor for tensor in inputs[:3] if tensor is not None]
    gradients = torch.autograd.grad(result.total * 0.37, leaves)

    logits = _logits(features, weight, bias, softcap)
    kept = targets != -100
    expected = F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
    penalty = (torch.logsumexp(logits, 1).square() * kept).sum()
    expected_gradients = torch.autograd.grad((expected + z_loss * penalty) * 0.37, leaves)

    torch.testing.assert_close(result.loss, expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(result.total, (expected + z_loss * penalty).detach(), rtol=1e-5, atol=1e-5)
    assert result.correct.item() == ((logits.argmax(1) == targets) & kept).sum().item()
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", ["chunked", "fused"])
@pytest.mark.parametrize(("with_bias", "softcap"), [(True, 0.0), (False, 1.5)])
def test_rows_cost_what_pytorch_says(form, with_bias, softcap, monkeypatch, request):
    monkeypatch.setattr(cross_entropy, "_CHUNK_BYTES", 4 * 50 * 16)
    features, weight, bias, targets = _inputs(65, 12, 50, with_bias)
    logits = _logits(features, weight, bias, softcap)
    expected = F.cross_entropy(logits, targets, ignore_index=-100, reduction="none")
    correct = logits.argmax(1) == targets
    if form == "fused":
        device = request.getfixturevalue("interpreter")
        tensors = [None if x is None else x.to(device) for x in (features, weight, bias, targets)]
        if device == "cpu":  # where neither numbers have a type nor CUDA's functions are there
            monkeypatch.setattr("liger_kernel.ops.cross_entropy.tanh", lambda x: 2 * (2 * x).sigmoid() - 1)
            softcap = _Number(softcap)
        with torch.no_grad():
            output = cross_entropy._liger(*tensors, softcap, reduction="none")
        found = output.loss.cpu(), output.token_accuracy.cpu()
    else:
        found = row_cross_entropy(features, weight, bias, targets, softcap=softcap)
        whole = linear_cross_entropy(features, weight, bias, targets, softcap=softcap)
        torch.testing.assert_close(found[0].sum(), whole.loss)
    assert not found[0].requires_grad
    torch.testing.assert_close(found[0], expected.detach(), rtol=1e-4, atol=1e-5)
    assert torch.equal(found[1] > 0, correct)


def test_no_rows_give_zero_loss_and_zero_gradients():
    weight = torch.randn(5, 3, requires_grad=True)
    result = linear_cross_entropy(torch.zeros(0, 3, requires_grad=True), weight, None, torch.zeros(0, dtype=torch.long))
    assert result.total.item() == 0
    (gradient,) = torch.autograd.grad(result.total, [weight])
    assert row_cross_entropy(torch.zeros(0, 3), weight, None, torch.zeros(0, dtype=torch.long))[0].shape == (0,)
    assert torch.equal(gradient, torch.zeros_like(weight))


def test_never_holds_the_logits_of_all_rows(monkeypatch):
    monkeypatch.setattr(cross_entropy, "_CHUNK_BYTES", 4 * 1000 * 8)
    largest = 0
    true_logsumexp = torch.logsumexp

    def watched(tensor, dim):
        nonlocal largest
        largest = max(largest, tensor.numel())
        return true_logsumexp(tensor, dim)

    monkeypatch.setattr(torch, "logsumexp", watched)
    features, weight, bias, targets = _inputs(100, 4, 1000, False)
    linear_cross_entropy(features, weight, bias, targets).total.backward()
    assert largest == 8 * 1000

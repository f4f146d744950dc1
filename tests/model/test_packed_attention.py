import itertools

import pytest
import torch
import torch.nn.functional as F

from matmix.model.packed_attention import attention_by_length, packed_attention

LENGTHS = [1, 40, 2, 3, 33, 0, 17, 16, 1, 64, 5]
BOUNDARIES = list(itertools.accumulate(LENGTHS, initial=0))


def _inputs(dtype=torch.float64, device="cpu"):
    length = BOUNDARIES[-1]
    return [torch.randn(1, length, 3, 8, dtype=dtype, device=device, requires_grad=True) for _ in range(3)]


def _one_by_one(q, k, v, causal):
    outputs = []
    for start, end in itertools.pairwise(BOUNDARIES):
        parts = (part[:, start:end].transpose(1, 2) for part in (q, k, v))
        outputs.append(F.scaled_dot_product_attention(*parts, is_causal=causal).transpose(1, 2))
    return torch.cat(outputs, dim=1)


@pytest.mark.parametrize("causal", [True, False])
def test_documents_of_any_lengths_attend_within_themselves(causal):
    q, k, v = _inputs()
    cu_seqlens = torch.tensor(BOUNDARIES, dtype=torch.int32)
    y = packed_attention(q, k, v, causal=causal, cu_seqlens=cu_seqlens, max_seqlen=64)
    expected = _one_by_one(q, k, v, causal)
    torch.testing.assert_close(y, expected)
    cotangent = torch.randn_like(y)
    gradients = torch.autograd.grad(y, (q, k, v), cotangent)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, (q, k, v), cotangent))


def test_padding_is_at_most_as_much_as_the_tokens(monkeypatch):
    padded = []
    attend = F.scaled_dot_product_attention

    def count(q, *rest, **options):
        padded.append(q.shape[0] * q.shape[2])
        return attend(q, *rest, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", count)
    boundaries = [0, 500, *range(501, 801)]
    q = torch.randn(800, 1, 2)
    assert attention_by_length(q, q, q, boundaries, True, 0.0).shape == q.shape
    assert sum(padded) <= 2 * 800


def test_no_documents_give_no_output():
    q = torch.randn(1, 0, 2, 4)
    cu_seqlens = torch.zeros(1, dtype=torch.int32)
    assert packed_attention(q, q, q, causal=True, cu_seqlens=cu_seqlens).shape == (1, 0, 2, 4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the variable-length flash kernel needs a GPU")
@pytest.mark.parametrize("causal", [True, False])
def test_the_flash_kernel_agrees_with_the_general_form(causal):
    q, k, v = (part.detach().bfloat16() for part in _inputs(torch.float32, "cuda"))
    cu_seqlens = torch.tensor(BOUNDARIES, dtype=torch.int32, device="cuda")
    y = packed_attention(q, k, v, causal=causal, cu_seqlens=cu_seqlens, max_seqlen=64)
    expected = attention_by_length(q[0].float(), k[0].float(), v[0].float(), BOUNDARIES, causal, 0.0)
    torch.testing.assert_close(y[0].float(), expected, rtol=2e-2, atol=2e-2)

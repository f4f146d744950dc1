import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from failures import each

from matmix.model.mixers.attention.packed import attend_near, attention_by_length, packed_attention

LENGTHS = [1, 40, 2, 3, 33, 0, 17, 16, 1, 64, 5]
BOUNDARIES = list(itertools.accumulate(LENGTHS, initial=0))


# Channels of queries and keys, and of values.
WIDTHS = [(8, 8), (4, 8), (8, 4)]


def _inputs(widths=(8, 8), dtype=torch.float64, device="cpu", kv_heads=3):
    of_scores, of_values = widths
    length = BOUNDARIES[-1]
    return [
        torch.randn(1, length, heads, width, dtype=dtype, device=device, requires_grad=True)
        for heads, width in ((3, of_scores), (kv_heads, of_scores), (kv_heads, of_values))
    ]


def _one_by_one(q, k, v, causal, window=0):
    outputs = []
    k, v = (part.expand(-1, -1, 3, -1) for part in (k, v))
    for start, end in itertools.pairwise(BOUNDARIES):
        q_part, k_part, v_part = (part[0, start:end] for part in (q, k, v))
        scores = torch.einsum("thd,shd->hts", q_part, k_part) / math.sqrt(q.shape[-1])
        if causal:
            scores = scores + torch.full_like(scores[0], -math.inf).triu(1)
        if window:
            far = torch.ones_like(scores[0]).triu(window + 1)
            scores = scores.masked_fill((far + far.T).bool(), -math.inf)
        outputs.append(torch.einsum("hts,shp->thp", scores.softmax(-1), v_part))
    return torch.cat(outputs).unsqueeze(0)


@each("widths", WIDTHS)
@each("causal", [True, False])
@each("window", [0, 5, 18])
@each("kv_heads", [1, 3])
def test_documents_of_any_lengths_attend_within_themselves(causal, widths, window, kv_heads):
    q, k, v = _inputs(widths, kv_heads=kv_heads)
    cu_seqlens = torch.tensor(BOUNDARIES, dtype=torch.int32)
    y = packed_attention(q, k, v, causal=causal, cu_seqlens=cu_seqlens, max_seqlen=64, window=window)
    expected = _one_by_one(q, k, v, causal, window)
    torch.testing.assert_close(y, expected)
    cotangent = torch.randn_like(y)
    gradients = torch.autograd.grad(y, (q, k, v), cotangent)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, (q, k, v), cotangent))


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("packed", [True, False])
def test_nothing_as_large_as_the_scores_is_kept(packed, widths):
    (q, k, v), sizes = _inputs(widths, torch.float32), []
    cu_seqlens = torch.tensor([0, BOUNDARIES[-1]], dtype=torch.int32) if packed else None
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
        packed_attention(q, k, v, causal=True, cu_seqlens=cu_seqlens)
    assert 0 < max(sizes) < BOUNDARIES[-1] ** 2 / 4


@each("causal", [True, False])
@each("offset", [0, 3, 40, 150])
def test_some_queries_see_the_keys_of_their_window(causal, offset):
    """As in rows whose other queries are on other ranks, or answered before. The kept numbers grow with the window."""
    q, k, v = (part[:, :182] for part in _inputs())
    mask = torch.ones(182, 182).triu(-7).tril(0 if causal else 7).bool()
    scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(8)
    wanted = torch.einsum("bhts,bshp->bthp", scores.masked_fill(~mask, -math.inf).softmax(-1), v)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
        y = attend_near(q[:, offset : offset + 30], k, v, 7, causal=causal, offset=offset)
    torch.testing.assert_close(y, wanted[:, offset : offset + 30])
    assert max(sizes) <= 2 * (16 + 14) * 3 * 8


def test_padding_is_at_most_as_much_as_the_tokens(monkeypatch):
    padded = []
    attend = F.scaled_dot_product_attention

    def count(q, *rest, **options):
        padded.append(q.shape[0] * q.shape[2])
        return attend(q, *rest, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", count)
    boundaries = torch.tensor([0, 500, *range(501, 801)])
    q = torch.randn(800, 1, 2)
    assert attention_by_length(q, q, q, boundaries, True, 0.0).shape == q.shape
    assert sum(padded) <= 2 * 800


def test_no_documents_give_no_output():
    q = torch.randn(1, 0, 2, 4)
    cu_seqlens = torch.zeros(1, dtype=torch.int32)
    assert packed_attention(q, q, q, causal=True, cu_seqlens=cu_seqlens).shape == (1, 0, 2, 4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the variable-length flash kernel needs a GPU")
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [0, 18])
def test_the_flash_kernel_agrees_with_the_general_form(causal, widths, window):
    q, k, v = (part.detach().bfloat16() for part in _inputs(widths, torch.float32, "cuda"))
    cu_seqlens = torch.tensor(BOUNDARIES, dtype=torch.int32, device="cuda")
    y = packed_attention(q, k, v, causal=causal, cu_seqlens=cu_seqlens, max_seqlen=64, window=window)
    expected = attention_by_length(q[0].float(), k[0].float(), v[0].float(), cu_seqlens, causal, 0.0, window)
    torch.testing.assert_close(y[0].float(), expected, rtol=2e-2, atol=2e-2)

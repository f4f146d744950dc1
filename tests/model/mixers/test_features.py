"""Feature maps: the kernels that their products stand for, and what Nystroem's landmarks stand for."""

import math

import pytest
import torch
import torch.nn.functional as F

from matmix.model.mixers import MIXERS
from matmix.model.mixers.attention.nystroem import pseudo_inverse
from matmix.model.mixers.scans.features import Given, directions, taylor

D = 8


def _attention(randomize, feature_map, **options):
    config = MIXERS["linear_attention"].Config(headdim=D, feature_map=feature_map, **options)
    MIXERS["linear_attention"].check(16, config)
    mixer = MIXERS["linear_attention"](16, config, causal=True, max_seqlen=16, output_std=0.02)
    return randomize(mixer, 0.5, torch.float64)


KERNELS = {
    "performer": lambda q, k: (q @ k.mT / D**0.5).exp(),
    "rfa": lambda q, k: (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT - 1).exp(),
    "cosformer": lambda q, k: q.relu() @ k.relu().mT * _cosines(q.shape[0]),
    "polynomial": lambda q, k: (1 + q @ k.mT / D**0.5) ** 2,
    "taylor": lambda q, k: sum((q @ k.mT / D**0.5) ** power / math.factorial(power) for power in range(5)),
}


def _cosines(length):
    place = torch.arange(length, dtype=torch.float64)
    return (torch.pi / 2 * (place[:, None] - place) / 16).cos()


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [("performer", 0.1), ("rfa", 0.05), ("cosformer", 1e-12), ("polynomial", 1e-12), ("taylor", 1e-12)],
)
def test_products_of_features_are_the_kernel_of_the_paper(randomize, name, tolerance):
    """Up to a factor for each query, which the sums of rows take off: the weights of 16 tokens."""
    mixer = _attention(randomize, name, random_features=8192, taylor_order=4)
    q, k = 0.7 * torch.randn(2, 16, 1, D, dtype=torch.float64)
    phi_q, phi_k = mixer.features(q, k, mixer.turns(16, None, q.device))
    products = phi_q[:, 0] @ phi_k[:, 0].mT, KERNELS[name](q[:, 0], k[:, 0])
    got, wanted = (weights / weights.sum(-1, keepdim=True) for weights in products)
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance * wanted.max().item())


def test_the_series_of_exp_comes_to_softmax(randomize):
    """Each product of powers has one feature, and with their number errors of the weights fall as the series' do."""
    q, k = torch.randn(2, 16, 1, 4, dtype=torch.float64)
    softmax, errors = (q[:, 0] @ k[:, 0].mT / 2).softmax(-1), []
    for order in (2, 4, 8, 16):
        given = Given(True, 0, 0.0, order)
        phi_q, phi_k = (taylor(part, given)[:, 0] for part in (q, k))
        assert phi_q.shape[-1] == math.comb(4 + order, order)
        weights = phi_q @ phi_k.mT
        assert weights.min() > 0
        errors.append((weights / weights.sum(-1, keepdim=True) - softmax).abs().max().item())
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-6


def test_random_directions_are_orthogonal_and_differ():
    w = directions(20, 7, torch.zeros((), dtype=torch.float64))
    for block in (w[:7], w[7:14]):
        products = block @ block.mT
        torch.testing.assert_close(products, products.diag().diag(), rtol=0, atol=1e-12)
    assert torch.linalg.matrix_rank(w[5:12]) == 7
    many = directions(4096, 16, w)
    assert many.mean(0).abs().max() < 0.05
    for power, mean in ((2, 1), (4, 3), (6, 15)):  # those of Gaussian numbers
        assert abs((many**power).mean() / mean - 1) < 0.1


@torch.no_grad()
def test_cosformers_state_goes_on_without_positions(randomize):
    """From token to token, in place, and in packed documents that go on from states of their own."""
    mixer, x = _attention(randomize, "cosformer"), torch.randn(2, 12, 16, dtype=torch.float64)
    whole, state = mixer(x), mixer.initial_state(2)
    _, state = mixer.forward_with_state(x[:, :5], state)
    again, _ = mixer.forward_with_state(x[:, 5:8].reshape(1, 6, 16), state, torch.tensor([0, 3, 6], dtype=torch.int32))
    torch.testing.assert_close(again.view(2, 3, 16), whole[:, 5:8])
    for t in range(5, 12):
        torch.testing.assert_close(mixer.step_in_place(x[:, t], state), whole[:, t])


def test_cosformer_refuses_documents_beyond_its_reach(randomize):
    mixer, x = _attention(randomize, "cosformer"), torch.randn(1, 17, 16, dtype=torch.float64)
    said = r"^model\.mixers\.linear_attention\.reach = 16: documents of 17 tokens [^\n]*$"
    for call in (
        lambda: mixer(x),
        lambda: mixer(x, torch.tensor([0, 17], dtype=torch.int32), 17),
        lambda: mixer.forward_with_state(x, mixer.initial_state(1)),
    ):
        with pytest.raises(ValueError, match=said):
            call()
    mixer(x, torch.tensor([0, 16, 17], dtype=torch.int32), 16)


def test_nystroem_is_attention_where_every_span_is_of_equal_tokens(randomize):
    """Tokens that come in runs are their own means: M is then softmax attention, as A^+ is the inverse."""
    kind = MIXERS["nystroem"]
    config = kind.Config(headdim=8, landmarks=4, iterations=30)
    mixer = randomize(kind(16, config, causal=False, max_seqlen=16, output_std=0.02), 0.5, torch.float64)
    x = torch.randn(2, 4, 16, dtype=torch.float64)
    q, k, v = (mixer.heads(layer, x).transpose(1, 2) for layer in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
    wanted = mixer.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))
    for runs in ([3, 3, 3, 3], [1, 1, 1, 1]):  # of few tokens it is attention itself
        counts = torch.tensor(runs)
        y = mixer(x.repeat_interleave(counts, 1))
        torch.testing.assert_close(y, wanted.repeat_interleave(counts, 1), rtol=1e-5, atol=1e-6)
    a = torch.rand(2, 5, 5, dtype=torch.float64).softmax(-1)
    torch.testing.assert_close(pseudo_inverse(a, 40) @ a, torch.eye(5, dtype=torch.float64).expand(2, 5, 5))


def test_hashing_finds_what_stands_near_in_one_of_the_orders(randomize):
    """Entry by entry: hashes, orders and chunks are made in Python; what two rounds find counts once."""
    kind, length = MIXERS["lsh_attention"], 19
    config = kind.Config(headdim=8, rounds=3, buckets=4, chunk=3)
    mixer = randomize(kind(16, config, causal=False, max_seqlen=16, output_std=0.02), 0.5, torch.float64)
    x = torch.randn(1, length, 16, dtype=torch.float64)
    q = mixer.qk_proj(x)[0].view(length, 2, 8)
    R = directions(6, 8, q).view(3, 2, 8)
    expected = torch.zeros(2, length, length, dtype=torch.float64)
    for head in range(2):
        near = set()
        for turn in R:
            sides = [[*(turn @ token), *(-turn @ token)] for token in q[:, head]]
            order = sorted(range(length), key=lambda t: (max(range(4), key=sides[t].__getitem__), t))
            chunk = {token: place // 3 for place, token in enumerate(order)}
            near |= {(i, j) for i in chunk for j in chunk if i != j and abs(chunk[i] - chunk[j]) <= 1}
        assert len(near) < length * (length - 1)
        for i, j in near:
            expected[head, i, j] = (q[i, head] @ q[j, head] / q[j, head].norm()).exp()
    expected /= expected.sum(-1, keepdim=True)
    torch.testing.assert_close(mixer.matrix(x)[0], expected)
    torch.testing.assert_close(mixer(x), mixer.combine(mixer.mix(expected[None], mixer.values(x)), x))


def test_lara_is_the_estimate_of_its_paper(randomize):
    """Term by term: Gaussian densities and xi are written out, and the mean of each span is taken in Python."""
    kind, length, spans = MIXERS["lara"], 11, 4
    config = kind.Config(headdim=8, landmarks=spans)
    mixer = randomize(kind(16, config, causal=False, max_seqlen=16, output_std=0.02), 0.5, torch.float64)
    x = torch.randn(1, length, 16, dtype=torch.float64)
    queries, keys = (layer(x)[0].view(length, 2, 8) / 8**0.25 for layer in (mixer.q_proj, mixer.k_proj))

    def normal(w, mean):
        return (-(w - mean).square().sum() / 2).exp() / (2 * math.pi) ** 4

    def xi(y, w):
        return (w @ y - y @ y / 2).exp()

    noise, expected = directions(spans, 8, x), torch.zeros(2, length, length, dtype=torch.float64)
    for head in range(2):
        q, k = queries[:, head], keys[:, head]
        members = [[t for t in range(length) if t * spans // length == span] for span in range(spans)]
        near_q, near_k = (torch.stack([part[each].mean(0) for each in members]) for part in (q, k))
        w = near_q + near_k + noise
        for i in range(length):
            t = torch.softmax(near_q @ q[i], 0)
            for c in range(spans):
                densities = [normal(w[c], mean) for mean in near_q + near_k]
                a = (densities[c] / sum(densities) + t[c] - t.mean()).clamp(min=1e-8)
                a = a * normal(w[c], torch.zeros_like(w[c])) / densities[c]
                expected[head, i] += torch.stack([a * xi(q[i], w[c]) * xi(key, w[c]) for key in k])
    expected /= expected.sum(-1, keepdim=True)
    torch.testing.assert_close(mixer.matrix(x)[0], expected)
    torch.testing.assert_close(mixer(x), mixer.combine(mixer.mix(expected[None], mixer.values(x)), x))


def test_lara_comes_nearer_to_softmax_with_more_directions(randomize):
    kind, errors = MIXERS["lara"], []
    mixer = kind(16, kind.Config(headdim=8), causal=False, max_seqlen=16, output_std=0.02)
    mixer, x = randomize(mixer, 0.15, torch.float64), torch.randn(4, 512, 16, dtype=torch.float64)
    q, k = (mixer.heads(layer, x).transpose(1, 2) for layer in (mixer.q_proj, mixer.k_proj))
    softmax = (q @ k.mT / 8**0.5).softmax(-1)
    for landmarks in (4, 32, 256):
        mixer.config = kind.Config(headdim=8, landmarks=landmarks)
        errors.append(((mixer.matrix(x) - softmax).norm() / softmax.norm()).item())
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < errors[0] / 2

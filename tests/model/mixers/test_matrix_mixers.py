"""What the matrix mixers promise besides what every mixer does."""

import math

import pytest
import torch

from matmix.model.initialization import initialize
from matmix.model.mixers import MIXERS
from matmix.model.mixers.structured import matrix_mixer
from matmix.model.mixers.structured.matrix_mixer import MatrixMixer

NAMES = [name for name, mixer in MIXERS.items() if issubclass(mixer, MatrixMixer)]
ANY_LENGTH = [name for name in NAMES if not MIXERS[name].fixed_length]
DELICATE = [name for name in NAMES if name.startswith(("cauchy", "toeplitz", "vandermonde"))]
D_MODEL = 16


@pytest.fixture
def make():
    def build(name, length=12, dtype=torch.float32, std=0.4, **options):
        config = MIXERS[name].Config
        small = {"headdim": 8, "qk_dim": 4, "d_state": 4} | options
        config = config(**{key: value for key, value in small.items() if key in config.__dataclass_fields__})
        MIXERS[name].check(D_MODEL, config)
        mixer = MIXERS[name](D_MODEL, config, causal=False, max_seqlen=length, output_std=0.02)
        initialize(mixer, 0)
        if std:
            with torch.no_grad():
                for parameter in mixer.parameters():
                    parameter.copy_(torch.randn(parameter.shape) * std)
                mixer.norm.weight.add_(1)
        return mixer.to(dtype).eval()

    return build


FORMULAS = {
    "the papers' code": ("cauchy_dd", {}, lambda q, k, i, j, b: 1 / (q.exp() + k.exp() + 2 * b + 1e-8)),
    "their code with a pole": (
        "cauchy_dd",
        {"guard": 0.0, "b": -0.8},
        lambda q, k, i, j, b: 1 / (q.exp() + k.exp() + 2 * b + 1e-8),
    ),
    "the text": ("cauchy_dd", {"denominator": "difference", "b": 20}, lambda q, k, i, j, c: 1 / (q - k + c)),
    "the text with a pole": (
        "cauchy_dd",
        {"denominator": "difference", "guard": 0.0, "b": 0.1},
        lambda q, k, i, j, c: 1 / (q - k + c),
    ),
    "cos - cos": (
        "vandermonde_dd",
        {},
        lambda q, k, i, j, _: torch.cos(2e-3 * math.pi * q * j) - torch.cos(2e-3 * math.pi * k * i),
    ),
    "whole turns": (
        "vandermonde_dd",
        {"eps": 1.0},
        lambda q, k, i, j, _: torch.cos(2 * math.pi * q * j) - torch.cos(2 * math.pi * k * i),
    ),
    "powers": (
        "vandermonde_dd",
        {"angle": "power", "std": 0.1},
        lambda q, k, i, j, _: torch.cos(2 * math.pi * q**j) - torch.cos(2 * math.pi * k**i),
    ),
    "cos + cos": (
        "vandermonde_di",
        {"eps": 1.0, "combination": "sum"},
        lambda q, k, i, j, _: torch.cos(2 * math.pi * q * j) + torch.cos(2 * math.pi * k * i),
    ),
}
"""Name -> mixer, options and b or c, and the term of q_id, k_jd, i, j and b or c as it is written."""


@pytest.mark.parametrize("name", FORMULAS)
def test_entries_are_the_formula(make, name):
    """In float64, entry by entry, and the fast algorithm with them."""
    mixer_name, options, term = FORMULAS[name]
    b = options.get("b", 2.0)
    options = {key: value for key, value in options.items() if key != "b"}
    length, width = 11, 3
    mixer = make(mixer_name, length, torch.float64, qk_dim=width, **options)
    x = torch.randn(1, length, D_MODEL, dtype=torch.float64)
    with torch.no_grad():
        if mixer_name == "cauchy_dd":
            next(mixer.matrix_mixer.parameters()).fill_(b)
        _, v, inputs = mixer.parts(x, None)
        q, k = mixer.queries_and_keys(inputs)
        found = mixer.matrix(x)[0]
        y = mixer(x)
    scale = math.sqrt((2 if mixer_name.startswith("vandermonde") else 1) * length * width)
    expected = torch.eye(length, dtype=torch.float64).repeat(mixer.nheads, 1, 1)
    for i in range(length):
        for j in range(length):
            expected[:, i, j] += term(q[0, i], k[0, j], i, j, b).sum(-1) / scale
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(y, mixer.combine(mixer.mix(expected[None], v), x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("length", [12, 13, 16])
def test_monarch_is_two_block_diagonal_factors_with_permutations(make, length):
    mixer = make("monarch", length, torch.float64)
    first, second = mixer.matrix_mixer.blkdiag1[0], mixer.matrix_mixer.blkdiag2[0]
    rows, columns = first.shape[:2]
    assert abs(rows - columns) <= 1
    assert 0 <= rows * columns - length < rows
    identity = torch.eye(rows * columns, dtype=torch.float64).view(rows, columns, -1)
    by_columns = identity.transpose(0, 1).flatten(0, 1)
    product = by_columns.T @ torch.block_diag(*second) @ by_columns @ torch.block_diag(*first)
    expected = product[:length, :length] + torch.eye(length)
    torch.testing.assert_close(mixer.matrix(torch.randn(1, length, D_MODEL).double())[0, 0], expected)


def test_butterfly_is_a_product_of_factors_that_mix_pairs(make):
    mixer = make("butterfly", 13, torch.float64)
    product = torch.eye(16, dtype=torch.float64)
    for s, blocks in enumerate(mixer.matrix_mixer.twiddle[1]):
        factor = torch.zeros(16, 16, dtype=torch.float64)
        lower = [position for position in range(16) if not position >> s & 1]
        for pair, position in enumerate(lower):
            places = torch.tensor([position, position + 2**s])
            factor[places[:, None], places] = blocks[pair]
        product = factor @ product
    x = torch.randn(1, 13, D_MODEL).double()
    torch.testing.assert_close(mixer.matrix(x)[0, 1], product[:13, :13] + torch.eye(13))
    torch.testing.assert_close(mixer(x), mixer.combine(mixer.mix(mixer.matrix(x), mixer.values(x)), x))


def test_a_kaleidoscope_is_made_of_products_of_a_butterfly_and_a_transposed_one(make):
    mixer = make("butterfly", 13, torch.float64, kaleidoscope=1)
    pair = [make("butterfly", 16, torch.float64) for _ in range(2)]
    x, product = torch.randn(1, 16, D_MODEL).double(), []
    for one, twiddle in zip(pair, mixer.matrix_mixer.twiddle.chunk(2, 1), strict=True):
        one.matrix_mixer.twiddle = torch.nn.Parameter(twiddle)
        product.append(one.matrix(x)[0] - torch.eye(16))
    found = mixer.matrix(x[:, :13])[0] - torch.eye(13)
    torch.testing.assert_close(found, (product[1] @ product[0].mT)[:, :13, :13])


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_learns_from_the_first_step(make, name):
    mixer = make(name, 16, std=0)
    x, cotangent = torch.randn(2, 16, D_MODEL), torch.randn(2, 16, D_MODEL)
    (mixer(x) * cotangent).sum().backward()
    for key, parameter in mixer.named_parameters():
        assert parameter.grad.isfinite().all(), key
        assert parameter.grad.abs().max() > 1e-6, key
    matrix = mixer.matrix(x)
    between = matrix - torch.diag_embed(matrix.diagonal(dim1=-2, dim2=-1))
    assert between.abs().amax((-1, -2)).min() > 1e-7  # tokens mix in every head


@pytest.mark.parametrize("name", DELICATE)
def test_delicate_matrices_stay_in_float32_under_autocast(make, name):
    mixer = make(name)
    x = torch.randn(2, 12, D_MODEL)
    _, v, inputs = mixer.parts(x, None)
    expected, whole = mixer.mix_values(v, inputs), mixer(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(mixer.mix_values(v, inputs), expected)
        half = mixer(x)
    assert half.dtype == torch.bfloat16
    assert (half - whole).abs().max() < 0.03 * whole.abs().max()


@pytest.mark.parametrize("name", DELICATE)
def test_delicate_matrices_are_exact_for_bf16_inputs(make, name):
    """At a length whose positions bf16 cannot count; the definition in float64 takes the same rounded numbers."""
    mixer = make(name, 512, torch.bfloat16, std=0)
    with torch.no_grad():
        _, v, inputs = mixer.parts(torch.randn(1, 512, D_MODEL).bfloat16(), None)
        assert {part.dtype for part in (v, *inputs)} == {torch.bfloat16}
        y = mixer.mix_values(v, inputs)
        v, inputs = v.double(), tuple(part.double() for part in inputs)
        expected = mixer.mix(mixer.double().entries(v, inputs), v)
    assert (y - expected).norm() < 1e-5 * expected.norm()


def test_a_bias_that_would_make_a_pole_is_guarded(make):
    mixer = make("cauchy_dd", 12, torch.float64)
    x = torch.randn(2, 12, D_MODEL, dtype=torch.float64)
    _, v, inputs = mixer.parts(x, None)
    q, k = (part.exp() for part in mixer.queries_and_keys(inputs))
    sums = q[:, :, None] + k[:, None]
    with torch.no_grad():
        mixer.matrix_mixer.bias.fill_(-(sums.min() - mixer.config.guard) / 2 + 1e-9)
    legal = (1 / (sums + 2 * mixer.matrix_mixer.bias + 1e-8)).sum(-1).permute(0, 3, 1, 2) * mixer.scale()
    torch.testing.assert_close(mixer.entries(v, inputs), legal)  # below 0, but no denominator is small
    values = []
    for bias in (-(sums.median().item()) / 2, -3.0):
        with torch.no_grad():
            mixer.matrix_mixer.bias.fill_(bias)
        mixer.zero_grad()
        mixer(x).square().sum().backward()
        assert all(parameter.grad.isfinite().all() for parameter in mixer.parameters())
        assert mixer.matrix_mixer.bias.grad.abs() > 1e-9
        values.append(mixer.entries(v, inputs).min())
    assert min(values) > 0


@pytest.mark.parametrize("above", ["c_i", "c_j"])
@pytest.mark.parametrize("transition", ["scalar", "full"])
def test_quasiseparable_matrices_by_their_definition(make, transition, above):
    """c_i^T A_i ... A_(j+1) b_j, delta_i and c_i^T A_i ... A_(j-1) b_j, or c_j^T A_j ... A_(i+1) b_i, over more than
    one chunk, from A, b and c of each direction; and A from what it is made of."""
    length, N = 21, 3
    options = {"formula": "elementwise", "transition": transition, "above": above}
    mixer = make("quasiseparable_dd", length, torch.float64, d_state=N, **options)
    x, one = torch.randn(1, length, D_MODEL, dtype=torch.float64), torch.eye(N, dtype=torch.float64)
    with torch.no_grad():
        _, v, inputs = mixer.parts(x, None)
        B_f, C_f, B_b, C_b, direct = (part[0] for part in inputs)
        own, H = mixer.matrix_mixer, mixer.nheads
        dt = torch.log1p((direct[:, : 2 * H].view(length, 2, H) + own.dt_bias).exp())
        sides = []
        for side, (B, C) in enumerate(((B_f, C_f), (B_b, C_b))):
            a = dt[:, side, :, None] * own.A_log[side].exp().view(H, -1)  # (L, H, 1 or N)
            A = torch.diag_embed((-a).exp().expand(-1, -1, N))
            if transition == "full":
                skew = torch.zeros(length, H, N, N, dtype=torch.float64)
                rows, columns = torch.tril_indices(N, N, -1)
                elements = direct[:, 2 * H :].view(length, 2, -1, H)[:, side]
                skew[..., rows, columns] = elements.mT
                skew = skew - skew.mT
                A = A @ torch.linalg.solve(one - skew, one + skew)
            sides.append((A, B[:, None] * dt[:, side, :, None], C))
        delta = v[0].flatten(1) @ own.fc_D.weight.T + own.D
        expected = torch.zeros(H, length, length, dtype=torch.float64)
        for h in range(H):
            for i in range(length):
                expected[h, i, i] = delta[i, h]
                (A, b, c), product = sides[0], one
                for j in reversed(range(i)):
                    product = product @ A[j + 1, h]
                    expected[h, i, j] = c[i] @ product @ b[j, h]
                (A, b, c), product = sides[1], one
                for j in range(i + 1, length):
                    product = product @ A[j - 1, h] if above == "c_i" else A[j, h] @ product
                    expected[h, i, j] = c[i] @ product @ b[j, h] if above == "c_i" else c[j] @ product @ b[i, h]
        torch.testing.assert_close(mixer.matrix(x)[0], expected, rtol=1e-9, atol=1e-11)
        y = mixer.combine(mixer.mix(expected[None], v), x)
        torch.testing.assert_close(mixer(x), y, rtol=1e-9, atol=1e-11)


def test_differences_near_zero_and_large_powers_are_bounded(make):
    """Terms are 1 / x outside of +-0.01 and at most 100 inside; powers give no NaN, not even as gradients."""
    mixer = make("cauchy_dd", 12, torch.float64, denominator="difference")
    x = torch.tensor([-3, -0.011, -0.005, 0, 0.005, 0.011, 3], dtype=torch.float64)
    expected = torch.tensor([-1 / 3, -1 / 0.011, -50, 0, 50, 1 / 0.011, 1 / 3], dtype=torch.float64)
    torch.testing.assert_close(mixer.reciprocal(x), expected)
    wide = make("cauchy_dd", 12, denominator="difference", guard=2.0).reciprocal(x)
    torch.testing.assert_close(wide[[0, 1, 6]], torch.tensor([-1 / 3, -0.011 / 4, 1 / 3], dtype=torch.float64))
    assert make("cauchy_dd", 12, denominator="difference", guard=0.0).reciprocal(x)[3].isinf()
    mixer = make("vandermonde_dd", 80, angle="power", std=2.0)
    x = torch.randn(1, 80, D_MODEL)
    assert mixer.queries_and_keys(mixer.parts(x, None)[2])[0].abs().max() > 10  # whose powers float32 has not
    mixer(x).square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in mixer.parameters())


@pytest.mark.parametrize("name", ["cauchy_dd", "cauchy_di", "vandermonde_dd", "vandermonde_di"])
def test_blocks_of_rows_change_nothing(make, name, monkeypatch):
    results = []
    for numbers in (matrix_mixer.BLOCK_NUMBERS, 500):
        monkeypatch.setattr(matrix_mixer, "BLOCK_NUMBERS", numbers)
        torch.manual_seed(3)
        mixer = make(name, 13, torch.float64)
        x = torch.randn(2, 13, D_MODEL, dtype=torch.float64, requires_grad=True)
        y = mixer(x)
        y.square().sum().backward()
        results.append([y, x.grad, *(parameter.grad for parameter in mixer.parameters())])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("name", [*ANY_LENGTH, "attention_di"])
def test_nothing_as_large_as_the_matrix_is_kept(make, name):
    length = 256
    mixer, sizes = make(name, length), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
        mixer(torch.randn(1, length, D_MODEL))
    assert max(sizes) < mixer.nheads * length * length / 4

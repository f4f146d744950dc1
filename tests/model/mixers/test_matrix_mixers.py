"""What the matrix mixers promise besides what every mixer does."""

import math

import pytest
import torch

from matmix.model.initialization import initialize
from matmix.model.mixers import MIXERS
from matmix.model.mixers.structured import matrix_mixer
from matmix.model.mixers.structured.cauchy import SMALLEST_DENOMINATOR
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


def test_vandermonde_of_parameters_by_definition(make):
    mixer = make("vandermonde_di", 11, torch.float64, std=60.0, qk_dim=3)
    q, k = mixer.matrix_mixer.q_bias, mixer.matrix_mixer.k_bias
    expected = torch.eye(11, dtype=torch.float64).repeat(mixer.nheads, 1, 1)
    for i in range(11):
        for j in range(11):
            terms = torch.cos(2e-3 * math.pi * q[:, :, i] * j) - torch.cos(2e-3 * math.pi * k[:, :, j] * i)
            expected[:, i, j] += terms.sum(1) / math.sqrt(2 * 11 * 3)
    x = torch.randn(1, 11, D_MODEL, dtype=torch.float64)
    torch.testing.assert_close(mixer.matrix(x)[0], expected)
    torch.testing.assert_close(mixer(x), mixer.combine(mixer.mix(expected[None], mixer.values(x)), x))


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
        mixer.matrix_mixer.bias.fill_(-(sums.min() - SMALLEST_DENOMINATOR) / 2 + 1e-9)
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

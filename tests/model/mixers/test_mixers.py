"""Proofs that every registered mixer has to pass, in every form (tests/support/models/mixer_cases.py)."""

import copy
import dataclasses
import math

import pytest
import torch
from flop_count import FlopCount, cost_class
from mixer_cases import CASES, D_MODEL, VARIANTS
from nightly import nightly

from matmix.model import MixerOptions, ModelConfig, build_model
from matmix.model.interop.export.generation_state import map_state
from matmix.model.mixers import MIXERS

WITHOUT_PARAMETERS = {"fnet"}
COMPLEXITIES = ("O(L)", "O(L log L)", "O(L^1.5)", "O(L^2)")


def _select(condition, variants_by_day=False):
    """The cases for which `condition` holds; those with other options than the defaults run at night where a proof
    depends on them less than `test_forward_is_matrix_times_values` and its like do."""
    return [
        nightly(name, condition=not variants_by_day and name.removesuffix("-causal") in VARIANTS)
        for name, case in CASES.items()
        if condition(case)
    ]


MAIN = _select(lambda case: True)
ALIGNED = _select(lambda case: case.kind.sequence_aligned)
CAUSAL = _select(lambda case: case.causal, variants_by_day=True)
ANY_LENGTH = _select(lambda case: not case.kind.fixed_length)


@pytest.fixture
def make(randomize):
    """Builds a case with random weights, away from the initial ones, where zeros would hide errors."""

    def build(name, dtype=torch.float32, max_seqlen=8):
        return randomize(CASES[name].build(max_seqlen=max_seqlen), dtype=dtype).eval()

    return build


def _draw(*shape, dtype=torch.float64):
    return torch.randn(*shape, D_MODEL, dtype=dtype)


def _assert_close(y, expected, tolerance=1e-5):
    torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance * expected.abs().max().item())


@pytest.mark.parametrize("name", MAIN)
def test_facts_are_as_stated(make, name):
    kind = CASES[name].kind
    assert kind.name == CASES[name].mixer
    assert kind.causal_form or kind.bidirectional_form
    assert kind.complexity in COMPLEXITIES
    # What grows with the data alone knows no length of its own, and the other way round.
    assert not (kind.sequence_aligned and kind.fixed_length)
    assert kind.data_dependent or not kind.sequence_aligned
    assert all(field.default is not dataclasses.MISSING for field in dataclasses.fields(kind.Config))
    check_causality(make, name)
    check_dependence_on_the_data(make, name)
    check_cost(name)
    if kind.block_rank(CASES[name].config) is not None:
        check_block_rank(make(name, torch.float64, max_seqlen=32))
    if kind.fixed_length:
        check_fixed_length(make(name, max_seqlen=8))


@pytest.mark.parametrize("name", CASES)
def test_forward_is_matrix_times_values(make, name):
    """At every length that a mixer takes, which may be longer than the one it was made for."""
    for length, dtype in ((1, torch.float64), (2, torch.float64), (13, torch.float64), (13, torch.float32)):
        mixer = make(name, dtype, max_seqlen=length if CASES[name].kind.fixed_length else 8)
        x = _draw(2, length, dtype=dtype)
        expected = mixer.combine(mixer.mix(mixer.matrix(x), mixer.values(x)), x)
        _assert_close(mixer(x), expected, 1e-8 if dtype == torch.float64 else 1e-5)


def check_causality(make, name):
    """Which tokens an output depends on, by the Jacobian."""
    length = 7
    mixer = make(name, torch.float64, max_seqlen=length)
    x = _draw(1, length).requires_grad_()
    y = mixer(x)
    weights = torch.randn_like(y[0, 0])
    influence = torch.stack(
        [torch.autograd.grad(y[0, t] @ weights, x, retain_graph=True)[0][0].norm(dim=-1) for t in range(length)]
    )
    reach = mixer.reach(mixer.config, mixer.causal)
    seen = torch.ones(length, length).bool()
    if reach is not None:
        assert reach < length - 1  # or else nothing is shown
        seen = seen.triu(-reach).tril(reach)
    if mixer.causal:
        seen = seen.tril()
    # Not 0 where transforms over the whole sequence leave traces of rounding.
    assert (influence[~seen] <= 1e-14 * influence.max()).all()
    assert (influence[seen] > 1e-12).all()


def check_dependence_on_the_data(make, name):
    mixer = make(name, torch.float64, max_seqlen=9)
    one, other = (mixer.matrix(_draw(1, 9)) for _ in range(2))
    assert torch.equal(one, other) is not mixer.data_dependent


@pytest.mark.parametrize("name", ALIGNED)
def test_the_matrix_is_aligned_with_the_sequence(make, name):
    """The upper left corner of M is M of the first tokens."""
    mixer = make(name, torch.float64)
    x, length = _draw(2, 15), 10
    inside = length - (0 if mixer.causal else mixer.halo(mixer.config))
    whole, prefix = (mixer.matrix(part)[:, :, :inside, :inside] for part in (x, x[:, :length]))
    if mixer.row_normalized:
        skip = mixer.holds_identity * torch.eye(inside)
        whole, prefix = ((m - skip) / (m - skip).sum(-1, keepdim=True) for m in (whole, prefix))
    assert prefix.abs().max() > 0
    _assert_close(whole, prefix, 1e-6)


def check_block_rank(mixer):
    bound = mixer.block_rank(mixer.config)
    m = mixer.matrix(_draw(1, 32))
    for block in (m[..., 16:, :16], *([] if mixer.causal else [m[..., :16, 16:]])):
        singular = torch.linalg.svdvals(block)
        assert singular[..., 0].max() > 0  # of pairs of scans, one sees nothing on this side
        assert (singular[..., bound:] <= 1e-12 * singular[..., :1]).all()


@pytest.mark.parametrize("name", MAIN)
def test_parameters_and_the_input_get_their_gradients(make, name):
    check_gradients_of_parameters(name)
    check_gradient_of_the_input(make, name)


def check_gradients_of_parameters(name):
    """Looks at the second step from the initial weights: some of them may be zero in the first."""
    mixer = CASES[name].build(max_seqlen=11).train()
    assert any(True for _ in mixer.parameters()) is (CASES[name].mixer not in WITHOUT_PARAMETERS)
    if CASES[name].mixer in WITHOUT_PARAMETERS:
        return
    torch.manual_seed(1)
    x, cotangent = _draw(2, 11, dtype=torch.float32), _draw(2, 11, dtype=torch.float32)
    optimizer = torch.optim.SGD(mixer.parameters(), lr=1.0)
    for _ in range(2):
        optimizer.zero_grad()
        (mixer(x) * cotangent).sum().backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in mixer.parameters() if p.grad is not None])
        gradients = {key: parameter.grad for key, parameter in mixer.named_parameters()}
        with torch.no_grad():
            for gradient in gradients.values():
                gradient *= 0.1 / norm
        optimizer.step()
    for key, gradient in gradients.items():
        assert gradient is not None, key
        assert gradient.isfinite().all(), key
        assert gradient.abs().max() > 0, key


def check_gradient_of_the_input(make, name):
    mixer = make(name, torch.float64, max_seqlen=5)
    x, direction = _draw(1, 5).requires_grad_(), _draw(1, 5)
    cotangent = _draw(1, 5)
    (gradient,) = torch.autograd.grad((mixer(x) * cotangent).sum(), x)
    step = 1e-6
    with torch.no_grad():
        difference = (mixer(x + step * direction) - mixer(x - step * direction)) / (2 * step)
    _assert_close((gradient * direction).sum(), (difference * cotangent).sum(), 1e-5)


@pytest.mark.parametrize("name", CAUSAL)
def test_steps_and_pieces_equal_the_parallel_form(make, name):
    mixer = make(name, torch.float64)
    x = _draw(3, 10)
    y = mixer(x)
    state = mixer.initial_state(3)
    # Within a window positions count from another token, and angles are of float32.
    close = 1e-6 if hasattr(mixer.config, "window") else 1e-8
    buffer = torch.empty_like(x[:, 0])  # which states must not keep
    for t in range(4):
        y_t, state = mixer.step(buffer.copy_(x[:, t]), state)
        _assert_close(y_t, y[:, t], close)
    kept = state
    y_rest, state = mixer.forward_with_state(x[:, 4:9], state)
    _assert_close(y_rest, y[:, 4:9], close)
    y_last, _ = mixer.step(x[:, 9], state)
    _assert_close(y_last, y[:, 9], close)
    y_again, _ = mixer.forward_with_state(x[:, 4:9], kept)  # the given state was left as it is
    assert torch.equal(y_again, y_rest)
    if getattr(mixer.config, "order", 0) != 2:  # whose states are corners of larger ones
        map_state(_assert_alone, state)


def _assert_alone(tensor):
    """It keeps nothing of a text in memory but itself."""
    assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor


@pytest.mark.parametrize("name", ANY_LENGTH)
def test_packed_documents_are_mixed_one_by_one(make, name):
    """One of them is empty. With the gradients of the input and of all parameters."""
    mixer = make(name, torch.float64)
    lengths = [1, 7, 2, 16, 9, 0, 3, 13, 8]
    x = (_draw(1, sum(lengths)) * 0.3).requires_grad_()
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    clean = mixer(x, cu_seqlens, max(lengths))
    separate = torch.cat([mixer(document) for document in x.split(lengths, dim=1) if document.shape[1]], dim=1)
    _assert_close(clean, separate)
    leaves = [x, *mixer.parameters()]
    packed, alone = (torch.autograd.grad(y.pow(3).sum(), leaves, materialize_grads=True) for y in (clean, separate))
    for gradient, expected in zip(packed, alone, strict=True):
        _assert_close(gradient, expected)
    # Nothing leaks into another document, not even a rounding.
    changed, there = x.detach().clone(), slice(10, 26)
    changed[:, there] += 30 * _draw(1, 16)
    y = mixer(changed, cu_seqlens, max(lengths))
    assert not torch.isclose(y[:, there], clean[:, there]).all(-1).any()
    assert torch.equal(y[:, :10], clean[:, :10])
    assert torch.equal(y[:, 26:], clean[:, 26:])


@pytest.mark.parametrize("name", ANY_LENGTH)
def test_boundaries_that_do_not_bound_the_row_are_refused_in_one_line(make, name):
    mixer = make(name)
    for batch, bounds, said in (
        (2, [0, 3, 8], "cu_seqlens needs batch 1, got 2"),
        (1, [0, 3, 6], "cu_seqlens runs from 0 to 6; it must run from 0 to 8"),
        (1, [0, 5, 3, 8], "cu_seqlens decreases somewhere"),
    ):
        with pytest.raises(ValueError, match=f"^{mixer.name}: {said}[^\n]*$"):
            mixer(_draw(batch, 8, dtype=torch.float32), cu_seqlens=torch.tensor(bounds, dtype=torch.int32))


@pytest.mark.parametrize("name", ANY_LENGTH)
def test_padded_rows_equal_rows_alone(name, randomize):
    case = CASES[name]
    config = ModelConfig(
        architecture="language_model" if case.causal else "encoder",
        layers=(case.mixer,),
        mixers=MixerOptions(**{case.mixer: case.config}),
        d_model=D_MODEL,
        n_layers=1,
        vocab_size=13,
        mlp_ratio=0,
    )
    model = randomize(build_model(config)).eval()
    ids = torch.randint(13, (2, 9))
    mask = torch.arange(9) < torch.tensor([[4], [9]])
    with torch.no_grad():
        padded = model(ids, attention_mask=mask)
        _assert_close(padded[0, :4], model(ids[:1, :4])[0])
        _assert_close(padded[1], model(ids[1:])[0])


def check_fixed_length(mixer):
    assert mixer(_draw(1, 8, dtype=torch.float32)).shape == (1, 8, D_MODEL)
    for length in (7, 9):
        with pytest.raises(ValueError, match=f"{mixer.name} has parameters for sequences of exactly .* 8"):
            mixer(_draw(1, length, dtype=torch.float32))
        with pytest.raises(ValueError, match="max_seqlen = 8"):
            mixer.check_seqlen(mixer.config, length, 8)
    with pytest.raises(ValueError, match=r'data\.packing = "rows"'):
        mixer(_draw(1, 8, dtype=torch.float32), torch.tensor([0, 3, 8], dtype=torch.int32), 5)


@pytest.mark.parametrize("name", MAIN)
def test_bfloat16_stays_close(make, name):
    """Autocast, against float32; then weights of bfloat16, against float32 from the same rounded weights and inputs."""
    check_autocast(make, name)
    check_weights_of_bfloat16(name)


def check_autocast(make, name):
    mixer = make(name, max_seqlen=40)
    x = 0.3 * _draw(2, 40, dtype=torch.float32)
    with torch.no_grad():
        exact = mixer(x)
        with torch.autocast("cpu", torch.bfloat16):
            y = mixer(x)
    assert y.isfinite().all()
    assert (y.float() - exact).norm() < 0.05 * exact.norm()


def check_weights_of_bfloat16(name):
    """The length is one whose positions bfloat16 cannot count. The weights are the initial ones: with random ones,
    states would grow without bound where transitions are not contractions."""
    mixer = CASES[name].build(max_seqlen=300).bfloat16()
    x = _draw(1, 300, dtype=torch.bfloat16)
    with torch.no_grad():
        y = mixer(x)
        exact = mixer.float()(x.float())
    assert y.dtype == torch.bfloat16
    assert (y.float() - exact).norm() < 0.05 * exact.norm()


def check_cost(name):
    case, costs = CASES[name], []
    for length in (256, 1024, 4096):
        mixer = case.build(max_seqlen=length, device="meta")
        with FlopCount() as count:
            mixer(torch.empty(1, length, D_MODEL, device="meta"))
        costs.append(count)
    assert cost_class([count.total for count in costs]) == case.complexity
    # What is planned with: a least estimate (causal attention needs half of its scores, scans need no chunks).
    stated = 4096 * case.kind.flops_per_token(D_MODEL, case.config, 4096, case.causal)
    assert 0.35 * costs[-1].products < stated < 1.15 * costs[-1].total


# -- facts of single mixers ------------------------------------------------------------------------------------------


def _completed_diagonal(m):
    """For M (L, L): the diagonal that entries below it imply if the lower triangle with its diagonal is semiseparable,
    plus the same from above: for a middle token j, M[j, <j] pinv(M[>j, <j]) M[>j, j]."""
    middle = range(6, m.shape[0] - 6)

    def implied(lower):
        return torch.stack(
            [lower[j, :j] @ torch.linalg.pinv(lower[j + 1 :, :j], rtol=1e-9) @ lower[j + 1 :, j] for j in middle]
        )

    return implied(m.tril(-1)) + implied(m.mT.tril(-1)), m.diagonal()[6:-6]


@pytest.mark.parametrize(
    ("name", "free"),
    [
        ("bidirectional_add", False),
        ("bidirectional_add_diagonal", True),
        ("hydra", True),
        ("quasiseparable_dd", True),
    ],
)
def test_adding_two_scans_leaves_no_free_diagonal(make, name, free):
    """What the paper says of Add (arXiv 2407.09941): its diagonal follows from the rest of the matrix."""
    m = make(name, torch.float64, max_seqlen=24).matrix(_draw(1, 24))[0, 0]
    implied, diagonal = _completed_diagonal(m)
    assert torch.allclose(implied, diagonal, rtol=1e-4) is not free


@pytest.mark.parametrize("name", ["hydra", "quasiseparable_dd"])
def test_off_diagonal_blocks_reach_their_rank(make, name):
    m = make(name, torch.float64).matrix(_draw(1, 20))
    for block in (m[..., 10:, :10], m[..., :10, 10:]):
        singular = torch.linalg.svdvals(block)
        assert (singular[..., 3] > 1e-12 * singular[..., 0]).all()


def test_learned_initial_states_restart_at_every_document(randomize):
    config = MIXERS["hydra"].Config(headdim=8, d_state=4, learnable_init_states=True)
    hydra = randomize(MIXERS["hydra"](D_MODEL, config, causal=False, max_seqlen=64, output_std=0.02))
    x = _draw(1, 12, dtype=torch.float32)
    y = hydra(x, torch.tensor([0, 4, 12], dtype=torch.int32), 8)
    separate = torch.cat([hydra(x[:, :4]), hydra(x[:, 4:])], dim=1)
    torch.testing.assert_close(y, separate, rtol=1e-5, atol=1e-6)
    y.square().sum().backward()
    assert hydra.init_states.grad.abs().max() > 1e-6


@pytest.mark.parametrize("name", ANY_LENGTH)
def test_not_even_nan_leaks_into_another_document(make, name):
    """Neither in the outputs nor in the gradients."""
    mixer = make(name)
    x, cu_seqlens = _draw(1, 24, dtype=torch.float32), torch.tensor([0, 5, 13, 24], dtype=torch.int32)
    others = torch.tensor([*range(5), *range(13, 24)])

    def results(x):
        x = x.clone().requires_grad_()
        y = mixer(x, cu_seqlens, 11)
        return [found.index_select(1, others) for found in (y, *torch.autograd.grad(y.square().sum(), x))]

    clean = results(x)
    x[:, 5:13] = float("nan")
    for got, wanted in zip(results(x), clean, strict=True):
        _assert_close(got, wanted)


def test_mru_states_are_float32_under_autocast(make):
    mixer = make("mru-bias")
    x = _draw(1, 300, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        matrices = mixer.state_matrices(x)
        y = mixer(x)
    assert matrices.dtype == torch.float32
    assert (matrices @ matrices.mT - torch.eye(4)).abs().max() < 1e-5
    assert y.isfinite().all()


def test_mru_reports_norms_and_overflow(make):
    mixer = make("mru-identity-wide")
    mixer(_draw(1, 5, dtype=torch.float32))
    assert set(mixer.monitor()) == {"log_norm_max", "log_norm_mean"}
    assert all(norm.isfinite() for norm in mixer.monitor().values())
    x = torch.full((1, 3000, D_MODEL), 3.0)
    mixer(x)
    assert not mixer.monitor()["log_norm_max"].isfinite()
    with pytest.raises(OverflowError, match="identity_plus"):
        mixer.forward_with_state(x, mixer.initial_state(1))


def test_attention_dropout_is_off_in_eval_mode(randomize):
    config = MIXERS["attention"].Config(headdim=8, dropout=0.5)
    attention = randomize(MIXERS["attention"](D_MODEL, config, causal=True, max_seqlen=64, output_std=0.02))
    x, cu_seqlens = _draw(1, 12, dtype=torch.float32), torch.tensor([0, 5, 12], dtype=torch.int32)
    assert not torch.equal(attention(x, cu_seqlens), attention(x, cu_seqlens))
    attention.eval()
    assert torch.equal(attention(x, cu_seqlens), attention(x, cu_seqlens))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", MAIN)
def test_transforms_of_torch_func_follow_a_layer(make, name):
    """Gradients of each sample by vmap over grad, and a row of the Jacobian, as call by call."""
    mixer = make(name, torch.float64)
    x, parameters = _draw(2, 8), dict(mixer.named_parameters())
    detached = {key: value.detach() for key, value in parameters.items()}

    def loss(given, sample):
        return torch.func.functional_call(mixer, given, (sample.unsqueeze(0),)).square().sum()

    found = torch.func.vmap(torch.func.grad(loss), (None, 0))(detached, x)
    copy.deepcopy(mixer)  # which takes no tensor of a transform that is over
    for number, sample in enumerate(x if parameters else ()):
        wanted = torch.autograd.grad(loss(parameters, sample), list(parameters.values()), materialize_grads=True)
        for gradients, expected in zip(found.values(), wanted, strict=True):
            _assert_close(gradients[number], expected, 1e-9)
    row = torch.func.jacrev(lambda x: mixer(x)[0, -1, :1])(x)[0]
    again = x.clone().requires_grad_()
    _assert_close(row, torch.autograd.grad(mixer(again)[0, -1, 0], again)[0], 1e-9)


MISTAKES = [
    ("gated_delta", {"headdim": 5}, "headdim = 5 does not divide"),
    ("gated_delta", {"headdim": 8, "d_conv": 1}, "d_conv = 1: must be from 2 to 9"),
    ("attention", {"headdim": 4, "kv_heads": 3}, "kv_heads = 3: must divide the 4 heads"),
    ("attention", {"headdim": 4, "kv_heads": -1}, "kv_heads = -1"),
    ("local_attention", {"headdim": 4, "window": 0}, "window = 0: must be at least 1"),
    ("rwkv7", {"headdim": 5}, "headdim = 5 does not divide"),
    ("rwkv7", {"headdim": 8, "chunk_size": 256}, "chunk_size = 256: must be from 1 to 128"),
    ("vandermonde_dd", {"headdim": 8, "eps": 0.0}, "eps = 0.0: must be above 0"),
    ("cauchy_dd", {"headdim": 8, "guard": -1.0}, "guard = -1.0: must be 0"),
    ("cauchy_dd", {"headdim": 8, "denominator": "sum"}, "denominator = 'sum'; known: exponential, difference"),
    ("quasiseparable_dd", {"headdim": 8, "transition": "full"}, "transition = 'full': needs formula"),
    ("quasiseparable_dd", {"headdim": 8, "above": "c_j"}, "above = 'c_j': needs formula"),
    (
        "quasiseparable_dd",
        {"headdim": 8, "transition": "full", "formula": "elementwise"},
        "d_state = 64: must be from 2 to 32",
    ),
    ("s4", {"d_state": 7}, "d_state = 7: must be even"),
    ("s6", {"d_conv": 1}, "d_conv = 1: must be from 2 to 9"),
    ("h3", {"d_conv": 1}, "d_conv = 1: must be from 2 to 9"),
    ("s4d", {"d_state": 7}, "d_state = 7: must be even"),
    ("s4d", {"dt_min": 0.2}, "dt_min = 0.2: must be above 0 and at most dt_max = 0.1"),
    ("tnn", {"decay": 1.5}, "decay = 1.5: must be above 0 and at most 1"),
    ("ckconv", {"filter_layers": 0}, "filter_layers = 0: must be at least 1"),
    ("hyena", {"d_conv": 4}, "d_conv = 4: must be odd"),
    ("hyena", {"filter_features": 2}, "filter_features = 2: must be odd"),
    ("linformer", {"headdim": 8, "rank": 0}, "rank = 0: must be at least 1"),
    ("butterfly", {"headdim": 8, "kaleidoscope": -1}, "kaleidoscope = -1: must be at least 0"),
    ("mlp_mixer", {"token_mlp_ratio": 0}, "token_mlp_ratio = 0: must be above 0"),
    ("lion_lit", {"headdim": 5}, "headdim = 5 does not divide d_model = 16"),
    ("lion_d", {"headdim": 4, "eps": 0.0}, "eps = 0.0"),
    ("lion_d", {"headdim": 4, "form": "rnn"}, "form = 'rnn'; known: auto, attention, chunked, recurrent"),
    ("lion_s", {"headdim": 4, "gate_offset": 2}, "gate_offset = 2"),
    ("sma_decay", {"headdim": 5}, "headdim = 5 does not divide d_model = 16"),
    ("sma_fourier", {"headdim": 4, "contraction": "cubic"}, "contraction = 'cubic'"),
    ("sma_causal", {"headdim": 4, "nheads": -1}, "nheads = -1"),
    ("semiseparable", {"headdim": 4, "d_conv": 1}, "d_conv = 1"),
    ("semiseparable", {"headdim": 3}, "headdim = 3 does not divide"),
    ("semiseparable", {"headdim": 4, "ngroups": 3}, "ngroups = 3 does not divide the 8 heads"),
    ("semiseparable", {"headdim": 4, "chunk_size": 20}, "chunk_size = 20"),
    ("bidirectional_mult", {"headdim": 4, "d_conv": 4}, "d_conv = 4: must be odd"),
    ("bidirectional_add", {"headdim": 4, "dt_min": 0.2}, "dt_min = 0.2"),
    ("bidirectional_concat", {"d_state": 0}, "d_state = 0"),
    ("linear_attention", {"headdim": 4, "feature_map": "silu"}, "normalize = True"),
    ("linear_attention", {"headdim": 4, "feature_map": "relu"}, "feature_map = 'relu'"),
    ("linear_attention", {"headdim": 4, "feature_map": "performer", "normalize": False}, "normalize = False"),
    ("linear_attention", {"headdim": 4, "feature_map": "cosformer", "eps": 0.0}, "eps = 0.0"),
    ("lion_d", {"headdim": 4, "random_features": -1}, "random_features = -1"),
    ("linear_attention", {"headdim": 4, "feature_map": "taylor", "taylor_order": 3}, "taylor_order = 3: must be even"),
    ("sma_fourier", {"headdim": 4, "contraction": "associative"}, "contraction = 'associative'"),
    ("sma_graph", {"headdim": 4, "graph": "tree", "branches": 1}, "branches = 1: must be at least 2"),
    ("lara", {"headdim": 4, "landmarks": 0}, "landmarks = 0: must be at least 1"),
    ("lsh_attention", {"headdim": 4, "buckets": 5}, "buckets = 5: must be even"),
    ("nystroem", {"headdim": 4, "landmarks": 0}, "landmarks = 0: must be at least 1"),
    ("retnet", {"headdim": 5, "nheads": 1}, "headdim = 5: must be even"),
    ("retnet", {"headdim": 6}, "headdim = 6 does not divide d_model = 16"),
    ("attention", {"headdim": 4, "rope_base": 0.0}, "rope_base = 0.0: must be above 0"),
    ("local_attention", {"headdim": 4, "rope_base": -1.0}, "rope_base = -1.0: must be above 0"),
    ("retnet", {"headdim": 4, "rope_base": math.nan}, "rope_base = nan: must be above 0"),
    ("retnet", {"headdim": 4, "norm_eps": -1.0}, "norm_eps = -1.0: must be 0 or more"),
    ("attention", {"headdim": 4, "dropout": 1.5}, "dropout = 1.5: must be at least 0 and below 1"),
    ("local_attention", {"headdim": 4, "dropout": -1.0}, "dropout = -1.0: must be at least 0 and below 1"),
    ("mru", {"dropout": 1.0}, "dropout = 1.0: must be at least 0 and below 1"),
    ("vandermonde_di", {"headdim": 8, "eps": math.inf}, "eps = inf: must be above 0, and finite"),
    ("hyena", {"sine_frequency": math.nan}, "sine_frequency = nan: must be finite"),
    ("ckconv", {"sine_frequency": math.inf}, "sine_frequency = inf: must be finite"),
    ("mlp_mixer", {"token_mlp_ratio": math.inf}, "token_mlp_ratio = inf: must be above 0, and finite"),
    ("hydra", {"headdim": 4, "dt_limit_high": -1.0}, r"dt_limit_high = -1.0: must be 0 \(none\) or more"),
    ("hydra", {"headdim": 4, "dt_limit_high": math.nan}, "dt_limit_high = nan: must be 0"),
]


def test_options_that_do_not_fit_are_one_line():
    for name, options, message in MISTAKES:
        with pytest.raises(ValueError, match=rf"^model\.mixers\.{name}\.{message}") as error:
            MIXERS[name].check(D_MODEL, MIXERS[name].Config(**options))
        assert "\n" not in str(error.value)

import pytest
import torch

from matmix.model.mixers import MIXERS
from matmix.model.mixers.attention import AttentionConfig
from matmix.model.mixers.hydra import HydraConfig
from matmix.model.mixers.mru import MRUConfig

D_MODEL = 32
CASES = {
    "hydra": ("hydra", HydraConfig(headdim=8, d_state=4), False),
    "hydra-groups": (
        "hydra",
        HydraConfig(headdim=4, d_state=3, ngroups=4, expand=1, d_conv=3, bias=True),
        False,
    ),
    "hydra-limited-steps": (
        "hydra",
        HydraConfig(headdim=8, d_state=4, conv_bias=False, dt_limit_low=0.6, dt_limit_high=0.8),
        False,
    ),
    "mru-ldu": ("mru", MRUConfig(order=4, construction="ldu"), True),
    "mru-cayley": ("mru", MRUConfig(order=4, construction="cayley", bias=True), True),
    "mru-identity-wide": ("mru", MRUConfig(order=4, nheads=4, construction="identity_plus"), True),
    "mru-narrow": ("mru", MRUConfig(order=4, nheads=1, construction="ldu"), True),
    "mru-householder": ("mru", MRUConfig(order=4, construction="householder"), True),
    "mru-newton-schulz": ("mru", MRUConfig(order=4, construction="ldu_newton_schulz"), True),
    "mru-padded": ("mru", MRUConfig(order=2, nheads=8, construction="qr", decay=True), True),
    "attention-causal": ("attention", AttentionConfig(headdim=8), True),
    "attention": ("attention", AttentionConfig(headdim=8, value_headdim=4, nheads=3, bias=True), False),
    "attention-xpos": ("attention", AttentionConfig(headdim=8, position="xpos"), True),
    "attention-without-positions": ("attention", AttentionConfig(headdim=8, position="none"), False),
}
CAUSAL = [name for name, case in CASES.items() if case[2]]


@pytest.fixture
def make(randomize):
    def build(case, dtype=torch.float32):
        name, config, causal = CASES[case]
        MIXERS[name].check(D_MODEL, config)
        mixer = MIXERS[name](D_MODEL, config, causal=causal, max_seqlen=64, output_std=0.02)
        return randomize(mixer, dtype=dtype).eval()

    return build


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("length", [1, 2, 13])
def test_forward_is_matrix_times_values(make, case, length):
    mixer = make(case, torch.float64)
    x = torch.randn(2, length, D_MODEL, dtype=torch.float64)
    expected = mixer.combine(mixer.mix(mixer.matrix(x), mixer.values(x)), x)
    torch.testing.assert_close(mixer(x), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("case", CASES)
def test_causality_is_as_stated(make, case):
    mixer = make(case)
    assert mixer.causal_form if mixer.causal else mixer.bidirectional_form
    x = torch.randn(1, 9, D_MODEL)
    changed = x.clone()
    changed[:, 6:] += 1
    early, late = (mixer(changed) - mixer(x)).abs().amax(-1)[0].split([6, 3])
    assert late.min() > 1e-5
    if mixer.causal:
        assert early.max() < 1e-6
    else:
        assert early.min() > 1e-6


@pytest.mark.parametrize("case", CAUSAL)
def test_the_matrix_is_aligned_with_the_sequence(make, case):
    mixer = make(case)
    assert mixer.sequence_aligned
    x = torch.randn(1, 9, D_MODEL)
    prefix = mixer.matrix(x[:, :5])
    torch.testing.assert_close(mixer.matrix(x)[:, :, :5, :5], prefix, rtol=1e-5, atol=1e-6)


def test_off_diagonal_blocks_of_hydra_have_rank_d_state(make):
    mixer = make("hydra", torch.float64)
    m = mixer.matrix(torch.randn(1, 20, D_MODEL, dtype=torch.float64))
    for block in (m[..., 10:, :10], m[..., :10, 10:]):
        singular = torch.linalg.svdvals(block)
        assert (singular[..., 4:].amax(-1) < 1e-12 * singular[..., 0]).all()
        assert (singular[..., 3] > 1e-12 * singular[..., 0]).all()


@pytest.mark.parametrize("case", CASES)
def test_every_parameter_and_the_input_get_a_gradient(make, case):
    mixer = make(case)
    x = torch.randn(2, 11, D_MODEL, requires_grad=True)
    mixer(x).square().sum().backward()
    for name, parameter in [*mixer.named_parameters(), ("input", x)]:
        gradient = parameter.grad
        assert gradient is not None, name
        assert gradient.isfinite().all(), name
        assert gradient.abs().max() > 1e-7, name


@pytest.mark.parametrize("case", CAUSAL)
def test_steps_and_pieces_equal_the_parallel_form(make, case):
    mixer = make(case)
    x = torch.randn(3, 10, D_MODEL) * 0.3
    y = mixer(x)
    close = {"rtol": 1e-5, "atol": 2e-6 * y.abs().max().item()}
    state = mixer.initial_state(3)
    for t in range(4):
        y_t, state = mixer.step(x[:, t], state)
        torch.testing.assert_close(y_t, y[:, t], **close)
    kept = state
    y_rest, state = mixer.forward_with_state(x[:, 4:9], state)
    torch.testing.assert_close(y_rest, y[:, 4:9], **close)
    y_last, _ = mixer.step(x[:, 9], state)
    torch.testing.assert_close(y_last, y[:, 9], **close)
    y_again, _ = mixer.forward_with_state(x[:, 4:9], kept)  # the given state was left as it is
    assert torch.equal(y_again, y_rest)


@pytest.mark.parametrize("case", CASES)
def test_packed_documents_are_mixed_one_by_one(make, case):
    mixer = make(case)
    lengths = [1, 7, 2, 16, 9, 3]
    x = torch.randn(1, sum(lengths), D_MODEL) * 0.3
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    y = mixer(x, cu_seqlens, max(lengths))
    separate = torch.cat([mixer(document) for document in x.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(y, separate, rtol=1e-5, atol=2e-6 * y.abs().max().item())


@pytest.mark.parametrize("case", CASES)
def test_nothing_leaks_into_another_document(make, case):
    mixer = make(case)
    x = torch.randn(1, 24, D_MODEL)
    cu_seqlens = torch.tensor([0, 5, 13, 24], dtype=torch.int32)
    clean = mixer(x, cu_seqlens, 11)
    poisoned = x.clone()
    # Chunks of Hydra's scan hold several documents and weigh other ones with an exact zero, which NaN
    # survives.
    poisoned[:, 5:13] = 1e3 if case.startswith("hydra") else float("nan")
    y = mixer(poisoned, cu_seqlens, 11)
    assert not torch.isclose(y[:, 5:13], clean[:, 5:13]).any()
    assert torch.equal(y[:, :5], clean[:, :5])
    assert torch.equal(y[:, 13:], clean[:, 13:])


def test_learned_initial_states_restart_at_every_document(randomize):
    config = HydraConfig(headdim=8, d_state=4, learnable_init_states=True)
    hydra = randomize(MIXERS["hydra"](D_MODEL, config, causal=False, max_seqlen=64, output_std=0.02))
    x = torch.randn(1, 12, D_MODEL)
    y = hydra(x, torch.tensor([0, 4, 12], dtype=torch.int32), 8)
    separate = torch.cat([hydra(x[:, :4]), hydra(x[:, 4:])], dim=1)
    torch.testing.assert_close(y, separate, rtol=1e-5, atol=1e-6)
    y.square().sum().backward()
    assert hydra.init_states.grad.abs().max() > 1e-6


def test_mru_states_are_float32_under_autocast(make):
    mixer = make("mru-cayley")
    x = torch.randn(1, 300, D_MODEL)
    with torch.autocast("cpu", torch.bfloat16):
        matrices = mixer.state_matrices(x)
        y = mixer(x)
    assert matrices.dtype == torch.float32
    assert (matrices @ matrices.mT - torch.eye(4)).abs().max() < 1e-5
    assert y.isfinite().all()


def test_mru_reports_norms_and_overflow(make):
    mixer = make("mru-identity-wide")
    mixer(torch.randn(1, 5, D_MODEL))
    assert set(mixer.monitor()) == {"log_norm_max", "log_norm_mean"}
    assert all(norm.isfinite() for norm in mixer.monitor().values())
    x = torch.full((1, 3000, D_MODEL), 3.0)
    mixer(x)
    assert not mixer.monitor()["log_norm_max"].isfinite()
    with pytest.raises(OverflowError, match="identity_plus"):
        mixer.forward_with_state(x, mixer.initial_state(1))


def test_attention_dropout_is_off_in_eval_mode(randomize):
    config = AttentionConfig(headdim=8, dropout=0.5)
    attention = randomize(MIXERS["attention"](D_MODEL, config, causal=True, max_seqlen=64, output_std=0.02))
    x, cu_seqlens = torch.randn(1, 12, D_MODEL), torch.tensor([0, 5, 12], dtype=torch.int32)
    assert not torch.equal(attention(x, cu_seqlens), attention(x, cu_seqlens))
    attention.eval()
    assert torch.equal(attention(x, cu_seqlens), attention(x, cu_seqlens))

"""Mamba-1 and -2, pairs of these, linear attention and retention against plain recurrences in float64."""

import pytest
import torch
import torch.nn.functional as F
from paths import ROOT
from ssd_definitions import linear_attention, mamba1, mamba2, retention, two_directions, two_layers

from matmix.model import MixerOptions, ModelConfig
from matmix.model.initialization import initialize
from matmix.model.interop.export.generation_state import map_state
from matmix.model.mixers import MIXERS
from matmix.model.mixers.scans.hydra import HydraConfig
from matmix.model.mixers.scans.scan_block import ScanBlock

D_MODEL = 8
SMALL = {"headdim": 4, "d_state": 3}


@pytest.fixture
def make(randomize):
    def build(name, *, causal=False, randomized=True, dtype=torch.float64, **options):
        kind = MIXERS[name]
        config = kind.Config(**options)
        kind.check(D_MODEL, config)
        mixer = kind(D_MODEL, config, causal=causal, max_seqlen=64, output_std=0.02)
        if randomized:
            return randomize(mixer, std=0.5, dtype=dtype)
        initialize(mixer, seed=0)
        return mixer.to(dtype)

    return build


CASES = {
    "mamba2": (mamba2, "semiseparable", SMALL, True),
    "mamba2-options": (
        mamba2,
        "semiseparable",
        {**SMALL, "ngroups": 2, "d_conv": 2, "bias": True, "conv_bias": False, "norm_before_gate": True},
        True,
    ),
    "mamba2-groups": (mamba2, "semiseparable", {**SMALL, "ngroups": 2, "chunk_size": 16}, True),
    "mamba1": (mamba1, "s6", {"d_state": 3, "chunk_size": 4}, True),
    "mamba1-options": (mamba1, "s6", {"d_conv": 2, "dt_rank": 3, "bias": True, "conv_bias": False, "expand": 3}, True),
    "two-layers-mult": (two_layers, "two_ssms", {**SMALL, "joined": "mult"}, False),
    "two-layers-concat": (two_layers, "two_ssms", {**SMALL, "joined": "concat", "bias": True}, False),
    "two-layers-mamba1": (two_layers, "two_s6", {"d_state": 3}, False),
    "add": (two_directions, "bidirectional_add", SMALL, False),
    "add-options": (
        two_directions,
        "bidirectional_add",
        {**SMALL, "ngroups": 2, "d_conv": 3, "bias": True, "conv_bias": False, "expand": 1, "chunk_size": 16},
        False,
    ),
    "mult": (two_directions, "bidirectional_mult", SMALL, False),
    "concat": (two_directions, "bidirectional_concat", SMALL, False),
    "add-diagonal": (two_directions, "bidirectional_add_diagonal", SMALL, False),
    "add-shift": (two_directions, "bidirectional_add_shift", SMALL, False),
    "linear-attention": (linear_attention, "linear_attention", {"headdim": 4}, True),
    "linear-attention-silu": (
        linear_attention,
        "linear_attention",
        {"headdim": 4, "nheads": 3, "feature_map": "silu", "normalize": False, "bias": True},
        True,
    ),
    "linear-attention-plain": (
        linear_attention,
        "linear_attention",
        {"headdim": 4, "feature_map": "none", "normalize": False},
        True,
    ),
    "retnet": (retention, "retnet", {"headdim": 4}, True),
    "retnet-both": (retention, "retnet", {"headdim": 4, "nheads": 3, "expand": 1, "bias": True}, False),
}
CAUSAL = [name for name, case in CASES.items() if case[3]]


@pytest.mark.parametrize("case", CASES)
def test_output_and_all_gradients_are_those_of_the_recurrence(make, case):
    """With packed documents, which the recurrence takes one by one."""
    definition, name, options, causal = CASES[case]
    mixer = make(name, causal=causal, **options)
    lengths = [5, 1, 37]
    x = torch.randn(1, sum(lengths), D_MODEL, dtype=torch.float64, requires_grad=True)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    cotangent = torch.randn_like(x)
    inputs = {"x": x, **dict(mixer.named_parameters())}

    def results(y):
        return y, dict(zip(inputs, torch.autograd.grad((y * cotangent).sum(), inputs.values()), strict=True))

    y, gradients = results(mixer(x, cu_seqlens, max(lengths)))
    expected, wanted = results(torch.cat([definition(mixer, part) for part in x.split(lengths, 1)], 1))
    tolerance = 1e-5 if name == "retnet" else 1e-9  # its angles are float32
    torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance)
    for key, gradient in gradients.items():
        scale = wanted[key].abs().max().item()
        assert scale > 0, key
        torch.testing.assert_close(gradient, wanted[key], rtol=tolerance, atol=tolerance * scale, msg=key)


@pytest.mark.parametrize("case", CAUSAL)
def test_a_prompt_and_steps_are_the_whole_sequence(make, case):
    """From prompts shorter and longer than the convolution, with a state that does not grow; also where the rows of a
    batch have read prompts of different lengths, as generation joins them."""
    _, name, options, _ = CASES[case]
    mixer = make(name, causal=True, **options)
    x = torch.randn(2, 12, D_MODEL, dtype=torch.float64)
    y = mixer(x)
    for prompt in (1, 2, 7):
        start = mixer.initial_state(2)
        y_prompt, state = mixer.forward_with_state(x[:, :prompt], start)
        outputs = [y_prompt]
        for t in range(prompt, 12):
            y_t, state = mixer.step(x[:, t], state)
            outputs.append(y_t.unsqueeze(1))
        torch.testing.assert_close(torch.cat(outputs, 1), y, rtol=1e-8, atol=1e-9)
        map_state(lambda before, after: torch.testing.assert_close(before.shape, after.shape), start, state)
    states = [
        mixer.forward_with_state(x[row : row + 1, :start], mixer.initial_state(1))[1] for row, start in ((0, 6), (1, 2))
    ]
    joined = map_state(lambda *parts: torch.cat(parts), *states)
    y, _ = mixer.forward_with_state(torch.stack([x[0, 6:9], x[1, 2:5]]), joined)
    expected = torch.stack([mixer(x)[0, 6:9], mixer(x)[1, 2:5]])  # row 0 has read 6 tokens, row 1 two
    torch.testing.assert_close(y, expected, rtol=1e-8, atol=1e-9)


def test_mamba2_has_the_parameters_and_start_of_mamba_ssm(make):
    mixer = make("semiseparable", causal=True, randomized=False, headdim=1, d_state=16, expand=4)
    shapes = {name: tuple(parameter.shape) for name, parameter in mixer.named_parameters()}
    assert shapes == {
        "in_proj.weight": (2 * 32 + 2 * 16 + 32, 8),
        "conv1d.weight": (32 + 2 * 16, 1, 4),
        "conv1d.bias": (32 + 2 * 16,),
        "dt_bias": (32,),
        "A_log": (32,),
        "D": (32,),
        "norm.weight": (32,),
        "out_proj.weight": (8, 32),
    }
    rates, steps = mixer.A_log.exp(), F.softplus(mixer.dt_bias)
    assert rates.min() >= 1
    assert rates.max() <= 16
    assert rates.max() - rates.min() > 8
    assert steps.min() > 0.9e-3
    assert steps.max() < 0.11
    assert (mixer.D == 1).all()


def test_the_diagonal_of_add_is_tied_to_its_scans(make):
    mixer = make("bidirectional_add", **SMALL)
    x = torch.randn(2, 11, D_MODEL, dtype=torch.float64)
    sides = mixer.parts(x)[1].sides
    own = [torch.einsum("bthn,bthn->bth", side.q, side.k) * side.input_scale for side in sides]
    diagonal = mixer.matrix(x).diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(diagonal, (own[0] + own[1]).transpose(1, 2), rtol=1e-12, atol=1e-12)
    assert not {"D", "fc_D.weight"} & {name for name, _ in mixer.named_parameters()}


def test_a_shift_alone_has_no_diagonal(make):
    m = make("bidirectional_add_shift", **SMALL).matrix(torch.randn(1, 11, D_MODEL, dtype=torch.float64))
    assert (m.diagonal(dim1=-2, dim2=-1) == 0).all()
    assert (m + torch.eye(11) != 0).all()


@pytest.mark.parametrize("name", ["hydra", "bidirectional_add_diagonal"])
def test_a_free_diagonal_changes_nothing_else(make, name):
    mixer = make(name, **SMALL)
    x = torch.randn(1, 11, D_MODEL, dtype=torch.float64)
    before = mixer.matrix(x)
    with torch.no_grad():
        mixer.D += 0.7
        mixer.fc_D.weight += 0.1
    change = mixer.matrix(x) - before
    own = torch.eye(11, dtype=torch.bool).expand_as(change)
    assert (change[~own] == 0).all()
    assert (change[own] != 0).all()


@pytest.mark.parametrize("name", ["bidirectional_mult", "bidirectional_concat"])
def test_directions_that_are_not_added_have_matrices_of_their_own(make, name):
    mixer = make(name, **SMALL)
    m = mixer.matrix(torch.randn(1, 11, D_MODEL, dtype=torch.float64))
    assert m.shape == (1, 2 * mixer.nheads, 11, 11)
    forward, backward = m.chunk(2, dim=1)
    assert (forward.triu(1) == 0).all()
    assert (backward.tril(-1) == 0).all()
    assert (forward.diagonal(dim1=-2, dim2=-1) != backward.diagonal(dim1=-2, dim2=-1)).all()


@pytest.mark.slow  # transformers takes seconds to import
def test_s6_with_the_weights_of_transformers_mamba_gives_its_outputs(make):
    from transformers import MambaConfig
    from transformers.models.mamba.modeling_mamba import MambaMixer

    sizes = {"hidden_size": D_MODEL, "state_size": 3, "time_step_rank": 2, "conv_kernel": 4, "expand": 2}
    theirs = MambaMixer(MambaConfig(**sizes, num_hidden_layers=1), 0).double()
    ours = make("s6", causal=True, d_state=3, dt_rank=2, chunk_size=4)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 11, D_MODEL, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-6)  # it makes A in float32


@pytest.mark.parametrize(
    ("name", "options"), [("hydra", {}), *(("two_ssms", {"joined": j}) for j in ("add", "concat"))]
)
def test_the_page_says_what_sharing_saves(name, options):
    """The published width; Hydra has about half of the parameters of two whole layers."""
    with torch.device("meta"):
        mixer = MIXERS[name](768, MIXERS[name].Config(**options), causal=False, max_seqlen=8, output_std=1.0)
    count = sum(parameter.numel() for parameter in mixer.parameters())
    assert f"| {count:,} | {count / 3_825_224:.2f} |" in (ROOT / "docs/mixers.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [name for name in MIXERS if name.startswith("bidirectional_")])
def test_each_direction_has_rates_and_steps_of_its_own_that_learn(make, name):
    """From the initial weights; and those of one direction do not touch the other's half of M."""
    mixer = make(name, randomized=False, **SMALL)
    x = torch.randn(2, 11, D_MODEL, dtype=torch.float64)
    (mixer(x) * torch.randn_like(x)).sum().backward()
    for parameter in (mixer.A_log, mixer.dt_bias):
        assert parameter.shape == (2, mixer.nheads)
        assert (parameter.grad != 0).all()
    before = mixer.matrix(x)
    with torch.no_grad():
        mixer.A_log[0] += 0.5
        mixer.dt_bias[0] += 0.5
    change = (mixer.matrix(x) - before).abs().amax((0, 1))
    assert (change.triu(1) == 0).all()
    assert (change.tril(-1)[torch.ones(11, 11).tril(-1).bool()] > 0).all()


def test_linear_attention_weighs_and_sums_to_one(make):
    m = make("linear_attention", causal=True, headdim=4).matrix(torch.randn(1, 11, D_MODEL, dtype=torch.float64))
    assert (m >= 0).all()
    torch.testing.assert_close(m.sum(-1), torch.ones_like(m[..., 0]), rtol=0, atol=1e-5)


def test_queries_far_below_zero_still_have_weights(make):
    """phi(x) = exp(x) there, which elu(x) + 1 would round to 0."""
    mixer = make("linear_attention", causal=True, headdim=4, dtype=torch.float32, eps=0.0)
    features, _ = mixer.features(torch.tensor([-30.0, -1.0, 0.0, 2.0]), torch.zeros(4), 0.0)
    torch.testing.assert_close(features, torch.tensor([-30.0, -1.0, 0.0, 0.0]).exp() + torch.tensor([0, 0, 0, 2.0]))


def test_row_sums_beyond_float16_still_divide(make):
    """A sum of 3,000 products of about 30 is no float16 number; nor may it make the outputs 0 or their steps NaN."""
    mixer = make("linear_attention", causal=True, headdim=4, dtype=torch.float32)
    with torch.no_grad():
        mixer.v_proj.weight.copy_(torch.eye(D_MODEL))
        mixer.out_proj.weight.copy_(torch.eye(D_MODEL))
        for layer in (mixer.q_proj, mixer.k_proj):
            layer.weight.fill_(0.45)
    x = torch.rand(1, 3000, D_MODEL)
    wanted = mixer(x)
    mixer, x = mixer.half(), x.half()
    whole, (first, state) = mixer(x), mixer.forward_with_state(x[:, :2900], mixer.initial_state(1))
    last, _ = mixer.forward_with_state(x[:, 2900:], state)
    assert wanted[:, -1].min() > 0.4
    assert whole.dtype == torch.float16
    for y in (whole, torch.cat([first, last], 1)):
        torch.testing.assert_close(y.float(), wanted, rtol=0, atol=3e-3)


SCAN_BLOCKS = [name for name, mixer in MIXERS.items() if issubclass(mixer, ScanBlock)]
DRAWING_STEPS = [name for name, mixer in MIXERS.items() if hasattr(mixer.Config(), "dt_max")]


def refused(name: str, **options) -> str:
    """What a model configuration says of these options of a mixer."""
    mixer = MIXERS[name]
    with pytest.raises(ValueError, match=rf"^model\.mixers\.{name}\.") as error:
        ModelConfig(
            architecture="language_model" if mixer.causal_form else "encoder",
            layers=(name,),
            mixers=MixerOptions(**{name: mixer.Config(**options)}),
        )
    assert "\n" not in str(error.value)
    return str(error.value)


def test_no_mixer_draws_step_sizes_from_an_impossible_range():
    assert {"hydra", "semiseparable", "gated_delta", "quasiseparable_dd", "s4d"} <= set(DRAWING_STEPS)
    for name in DRAWING_STEPS:
        for options in ({"dt_min": 0.2}, {"dt_min": 0.0}, {"dt_max": float("inf")}):
            assert "dt_min" in refused(name, **options)


def test_scans_have_chunks_that_their_kernels_have():
    assert len(SCAN_BLOCKS) == 7
    for name in SCAN_BLOCKS:
        assert "must be one of 0, 16, 32" in refused(name, chunk_size=48)
        assert "dt_init_floor = 0.0: must be above 0" in refused(name, dt_init_floor=0.0)


def test_limits_of_step_sizes_leave_some_between_them():
    message = refused("hydra", dt_limit_low=0.5, dt_limit_high=0.1)
    assert "dt_limit_low = 0.5: must not be above dt_limit_high = 0.1" in message
    refused("hydra", dt_limit_low=float("nan"))
    # 0 is no limit.
    ModelConfig(architecture="encoder", layers=("hydra",), mixers=MixerOptions(hydra=HydraConfig(dt_limit_low=0.5)))

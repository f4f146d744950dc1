"""Triton form of the MRU mixer against its definition: outputs, final states, gradients.

Chunks are made short so that short sequences reach all levels of the scan over chunks.
"""

from __future__ import annotations

import compare
import pytest
import torch
from compare import on_triton, packed, rmse_ratio, run
from mru_inputs import FUSED, mixer_inputs
from nightly import each_value_once, nightly
from triton_on_cpu import PoisonedTorch

from matmix.kernels import mru_mixer, mru_step
from matmix.kernels.launching import record_launches
from matmix.kernels.matrix_product import fused as scan
from matmix.kernels.mru import fused
from matmix.kernels.mru.chunked import MixerInputs, made_elements
from matmix.kernels.mru.constructions import build_state_matrices, state_elements
from matmix.kernels.mru.definition import mru_mixer_definition


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    monkeypatch.setattr(fused, "torch", PoisonedTorch())
    monkeypatch.setattr(scan, "torch", PoisonedTorch())


@pytest.fixture
def short(monkeypatch) -> None:
    """Chunks of 4 tokens, groups of 2: the same loops over fewer tokens."""
    monkeypatch.setattr(scan, "CHUNK", 4)
    monkeypatch.setattr(fused, "GROUP", 2)


def on(device, op=mru_mixer):
    return on_triton(op, device)


def assert_matches(device, inputs, **options):
    compare.assert_matches(on(device), mru_mixer_definition, inputs, **options)


@pytest.mark.parametrize(("construction", "seqlen"), each_value_once(FUSED, [1, 2, 31, 64, 65]))
def test_lengths(interpreter, construction, seqlen):
    inputs = mixer_inputs(seqlen, construction, order=8, batch=1, heads=2, states=1)
    assert_matches(interpreter, inputs, construction=construction, return_final_state=True)


@pytest.mark.slow
@pytest.mark.parametrize("construction", FUSED)
def test_many_short_chunks(interpreter, short, construction):
    """Three levels of chunks of chunks."""
    inputs = mixer_inputs(83, construction, order=8, batch=2, heads=2, states=2)
    assert_matches(interpreter, inputs, construction=construction, return_final_state=True)


@pytest.mark.slow
@pytest.mark.parametrize("construction", FUSED)
def test_a_long_sequence(interpreter, construction):
    assert_matches(interpreter, mixer_inputs(1000, construction, batch=1, heads=2), construction=construction)


@pytest.mark.parametrize(
    ("construction", "shape"), each_value_once(FUSED, [(16, 2, 16), (4, 5, 7), (8, 3, 1), (4, 1, 4), (8, 2, 12)])
)
def test_orders_heads_and_widths_that_do_not_fill_a_tile(interpreter, short, construction, shape):
    order, heads, width = shape
    inputs = mixer_inputs(7, construction, order=order, heads=heads, width=width)
    assert_matches(interpreter, inputs, construction=construction, return_final_state=True)


@pytest.mark.parametrize(
    ("construction", "sizes"), each_value_once(FUSED, [(1, 8, 2, 8), (7, 4, 5, 1), (3, 16, 2, 7), (11, 8, 3, 16)])
)
def test_chunks(interpreter, short, construction, sizes):
    seqlen, order, heads, d_chunk = sizes
    inputs = mixer_inputs(seqlen, construction, batch=1, order=order, heads=heads, states=1, d_chunk=d_chunk)
    assert_matches(interpreter, inputs, construction=construction, return_final_state=True)


@pytest.mark.parametrize(
    ("construction", "lengths", "states", "d_chunk"),
    each_value_once(FUSED, [[1, 5, 14, 3, 0, 6], [1] * 9, [0, 17, 0, 1, 0], [19, 1]], [True, False], [0, 3, 3]),
)
def test_packed_documents(interpreter, short, construction, lengths, states, d_chunk):
    states = len(lengths) if states else 0
    inputs = mixer_inputs(sum(lengths), construction, batch=1, heads=2, states=states, d_chunk=d_chunk)
    options = {"cu_seqlens": packed(lengths), "return_final_state": True, "construction": construction}
    assert_matches(interpreter, inputs, **options)


@pytest.mark.parametrize(("construction", "d_chunk"), each_value_once(FUSED, [0, 3]))
def test_final_state_alone_has_a_gradient(interpreter, short, construction, d_chunk):
    inputs = mixer_inputs(11 if d_chunk else 30, construction, batch=1, states=1, d_chunk=d_chunk)

    cotangent = torch.randn(1, 3, 4, 4)

    def final(op, dtype):
        leaves = {name: x.to(dtype).clone().requires_grad_() for name, x in inputs.items()}
        state = op(**leaves, return_final_state=True, construction=construction)[1]
        state.backward(cotangent.to(dtype))
        return {name: x.grad for name, x in leaves.items()}

    got, wanted = final(on(interpreter), torch.float32), final(mru_mixer_definition, torch.float64)
    for name in inputs.keys() - {"w_down"}:
        assert rmse_ratio(got[name], wanted[name]) <= 1e-5
    assert got["w_down"] is None or not got["w_down"].any()


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
@pytest.mark.parametrize(
    ("construction", "d_chunk"), [(FUSED[0], 0), ("ldu", 3), *(nightly(name, 0) for name in FUSED[1:])]
)
def test_documents_are_bit_independent(interpreter, short, construction, d_chunk):
    """A neighbour may even overflow: outputs, states and gradients of the others stay as they are."""
    lengths = [5, 12, 1, 13]
    before = mixer_inputs(sum(lengths), construction, batch=1, d_chunk=d_chunk)
    after = {**before, "elements": before["elements"].clone()}
    after["elements"][:, 5:17] = torch.nan
    options = {"cu_seqlens": packed(lengths), "return_final_state": True, "construction": construction}
    plain, changed = (run(on(interpreter), inputs, torch.float32, **options) for inputs in (before, after))
    for name in ("output 0", "d elements"):
        assert torch.equal(plain[name][:, :5], changed[name][:, :5])
        assert torch.equal(plain[name][:, 17:], changed[name][:, 17:])
        assert changed[name][:, 5:17].isnan().any()
    assert torch.equal(plain["output 1"][[0, 2, 3]], changed["output 1"][[0, 2, 3]])


@pytest.mark.parametrize(
    ("construction", "d_chunk"), [(FUSED[0], 0), ("identity_plus", 4), *(nightly(name, 0) for name in FUSED[1:])]
)
def test_the_same_bits_twice_from_any_layout(interpreter, short, construction, d_chunk):
    inputs = mixer_inputs(13, construction, d_chunk=d_chunk)
    elements = inputs["elements"]
    wide = torch.randn(2, 13, 5, *elements.shape[3:])
    wide[:, :, 1:4] = elements
    time_first = elements.transpose(0, 1).contiguous().transpose(0, 1)
    first, *others = (
        run(on(interpreter), inputs | {"elements": x}, torch.float32, construction=construction)
        for x in (elements, wide[:, :, 1:4], time_first, elements)
    )
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("size", [nightly(1.0), 100.0, nightly(1e4)])
def test_cayley_stays_orthogonal_whatever_the_elements(interpreter, size):
    """A projection by the identity shows the states themselves; they must have no part in growing or shrinking."""
    order, seqlen = 8, 100
    elements = torch.randn(1, seqlen, 1, state_elements("cayley", order)) * size
    y, final = on(interpreter)(elements=elements, w_down=torch.eye(order).unsqueeze(0), return_final_state=True)
    for state in (y[0, :, 0], final[0]):
        assert (state @ state.mT - torch.eye(order)).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("order", "size", "chunks"), each_value_once([4, 8, 16], [1.0, 100.0, 1e4, 0.01], [False, True])
)
def test_state_matrices_are_orthogonal_to_rounding(interpreter, order, size, chunks):
    """Each of them. The last matrices are singular but for the identity: rows of zeros, and elements of rank 2."""
    heads, tokens = 2, 11
    given = torch.randn(1, tokens, heads, *((order, order) if chunks else (state_elements("cayley", order),))) * size
    if not chunks:
        skew = torch.randn(2, heads, order, 1) * size**0.5
        rows, columns = torch.tril_indices(order, order, -1)
        given[0, -1] = (skew[0] * skew[1].mT - skew[1] * skew[0].mT)[:, rows, columns]
        given[0, -2, :, -(order - 1) :] = 0
    w_up = torch.eye(order).repeat(heads, 1, 1) if chunks else None
    w_down = torch.eye(order).repeat(heads, 1, 1)
    places = torch.arange(tokens + 1, dtype=torch.int32)  # documents of one token
    y = on(interpreter)(elements=given, w_down=w_down, w_up=w_up, cu_seqlens=places)[0]
    off = (y @ y.mT - torch.eye(order)).abs().amax((1, 2, 3))
    assert off[:-1].max() < 1e-6
    assert off[-1] < 1e-4  # a third order of what large elements of rank 2 cost
    wanted = mru_mixer_definition(given, w_down, w_up=w_up, cu_seqlens=places)[0].float()
    torch.testing.assert_close(y[:-2], wanted[:-2], rtol=0, atol=max(1e-6, 1e-7 * size))


@pytest.mark.parametrize("size", [nightly(100.0), 1000.0])
def test_cayley_with_large_elements(interpreter, short, size):
    """Elements in float32 determine X to about 1e-7 times their size where some combination of them is small. Gradients
    come from X + I, which is small where elements are large and loses as many digits as X does."""
    inputs = mixer_inputs(9, "cayley", order=8)
    inputs["elements"] *= size
    got = run(on(interpreter), inputs, torch.float32)
    wanted = run(mru_mixer_definition, inputs, torch.float64)
    assert rmse_ratio(got["output 0"], wanted["output 0"]) < 1e-8 * size
    assert rmse_ratio(got["d elements"], wanted["d elements"]) < 1e-6 * size


@pytest.mark.parametrize("scale", [1.0, 1e25, 0.0])
def test_log_norms(interpreter, short, scale):
    """Of every chunk's last state: here all of them scaled by the initial state's size."""
    inputs = mixer_inputs(11, "cayley", batch=1, heads=3, order=8)
    inputs["initial_state"] = (torch.eye(8) * scale).expand(1, 3, 8, 8).contiguous()
    _, norms = on(interpreter)(**inputs, return_log_norms=True)
    expected = 0.5 * torch.tensor(8.0).log() + torch.tensor(scale).log() if scale else torch.tensor(-87.34)
    torch.testing.assert_close(norms, expected.expand(2), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:.*(NaN slice|invalid value).*:RuntimeWarning")
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_log_norms_show_what_is_not_finite(interpreter, short, value):
    inputs = mixer_inputs(20, "identity_plus", batch=1)
    inputs["elements"][0, 6, 0, 0] = value
    options = {"construction": "identity_plus", "cu_seqlens": packed([9, 0, 11]), "return_log_norms": True}
    _, norms = on(interpreter)(**inputs, **options)
    assert not norms.isfinite().any()
    inputs["elements"][0, 6, 0, 0] = 0
    assert on(interpreter)(**inputs, **options)[1].isfinite().all()


def test_half_precision_elements_keep_a_float32_state(interpreter):
    inputs = {name: x.half() for name, x in mixer_inputs(70, "cayley", batch=1, order=8).items()}
    got = on(interpreter)(**inputs, return_final_state=True)
    wanted = mru_mixer_definition(**inputs, return_final_state=True)
    assert got[0].dtype == torch.float16
    assert rmse_ratio(got[0], wanted[0]) < 1e-3
    assert rmse_ratio(got[1], wanted[1]) < 1e-5


@pytest.mark.parametrize(
    ("construction", "packed_row", "chunks"), each_value_once(["cayley", "ldu"], [False, True], [True, False])
)
def test_no_value_is_looked_at_and_no_state_stored(construction, packed_row, chunks):
    """Tensors without values are enough to launch everything, and all that is allocated is smaller than X or H."""
    token = (8, 8) if chunks else (state_elements(construction, 8),)
    elements = torch.empty(1, 100_000, 6, *token, device="meta", dtype=torch.bfloat16)
    w_up = torch.empty(6, 8, 8, device="meta") if chunks else None
    w_down = torch.empty(6, 8, 8, device="meta", dtype=torch.bfloat16)
    cu_seqlens = torch.empty(90, dtype=torch.int32, device="meta") if packed_row else None
    with record_launches() as launches:
        given = MixerInputs(elements, w_down, w_up, None, cu_seqlens, construction)
        outputs = fused.forward(given)
        fused.backward(given, outputs, outputs._replace(y=torch.empty_like(outputs.y)))
    cayley = construction == "cayley"
    assert len(launches) == 5 + 6 + (4 if cayley else 0)
    states = 100_000 * 6 * 64 * 4
    # Elements, outputs and their gradients are bfloat16. Cayley's X is there while a pass runs.
    tensors = [x for launch in launches for x in launch.arguments if torch.is_tensor(x) and x.dtype == torch.float32]
    kept_from_forward = outputs.edges.numel() * 4
    sizes = {x.numel() * x.element_size() for x in tensors}
    assert max(sizes - ({states} if cayley else set())) <= 0.28 * states
    assert kept_from_forward < 0.04 * states


@pytest.mark.parametrize(("construction", "d_chunk"), each_value_once(FUSED, [0, 5]))
def test_step(interpreter, construction, d_chunk):
    """Token by token, from state to state, the outputs are those of the whole sequence."""
    inputs = mixer_inputs(2 if d_chunk else 4, construction, order=8, d_chunk=d_chunk)
    w_up = inputs.get("w_up")
    y, final = on(interpreter)(**inputs, construction=construction, return_final_state=True)
    state = torch.eye(8).expand(2, 3, 8, 8).contiguous()
    step = on(interpreter, mru_step)
    for t in range(y.shape[1]):
        inputs_t = {"elements": inputs["elements"][:, t], "w_down": inputs["w_down"], "w_up": w_up}
        before = state.clone()
        y_t, after = step(**inputs_t, state=state, construction=construction)
        assert torch.equal(state, before)
        torch.testing.assert_close(y_t, y[:, t], rtol=1e-5, atol=1e-5)
        state = after
    torch.testing.assert_close(state, final, rtol=1e-5, atol=1e-5)
    alone = step(elements=inputs["elements"][:, 0], w_up=w_up, state=state, construction=construction)
    x = build_state_matrices(made_elements(inputs["elements"][:, 0], w_up, construction), construction, 8)
    torch.testing.assert_close(alone, state @ x, rtol=1e-5, atol=1e-5)


def test_what_has_no_kernel(interpreter):
    elements = torch.randn(1, 5, 2, 32 * 31 // 2).to(interpreter)
    with pytest.raises(ValueError, match="takes matrices of order 4, 8 or 16, not 32"):
        mru_mixer(elements, torch.randn(2, 32, 4).to(interpreter), backend="triton")
    elements = torch.randn(1, 5, 2, 6).to(interpreter)
    with pytest.raises(ValueError, match="knows the constructions affine, identity_plus, ldu, cayley, not householder"):
        mru_mixer(elements, torch.randn(2, 4, 4).to(interpreter), construction="householder", backend="triton")
    with pytest.raises(ValueError, match="at most 16 columns"):
        mru_mixer(elements, torch.randn(2, 4, 65).to(interpreter), backend="triton")
    mru_mixer(elements, torch.randn(2, 4, 65).to(interpreter))
    chunks, w_up = torch.randn(1, 5, 2, 4, 7).to(interpreter), torch.randn(2, 7, 4).to(interpreter)
    with pytest.raises(ValueError, match="takes chunks of 4 numbers, as many as it projects to, not 7"):
        mru_mixer(chunks, torch.randn(2, 4, 4).to(interpreter), w_up=w_up, backend="triton")

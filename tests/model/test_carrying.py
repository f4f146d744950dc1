"""States that enter documents in a row, and rows that go on with a document, in every mixer that carries them."""

import math

import mixer_cases
import pytest
import torch
from every_mixer import language_model_of_all
from nightly import nightly
from torch.utils._pytree import tree_map, tree_map_only

from matmix.model import MixerOptions, ModelConfig, build_model, initialize
from matmix.model.carrying import CarriedRows, check_carry
from matmix.model.config import NO_MIXER
from matmix.model.mixers import MIXERS
from matmix.model.mixers.continued import tokens_before
from matmix.train.activation import checkpoint_activations, compile_blocks

CARRYING = [name for name, mixer in MIXERS.items() if mixer.carries]
CASES = {name: case for name, case in mixer_cases.CASES.items() if case.causal and case.mixer in CARRYING}
LENGTHS = [5, 1, 40, 0, 3, 17]


def bounds(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def poisoned(state: torch.Tensor) -> torch.Tensor:
    """NaN in place of the second document's."""
    return state.index_fill(0, torch.tensor([1]), math.nan) if state.is_floating_point() else state


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_documents_go_on_from_states_of_their_own(case):
    """Shorter and longer than a chunk and a convolution, and empty; outputs, states and gradients are those of each
    document alone, and NaN stays in its document."""
    mixer = case.build().double()
    before = [torch.randn(1, n, mixer_cases.D_MODEL, dtype=torch.float64) for n in (7, 1, 30, 4, 2, 70)]
    states = [mixer.forward_with_state(x, mixer.initial_state(1))[1] for x in before]
    states = tree_map(torch.Tensor.detach, states)
    x = torch.randn(1, sum(LENGTHS), mixer_cases.D_MODEL, dtype=torch.float64, requires_grad=True)
    alone, ends = [], []
    for part, state in zip(x.split(LENGTHS, 1), states, strict=True):
        y, end = mixer.forward_with_state(part, state) if part.shape[1] else (part, state)
        alone.append(y)
        ends.append(end)
    expected, end = torch.cat(alone, 1), tree_map(lambda *parts: torch.cat(parts), *ends)
    start = tree_map(lambda *parts: torch.cat(parts), *states)
    y, got = mixer.forward_with_state(x, start, bounds(LENGTHS))
    torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(got, end, rtol=1e-9, atol=1e-11)
    gradients = [torch.autograd.grad(out.pow(2).sum(), [x, *mixer.parameters()]) for out in (y, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-9)

    broken, _ = mixer.forward_with_state(x, tree_map(poisoned, start), bounds(LENGTHS))
    assert broken[:, 5].isnan().all()
    assert torch.equal(broken[:, :5], y[:, :5])
    assert torch.equal(broken[:, 6:], y[:, 6:])


def test_the_tokens_before_stand_in_the_documents():
    x, last = torch.arange(1.0, 7).view(1, 6, 1), torch.tensor([[10.0], [20.0], [30.0], [40.0]])
    before, ends = tokens_before(x, last, bounds([2, 0, 1, 3]))
    assert before.flatten().tolist() == [10, 1, 30, 40, 4, 5]
    assert ends.flatten().tolist() == [2, 20, 3, 6]


def model_of(*mixers: str) -> torch.nn.Module:
    options = language_model_of_all()
    config = ModelConfig(
        architecture="language_model", layers=(*mixers, NO_MIXER), n_layers=len(mixers) + 1, mixers=options.mixers,
        d_model=16, vocab_size=29, mlp_ratio=0,
    )  # fmt: skip
    model = build_model(config)
    initialize(model, seed=0)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model.double()


def rows_of(lengths: list[int], row: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each window of a line of documents its boundaries, and whether it begins inside of a document (1,)."""
    edges = set(bounds(lengths).tolist())
    found = []
    for first in range(0, sum(lengths), row):
        inside = sorted({0, row} | {edge - first for edge in edges if first < edge < first + row})
        found.append((torch.tensor(inside, dtype=torch.int32), torch.tensor([first not in edges])))
    return found


@pytest.mark.parametrize("changed", ["", nightly("full"), "selective", nightly("compiled")])
def test_rows_that_go_on_are_one_long_row(changed):
    """Documents over several rows, that end in a row and at its edge; two lanes at once. No gradient passes an edge."""
    model = model_of(*(CARRYING if changed != "compiled" else ("semiseparable",)))
    lengths = [[20, 3, 13, 12, 16], [8, 56]]
    ids = torch.randint(29, (2, 64))
    whole = torch.cat([model(line[None], cu_seqlens=bounds(lane)) for line, lane in zip(ids, lengths, strict=True)])
    if changed == "compiled":
        compile_blocks(model, backend="eager", fullgraph=True)
    elif changed:
        checkpoint_activations(model, changed)
    carried, outputs = CarriedRows(), []
    for number, lanes in enumerate(zip(*(rows_of(lane, 8) for lane in lengths), strict=True)):
        cu_seqlens = torch.cat([lanes[0][0], lanes[1][0][1:] + 8])
        carried.continues = torch.cat([lane[1] for lane in lanes])
        outputs.append(model(ids[:, 8 * number : 8 * number + 8], cu_seqlens=cu_seqlens, carried=carried))
    torch.testing.assert_close(torch.cat(outputs, 1), whole, rtol=1e-9, atol=1e-10)
    outputs[-1].sum().backward()
    seen = model.embedding.weight.grad.abs().sum(1) > 0
    assert seen[ids[:, -8:].unique()].all()
    assert not carried.states[0].requires_grad if isinstance(carried.states[0], torch.Tensor) else True


def test_rows_that_do_not_go_on_are_as_ever():
    """Whatever is carried to them; gradients, too."""
    model, ids = model_of(*CARRYING), torch.randint(29, (3, 8))
    cu_seqlens = bounds([8, 2, 6, 1, 7])
    broken = tree_map_only(torch.Tensor, poisoned, model.initial_state(3))
    carried = CarriedRows(broken, torch.zeros(3, dtype=torch.bool))
    results = []
    for more in ({}, {"carried": carried}):
        outputs = model(ids, cu_seqlens=cu_seqlens, **more)
        results.append([outputs, torch.autograd.grad(outputs.pow(2).sum(), model.embedding.weight)[0]])
    torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-10)


def test_models_that_cannot_carry_say_so():
    encoder = ModelConfig(architecture="encoder", layers=("hydra",))
    with pytest.raises(ValueError, match=r"^data\.carry: a model of encoder reads rows from both ends, .*$"):
        check_carry(encoder)
    for name in ("attention", "hyena", "s4d"):
        with pytest.raises(ValueError, match=rf"^data\.carry: {name} has no state of fixed size .*semiseparable.*$"):
            check_carry(ModelConfig(architecture="language_model", layers=("mru", name)))
    check_carry(ModelConfig(architecture="language_model", layers=tuple(CARRYING)))
    cosformer = MixerOptions(linear_attention=MIXERS["linear_attention"].Config(feature_map="cosformer", reach=50))
    with pytest.raises(ValueError, match=r"^data\.carry: linear_attention takes documents of 50 tokens at most, .*$"):
        check_carry(ModelConfig(architecture="language_model", layers=("linear_attention",), mixers=cosformer))

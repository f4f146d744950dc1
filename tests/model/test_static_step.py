"""The step in fixed buffers: the same numbers as the usual one, in the same memory, without a look at any value."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from every_mixer import language_model_of_all
from failures import each
from mixer_cases import CASES, D_MODEL, small_config
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from matmix.model import build_model, decoding
from matmix.model.decoding import StaticStep, decode, has_static_step
from matmix.model.interop.export.generation_state import map_state, state_shapes
from matmix.model.mixers import MIXERS
from matmix.model.mixers.mru import MRUConfig

STATIC = [name for name, mixer in MIXERS.items() if mixer.static_step]
PROMPTS = [[3, 1, 4], [1], [5, 9, 2, 6, 5, 3, 5], [8, 9, 7], [9, 3, 2, 3, 8]]


@pytest.fixture
def make(randomize):
    """A language model with these mixers and a layer of none."""

    def build(*layers, dtype=torch.float32):
        whole = language_model_of_all()
        config = dataclasses.replace(whole, layers=(*layers, "none"), n_layers=len(layers) + 1)
        return randomize(build_model(config), std=0.5, dtype=dtype).eval()

    return build


def addresses(state):
    found = []
    map_state(lambda x: found.append(x.data_ptr()) or x, state)
    return found


@each("name", STATIC)
@torch.no_grad()
def test_states_keep_their_shapes(name, randomize):
    mixer = randomize(MIXERS[name](D_MODEL, small_config(name), causal=True, max_seqlen=16, output_std=0.1))
    states = [mixer.forward_with_state(torch.randn(2, n, D_MODEL), mixer.initial_state(2))[1] for n in (3, 5)]
    assert len({state_shapes(state) for state in states}) == 1


def test_the_mixers_that_it_is_for_have_it():
    assert {"semiseparable", "retnet", "linear_attention", "mru"} <= set(STATIC)
    assert not {"attention", "hyena"} & set(STATIC)


@each("case", [name for name, case in CASES.items() if case.causal and MIXERS[case.mixer].static_step])
@torch.inference_mode()
def test_a_step_in_place_is_a_step(case, randomize):
    """Of every mixer with every option: the same bits, in the memory of the state that was given."""
    case = CASES[case]
    mixer = MIXERS[case.mixer](D_MODEL, case.config, causal=True, max_seqlen=16, output_std=0.1)
    randomize(mixer, std=0.3).eval()
    _, state = mixer.forward_with_state(torch.randn(3, 4, D_MODEL), mixer.initial_state(3))
    own = map_state(torch.clone, state)
    before = addresses(own)
    for _ in range(3):
        x = torch.randn(3, D_MODEL)
        y, state = mixer.step(x, state)
        assert torch.equal(mixer.step_in_place(x, own), y)
        assert addresses(own) == before
        map_state(lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=0) or a, own, state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_static_steps_are_steps(make, dtype):
    model = make(*STATIC, dtype=dtype)
    assert has_static_step(model)
    _, state = model.prefill(torch.randint(0, 29, (3, 5)))
    given = map_state(torch.clone, state)
    static = StaticStep(model, state, 3)
    map_state(lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=0) or a, given, state)
    assert not set(addresses(static.state)) & set(addresses(state))
    held = None
    for _ in range(6):
        token_ids = torch.randint(0, 29, (3,))
        logits, state = model.step(token_ids, state)
        assert torch.equal(static.step(token_ids), logits)
        places = [*addresses(static.state), static.logits.data_ptr(), static.token_ids.data_ptr()]
        held = held or places
        assert places == held
    static.pick([2, 1, 1])
    logits, _ = model.step(token_ids, map_state(lambda x: x[[2, 1, 1]], state))
    assert torch.equal(static.step(token_ids), logits)
    assert [*addresses(static.state), static.logits.data_ptr(), static.token_ids.data_ptr()] == held


class NothingFromTheHost(TorchDispatchMode):
    """Refuses what a CUDA graph cannot hold: values that come back from the device, shapes that depend on them, and
    copies from the memory of the host."""

    REFUSED = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "item", "is_nonzero", "equal")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("aten::").split(".")[0]
        assert not name.startswith(self.REFUSED), func
        out = func(*args, **(kwargs or {}))
        places = {x.device.type for x in torch.utils._pytree.tree_leaves((args, kwargs, out)) if torch.is_tensor(x)}
        assert places <= {"cuda"}, (func, places)
        return out


@each("name", [*STATIC, "mru, cayley", "mru, ldu with dropout and decay"])
def test_nothing_comes_back_from_the_device(name):
    """On a GPU without memory, which refuses to give a value out, too."""
    options = small_config(name.split(",")[0])
    if "cayley" in name:
        options = MRUConfig(order=4, construction="cayley")
    elif "ldu" in name:
        options = MRUConfig(order=4, construction="ldu", dropout=0.1, decay=True)
    whole = language_model_of_all()
    layer = name.split(",")[0]
    mixers = dataclasses.replace(whole.mixers, **{layer: options})
    config = dataclasses.replace(whole, layers=(layer, "none"), n_layers=2, mixers=mixers, mlp_ratio=2.0)
    model = build_model(config).eval()
    with torch.no_grad(), FakeTensorMode():
        for module in model.modules():
            for held in (module._parameters, module._buffers):
                for key, x in held.items():
                    held[key] = None if x is None else torch.empty(x.shape, dtype=x.dtype, device="cuda")
        token_ids, state = torch.zeros(4, dtype=torch.int64, device="cuda"), model.initial_state(4)
        with NothingFromTheHost():
            logits = model.step_in_place(token_ids, state)
            watched = model.blocks[0].mixer.watched()
        assert logits.shape == (4, 29)
        assert (watched is not None) == (layer == "mru")
        if watched is not None:  # which the usual step looks at
            with NothingFromTheHost(), pytest.raises(AssertionError, match="_local_scalar_dense"):
                model.step(token_ids, state)


def continued(model, prompts, static, *, end=None, count=12):
    """The likeliest tokens of each prompt, and the numbers of rows of the steps."""
    sizes, name = [], "step_in_place" if static else "step"
    plain = getattr(model, name)

    def step(token_ids, state):
        sizes.append(len(token_ids))
        return plain(token_ids, state)

    setattr(model, name, step)
    try:
        tokens = [[] for _ in prompts]
        options = {"max_new_tokens": count, "end": end, "static": static}
        for found in decode(model, prompts, lambda _, logits: int(logits.argmax()), **options):
            for number, token in found.items():
                tokens[number].append(token)
    finally:
        delattr(model, name)
    return tokens, sizes


@pytest.mark.slow
def test_a_batch_in_fixed_buffers_gets_what_it_gets_otherwise(make):
    """Also where prompts end at different times, the first one first, and before any step."""
    model = make(*STATIC)
    wanted, _ = continued(model, PROMPTS, False)
    assert len({tuple(tokens) for tokens in wanted}) > 1
    assert continued(model, PROMPTS, True) == (wanted, [5] * 11)
    ends = {tokens[at] for tokens in wanted for at in (0, 2, 5)}
    assert len(ends) > 3
    for end in ends:
        plain, sizes = continued(model, PROMPTS, False, end=end)
        assert plain == [tokens[: tokens.index(end)] if end in tokens else tokens for tokens in wanted]
        started = sum(len(tokens) > 0 for tokens in plain)
        assert continued(model, PROMPTS, True, end=end) == (plain, [started] * len(sizes))


class Replays:
    """Stands for a CUDA graph: captured after two runs, it runs the same function again."""

    def __init__(self, run, device):
        self.run, self.replays = run, 0
        for _ in range(2):
            run()

    def replay(self):
        self.replays += 1
        self.run()


def test_a_graph_is_captured_once_and_replayed_for_each_token(make, monkeypatch):
    """By default where devices take graphs. What runs before the capture leaves no trace."""
    model, graphs = make(*STATIC), []
    wanted, _ = continued(model, PROMPTS, False)
    monkeypatch.setattr(decoding, "captured", lambda *given: graphs.append(Replays(*given)) or graphs[-1])
    for module in (decoding, decoding):
        monkeypatch.setattr(module, "takes_graphs", lambda device: True)
    tokens = [[] for _ in PROMPTS]
    for found in decode(model, PROMPTS, lambda _, logits: int(logits.argmax()), max_new_tokens=12):
        for number, token in found.items():
            tokens[number].append(token)
    assert tokens == wanted
    assert [graph.replays for graph in graphs] == [11]


def test_where_cuda_refuses_to_capture_a_warning_says_so(make, monkeypatch):
    def refuse(run, device):
        run()
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    model = make(*STATIC)
    wanted = continued(model, PROMPTS, False)[0]
    monkeypatch.setattr(decoding, "captured", refuse)
    monkeypatch.setattr(decoding, "takes_graphs", lambda device: True)
    with pytest.warns(RuntimeWarning, match=r"CUDA graph \(operation not permitted .* capturing\); its operations run"):
        assert continued(model, PROMPTS, True)[0] == wanted


def test_models_with_states_that_grow_have_no_such_step(make, monkeypatch):
    model = make("semiseparable", "attention")
    assert not has_static_step(model)
    with pytest.raises(ValueError, match=r"^static: the state of a layer of this model grows with the text"):
        list(decode(model, PROMPTS, lambda *_: 0, max_new_tokens=2, static=True))
    assert list(decode(model, [[1]], lambda *_: 0, max_new_tokens=2)) == [{0: 0}] * 2
    assert has_static_step(make("semiseparable"))
    monkeypatch.setenv("MATMIX_CHECK_VALUES", "1")
    assert not has_static_step(make("semiseparable"))


def overflowing(randomize):
    """Token 1 multiplies the states of an MRU by e^2; the others leave them as they are."""
    whole = language_model_of_all()
    mixers = dataclasses.replace(
        whole.mixers, mru=MRUConfig(order=4, nheads=1, construction="identity_plus", input="dense")
    )
    config = dataclasses.replace(whole, layers=("mru",), n_layers=1, mixers=mixers)
    model = randomize(build_model(config), std=0.1).eval()
    with torch.no_grad():
        model.embedding.weight.zero_()
        model.embedding.weight[1] = torch.linspace(-1, 1, config.d_model)
        block = model.blocks[0]
        block.mixer.in_proj.weight.zero_()
        x = block.norm_mixer(model.embedding.weight[1])
        # Elements of token 1: a diagonal of e^2 - 1.
        diagonal = torch.eye(4).flatten() * (torch.e**2 - 1)
        block.mixer.in_proj.weight.copy_(diagonal.unsqueeze(1) * x / x.square().sum())
    return model


def test_states_that_overflow_are_refused(randomize):
    model = overflowing(randomize)
    said = []
    for static in (False, True):
        with pytest.raises(OverflowError, match="an MRU state or its square left the range of float32") as error:
            list(decode(model, [[1], [2]], lambda n, _: 1 + n, max_new_tokens=60, static=static))
        said.append(str(error.value))
    assert said[0] == said[1]


def test_prompts_that_have_left_do_not_overflow(randomize):
    """The last token of the first one would go on to do so."""
    model = overflowing(randomize)
    left = [0]

    def draw(number, _):
        left[0] += number == 0
        return 2 if number else (1 if left[0] < 10 else 0)

    found = list(decode(model, [[1], [2]], draw, max_new_tokens=60, end=0, static=True))
    assert [len(tokens) for tokens in found] == [2] * 9 + [1] * 51

"""Hooks see all that is done with blocks and mixers, and what is offloaded or adapted gives right outputs."""

import copy
import dataclasses

import accelerate.hooks
import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from every_mixer import SEQLEN, encoder_of_all, language_model_of_all
from failures import each
from mixer_cases import CASES, D_MODEL
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from matmix.model import HeadConfig, ImageConfig, ModelConfig, build_model
from matmix.model.calls import weights_of
from matmix.model.decoding import decode, has_static_step
from matmix.model.interop.export.generation_state import advance, map_state, picked_rows
from matmix.model.mixers.mru import MRU

VOCABULARY = 29


@pytest.fixture
def make(randomize):
    """A model with random weights and no state that overflows."""

    def build(config):
        return randomize(build_model(config), std=0.1).eval()

    return build


def _greedy(model, prompts):
    return list(decode(model, prompts, lambda number, logits: int(logits.argmax()), max_new_tokens=4))


def _offloaded(model):
    """A copy whose weights are fetched for each call."""
    other = cpu_offload(copy.deepcopy(model), execution_device="cpu")
    assert all(parameter.is_meta for parameter in other.parameters())
    return other


@pytest.mark.parametrize("layers", [None, ("mru", "semiseparable", "none")])
def test_hooks_run_for_each_token(make, layers):
    """None: every mixer."""
    config = language_model_of_all()
    model = make(config if layers is None else dataclasses.replace(config, layers=layers, n_layers=len(layers)))
    assert has_static_step(model) is (layers is not None)
    counts = {}
    for module in (model, *model.blocks, *(block.mixer for block in model.blocks if block.mixer is not None)):
        counts[module] = 0
        module.register_forward_hook(lambda module, *_: counts.update({module: counts[module] + 1}))
    assert not has_static_step(model)  # a graph replays no hooks
    with torch.no_grad():
        model(torch.randint(VOCABULARY, (2, 5)))
    assert set(counts.values()) == {1}
    _greedy(model, [[3, 4, 5], [6, 7, 8]])
    # Once for both prompts, and for each token but the last, which nothing follows.
    assert set(counts.values()) == {1 + 1 + 3}


@pytest.mark.parametrize("config", [encoder_of_all, language_model_of_all])
def test_offloaded_models_give_the_same(make, config):
    """Every mixer, in the parallel form."""
    model = make(config())
    ids = torch.randint(VOCABULARY, (2, SEQLEN))
    with torch.no_grad():
        assert torch.equal(_offloaded(model)(ids), model(ids))


def test_offloaded_models_generate_the_same(make):
    model = make(language_model_of_all())
    other, prompts = _offloaded(model), [[3, 4, 5], [6, 7, 8, 9]]
    assert _greedy(other, prompts) == _greedy(model, prompts)
    ids = torch.randint(VOCABULARY, (2, 6))
    with torch.no_grad():
        expected, state = model.prefill(ids)
        found, other_state = other.prefill(ids)
        assert torch.equal(found, expected)
        assert torch.equal(other.step(ids[:, 0], other_state)[0], model.step(ids[:, 0], state)[0])


@pytest.mark.slow
@each("name", [name for name in CASES if not CASES[name].kind.fixed_length])
def test_offloaded_mixers_read_documents_and_orders(randomize, name):
    mixer = randomize(CASES[name].build())
    other = _offloaded(mixer)
    x = torch.randn(1, 9, D_MODEL)
    documents = torch.tensor([0, 2, 5, 9], dtype=torch.int32)
    with torch.no_grad():
        assert torch.equal(other(x, documents, 4), mixer(x, documents, 4))


def test_offloaded_models_of_images(make):
    config = ModelConfig(
        architecture="image_classifier",
        layers=("lion_s", "hydra"),
        n_layers=2,
        d_model=16,
        mixers=encoder_of_all().mixers,
        image=ImageConfig(size=16, patch=4, scan="both", class_token="none"),
        head=HeadConfig(outputs=5),
    )
    model, images = make(config), torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        assert torch.equal(_offloaded(model)(images), model(images))


@pytest.mark.parametrize("name", ["hydra", "mru-ldu", "semiseparable", "monarch"])
def test_mixers_that_ask_for_weights_are_compiled_whole(randomize, name):
    mixer, x = randomize(CASES[name].build()), torch.randn(2, 8, D_MODEL)
    torch._dynamo.reset()
    compiled = torch.compile(mixer.forward, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), mixer(x))


def _put(module, name, device, **_):
    """What accelerate does with a weight, for fake tensors, which it cannot copy."""
    *path, name = name.split(".")
    module = module.get_submodule(".".join(path))
    weight = getattr(module, name)
    setattr(module, name, nn.Parameter(weight.detach().to(device), requires_grad=weight.requires_grad))


@pytest.mark.slow
@pytest.mark.parametrize("config", [encoder_of_all, language_model_of_all])
def test_layers_on_two_devices(config, monkeypatch):
    """With tensors that have a device and no numbers: as on GPUs, operations refuse those of two devices."""
    config, second = config(), torch.device("cuda", 1)
    monkeypatch.setattr(accelerate.hooks, "set_module_tensor_to_device", _put)
    # It reads a number, of which there are none.
    monkeypatch.setattr(MRU, "refuse_overflow", lambda self: None)
    with FakeTensorMode(), torch.no_grad():
        model = build_model(config).eval()
        places = dict.fromkeys((name for name, _ in model.named_children() if name != "blocks"), second)
        places["embedding" if config.causal else "embeddings"] = torch.device("cuda", 0)
        places |= {f"blocks.{index}": torch.device("cuda", index % 2) for index in range(config.n_layers)}
        dispatch_model(model, places, main_device=torch.device("cuda", 0))
        for index, block in enumerate(model.blocks):
            assert {weight.device.index for weight in block.parameters()} <= {index % 2}
        ids = torch.zeros(2, SEQLEN, dtype=torch.int64, device="cuda:0")
        streams = []
        assert model(ids, streams=streams).shape == (2, SEQLEN, VOCABULARY)
        assert model(ids, select=ids[0, :3]).shape == (3, VOCABULARY)
        if config.causal:
            logits, state = model(ids, method="prefill")
            logits, state = model(ids[:, 0], state, method="step")
            logits, state = advance(model, ids, state, slice(-2, None), streams)
            assert logits.device == ids.device
            for block_state in state:
                picked_rows(block_state, ids[:, 0])


class Adapter(nn.Module):
    """A low-rank addition to a linear layer, as PEFT's layers stand in the place of the original."""

    def __init__(self, layer):
        super().__init__()
        self.base_layer = layer
        self.down = nn.Parameter(torch.randn(2, layer.in_features) * 0.3)
        self.up = nn.Parameter(torch.randn(layer.out_features, 2) * 0.3)

    @property
    def weight(self):
        return self.base_layer.weight

    @property
    def bias(self):
        return self.base_layer.bias

    def forward(self, x):
        return self.base_layer(x) + x @ self.down.T @ self.up.T


@pytest.mark.slow
@each("name", CASES)
def test_adapters_in_half_precision(randomize, name):
    """They and their layers compute in the type that the layer alone computes in, float32 where that is."""
    adapted = randomize(CASES[name].build(), dtype=torch.bfloat16)
    alone = copy.deepcopy(adapted)
    for path, layer in list(adapted.named_modules()):
        if isinstance(layer, nn.Linear):
            parent, _, child = path.rpartition(".")
            adapter = Adapter(layer).bfloat16()
            nn.init.zeros_(adapter.up)
            setattr(adapted.get_submodule(parent), child, adapter)
    x = torch.randn(2, 8, D_MODEL, dtype=torch.bfloat16)
    torch.testing.assert_close(adapted(x), alone(x), rtol=0.05, atol=0.05)


@pytest.mark.slow
@each("name", CASES)
def test_adapters_of_all_linear_layers_count(randomize, name):
    """The same as with what they add in the weights."""
    adapted = randomize(CASES[name].build(), dtype=torch.float64)
    merged = copy.deepcopy(adapted)
    for path, layer in list(merged.named_modules()):
        if isinstance(layer, nn.Linear):
            parent, _, child = path.rpartition(".")
            adapter = Adapter(adapted.get_submodule(path)).double()
            setattr(adapted.get_submodule(parent), child, adapter)
            with torch.no_grad():
                layer.weight += adapter.up @ adapter.down
    x = torch.randn(2, 8, D_MODEL, dtype=torch.float64)
    torch.testing.assert_close(adapted(x), merged(x), rtol=1e-6, atol=1e-9)


class Quantised(nn.Module):
    """A linear layer as PyTorch's quantised ones are: no parameters, and methods where these would be."""

    def __init__(self, layer):
        super().__init__()
        self.layer = (layer,)  # not a part of it

    def weight(self):
        raise AssertionError("of a quantised layer the weight has no use")

    bias = weight

    def forward(self, x):
        return self.layer[0](x.to(self.layer[0].weight.dtype))


def _with_quantised_layers(model):
    quantised = copy.deepcopy(model)
    for path, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear):
            parent, _, child = path.rpartition(".")
            setattr(quantised.get_submodule(parent), child, Quantised(layer))
    return quantised


def _state_and_logits(model, ids):
    """Types of the parts of a state after `ids`, and the logits of all tokens and of a step from it."""
    logits, types = [model(ids)], []
    if model.config.causal:
        state = model.prefill(ids)[1]
        map_state(lambda part: types.append(part.dtype), state)
        logits.append(model.step(ids[:, 0], state)[0])
    return types, torch.cat([part.flatten() for part in logits])


@pytest.mark.slow
@each("dtype", [torch.float32, torch.bfloat16])
@each("config", [encoder_of_all, language_model_of_all])
def test_quantised_linear_layers_are_called(make, config, dtype):
    """In every mixer, also for states, which have the type that the rest computes in.

    What is rounded to half precision in so many layers is far from either: no farther than without such layers.
    """
    model = make(dataclasses.replace(config(), tie_embeddings=not config().causal)).to(dtype)
    ids = torch.randint(VOCABULARY, (2, SEQLEN))
    with torch.no_grad():
        found_types, found = _state_and_logits(_with_quantised_layers(model), ids)
        types, logits = _state_and_logits(model, ids)
        exact = _state_and_logits(copy.deepcopy(model).double(), ids)[1]
    assert found_types == types
    if dtype == torch.float32:
        torch.testing.assert_close(found, logits)
    assert (found - exact).norm() < 2 * (logits - exact).norm() < 0.5 * exact.norm()


@pytest.mark.parametrize("architecture", ["language_model", "encoder"])
def test_an_adapter_of_embeddings_counts_in_the_output_that_is_tied_to_them(make, architecture):
    """As it does when it is merged into the one matrix of both."""

    class OfRows(Adapter):
        def forward(self, ids):
            return self.base_layer(ids) + self.down.T[ids] @ self.up.T

    config = ModelConfig(
        architecture=architecture, vocab_size=VOCABULARY, d_model=D_MODEL, n_layers=1, layers=("none",)
    )
    adapted = make(config)
    merged = copy.deepcopy(adapted)
    of = (lambda model: model) if config.causal else (lambda model: model.embeddings)
    name = "embedding" if config.causal else "word"
    embedding = getattr(of(adapted), name)
    embedding.in_features, embedding.out_features = embedding.weight.shape
    adapter = OfRows(embedding)
    setattr(of(adapted), name, adapter)
    with torch.no_grad():
        getattr(of(merged), name).weight += adapter.down.T @ adapter.up.T
    ids = torch.arange(SEQLEN)[None] % VOCABULARY
    torch.testing.assert_close(adapted(ids), merged(ids))
    adapted(ids).square().sum().backward()
    assert adapter.down.grad[:, SEQLEN:].any(), "rows that are not looked up stand in the output, too"


@pytest.mark.filterwarnings("ignore")
@each("name", [name for name in CASES if CASES[name].causal])
def test_quantised_linear_layers_carry_states(randomize, name):
    """PyTorch's own for CPUs, whose weights are no tensors."""
    mixer = torch.ao.quantization.quantize_dynamic(randomize(CASES[name].build()), {nn.Linear})
    x = torch.randn(2, 5, D_MODEL)
    with torch.no_grad():
        expected = mixer(x)
        found, state = mixer.forward_with_state(x, mixer.initial_state(2))
        mixer.step(x[:, 0], state)
    # What goes into a layer is rounded to 8 bits; where sums differ in their last bit, some of it to the next number.
    assert (found - expected).norm() < 0.02 * expected.norm()


def test_an_adapter_that_would_count_for_nothing_is_refused(randomize):
    mixer = randomize(CASES["hydra"].build())
    mixer.conv1d = nn.Sequential(mixer.conv1d)
    mixer.conv1d.base_layer = mixer.conv1d[0]
    with pytest.raises(ValueError, match=r"an adapter \(Sequential\) .* leave this layer out of target_modules$"):
        mixer(torch.randn(1, 4, D_MODEL))


def test_weights_that_no_hook_brings_are_refused():
    class Hook:
        def pre_forward(self, module):
            pass

        def post_forward(self, module, output):
            pass

    layer = nn.Linear(2, 2, device="meta")
    layer._hf_hook = Hook()
    with pytest.raises(ValueError, match=r"^Linear.weight is offloaded, .* in the device_map$"):
        weights_of(layer, "weight")

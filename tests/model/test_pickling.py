"""Models can be pickled, for `torch.save(model)`, worker processes and joblib, and copied."""

import copy
import io
import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from every_mixer import SEQLEN, encoder_of_all, language_model_of_all
from failures import each
from mixer_cases import CASES, D_MODEL
from paths import GOLDEN
from safetensors.torch import load_file

from matmix.model import HeadConfig, ImageConfig, MixerOptions, ModelConfig, build_model, initialize
from matmix.model.interop import from_reference
from matmix.model.mixers.scans.hydra import HydraConfig


def _pickled(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _check(model, *inputs, **more):
    """Copies give the same outputs, also of a model that keeps something of its last forward pass."""
    outputs = model(*inputs, **more)
    outputs.sum().backward()
    for other in (_pickled(model), copy.deepcopy(model)):
        assert other is not model
        assert torch.equal(other(*inputs, **more), outputs)
        assert [name for name, _ in other.named_parameters()] == [name for name, _ in model.named_parameters()]


@each("name", CASES)
def test_every_mixer(name, randomize):
    _check(randomize(CASES[name].build()).eval(), torch.randn(2, 8, D_MODEL, requires_grad=True))


@pytest.mark.parametrize("config", [encoder_of_all, language_model_of_all])
def test_models_of_tokens(config):
    model = build_model(config())
    initialize(model, seed=0)
    _check(model.eval(), torch.randint(29, (2, SEQLEN)))


@pytest.mark.parametrize("architecture", ["image_classifier", "masked_image"])
def test_models_of_images(architecture):
    images = architecture == "image_classifier"
    model = build_model(
        ModelConfig(
            architecture=architecture,
            layers=("hydra",),
            n_layers=2,
            d_model=16,
            layer_scale=1e-4,
            image=ImageConfig(size=16, patch=4, stem="conv" if images else "linear"),
            head=HeadConfig(outputs=5) if images else HeadConfig(),
            mixers=MixerOptions(hydra=HydraConfig(headdim=8, d_state=4)),
        )
    )
    initialize(model, seed=0)
    pictures = torch.randn(2, 3, 16, 16)
    _check(model.eval(), pictures, **({} if images else {"masked": torch.arange(32).view(2, 4, 4) % 3 == 0}))


def test_blocks_with_weights_of_the_papers_code():
    """Their class is made for the mixer, and stands in no module."""
    tensors = load_file(GOLDEN / "matrix_mixer_cauchy_dd.safetensors")
    state = {key.removeprefix("state."): tensor for key, tensor in tensors.items() if key.startswith("state.")}
    sizes = {"d_model": 32, "qk_dim": 8, "max_seq_len": 24, "headdim": 16}
    config = {"matrix_mixer_type": "cauchy", "is_data_dependent": True, **sizes}
    block = from_reference("hydra-matrix-mixer", state, **config)
    _check(block, tensors["input.u"])
    other = _pickled(block)
    assert type(other) is type(block)
    assert other.reference_names == block.reference_names


@pytest.mark.slow
def test_another_process_takes_a_model():
    model = build_model(language_model_of_all()).requires_grad_(False).eval()
    initialize(model, seed=0)
    ids = torch.randint(29, (2, SEQLEN))
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        assert torch.equal(pool.submit(model, ids).result().clone(), model(ids))


def test_initial_values_are_drawn_alike_by_copies():
    """The rules of all modules are pickled with them."""
    model = build_model(encoder_of_all())
    other = pickle.loads(pickle.dumps(model))
    for one in (model, other):
        initialize(one, seed=3)
    assert all(map(torch.equal, model.parameters(), other.parameters()))

import pytest
import torch

from matmix.model import MixerOptions, ModelConfig, build_model
from matmix.model.mixers.attention.softmax_attention import AttentionConfig
from matmix.model.mixers.mru import MRUConfig
from matmix.model.mixers.scans.hydra import HydraConfig


def _small_options(**changes):
    options = {
        "attention": AttentionConfig(headdim=8),
        "hydra": HydraConfig(headdim=8, d_state=4, ngroups=2),
        "mru": MRUConfig(order=4, construction="cayley"),
    }
    return MixerOptions(**(options | changes))


@pytest.fixture
def small_config():
    """Makes a small configuration; arguments change fields, mixer names among them change mixer options."""

    def make(architecture="language_model", layers=("mru",), **changes):
        mixers = {name: changes.pop(name) for name in ("attention", "hydra", "mru") if name in changes}
        fields = {"d_model": 32, "n_layers": 3, "vocab_size": 61, "mlp_ratio": 2.0} | changes
        return ModelConfig(architecture=architecture, layers=layers, mixers=_small_options(**mixers), **fields)

    return make


@pytest.fixture
def randomize():
    """Gives every parameter of a module values away from its start, where zeros would hide errors."""

    def fill(module, std=0.15, dtype=torch.float32):
        generator = torch.Generator().manual_seed(1)
        module.to(dtype)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                values = torch.randn(parameter.shape, generator=generator) * std
                is_scale = "norm" in name and name.endswith("weight")
                parameter.copy_(values + (1.0 if is_scale else 0.0))
        return module

    return fill


@pytest.fixture
def small_model(small_config, randomize):
    """Builds a small model with random weights, in eval mode; arguments as for `small_config`."""

    def make(*args, dtype=torch.float32, **changes):
        return randomize(build_model(small_config(*args, **changes)), dtype=dtype).eval()

    return make

"""The names of `import matmix`: what they cost, that each is there, and layers of other people's models."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest
import torch

import matmix
from matmix.model.mixers import MIXERS


def test_importing_matmix_imports_nothing():
    code = "import sys; before = set(sys.modules); import matmix; print(*(set(sys.modules) - before)); dir(matmix)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["matmix"]


def test_every_name_is_there():
    assert {"Hydra", "MRU", "LION", "mixer", "semiseparable_scan", "open", "train"} <= set(dir(matmix))
    for name in dir(matmix):
        assert getattr(matmix, name) is not None
    assert callable(matmix.train)


@pytest.mark.parametrize(
    ("name", "said"),
    [("Hidra", "did you mean 'Hydra'"), ("Monarch", r'matmix\.mixer\("name", d_model\)'), ("xyz", r"dir\(matmix\)")],
)
def test_a_name_that_is_not_there_names_what_is(name, said):
    with pytest.raises(AttributeError, match=said) as raised:
        getattr(matmix, name)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("given", [{"max_seqlen": 16}, {}], ids=["max_seqlen", "any_length"])
def test_every_mixer_is_a_layer(given):
    x = torch.randn(2, 16, 64)
    layers = [(name, {}) for name, mixer in MIXERS.items() if given or not mixer.fixed_length]
    cosformers = [(name, {"feature_map": "cosformer"}) for name in ("linear_attention", "lion_d")]
    for name, options in layers + cosformers:
        layer = matmix.mixer(name, 64, **given, **options)
        y = layer(x)
        assert y.shape == x.shape, name
        assert y.isfinite().all(), name


def test_layers_draw_their_weights_from_torch_s_generator_and_can_be_copied():
    torch.manual_seed(0)
    first, second = matmix.Hydra(d_model=64, d_state=16), matmix.Hydra(d_model=64, d_state=16)
    torch.manual_seed(0)
    again = matmix.Hydra(d_model=64, d_state=16)
    assert isinstance(first, matmix.Hydra)
    assert torch.equal(first.in_proj.weight, again.in_proj.weight)
    assert not torch.equal(first.in_proj.weight, second.in_proj.weight)
    x = torch.randn(1, 5, 64)
    for copied in (copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        assert torch.equal(copied(x), first(x))


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("hydr", {}, "did you mean 'hydra'"),
        ("hydra", {"d_sate": 3}, "did you mean 'd_state'"),
        ("hydra", {"causal": True}, "has no causal form"),
        ("mru", {"causal": False}, "has no bidirectional form"),
        ("toeplitz_di", {}, "give the length of all sequences, max_seqlen"),
        ("hyena", {"max_seqlen": 0}, "hyena: max_seqlen = 0: must be 1 or more"),
        ("hydra", {"d_model": 0}, "hydra: d_model = 0: must be 1 or more"),
        ("hydra", {"headdim": 48}, "does not divide the inner width"),
        ("lion_d", {"gate_sets": 2}, "gate_sets = 2: the second set is that of the second of two orders"),
    ],
)
def test_mistakes_are_one_line(name, options, said):
    with pytest.raises(ValueError, match=said) as raised:
        matmix.mixer(name, **{"d_model": 64, **options})
    assert "\n" not in str(raised.value)

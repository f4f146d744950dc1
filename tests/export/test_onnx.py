"""ONNX files compute the models that they are written of; so do the forms of mixers that stand in them."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest
import torch
from every_mixer import encoder_of_all, language_model_of_all
from small_models import HEADS, MODELS, random_model

from matmix.kernels.mru.constructions import build_state_matrices, state_elements
from matmix.model import ModelConfig
from matmix.model.config import MixerOptions
from matmix.model.interop.export.directory import export_model
from matmix.model.interop.export.onnx.file import PACKAGES, write_onnx
from matmix.model.interop.export.onnx.forms import (
    OnnxForm,
    diagonal_scatter_form,
    gated_norm_form,
    short_conv_form,
    state_matrices_form,
)
from matmix.model.mixers.mru import MRUConfig
from matmix.model.mixers.scans.hydra import HydraConfig

INSTALLED = all(importlib.util.find_spec(name) for name in PACKAGES)
CONSTRUCTIONS = ("affine", "identity_plus", "ldu", "cayley", "householder", "qr", "newton_schulz", "ldu_newton_schulz")
SMALL = MixerOptions(mru=MRUConfig(order=4), hydra=HydraConfig(d_state=4, headdim=8))


@pytest.mark.parametrize("construction", CONSTRUCTIONS)
@pytest.mark.parametrize("order", [2, 5, 8])
def test_state_matrices_are_those_of_the_mru(construction, order):
    elements = torch.randn(2, 5, 3, state_elements(construction, order), dtype=torch.float64)
    expected = build_state_matrices(elements, construction, order)
    torch.testing.assert_close(state_matrices_form(elements, construction, order), expected)


def test_ops_have_the_same_answers():
    x, gate = torch.randn(2, 7, 6), torch.randn(2, 7, 6)
    for causal in (True, False):
        weight, bias = torch.randn(6, 3), torch.randn(6)
        options = (causal, "silu", None, "", "auto")
        expected = torch.ops.matmix.short_conv(x, weight, bias, *options)
        torch.testing.assert_close(short_conv_form(x, weight, bias, *options), expected)
    for group in (None, 3):
        expected = torch.ops.matmix.gated_norm(x, torch.ones(6), gate, 1e-5, group, "auto")
        torch.testing.assert_close(gated_norm_form(x, torch.ones(6), gate, 1e-5, group, "auto"), expected)
    square, on = torch.randn(3, 4, 4), torch.randn(3, 4)
    expected = torch.diagonal_scatter(square, on, dim1=-2, dim2=-1)
    assert torch.equal(diagonal_scatter_form(square, on, dim1=-2, dim2=-1), expected)


@pytest.mark.parametrize("make", [encoder_of_all, language_model_of_all])
def test_forms_compute_every_mixer(make):
    config = make()
    for mixer in sorted(set(config.layers)):
        model = random_model(dataclasses.replace(config, layers=(mixer,), n_layers=1))
        ids = torch.randint(config.vocab_size, (2, config.max_seqlen))
        with torch.no_grad():
            found, expected = OnnxForm(model, config.max_seqlen)(ids), model(ids)
        torch.testing.assert_close(
            found, expected, rtol=1e-4, atol=1e-5, msg=lambda text, mixer=mixer: f"{mixer}: {text}"
        )


@pytest.mark.parametrize("name", HEADS)
def test_forms_compute_every_head(name):
    model = random_model(HEADS[name][0])
    ids, types = torch.randint(420, (3, 9)), torch.arange(9).expand(3, 9) // 5
    with torch.no_grad():
        found, expected = OnnxForm(model, 16)(ids, types), model(ids, token_type_ids=types)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_text_that_is_too_long_for_an_mru_is_an_error():
    form = OnnxForm(random_model(MODELS["mru"]), 16)
    form(torch.randint(420, (1, 16)))
    with pytest.raises(IndexError):
        form(torch.randint(420, (1, 17)))


def test_mistakes_are_one_line(tmp_path, monkeypatch):
    config = MODELS["without_mixers"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs onnx, onnxscript, onnxruntime: install the extra .*\[onnx\]"):
        export_model(config, random_model(config).state_dict(), None, tmp_path / "out", onnx=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.skipif(not INSTALLED, reason="the extra onnx is not installed")
@pytest.mark.parametrize(("architecture", "mixer"), [("encoder", "hydra"), ("language_model", "mru")])
def test_onnxruntime_computes_the_model(architecture, mixer, tmp_path):
    """At lengths and sizes of batches other than the one that it was written with."""
    import onnxruntime

    config = ModelConfig(
        architecture=architecture, vocab_size=64, d_model=16, n_layers=1, layers=(mixer,), mixers=SMALL, max_seqlen=64
    )
    model = random_model(config)
    export_model(config, model.state_dict(), None, tmp_path / "out", onnx=True)
    assert "model.onnx" in (tmp_path / "out" / "SHA256SUMS").read_text()
    session = onnxruntime.InferenceSession(str(tmp_path / "out" / "model.onnx"))
    names = [value.name for value in session.get_inputs()]
    assert names == ["input_ids", "token_type_ids"][: 1 + (architecture == "encoder")]
    for shape in ((1, 5), (3, 40), (2, 64)):
        ids = torch.randint(64, shape)
        inputs = dict(zip(names, (ids, torch.zeros_like(ids)), strict=False))
        found = session.run(["outputs"], {name: value.numpy() for name, value in inputs.items()})[0]
        with torch.no_grad():
            torch.testing.assert_close(torch.from_numpy(found), model(ids), rtol=1e-4, atol=1e-5)
    if mixer == "mru":
        with pytest.raises(Exception, match="out of"):
            session.run(None, {"input_ids": torch.randint(64, (1, 65)).numpy()})


@pytest.mark.skipif(not INSTALLED, reason="the extra onnx is not installed")
def test_images_are_refused(tmp_path):
    config = ModelConfig(architecture="image_classifier", layers=("none",), d_model=8, n_layers=1)
    with pytest.raises(ValueError, match="written of models of texts, not of an image_classifier"):
        write_onnx(random_model(config), tmp_path / "model.onnx")

"""Exports of image classifiers: in bare transformers with an image processor, in timm, and back in matmix."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from bare_site import make_bare_site
from failures import each
from PIL import Image
from safetensors.torch import load_file, save_file
from small_models import random_model
from test_round_trip import OTHER_PYTHON, run_check

from matmix.data.config import ImagesConfig
from matmix.data.images.transforms import make_transform
from matmix.model import HeadConfig, ImageConfig, ModelConfig, build_model, initialize
from matmix.model.architecture import Outputs
from matmix.model.config import MixerOptions
from matmix.model.images.config import ImageInputs
from matmix.model.interop import read_export
from matmix.model.interop.export.directory import export_model
from matmix.model.interop.importing.exported import read_labels
from matmix.model.mixers.attention.softmax_attention import AttentionConfig
from matmix.model.mixers.scans.hydra import HydraConfig
from matmix.model.mixers.scans.lion import LionSConfig

CHECK = Path(__file__).with_name("bare") / "bare_images.py"
LABELS = ("cat", "dog", "hen")
MODELS = {
    "hydra": (("hydra",), {"positions": "none"}, (0.5, 0.4, 0.3)),
    "lion": (("lion_s", "attention"), {"class_token": "middle", "pooling": "cls", "scan": "snake"}, (0.3,)),
}


def make_export(folder: Path, layers, image, mean) -> None:
    options = MixerOptions(
        hydra=HydraConfig(headdim=8, d_state=4),
        lion_s=LionSConfig(headdim=8, gate_sets=1 + ("scan" in image)),
        attention=AttentionConfig(headdim=8),
    )
    config = ModelConfig(
        architecture="image_classifier",
        d_model=16,
        n_layers=2,
        layers=layers,
        mlp_ratio=2.0,
        mixers=options,
        head=HeadConfig(outputs=3, hidden=False),
        image=ImageConfig(size=16, patch=4, channels=len(mean), **image),
        layer_scale=0.5,
    )
    model = build_model(config).eval()
    initialize(model, 0)
    with torch.no_grad():
        model.classifier.output.weight.mul_(20)
    inputs = ImageInputs(mean=mean, std=(0.2,) * len(mean), crop=0.9, size=16)
    outputs = Outputs(labels=LABELS, problem_type="single_label_classification")
    export_model(config, model.state_dict(), None, folder / "export", outputs=outputs, images=inputs)
    values = np.random.default_rng(0).integers(0, 256, (7, 9, 3), dtype=np.uint8)
    picture = Image.fromarray(values).resize((45, 34), Image.Resampling.BICUBIC)
    picture.save(folder / "picture.png")
    data = ImagesConfig(size=16, channels=len(mean), crop=0.9)
    pixels = make_transform(data, inputs.mean, inputs.std, training=False)(
        picture if len(mean) == 3 else picture.convert("L")
    )[None]
    with torch.no_grad():
        save_file({"pixels": pixels, "logits": model(pixels)}, folder / "reference.safetensors")


@pytest.fixture(scope="module")
def image_exports(tmp_path_factory) -> Path:
    pytest.importorskip("timm", reason="pictures need timm and torchvision")
    work = tmp_path_factory.mktemp("image_exports")
    for name, options in MODELS.items():
        (work / name).mkdir()
        make_export(work / name, *options)
    return work


@pytest.mark.slow
def test_exports_work_with_transformers_torch_and_pillow_only(image_exports, tmp_path):
    site = make_bare_site(tmp_path / "site", ("torch", "transformers", "pillow"))
    last = run_check(sys.executable, ["-I", "-S"], [image_exports, site], tmp_path, CHECK)
    assert last.startswith("ok: transformers 4.")


@pytest.mark.slow
@pytest.mark.skipif(not OTHER_PYTHON, reason="MATMIX_TRANSFORMERS5_PYTHON names no Python with transformers 5")
def test_exports_work_with_newer_transformers(image_exports, tmp_path):
    last = run_check(OTHER_PYTHON, ["-I"], [image_exports], tmp_path, CHECK)
    assert last.startswith("ok: transformers ")
    assert not last.startswith("ok: transformers 4.")


@pytest.mark.parametrize("name", MODELS)
def test_exports_come_back(image_exports, name):
    from safetensors.torch import load_file

    reference = load_file(image_exports / name / "reference.safetensors")
    model = read_export(image_exports / name / "export").eval()
    torch.testing.assert_close(model(reference["pixels"]), reference["logits"], rtol=1e-5, atol=1e-6)
    assert read_labels(image_exports / name / "export") == LABELS
    card = (image_exports / name / "export" / "README.md").read_text()
    assert "AutoModelForImageClassification, AutoImageProcessor" in card
    assert "pipeline_tag: image-classification" in card
    assert "of any size in multiples of 4 pixels" in card
    assert "text" not in card.replace("text/", "")


@each(
    "inputs, words",
    [
        ({"mean": (0.5,), "std": (0.5,)}, "do not fit a model of patches of 4 and 3 channels"),
        ({"mean": (0.5,) * 3, "std": (0.5,) * 3, "size": 18}, "images of 18 pixels"),
        ({"mean": (0.5,) * 2, "std": (0.5,) * 2}, "one or three numbers"),
        ({"mean": (0.5,) * 3, "std": (0.5,) * 3, "crop": 0.0}, "crop lies above 0"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(tmp_path, inputs, words):
    config = ModelConfig(
        architecture="image_classifier", layers=("none",), d_model=8, n_layers=1, image=ImageConfig(size=16, patch=4)
    )
    with pytest.raises(ValueError, match=words):
        export_model(config, random_model(config).state_dict(), None, tmp_path / "out", images=ImageInputs(**inputs))
    assert not (tmp_path / "out").exists()


def test_micro_batches_make_the_step_of_the_whole_batch(image_exports):
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate, which is not installed")
    from bare_steps import check_image_steps

    folder = image_exports / "hydra"
    check_image_steps(folder / "export", load_file(folder / "reference.safetensors")["pixels"][0])


@pytest.mark.parametrize("name", MODELS)
def test_timm_creates_exported_models(image_exports, name):
    """Its own functions find the images' sizes and means, the classifier, and features; a checkpoint fits."""
    timm = pytest.importorskip("timm")
    from timm.data import create_transform, resolve_model_data_config

    import matmix.model.interop.timm_models  # noqa: F401

    folder = image_exports / name
    reference = load_file(folder / "reference.safetensors")
    pixels, logits = reference["pixels"], reference["logits"]
    overlay = {"pretrained_cfg_overlay": {"file": str(folder / "export")}}
    model = timm.create_model("matmix_image_classifier", pretrained=True, **overlay).eval()
    torch.testing.assert_close(model(pixels), logits, rtol=1e-5, atol=1e-6)
    channels = pixels.shape[1]
    data = resolve_model_data_config(model)
    assert data["input_size"] == (channels, 16, 16)
    assert data["crop_pct"] == 0.9
    if channels == 3:
        found = create_transform(**data, is_training=False)(Image.open(folder / "picture.png"))
        assert torch.equal(found[None], pixels)
    features = model.forward_head(model.forward_features(pixels), pre_logits=True)
    assert features.shape == (1, model.num_features)

    anew = timm.create_model("matmix_image_classifier", drop_path_rate=0.5, **overlay).eval()
    assert not torch.allclose(anew(pixels), logits)
    assert anew.model.blocks[-1].drop_path.rate == 0.5
    weights = str(folder / "export" / "model.safetensors")
    loaded = timm.create_model("matmix_image_classifier", checkpoint_path=weights, **overlay).eval()
    assert torch.equal(loaded(pixels), model(pixels))

    other = timm.create_model("matmix_image_classifier", pretrained=True, num_classes=7, **overlay).eval()
    assert other(pixels).shape == (1, 7)
    torch.testing.assert_close(other.forward_head(other.forward_features(pixels), pre_logits=True), features)
    other.reset_classifier(0)
    torch.testing.assert_close(other(pixels), features)
    assert other.num_classes == 0


@each(
    "options, words",
    [
        ({}, "say which export"),
        ({"pretrained": True, "config": {}}, "say which export"),
        ({"in_chans": 4, "config": {"architecture": "image_classifier", "layers": ["none"]}}, "in_chans = 4"),
        ({"config": {"vocab_size": 5}}, "is a language_model, not an image_classifier"),
        ({"img_size": 5, "config": {"architecture": "image_classifier"}}, "no option 'img_size'"),
    ],
)
def test_timms_mistakes_are_one_line(options, words):
    pytest.importorskip("timm")
    from matmix.model.interop.timm_models import matmix_image_classifier

    with pytest.raises(ValueError, match=words) as caught:
        matmix_image_classifier(**options)
    assert "\n" not in str(caught.value)


@each("width, height", [(98, 49), (147, 49), (196, 98), (103, 206), (500, 375), (256, 256)])
def test_pictures_of_any_shape_are_as_in_the_evaluation_of_the_training(width, height):
    """Sides are rounded alike: a pixel more or less moves the whole picture."""
    from matmix.model.interop.export.images import MatmixImageProcessor  # needs transformers, which takes seconds

    noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    picture, norm = Image.fromarray(noise), {"mean": (0.5,) * 3, "std": (0.2,) * 3}
    evaluated = make_transform(ImagesConfig(path="x", size=224, crop=0.875), **norm, training=False)(picture)
    processor = MatmixImageProcessor(**norm, crop=0.875, size=224)
    assert np.abs(processor.pixels(picture) - evaluated.numpy()).max() <= 0.05

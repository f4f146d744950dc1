"""Image classifiers: patches, positions, class tokens, stochastic depth, sizes, and mistakes in their options."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from failures import each
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.flop_counter import FlopCounterMode

from matmix.model import HeadConfig, ImageConfig, MixerOptions, ModelConfig, build_model, flops_per_image, initialize
from matmix.model.config import model_config_from_dict, model_config_to_dict
from matmix.model.images.patches import resized_positions, sincos_positions
from matmix.model.mixers import MIXERS
from matmix.model.mixers.attention.softmax_attention import AttentionConfig
from matmix.model.mixers.scans.hydra import HydraConfig
from matmix.model.mixers.scans.lion import LionSConfig

MIXER_OPTIONS = MixerOptions(
    attention=AttentionConfig(headdim=8, position="none"),
    hydra=HydraConfig(headdim=8, d_state=4),
    lion_s=LionSConfig(headdim=8),
)


def make_config(layers=("hydra",), image=(), **changes):
    image = ImageConfig(**{"size": 16, "patch": 4, **dict(image)})
    fields = {"d_model": 16, "n_layers": 2, "mlp_ratio": 2.0, "mixers": MIXER_OPTIONS, "head": HeadConfig(outputs=5)}
    return ModelConfig(architecture="image_classifier", layers=layers, image=image, **(fields | changes))


def make_model(*args, **changes):
    model = build_model(make_config(*args, **changes))
    initialize(model, 0)
    return model.eval()


IMAGES = [
    {},
    {"stem": "conv", "positions": "sincos"},
    {"positions": "none", "scan": "hilbert", "channels": 1},
    {"class_token": "middle", "pooling": "cls", "scan": "snake"},
    {"class_token": "first", "scan": "both"},
]


@each("image", IMAGES)
def test_logits_of_images_of_any_size(image):
    """One row of logits for each image, which is its own: no image sees another."""
    model = make_model(image=image)
    for height, width in ((16, 16), (16, 24), (8, 12)):
        images = torch.randn(3, image.get("channels", 3), height, width)
        logits = model(images)
        assert logits.shape == (3, 5)
        torch.testing.assert_close(model(images[1:2]), logits[1:2], rtol=1e-4, atol=1e-5)
    streams = []
    model(images, streams=streams)
    assert [stream.shape for stream in streams] == [(3, 6 + ("class_token" in image), 16)] * 3
    weight = model.classifier.output.weight
    assert model(images, readout=lambda x, w, b: (x.shape, w is weight)) == ((3, 16), True)


def test_the_linear_stem_is_a_convolution():
    patches = make_model().embeddings.patches
    images = torch.randn(2, 3, 8, 12)
    wanted = F.conv2d(images, patches.weight.view(16, 3, 4, 4), patches.bias, stride=4)
    torch.testing.assert_close(patches(images), wanted.flatten(2).transpose(1, 2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("size", "channels"), [(2, 1), (16, 3)])
def test_patches_of_any_size_start_as_vectors_of_one_size(size, channels):
    patches = make_model(image={"patch": size, "size": 16, "channels": channels}, d_model=64).embeddings.patches
    found = patches(torch.randn(64, channels, 16, 16))
    assert found.std().item() == pytest.approx(3**-0.5, rel=0.15)


@pytest.mark.parametrize("name", sorted(name for name, kind in MIXERS.items() if kind.bidirectional_form))
def test_every_bidirectional_mixer_reads_images(name):
    model = make_model((name,), image={"scan": "snake", "size": 8}, n_layers=1, mlp_ratio=0.0, d_model=64)
    images = torch.randn(1, 3, 8, 8)
    assert model(images).isfinite().all()
    if MIXERS[name].fixed_length:
        with pytest.raises(ValueError, match="has parameters for sequences of exactly"):
            model(torch.randn(1, 3, 12, 8))
    else:
        assert model(torch.randn(1, 3, 12, 8)).isfinite().all()


def test_causal_mixers_are_controls():
    with pytest.raises(ValueError, match="causal_mixers = true"):
        make_config(("semiseparable",))
    options = {"causal_mixers": True, "mlp_ratio": 0.0, "d_model": 64}
    model = make_model(("semiseparable",), {"class_token": "middle", "positions": "none"}, **options)
    images = torch.randn(1, 3, 16, 16)
    other = images.clone()
    other[:, :, 12:] += 1  # the last row of patches
    for pooling, same in (("mean", False), ("cls", True)):
        model.config = dataclasses.replace(model.config, image=dataclasses.replace(model.config.image, pooling=pooling))
        assert torch.equal(model(images), model(other)) == same


def test_positions_are_interpolated():
    positions = torch.randn(16, 6)
    assert resized_positions(positions, 4, 4) is positions
    smooth = torch.linspace(0, 3, 4).repeat_interleave(4).unsqueeze(1)  # the number of the row
    larger = resized_positions(smooth, 8, 4).view(8, 4)
    torch.testing.assert_close(larger, larger[:, :1].expand(8, 4))
    assert (larger.diff(dim=0) > -0.2).all()
    torch.testing.assert_close(larger[2:6, 0], torch.linspace(0.75, 2.25, 4), atol=0.1, rtol=0)
    # Sines and cosines are stretched: the middle of a grid has the same positions at any size.
    fine, coarse = (sincos_positions(side, side, 3, 8, torch.device("cpu")) for side in (9, 3))
    torch.testing.assert_close(fine.view(9, 9, 8)[1::3, 1::3], coarse.view(3, 3, 8))


def test_a_class_token_outside_is_near_to_all_patches():
    """Its row and column of M do not decay: exchanging patches with equal gates leaves its logits as they are."""
    image = {"class_token": "first", "class_outside": True, "pooling": "cls", "positions": "none"}
    inside = {**image, "class_outside": False}
    images = torch.randn(1, 3, 16, 16)
    turned = images.flip(2).unflatten(2, (4, 4)).flip(3).flatten(2, 3)  # rows of patches exchanged
    for given, same in ((image, True), (inside, False)):
        model = make_model(("lion_s",), given, n_layers=1)
        with torch.no_grad():
            model.blocks[0].mixer.a_i.weight.mul_(20)
        assert torch.allclose(model(images), model(turned), atol=1e-6) == same
    with pytest.raises(ValueError, match="hydra has no class token outside"):
        make_config(image=image)


def test_stochastic_depth_leaves_out_whole_images_and_keeps_the_mean():
    model = make_model(("none", "hydra"), image={"positions": "none"}, mlp_ratio=0.0, drop_path=0.5).train()
    block, x = model.blocks[1], torch.randn(1, 4, 16).expand(400, 4, 16)
    added = block(x) - x
    whole = block.mix(x[:1])
    dropped = (added == 0).flatten(1).all(1)
    assert 0.35 < dropped.float().mean() < 0.65
    torch.testing.assert_close(added[~dropped], 2 * whole.expand_as(added[~dropped]), rtol=1e-3, atol=1e-5)
    assert model.blocks[0].drop_path.rate == 0
    assert not (model.eval().blocks[1](x) == x).all()


@pytest.mark.slow
def test_compiled_whole_with_recomputed_activations():
    """In training, without a break in the graph: the same loss and gradients, drawn paths included."""
    results = []
    for how in ("plain", "recomputed", "compiled"):
        model = make_model(("hydra",), {"scan": "snake", "class_token": "middle"}, drop_path=0.4).train()
        if how == "recomputed":
            for index, block in enumerate(model.blocks):
                model.blocks[index] = checkpoint_wrapper(block)
        torch.compiler.reset()
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if how == "compiled" else model
        torch.manual_seed(3)
        run(torch.linspace(-1, 1, 4 * 3 * 16 * 16).view(4, 3, 16, 16)).square().sum().backward()
        results.append([parameter.grad for parameter in model.parameters()])
    for found in results[1:]:
        torch.testing.assert_close(found, results[0], rtol=1e-4, atol=1e-6)


def test_layer_scale_starts_where_it_is_told():
    model = make_model(layer_scale=1e-3)
    assert all(torch.equal(block.scale_mlp.weight, torch.full((16,), 1e-3)) for block in model.blocks)
    plain = make_model()
    x = torch.randn(1, 16, 16)
    torch.testing.assert_close(model.blocks[0].mix(x), plain.blocks[0].mix(x) * 1e-3)


@each("image", IMAGES)
def test_flops_agree_with_torchs_counter(image):
    config = make_config(("attention",), image, head=HeadConfig(outputs=5, hidden=False))
    model = build_model(config, device="meta").eval()
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, config.image.channels, 16, 16, device="meta"))
    assert flops_per_image(config) == pytest.approx(counter.get_total_flops())


def test_reading_in_two_orders_costs_two_scans():
    once, twice = (flops_per_image(make_config(image={"scan": scan})) for scan in ("row", "snake"))
    assert twice > 1.5 * once
    lion, both = (flops_per_image(make_config(("lion_s",), {"scan": scan})) for scan in ("row", "snake"))
    assert lion < both < 1.5 * lion  # it projects once


def test_configurations_are_written_and_read():
    config = make_config(("lion_s",), {"scan": "snake", "class_token": "middle"}, drop_path=0.1)
    written = model_config_to_dict(config)
    assert model_config_to_dict(model_config_from_dict(written)) == written
    assert written["image"]["class_token"] == "middle"
    assert "image" not in model_config_to_dict(ModelConfig(vocab_size=5))


@each(
    "image, changes, words",
    [
        ({"size": 15}, {}, "model.image.size = 15 is no multiple of model.image.patch = 4; use 12 or 16"),
        ({"patch": 0}, {}, "model.image.patch = 0: must be 1 or more"),
        ({"stem": "conv", "patch": 3, "size": 12}, {}, "use a power of two"),
        ({"pooling": "cls"}, {}, 'pooling = "cls" takes a class token'),
        ({"class_outside": True}, {}, "there is no class token"),
        ({"scan": "diagonal"}, {}, "model.image.scan = 'diagonal'; known: row, column"),
        ({"positions": "sincos"}, {"d_model": 10, "layers": ("none",)}, "needs a multiple of 4"),
        ({}, {"drop_path": 1.0}, "model.drop_path = 1.0"),
        ({}, {"layer_scale": -1.0}, "model.layer_scale = -1.0"),
        (
            {"class_token": "first", "pooling": "cls"},
            {"layers": ("semiseparable",), "causal_mixers": True, "d_model": 64},
            "comes before all patches",
        ),
        (
            {},
            {"layers": ("lion_s",), "mixers": MixerOptions(lion_s=LionSConfig(headdim=8, gate_sets=2))},
            "gate_sets = 2: the second set is that of the second of two orders",
        ),
    ],
)
def test_options_that_do_not_fit_are_one_line(image, changes, words):
    with pytest.raises(ValueError, match=words) as caught:
        make_config(image=image, **changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("change", [{"image": ImageConfig(size=32)}, {"drop_path": 0.1}])
def test_other_architectures_have_no_images(change):
    with pytest.raises(ValueError, match=r"is of no use to model.architecture = 'encoder', but to image_classifier"):
        ModelConfig(architecture="encoder", vocab_size=5, layers=("hydra",), **change)


@each(
    "shape, words",
    [
        ((1, 1, 16, 16), "the model reads \\(batch, 3, height, width\\)"),
        ((3, 16, 16), "the model reads"),
        ((1, 3, 16, 18), "16 x 18 pixels do not divide into patches of 4 x 4"),
        ((1, 3, 0, 16), "0 x 16 pixels"),
    ],
)
def test_images_of_another_shape(shape, words):
    with pytest.raises(ValueError, match=words):
        make_model()(torch.zeros(shape))

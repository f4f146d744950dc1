import dataclasses
import json

import pytest
from failures import each

from matmix.model import HeadConfig, ImageConfig, MixerOptions, ModelConfig, count_parameters
from matmix.model.mixers.attention.softmax_attention import AttentionConfig
from matmix.model.mixers.convolutions.short import ConvolutionConfig
from matmix.model.mixers.mru import MRUConfig
from matmix.model.mixers.scans.hydra import HydraConfig


def test_the_published_encoder_has_112_1_million_parameters():
    config = ModelConfig(
        architecture="encoder",
        vocab_size=30528,  # bert-base-uncased's 30522, padded to a multiple of 8 as the authors do
        d_model=768,
        n_layers=23,
        layers=("hydra",),
        mlp_ratio=0.0,
        norm="post",
        norm_bias=True,
    )
    layer = 768 * 3584 + 3584 - 3584  # in_proj, once the parts are added up below
    layer = 768 * (1536 + 1792 + 48) + 1792 * 7 + 1792 + 3 * 24 + 24 * 1536 + 1536 + 1536 * 768
    head = 768 * 768 + 3 * 768 + 30528
    expected = (30528 + 2) * 768 + 2 * 768 + 23 * (layer + 2 * 768) + head
    assert count_parameters(config) == expected
    assert round(expected / 1e5) == 1121


def test_every_third_layer_can_be_attention():
    config = ModelConfig(
        architecture="encoder", d_model=128, n_layers=7, layers=("hydra", "hydra", "attention"), mlp_ratio=0.0
    )
    names = [name for name, _ in config.layer_kinds()]
    assert names == ["hydra", "hydra", "attention", "hydra", "hydra", "attention", "hydra"]
    assert not any(has_mlp for _, has_mlp in config.layer_kinds())


def test_mlp_layers_stand_where_the_pattern_says():
    config = ModelConfig(d_model=64, n_layers=4, layers=("mru", "mru", "mlp"))
    assert config.layer_kinds() == [("mru", False), ("mru", False), (None, True), ("mru", False)]
    implicit = ModelConfig(d_model=64, n_layers=2, layers=("mru",))
    assert implicit.layer_kinds() == [("mru", True), ("mru", True)]


def test_where_a_mixer_is_taken_out_its_mlp_stays():
    config = ModelConfig(d_model=64, n_layers=3, layers=("mru", "none"))
    assert config.layer_kinds() == [("mru", True), (None, True), ("mru", True)]
    assert config.mixer_names() == ["mru"]
    explicit = dataclasses.replace(config, layers=("none", "mlp"))
    assert explicit.layer_kinds() == [(None, False), (None, True), (None, False)]
    assert not explicit.mixer_names()


def test_a_model_of_empty_layers_is_its_embedding_and_readout():
    config = ModelConfig(d_model=8, n_layers=3, layers=("none",), mlp_ratio=0.0, vocab_size=11)
    assert count_parameters(config) == count_parameters(dataclasses.replace(config, n_layers=1)) == 8 * 11 + 8


def test_a_config_survives_json():
    config = ModelConfig(d_model=64, mixers=MixerOptions(mru=MRUConfig(order=4)))
    plain = json.loads(json.dumps(dataclasses.asdict(config)))
    assert plain["mixers"]["mru"]["order"] == 4
    plain["layers"] = tuple(plain["layers"])
    kinds = {"attention": AttentionConfig, "hydra": HydraConfig, "mru": MRUConfig}
    mixers = MixerOptions(**{name: kind(**plain["mixers"][name]) for name, kind in kinds.items()})
    parts = {"mixers": mixers, "head": HeadConfig(**plain["head"]), "image": ImageConfig(**plain["image"])}
    assert ModelConfig(**(plain | parts)) == config


def of_mru(**options):
    return {"layers": ("mru",), "mixers": MixerOptions(mru=MRUConfig(**options))}


@each(
    "fields, words",
    [
        ({"layers": ("atention",)}, ["'atention'", "did you mean 'attention'"]),
        ({"layers": ()}, ["model.layers is empty"]),
        ({"layers": ("hydra",)}, ["'hydra'", "language_model", "encoder"]),
        ({"layers": ("mru",), "architecture": "encoder"}, ["'mru'", "encoder cannot use it"]),
        ({"layers": ("mru",), "d_model": 72}, ["72", "order^2 / 4 = 16"]),
        (of_mru(nheads=5), ["5 * 8", "256"]),
        (of_mru(construction="svd"), ["'svd'", "cayley"]),
        (of_mru(input="first"), ["'first'", "dense, chunked"]),
        (of_mru(element_scale=-1.0), ["element_scale = -1.0"]),
        (of_mru(output_scale=float("nan")), ["output_scale = nan"]),
        (of_mru(order=1, construction="cayley"), ["from 2 to 32"]),
        (of_mru(order=1, construction="householder"), ["from 2 to 32"]),
        (of_mru(order=64, nheads=1, construction="ldu"), ["order = 64", "from 1 to 32"]),
        ({"layers": ("attention",), "d_model": 100}, ["headdim = 64", "100"]),
        (
            {"layers": ("attention",), "mixers": MixerOptions(attention=AttentionConfig(headdim=1))},
            ["must be even"],
        ),
        ({"architecture": "encoder", "layers": ("hydra",), "d_model": 50}, ["headdim = 64", "100"]),
        (
            {
                "architecture": "encoder",
                "layers": ("hydra",),
                "mixers": MixerOptions(hydra=HydraConfig(ngroups=3)),
            },
            ["ngroups = 3", "8 heads"],
        ),
        (
            {
                "architecture": "encoder",
                "layers": ("hydra",),
                "mixers": MixerOptions(hydra=HydraConfig(d_conv=4)),
            },
            ["d_conv = 4", "odd"],
        ),
        (
            {"layers": ("convolution",), "mixers": MixerOptions(convolution=ConvolutionConfig(d_conv=1))},
            ["from 2 to 9"],
        ),
        ({"layers": ("nune",)}, ["did you mean 'none'"]),
        ({"d_model": 0}, ["model.d_model = 0"]),
        ({"dropout": 1.0}, ["model.dropout = 1.0"]),
        ({"mlp_ratio": float("inf")}, ["model.mlp_ratio = inf", "finite"]),
        *(
            ({name: value}, [f"model.{name} = {value}", "0 or more"])
            for name in ("norm_eps", "final_norm_eps", "embedding_norm_eps", "head_norm_eps")
            for value in (-1.0, float("nan"))
        ),
        ({"norm": "sandwich"}, ["'sandwich'", "pre, post"]),
        ({"layers": ("mru", "mlp"), "mlp_ratio": 0.0}, ["mlp_ratio is 0"]),
        ({"logit_softcap": -1.0}, ["model.logit_softcap = -1.0", "0 (none) or more"]),
        ({"norm_kind": "rms", "norm_bias": True}, ["norm_bias = true", "RMSNorm has no biases"]),
        (
            {"norm_kind": "instance", "layers": ("mru",)},
            ["norm_kind", "language_model predicts from earlier positions"],
        ),
        (
            {"norm_kind": "instance", "architecture": "encoder_decoder", "layers": ("mru",)},
            ["norm_kind", "encoder_decoder predicts from earlier positions"],
        ),
        (
            {"norm_kind": "instance", "norm": "post", "architecture": "encoder", "layers": ("hydra",)},
            ['norm_kind = "instance"', 'model.norm = "post"', "take away what positions have in common"],
        ),
        ({"embedding_norm": "first"}, ["'first'", "auto, layers, none"]),
        (
            {"architecture": "image_classifier", "layers": ("hydra",), "embedding_norm": "layers"},
            ["embedding_norm is of no use", "encoder"],
        ),
    ],
)
def test_mistakes_are_one_clear_line(fields, words):
    with pytest.raises(ValueError, match=r"^model\.") as caught:
        ModelConfig(**fields)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_sequence_lengths_are_checked(small_config):
    small_config().check_seqlen(100_000)
    with pytest.raises(ValueError, match="sequence length 0"):
        small_config().check_seqlen(0)
    encoder = small_config("encoder", ("hydra",), position_embeddings=True, max_seqlen=16)
    encoder.check_seqlen(16)
    with pytest.raises(ValueError, match="17 exceeds the 16"):
        encoder.check_seqlen(17)

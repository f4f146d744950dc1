import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from matmix.model import build_model, initialize
from matmix.model.initialization import clean_parameter_name
from matmix.model.mixers.mru import MRUConfig
from matmix.model.mixers.scans.hydra import HydraConfig

ENCODER = {"architecture": "encoder", "layers": ("hydra", "attention"), "norm": "post", "norm_bias": True}


def _initialized(config, seed=0):
    model = build_model(config)
    initialize(model, seed)
    return dict(model.named_parameters())


def test_weights_depend_on_the_seed_and_the_name_only(small_config):
    first = _initialized(small_config(**ENCODER))
    torch.manual_seed(99)
    again = _initialized(small_config(**ENCODER))
    assert all(torch.equal(first[name], again[name]) for name in first)
    deeper = _initialized(small_config(**ENCODER, n_layers=5))
    assert all(torch.equal(first[name], deeper[name]) for name in first)
    other = _initialized(small_config(**ENCODER), seed=1)
    assert not torch.equal(first["blocks.0.mixer.in_proj.weight"], other["blocks.0.mixer.in_proj.weight"])


@pytest.mark.parametrize("kind", [{}, {"architecture": "encoder", "layers": ("hydra",)}])
def test_layers_differ_at_the_start(small_config, kind):
    weights = _initialized(small_config(**kind))
    random = [name for name in weights if name.startswith("blocks.0.") and weights[name].std() > 0]
    assert len(random) >= 3
    for name in random:
        assert not torch.equal(weights[name], weights[name.replace("blocks.0.", "blocks.1.")]), name


def test_starting_values_are_the_published_ones(small_config):
    hydra = HydraConfig(headdim=8, d_state=4, learnable_init_states=True)
    weights = _initialized(small_config(**ENCODER, d_model=256, init_std=0.02, hydra=hydra))
    mixer = {name.split("mixer.")[1]: w for name, w in weights.items() if name.startswith("blocks.0.mixer.")}
    assert torch.equal(mixer["A_log"], torch.zeros(64))
    assert torch.equal(mixer["D"], torch.ones(64))
    assert torch.equal(mixer["init_states"], torch.zeros(64, 8, 4))
    dt = torch.nn.functional.softplus(mixer["dt_bias"])
    assert dt.min() >= 0.001 * 0.99
    assert dt.max() <= 0.1 * 1.01
    assert dt.log().std() > 1.0
    assert mixer["conv1d.weight"].abs().max() <= 7**-0.5
    assert mixer["in_proj.weight"].std().item() == pytest.approx(0.02, rel=0.02)
    mru = _initialized(small_config(d_model=256, n_layers=4, init_std=0.02))
    assert mru["blocks.3.mixer.in_proj.weight"].abs().max() == 0
    assert mru["blocks.3.mixer.state_down"].std().item() == pytest.approx(0.02 * 2, rel=0.15)
    assert mru["blocks.3.mixer.out_proj.weight"].std().item() == pytest.approx(0.02 / 8**0.5, rel=0.02)
    assert mru["blocks.3.mlp.down.weight"].std().item() == pytest.approx(0.02 / 8**0.5, rel=0.02)
    chunked = _initialized(small_config(d_model=512, init_std=0.02, mru=MRUConfig(order=8, nheads=16, input="chunked")))
    assert chunked["blocks.0.mixer.state_up"].abs().max() == 0
    # 0.02 sqrt(state size) / (d_model / order)
    assert chunked["blocks.0.mixer.state_down"].std().item() == pytest.approx(0.02 * 32 / 64, rel=0.05)
    assert mru["embedding.weight"].std().item() == pytest.approx(0.02, rel=0.05)


def test_matrices_without_a_rule_start_as_wide_as_the_recipe_says(small_config):
    weights = _initialized(small_config(**{**ENCODER, "norm": "pre"}, d_model=256, init_std=0.08))
    assert weights["blocks.0.mixer.in_proj.weight"].std().item() == pytest.approx(0.08, rel=0.02)
    assert weights["blocks.0.mlp.down.weight"].std().item() == pytest.approx(0.08 / 6**0.5, rel=0.02)
    with pytest.raises(ValueError, match=r"model\.init_std = -0\.1"):
        small_config(init_std=-0.1)


@pytest.mark.parametrize("d_model", [64, 256])
def test_narrow_models_start_with_wider_matrices(small_config, d_model):
    weights = _initialized(small_config(**{**ENCODER, "norm": "pre"}, d_model=d_model))
    std = (2 / (5 * d_model)) ** 0.5
    assert weights["blocks.0.mixer.in_proj.weight"].std().item() == pytest.approx(std, rel=0.03)
    assert weights["blocks.0.mlp.down.weight"].std().item() == pytest.approx(std / 6**0.5, rel=0.03)


def test_every_parameter_built_on_meta_is_filled(small_config):
    config = small_config(**ENCODER, mlp_bias=True, tie_embeddings=False, position_embeddings=True)
    model = build_model(config, device="meta")
    assert not list(model.buffers())
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.constant_(parameter, float("nan"))
    initialize(model, 0)
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_wrapper_names_are_seen_through():
    assert clean_parameter_name("module.blocks.0._checkpoint_wrapped_module.norm.weight") == "blocks.0.norm.weight"
    assert clean_parameter_name("_orig_mod.blocks.0._orig_mod.norm.weight") == "blocks.0.norm.weight"


@pytest.mark.parametrize(("rank", "world_size"), [(0, 2), (2, 3), (4, 5)])
def test_every_rank_holds_its_part_of_the_same_weights(small_config, rank, world_size):
    config = small_config(**ENCODER)
    whole = _initialized(config)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        mesh = init_device_mesh("cpu", (world_size,))
        model = build_model(config, device="meta")
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model.to_empty(device="cpu")
        initialize(model, 0)
        for name, parameter in model.named_parameters():
            parts = whole[name].chunk(world_size)
            local = parameter.to_local()
            if rank < len(parts):
                assert torch.equal(local, parts[rank]), name
            else:
                assert local.numel() == 0, name
    finally:
        dist.destroy_process_group()

import json

import pytest
import torch
from paths import GOLDEN
from safetensors import safe_open
from safetensors.torch import save_file

from matmix.model import build_model
from matmix.model.interop import read_checkpoint

FILES = {
    "hydra": "hydra_mlm_postnorm.safetensors",
    "mru-lm": "mru_lm_a.safetensors",
    "mru-lm, first form": "mru_lm_first_a.safetensors",
}


def _golden(source):
    with safe_open(GOLDEN / FILES[source], "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        state = {key[6:]: tensor for key, tensor in tensors.items() if key.startswith("state.")}
        return state, file.metadata(), tensors["input_ids"], tensors["logits"]


def _matches(source, path, **overrides):
    _, _, ids, logits = _golden(source)
    config, state = read_checkpoint(source.split(",")[0], path, **overrides)
    model = build_model(config).eval()
    model.load_state_dict(state)
    torch.testing.assert_close(model(ids), logits, rtol=1e-4, atol=1e-4)
    return config


@pytest.mark.parametrize("source", FILES)
def test_a_safetensors_file_with_its_configuration_as_metadata(source, tmp_path):
    state, metadata, _, _ = _golden(source)
    save_file(state, tmp_path / "weights.safetensors", metadata=metadata)
    _matches(source, tmp_path / "weights.safetensors")
    _matches(source, tmp_path)


@pytest.mark.parametrize("source", FILES)
def test_a_torch_file_whose_configuration_is_read_off_the_shapes(source, tmp_path):
    state, metadata, _, _ = _golden(source)
    prefix = "model." if source == "hydra" else "_orig_mod."
    wrapped = {prefix + name: tensor for name, tensor in state.items()}
    content = {"state": {"model": wrapped, "epoch": 3}} if source == "hydra" else wrapped
    torch.save(content, tmp_path / "checkpoint.pt")
    config = _matches(source, tmp_path / "checkpoint.pt")
    assert config.vocab_size == int(metadata["vocab_size"])


@pytest.mark.parametrize("source", FILES)
def test_a_directory_with_config_json_and_shards(source, tmp_path):
    state, metadata, _, _ = _golden(source)
    names = sorted(state)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: state[name] for name in part}, tmp_path / file)
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text(json.dumps(metadata))
    _matches(source, tmp_path)


@pytest.mark.parametrize("name", ["wte.weight", "lm_head_weights"])
def test_the_first_forms_tied_matrix_under_either_name(name, tmp_path):
    state, _, _, _ = _golden("mru-lm, first form")
    del state[name]
    torch.save(state, tmp_path / "checkpoint.pt")
    config = _matches("mru-lm, first form", tmp_path / "checkpoint.pt")
    assert (config.final_norm, config.mixers.mru.input, config.tie_embeddings) == (False, "chunked", True)


def test_overrides_take_precedence(tmp_path):
    state, metadata, _, _ = _golden("mru-lm")
    save_file(state, tmp_path / "model.safetensors", metadata=metadata)
    config, _ = read_checkpoint("mru-lm", tmp_path, state_construction="identity_plus")
    assert config.mixers.mru.construction == "identity_plus"


def test_mistakes_are_one_clear_line(tmp_path):
    state, metadata, _, _ = _golden("hydra")
    with pytest.raises(FileNotFoundError, match="no such file"):
        read_checkpoint("hydra", tmp_path / "absent")
    with pytest.raises(ValueError, match="known: hydra, mru-lm"):
        read_checkpoint("mamba", tmp_path)
    with pytest.raises(ValueError, match="holds no weights"):
        read_checkpoint("hydra", tmp_path)
    broken = tmp_path / "broken.safetensors"
    save_file(state, broken, metadata=metadata)
    broken.write_bytes(broken.read_bytes()[:1000])
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        read_checkpoint("hydra", broken)
    save_file({**state, "bert.pooler.dense.bias": torch.zeros(64)}, broken, metadata=metadata)
    with pytest.raises(ValueError, match=r"'bert.pooler.dense.bias' of shape \(64\)"):
        read_checkpoint("hydra", broken)
    with pytest.raises(ValueError, match=r"mixer.in_proj.weight' has shape \(336, 64\)"):
        read_checkpoint("hydra", GOLDEN / FILES["hydra"], d_state=8)
    with pytest.raises(ValueError, match=r"state lacks key 'wte\.weight'"):
        read_checkpoint("mru-lm", GOLDEN / FILES["hydra"])

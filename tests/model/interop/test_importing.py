import datetime
import json
import math
import random

import numpy as np
import pytest
import torch
from paths import GOLDEN
from safetensors import safe_open
from safetensors.torch import save_file

from matmix.model import build_model
from matmix.model.interop import read_checkpoint
from matmix.model.interop.importing.hydra import hydra_mlm_layout, hydra_mlm_values
from matmix.train.recipe import load_phases

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


def _published_hydra(layers, width, words, d_state=64):
    """Names and shapes of the authors' encoder (hydra/bert of goombalab/hydra): post-norm, tied, without positions."""
    inner, heads = 2 * width, 2 * width // 64
    mixer = {
        "dt_bias": (heads,),
        "A_log": (heads,),
        "D": (heads,),
        "in_proj.weight": (2 * inner + 4 * d_state + 2 * heads, width),
        "conv1d.weight": (inner + 4 * d_state, 1, 7),
        "conv1d.bias": (inner + 4 * d_state,),
        "fc_D.weight": (heads, inner),
        "norm.weight": (inner,),
        "out_proj.weight": (width, inner),
    }
    shapes = {
        "bert.embeddings.word_embeddings.weight": (words, width),
        "bert.embeddings.token_type_embeddings.weight": (2, width),
    }
    for index in range(layers):
        shapes |= {f"bert.encoder.layer.{index}.layer.mixer.{name}": shape for name, shape in mixer.items()}
    norms = ["bert.embeddings.LayerNorm", "cls.predictions.transform.LayerNorm"]
    norms += [f"bert.encoder.layer.{index}.layer.norm" for index in range(layers)]
    shapes |= {f"{norm}.{part}": (width,) for norm in norms for part in ("weight", "bias")}
    head = {"transform.dense.weight": (width, width), "transform.dense.bias": (width,)}
    head |= {"decoder.weight": (words, width), "decoder.bias": (words,)}
    return shapes | {f"cls.predictions.{name}": shape for name, shape in head.items()}


def test_the_published_hydra_at_its_size():
    shapes = _published_hydra(23, 768, 30528)
    state = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    output = state.pop("cls.predictions.decoder.weight")  # numbers that are nowhere cannot be compared: tied
    layout = hydra_mlm_layout(state, hydra_mlm_values(state))
    models = layout.arguments["config"], load_phases("hydra_base_c4")[-1].model
    ours, recipe = ({n: p.shape for n, p in build_model(m, device="meta").named_parameters()} for m in models)
    renamed = layout.renamed(
        build_model(models[0], device="meta").state_dict(), state | {layout.theirs("output.weight"): output}
    )
    assert ours == recipe == {name: tensor.shape for name, tensor in renamed.items()}
    assert len(shapes) == 263
    assert sum(map(math.prod, ours.values())) == 112_086_712


def test_a_whole_checkpoint_of_composer_in_the_layout_of_the_published_hydra(tmp_path):
    shapes = _published_hydra(2, 64, 48)
    draw = torch.Generator().manual_seed(1)
    state = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    state["cls.predictions.decoder.weight"] = state["bert.embeddings.word_embeddings.weight"]
    described = {"hidden_act": "relu", "num_hidden_layers": 2, "vocab_size": 48, "architectures": ["BertForMaskedLM"]}
    numpy_state = {"numpy": np.random.RandomState(1).get_state(), "python": random.getstate()}
    whole = {
        "model": {f"model.{name}": tensor for name, tensor in state.items()},
        "optimizers": {"DecoupledAdamW": {"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": [{"lr": 1e-4}]}},
        "timestamp": {"Timestamp": {"batch": 3, "total_wct": datetime.timedelta(1)}},
        "integrations": {"huggingface": {"model": {"config": {"content": described}}, "tokenizer": {}}},
    }
    torch.save({"state": whole, "rng": [{**numpy_state, "torch": torch.get_rng_state()}]}, tmp_path / "hydra.pt")
    config, read = read_checkpoint("hydra", tmp_path / "hydra.pt")
    assert (config.n_layers, config.vocab_size, config.head_activation) == (2, 48, "relu")
    build_model(config).load_state_dict(read)
    del state["cls.predictions.decoder.weight"]
    layout = hydra_mlm_layout(state, hydra_mlm_values(state))
    assert len(read) == len(state)
    assert all(torch.equal(tensor, state[layout.theirs(name)]) for name, tensor in read.items())


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

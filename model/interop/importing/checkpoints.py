"""Reads whole Hydra and mru-lm models from checkpoints, as a configuration and a state of this project."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from matmix.model.build import build_model
from matmix.model.config import ModelConfig
from matmix.model.interop.importing import foreign
from matmix.model.interop.importing.hydra import hydra_mlm_layout, hydra_mlm_values
from matmix.model.interop.importing.mru import mru_lm_layout, mru_lm_values

SOURCES = {"hydra": (hydra_mlm_layout, hydra_mlm_values), "mru-lm": (mru_lm_layout, mru_lm_values)}
"""Name of a project -> the layout of its models, and the configuration that the shapes of a state imply."""

_CONFIG_FILES = ("config.json", "modelcfg.json", "model.json")
_WEIGHT_FILES = ("model.safetensors.index.json", "model.safetensors", "pytorch_model.bin", "model.pt")
_COUNTS = ("num_hidden_layers", "n_layers", "n_blocks", "layers")
_LARGEST_SIZE = 1 << 31
# Training scripts of mru-lm write whole run configurations, of which this is the model's part.
_MRU_KEYS = (
    *("form", "vocab_size", "embedding_size", "dropout_rate", "n_state_heads", "state_size", "n_attn_heads"),
    *("key_size", "value_size", "layers", "n_blocks", "max_sequence_length"),
    *("state_construction", "construction", "element_scale"),
)


def read_checkpoint(source: str, path: str | Path, **overrides: Any) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    """Reads a checkpoint of another project.

    Args:
        source: "hydra" (encoder with masked-LM head) or "mru-lm".
        path: a .safetensors file, a torch file (read without unpickling code) or a directory of either (as
            Hugging Face writes it). The configuration is config.json beside the weights (or modelcfg.json,
            model.json), or the file's metadata; what it leaves out is read off the shapes.
        overrides: configuration values that take precedence.
    Returns: the model's configuration, and its state in our names, float32. Raises FileNotFoundError, ValueError.
    """
    config, state = open_checkpoint(source, path, **overrides)
    return config, {name: tensor.float().contiguous() for name, tensor in state.items()}


def open_checkpoint(source: str, path: str | Path, **overrides: Any) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    """Reads as `read_checkpoint` does, in the file's types of numbers. The tensors of .safetensors files, and of torch
    files since version 1.6, are views of a map of the file: what nobody touches is not read."""
    if source not in SOURCES:
        raise ValueError(f"cannot import from {source!r}; known: {', '.join(SOURCES)}")
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"no such file or directory: {path}")
    weights = find_weights(path) if path.is_dir() else path
    state, metadata = read_tensors(weights)
    config_file = next((file for name in _CONFIG_FILES if (file := weights.parent / name).is_file()), None)
    configured = {} if config_file is None else foreign.read_object(config_file)
    layout_of, values_of = SOURCES[source]
    try:
        state = strip_prefixes(state)
        values = {**values_of(state), **metadata, **configured}
        if source == "mru-lm":
            values = {name: value for name, value in values.items() if name in _MRU_KEYS}
        values |= overrides
        for name, value in values.items():
            _check_size(name, value, len(state))
        layout = layout_of(state, values)
        config = layout.arguments["config"]
        renamed = layout.renamed(dict(build_model(config, device="meta").named_parameters()), state)
    except ValueError:
        raise
    except Exception as error:  # what shapes and values that nobody would write make of the layouts
        reason = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
        raise ValueError(f"{weights} does not fit together ({ascii(reason)[1:-1]})") from None
    return config, {name: tensor.detach() for name, tensor in renamed.items()}


def _check_size(name: str, value: Any, tensors: int) -> None:
    """Raises ValueError for a size that the weights cannot have, before a model of that size is built."""
    try:
        size = len(value) if isinstance(value, list | tuple) else int(value)
    except (TypeError, ValueError, OverflowError):
        return
    if size > (tensors if name in _COUNTS else _LARGEST_SIZE):
        raise ValueError(
            f"its configuration has {ascii(name)[1:-1]:.60} = {str(size)[:40]}, which its weights cannot have"
        )


def find_weights(directory: Path) -> Path:
    """Returns the weights in a directory: the first known name, else the only .safetensors, .pt, .pth or .bin file."""
    for name in _WEIGHT_FILES:
        if (directory / name).is_file():
            return directory / name
    others = sorted(file for file in directory.iterdir() if file.suffix in (".safetensors", ".pt", ".pth", ".bin"))
    if len(others) != 1:
        what = "no weights" if not others else f"{len(others)} files of weights"
        raise ValueError(f"{directory} holds {what}; name the file to read")
    return others[0]


def read_tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Reads all tensors of a file (or of the shards of a safetensors index), and the configuration in its metadata."""
    if path.name.endswith(".index.json"):
        shards = [read_tensors(shard)[0] for shard in foreign.indexed_files(path)]
        return {name: tensor for shard in shards for name, tensor in shard.items()}, {}
    if path.suffix == ".safetensors":
        tensors, metadata = foreign.read_safetensors(path)
        return tensors, {key: value for key, value in metadata.items() if key != "format"}
    content = foreign.read_torch(path)
    config = _composer_config(content)
    # Composer keeps the weights below state.model, others below one of these words.
    for word in ("state", "model", "state_dict", "model_state_dict"):
        if isinstance(content, Mapping) and isinstance(content.get(word), Mapping):
            content = content[word]
    if not isinstance(content, Mapping) or not all(isinstance(value, torch.Tensor) for value in content.values()):
        raise ValueError(f"{path} does not hold a state dict of tensors")
    for name, tensor in content.items():
        if not isinstance(name, str):
            raise ValueError(f"{path} does not hold a state dict of tensors: its names are no texts")
        foreign.check_plain(name, tensor, path)
    return dict(content), config


def _composer_config(content: Any) -> dict[str, Any]:
    """The config.json that Composer keeps in its checkpoints of Hugging Face models; {} where there is none."""
    for word in ("state", "integrations", "huggingface", "model", "config", "content"):
        content = content.get(word) if isinstance(content, Mapping) else None
    return dict(content) if isinstance(content, Mapping) else {}


def strip_prefixes(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Removes the prefixes that wrappers add to every name (compile, DDP, Composer), and the "state." of golden files;
    tensors without (inputs, gradients, metrics beside the weights) are not the model's."""
    for prefix in ("_orig_mod.", "module.", "model.", "state."):
        if any(name.startswith(prefix) for name in state):
            inner = {name[len(prefix) :]: tensor for name, tensor in state.items() if name.startswith(prefix)}
            return strip_prefixes(inner)
    return state

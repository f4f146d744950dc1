"""Distributed pretraining for models whose sequence mixer is a structured matrix.

    layer = matmix.Hydra(d_model=256)         # y = layer(x), both (batch, seqlen, d_model); matmix.mixer("retnet", 256)
    matmix.semiseparable_scan                 # the operations below the layers
    matmix.train("debug_hydra", {"data.path": "datasets/shakespeare"})
    model = matmix.open("runs/debug_hydra")   # for matmix.generate, score, embed, classify, export

`dir(matmix)` lists the names, which are imported when they are asked for: `import matmix` alone imports no torch. Once
installed, this file is `matmix/__init__.py`. It lies at the root of the repository because the rooms do.
"""

_LAYERS = {
    "Attention": "attention",
    "GatedDelta": "gated_delta",
    "Hydra": "hydra",
    "Hyena": "hyena",
    "LION": "lion_s",
    "LinearAttention": "linear_attention",
    "MRU": "mru",
    "MatrixMemory": "matrix_memory",
    "RWKV7": "rwkv7",
    "RetNet": "retnet",
    "S4D": "s4d",
    "Semiseparable": "semiseparable",
}
"""Layers of any PyTorch model, by the names of their mixers."""
_OPERATIONS = (
    "gated_norm",
    "lion_mixer",
    "matrix_memory",
    "matrix_product_scan",
    "mru_mixer",
    "mru_step",
    "quasiseparable_scan",
    "scan_layer",
    "semiseparable_scan",
    "semiseparable_step",
    "short_conv",
    "short_conv_step",
)
_PLACES = {
    **dict.fromkeys(_OPERATIONS, "kernels"),
    "MIXERS": "model.mixers",
    "ModelConfig": "model.config",
    "build_model": "model",
    "classify": "use.pictures",
    "embed": "use.embedding",
    "export": "use.exporting:export_run",
    "fill_masks": "use.generation",
    "finetuning_config": "use.finetuning",
    "generate": "use.generation",
    "load_config": "train.recipe",
    "mixer": "model.layers",
    "open": "use.opening:open_model",
    "score": "use.scoring:score_texts",
    "score_examples": "use.scoring",
    "score_images": "use.pictures",
    "unmask": "use.unmasking",
}
"""Name -> the module that holds it, and its name there where that is another."""
_ROOMS = ("data", "kernels", "launch", "model", "train", "use")


def __getattr__(name: str) -> object:
    """Imports what `name` stands for. Raises AttributeError that names the nearest where there is nothing."""
    from importlib import import_module

    if name == "__version__":
        from importlib.metadata import version

        return version("matmix")
    if name in _LAYERS:
        return import_module("matmix.model.layers").layer_class(_LAYERS[name])
    if name in _PLACES:
        module, _, own = _PLACES[name].partition(":")
        return getattr(import_module(f"matmix.{module}"), own or name)
    if name in _ROOMS:
        return import_module(f"matmix.{name}")
    from difflib import get_close_matches

    known = __dir__()
    near = get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else "dir(matmix) lists them"
    mixer = '; any mixer is matmix.mixer("name", d_model)' if name[:1].isupper() else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; {hint}{mixer}")


def __dir__() -> list[str]:
    """Lists the names that a person may use."""
    return sorted([*_LAYERS, *_PLACES, *_ROOMS, "__version__"])

"""timm's view of image classifiers: importing this module registers `matmix_image_classifier`.

    import timm
    import matmix.model.interop.timm_models

    model = timm.create_model("matmix_image_classifier", pretrained=True, pretrained_cfg_overlay={"file": "EXPORT"})

EXPORT is the folder of an export, or its model.safetensors. Without pretrained the weights are drawn anew.
`checkpoint_path` takes other weights of the same model, an export's or timm's.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from timm.models import register_model
from torch import nn

from matmix.model.architectures.images import ImageClassifier
from matmix.model.build import build_model
from matmix.model.config import ModelConfig, model_config_from_dict
from matmix.model.images.config import ImageInputs
from matmix.model.initialization import initialize
from matmix.model.interop.importing.exported import read_export, read_export_config, read_image_inputs


class TimmImageClassifier(nn.Module):
    """An image classifier with the methods that timm calls. Parameters have the names that they have in exports."""

    def __init__(self, model: ImageClassifier, inputs: ImageInputs | None):
        super().__init__()
        self.model = model
        self.pretrained_cfg = self.default_cfg = timm_description(model.config, inputs)

    @property
    def num_classes(self) -> int:
        """Outputs; 0 where there is no classifier."""
        return getattr(self.model.classifier.output, "out_features", 0)

    @property
    def num_features(self) -> int:
        return self.model.config.d_model

    head_hidden_size = num_features

    def forward_features(self, x: torch.Tensor) -> torch.Tensor:
        """Images (B, channels, H, W) -> the residual stream (B, L, d_model) before the final norm."""
        return self.model.stream(x)

    def forward_head(self, x: torch.Tensor, pre_logits: bool = False) -> torch.Tensor:
        """The stream -> logits (B, num_classes), or the features (B, d_model) that the classifier takes."""
        pooled = self.model.pooled(x)
        if pre_logits or not self.num_classes:
            return pooled
        return self.model.classifier.output(self.model.features(pooled))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward_head(self.forward_features(x))

    def get_classifier(self) -> nn.Module:
        return self.model.classifier.output

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Makes a new last layer; 0 classes = none. Raises ValueError for another pooling than the model's."""
        if global_pool is not None:
            raise ValueError("the pooling is part of a matmix model (model.image.pooling): leave global_pool out")
        layer: nn.Module = nn.Identity()
        if num_classes:
            layer = nn.Linear(self.num_features, num_classes, device=next(self.model.parameters()).device)
            nn.init.normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)
        self.model.classifier.output = layer

    def no_weight_decay(self) -> set[str]:
        """Names of parameters that timm's optimizers leave undecayed."""
        return {"model.embeddings.positions", "model.embeddings.class_token"}


def timm_description(config: ModelConfig, inputs: ImageInputs | None) -> dict[str, Any]:
    """Returns what `timm.data.resolve_model_data_config` reads; without `inputs`, timm has defaults of its own."""
    image = config.image
    size = image.size if inputs is None else inputs.size
    known = {
        "architecture": "matmix_image_classifier",
        "num_classes": config.head.count,
        "input_size": (image.channels, size, size),
        "fixed_input_size": bool(config.fixed_length_mixers()),
        "classifier": "model.classifier.output",
    }
    if inputs is not None:
        known |= {name: getattr(inputs, name) for name in ("mean", "std", "interpolation")} | {"crop_pct": inputs.crop}
    return known


@register_model
def matmix_image_classifier(
    pretrained: bool = False,
    pretrained_cfg: Any = None,
    pretrained_cfg_overlay: Mapping[str, Any] | None = None,
    num_classes: int | None = None,
    in_chans: int | None = None,
    drop_path_rate: float | None = None,
    config: ModelConfig | Mapping[str, Any] | None = None,
    **options: Any,
) -> TimmImageClassifier:
    """An exported image classifier, or one of `config` with new weights.

    pretrained: read the weights of the export, not only what it is; pretrained_cfg_overlay, or pretrained_cfg:
    {"file": the export}; num_classes: another number than the export's makes a new last layer, 0 = none; in_chans: that
    of the model; drop_path_rate: in place of model.drop_path; config: what is built without an export. Raises
    ValueError (one line), also for other options.
    """
    # timm hands on options that were not given, too.
    if unknown := [name for name, value in options.items() if value is not None]:
        raise ValueError(f"matmix_image_classifier has no option {min(unknown)!r}")
    overlay = pretrained_cfg_overlay or (pretrained_cfg if isinstance(pretrained_cfg, Mapping) else {})
    file = overlay.get("file") or getattr(pretrained_cfg, "file", None)
    if (file is None) == (config is None) or (pretrained and file is None):
        raise ValueError(
            'matmix_image_classifier: say which export, pretrained_cfg_overlay={"file": "EXPORT"}, or give config alone'
        )
    directory = inputs = None
    if file is None:
        wanted = config if isinstance(config, ModelConfig) else model_config_from_dict(config)
    else:
        directory = Path(file) if Path(file).is_dir() else Path(file).parent
        wanted, inputs = read_export_config(directory), read_image_inputs(directory)
    if wanted.model_class.inputs != "images":
        raise ValueError(f"{directory or 'config'} is a {wanted.architecture}, not an image_classifier")
    if in_chans not in (None, wanted.image.channels):
        raise ValueError(f"in_chans = {in_chans}, but the model reads images of {wanted.image.channels} channels")
    if pretrained:
        model = read_export(directory)
    else:
        model = build_model(wanted)
        initialize(model, torch.initial_seed() & 0xFFFF)
    if drop_path_rate is not None:
        for index, block in enumerate(model.blocks):
            block.drop_path.rate = drop_path_rate * index / max(len(model.blocks) - 1, 1)
    timm_model = TimmImageClassifier(model, inputs)
    if num_classes not in (None, wanted.head.count):
        timm_model.reset_classifier(num_classes)
    return timm_model

"""Image classifiers for transformers: AutoModel and AutoModelForImageClassification."""

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image, ImageOps
from transformers.feature_extraction_utils import BatchFeature
from transformers.image_processing_utils import BaseImageProcessor
from transformers.modeling_outputs import BaseModelOutputWithPooling, ImageClassifierOutput
from transformers.utils import can_return_tuple

from matmix.model.architectures.images import ImageClassifier
from matmix.model.interop.export.base import MatmixPreTrainedModel
from matmix.model.interop.export.config import MatmixImageConfig
from matmix.model.interop.export.inputs import Count, classification_loss


class MatmixImageBase(MatmixPreTrainedModel):
    """An image classifier in `self.model`, with as many classes as config.num_labels says."""

    config_class = MatmixImageConfig
    inner_class = ImageClassifier
    main_input_name = "pixel_values"

    def __init__(self, config: MatmixImageConfig):
        config.matmix = {**config.matmix, "head": {**config.matmix.get("head", {}), "outputs": config.num_labels}}
        super().__init__(config)

    def in_own_type(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """The images in the type of the weights: processors give float32, whatever type the model is loaded in."""
        return pixel_values.to(self.dtype) if pixel_values.is_floating_point() else pixel_values


class MatmixImageModel(MatmixImageBase):
    """The residual stream after the last layer, and one vector for each image."""

    @can_return_tuple
    def forward(self, pixel_values: torch.Tensor, **keywords: Any) -> BaseModelOutputWithPooling | tuple:
        """last_hidden_state (B, L, d_model) and pooler_output (B, d_model) of pixel_values (B, channels, H, W)."""
        streams = self.streams(keywords)
        x = self.model.stream(self.in_own_type(pixel_values), streams)
        outputs = {"last_hidden_state": self.model.norm(x), "pooler_output": self.model.pooled(x)}
        return BaseModelOutputWithPooling(**outputs, hidden_states=self.hidden_states(streams))


class MatmixForImageClassification(MatmixImageBase):
    """Logits of the classes of images."""

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor,
        labels: torch.Tensor | None = None,
        num_items_in_batch: Count | None = None,
        **keywords: Any,
    ) -> ImageClassifierOutput | tuple:
        """Logits (B, num_labels) of pixel_values (B, channels, H, W); labels as for `classification_loss`, by
        config.problem_type."""
        logits, hidden = self.run(self.in_own_type(pixel_values), keywords)
        loss = partial(classification_loss, problem=self.config.problem_type)
        loss = self.loss(loss, logits, labels, num_items_in_batch)
        return ImageClassifierOutput(loss=loss, logits=logits, hidden_states=hidden)


# -- the image processor of exports: from pictures to what the model reads, with Pillow and NumPy alone --------------


# What every picture goes through: transformers' processors may be told to leave it out, this one may not.
_STEPS = ("do_convert_rgb", "do_resize", "do_center_crop", "do_rescale", "do_normalize")


class MatmixImageProcessor(BaseImageProcessor):
    """Resizes the short side to size / crop, cuts out the middle, and normalises, by the fields of `ImageInputs`."""

    model_input_names: ClassVar[list[str]] = ["pixel_values"]

    def __init__(
        self,
        mean: Sequence[float] = (0.5, 0.5, 0.5),
        std: Sequence[float] = (0.5, 0.5, 0.5),
        crop: float = 0.875,
        size: int = 224,
        interpolation: str = "bicubic",
        background: int = 255,
        **kwargs: Any,
    ):
        refuse_options({name: value for name, value in kwargs.items() if name in _STEPS})
        if not isinstance(size, int):
            raise ValueError(f"size = {size!r}: give the pixels of a side as one number")
        super().__init__(**kwargs)
        self.mean, self.std = list(mean), list(std)
        self.crop, self.size, self.interpolation, self.background = crop, size, interpolation, background

    def __call__(self, images: Any, **kwargs: Any) -> BatchFeature:
        return self.preprocess(images, **kwargs)

    def preprocess(self, images: Any, return_tensors: str | None = None, **kwargs: Any) -> BatchFeature:
        """One picture or several -> {"pixel_values": (B, channels, size, size)}.

        images: a picture of Pillow, or one of 8 bits as an array (height, width), (height, width, channels) or, as
        tensors mostly are, (channels, height, width); a list of them, or one array more of several. Raises ValueError
        (one line) for others, and for options of transformers' own processors that would change the result.
        """
        refuse_options(kwargs)
        several = images if isinstance(images, list | tuple) or getattr(images, "ndim", 0) == 4 else [images]
        return BatchFeature({"pixel_values": np.stack([*map(self.pixels, several)])}, tensor_type=return_tensors)

    def pixels(self, image: Any) -> np.ndarray:
        """float32 (channels, size, size) of one picture."""
        if isinstance(image, np.ndarray | torch.Tensor):
            image = from_array(image)
        if not isinstance(image, Image.Image):
            raise ValueError(f"an image is a {type(image).__name__}: give images of Pillow, or arrays of 8 bits")
        image = with_three_or_one(ImageOps.exif_transpose(image), len(self.mean), self.background)
        short = int(self.size / self.crop)
        sides = [short * side // min(image.size) for side in image.size]  # in whole numbers, as torchvision rounds
        image = image.resize(sides, Image.Resampling[self.interpolation.upper()])
        left, top = (round((side - self.size) / 2) for side in image.size)
        image = image.crop((left, top, left + self.size, top + self.size))
        values = np.asarray(image, dtype=np.float32).reshape(self.size, self.size, -1) / 255
        mean, std = np.asarray(self.mean, dtype=np.float32), np.asarray(self.std, dtype=np.float32)
        return ((values - mean) / std).transpose(2, 0, 1)


def refuse_options(options: dict[str, Any]) -> None:
    """Raises ValueError (one line) for the first that asks for something else than what is done anyway."""
    for name, value in options.items():
        if value is not None and not (name in _STEPS and value is True):
            raise ValueError(f"the image processor has no use for {name} = {value!r}: leave it out")


def from_array(values: np.ndarray | torch.Tensor) -> Image.Image:
    """A picture of 8 bits. Where both ends could be the channels, those of a tensor come first, of an array last."""
    first = isinstance(values, torch.Tensor)
    values = np.asarray(values.cpu() if first else values)
    if values.dtype != np.uint8:
        raise ValueError(f"an image of {values.dtype}: give arrays of 8 bits (uint8), or images of Pillow")
    if values.ndim == 3:
        ends = (values.shape[0] in (1, 3, 4), values.shape[2] in (1, 3, 4))
        if ends[0] and (first or not ends[1]):
            values = values.transpose(1, 2, 0)
        if values.shape[2] == 1:
            values = values[..., 0]
    if values.ndim not in (2, 3) or (values.ndim == 3 and values.shape[2] not in (3, 4)) or not values.size:
        raise ValueError(f"an image of shape {values.shape}: give (height, width), with 1, 3 or 4 channels or without")
    return Image.fromarray(np.ascontiguousarray(values))


def with_three_or_one(image: Image.Image, channels: int, background: int = 255) -> Image.Image:
    """An image of red, green and blue, or of brightness; transparent pixels show `background`, and 16 bits of grey
    become 8. Raises ValueError (one line) for what has no known range (floats, 32 bits) or colours (LAB, HSV)."""
    if image.mode.startswith("I;16"):
        values = np.asarray(image).astype(np.uint32)
        image = Image.fromarray(((values + 128) // 257).astype(np.uint8))
    elif image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        base = Image.new("RGBA", image.size, (background, background, background, 255))
        base.alpha_composite(image.convert("RGBA"))
        image = base.convert("RGB")
    elif image.mode not in ("1", "L", "P", "RGB", "CMYK", "YCbCr"):
        raise ValueError(f"an image of mode {image.mode}, whose range or colours are not known: convert it to 8 bits")
    return image.convert("RGB" if channels == 3 else "L")

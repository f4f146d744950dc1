"""Holds the models of images: patches, blocks, and a residual stream with one vector for each patch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from matmix.model.architecture import register_architecture
from matmix.model.architectures.text_heads import WithClassifier
from matmix.model.backbone import Backbone, final_norm
from matmix.model.calls import weights_of
from matmix.model.config import ModelConfig
from matmix.model.images.patches import ImageEmbeddings, make_patches, patch_grid, resized_positions
from matmix.model.images.scans import scan_count, scan_orders


class ImageTrunk(Backbone):
    """Patches -> blocks; `norm` is the final norm of pre-norm models. Subclasses make outputs of the stream."""

    causal = False
    inputs = "images"

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.embeddings = ImageEmbeddings(config.image, config.d_model, config.embedding_dropout)
        self.norm = final_norm(config)

    @classmethod
    def check(cls, config: Any) -> None:
        super().check(config)
        if config.image.positions == "sincos" and config.d_model % 4:
            raise ValueError(
                f'model.d_model = {config.d_model}: model.image.positions = "sincos" needs a multiple of 4'
            )

    @classmethod
    def sequence_length(cls, config: Any, seqlen: int) -> int:
        return config.image.length

    @classmethod
    def scans(cls, config: Any) -> tuple[int, bool]:
        return scan_count(config.image), config.image.class_outside

    @classmethod
    def example_inputs(cls, config: Any, batch_size: int, seqlen: int) -> Tensor:
        image = config.image
        return torch.zeros(batch_size, image.channels, image.size, image.size)

    @classmethod
    def input_flops(cls, config: Any) -> float:
        with torch.device("meta"):
            patches = make_patches(config.image, config.d_model)
        return patches.flops() * config.image.side**2 / config.image.length

    @classmethod
    def resized_parameter(cls, name: str, value: Tensor, config: Any) -> Tensor:
        if name == "embeddings.positions":
            return resized_positions(value, config.image.side, config.image.side)
        return value

    def embed(self, inputs: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        return self.embeddings(inputs)

    def stream(self, images: Tensor, streams: list[Tensor] | None = None, **more: Tensor) -> Tensor:
        """The stream (B, L, d_model) behind the last block; streams: as of `run_blocks`; more: as of `embed`."""
        rows, columns = patch_grid(images, self.config.image)
        orders = scan_orders(self.config.image, rows, columns, images.device)
        return self.run_blocks(self.embed(images, **more), None, None, orders, streams=streams)

    def forward(
        self,
        inputs: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
        max_seqlen: int | None = None,
        select: Tensor | None = None,
        readout: Callable[[Tensor, Tensor | None, Tensor | None], Any] | None = None,
        streams: list[Tensor] | None = None,
        **more: Tensor | None,
    ) -> Any:
        """Outputs of images (B, channels, H, W), or whatever `readout` makes of the features.

        H and W may be any multiples of the patch. streams: as in `Backbone.forward`, L positions as `ImageEmbeddings`
        has them. select: as in `Backbone.forward`, of the flattened B * patches; of no meaning where there is one
        output for each image, as max_seqlen is for all.
        """
        if cu_seqlens is not None or attention_mask is not None:
            kind = self.config.architecture
            raise ValueError(f"a model of {kind} reads whole images: give it no cu_seqlens and no attention_mask")
        more = {name: value for name, value in more.items() if value is not None}
        x = self.features(self.of_outputs(self.stream(inputs, streams, **more), select))
        return self.project(x) if readout is None else readout(x, *self.output_projection())

    def of_outputs(self, x: Tensor, select: Tensor | None) -> Tensor:
        """The part of the stream (B, L, d_model) that outputs are made from."""
        raise NotImplementedError


# -- classes of images: patches in the place of tokens ---------------------------------------------------------------


@register_architecture("image_classifier")
class ImageClassifier(WithClassifier, ImageTrunk):
    """Patches -> blocks -> final norm (pre-norm models) -> mean over the patches, or class token -> logits of
    model.head.outputs classes, (B, outputs)."""

    per_document = True

    @classmethod
    def check(cls, config: Any) -> None:
        super().check(config)
        image = config.image
        mixers = config.mixer_names()
        sees = not mixers or any(not config.mixer_is_causal(name) for name in mixers)
        if image.pooling == "cls" and image.class_token == "first" and not sees:
            raise ValueError(
                'model.image.class_token = "first" comes before all patches, of which causal mixers show it none; '
                'set model.image.pooling = "mean"'
            )

    def of_outputs(self, x: Tensor, select: Tensor | None) -> Tensor:
        return self.pooled(x)

    def pooled(self, x: Tensor) -> Tensor:
        """The stream (B, L, d_model) after the final norm -> one vector for each image, (B, d_model). The mean is over
        the patches, without the class token."""
        image = self.config.image
        patches = x.shape[1] - image.class_tokens
        place = image.class_place(patches)
        if image.pooling == "cls":
            return self.norm(x[:, place])
        x = self.norm(x)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        total = wide.sum(1)
        if image.class_token != "none":
            total = total - wide[:, place]
        return (total / patches).to(x.dtype)

    def features(self, x: Tensor) -> Tensor:
        return self.classifier(x)


# -- images of which some patches are hidden: the model says what their pixels are -----------------------------------


@register_architecture("masked_image")
class MaskedImage(ImageTrunk):
    """Patches, a learned vector in the place of hidden ones -> blocks -> final norm (pre-norm models) -> the pixels of
    each patch by one matrix, (B, patches, channels patch patch) in the order of `cut_patches` (arXiv 2111.09886)."""

    head_parameters = ("decoder.", "mask_token")

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.mask_token = nn.Parameter(torch.empty(config.d_model))
        self.decoder = nn.Linear(config.d_model, config.image.channels * config.image.patch**2)

    @classmethod
    def output_flops(cls, config: Any) -> float:
        return 2.0 * config.d_model * config.image.channels * config.image.patch**2

    def embed(self, inputs: Tensor, cu_seqlens: Tensor | None = None, masked: Tensor | None = None) -> Tensor:
        """masked: bool (B, rows, columns) of squares that are hidden, each of one patch, or of any number of patches in
        height and width; None = none. Raises ValueError (one line) where the squares are no whole patches."""
        if masked is not None:
            grid = patch_grid(inputs, self.config.image)
            for dim, count in enumerate(grid, start=1):
                if count % masked.shape[dim]:
                    raise ValueError(
                        f"{masked.shape[1]} x {masked.shape[2]} squares that are hidden are no whole patches of the "
                        f"{grid[0]} x {grid[1]}: let a square be as large as a patch, or a multiple of it"
                    )
                masked = masked.repeat_interleave(count // masked.shape[dim], dim)
        return self.embeddings(inputs, masked, self.mask_token)

    def of_outputs(self, x: Tensor, select: Tensor | None) -> Tensor:
        image = self.config.image
        if image.class_token != "none":
            place = image.class_place(x.shape[1] - 1)
            x = torch.cat((x[:, :place], x[:, place + 1 :]), 1)
        return x if select is None else x.flatten(0, 1)[select]

    def features(self, x: Tensor) -> Tensor:
        return self.norm(x)

    def output_layer(self) -> nn.Module:
        return self.decoder

    def output_projection(self) -> tuple[Tensor | None, Tensor | None]:
        return weights_of(self.decoder, "weight", "bias")

"""Encoders for transformers: AutoModel, AutoModelForMaskedLM, and classifiers."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import modeling_outputs
from transformers.utils import ModelOutput, can_return_tuple

from matmix.model.architectures.encoder import Encoder, EncoderTrunk
from matmix.model.architectures.text_heads import SequenceClassifier, SpanClassifier, TokenClassifier
from matmix.model.interop.export.base import MatmixPreTrainedModel, PredictsTokens, Texts
from matmix.model.interop.export.config import MatmixEncoderConfig
from matmix.model.interop.export.inputs import Count, class_loss, classification_loss, span_loss
from matmix.model.interop.export.unmasking import draw_token, fill_in


class MatmixEncoderBase(MatmixPreTrainedModel):
    """An encoder, or the trunk of one, in `self.model`."""

    config_class = MatmixEncoderConfig
    inner_class = EncoderTrunk
    words = "embeddings.word"
    # The output layers in the file are of no use to models that have a trunk only.
    _keys_to_ignore_on_load_unexpected: ClassVar[list[str] | None] = [r"^model\.(head|output|classifier)\."]


class MatmixEncoderModel(MatmixEncoderBase):
    """The residual stream after the last layer, (B, L, d_model); at padding it carries no information."""

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **keywords: Any,
    ) -> modeling_outputs.BaseModelOutput | tuple:
        texts = input_ids, inputs_embeds, attention_mask, position_ids
        features, hidden = self.run_text(texts, keywords, token_type_ids=token_type_ids)
        return modeling_outputs.BaseModelOutput(last_hidden_state=features, hidden_states=hidden)


class MatmixLabelledEncoder(MatmixEncoderBase):
    """An encoder with outputs for which there may be labels."""

    output_class: ClassVar[type[ModelOutput]]

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Count | None = None,
        **keywords: Any,
    ) -> ModelOutput | tuple:
        """Logits, as the class describes them, and their loss where there are labels."""
        texts = input_ids, inputs_embeds, attention_mask, position_ids
        logits, hidden = self.run_text(texts, keywords, token_type_ids=token_type_ids)
        loss = self.loss(self.label_loss, logits, labels, num_items_in_batch)
        return self.output_class(loss=loss, logits=logits, hidden_states=hidden)

    def label_loss(self, logits: Tensor, labels: Tensor, count: Count | None) -> Tensor:
        return class_loss(logits, labels, count)


class MatmixForMaskedLM(PredictsTokens, MatmixLabelledEncoder):
    """Logits (B, L, vocab_size), to fill in <mask>; labels (B, L) hold the token to find, -100 where there is none."""

    inner_class = Encoder
    output_class = modeling_outputs.MaskedLMOutput
    _keys_to_ignore_on_load_unexpected: ClassVar[list[str] | None] = [r"^model\.classifier\."]

    def __init__(self, config: MatmixEncoderConfig):
        # A classifier's configuration is from here on that of an encoder.
        values = {name: value for name, value in config.matmix.items() if name != "head"}
        config.matmix = {**values, "architecture": "encoder"}
        super().__init__(config)

    def resize_token_embeddings(self, *args, **kwargs) -> nn.Module:
        embeddings = super().resize_token_embeddings(*args, **kwargs)
        missing = embeddings.weight.shape[0] - self.model.head.bias.shape[0]
        if missing:
            # A negative number of places to fill cuts.
            self.model.head.bias = nn.Parameter(F.pad(self.model.head.bias.data, (0, missing)))
        return embeddings

    @torch.no_grad()
    def unmask(
        self,
        input_ids: Tensor,
        *,
        mask_token_id: int,
        attention_mask: Tensor | None = None,
        never: Sequence[int] = (),
        steps: int = 64,
        order: str = "random",
        temperature: float = 0.8,
        top_k: int = 0,
        top_p: float = 0.95,
        seed: int = 0,
    ) -> Tensor:
        """Returns input_ids (B, L) with their masks filled in, as `fill_in` says, for models that masked diffusion has
        trained. never: tokens that are not drawn, such as the tokenizer's all_special_ids; temperature, top_k, top_p:
        as `draw_token` says; seed: of the first row, that of the next is one more, and so on."""
        filled = input_ids.tolist()
        for number, ids in enumerate(filled):
            generator = torch.Generator().manual_seed(seed + number)
            padding = None if attention_mask is None else attention_mask[number : number + 1]

            def look(places: list[int], ids: list[int] = ids, padding: Tensor | None = padding) -> Tensor:
                inputs = torch.tensor([ids], device=input_ids.device)
                output = self(input_ids=inputs, attention_mask=padding, return_dict=True)
                logits = output.logits[0, places].float().cpu()
                logits[:, [mask_token_id, *never]] = float("-inf")
                return logits

            def draw(logits: Tensor, generator: torch.Generator = generator) -> Tensor:
                return torch.tensor([draw_token(row, generator, temperature, top_k, top_p) for row in logits])

            places = [place for place, index in enumerate(ids) if index == mask_token_id]
            fill_in(ids, places, look, draw, steps=steps, order=order, generator=generator)
        return torch.tensor(filled, device=input_ids.device)


# -- encoder heads --------------------------------------------------------------------------------


class MatmixEncoderWithHead(MatmixLabelledEncoder):
    """A classifier in `self.model`."""

    _keys_to_ignore_on_load_unexpected: ClassVar[list[str] | None] = [r"^model\.(head|output)\."]
    architecture: ClassVar[str]
    outputs: ClassVar[int | None] = None
    """Outputs of the head; None = config.num_labels."""

    def __init__(self, config: MatmixEncoderConfig):
        head = {name: getattr(config, f"classifier_{name}") for name in ("pooling", "hidden", "dropout")}
        head["outputs"] = self.outputs or config.num_labels
        config.matmix = {**config.matmix, "architecture": self.architecture, "head": head}
        super().__init__(config)


class MatmixForSequenceClassification(MatmixEncoderWithHead):
    """Logits or values (B, num_labels) of whole texts and pairs of texts; labels as for `classification_loss`, by
    config.problem_type."""

    inner_class = SequenceClassifier
    output_class = modeling_outputs.SequenceClassifierOutput
    architecture = "sequence_classifier"
    one_text_a_row = True

    def label_loss(self, logits: Tensor, labels: Tensor, count: Count | None) -> Tensor:
        return classification_loss(logits, labels, self.config.problem_type, count)


class MatmixForTokenClassification(MatmixEncoderWithHead):
    """Logits (B, L, num_labels) of single tokens; labels (B, L) classes, -100 where there is none."""

    inner_class = TokenClassifier
    output_class = modeling_outputs.TokenClassifierOutput
    architecture = "token_classifier"


class MatmixForMultipleChoice(MatmixEncoderWithHead):
    """Logits (B, choices) of inputs (B, choices, L); labels (B,) say which choice is right."""

    inner_class = SequenceClassifier
    output_class = modeling_outputs.MultipleChoiceModelOutput
    architecture = "sequence_classifier"
    one_text_a_row = True
    outputs = 1

    def run_text(
        self, texts: Texts, keywords: dict[str, Any], *, token_type_ids: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """Reads choices as rows."""
        inputs = next((values for values in texts[:2] if values is not None), None)
        *texts, types = (None if values is None else values.flatten(0, 1) for values in (*texts, token_type_ids))
        logits, hidden = super().run_text(tuple(texts), keywords, token_type_ids=types)
        return logits.view(inputs.shape[:2]), hidden


class MatmixForQuestionAnswering(MatmixEncoderWithHead):
    """Where in the text the answer starts and ends: start_logits and end_logits (B, L)."""

    inner_class = SpanClassifier
    architecture = "span_classifier"
    one_text_a_row = True
    outputs = 2

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        num_items_in_batch: Count | None = None,
        **keywords: Any,
    ) -> modeling_outputs.QuestionAnsweringModelOutput | tuple:
        """start_positions and end_positions (B,) are tokens of the row; behind its end they have no loss."""
        texts = input_ids, inputs_embeds, attention_mask, position_ids
        logits, hidden = self.run_text(texts, keywords, token_type_ids=token_type_ids)
        starts, ends = (part.squeeze(-1).contiguous() for part in logits.split(1, dim=-1))
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = span_loss(starts, start_positions, num_items_in_batch)
            loss = (loss + span_loss(ends, end_positions, num_items_in_batch)) / 2
        return modeling_outputs.QuestionAnsweringModelOutput(
            loss=loss, start_logits=starts, end_logits=ends, hidden_states=hidden
        )

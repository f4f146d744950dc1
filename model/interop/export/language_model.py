"""Language models for transformers: AutoModel and AutoModelForCausalLM."""

from functools import partial
from typing import Any

import torch
from transformers import GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import can_return_tuple

from matmix.model.architectures.language_model import LanguageModel
from matmix.model.interop.export.base import MatmixPreTrainedModel, PredictsTokens
from matmix.model.interop.export.config import MatmixConfig
from matmix.model.interop.export.generation_state import (
    CarriedState,
    check_continuation,
    check_state,
    continue_state,
    read_prompt,
)
from matmix.model.interop.export.inputs import (
    Count,
    columns_to_keep,
    documents,
    next_token_loss,
    take_columns,
    tokens_or_embeddings,
)


class MatmixLanguageModelBase(MatmixPreTrainedModel):
    """A `LanguageModel` in `self.model`."""

    config_class = MatmixConfig
    inner_class = LanguageModel
    words = "embedding"


class MatmixModel(MatmixLanguageModelBase):
    """The final features (B, L, d_model), from which the output projection makes logits."""

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **keywords: Any,
    ) -> BaseModelOutputWithPast | tuple:
        texts = input_ids, inputs_embeds, attention_mask, position_ids
        features, hidden = self.run_text(texts, keywords, readout=lambda x, *_, **capped: x)
        shape = (inputs_embeds if input_ids is None else input_ids).shape[:2]
        return BaseModelOutputWithPast(last_hidden_state=features.unflatten(0, shape), hidden_states=hidden)


class MatmixForCausalLM(PredictsTokens, MatmixLanguageModelBase, GenerationMixin):
    """Next-token logits, with a loss for training and carried state for generation.

    With `use_cache=True` (as `generate` calls it) the layers' states come back as `past_key_values`, which newer
    versions of transformers call `cache`, and a further call with them takes only the new tokens. Padding may stand on
    either side and never enters a state.
    """

    # Generation methods that need to take tokens back (assisted decoding and the like) are refused by transformers.
    _is_stateful = True

    def __init__(self, config: MatmixConfig):
        super().__init__(config)
        # In this table Trainer looks up whose labels are the next tokens, when it smooths labels.
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type] = type(self).__name__

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: CarriedState | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        num_items_in_batch: Count | None = None,
        cache: CarriedState | None = None,
        **keywords: Any,
    ) -> CausalLMOutputWithPast | tuple:
        """Logits (B, L, vocab_size), or of the columns only that `columns_to_keep` takes logits_to_keep for.

        labels (B, L): the input ids again, -100 where a token shall not count, or the keyword shift_labels (B, L), what
        follows each position. attention_mask (B, L): 0 at padding. position_ids (B, L): as of `documents`. With a
        carried state, hidden states are those of the new tokens.
        """
        inputs = tokens_or_embeddings(input_ids, inputs_embeds)
        shape = tuple(inputs.shape[:2])
        columns = columns_to_keep(logits_to_keep, shape)
        state, past = None, cache if past_key_values is None else past_key_values
        # No parameter: Trainer takes all those named after labels for columns that each batch has.
        shift_labels = keywords.pop("shift_labels", None)
        check_continuation(past, shape, attention_mask, position_ids, keywords.pop("cache_position", None))
        layout = documents(shape, attention_mask, position_ids, keywords) if past is None else {}
        streams = self.streams(keywords)
        if past is not None:
            logits, state = continue_state(self.model, inputs, past, columns, streams)
        elif use_cache:
            if layout["cu_seqlens"] is not None:
                raise ValueError("a state is carried for one text in each row: give each text a row of its own")
            logits, state = read_prompt(self.model, inputs, attention_mask, columns, streams)
        elif columns == slice(0, shape[1]):
            logits = self.model(inputs, **layout, streams=streams)
        else:
            places = take_columns(torch.arange(inputs.shape[:2].numel(), device=inputs.device).view(shape), columns)
            logits = self.model(inputs, **layout, select=places.flatten(), streams=streams).unflatten(0, places.shape)
        loss = partial(next_token_loss, shifted=shift_labels is not None)
        loss = self.loss(loss, logits, labels if shift_labels is None else shift_labels, num_items_in_batch)
        hidden = self.hidden_states(streams)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=state, hidden_states=hidden)

    def prepare_inputs_for_generation(
        self,
        input_ids: torch.Tensor,
        past_key_values: CarriedState | None = None,
        attention_mask: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        cache: CarriedState | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The tokens that the state has not seen, or at first the vectors in their place."""
        past = cache if past_key_values is None else past_key_values
        # Those of a prompt are looked at; with each token they go on as the state does.
        position_ids = kwargs.get("position_ids") if past is None else None
        if past is not None:
            # Of a prompt of vectors input_ids has no columns, but the mask has.
            columns = input_ids.shape[1] if attention_mask is None else attention_mask.shape[1]
            new = columns - past.get_seq_length()
            if new < 1:
                # The state has read more than there are columns: vectors that an adapter puts before the text.
                position = kwargs.get("cache_position")
                new = kwargs.get("next_sequence_length") or (0 if position is None else position.numel())
            check_state(past, input_ids.shape[0], new)
            input_ids, inputs_embeds = input_ids[:, input_ids.shape[1] - new :], None
        elif inputs_embeds is not None:
            input_ids = None
        given = inputs_embeds if input_ids is None else input_ids
        if position_ids is not None and position_ids.shape[1] != given.shape[1]:
            position_ids = None
        return {
            "position_ids": position_ids,
            "input_ids": input_ids,
            "inputs_embeds": inputs_embeds,
            "attention_mask": attention_mask,
            "past_key_values": past,
            "use_cache": use_cache,
            "logits_to_keep": 0 if logits_to_keep is None else logits_to_keep,
            **{name: kwargs.get(name) for name in ("output_attentions", "output_hidden_states")},
        }

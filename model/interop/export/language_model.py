"""Language models for transformers: AutoModel and AutoModelForCausalLM."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from matmix.model.architectures.language_model import LanguageModel
from matmix.model.interop.export.base import MatmixPreTrainedModel, mean_cross_entropy, tokens_or_embeddings
from matmix.model.interop.export.config import MatmixConfig
from matmix.model.interop.export.generation_state import CarriedState, continue_state, read_prompt


class MatmixLanguageModelBase(MatmixPreTrainedModel):
    """A `LanguageModel` in `self.model`."""

    config_class = MatmixConfig

    def __init__(self, config: MatmixConfig):
        super().__init__(config)
        self.model = LanguageModel(self.matmix_config())
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.embedding = value


class MatmixModel(MatmixLanguageModelBase):
    """The final features (B, L, d_model), from which the output projection makes logits."""

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> BaseModelOutputWithPast | tuple:
        inputs = tokens_or_embeddings(input_ids, inputs_embeds)
        streams = self.streams(output_hidden_states, output_attentions)
        features, hidden = self.run(inputs, streams, attention_mask=attention_mask, readout=lambda x, weight, bias: x)
        features = features.unflatten(0, inputs.shape[:2])
        output = BaseModelOutputWithPast(last_hidden_state=features, hidden_states=hidden)
        return output.to_tuple() if return_dict is False else output


class MatmixForCausalLM(MatmixLanguageModelBase, GenerationMixin):
    """Next-token logits, with a loss for training and carried state for generation.

    With `use_cache=True` (as `generate` calls it) the layers' states come back as `past_key_values`, which newer
    versions of transformers call `cache`, and a further call with them takes only the new tokens. Padding may stand on
    either side and never enters a state.
    """

    # Generation methods that need to take tokens back (assisted decoding and the like) are refused by
    # transformers.
    _is_stateful = True

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def get_output_embeddings(self) -> nn.Module:
        return self.model.embedding if self.config.tie_word_embeddings else self.model.output

    def set_output_embeddings(self, value: nn.Module) -> None:
        if not self.config.tie_word_embeddings:
            self.model.output = value

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        past_key_values: CarriedState | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        inputs_embeds: torch.Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cache: CarriedState | None = None,
    ) -> CausalLMOutputWithPast | tuple:
        """Logits (B, L, vocab_size), or of the last `logits_to_keep` columns only.

        labels (B, L): the input ids again, -100 where a token shall not count; the loss is the mean over
        predictions of labels[:, 1:]. attention_mask (B, L): 0 at padding. With a carried state, hidden states are
        those of the new tokens.
        """
        inputs = tokens_or_embeddings(input_ids, inputs_embeds)
        streams = self.streams(output_hidden_states, output_attentions)
        state, past_key_values = None, cache if past_key_values is None else past_key_values
        if past_key_values is not None:
            new = inputs.shape[1]
            if attention_mask is not None and new > 1 and not bool(attention_mask[:, -new:].all()):
                raise ValueError("tokens that continue a state cannot be padded; pad only the first prompt")
            logits, state = continue_state(self.model, inputs, past_key_values, logits_to_keep, streams)
        elif use_cache:
            logits, state = read_prompt(self.model, inputs, attention_mask, logits_to_keep, streams)
        else:
            select = self._last_columns(inputs, logits_to_keep)
            logits = self.model(inputs, attention_mask=attention_mask, select=select, streams=streams)
            logits = logits if select is None else logits.unflatten(0, (inputs.shape[0], logits_to_keep))
        hidden = self.hidden_states(streams)
        loss = None if labels is None else mean_cross_entropy(logits[:, :-1], labels[:, 1:])
        output = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=state, hidden_states=hidden)
        return output.to_tuple() if return_dict is False else output

    def _last_columns(self, inputs: torch.Tensor, keep: int) -> torch.Tensor | None:
        """The positions of the last `keep` columns in the flattened batch; None = all columns."""
        batch, length = inputs.shape[:2]
        if not keep or keep >= length:
            return None
        columns = torch.arange(length - keep, length, device=inputs.device)
        return (torch.arange(batch, device=inputs.device).unsqueeze(1) * length + columns).flatten()

    def prepare_inputs_for_generation(
        self,
        input_ids: torch.Tensor,
        past_key_values: CarriedState | None = None,
        attention_mask: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | None = None,
        inputs_embeds: torch.Tensor | None = None,
        cache: CarriedState | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The tokens that the state has not seen, or at first the vectors in their place; everything else `generate`
        carries along is of no use here."""
        past_key_values = cache if past_key_values is None else past_key_values
        if past_key_values is not None:
            # Of a prompt of vectors input_ids has no columns, but the mask has.
            columns = input_ids.shape[1] if attention_mask is None else attention_mask.shape[1]
            new = columns - past_key_values.seen
            input_ids, inputs_embeds = input_ids[:, input_ids.shape[1] - new :], None
        elif inputs_embeds is not None:
            input_ids = None
        return {
            "input_ids": input_ids,
            "inputs_embeds": inputs_embeds,
            "attention_mask": attention_mask,
            "past_key_values": past_key_values,
            "use_cache": use_cache,
            "logits_to_keep": logits_to_keep or 0,
            **{name: kwargs.get(name) for name in ("output_attentions", "output_hidden_states")},
        }

"""What the checks of exported models share; nothing of matmix."""

from __future__ import annotations

import warnings

import torch


def largest(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a.float() - b.float()).abs().max().item()


def load(auto_class, path, **options):
    """A model, and what of its weights was missing or had no place."""
    model, info = auto_class.from_pretrained(path, trust_remote_code=True, output_loading_info=True, **options)
    problems = {name: list(keys) for name, keys in info.items() if keys}
    return model.eval(), problems


def fine_tune(model, labels_name: str, **batch) -> None:
    """Two steps lower the loss, and change every weight."""
    model.eval()  # without dropout, which would be most of the difference
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(3):
        loss = model(**batch).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[2] < losses[0], f"two steps of fine-tuning on {labels_name} do not lower the loss: {losses}"
    still = [name for name, parameter in model.named_parameters() if torch.equal(parameter, before[name])]
    assert not still, f"fine-tuning on {labels_name} does not reach {still}"


def reshaped(model, values: torch.Tensor) -> torch.Tensor:
    """Inputs (B, L, ...) as the model takes them: one that compares choices gets two rows for each text."""
    return values.unflatten(0, (-1, 2)) if type(model).__name__ == "MatmixForMultipleChoice" else values


def check_embeddings(model, ids: torch.Tensor, tolerance: float) -> None:
    """What the word embedding gives can be passed in place of the ids, with padding, and exactly one of the two has
    to be."""
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    with torch.no_grad():
        vectors = model.get_input_embeddings()(ids)
        ids, vectors, mask = (reshaped(model, values) for values in (ids, vectors, mask))
        expected = model(ids, attention_mask=mask).to_tuple()
        found = model(inputs_embeds=vectors, attention_mask=mask).to_tuple()
    assert all(largest(a, b) <= tolerance for a, b in zip(found, expected, strict=True))
    wrong = {"neither": {}, "both": {"input_ids": ids, "inputs_embeds": vectors}, "not vectors": {"inputs_embeds": ids}}
    for words, inputs in wrong.items():
        message = ""
        try:
            model(**inputs)
        except ValueError as error:
            message = str(error)
        assert words in message, message
        assert "\n" not in message


def check_no_attentions(model, **batch) -> None:
    """They are None, which a warning says."""
    with warnings.catch_warnings(record=True) as told, torch.no_grad():
        warnings.simplefilter("always")
        assert model(**batch, output_attentions=True).attentions is None
    assert ["no attention matrices" in str(warning.message) for warning in told] == [True]


def check_recomputing(model, **batch) -> None:
    """Gradients are the same where a layer's activations are computed again for them, in training only, until that is
    switched off."""
    calls: list[int] = []
    hook = model.model.blocks[0].norm_mixer.register_forward_pre_hook(lambda *inputs: calls.append(1))

    def gradients(times: int) -> list[torch.Tensor]:
        calls.clear()
        torch.manual_seed(0)  # of dropout
        model.train()
        model(**batch).loss.backward()
        assert len(calls) == times, f"the first layer ran {len(calls)} times"
        found = [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        return found

    expected = gradients(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer versions of transformers prefer another name
        for reentrant in (True, False):
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            assert model.is_gradient_checkpointing
            assert all(torch.equal(a, b) for a, b in zip(gradients(2), expected, strict=True)), "other gradients"
        model.eval()
        calls.clear()
        model(**batch).loss.backward()
        assert len(calls) == 1
        model.zero_grad()
        model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing
    gradients(1)
    hook.remove()
    model.eval()


def check_compiled(model, **batch) -> None:
    """torch.compile changes no gradient."""
    parameters = list(model.parameters())
    expected = torch.autograd.grad(model(**batch).loss, parameters)
    torch._dynamo.reset()
    found = torch.autograd.grad(torch.compile(model, backend="eager")(**batch).loss, parameters)
    assert all(largest(a, b) <= 1e-6 for a, b in zip(found, expected, strict=True)), "compiled gradients differ"


def check_hidden_states(model, backbone, ids: torch.Tensor, tolerance: float) -> None:
    """One stream before the first layer and one after each, the last of which makes the outputs; the same from both
    classes, and none where nobody asks. ids (B, L), of which a model that compares choices gets two for each text."""
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    shape = (len(ids) // 2, 2, -1) if type(model).__name__ == "MatmixForMultipleChoice" else ids.shape
    with torch.no_grad():
        streams = backbone(ids, attention_mask=mask, output_hidden_states=True).hidden_states
        options = {"attention_mask": mask.view(shape), "output_hidden_states": True}
        also = model(ids.view(shape), **options).hidden_states
        without_names = model(ids.view(shape), **options, return_dict=False)[-1]
        last = backbone(ids, attention_mask=mask).last_hidden_state
        assert model(ids.view(shape)).hidden_states is None
    assert len(streams) == len(also) == len(without_names) == model.config.num_hidden_layers + 1
    assert all(stream.shape == last.shape for stream in streams)
    assert all(largest(a, b) <= tolerance for a, b in zip(streams, also, strict=True))
    assert largest(streams[-1], last) <= tolerance

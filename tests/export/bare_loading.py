"""What the checks of exported models share; nothing of matmix."""

from __future__ import annotations

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

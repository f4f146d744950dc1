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

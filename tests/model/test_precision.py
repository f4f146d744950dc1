"""What is sent in bfloat16 is what autocast rounds anyway."""

from typing import Any

import pytest
import torch
from every_mixer import SEQLEN, encoder_of_all, language_model_of_all
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from matmix.model import build_model
from matmix.model.precision import round_weights, rounded_parameters


class Uses(TorchDispatchMode):
    """While active: which parameters are cast to bfloat16, and which are used as they are."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names = {one.untyped_storage().data_ptr(): name for name, one in model.named_parameters()}
        self.cast: set[str] = set()
        self.exact: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if getattr(function, "is_view", False):
            return result
        is_cast = function is torch.ops.aten._to_copy.default and result.dtype is torch.bfloat16
        for one in tree_leaves((args, kwargs)):
            if isinstance(one, torch.Tensor) and one.untyped_storage().data_ptr() in self.names:
                (self.cast if is_cast else self.exact).add(self.names[one.untyped_storage().data_ptr()])
        return result


EVERY_MIXER = pytest.mark.parametrize(
    "config", [encoder_of_all(), language_model_of_all()], ids=["encoder", "language model"]
)


@EVERY_MIXER
def test_rounded_parameters_are_cast_before_each_use(config, randomize):
    model = randomize(build_model(config), std=0.1).eval()
    with Uses(model) as uses, torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.zeros(2, SEQLEN, dtype=torch.long))
    rounded = rounded_parameters(model)
    assert rounded <= uses.cast - uses.exact
    assert any(name.endswith("out_proj.weight") for name in rounded)
    # All large matrices but those of mixers that have one for every position, and embeddings.
    missed = uses.cast - uses.exact - rounded
    assert not [name for name in missed if name.endswith("proj.weight")]


@EVERY_MIXER
def test_nothing_changes_where_they_come_rounded(config, randomize):
    """Outputs and all gradients, bit for bit: rounding earlier is rounding once."""
    model = randomize(build_model(config), std=0.1)
    found = []
    for rounds in (False, True):
        if rounds:
            round_weights(model)
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = model(torch.arange(2 * SEQLEN).view(2, SEQLEN) % 29)
        outputs.float().square().sum().backward()
        found.append({"outputs": outputs.detach()} | {name: one.grad for name, one in model.named_parameters()})
    assert all(one.dtype is torch.float32 for name, one in found[1].items() if name != "outputs")
    assert [name for name, one in found[0].items() if not torch.equal(one, found[1][name])] == []


def test_a_weight_that_is_an_embedding_as_well_is_exact():
    model = nn.ModuleDict({"word": nn.Embedding(4, 3), "out": nn.Linear(3, 4), "other": nn.Linear(3, 3)})
    model["out"].weight = model["word"].weight
    assert rounded_parameters(model) == {"other.weight"}

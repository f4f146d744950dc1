"""Gradients are scaled down to the limit of their group, and never up."""

import pytest
import torch

from matmix.train.engine.clipping import clip_groups, norms_of


@pytest.mark.parametrize(("limit", "factor"), [(1.0, 0.2), (10.0, 1.0), (0.0, 1.0)])
def test_gradients_are_clipped_to_the_limit_of_their_group(limit, factor):
    given = {"all": [torch.tensor([3.0]), torch.tensor([[0.0, 4.0]])], "apart": [torch.tensor([2.0])], "none": []}
    gradients = {name: [tensor.clone() for tensor in tensors] for name, tensors in given.items()}
    norms = norms_of(gradients, torch.device("cpu"))
    assert norms.tolist() == [5.0, 2.0, 0.0]
    norm, is_finite, _ = clip_groups(gradients, norms, {"all": limit, "apart": 3.0, "none": 1.0})
    assert is_finite
    torch.testing.assert_close(norm, torch.tensor(29.0).sqrt())
    torch.testing.assert_close(gradients["all"], [tensor * factor for tensor in given["all"]])
    torch.testing.assert_close(gradients["apart"], given["apart"])

"""The average of the weights is what its definition says, for any optimizer, and changes nothing of the training."""

import pytest
import torch

from matmix.train.optim import optimizer_class
from matmix.train.optim.adamw import AdamW
from matmix.train.optim.averaging import AVERAGE, decay_at, keep_average
from matmix.train.optim.base import Optimizer
from matmix.train.optim.config import EmaConfig


class Plain(Optimizer, torch.optim.SGD):
    """Keeps nothing of its own."""

    moments = ()


OPTIMIZERS = {
    "adamw": lambda parameters: AdamW(parameters, lr=0.05, fused=True),
    "stable_adamw": lambda parameters: optimizer_class("stable_adamw")(parameters, lr=0.05),
    "sgd": lambda parameters: Plain(parameters, lr=0.05),
}


def train(kind: str, config: EmaConfig, steps: int, idle: int = 0):
    """The optimizer, its parameters, and their values before the first and after every step; the second parameter has
    no gradient in the first `idle` steps."""
    generator = torch.Generator().manual_seed(1)
    parameters = [torch.nn.Parameter(torch.randn(4, 3, generator=generator)), torch.nn.Parameter(torch.ones(5))]
    optimizer = OPTIMIZERS[kind](parameters)
    keep_average(optimizer, config)
    seen = [[parameter.detach().clone() for parameter in parameters]]
    for step in range(steps):
        for number, parameter in enumerate(parameters):
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            if number == 1 and step < idle:
                parameter.grad = None
        optimizer.step()
        seen.append([parameter.detach().clone() for parameter in parameters])
    return optimizer, parameters, seen


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(
    "config", [EmaConfig(decay=0.9), EmaConfig(decay=0.99, warmup=True), EmaConfig(decay=0.8, every=3)]
)
def test_it_is_its_definition(kind, config):
    optimizer, parameters, seen = train(kind, config, 8)
    for number, parameter in enumerate(parameters):
        average = seen[0][number].double()
        for step in range(1, 9):
            decay = min(config.decay, (1 + step) / (10 + step)) if config.warmup else config.decay
            if step % config.every == 0:
                average = decay**config.every * average + (1 - decay**config.every) * seen[step][number]
        found = optimizer.state[parameter][AVERAGE]
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), average, rtol=1e-6, atol=1e-6)
        assert (found - parameter).abs().max() > 1e-3  # it lags behind


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_training_is_the_same_bit_for_bit(kind):
    _, _, seen = train(kind, EmaConfig(decay=0.9), 5)
    _, _, without = train(kind, EmaConfig(), 5)
    for got, expected in zip(seen, without, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_a_parameter_has_one_from_its_first_update_on():
    optimizer, parameters, seen = train("adamw", EmaConfig(decay=0.5), 2, idle=2)
    assert AVERAGE in optimizer.state[parameters[0]]
    assert not optimizer.state.get(parameters[1])
    optimizer, parameters, seen = train("adamw", EmaConfig(decay=0.5), 3, idle=2)
    torch.testing.assert_close(optimizer.state[parameters[1]][AVERAGE], (seen[2][1] + seen[3][1]) / 2)


def test_warm_up_forgets_the_first_weights():
    config = EmaConfig(decay=0.99, warmup=True)
    assert [decay_at(step, config) for step in (1, 10, 10_000)] == [2 / 11, 11 / 20, 0.99]


@pytest.mark.parametrize(
    ("values", "words"),
    [({"decay": 1.0}, "below 1"), ({"decay": 0.9, "every": 0}, "ema.every"), ({"warmup": True}, "need ema.decay")],
)
def test_what_cannot_be_is_one_line(values, words):
    with pytest.raises(ValueError, match=words):
        EmaConfig(**values)

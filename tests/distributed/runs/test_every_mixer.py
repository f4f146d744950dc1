"""Every registered mixer can be sharded, recomputed and replicated, and learns the same."""

import pytest
from harness import run_distributed
from mixers_scenario import losses_of_all_mixers


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"name": "fsdp2", "activation_checkpointing": "full"}, {"name": "ddp"}])
def test_every_mixer_on_two_ranks(options):
    expected = losses_of_all_mixers({"name": "fsdp2"})
    for losses in expected:
        assert losses[-1] < losses[0]
    for found in run_distributed(losses_of_all_mixers, 2, arguments=(options,)):
        for losses, wanted in zip(found, expected, strict=True):
            assert losses == pytest.approx(wanted, rel=1e-3)

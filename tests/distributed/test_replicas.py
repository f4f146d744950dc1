"""What one rank alone gets wrong, all ranks know: they skip together, and copies that differ are named."""

import pytest
import replica_scenario
from harness import run_distributed
from nightly import nightly
from scenarios import ENGINES

HSDP = {"name": "fsdp2", "replicate": 2}
ON_FOUR = {"hsdp": HSDP, "ddp": ENGINES["ddp"], "zero0": ENGINES["zero0"], "zero2": ENGINES["zero2"]}
COPIED = ("hsdp", "ddp", "zero0")


def _assert_skipped_together(found):
    for rank in found:
        for name, run in rank.items():
            assert not run["finite"], name
            assert run["unchanged"], name
            assert run["difference"] is None, name
            assert run["same_norms"], name


@pytest.mark.parametrize(("ranks", "engines"), [(2, ENGINES), nightly(4, ON_FOUR)])
def test_a_nan_on_one_rank_after_the_reduction_skips_the_step_on_all(ranks, engines):
    arguments = (engines, float("nan"))
    _assert_skipped_together(run_distributed(replica_scenario.changes_after_reduction, ranks, arguments=arguments))


def test_a_gradient_that_differs_on_one_copy_is_seen_in_that_step():
    engines = {name: ON_FOUR[name] for name in COPIED}
    for rank in run_distributed(replica_scenario.changes_after_reduction, 4, arguments=(engines, 1.5)):
        for name, run in rank.items():
            assert run["finite"], name
            assert run["differ"], name
            # HSDP's copies are two and two; of the others' four, one is odd.
            named = "too few copies" if name == "hsdp" else "rank 1 (node"
            assert named in run["difference"], name


@pytest.mark.slow
def test_one_changed_bit_of_one_rank_is_named():
    sizes = {2: ENGINES, 4: ON_FOUR}
    for ranks, engines in sizes.items():
        found = run_distributed(replica_scenario.find_flips, ranks, arguments=(engines,))
        assert all(rank == found[0] for rank in found)  # all ranks say the same
        for name, (unharmed, *said) in found[0].items():
            assert unharmed is None, name
            # Weights, moments and buffer where they have copies; the buffer always has.
            counts = {"fsdp2": 1, "zero1": 2, "zero2": 2, "zero3": 1}
            assert len(said) == counts.get(name, 3), name
            assert all(words is not None and "rank" in words for words in said), name
            assert "model.scale" in said[-1]
            if len(said) > 1:
                assert "model.blocks.1.up.weight" in said[0]
            if ranks == 4 and name != "hsdp":
                assert all(words.startswith("rank 1 (node ") for words in said)
            if name == "hsdp":
                assert "ranks 1, 3 " in said[0]

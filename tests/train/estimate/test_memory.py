"""What is planned is what a process takes: peak memory of real training steps, in processes of their own."""

import dataclasses
import os
import re

import numpy as np
import pytest
import torch
from failures import each
from mixer_cases import small_config
from nightly import nightly
from storages import Storages

from matmix.benchmarks.memory import ENGINES, MODES, compare
from matmix.model import build_model
from matmix.model.mixers import MIXERS
from matmix.model.mixers.scans.hydra import HydraConfig
from matmix.train.activation import checkpoint_activations
from matmix.train.config import RunConfig
from matmix.train.estimate import SIMULATED, simulate_step, step_memory
from matmix.train.estimate.layers import Record, deepened, shallow
from matmix.train.estimate.plan import make_plan, print_plan
from matmix.train.recipe import load_config

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="peaks are read from Linux's /proc")

RECIPE = """
steps = 10
global_batch_size = 8
[model]
architecture = "{architecture}"
vocab_size = 8192
d_model = 512
n_layers = 6
layers = ["{mixer}"]
[data]
seqlen = 256
[objective]
name = "{objective}"
"""


@pytest.fixture
def recipe(tmp_path):
    def write(mixer: str) -> str:
        encoder = mixer.startswith("hydra")
        path = tmp_path / "recipe.toml"
        path.write_text(
            RECIPE.format(
                mixer=mixer,
                architecture="encoder" if encoder else "language_model",
                objective="masked_lm" if encoder else "causal_lm",
            )
        )
        return str(path)

    return write


# Libraries take some memory for themselves at the first step, which no plan knows and no large model feels.
LIBRARIES = 48 * 2**20


def check(found) -> None:
    low, high = found.measured - LIBRARIES, found.measured
    assert low * 0.9 <= found.planned <= high * 1.1, f"{found.title}: {found.planned:.3g} of {found.measured:.3g}"


@pytest.mark.slow
def test_a_process_takes_what_is_planned(recipe):
    check(compare("attention", [recipe("attention"), "--engine.activation-checkpointing", "full"]))


@pytest.mark.slow
@pytest.mark.parametrize("mixer", ["attention", "hydra"])
@pytest.mark.parametrize("mode", MODES)
def test_every_checkpointing_mode(recipe, mixer, mode):
    check(compare(f"{mixer} {mode}", [recipe(mixer), *MODES[mode]]))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_every_engine(recipe, engine, accumulation):
    micro = ("--micro-batch-size", str(4 // accumulation))
    check(compare(f"{engine} x {accumulation}", [recipe("attention"), *ENGINES[engine], *micro], ranks=2))


@pytest.mark.slow
@pytest.mark.parametrize("mixer", ["hydra", "mru", 'hydra", "attention'])
def test_ranks_of_a_context_share_activations(recipe, mixer):
    """1/N of them and a tenth: measured, and as planned, over what 256 tokens take."""
    common = "--engine.name ddp --global-batch-size 1 --model.d-model 256 --model.n-layers 4 --model.vocab-size 256"
    grown = {}
    for ranks in (1, 2, 4):
        options = [recipe(mixer), *common.split(), "--engine.context", str(ranks), "--data.seqlen"]
        short, long = (compare(f"{mixer} / {ranks}", [*options, str(tokens)], ranks) for tokens in (256, 8192))
        grown[ranks] = long.measured - short.measured, long.planned - short.planned
    assert grown[1][0] > 256 * 2**20
    for ranks in (2, 4):
        for whole, part in zip(grown[1], grown[ranks], strict=True):
            assert part <= (1 / ranks + 0.1) * whole, (ranks, grown)


def small(**engine) -> RunConfig:
    config = load_config("debug_hydra", [f"--engine.{key.replace('_', '-')}={value}" for key, value in engine.items()])
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=320))


@pytest.mark.slow
@each("mode", ["none", "selective", "selective by op", "full"])
def test_nothing_of_the_step_is_left_out(mode):
    """Bytes alive after the forward pass on fake tensors are those of a real pass."""
    config = small()
    fake = simulate_step(config, 2, mode=mode)
    model = build_model(config.model, device="cpu")
    kind, _, by = mode.partition(" by ")
    checkpoint_activations(model, kind, selective_by=by or "block", every=config.engine.selective_every)
    tokens = torch.zeros(2, config.data.seqlen, dtype=torch.long)
    with Storages() as storages:
        loss = model(tokens, readout=lambda features, *_: features.sum())
    # What the readout keeps: features, gradients of features and of the embedding, targets; and the loss itself.
    readout = fake.kept - storages.live_bytes()
    del loss
    width, rows = config.model.d_model, 2 * config.data.seqlen
    assert 0 < readout <= 4 * (2 * rows * width + 321 * width) + 64 * rows


@pytest.mark.slow
def test_what_is_offloaded_lies_with_the_host(capsys):
    """On the device nothing of a block stays between the passes, whatever their number; on the host all of it."""
    config = small(activation_checkpointing="offload")
    deep = dataclasses.replace(config, model=dataclasses.replace(config.model, n_layers=4))
    shallow = dataclasses.replace(config, model=dataclasses.replace(config.model, n_layers=2))
    small_step, step = simulate_step(shallow, 2), simulate_step(deep, 2)
    assert step.kept == small_step.kept < 0.2 * simulate_step(deep, 2, mode="none").kept
    assert step.on_host == 2 * small_step.on_host > simulate_step(deep, 2, mode="none").kept - step.kept > 0
    assert step_memory(deep, 7).on_host == pytest.approx(simulate_step(deep, 7).on_host, rel=0.02)
    assert simulate_step(deep, 2, mode="full").on_host == 0
    assert make_plan(deep, 1).on_host["activations"] == step_memory(deep, deep.micro_batch(1)).on_host
    assert print_plan(deep) == 0
    assert re.search(r"host memory +\d.* GiB of the host's for each rank: .* activations", capsys.readouterr().out)


@pytest.mark.slow
def test_larger_batches_follow_from_smaller_ones():
    config = small()
    for size in (1, 2, 7):
        exact, extended = simulate_step(config, size), step_memory(config, size)
        assert extended.kept == pytest.approx(exact.kept, rel=0.02)
        assert sum(extended.peak()) == pytest.approx(sum(exact.peak()), rel=0.02)


@pytest.mark.parametrize(
    ("mode", "layers", "depth"),
    [
        ("none", ["attention"], 5),
        ("full", ["attention"], 5),
        ("selective", ["attention", "none"], 9),
        nightly("none", ["hydra", "attention"], 9),
        nightly("offload", ["hydra"], 6),
        nightly("selective", ["mru"], 9),
    ],
)
def test_deep_models_follow_from_shallow_ones(mode, layers, depth):
    """To the byte, but for a few scalars that the MRU leaves to the sum of its penalties."""
    config = small(activation_checkpointing=mode)
    model = dataclasses.replace(config.model, layers=tuple(layers), n_layers=depth, causal_mixers=layers == ["mru"])
    config = dataclasses.replace(config, model=model)
    few, _, _ = shallow(config, 2 if mode == "selective" else 1)
    assert few.model.n_layers < depth
    exact, extended = simulate_step(config, SIMULATED), step_memory(config, SIMULATED)
    for name in ("kept", "timeline", "computed", "on_host"):
        assert np.abs(getattr(exact, name) - getattr(extended, name)).max() <= (100 if layers == ["mru"] else 0)


def test_layers_that_do_not_repeat_are_all_run():
    record = Record(np.array([[1], [2], [4], [7], [11], [8], [6], [3], [2]]), 5, 11, dict(enumerate(range(5))), {})
    assert deepened(dataclasses.replace(record, backward={3: 5, 2: 6, 1: 7}), 1, 2) is None
    assert deepened(record, 1, 2) is None  # no layer has gradients of its own


@pytest.mark.slow
def test_mixers_of_a_fixed_length_are_planned_and_shown(capsys):
    fixed = [name for name, mixer in MIXERS.items() if mixer.fixed_length]
    options = {name: small_config(name) for name in fixed}
    config = load_config("debug_hydra", ["--data.packing", "rows", "--data.seqlen", "8"])
    model = dataclasses.replace(
        config.model,
        vocab_size=320,
        n_layers=len(fixed),
        layers=tuple(fixed),
        max_seqlen=8,
        mixers=dataclasses.replace(config.model.mixers, **options),
    )
    config = dataclasses.replace(config, model=model)
    assert print_plan(config) == 0
    assert re.search(r"GiB estimated: .* activations", capsys.readouterr().out)


def test_recomputing_layers_keep_less():
    config = small()
    kept = []
    for recompute in (False, True):
        options = dataclasses.replace(config.model.mixers, hydra=HydraConfig(headdim=8, d_state=8, recompute=recompute))
        model = dataclasses.replace(config.model, mixers=options)
        kept.append(simulate_step(dataclasses.replace(config, model=model), 2).kept)
    assert kept[1] < 0.9 * kept[0]


def test_sharding_divides_what_it_shards():
    whole, halves = (make_plan(dataclasses.replace(small(), global_batch_size=8), ranks) for ranks in (1, 2))
    assert halves.parts["weights"] == whole.parts["weights"] / 2
    assert halves.parts["moments"] == whole.parts["moments"] / 2
    assert halves.parts["gathered weights"] > 0
    assert whole.parts["weights"] == 4 * whole.parameters
    copies = make_plan(small(name="ddp"), 2)
    assert copies.parts["weights"] == whole.parts["weights"]
    assert copies.parts["moments"] == whole.parts["moments"]


def test_gradients_stay_whole_between_micro_batches():
    config = dataclasses.replace(small(), global_batch_size=8, micro_batch_size=2)
    assert make_plan(config, 2).parts["gradients"] >= 4 * make_plan(config, 2).parameters

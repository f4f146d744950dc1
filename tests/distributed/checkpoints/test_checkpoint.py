"""Checkpoints in one process: what is kept, what is refused, and that refusing changes nothing."""

import errno
import os
import shutil

import folders
import pytest
import scenarios
import torch
from saved_weights import read_weights

from matmix.train.checkpoint import manifest
from matmix.train.checkpoint import save as generators
from matmix.train.checkpoint.files import find_problem
from matmix.train.checkpoint.manager import CheckpointManager
from matmix.train.checkpoint.manifest import MANIFEST, list_checkpoints
from matmix.train.engine.config import EngineConfig


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory with checkpoints of steps 1 and 2, never changed: tests copy it."""
    directory = tmp_path_factory.mktemp("saved")
    engine = scenarios.make_engine(EngineConfig())
    manager = CheckpointManager(directory, keep_last=5)
    for step in (1, 2):
        scenarios.train_step(engine, step, accumulation=1)
        manager.save(step, engine, {"step": step})
    return directory


@pytest.fixture
def directory(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "checkpoints")


def shard(checkpoint):
    return max((checkpoint / "sharded").glob("*.distcp"), key=lambda path: path.stat().st_size)


def truncate(checkpoint):
    path = shard(checkpoint)
    path.write_bytes(path.read_bytes()[:-100])


def lengthen(checkpoint):
    with shard(checkpoint).open("ab") as file:
        file.write(b"x")


def remove_shard(checkpoint):
    shard(checkpoint).unlink()


def flip_a_bit(checkpoint):
    folders.flip_a_bit(shard(checkpoint))


def remove_manifest(checkpoint):
    (checkpoint / MANIFEST).unlink()


def spoil_manifest(checkpoint):
    (checkpoint / MANIFEST).write_text('{"version": 1, "files"')


def remove_generators(checkpoint):
    (checkpoint / "generators" / "rank-00000.json").unlink()


def remove_index(checkpoint):
    (checkpoint / "sharded" / ".metadata").unlink()


DAMAGE = [
    (truncate, r"damaged: sharded/moments__0_0\.distcp is truncated \(\d+ of \d+ bytes\)"),
    (lengthen, r"damaged: sharded/moments__0_0\.distcp is too long"),
    (remove_shard, r"damaged: sharded/moments__0_0\.distcp is missing"),
    (flip_a_bit, r"damaged: sharded/moments__0_0\.distcp does not match its checksum"),
    (remove_manifest, r"not valid: it has no checkpoint\.json"),
    (spoil_manifest, r"damaged: its checkpoint\.json cannot be read"),
    (remove_generators, r"damaged: generators/rank-00000\.json is missing"),
    (remove_index, r"damaged: sharded/\.metadata is missing"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE, ids=lambda value: getattr(value, "__name__", ""))
def test_damage_is_found_before_anything_is_read(directory, damage, message, told):
    newest, older = directory / "step-00000002", directory / "step-00000001"
    damage(newest)
    engine = scenarios.make_engine(EngineConfig())
    scenarios.train_step(engine, 5, accumulation=1)
    before = scenarios.weights(engine), scenarios.moments(engine), torch.get_rng_state()
    manager = CheckpointManager(directory)
    with pytest.raises(ValueError, match=message) as caught:
        manager.load(newest, engine)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=message):
        next(read_weights(newest))
    assert (scenarios.weights(engine), scenarios.moments(engine)) == before[:2]
    assert torch.equal(torch.get_rng_state(), before[2])

    assert manager.latest_valid() == older
    assert len(told) == 1
    assert told[0].startswith(f"warning: skipping a checkpoint: checkpoint {newest}")
    assert manager.load(older, engine) == {"step": 1}
    assert not manager.has(2)
    assert manager.has(1)

    # The step is reached again: the damaged one makes way.
    assert manager.save(2, engine, {"step": "again"}) == newest
    assert manager.has(2)
    assert manager.load(newest, engine) == {"step": "again"}
    assert sorted(path.name for path in directory.iterdir()) == ["step-00000001", "step-00000002"]


def test_only_damaged_ones_are_an_error(directory, told):
    flip_a_bit(directory / "step-00000001")
    truncate(directory / "step-00000002")
    with pytest.raises(ValueError, match=r"step-00000002 is damaged: .* no checkpoint in .* is valid: restore one"):
        CheckpointManager(directory).latest_valid()
    assert len(told) == 2


def test_one_that_cannot_be_read_for_now_is_not_taken_for_damaged(directory, monkeypatch):
    number = errno.ESTALE

    def fail(path):
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(manifest, "sha256", fail)
    with pytest.raises(OSError, match=r"step-00000002 cannot be read: .*Stale"):
        CheckpointManager(directory).latest_valid()
    facts = list_checkpoints(directory, verify=find_problem).checkpoints
    assert ["Stale" in found.problem for found in facts] == [True, True]
    number = errno.EIO
    with pytest.raises(ValueError, match=r"step-00000002 is damaged: .*Input/output error"):
        CheckpointManager(directory).latest_valid()


def test_no_checkpoint(tmp_path):
    assert CheckpointManager(tmp_path / "none").latest_valid() is None
    with pytest.raises(ValueError, match="checkpoint not found: "):
        CheckpointManager(tmp_path).load(tmp_path / "step-00000009", scenarios.make_engine(EngineConfig()))


def test_unfinished_saves_are_invisible(directory):
    shutil.copytree(directory / "step-00000002", directory / ".tmp-step-00000003")
    shutil.copytree(directory / "step-00000002", directory / ".old-step-00000000")
    manager = CheckpointManager(directory, keep_last=5)
    assert manager.latest_valid() == directory / "step-00000002"
    manager.save(3, scenarios.make_engine(EngineConfig()), {})
    assert sorted(p.name for p in directory.iterdir()) == [f"step-0000000{n}" for n in (1, 2, 3)]


def test_other_architectures(directory):
    manager = CheckpointManager(directory)
    narrow = scenarios.make_engine(EngineConfig(), layers=2)
    before = scenarios.weights(narrow)
    with pytest.raises(ValueError, match=r"another architecture: it holds blocks\.2\.A_log \(3,\), which this model"):
        manager.load(directory / "step-00000002", narrow)
    assert scenarios.weights(narrow) == before
    with pytest.raises(ValueError, match=r"another architecture: it has no blocks\.3\.A_log, which is \(3,\) in this"):
        manager.load(directory / "step-00000002", scenarios.make_engine(EngineConfig(), layers=4))

    class Wide(scenarios.Toy):
        def __init__(self):
            super().__init__()
            self.blocks[1].up = torch.nn.Linear(scenarios.WIDTH, 4 * scenarios.WIDTH)

    wide = scenarios.build_engine(EngineConfig(), scenarios.place())
    wide.prepare(Wide(), scenarios.initialize, scenarios.make_optimizer)
    with pytest.raises(ValueError, match=r"blocks\.1\.up\.weight is \(30, 10\) there and \(40, 10\) in this model"):
        manager.load(directory / "step-00000002", wide)


def test_the_other_kind_of_engine(directory):
    engine = scenarios.make_engine(EngineConfig())
    engine.kind = "deepspeed"
    with pytest.raises(ValueError, match=r'engine\.name = "fsdp2" or "ddp" and cannot be continued with "deepspeed"'):
        CheckpointManager(directory).load(directory / "step-00000002", engine)


def test_what_is_kept(tmp_path):
    engine = scenarios.make_engine(EngineConfig())
    manager = CheckpointManager(tmp_path, keep_last=2, keep_every=4)
    kept = {}
    for step in range(1, 8):
        manager.save(step, engine, {})
        kept[step] = manager.steps()
    assert kept[3] == [2, 3]
    assert kept[7] == [4, 6, 7]


def test_what_was_just_written_is_kept(directory):
    """The newest looks whole and is not: what is written at an earlier step stays, else nothing valid would."""
    engine = scenarios.make_engine(EngineConfig())
    CheckpointManager(directory, keep_last=3).save(9, engine, {})
    flip_a_bit(directory / "step-00000009")
    manager = CheckpointManager(directory, keep_last=1)
    manager.save(3, engine, {})
    assert manager.steps() == [3, 9]
    assert manager.latest_valid() == directory / "step-00000003"


def test_portable_weights(directory):
    engine = scenarios.make_engine(EngineConfig())
    CheckpointManager(directory).load(directory / "step-00000002", engine)
    read = dict(read_weights(directory / "step-00000002"))
    assert {name: tensor.flatten().tolist() for name, tensor in read.items()} == scenarios.weights(engine)
    assert read["blocks.0.up.weight"].shape == (30, 10)
    assert read["scale"].item() == pytest.approx(0.9)  # buffers that belong to the state are in it,
    assert "positions" not in read  # tables that can be computed are not


def test_generators_of_ranks_that_were_not_there(directory):
    """More ranks than the saved run had: a stream for each, its own and the same at every resume."""

    def draw(rank):
        saved = generators.read_generators(directory / "step-00000002" / "generators", rank)
        generators.restore_generators(saved, rank)
        return torch.rand(()).item()

    drawn = [draw(rank) for rank in range(4)]
    assert len(set(drawn)) == 4
    assert [draw(rank) for rank in range(4)] == drawn

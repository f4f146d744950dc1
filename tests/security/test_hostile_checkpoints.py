"""A checkpoint from somebody else, whose hashes all fit, runs nothing, reads nothing outside, and ends in one line."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import small_checkpoints
import torch
from failures import each
from safetensors.torch import save_file
from saved_weights import read_weights

from matmix.train.checkpoint.files import find_problem
from matmix.train.checkpoint.manager import CheckpointManager
from matmix.train.checkpoint.manifest import MANIFEST, list_checkpoints, read_manifest
from matmix.use.exporting import convert_checkpoint


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    return small_checkpoints.save(tmp_path_factory.mktemp("saved"))


@pytest.fixture
def checkpoint(saved, tmp_path) -> Path:
    return shutil.copytree(saved, tmp_path / "checkpoints" / saved.name)


class Harm:
    """Leaves a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def read_index(checkpoint: Path) -> dict:
    return json.loads((checkpoint / "sharded" / "index.json").read_text())


def write_index(checkpoint: Path, index: dict) -> None:
    (checkpoint / "sharded" / "index.json").write_text(json.dumps(index))


def refused(checkpoint: Path, message: str) -> None:
    """Every reader refuses it with one line, and no weight has changed."""
    engine = small_checkpoints.make_engine()
    before = {name: tensor.detach().clone() for name, tensor in engine.named_tensors()}
    manager = CheckpointManager(checkpoint.parent)
    readers = [
        lambda: manager.load(checkpoint, engine),
        lambda: list(read_weights(checkpoint)),
        manager.latest_valid,
        lambda: convert_checkpoint(checkpoint, checkpoint.parent.parent / "converted"),
    ]
    for read in readers:
        with pytest.raises(ValueError, match=message) as caught:
            read()
        assert "\n" not in str(caught.value)
    problem = list_checkpoints(checkpoint.parent, verify=find_problem).checkpoints[0].problem
    assert problem is not None
    assert find_problem(checkpoint) == problem
    for name, tensor in engine.named_tensors():
        assert torch.equal(tensor, before[name]), name


def test_the_untouched_one_is_read(checkpoint) -> None:
    small_checkpoints.rehash(checkpoint)
    assert find_problem(checkpoint) is None
    assert CheckpointManager(checkpoint.parent).load(checkpoint, small_checkpoints.make_engine()) == {"samples": 48}


def test_a_shard_that_runs_code(checkpoint, tmp_path) -> None:
    shard = next((checkpoint / "sharded").glob("*.distcp"))
    content = io.BytesIO()
    torch.save(Harm(tmp_path / "harm"), content)
    index = read_index(checkpoint)
    for entry in index.values():
        for chunk in entry["chunks"]:
            chunk[3:] = 0, len(content.getvalue())
    shard.write_bytes(content.getvalue())
    write_index(checkpoint, index)
    small_checkpoints.rehash(checkpoint)
    with pytest.raises(ValueError, match="cannot be") as caught:
        CheckpointManager(checkpoint.parent).load(checkpoint, small_checkpoints.make_engine())
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "harm").exists()


WEIGHT = "model.blocks.0.weight"


def without_a_weight(index, folder):
    del index[WEIGHT]


def with_another_entry(index, folder):
    index["model.other"] = index["model.scale"]


def with_moments_of_nothing(index, folder):
    index["optimizer.other.exp_avg"] = index["model.scale"]


def without_moments(index, folder):
    del index["optimizer.blocks.0.weight.exp_avg"]


def of_another_shape(index, folder):
    index[WEIGHT]["shape"] = [10**6, 10**6]


def half_of_it(index, folder):
    index[WEIGHT]["chunks"][0][1] = [1, 3]


def the_same_part_twice(index, folder):
    index[WEIGHT]["chunks"] *= 2


def no_part(index, folder):
    index[WEIGHT]["chunks"] = []


def beside_the_checkpoint(index, folder):
    (folder.parent / "outside").write_bytes(b"x" * 10**5)
    for entry in index.values():
        entry["chunks"][0][2] = "../../outside"


def at_an_absolute_path(index, folder):
    for entry in index.values():
        entry["chunks"][0][2] = "/etc/passwd"


def past_the_end(index, folder):
    for entry in index.values():
        entry["chunks"][0][3] = 10**12


def of_no_dtype(index, folder):
    index["model.scale"]["dtype"] = "float33"


def without_entries(index, folder):
    index.clear()


@each(
    "change",
    [
        *(without_a_weight, with_another_entry, with_moments_of_nothing, without_moments, of_another_shape, half_of_it),
        *(the_same_part_twice, no_part, beside_the_checkpoint, at_an_absolute_path, past_the_end, of_no_dtype),
        without_entries,
    ],
    fresh="checkpoint",
)
def test_an_index_of_something_else(checkpoint, change) -> None:
    index = read_index(checkpoint)
    change(index, checkpoint)
    write_index(checkpoint, index)
    small_checkpoints.rehash(checkpoint)
    refused(checkpoint, r"is damaged: its index index\.json")


def test_the_index_that_is_read_is_no_pickle(checkpoint, tmp_path) -> None:
    """torch's own may say what it likes."""
    (checkpoint / "sharded" / ".metadata").write_bytes(pickle.dumps(Harm(tmp_path / "harm")))
    small_checkpoints.rehash(checkpoint)
    assert CheckpointManager(checkpoint.parent).load(checkpoint, small_checkpoints.make_engine()) == {"samples": 48}
    assert not (tmp_path / "harm").exists()


@each(
    "text",
    [
        *("", "[]", "5", "{}", "[" * 10**5, '{"model.scale": 5}', '{"model.scale": {"shape": [1e9]}}'),
        '{"model.scale": {"shape": [1], "dtype": "float32", "chunks": [[[0], [1], "/etc/passwd", 0, 4]]}}',
    ],
    fresh="checkpoint",
)
def test_an_index_in_json_of_something_else(checkpoint, text) -> None:
    (checkpoint / "sharded" / "index.json").write_text(text)
    small_checkpoints.rehash(checkpoint)
    refused(checkpoint, r"is damaged: its index index\.json")


@each("name", ["../../outside", "/etc/passwd", "generators/../../x", "a\nb", ""], fresh="checkpoint")
def test_names_that_lead_outside(checkpoint, name) -> None:
    files = read_manifest(checkpoint)["files"]
    small_checkpoints.rehash(checkpoint, files={**files, name: [1, "0" * 64]})
    refused(checkpoint, r"its checkpoint\.json cannot be right: it names the file")


def test_a_link_in_a_files_place(checkpoint) -> None:
    shard = next((checkpoint / "sharded").glob("*.distcp"))
    outside = checkpoint.parent.parent / "outside"
    shard.rename(outside)
    shard.symlink_to(outside)
    refused(checkpoint, "is a link")


@each(
    "changes, message",
    [
        ({"files": {}}, "does not list its files"),
        ({"files": {"generators/rank-00000.json": [-1, "0" * 64]}}, "does not say how long"),
        ({"files": {"generators/rank-00000.json": [1, "xyz"]}}, "does not say how long"),
        ({"step": "2"}, "lacks its step"),
        ({"step": 3}, "is of step 3, not 2"),
        ({"extra": []}, "lacks its step, or what"),
        ({"layout": {}}, "has no layout"),
        ({"layout": {"engine": "torch", "world_size": 1, "shapes": {"a": [-1]}}}, "has no layout"),
        ({"layout": {"engine": "x", "world_size": 1, "shapes": {}}}, "has no layout"),
    ],
    fresh="checkpoint",
)
def test_a_manifest_of_another_form(checkpoint, changes, message) -> None:
    small_checkpoints.rehash(checkpoint, **changes)
    refused(checkpoint, rf"its checkpoint\.json {message}")


def test_a_directory_with_the_name_of_another_step(checkpoint) -> None:
    later = checkpoint.rename(checkpoint.with_name("step-00000900"))
    refused(later, r"its checkpoint\.json is of step 2, not 900: the directory has another's name")


def test_a_manifest_that_is_nested_too_deeply(checkpoint) -> None:
    (checkpoint / MANIFEST).write_text('{"version": 2, "files": ' + "[" * 200_000)
    refused(checkpoint, r"its checkpoint\.json cannot be read")


def test_a_root_hash_cannot_be_left_out(checkpoint) -> None:
    text = (checkpoint / MANIFEST).read_text()
    (checkpoint / MANIFEST).write_text("{" + text.split(",", 1)[1])
    refused(checkpoint, r"its checkpoint\.json has lost its root hash")


def hostile_dtype(folder: Path, tensors) -> None:
    name = next(folder.glob("*.safetensors"))
    raw = name.read_bytes()
    name.write_bytes(raw.replace(b'"F32"', b'"C64"', 1))


def twice(folder: Path, tensors) -> None:
    save_file({"model.scale": torch.ones(1)}, folder / "state-00009.safetensors")


def one_more(folder: Path, tensors) -> None:
    save_file({"model.other": torch.ones(1)}, folder / "state-00009.safetensors")


def none_at_all(folder: Path, tensors) -> None:
    next(folder.glob("*.safetensors")).unlink()


def other_shapes(folder: Path, tensors) -> None:
    save_file({key: x.flatten() for key, x in tensors.items()}, next(folder.glob("*.safetensors")))


def no_safetensors(folder: Path, tensors) -> None:
    next(folder.glob("*.safetensors")).write_bytes(b"\xff" * 64)


@each("change", [hostile_dtype, twice, one_more, none_at_all, other_shapes, no_safetensors], fresh="checkpoint")
def test_a_portable_one_of_something_else(checkpoint, tmp_path, change) -> None:
    portable = tmp_path / "portable" / checkpoint.name
    convert_checkpoint(checkpoint, portable)
    assert find_problem(portable) is None
    from safetensors.torch import load_file

    change(portable / "portable", load_file(next((portable / "portable").glob("*.safetensors"))))
    small_checkpoints.rehash(portable)
    refused(portable, "is damaged")


@each("content", ["harm", {"module": 5}, {}, [], {"module": {"scale": "no tensor"}}, b"garbage"], fresh="checkpoint")
def test_deepspeed_files_of_something_else(checkpoint, tmp_path, content) -> None:
    shutil.rmtree(checkpoint / "sharded")
    (checkpoint / "zero").mkdir()
    path = checkpoint / "zero" / "mp_rank_00_model_states.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(Harm(tmp_path / "harm") if content == "harm" else content, path)
    shapes = read_manifest(checkpoint)["layout"]["shapes"]
    layout = {"engine": "deepspeed", "zero_stage": 0, "world_size": 1, "shapes": shapes, "optimizer": list(shapes)}
    small_checkpoints.rehash(checkpoint, layout=layout)
    problem = find_problem(checkpoint)
    assert problem is not None
    assert "its files are not DeepSpeed's" in problem
    assert "\n" not in problem
    with pytest.raises(ValueError, match="its files are not DeepSpeed's"):
        list(read_weights(checkpoint))
    assert not (tmp_path / "harm").exists()


@each("content", ["{}", "[]", '{"python": 5}', "5", "nonsense"], fresh="checkpoint")
def test_random_generators_of_something_else(checkpoint, content) -> None:
    (checkpoint / "generators" / "rank-00000.json").write_text(content)
    small_checkpoints.rehash(checkpoint)
    engine = small_checkpoints.make_engine()
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match=r"rank-00000\.json") as caught:
        CheckpointManager(checkpoint.parent).load(checkpoint, engine)
    assert "\n" not in str(caught.value)
    assert torch.equal(torch.get_rng_state(), state)

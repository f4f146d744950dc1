"""Weights stream into files of bounded size; an export appears whole or not at all."""

from __future__ import annotations

import json
import weakref

import pytest
import torch
from safetensors.torch import load_file
from small_models import MODELS, random_model

from matmix.model.interop.export.directory import export_model
from matmix.model.interop.export.weights import write_weights

SHAPES = {f"layer.{index}": torch.Size((10, 10)) for index in range(7)}


def stream(shapes=SHAPES, live: list | None = None, peak: list | None = None):
    """Tensors made one at a time; counts how many of them exist at once."""
    for index, (name, shape) in enumerate(shapes.items()):
        tensor = torch.full(shape, float(index))
        if live is not None:
            live.append(weakref.ref(tensor))
            peak.append(sum(reference() is not None for reference in live))
        yield name, tensor
        del tensor


def write(folder, tensors, *, expected=SHAPES, dtype="float32", max_shard_bytes=10**9):
    return write_weights(
        folder, tensors, expected=expected, prefix="model.", dtype=dtype, max_shard_bytes=max_shard_bytes
    )


def test_one_file_needs_no_index(tmp_path):
    assert write(tmp_path, stream()) == 7 * 400
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o444 == 0o444
    loaded = load_file(tmp_path / "model.safetensors")
    assert {name: float(tensor[0, 0]) for name, tensor in loaded.items()} == {
        f"model.layer.{index}": float(index) for index in range(7)
    }


def test_more_files_have_an_index(tmp_path):
    write(tmp_path, stream(), max_shard_bytes=1000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 7 * 400
    files = sorted(file.name for file in tmp_path.glob("*.safetensors"))
    assert files == [f"model-{n:05d}-of-00004.safetensors" for n in range(1, 5)]
    for name in SHAPES:
        assert f"model.{name}" in load_file(tmp_path / index["weight_map"][f"model.{name}"])
    assert all(file.stat().st_size < 1400 for file in tmp_path.glob("*.safetensors"))


def test_a_tensor_larger_than_a_file_has_one_of_its_own(tmp_path):
    write(tmp_path, stream(), max_shard_bytes=1)
    assert len(list(tmp_path.glob("*.safetensors"))) == 7


def test_no_more_than_one_file_is_in_memory(tmp_path):
    shapes = {f"layer.{index}": torch.Size((10, 10)) for index in range(40)}
    live: list = []
    peak: list[int] = []
    write(tmp_path, stream(shapes, live, peak), expected=shapes, max_shard_bytes=1200)
    assert max(peak) <= 4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_types_are_converted(tmp_path, dtype):
    shapes = {"weight": torch.Size((4,)), "count": torch.Size((2,))}
    tensors = [("weight", torch.tensor([1.0, 2.0, 3.0, 1.001])), ("count", torch.tensor([1, 2]))]
    write(tmp_path, tensors, expected=shapes, dtype=dtype)
    loaded = load_file(tmp_path / "model.safetensors")
    assert loaded["model.weight"].dtype == getattr(torch, dtype)
    assert loaded["model.count"].dtype == torch.int64


def test_views_are_written_as_they_look(tmp_path):
    whole = torch.arange(200.0).view(10, 20)
    expected = {"left": torch.Size((10, 10)), "turned": torch.Size((20, 10))}
    write(tmp_path, [("left", whole[:, :10]), ("turned", whole.T)], expected=expected)
    loaded = load_file(tmp_path / "model.safetensors")
    assert torch.equal(loaded["model.left"], whole[:, :10])
    assert torch.equal(loaded["model.turned"], whole.T)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer.3": None}, r"the weights lack 'layer\.3' \(1 of 7"),
        ({"layer.9": torch.Size((10, 10))}, r"hold 'layer\.9', which the configured model does not have"),
        ({"layer.2": torch.Size((3, 10))}, r"hold 'layer\.2' with shape \(3, 10\).*has \(10, 10\)"),
    ],
)
def test_weights_of_another_model_are_refused(tmp_path, change, message):
    shapes = {name: shape for name, shape in {**SHAPES, **change}.items() if shape is not None}
    with pytest.raises(ValueError, match=message):
        write(tmp_path, stream(shapes))


@pytest.mark.parametrize(
    ("value", "dtype", "message"),
    [
        (float("nan"), "float32", "layer.0 is not finite: the weights have diverged"),
        (1e6, "float16", "layer.0 is not finite: it leaves the range of float16"),
    ],
)
def test_weights_that_are_not_finite_are_refused(tmp_path, value, dtype, message):
    tensors = [("layer.0", torch.full(SHAPES["layer.0"], value)), *list(stream())[1:]]
    with pytest.raises(ValueError, match=message):
        write(tmp_path, tensors, dtype=dtype)


def test_bad_options(tmp_path):
    with pytest.raises(ValueError, match="dtype 'int8': choose one of float32"):
        write(tmp_path, stream(), dtype="int8")
    with pytest.raises(ValueError, match="max_shard_bytes = 0"):
        write(tmp_path, stream(), max_shard_bytes=0)


def test_a_failed_export_leaves_nothing(tmp_path, tokenizer):
    config = MODELS["mru"]
    state = random_model(config).state_dict()

    def breaks():
        yield from list(state.items())[:3]
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        export_model(config, breaks(), tokenizer.path, tmp_path / "out", special=tokenizer.special)
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_not_overwritten(tmp_path, tokenizer):
    config = MODELS["mru"]
    state = random_model(config).state_dict()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("full", "file"):
        with pytest.raises(ValueError, match="exists and is not an empty directory"):
            export_model(config, state, tokenizer.path, tmp_path / name)
    (tmp_path / "empty").mkdir()
    export_model(config, state, None, tmp_path / "empty")
    assert (tmp_path / "empty" / "model.safetensors").is_file()
    assert not (tmp_path / "empty" / "tokenizer.json").exists()
    assert "AutoTokenizer" not in (tmp_path / "empty" / "README.md").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "full"]


def test_a_tokenizer_with_too_many_ids_is_refused(tmp_path, tokenizer):
    import dataclasses

    config = dataclasses.replace(MODELS["mru"], vocab_size=400)
    with pytest.raises(ValueError, match="has 420 ids, the model only 400"):
        export_model(config, random_model(config).state_dict(), tokenizer.path, tmp_path / "out")
    with pytest.raises(FileNotFoundError, match="no tokenizer at"):
        export_model(config, {}, tmp_path / "absent.model", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []

"""Checkpoints and exports of others run no code, name no files elsewhere, and are refused in one line."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
from pathlib import Path

import pytest
import torch
from failures import each
from paths import GOLDEN
from safetensors.torch import save_file

from matmix.model.interop import read_checkpoint
from matmix.model.interop.importing.exported import read_image_inputs
from matmix.model.interop.importing.foreign import indexed_files, read_safetensors
from matmix.use.opening import open_model


class Payload:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def refused(path: Path, match: str = ".") -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=match) as raised:
        read_checkpoint("mru-lm", path)
    assert str(raised.value).isprintable()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_pickle_is_not_run(tmp_path):
    planted = tmp_path / "planted"
    for zipped in (True, False):
        torch.save({"x": Payload(planted)}, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
        refused(tmp_path / "a.pt", "cannot be read as plain tensors")
    (tmp_path / "a.pt").write_bytes(pickle.dumps(Payload(planted)))
    refused(tmp_path / "a.pt", "cannot be read as plain tensors")
    assert not planted.exists()
    torch.save([1, 2], tmp_path / "list.pt")
    refused(tmp_path / "list.pt", "does not hold a state dict")


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@each(
    "content",
    [
        {"a": torch.zeros(1).expand(1 << 40)},
        {"a": torch.eye(3).to_sparse()},
        {"a": torch.zeros(3, device="meta")},
        {5: torch.zeros(3)},
        {"a\n\x1b": torch.zeros(1).expand(7)},
        {"state": {"model": [torch.zeros(3)]}},
        [1, 2],
    ],
)
def test_tensors_that_are_none_are_refused(tmp_path, content):
    torch.save(content, tmp_path / "a.pt")
    refused(tmp_path / "a.pt")


def test_compressed_entries_are_refused(tmp_path):
    buffer = io.BytesIO()
    torch.save({"a": torch.zeros(1 << 20)}, buffer)
    with zipfile.ZipFile(buffer) as source, zipfile.ZipFile(tmp_path / "a.pt", "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    assert (tmp_path / "a.pt").stat().st_size < 1 << 16
    refused(tmp_path / "a.pt", "compressed or larger")


@each("dtype", ["F128", "X9", "", 5, None])
def test_unknown_types_of_numbers_are_one_line(tmp_path, dtype):
    header = json.dumps({"a": {"dtype": dtype, "shape": [1], "data_offsets": [0, 4]}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)
    with pytest.raises(ValueError, match="is not a readable safetensors file") as raised:
        read_safetensors(path)
    assert str(raised.value).isprintable()
    refused(path)


@each("header", [b"[" * 100_000, b'{"a":' * 100_000, b"", b"\xff", b'{"a": 1}'])
def test_headers_that_are_none_are_one_line(tmp_path, header):
    path = tmp_path / "model.safetensors"
    for length in (len(header), 1 << 60):
        path.write_bytes(struct.pack("<Q", length) + header)
        refused(path)


@each("name", ["../x.safetensors", "/tmp/x.safetensors", "a/b", "..", "", "x\n", 5, None, ["x"]])
def test_an_index_names_files_beside_it_only(tmp_path, name):
    folder = tmp_path / "folder"
    folder.mkdir()
    save_file({"x": torch.zeros(1)}, tmp_path / "x.safetensors")
    (folder / "config.json").write_text('{"matmix": {}, "vocab_size": 5}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(ValueError, match="which is no plain name"):
        indexed_files(folder / "model.safetensors.index.json")
    refused(folder)


def test_a_link_is_no_file_of_an_index(tmp_path):
    save_file({"x": torch.zeros(1)}, tmp_path / "x.safetensors")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "y.safetensors").symlink_to(tmp_path / "x.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "y.safetensors"}}))
    refused(folder, "is a link")


@each(
    "config",
    [
        {"n_blocks": 10**9},
        {"n_blocks": "1000000000"},
        {"embedding_size": 10**30},
        {"vocab_size": [5]},
        {"layers": ["mru"] * 10**6},
        {"layers": [{}]},
        {"n_state_heads": 0},
        {"n_state_heads": -1},
        {"state_size": "x\n"},
        {"dropout_rate": "nan"},
    ],
)
def test_configurations_that_do_not_fit_are_one_line(tmp_path, config):
    (tmp_path / "model.safetensors").write_bytes((GOLDEN / "mru_lm_a.safetensors").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"^\S") as raised:
        read_checkpoint("mru-lm", tmp_path)
    assert "\n" not in str(raised.value)


@each("text", ["[" * 100_000, "[]", "5", "{", '{"matmix": 5}', '{"matmix": {"n_layers": []}}', "{}"])
def test_exports_that_are_none_are_one_line(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"^\S") as raised:
        open_model(tmp_path)
    assert "\n" not in str(raised.value)


@each(
    "changes",
    [
        {"size": 10**30},
        {"size": "x\n"},
        {"size": 8.0},
        {"size": True, "crop": 1e-9},
        {"crop": 1e-300},
        {"crop": []},
        {"mean": [float("nan")]},
        {"mean": [10**400]},
        {"std": [0]},
        {"std": ["a\n"]},
        {"std": None},
        {"interpolation": ["bicubic"]},
        {"interpolation": {}},
    ],
)
def test_image_processors_that_do_not_fit_are_one_line(tmp_path, changes):
    fine = {"mean": [0.5], "std": [0.5], "crop": 0.875, "size": 8, "interpolation": "bicubic"}
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps(fine))
    assert read_image_inputs(tmp_path).size == 8
    for text in (json.dumps({**fine, **changes}), "[" * 100_000, "[]", "{}"):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"^\S") as raised:
            read_image_inputs(tmp_path)
        assert "\n" not in str(raised.value)

"""Measured tile sizes: read from files, and taken where the GPU's architecture has one."""

from __future__ import annotations

import json

import pytest
import torch

from matmix.kernels import tiles
from matmix.kernels.semiseparable.fused import scan
from matmix.kernels.semiseparable.fused.scan import choose, measured, usual

OTHER = usual(2)._replace(forward_chunk=64, backward_chunk=64, tile=32, mix_warps=8)
LENGTHS = (1, 64, 256, 257, 100_000)


def write(folder, *found, name="sm_90", **others):
    content = json.loads(tiles.text(name, {"device": "a GPU"}, {"scan": list(found)})) | others
    (folder / f"{name}.json").write_text(json.dumps(content))


def test_a_table_changes_what_is_chosen_on_its_architecture_alone(tmp_path, monkeypatch):
    before = {length: choose(torch.bfloat16, length, None) for length in LENGTHS}
    single = choose(torch.float32, 1000, None)
    write(tmp_path, OTHER)
    monkeypatch.setattr(scan, "MEASURED", measured(tmp_path))
    assert choose(torch.bfloat16, 1000, None, "sm_90") == OTHER
    assert choose(torch.float16, 1000, None, "sm_90") == OTHER
    assert choose(torch.bfloat16, 1000, 32, "sm_90").forward_chunk == 32
    assert OTHER in scan.configurations()
    for architecture in ("", "sm_80"):
        assert {length: choose(torch.bfloat16, length, None, architecture) for length in LENGTHS} == before
    assert choose(torch.float32, 1000, None, "sm_90") == single  # the file says nothing of it


def test_without_files_the_choices_are_those_built_in(tmp_path, monkeypatch):
    monkeypatch.setattr(scan, "MEASURED", measured(tmp_path))
    assert scan.MEASURED == {}
    assert scan.configurations() == (usual(2), usual(4))
    for itemsize in (2, 4):
        assert usual(itemsize, "sm_90") == usual(itemsize)


def test_the_committed_files_can_be_used():
    assert measured() == scan.MEASURED
    for architecture, found in scan.MEASURED.items():
        for itemsize, config in found.items():
            assert usual(itemsize, architecture) == config


def test_forcing_still_comes_first(tmp_path, monkeypatch):
    write(tmp_path, OTHER)
    monkeypatch.setattr(scan, "MEASURED", measured(tmp_path))
    with scan.force_configuration(usual(2)._replace(mix_warps=2)):
        assert choose(torch.bfloat16, 1000, None, "sm_90").mix_warps == 2


def test_no_gpu_has_no_architecture():
    assert tiles.architecture(torch.device("cpu")) == ""
    assert tiles.architecture(torch.device("meta")) == ""


BAD_CONFIGURATIONS = {
    "tile is 48; it has to be a power of two from 16 to 256": [OTHER._replace(tile=48)],
    "tile is 128, which is longer than a chunk": [OTHER._replace(tile=128)],
    "itemsize is 8; it has to be 2 or 4": [OTHER._replace(itemsize=8)],
    "mix_registers is 300; it has to be from 24 to 255": [OTHER._replace(mix_registers=300)],
    "stages is 0; it has to be a whole number of 1 or more": [OTHER._replace(stages=0)],
    "walk is 1; it has to be true or false": [OTHER._replace(walk=1)],
    "block is 64.0; it has to be a whole number": [OTHER._replace(block=64.0)],
    "two configurations for 2 bytes": [OTHER, OTHER],
}


def test_a_bad_configuration_is_one_clear_error(tmp_path):
    for message, found in BAD_CONFIGURATIONS.items():
        write(tmp_path, *found)
        with pytest.raises(ValueError, match=message) as error:
            measured(tmp_path)
        assert "sm_90.json" in str(error.value)
        assert "\n" not in str(error.value)


BAD_FILES = {
    "{": "sm_90.json is no JSON",
    "[]": '"architecture" has to be "sm_90"',
    '{"architecture": "sm_80"}': '"architecture" has to be "sm_90"',
    '{"architecture": "sm_90", "scan": 3}': "has to be a list",
    '{"architecture": "sm_90", "scan": [3]}': "lacks fields, or has others",
    '{"architecture": "sm_90", "scan": [{"itemsize": 2, "colour": 1}]}': "backward_chunk, block, colour",
}


def test_a_bad_file_is_one_clear_error(tmp_path):
    for content, message in BAD_FILES.items():
        (tmp_path / "sm_90.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            measured(tmp_path)

"""An export says of itself whether its files are as they were written."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from failures import each
from small_models import random_model

from matmix.launch.cli import main
from matmix.model.config import ModelConfig
from matmix.model.interop.export.directory import export_model, write_sums


@pytest.fixture(scope="module")
def export(tmp_path_factory) -> Path:
    config = ModelConfig(vocab_size=64, d_model=16, layers=("mru",), n_layers=1)
    return export_model(config, random_model(config).state_dict(), None, tmp_path_factory.mktemp("exports") / "export")


@pytest.fixture
def copy(export, tmp_path) -> Path:
    return shutil.copytree(export, tmp_path / "copy")


def said(capsys, *words: object) -> tuple[int, str]:
    code = main([str(word) for word in words])
    return code, "".join(capsys.readouterr())


def test_an_untouched_export(copy, capsys) -> None:
    code, text = said(capsys, "export", "--check", copy)
    assert (code, "all as they were written" in text) == (0, True)
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=copy, check=True, capture_output=True)


def test_a_flipped_bit_in_any_file(copy, capsys) -> None:
    for path in sorted(path for path in copy.rglob("*") if path.is_file()):
        content = path.read_bytes()
        for place in (0, len(content) // 2, len(content) - 1):
            path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
            code, text = said(capsys, "export", "--check", copy)
            assert code == 2, (path.name, place)
            assert text.startswith("matmix: error: ")
            assert text.count("\n") == 1
        path.write_bytes(content)
    assert said(capsys, "export", "--check", copy)[0] == 0


def test_files_that_came_or_went(copy, capsys) -> None:
    (copy / "pytorch_model.bin").write_bytes(b"harm")
    assert "holds 'pytorch_model.bin', which it was not written with" in said(capsys, "export", "--check", copy)[1]
    (copy / "pytorch_model.bin").unlink()
    (copy / "config.json").unlink()
    assert "lacks config.json" in said(capsys, "export", "--check", copy)[1]


def test_files_in_folders(copy, capsys) -> None:
    (copy / "1_Pooling").mkdir()
    (copy / "1_Pooling" / "config.json").write_text("{}")
    assert "holds '1_Pooling', which it was not written with" in said(capsys, "export", "--check", copy)[1]
    (copy / "SHA256SUMS").unlink()
    write_sums(copy)
    assert said(capsys, "export", "--check", copy)[0] == 0
    (copy / "1_Pooling" / "code.py").write_text("harm")
    assert "holds '1_Pooling/code.py', which" in said(capsys, "export", "--check", copy)[1]
    (copy / "1_Pooling" / "code.py").unlink()
    (copy / "1_Pooling" / "config.json").write_text("{ }")
    assert "config.json is not as it was written" in said(capsys, "export", "--check", copy)[1]


@each("name", ["../outside", "/etc/hostname", "folder/../../outside", ""], fresh="copy")
def test_names_that_lead_outside(copy, capsys, name) -> None:
    with (copy / "SHA256SUMS").open("a") as file:
        file.write(f"{'0' * 64}  {name}\n")
    code, text = said(capsys, "export", "--check", copy)
    assert code == 2
    assert "names the file" in text


def test_what_is_no_export(tmp_path, capsys) -> None:
    code, text = said(capsys, "export", "--check", tmp_path)
    assert (code, "holds no SHA256SUMS" in text) == (2, True)
    for words in (["export"], ["export", tmp_path], ["export", tmp_path, "--check", tmp_path]):
        code, text = said(capsys, *words)
        assert code == 2
        assert "--check DIR" in text

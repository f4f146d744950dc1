"""What is read of the files of a source: the parts that are asked for."""

import re
import sys
from pathlib import Path

import pytest
import torch
from paths import GOLDEN
from safetensors import safe_open
from safetensors.torch import save_file
from small_models import random_model

from matmix.model.config import ModelConfig
from matmix.model.interop import read_checkpoint
from matmix.model.interop.export.directory import export_model
from matmix.train.config import InitConfig
from matmix.train.init import source_of

ROWS, WIDTH = 1 << 18, 64
WORD = "bert.embeddings.word_embeddings.weight"
KEY = "model.embeddings.word.weight"
# The system maps whole pages, which may be large.
AROUND = 1 << 22


def mapped_bytes(path: Path) -> int:
    """How much of its maps of a file this process has touched."""
    found, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            counts = line.endswith(f" {path}")
        elif counts and line.startswith("Rss:"):
            found += int(line.split()[1]) << 10
    return found


def reference_state(transposed: bool = False) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """A checkpoint of the Hydra paper's code in half precision with a large vocabulary, and its configuration."""
    with safe_open(GOLDEN / "hydra_mlm_postnorm.safetensors", "pt") as file:
        keys = [key for key in file.keys() if key.startswith("state.")]  # noqa: SIM118
        state = {key.removeprefix("state."): file.get_tensor(key).bfloat16() for key in keys}
        values = {**file.metadata(), "vocab_size": str(ROWS)}
    del state["cls.predictions.decoder.weight"]
    words = torch.randn(WIDTH, ROWS).bfloat16().T if transposed else torch.randn(ROWS, WIDTH).bfloat16()
    return {**state, WORD: words, "cls.predictions.decoder.bias": torch.zeros(ROWS).bfloat16()}, values


def write_safetensors(folder: Path) -> Path:
    state, values = reference_state()
    save_file(state, folder / "weights.safetensors", metadata=values)
    return folder / "weights.safetensors"


def write_torch(folder: Path) -> Path:
    torch.save(reference_state()[0], folder / "weights.pt")
    return folder / "weights.pt"


def write_export(folder: Path) -> Path:
    config = ModelConfig(architecture="encoder", vocab_size=ROWS, d_model=WIDTH, n_layers=1, layers=("none",))
    export_model(config, random_model(config).state_dict(), None, folder / "export", dtype="bfloat16")
    return folder / "export" / "model.safetensors"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what of a map was touched")
@pytest.mark.parametrize("write", [write_safetensors, write_torch, write_export])
def test_a_rank_reads_the_rows_that_it_asks_for_and_converts_no_more(write, tmp_path):
    file = write(tmp_path)
    state = source_of(InitConfig(from_=str(file.parent if write is write_export else file))).state
    before = mapped_bytes(file)
    assert before <= AROUND, "opening reads what the file says of its tensors"
    begin, end = ROWS // 4 * WIDTH + 5, ROWS // 2 * WIDTH
    part = state.read(KEY, begin, end).float()
    wanted, touched = 2 * (end - begin), mapped_bytes(file) - before
    assert wanted - AROUND <= touched <= wanted + AROUND
    assert torch.equal(part, state.read_whole(KEY).flatten()[begin:end].float())


@pytest.mark.parametrize("zipped", [True, False])
def test_torch_files_of_any_age_and_tensors_of_any_strides(tmp_path, zipped):
    state, _ = reference_state(transposed=True)
    torch.save(state, tmp_path / "weights.pt", _use_new_zipfile_serialization=zipped)
    found = source_of(InitConfig(from_=str(tmp_path / "weights.pt"))).state
    flat = state[WORD].float().flatten()
    for begin, end in ((0, None), (0, 7), (77, 78), (WIDTH, 2 * WIDTH), (1000, 7001), (flat.numel() - 3, None)):
        part = found.read(KEY, begin, end)
        assert torch.equal(part, flat[begin:end]), (begin, end)
        assert part.untyped_storage().nbytes() <= 4 * len(flat[begin:end]), "memory of its own"
    _, weights = read_checkpoint("hydra", tmp_path / "weights.pt")
    assert all(torch.equal(found.read_whole(f"model.{name}"), tensor) for name, tensor in weights.items())

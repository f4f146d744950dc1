"""Small exported models, one of each kind, with what their original gives."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from small_models import HEADS, MODELS, MULTILINGUAL, random_model, training_text

from matmix.data.tokenizer import train_sentencepiece
from matmix.model.interop.export.directory import export_model

# For `import bare_site` in the tests, and what one test has for another.
sys.path[:0] = [str(Path(__file__).resolve().parent / name) for name in ("bare", "")]


@pytest.fixture(scope="session", autouse=True)
def modules_cache(tmp_path_factory):
    """Code from exports is copied here, not into the user's cache, which parallel tests would share."""
    from transformers import dynamic_module_utils

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        yield


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    """A sentencepiece tokenizer as `matmix prepare` trains it."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    return train_sentencepiece(training_text(), path, vocab_size=420)


@pytest.fixture(scope="session")
def exports(tmp_path_factory, tokenizer) -> Path:
    """A folder with an export of each of MODELS, and the logits and token ids that it must give."""
    work = tmp_path_factory.mktemp("exports")
    for name, config in MODELS.items():
        model = export_random(work / name, config, tokenizer, 5 * 10**9 if name == "mru" else 20_000)
        ids = torch.randint(8, 420, (2, 12), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            logits = model(ids)
        save_file({"input_ids": ids, "logits": logits}, work / name / "reference.safetensors")
    return work


@pytest.fixture(scope="session")
def head_exports(tmp_path_factory, tokenizer) -> Path:
    """A folder with an export of each of HEADS, and the outputs that it must give for a padded batch."""
    work = tmp_path_factory.mktemp("head_exports")
    for name, (config, outputs) in HEADS.items():
        model = export_random(work / name, config, tokenizer, outputs=outputs)
        ids = torch.randint(8, 420, (4, 12), generator=torch.Generator().manual_seed(1))
        mask = (torch.arange(12) < torch.tensor([[12], [5], [9], [1]])).long()
        with torch.no_grad():
            found = model(ids, attention_mask=mask)
        save_file({"input_ids": ids, "mask": mask, "outputs": found}, work / name / "reference.safetensors")
    return work


@pytest.fixture
def exported():
    return export_random


def export_random(folder: Path, config, tokenizer, max_shard_bytes: int = 20_000, **options) -> torch.nn.Module:
    """Writes `export/` and `texts.json`; returns the model."""
    model = random_model(config)
    folder.mkdir()
    export_model(
        config,
        model.state_dict(),
        tokenizer.path,
        # The names of the directories are the same on purpose: transformers caches code by them.
        folder / "export",
        special=tokenizer.special,
        prefix="bos" if config.causal else "cls",
        suffix="eos" if config.causal else "sep",
        max_shard_bytes=max_shard_bytes,
        **options,
    )
    texts = [[text, tokenizer.encode(text)] for text in MULTILINGUAL]
    (folder / "texts.json").write_text(json.dumps(texts), encoding="utf-8")
    return model

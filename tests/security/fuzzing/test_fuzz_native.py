"""Files that libraries in other languages read: no crash takes the process down, and every error is one line.

They are read in a process of its own, as a crash could not be told otherwise.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hostile_data import prepared
from nightly import nightly
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

CHILD = """
import random, shutil, sys
from pathlib import Path

def change(draw, raw):
    for _ in range(draw.randint(1, 4)):
        if not raw:
            return raw
        begin = draw.randrange(min(len(raw), 4096) if draw.random() < 0.5 else len(raw))
        size = draw.choice([1, 1, 2, 4, 8, 64])
        kind = draw.randrange(5)
        if kind == 0:
            raw = raw[:begin] + bytes([raw[begin] ^ (1 << draw.randrange(8))]) + raw[begin + 1:]
        elif kind == 1:
            raw = raw[:begin] + draw.randbytes(size) + raw[begin + size:]
        elif kind == 2:
            raw = raw[:begin] + draw.randbytes(size) + raw[begin:]
        elif kind == 3:
            raw = raw[:begin] + raw[begin + size:]
        else:
            other = draw.randrange(len(raw))
            raw = raw[:begin] + raw[other:other + size] + raw[begin + size:]
    return raw

def tokenizer(path):
    from matmix.data.tokenizer import Tokenizer
    found = Tokenizer.load(path)
    ids = found.encode_batch(["a king \\u00e9 \\U0001f30d\\n <s>"])[0]
    found.decode(ids)
    found.ordinary_ids()
    found.decode(range(min(found.vocab_size, 50)))

def transformers_folder(path):
    folder = path.parent.with_name(f"{path.parent.name}-{original.name}")
    if not folder.exists():
        shutil.copytree(path.parent, folder)
    (folder / original.name).write_bytes(path.read_bytes())
    tokenizer(folder)

def parquet(path):
    from matmix.data.prepare.base import read_chunks
    from matmix.data.prepare.text import ReadOptions
    from matmix.data.prepare.text.readers import find_sources
    sources, _ = find_sources([str(path)], ReadOptions(max_line_megabytes=1))
    try:
        for chunk in read_chunks(sources):
            pass
    finally:
        for text in sources[0].texts():
            text.encode()

def checkpoint(path):
    from matmix.model.interop import read_checkpoint
    read_checkpoint("mru-lm", path)

arrow = parquet

use, original, count, seed = globals()[sys.argv[1]], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
raw, file = original.read_bytes(), original.with_name("changed" + original.suffix)
if use is not checkpoint:  # those are of no model
    file.write_bytes(raw)
    use(file)
for number in range(count):
    file.write_bytes(change(random.Random(f"{seed} {number}"), raw))
    try:
        use(file)
    except (ValueError, OSError) as error:
        assert "\\n" not in str(error) and "\\x1b" not in str(error), repr(str(error))
    except BaseException:
        print(f"change {number} of {original.name}", file=sys.stderr)
        raise
"""


OF_TRANSFORMERS = [
    "bert/tokenizer_config.json",
    "bert/vocab.txt",
    "gpt2/vocab.json",
    "gpt2/merges.txt",
    "gpt2/added_tokens.json",
    "t5/spiece.model",
]


def files(folder: Path) -> dict[str, Path]:
    """One small file of each kind."""
    path = prepared(folder / "set")
    words = {"<unk>": 0, "<s>": 1, "a": 2, "king": 3}
    wordlevel = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    wordlevel.normalizer = normalizers.NFKC()
    wordlevel.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Digits()])
    wordlevel.add_special_tokens(["<s>"])
    wordlevel.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "mask_token": "[MASK]", "unk_token": "[UNK]"}
    token = {"content": "[MASK]", "lstrip": False, "special": True}
    words = "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "king"])
    pieces = {
        piece: number for number, piece in enumerate(["<|endoftext|>", "a", "k", "i", "n", "g", "ki", "kin", "\u0120"])
    }
    of_transformers = {
        "bert": {"tokenizer_config.json": {**config, "added_tokens_decoder": {"4": token}}, "vocab.txt": words},
        "gpt2": {
            "tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer", "unk_token": "<|endoftext|>"},
            "vocab.json": pieces,
            "merges.txt": "#version: 0.2\nk i\nki n\n",
            "added_tokens.json": {"<mark>": 9},
        },
        "t5": {"tokenizer_config.json": {"tokenizer_class": "T5Tokenizer", "extra_ids": 0}},
    }
    for kind, contents in of_transformers.items():
        (folder / kind).mkdir()
        for name, content in contents.items():
            (folder / kind / name).write_text(content if isinstance(content, str) else json.dumps(content))
    shutil.copyfile(path / "tokenizer" / "tokenizer.model", folder / "t5" / "spiece.model")
    rows = [f"text of row {n} " * (n % 7) for n in range(300)]
    pq.write_table(
        pa.table({"text": rows, "of": [[row] for row in rows]}),
        folder / "a.parquet",
        row_group_size=100,
        compression="snappy",
    )
    table = pa.table({"text": pa.array(rows).dictionary_encode(), "of": pa.array([{"by": row} for row in rows])})
    with pa.ipc.new_stream(str(folder / "a.arrow"), table.schema) as stream:
        stream.write_table(table, max_chunksize=100)
    state = {"wte.weight": torch.randn(7, 32), "blocks.0.mru.x": torch.randn(4)}
    save_file(state, folder / "a.safetensors")
    torch.save(state, folder / "a.pt")
    torch.save(state, folder / "legacy.pt", _use_new_zipfile_serialization=False)
    (folder / "model").mkdir()
    (folder / "model" / "tokenizer.model").write_bytes((path / "tokenizer" / "tokenizer.model").read_bytes())
    return {
        "tokenizer.model": folder / "model" / "tokenizer.model",
        **{
            name: folder / name
            for name in (
                "tokenizer.json",
                "a.parquet",
                "a.arrow",
                "a.safetensors",
                "a.pt",
                "legacy.pt",
                *OF_TRANSFORMERS,
            )
        },
    }


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    return files(tmp_path_factory.mktemp("native"))


@pytest.mark.parametrize(
    ("use", "name"),
    [
        nightly("tokenizer", "tokenizer.model"),
        ("tokenizer", "tokenizer.json"),
        *(nightly("transformers_folder", name) for name in OF_TRANSFORMERS),
        ("parquet", "a.parquet"),
        nightly("arrow", "a.arrow"),
        nightly("checkpoint", "a.safetensors"),
        ("checkpoint", "a.pt"),
        nightly("checkpoint", "legacy.pt"),
    ],
)
def test_changed_files(originals, use, name, request):
    count = int(75 * float(os.environ.get("MATMIX_FUZZ", "1")))
    command = [sys.executable, "-P", "-c", CHILD, use, str(originals[name]), str(count)]
    seed = str(request.config.getoption("--seed"))
    done = subprocess.run([*command, seed], capture_output=True, text=True, timeout=60 + count)
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stderr[-3000:]}"

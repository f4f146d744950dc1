"""Whatever an input file, a recipe, a name or a URL holds: it is read, or refused in one line."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import re
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import tomli_w
import zstandard
from foreign import save_to_disk, write_mds, write_table, write_tar
from hypothesis import given
from hypothesis import strategies as st
from mutations import fuzz, mutated, mutated_json, works_or_is_one_line
from token_files import write_tokenizer

from matmix.data.artifacts import artifact_path, parse_json
from matmix.data.config import DataConfig
from matmix.data.prepare.base import find_cuts, read_chunks
from matmix.data.prepare.cleaning.evaluations import read_evaluations
from matmix.data.prepare.cleaning.plan import in_words, read_removed, read_report
from matmix.data.prepare.text import ReadOptions
from matmix.data.prepare.text.documents import documents_of
from matmix.data.prepare.text.readers import find_sources
from matmix.data.prepare.text.sequences import check_intervals
from matmix.data.tokenizer import Tokenizer
from matmix.launch.lab.compare.config import read_comparison
from matmix.train.recipe import config_from_dict, load_config
from matmix.train.recipe_files import bundled_comparisons, bundled_recipes, read_toml

TEXT = b"".join(b'{"text": "a line of %d words\\n \xc3\xa9 \xf0\x9f\x8c\x8d", "n": %d}\n\n' % (n, n) for n in range(60))
FASTA = b"".join(b">chr%d of many\n" % n + b"ACGTNacgtn" * n + b"\nACG\n" for n in range(20))
FASTQ = b"".join(b"@read %d\n%b\n+\n%b\n" % (n, b"ACGTN" * n, b"@FFF," * n) for n in range(20))
KINDS = {
    "a.fa": FASTA,
    "a.fa.gz": gzip.compress(FASTA),
    "a.fastq": FASTQ,
    "a.txt": TEXT,
    "a.jsonl": TEXT,
    "a.jsonl.gz": gzip.compress(TEXT) + gzip.compress(TEXT),
    "a.txt.xz": lzma.compress(TEXT) + b"\0" * 4 + lzma.compress(TEXT),
    "a.jsonl.zst": zstandard.compress(TEXT) + zstandard.compress(TEXT),
    "a.tar": b"",
}
TAR = {f"{n}.{suffix}": '{"text": "a line"}' for n in range(9) for suffix in ("txt", "json", "jpg")[n % 3 :]}


@pytest.mark.parametrize("name", KINDS)
@fuzz(60)
@given(data=st.data())
def test_input_files(tmp_path, name, data):
    file = tmp_path / name
    if name == "a.tar":
        write_tar(file, TAR)
    file.write_bytes(data.draw(mutated(KINDS.get(name) or file.read_bytes())))
    cutting = data.draw(st.sampled_from(["file", "paragraph", "line", "separator"]))
    options = ReadOptions(
        text_documents=cutting, max_line_megabytes=0.01, max_document_chars=data.draw(st.sampled_from([0, 50]))
    )

    def read():
        (source,), _ = find_sources([str(file)], options)
        for chunk in read_chunks([source]):
            list(documents_of(chunk))
        find_cuts([source], 3)

    works_or_is_one_line(read)


@fuzz(30)
@given(data=st.data())
def test_intervals_and_indices_of_sequences(tmp_path, data):
    """A BED file, and the .fai beside a FASTA file."""
    bed = b"# of many\nchr1\t0\t4\tname\nchr7 2 30\nchr19\t9\t100\n"
    fasta, index = tmp_path / "a.fa", tmp_path / "a.fa.fai"
    fasta.write_bytes(FASTA)
    index.unlink(missing_ok=True)
    if is_bed := data.draw(st.booleans()):
        (tmp_path / "a.bed").write_bytes(data.draw(mutated(bed)))
    else:
        places = re.finditer(rb">(chr\d+) of many\n(.*)\nACG\n", FASTA)
        lines = ((p[1].decode(), len(p[2]) + 3, p.start(2), len(p[2]), len(p[2]) + 1) for p in places)
        whole = "".join("\t".join(map(str, line)) + "\n" for line in lines).encode()
        index.write_bytes(data.draw(mutated(whole)))
    options = ReadOptions(intervals=str(tmp_path / "a.bed") if is_bed else "", max_line_megabytes=0.01)

    def read():
        sources, _ = find_sources([str(fasta)], options)
        if is_bed:
            check_intervals(sources, options.intervals)
        for chunk in read_chunks(sources):
            assert all(set(text) <= set("ACGTNacgtn") for text in documents_of(chunk))

    works_or_is_one_line(read)


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """Beside a file that no folder names, a folder of `save_to_disk` and one of the cache of `load_dataset`."""
    home, table = tmp_path_factory.mktemp("tables"), pa.table({"text": [f"row {n}" for n in range(20)]})
    write_table(home / "secret.arrow", table)
    save_to_disk(home / "saved", table)
    for name in ("a-train-00000-of-00002", "a-train-00001-of-00002", "cache-1"):
        write_table(home / "cache" / f"{name}.arrow", table)
    return home


@fuzz(30)
@given(data=st.data())
def test_folders_of_datasets(tables, data):
    state = {"_data_files": [{"filename": f"data-0000{n}-of-00002.arrow"} for n in range(2)], "_split": "train"}
    info = {"splits": {"train": {"name": "train", "num_examples": 20}, "test": {}}}
    kind = data.draw(st.sampled_from(["saved", "cache"]))
    folder, name, whole = tables / kind, *{"saved": ("state.json", state), "cache": ("dataset_info.json", info)}[kind]
    as_json = mutated_json(whole).map(lambda value: json.dumps(value).encode())
    (folder / name).write_bytes(data.draw(as_json | mutated(json.dumps(whole).encode())))

    def read():
        sources, _ = find_sources([str(folder)], ReadOptions())
        assert all(Path(source.path).resolve().is_relative_to(folder.resolve()) for source in sources)
        for chunk in read_chunks(sources):
            list(documents_of(chunk))

    works_or_is_one_line(read)


README = b"""---
dataset_info: {features: [{name: text, dtype: string}, {name: n, dtype: int64}]}
configs:
- {config_name: a, data_files: [{split: train, path: a.jsonl}, {split: test, path: "*.jsonl"}]}
---
"""


@pytest.mark.slow
@fuzz(60)
@given(data=st.data())
def test_copies_of_repositories_of_the_hub(tmp_path, data):
    """The library finds what README.md names, and nothing outside of the folder is read."""
    secret = tmp_path / "secret.jsonl"
    secret.write_bytes(b'{"text": "hunter2"}\n')
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    files = {"README.md": README, "a.jsonl": TEXT}
    name = data.draw(st.sampled_from([*files, "path"]))
    if name == "path":
        names = st.sampled_from(
            [str(secret), f"file://{secret}", "../secret.jsonl", "a.jsonl", "a.pkl", "zip://a::b", "*"]
        )
        files["README.md"] = README.replace(b'"*.jsonl"', json.dumps(data.draw(names | st.text(max_size=9))).encode())
    else:
        files[name] = data.draw(mutated(files[name]))
    for file, raw in files.items():
        (folder / file).write_bytes(raw)
    for split in ("train", "test"):
        texts = works_or_is_one_line(lambda split=split: read_texts(f"hub:{folder}:a:{split}"))
        assert "hunter2" not in str(texts)


def read_texts(item):
    found, _ = find_sources([item])
    return [document for chunk in read_chunks(found) for document in documents_of(chunk)]


@fuzz(30)
@given(data=st.data())
def test_roles_of_tokens_in_folders_of_transformers(tmp_path, data):
    write_tokenizer(tmp_path)
    config = {
        "tokenizer_class": "BertTokenizer",
        "unk_token": "w7",
        "eos_token": {"content": "w9", "special": True},
        "mask_token": "w8",
        "additional_special_tokens": ["w10"],
    }
    name = data.draw(st.sampled_from(["tokenizer_config.json", "special_tokens_map.json"]))
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        (tmp_path / file).unlink(missing_ok=True)
    raw = json.dumps(config).encode()
    (tmp_path / name).write_bytes(
        data.draw(mutated_json(config).map(lambda value: json.dumps(value).encode()) | mutated(raw))
    )

    def read():
        tokenizer = Tokenizer.load(tmp_path)
        assert all(index is None or 0 <= index < tokenizer.vocab_size for index in tokenizer.special.values())
        tokenizer.decode(tokenizer.encode("w7 w9 w12"))

    works_or_is_one_line(read)


@pytest.mark.parametrize("name", ["eval.txt", "eval.jsonl"])
@fuzz(40)
@given(data=st.data())
def test_files_of_evaluations(tmp_path, name, data):
    file, line = (
        tmp_path / name,
        {"question": "one two " * 9, "answers": [["ten words " * 5], {"a": None, "b": "é \ud800"}]},
    )
    raw = (json.dumps(line) + "\n") * 3
    file.write_bytes(data.draw(mutated(raw.encode())))
    works_or_is_one_line(lambda: read_evaluations({name: find_sources([str(file)])[0]}))
    file.write_text(json.dumps(data.draw(mutated_json(line))))
    works_or_is_one_line(lambda: read_evaluations({name: find_sources([str(file)])[0]}))


@fuzz(60)
@given(data=st.data())
def test_what_cleaning_decided(tmp_path, data):
    folder, buffer = tmp_path / "cleaning", io.BytesIO()
    folder.mkdir(exist_ok=True)
    np.save(buffer, np.arange(9))
    (folder / "removed.npy").write_bytes(data.draw(mutated(buffer.getvalue())))
    works_or_is_one_line(lambda: read_removed(tmp_path))
    report = {"documents": 9, "kept": 7, "removed": {"c4: few sentences": 2}}
    (folder / "report.json").write_text(json.dumps(data.draw(mutated_json(report))))
    counts = works_or_is_one_line(lambda: read_report(tmp_path))
    assert counts is None or "\n" not in in_words(counts)


@fuzz(60)
@given(data=st.data())
def test_mds_directories(tmp_path, data):
    rows = [{"text": f"row {n} " * n, "id": n, "body": b"raw"} for n in range(20)]
    zstd, column = data.draw(st.booleans()), data.draw(st.sampled_from(["text", "body"]))
    folder = write_mds(tmp_path / f"{zstd}", rows, {"text": "str", "id": "int", "body": "bytes"}, zstd=zstd)
    if data.draw(st.booleans()):
        index = data.draw(mutated_json(json.loads((folder / "index.json").read_text())))
        (folder / "index.json").write_text(json.dumps(index))
    else:
        shard = data.draw(st.sampled_from(sorted(folder.iterdir())))
        shard.write_bytes(data.draw(mutated(shard.read_bytes())))

    def read():
        sources, _ = find_sources([str(folder)], ReadOptions(text_field=column))
        for chunk in read_chunks(sources):
            list(documents_of(chunk))

    works_or_is_one_line(read)


RECIPES = sorted({**bundled_recipes()}.values())[:6]
COMPARISONS = sorted(bundled_comparisons().values())[:3]


@fuzz(120)
@given(data=st.data())
def test_recipes(tmp_path, data):
    path, file = data.draw(st.sampled_from(RECIPES)), tmp_path / "recipe.toml"
    file.write_bytes(data.draw(mutated(path.read_bytes())))
    values = works_or_is_one_line(lambda: read_toml(file))
    if values is not None:
        works_or_is_one_line(lambda: config_from_dict(values, "here"))
    changed = data.draw(mutated_json(read_toml(path)))
    if isinstance(changed, dict):
        works_or_is_one_line(lambda: config_from_dict(changed, "here"))


@fuzz(60)
@given(data=st.data())
def test_comparisons(tmp_path, data):
    path, file = data.draw(st.sampled_from(COMPARISONS)), tmp_path / "recipe.toml"
    raw = path.read_bytes()
    file.write_bytes(data.draw(mutated(raw)))
    works_or_is_one_line(lambda: read_comparison(str(file)))
    changed = data.draw(mutated_json(read_toml(path)))
    try:
        file.write_text(tomli_w.dumps(changed), encoding="utf-8")
    except (TypeError, UnicodeEncodeError, AttributeError, ValueError):
        return  # TOML has no such values
    works_or_is_one_line(lambda: read_comparison(str(file)))


@pytest.mark.parametrize(
    "text", ["a = " + "[" * 100_000, "[" + ".".join("a" * 3000) + "]", "a = " + "{b = " * 5000, "a=1" * 5]
)
def test_nested_recipes(tmp_path, text):
    file = tmp_path / "recipe.toml"
    file.write_text(text)
    for read in (read_toml, load_config, read_comparison):
        with pytest.raises(ValueError, match=r"not valid TOML|nested too deeply") as raised:
            read(file if read is read_toml else str(file))
        assert "\n" not in str(raised.value)


@fuzz(300)
@given(text=st.text(max_size=60) | st.from_regex(r"[a-z0-9]{1,5}://[a-zA-Z0-9:@/?&=.%+]{0,40}", fullmatch=True))
def test_names_urls_and_json(tmp_path, text):
    found = works_or_is_one_line(lambda: artifact_path(tmp_path, text, "here", nested=True))
    assert found is None or found.resolve().is_relative_to(tmp_path.resolve())
    works_or_is_one_line(lambda: parse_json(text, "here"))
    works_or_is_one_line(lambda: DataConfig(path=text))

"""Whatever an input file, a recipe, a name or a URL holds: it is read, or refused in one line."""

from __future__ import annotations

import gzip
import io
import json
import lzma

import numpy as np
import pytest
import tomli_w
import zstandard
from foreign import write_mds, write_tar
from hypothesis import given
from hypothesis import strategies as st
from mutations import fuzz, mutated, mutated_json, works_or_is_one_line

from matmix.data.artifacts import artifact_path, parse_json
from matmix.data.config import DataConfig
from matmix.data.prepare.base import find_cuts, read_chunks
from matmix.data.prepare.cleaning.evaluations import read_evaluations
from matmix.data.prepare.cleaning.plan import in_words, read_removed, read_report
from matmix.data.prepare.text import ReadOptions
from matmix.data.prepare.text.documents import documents_of
from matmix.data.prepare.text.readers import find_sources
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
    works_or_is_one_line(lambda: read_evaluations(find_sources([str(file)])[0]))
    file.write_text(json.dumps(data.draw(mutated_json(line))))
    works_or_is_one_line(lambda: read_evaluations(find_sources([str(file)])[0]))


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

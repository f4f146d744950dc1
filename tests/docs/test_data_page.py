"""Every row of the tables in docs/data.md: its command, as it stands there, does what the row says of a small input."""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import os
import re
import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import token_files
import zstandard
from folders import contents
from foreign import save_to_disk, write_mds, write_table, write_tar
from hub import serving
from nightly import nightly
from paths import ROOT

from matmix.data.corpora import bundled_path
from matmix.data.formats.base import DamagedShard
from matmix.data.manifest import Manifest
from matmix.data.prepare.text.documents import split_text
from matmix.data.splits.reader import open_dataset
from matmix.data.tokenizer import Tokenizer
from matmix.launch.cli import main

PAGE = (ROOT / "docs/data.md").read_text(encoding="utf-8")
TEXTS = [f"text {i} é 😀 " + "word " * (i % 5) for i in range(24)]
TOKENS = token_files.documents(30, longest=9)


def rows(title: str) -> list[list[str]]:
    """The cells of the table in a section whose first column is what you have."""
    section = re.split(r"^#+ ", PAGE.split(f"# {title}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    lines = section.split("| what you have |", 1)[1].splitlines()[2:]
    table = lines[: next((n for n, line in enumerate(lines) if not line.startswith("|")), len(lines))]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table]


CASES: dict[str, dict[str, Callable[..., None]]] = {"Preparing": {}, "Tokenizers": {}, "Tokens made elsewhere": {}}
"""Section -> how the first cell of a row begins -> what tries the row."""


def case(title: str, start: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a function the case of a row."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        CASES[title][start] = function
        return function

    return decorate


def second_cell(title: str, start: str) -> list[str]:
    """The code in the second cell of a row."""
    (row,) = [row for row in rows(title) if row[0].startswith(start)]
    return re.findall("`([^`]+)`", row[1])


@pytest.mark.parametrize("title", CASES)
def test_every_row_has_a_case(title):
    firsts = [row[0] for row in rows(title)]
    assert [first for first in firsts if sum(first.startswith(start) for start in CASES[title]) != 1] == []
    assert len(firsts) == len(CASES[title])


@dataclass(frozen=True)
class Made:
    """What a command made, or how it failed."""

    error: str
    manifest: Manifest | None = None
    texts: Sequence[str] = ()


class Run:
    """Runs the command of a row where the inputs lie, whole or in two parts."""

    def __init__(self, commands: Sequence[str], capsys: pytest.CaptureFixture[str], parts: bool) -> None:
        self.commands, self.capsys, self.parts = commands, capsys, parts

    def __call__(self, *more: str, number: int = 0, **replaced: str) -> Made:
        words = shlex.split(self.commands[number])
        for old, new in replaced.items():
            words = [word.replace(old, new) for word in words]
        words += [] if "--tokenizer" in words else ["--tokenizer", "bytes"]
        words += ["--processes", "1", "--validation-fraction", "0"]
        shutil.rmtree("DIR", ignore_errors=True)
        for part in (["--part", "1/2"], ["--part", "2/2"]) if self.parts else ([],):
            if error := self._fails(*words[1:], *more, *part):
                return Made(error)
        if self.parts and (error := self._fails("prepare", "--merge", "--out", "DIR", *more)):
            return Made(error)
        tokenizer = Tokenizer.load("DIR")
        return Made("", Manifest.load("DIR"), [tokenizer.decode(ids) for ids in tokens_of("DIR")])

    def _fails(self, *words: str) -> str:
        """The line in which a command fails, "" where it does not."""
        self.capsys.readouterr()
        code = main(list(words))
        (line,) = [line for line in self.capsys.readouterr().err.splitlines() if "error: " in line] if code else [""]
        return line


def tokens_of(folder: str, split: str = "train") -> list[list[int]]:
    shards = open_dataset(folder, split)
    return [shards.read(s, i).tolist() for s in range(shards.n_shards) for i in range(len(shards.lengths(s)))]


def write_lines(path: Path, objects: Sequence[object], pack: Callable[[bytes], bytes] = bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(pack("".join(json.dumps(one) + "\n" for one in objects).encode()))


@case("Preparing", ".txt, .jsonl")
def lines(run, home):
    objects = [{"text": text} for text in TEXTS]
    write_lines(home / "FOLDER/a.jsonl", [*objects[:9], "no object"])
    write_lines(home / "FOLDER/b.ndjson.gz", objects[9:14], gzip.compress)
    write_lines(home / "FOLDER/c.json.xz", objects[14:20], lzma.compress)
    (home / "FOLDER/d.txt.zst").write_bytes(zstandard.compress("\n".join(TEXTS[20:]).encode()))
    made = run("--max-malformed", "0.5")
    assert made.texts == [*TEXTS[:20], "\n".join(TEXTS[20:])]
    (named,) = made.manifest.malformed["examples"]
    assert (named["file"], named["line"]) == ("FOLDER/a.jsonl", 10)


@case("Preparing", ".parquet files")
def parquet(run, home):
    kinds = [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())]
    for number, kind in enumerate(kinds):
        column = pa.array([*TEXTS, None]).cast(kind)
        write_table(home / f"FOLDER/{number}.parquet", pa.table({"body": column, "id": range(len(column))}))
    made = run()
    assert made.texts == TEXTS * 4
    assert made.manifest.empty_documents == 4


@case("Preparing", "fields inside of others")
def nested(run, home):
    write_lines(home / "FOLDER/a.jsonl", [{"meta": {"text": text}} for text in TEXTS])
    write_table(home / "FOLDER/b.parquet", pa.table({"meta": [{"text": text} for text in TEXTS] + [None]}))
    named = pa.table({"meta": [{"text": "not this"}] * len(TEXTS), "meta.text": TEXTS})
    write_table(home / "FOLDER/c.parquet", named)
    made = run()
    assert made.texts == TEXTS * 3
    assert made.manifest.empty_documents == 1


@case("Preparing", "texts in several fields")
def template(run, home):
    titles = [f"title {n}" if n % 3 else None for n in range(len(TEXTS))]
    table = pa.table({"title": [*titles, None], "text": [*TEXTS, None]})
    write_table(home / "FOLDER/a.parquet", table)
    made = run()
    assert made.texts == [f"{title or ''}\n\n{text}" for title, text in zip(titles, TEXTS, strict=True)]
    assert made.manifest.empty_documents == 1
    write_table(home / "FOLDER/a.parquet", pa.table({"title": range(9), "text": ["a"] * 9}))
    assert "those of text are: text" in run().error


@case("Preparing", "a folder of Hugging Face `datasets`")
def datasets(run, home):
    save_to_disk(home / "FOLDER/train", pa.table({"text": TEXTS}))
    write_table(home / "FOLDER/train/cache-0123.arrow", pa.table({"text": ["of map"]}))
    assert run().texts == TEXTS
    (home / "FOLDER/dataset_dict.json").write_text('{"splits": ["train"]}')
    (home / "FOLDER/train").rename(home / "FOLDER/one")
    (home / "FOLDER").rename(home / "whole")
    (home / "FOLDER").mkdir()
    (home / "whole").rename(home / "FOLDER/train")
    assert "holds the splits one; name one: FOLDER/train/one" in run().error


@case("Preparing", "a dataset at the Hugging Face hub")
def hub(run, home):
    old, new = (hashlib.sha1(f"{home} {which}".encode()).hexdigest() for which in ("old", "new"))
    for commit, texts in ((old, TEXTS), (new, TEXTS[:9])):
        for number in range(2):
            objects = [{"text": text} for text in texts[number::2]]
            write_lines(home / commit / f"train-{number}.json.gz", objects, gzip.compress)
        config = "{config_name: en, data_files: [{split: train, path: train-*}]}"
        (home / commit / "README.md").write_text(f"---\nconfigs:\n- {config}\n---\n")
        (home / commit / "code.py").write_text("open('executed', 'w')")
    name = ("datasets", "allenai/c4")
    with pytest.MonkeyPatch.context() as patch, serving({(*name, old): home / old}) as server:
        server.enter(patch, home / "cache")
        made = run()
        assert made.texts == [*TEXTS[::2], *TEXTS[1::2]]
        assert made.manifest.sources[1]["path"] == f"hf://datasets/allenai/c4@{old}/train-1.json.gz"
        server.folders[(*name, new)], server.main[name] = home / new, new
        assert main(["prepare", "hub:allenai/c4:en:train", "--out", "again", "--tokenizer", "bytes"]) == 0
        assert Manifest.load("again").sources[0]["path"].startswith(f"hf://datasets/allenai/c4@{new}/")
    assert not (home / "executed").exists()


@case("Preparing", "an MDS directory")
def mds(run, home):
    kinds = {"body": "bytes", "other": "pkl", "id": "int"}
    many = [{"body": text.encode(), "other": b"no pickle", "id": n} for n, text in enumerate(TEXTS)]
    write_mds(home / "FOLDER/train/a", many, kinds)
    write_mds(home / "FOLDER/train/b", [*many, {**many[0], "body": b"\xff"}], kinds, zstd=True)
    made = run("--max-malformed", "0.5")
    assert made.texts == TEXTS * 2
    assert made.manifest.malformed["count"] == 1


def write_tars(folder: Path) -> None:
    for number in range(10):
        texts = TEXTS[2 * number : 2 * number + 2]
        members = {f"{n}.{suffix}": text for n, text in enumerate(texts) for suffix in ("txt", "pth")}
        write_tar(folder / f"train-{number:02}.tar", {**members, "9.jpg": b"without a text"})


@case("Preparing", "WebDataset .tar files")
def tars(run, home):
    (home / "FOLDER").mkdir()
    write_tars(home / "FOLDER")
    made = run("--max-malformed", "0.5")
    assert made.texts == TEXTS[:20]
    assert made.manifest.malformed["count"] == 10
    raw = (home / "FOLDER/train-09.tar").read_bytes()
    (home / "FOLDER/train-09.tar").write_bytes(raw[:1000])
    assert "train-09.tar is damaged" in run("--max-malformed", "0.5").error


@case("Preparing", "such .tar files elsewhere")
def streams(run, home):
    write_tars(home)
    assert run("--max-malformed", "0.5", **{"s3://bucket": home.as_uri()}).texts == TEXTS[:20]
    ssh = home / "bin/ssh"  # first in PATH
    ssh.parent.mkdir()
    ssh.write_text('#!/bin/sh\nshift\nexec "$@"\n')
    ssh.chmod(0o755)
    assert run("--max-malformed", "0.5", number=1).texts == TEXTS[:20]
    ssh.write_text(ssh.read_text().replace("exec", "false; exit 3; exec"))
    assert "cannot be read: the command ended with code 3" in run("--max-malformed", "0.5", number=1).error


@case("Preparing", "a crawl with copies")
def cleaning(run, home):
    with lzma.open(bundled_path("moby_dick"), "rt", encoding="utf-8") as file:
        prose = split_text(file.read(100_000), 1000)
    english = prose[30:33]
    german = "Das Haus steht am Ende der Straße, und niemand weiß mehr, wer es gebaut hat oder warum es leer ist. " * 6
    texts = [*english, english[1].replace(" the ", " a ", 1), german, "too short", english[0]]
    write_lines(home / "FOLDER/a.jsonl", [{"text": text} for text in texts])
    made = run()
    assert made.texts == english
    assert (made.manifest.cleaning["documents"], made.manifest.cleaning["kept"]) == (7, 3)
    assert (
        json.loads((home / "DIR/cleaning/report.json").read_text())["examples"].keys()
        == made.manifest.cleaning["removed"].keys()
    )


@case("Preparing", "DNA")
def dna(run, home):
    letters = "".join(np.random.default_rng(0).choice(list("ACGTacgtN"), 900))
    (home / "genome.fa").write_text(f">one\n{letters[:600]}\n>two\n{letters[600:]}\n")
    assert run().texts == [letters[:600].upper(), letters[600:].upper()]
    reads = "".join(f"@read\n{letters[n : n + 90]}\n+\n{'F' * 90}\n" for n in range(0, 900, 90))
    (home / "reads.fq.gz").write_bytes(gzip.compress(reads.encode()))
    assert "".join(run(**{"genome.fa": "reads.fq.gz"}).texts) == letters.upper()
    (home / "genome.fa").write_text(">one\nMKVL\n")
    assert "proteins are not read" in run().error


@case("Preparing", "any files, as bytes")
def raw_bytes(run, home):
    files = {
        "a.bin": np.random.default_rng(0).bytes(9000),
        "b/c.txt": b"no \xff text",
        "b/index.json": b'{"shards": []}',
    }
    for name, raw in files.items():
        (home / "FOLDER" / name).parent.mkdir(parents=True, exist_ok=True)
        (home / "FOLDER" / name).write_bytes(raw)
    run()
    assert b"".join(map(bytes, tokens_of("DIR"))) == b"".join(files.values())


HEAVY = ("a crawl with copies",)


def prepare_row(start, home, capsys, monkeypatch, parts):
    monkeypatch.chdir(home)
    monkeypatch.setenv("MATMIX_SCRATCH", str(home / "scratch"))
    monkeypatch.setenv("PATH", f"{home}/bin:{os.environ['PATH']}")
    CASES["Preparing"][start](Run(second_cell("Preparing", start), capsys, parts), home)


@pytest.mark.parametrize("start", [nightly(start, condition=start in HEAVY) for start in CASES["Preparing"]])
def test_preparing(start, tmp_path, capsys, monkeypatch):
    prepare_row(start, tmp_path, capsys, monkeypatch, parts=False)


@pytest.mark.slow
@pytest.mark.parametrize("start", CASES["Preparing"])
def test_preparing_in_parts(start, tmp_path, capsys, monkeypatch):
    prepare_row(start, tmp_path, capsys, monkeypatch, parts=True)


@case("Tokens made elsewhere", "Megatron-LM")
def megatron(home):
    token_files.write_megatron(home / "a.bin", [[[*text, token_files.END]] for text in TOKENS])


@case("Tokens made elsewhere", "nanoGPT")
def nanogpt(home):
    token_files.write_flat(home / "train.bin", TOKENS[:20])
    token_files.write_flat(home / "val.bin", TOKENS[20:])


@case("Tokens made elsewhere", "llm.c")
def llm_c(home):
    token_files.write_llm_c(home / "a.bin", TOKENS)


@case("Tokens made elsewhere", "OLMo")
def olmo(home):
    token_files.write_flat(home / "a.npy", TOKENS, "<u4")


@case("Tokens made elsewhere", "arrays of `numpy.save`")
def arrays(home):
    token_files.write_flat(home / "a.npy", TOKENS, "<i8", header=True)


@case("Tokens made elsewhere", "litdata")
def litdata(home):
    token_files.write_litdata(home, TOKENS, "<i4", "no_header_tensor:16")


@case("Tokens made elsewhere", "llm-foundry")
def foundry(home):
    token_files.write_mds(home, TOKENS, "bytes", "<i8")


@pytest.mark.parametrize("start", CASES["Tokens made elsewhere"])
def test_tokens_made_elsewhere(start, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    CASES["Tokens made elsewhere"][start](tmp_path / "DIR")
    token_files.write_tokenizer(tmp_path / "TOKENIZER")
    before = contents("DIR")
    (command,) = second_cell("Tokens made elsewhere", start)
    words = shlex.split(command)[1:]
    assert main(words + ([] if "--validation" in words else ["--validation-fraction", "0"])) == 0
    assert contents("DIR").items() >= before.items()
    validation = tokens_of("DIR", "validation") if "--validation" in words else []
    assert [*tokens_of("DIR"), *validation] == TOKENS
    shard = Manifest.load("DIR").splits["train"].shards[0]
    raw = bytearray((tmp_path / "DIR" / shard.file).read_bytes())
    raw[shard.offset] ^= 1
    (tmp_path / "DIR" / shard.file).write_bytes(raw)
    with pytest.raises(DamagedShard, match="another SHA-256"):
        tokens_of("DIR")


@case("Tokenizers", "a sentencepiece model")
def sentencepiece_model(dataset, monkeypatch):
    return Path(shutil.copy(Path(dataset) / "tokenizer/tokenizer.model", "a.model"))


@case("Tokenizers", "a file of the library `tokenizers`")
def library_file(dataset, monkeypatch):
    return token_files.write_tokenizer(Path())


@case("Tokenizers", "a dataset, a run or an export")
def of_a_dataset(dataset, monkeypatch):
    return Path(dataset) / "tokenizer/tokenizer.model"


CONFIG = {"tokenizer_class": "BertTokenizer", "cls_token": "[CLS]", "mask_token": "[MASK]", "unk_token": "[UNK]"}


@case("Tokenizers", "a folder of transformers' fast tokenizer")
def fast(dataset, monkeypatch):
    file = token_files.write_tokenizer(Path("DIR"))
    Path("DIR/tokenizer_config.json").write_text(json.dumps({**CONFIG, "unk_token": "<unk>"}))
    return file


@case("Tokenizers", "a folder of a slow one")
def slow(dataset, monkeypatch):
    Path("DIR").mkdir()
    Path("DIR/tokenizer_config.json").write_text(json.dumps(CONFIG))
    Path("DIR/vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "text", "word"]))


@case("Tokenizers", "a name at the Hugging Face hub")
def hub_name(dataset, monkeypatch):
    file = fast(dataset, monkeypatch)

    def download(name, *, revision, allow_patterns):
        assert [name, revision] in (["google-bert/bert-base-uncased", None], ["openai-community/gpt2", "main"])
        assert not [pattern for pattern in allow_patterns if re.search(r"\*|\.bin|safetensors|\.p[tk]", pattern)]
        return "DIR"

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    return file


@pytest.mark.parametrize("start", [nightly(s, condition=s == "a folder of a slow one") for s in CASES["Tokenizers"]])
def test_tokenizers(start, tmp_path, monkeypatch, dataset):
    """The dataset has a copy of the file, or of what a slow tokenizer becomes."""
    monkeypatch.chdir(tmp_path)
    file = CASES["Tokenizers"][start](dataset, monkeypatch)
    write_lines(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    given = second_cell("Tokenizers", start) or [dataset]
    for number, name in enumerate(given):
        words = ["prepare", "a.jsonl", "--out", f"out-{number}", "--tokenizer", name, "--processes", "1"]
        assert main([*words, "--validation-fraction", "0"]) == 0
        made = Tokenizer.load(f"out-{number}")
        assert file is None or made.raw == file.read_bytes()
        assert file is not None or made.encode("word text") == [6, 5]
        assert tokens_of(f"out-{number}") == [made.encode(text) for text in TEXTS]

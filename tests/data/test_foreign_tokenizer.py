"""Tokenizers of transformers, fast, slow and from a hub: the same ids, special tokens and exports; what is refused."""

from __future__ import annotations

import gzip
import hashlib
import io
import itertools
import json
import re
import shlex
from pathlib import Path

import pyarrow.parquet
import pytest
import sentencepiece
import tokenizers
import transformers
from failures import each
from hub import serving
from tokenizers import decoders, models, pre_tokenizers, trainers

from matmix.data.foreign_tokenizer import local_or_hub
from matmix.data.manifest import Manifest
from matmix.data.prepare.base import hash_of
from matmix.data.prepare.command import prepare
from matmix.data.prepare.text import PrepareConfig, preparation
from matmix.data.prepare.text.documents import documents_of
from matmix.data.prepare.text.readers import find_sources
from matmix.data.tokenizer import Tokenizer
from matmix.launch.cli import main
from matmix.model.config import ModelConfig
from matmix.model.interop.export.tokenizer import load_fast_tokenizer, write_tokenizer
from matmix.train.recipe import load_config
from matmix.train.recipe_files import find_recipe

TEXTS = ["To be, or not to be: that is the QUESTION.", "  Café\n\n two", "an emoji 😀", "", "brutus' 1234"]
MARKED = "[CLS] <|endoftext|> </s> [MASK]<extra_id_0>"
# What the documents of a run stand between.
AROUND = {"bert": ("cls", "sep"), "gpt2": ("none", "none"), "t5": ("none", "eos")}
KINDS = ["bert_fast", "bert_slow", "gpt2_fast", "gpt2_slow", "t5_slow"]


@pytest.fixture(scope="module")
def shakespeare() -> list[str]:
    sources, _ = find_sources(["bundled:shakespeare"])
    chunk = next(sources[0].chunks(preparation.Position(), None))
    return "".join(itertools.islice(documents_of(chunk), 1))[:60_000].split("\n\n")


@pytest.fixture(scope="module")
def folders(tmp_path_factory, shakespeare) -> Path:
    """Small tokenizers of Shakespeare, as `save_pretrained` of transformers leaves them."""
    work = tmp_path_factory.mktemp("foreign")
    wordpiece = tokenizers.BertWordPieceTokenizer(lowercase=True)
    wordpiece.train_from_iterator(shakespeare, vocab_size=400, min_frequency=1, show_progress=False)
    wordpiece.save_model(str(work))
    transformers.BertTokenizer(str(work / "vocab.txt")).save_pretrained(work / "bert_slow")
    transformers.BertTokenizerFast(str(work / "vocab.txt")).save_pretrained(work / "bert_fast")
    by_bytes = tokenizers.Tokenizer(models.BPE())
    by_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    by_bytes.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    by_bytes.train_from_iterator(shakespeare, trainer)
    files = by_bytes.model.save(str(work))
    transformers.GPT2Tokenizer(*files).save_pretrained(work / "gpt2_slow")
    transformers.GPT2TokenizerFast(*files).save_pretrained(work / "gpt2_fast")
    writer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter("\n".join(shakespeare).split("\n")),
        model_writer=writer,
        vocab_size=400,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=2,
    )
    (work / "spiece.model").write_bytes(writer.getvalue())
    transformers.T5Tokenizer(str(work / "spiece.model"), legacy=False).save_pretrained(work / "t5_slow")
    assert not (work / "bert_slow/tokenizer.json").exists()
    assert not (work / "t5_slow/tokenizer.json").exists()
    return work


def slow_of(folder: Path) -> transformers.PreTrainedTokenizer:
    """The slow tokenizer of a folder, whose ids are those that its authors mean."""
    kind = {"bert": "BertTokenizer", "gpt2": "GPT2Tokenizer", "t5": "T5Tokenizer"}[folder.name.split("_")[0]]
    return getattr(transformers, kind).from_pretrained(folder)


@each("name", KINDS)
def test_ids_and_special_tokens_are_those_of_transformers(folders, shakespeare, name):
    tokenizer, slow = Tokenizer.load(folders / name), slow_of(folders / name)
    for text in [*TEXTS, *shakespeare[:50]]:
        assert tokenizer.encode(text) == slow(text, add_special_tokens=False).input_ids, text
    assert tokenizer.vocab_size == len(slow)
    for role in ("pad", "bos", "eos", "cls", "sep", "mask"):
        assert tokenizer.special[role] == getattr(slow, f"{role}_token_id"), role
    assert set(slow.all_special_ids) <= {*tokenizer.special_ids, tokenizer.unknown_id}
    assert not set(tokenizer.encode(MARKED)) & set(tokenizer.special_ids)


def test_a_slow_folder_gives_the_file_of_the_fast_one(folders):
    for name in ("bert", "gpt2"):
        fast = (folders / f"{name}_fast" / "tokenizer.json").read_bytes()
        assert json.loads(Tokenizer.load(folders / f"{name}_slow").raw) == json.loads(fast)
        assert Tokenizer.load(folders / f"{name}_fast").raw == fast


@each("name", KINDS)
def test_exports_carry_them_unchanged(folders, tmp_path, name):
    prefix, suffix = AROUND[name.split("_")[0]]
    tokenizer = Tokenizer.load(folders / name)
    saved, export = tokenizer.save(tmp_path / "run"), tmp_path / "export"
    export.mkdir()
    model = ModelConfig(vocab_size=600, architecture="encoder", layers=("hydra",))
    around = {"prefix": prefix, "suffix": suffix, "special": tokenizer.special}
    write_tokenizer(export, load_fast_tokenizer(saved, tokenizer.special), model, **around, max_length=512)
    exported, slow = transformers.AutoTokenizer.from_pretrained(export), slow_of(folders / name)
    for text in TEXTS:
        ids = slow(text).input_ids
        assert exported(text).input_ids == ids, text
        kept = exported.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert kept == tokenizer.decode(ids), text
    assert exported.mask_token == slow.mask_token
    again = Tokenizer.load(export)
    assert (again.special, again.encode_batch(TEXTS)) == (tokenizer.special, tokenizer.encode_batch(TEXTS))


def test_roles_that_only_the_configuration_tells(folders, tmp_path):
    """Also in the copies that datasets and runs keep, which are one file, and in exports."""
    file = json.loads((folders / "bert_fast/tokenizer.json").read_text())
    file["added_tokens"] = [token for token in file["added_tokens"] if token["content"] != "[MASK]"]
    file["model"]["vocab"] = {{"[MASK]": "[gap]"}.get(piece, piece): i for piece, i in file["model"]["vocab"].items()}
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    assert Tokenizer.load(tmp_path).special["mask"] is None
    roles = {"mask_token": {"content": "[gap]"}, "bos_token": "[CLS]", "eos_token": "absent", "pad_token": "[UNK]"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(roles))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.special == {"pad": 0, "unk": 1, "bos": 2, "eos": None, "cls": 2, "sep": 3, "mask": 4}
    assert 4 in tokenizer.special_ids
    assert 4 not in tokenizer.encode("a [gap] [MASK]")
    copy = Tokenizer.load(tokenizer.save(tmp_path / "run"))
    assert (copy.special, copy.sha256) == (tokenizer.special, tokenizer.sha256)
    (tmp_path / "export").mkdir()
    fast, around = load_fast_tokenizer(copy.path, copy.special), {"prefix": "cls", "suffix": "sep"}
    model = ModelConfig(vocab_size=600, architecture="encoder", layers=("hydra",))
    write_tokenizer(tmp_path / "export", fast, model, special=copy.special, **around, max_length=512)
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path / "export")
    assert exported("a [gap]").input_ids == [2, *tokenizer.encode("a"), 4, 3]
    assert Tokenizer.load(tmp_path / "export").special == tokenizer.special


def prepared(tmp_path: Path, tokenizer: Path, out: str) -> Manifest:
    options = {"validation_fraction": 0.2, "processes": 1, "tokenizer": str(tokenizer)}
    return prepare(PrepareConfig(inputs=(str(tmp_path / "in.jsonl"),), out=str(tmp_path / out), **options))


def test_prepare_says_what_it_found_and_what_does_not_come_back(folders, tmp_path, capsys, monkeypatch):
    texts = [f"{word} be{' ha' * n}" for n in range(60) for word in ("to", "To")] + ["not 😀 there"]
    (tmp_path / "in.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    bert = prepared(tmp_path, folders / "bert_slow", "bert")
    assert bert.tokenizer.round_trip == {"texts": 121, "changed": 61, "unknown": 1}
    assert Manifest.load(tmp_path / "bert") == bert
    words = capsys.readouterr().out
    assert "special     pad 0, unk 1, cls 2, sep 3, mask 4; no bos, eos\n" in words
    assert "61 of 121 texts (50.41 %) come back from their tokens as another text; 1 hold what" in words
    gpt2 = prepared(tmp_path, folders / "gpt2_fast", "gpt2")
    assert gpt2.tokenizer.round_trip == {"texts": 121, "changed": 0, "unknown": 0}
    assert "round trip  all of 121 texts come back" in capsys.readouterr().out
    copy = (tmp_path / "gpt2" / gpt2.tokenizer.file).read_bytes()
    assert copy == (folders / "gpt2_fast/tokenizer.json").read_bytes()
    assert gpt2.tokenizer.sha256 == hashlib.sha256(copy).hexdigest()
    monkeypatch.setattr(preparation, "_SMALL", 100)
    few = prepared(tmp_path, folders / "gpt2_fast", "few").tokenizer.round_trip["texts"]
    assert few == sum(hash_of(text.encode()) % 16 == 0 for text in texts)
    assert 0 < few < 60


def test_names_at_the_hub(folders, tmp_path, monkeypatch):
    folder = folders / "bert_slow"
    with serving({("models", "someone/words", "1" * 40): folder}) as hub:
        hub.enter(monkeypatch, tmp_path / "cache")
        found = Tokenizer.load(local_or_hub("someone/words"))
        for name in ("someone/else", "gated/words"):
            with pytest.raises(FileNotFoundError, match=rf"{name} is no file or folder.*none of that name.*HF_TOKEN"):
                local_or_hub(name)
    assert found.sha256 == Tokenizer.load(folder).sha256
    fetched = {path.rsplit("/", 1)[-1] for path in hub.asked if "/resolve/" in path}
    assert fetched == {path.name for path in folder.iterdir()}  # no weights, no pickle
    # Without a network, what was downloaded before is there, and nothing else.
    assert Tokenizer.load(local_or_hub("someone/words@main")).sha256 == found.sha256
    with pytest.raises(FileNotFoundError, match="no file or folder here, and the Hugging Face hub cannot be reached"):
        local_or_hub("someone/else")


SMALL = {
    "hydra_base_c4": ["--model.d_model", "64", "--model.mixers.hydra.d_state", "8", "--model.vocab_size", "400"],
    "mru_tinystories": ["--model.d_model", "32", "--model.mixers.mru.nheads", "2", "--model.mixers.mru.order", "4"],
}


@pytest.mark.slow
@each("recipe", SMALL)
def test_the_command_for_the_data_of_a_published_recipe(folders, tmp_path, monkeypatch, shakespeare, recipe):
    """As the recipe gives it, with a hub where the datasets and the tokenizers are small; the recipe trains on it."""
    monkeypatch.chdir(tmp_path)
    (line,) = re.findall(r"^# Data: matmix (.+)$", find_recipe(recipe).read_text(), re.MULTILINE)
    dataset = re.search(r"hub:([^:]+)", line)[1]
    tokenizer = re.search(r"--tokenizer (\S+)", line)[1]
    repository = tmp_path / "repository"
    (repository / "en").mkdir(parents=True)
    (repository / "data").mkdir()
    config = "{config_name: en, data_files: [{split: train, path: en/c4-train.*}, {split: validation, path: en/c4-v*}]}"
    table = pyarrow.table({"text": shakespeare})
    if recipe == "hydra_base_c4":
        (repository / "README.md").write_text(f"---\nconfigs:\n- {config}\n---\n")
        lines = "\n".join(json.dumps({"text": text}) for text in shakespeare)
        for name in ("train.00000-of-00001", "validation.00000-of-00001"):
            (repository / f"en/c4-{name}.json.gz").write_bytes(gzip.compress(lines.encode()))
    else:
        for name in ("train", "validation"):
            pyarrow.parquet.write_table(table, repository / f"data/{name}-00000-of-00001-2d5a1467fff1081b.parquet")
        (repository / "TinyStories-train.txt").write_text("not this")
    commit = hashlib.sha1(str(tmp_path).encode()).hexdigest()
    words = folders / ("bert_slow" if "bert" in tokenizer else "gpt2_slow")
    with serving({("datasets", dataset, commit): repository, ("models", tokenizer, commit): words}) as hub:
        hub.enter(monkeypatch, tmp_path / "cache")
        assert main([*shlex.split(line), "--processes", "1", "--validation-fraction", "0.2"]) == 0
    manifest = Manifest.load(load_config(recipe).data.path)
    assert sum(split.documents for split in manifest.splits.values()) == len(list(filter(str.strip, shakespeare)))
    sizes = ["--steps", "1", "--global_batch_size", "2", "--micro_batch_size", "2", "--model.n_layers", "1"]
    assert main(["train", recipe, *sizes, "--data.seqlen", "16", *SMALL[recipe], "--run_dir", "run"]) == 0


def test_names_that_are_files_or_none_of_a_hub_stay_with_this_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    for name in ("gpt2", "absent.json", "a/b/c", "../x", "absent/tokenizer.model"):
        assert local_or_hub(name) == Path(name)
    assert local_or_hub("dna") == "dna"


CODE = "import pathlib\npathlib.Path('executed').touch()\nclass MineTokenizer: pass\nclass MineTokenizerFast: pass\n"


@each(
    "files, message",
    [
        ({"vocab.txt": "a\nb"}, "does not say which tokenizer"),
        ({"vocab.json": "{}", "merges.txt": "", "tokenizer_config.json": "{}"}, "does not say which tokenizer"),
        ({"tokenizer_config.json": '{"tokenizer_class": "ByT5Tokenizer"}'}, "ByT5Tokenizer, which has no fast form"),
        (
            {
                "tokenizer_config.json": '{"tokenizer_class": "MineTokenizer", "auto_map": {"AutoTokenizer": '
                '["mine.MineTokenizer", "mine.MineTokenizerFast"]}}',
                "mine.py": CODE,
            },
            "MineTokenizer, which has no fast form in transformers .code that comes with a folder is not run",
        ),
        ({"tokenizer_config.json": "{"}, "is damaged"),
        ({"tokenizer_config.json": "[1]"}, "it holds no object"),
        ({"tokenizer_config.json": '{"tokenizer_class": 3}'}, "does not say which tokenizer"),
        ({"vocab.txt": "a", "config.json": '{"model_type": "t5"}'}, "cannot be read as a T5TokenizerFast"),
        (
            {"tokenizer_config.json": '{"tokenizer_class": "GPT2Tokenizer"}', "vocab.json": "{", "merges.txt": ""},
            "cannot be read as a GPT2TokenizerFast",
        ),
        (
            {"tokenizer_config.json": '{"tokenizer_class": "T5Tokenizer"}', "spiece.model": "no model"},
            "cannot be read as a T5TokenizerFast",
        ),
    ],
)
def test_folders_that_are_refused(tmp_path, monkeypatch, files, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "given").mkdir()
    for name, content in files.items():
        (tmp_path / "given" / name).write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        Tokenizer.load(tmp_path / "given")
    assert "\n" not in str(caught.value)
    assert not Path("executed").exists()


def test_a_configuration_cannot_name_files_elsewhere(folders, tmp_path):
    """Neither as a member of its own nor as an argument by position; `model_type` alone says the class, too."""
    secret = tmp_path / "secret"
    secret.write_text("\n".join(["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]", "hunter2"]))
    given = tmp_path / "given"
    given.mkdir()
    (given / "vocab.txt").write_bytes((folders / "vocab.txt").read_bytes())
    (given / "config.json").write_text('{"model_type": "bert"}')
    for config in ({}, {"vocab_file": str(secret)}, {"init_inputs": [str(secret)]}):
        (given / "tokenizer_config.json").write_text(json.dumps(config))
        (given / "special_tokens_map.json").write_text(json.dumps(config))
        tokenizer = Tokenizer.load(given)
        assert tokenizer.encode_batch(TEXTS) == Tokenizer.load(folders / "bert_slow").encode_batch(TEXTS)
        assert b"hunter2" not in tokenizer.raw

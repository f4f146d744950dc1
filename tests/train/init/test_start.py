"""Runs that begin with the weights of another model."""

import dataclasses
import shutil
from pathlib import Path

import pytest
import tokenizers
import torch
from beginnings import first_weights
from object_store import running_store
from runs import losses, run_recipe, weights
from saved_weights import read_weights

from matmix.data.tokenizer import Tokenizer
from matmix.model import build_model
from matmix.model.config import HeadConfig
from matmix.train.config import InitConfig
from matmix.train.engine.full_state import Entry, FullState
from matmix.train.entry import main
from matmix.train.init import source_of
from matmix.train.init.start import check_tokenizers, plan_start
from matmix.use.exporting import export_run

WORD = "embeddings.word.weight"
QUICK = ("--evaluation.every", "0", "--evaluation.batches", "1", "--evaluation.ablation-batches", "0")


@pytest.fixture(scope="module")
def encoder(dataset, tmp_path_factory):
    """A run of two steps, with weights that no seed draws."""
    run = tmp_path_factory.mktemp("source") / "encoder"
    run_recipe("debug_hydra", dataset, run, "--steps", "2", "--checkpoint.every", "1", *QUICK)
    return run


@pytest.fixture
def begin(dataset, tmp_path):
    """The weights of a run from a source, before its first step."""

    def begin(source, *arguments):
        words = ["--data.path", dataset, "--run-dir", str(tmp_path / "begun"), "--seed", "5", *arguments]
        return first_weights("debug_hydra", [*words, *(["--init.from", str(source)] if source else [])])

    return begin


def same(found, expected, *but):
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == list(but)


def test_a_run_begins_with_the_weights_of_a_run_or_its_export(encoder, begin, tmp_path, told):
    export_run(encoder, tmp_path / "export")
    same(begin(tmp_path / "export"), weights(encoder))
    shutil.rmtree(tmp_path / "begun")
    url = f"file://{encoder}"
    same(begin(url, "--init.step", "2"), weights(encoder))
    words = [line for line in told if line.startswith("weights from")]
    assert words == [
        f"weights from the export {tmp_path / 'export'}: {len(weights(encoder))} tensors taken; new: none; left: none",
        f"weights from step-00000002 of {url}: {len(weights(encoder))} tensors taken; new: none; left: none",
    ]


@pytest.mark.slow
def test_a_run_begins_with_the_weights_of_a_run_in_an_object_store(encoder, begin, tmp_path, monkeypatch, told):
    """Of the checkpoint of a step, without what its optimizer keeps."""
    monkeypatch.setenv("MATMIX_SCRATCH", str(tmp_path / "scratch"))
    with running_store(monkeypatch) as store:
        for file in filter(Path.is_file, encoder.rglob("*")):
            store.put(f"runs/encoder/{file.relative_to(encoder)}", file.read_bytes())
        url = f"{store.url}/runs/encoder"
        same(begin(url, "--init.step", "1"), dict(read_weights(encoder / "checkpoints" / "step-00000001")))
        read = [path for method, path in store.requests if method == "GET" and "/checkpoints/step-" in path]
        with pytest.raises(FileNotFoundError, match=rf"{store.url}/runs/none"):
            begin(f"{store.url}/runs/none", "--run-dir", str(tmp_path / "other"))
    assert any(line.startswith(f"weights from step-00000001 of {url}: ") for line in told)
    assert read
    assert not [path for path in read if "step-00000002" in path or "/moments" in path]


def test_names_that_are_ignored_are_drawn_by_the_seed_and_others_can_be_renamed(encoder, begin, tmp_path, told):
    seed = begin(None)
    shutil.rmtree(tmp_path / "begun")
    swap = ("--init.rename", "blocks.0.mlp=blocks.1.mlp", "blocks.1.mlp=blocks.0.mlp", "--init.ignore", "head.*")
    found, source = begin(encoder, *swap), weights(encoder)
    for name, tensor in found.items():
        origin = name.replace("0.mlp", "X").replace("1.mlp", "0.mlp").replace("X", "1.mlp")
        assert torch.equal(tensor, seed[name] if name.startswith("head.") else source[origin]), name
    assert "new: head.bias, head.dense.weight" in "\n".join(told)
    assert "left: head.bias, head.dense.weight" in "\n".join(told)


def test_more_rows_are_drawn_by_the_seed(encoder, begin, tmp_path, told):
    """A larger vocabulary, and longer texts for a model with position embeddings."""
    longer = ("--model.position-embeddings", "True", "--model.max-seqlen")
    from_here = begin(encoder, *longer, "64", "--init.ignore", "embeddings.position.*")
    (tmp_path / "begun").rename(tmp_path / "shorter")
    seed = begin(None, *longer, "128", "--data.seqlen", "128", "--model.vocab-size", "400")
    shutil.rmtree(tmp_path / "begun")
    arguments = (*longer, "128", "--data.seqlen", "128", "--model.vocab-size", "400")
    found = begin(tmp_path / "shorter", *arguments)
    for name, tensor in found.items():
        rows = len(from_here[name])
        assert torch.equal(tensor[:rows], from_here[name]), name
        assert torch.equal(tensor[rows:], seed[name][rows:]), name
    assert found[WORD].shape == (400, 32)
    assert found["embeddings.position.weight"].shape == (128, 32)
    assert f"{WORD} 320 -> 400 rows" in "\n".join(told)


def test_a_head_is_new_and_the_head_of_the_pretraining_is_left(encoder):
    source = source_of(InitConfig(from_=str(encoder)))
    options = {"architecture": "sequence_classifier", "head": HeadConfig(outputs=3)}
    classifier = dataclasses.replace(source.model, **options)
    model = build_model(classifier, device="meta")
    shapes = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    start = plan_start(source, classifier, shapes, InitConfig(from_="it"))
    assert {name.split(".")[0] for name in start.new} == {"classifier"}
    assert {name.split(".")[0] for name in start.left} == {"head"}
    assert {*start.taken, *start.left} == set(weights(encoder))
    # Rows of a head are classes: those of three are not the first three of five.
    shapes["classifier.output.weight"] = (5, 32)
    trained = dataclasses.replace(source, model=classifier, state=_State(model))
    with pytest.raises(ValueError, match=r"classifier\.output\.weight has the shape \(3, 32\) .* init\.ignore leaves"):
        plan_start(trained, classifier, shapes, InitConfig(from_="it"))


class _State(FullState):
    def __init__(self, model):
        self.entries = {f"model.{name}": Entry(tuple(t.shape)) for name, t in model.named_parameters()}

    def read(self, key, start=0, stop=None):
        raise AssertionError("a plan reads nothing")


def test_a_checkpoint_of_the_papers_code():
    """Whose it is is found out from its names."""
    golden = Path(__file__).parents[2] / "golden" / "hydra_mlm_postnorm.safetensors"
    source = source_of(InitConfig(from_=str(golden)))
    assert source.words == f"the hydra checkpoint {golden}"
    assert (source.prefix, source.suffix, source.model.architecture) == ("cls", "sep", "encoder")
    shapes = {name: tuple(tensor.shape) for name, tensor in build_model(source.model, device="meta").named_parameters()}
    start = plan_start(source, source.model, shapes, InitConfig(from_="it"))
    assert (set(start.taken), start.new, start.left) == (set(shapes), [], [])
    state = source.state
    key = f"model.{WORD}"
    assert torch.equal(state.read(key, 3, 11), state.read_whole(key).flatten()[3:11])
    with pytest.raises(ValueError, match=r"^.* is no run, no export, and no known checkpoint \(mru-lm: "):
        source_of(InitConfig(from_=str(golden), project="mru-lm"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model.d-model", "48"], r"blocks\.0\.norm_mixer\.weight has the shape \(32,\) in .*, and \(48,\) here$"),
        (["--model.type-vocab-size", "1"], r"and \(1, 32\) here; set model\.type_vocab_size = 2, or more"),
        (
            ["--model.n-layers", "1"],
            r"blocks\.1\.\S+ of the shape \(.*\) in .* has no place in the model; init\.ignore",
        ),
        (["--model.n-layers", "3"], r"has no blocks\.2\.\S+, which the model has in the shape \("),
        (["--init.ignore", "header.*"], r'^init\.ignore: "header\.\*" names no weight'),
        (["--init.rename", "x=y"], r'^init\.rename: no weight of .* begins with "x"'),
        (
            ["--init.rename", "blocks.0=blocks.1"],
            r"^init\.rename: blocks\.0\.\S+ and blocks\.1\.\S+ of .* would both be",
        ),
        (["--init.rename", "x"], r'init\.rename = "x": write it as "old=new"'),
        (["--init.step", "7"], r"no checkpoint of step 7; there are: 1, 2"),
        (["--init.from", "/nowhere"], r"^init\.from: there is no /nowhere$"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(encoder, begin, tmp_path, arguments, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message) as refused:
        begin("" if "--init.from" in arguments else encoder, *arguments)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "begun" / "config.toml").exists()


def test_ids_must_mean_the_same(encoder, tmp_path):
    """The tokenizer of the data may have more ids than the source's, whether the two are of one format or not."""
    export_run(encoder, tmp_path / "export")
    source, export = (source_of(InitConfig(from_=path)) for path in (str(encoder), f"file://{tmp_path}/export"))
    assert (export.prefix, export.suffix) == (source.prefix, source.suffix) == ("cls", "sep")
    check_tokenizers(export, source.tokenizer, InitConfig())
    fast = tokenizers.Tokenizer.from_file(str(tmp_path / "export" / "tokenizer.json"))
    fast.add_tokens(["verily"])
    fast.save(str(tmp_path / "more.json"))
    more = Tokenizer.load(tmp_path / "more.json")
    check_tokenizers(source, more, InitConfig())
    import dataclasses

    with pytest.raises(
        ValueError, match=r"it has 321 ids, that of the data 320\).* or set init\.other_tokenizer = true$"
    ):
        check_tokenizers(dataclasses.replace(source, tokenizer=more), source.tokenizer, InitConfig())
    other = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    other.save(str(tmp_path / "other.json"))
    other = Tokenizer.load(tmp_path / "other.json")
    with pytest.raises(ValueError, match=r"id \d is .* there and .* in the data"):
        check_tokenizers(source, other, InitConfig())
    check_tokenizers(source, other, InitConfig(from_="it", other_tokenizer=True))


@pytest.mark.slow
def test_a_run_that_goes_on_reads_its_source_no_more(encoder, dataset, tmp_path, capsys):
    source = tmp_path / "source"
    shutil.copytree(encoder, source)
    arguments = ["--init.from", str(source), "--steps", "3", *QUICK]
    run_recipe("debug_hydra", dataset, tmp_path / "whole", *arguments)
    run_recipe("debug_hydra", dataset, tmp_path / "parts", *arguments, "--stop-step", "1")
    shutil.rmtree(source)
    with pytest.raises(ValueError, match=rf"init\.from: '{source}' there, '{encoder}' here"):
        run_recipe("debug_hydra", dataset, tmp_path / "parts", *arguments, "--init.from", str(encoder))
    run_recipe("debug_hydra", dataset, tmp_path / "parts", *arguments)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    with pytest.raises(FileNotFoundError):
        run_recipe("debug_hydra", dataset, tmp_path / "new", *arguments)


def test_a_dry_run_says_what_a_run_would_begin_with(encoder, tmp_path, capsys):
    run = ["debug_hydra", "--run-dir", str(tmp_path / "run"), "--dry-run"]
    assert main([*run, "--init.from", str(encoder), "--model.type-vocab-size", "3"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("begins with"))
    assert line.split("  ", 1)[1].strip().startswith(f"weights from step-00000002 of {encoder}: ")
    assert "embeddings.token_type.weight 2 -> 3 rows" in line
    assert main([*run, "--init.from", str(encoder), "--model.d-model", "48"]) == 2
    assert "has the shape (32,)" in capsys.readouterr().err

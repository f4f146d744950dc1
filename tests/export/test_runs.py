"""From runs, and from other projects' checkpoints, to exports and generated text."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import re
import shutil
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from failures import each
from huggingface_hub import ModelCard
from paths import GOLDEN
from runs import records, run_recipe, weights
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

from matmix.data.manifest import Manifest
from matmix.data.tokenizer import Tokenizer
from matmix.launch.cli import main
from matmix.launch.generate import Generate
from matmix.model import count_parameters
from matmix.model.interop.export.directory import longest_text
from matmix.train.run.directory import RunDirectory
from matmix.use.exporting import export_run, import_reference
from matmix.use.generation import Sampling, fill_masks, generate
from matmix.use.opening import open_model

GREEDY = Sampling(temperature=0.0)


@pytest.fixture(scope="module")
def language_model(dataset, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "mru"
    run_recipe("debug_mru", dataset, run_dir, "--steps", "4", "--checkpoint.every", "2")
    return run_dir


@pytest.fixture(scope="module")
def encoder(dataset, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "hydra"
    run_recipe("debug_hydra", dataset, run_dir, "--steps", "2", "--evaluation.batches", "1")
    return run_dir


def output_of(source, **options) -> str:
    pieces: list[str] = []
    prompt = options.pop("prompt", "")
    Generate(source=str(source), **options).print([prompt] if isinstance(prompt, str) else prompt, pieces.append)
    return "".join(pieces)


# ---- export


@pytest.mark.parametrize("kind", ["language_model", "encoder"])
def test_a_run_becomes_an_export(kind, request, tmp_path, capsys):
    run_dir = request.getfixturevalue(kind)
    capsys.readouterr()
    out = export_run(run_dir, tmp_path / "out")
    told = capsys.readouterr().out.splitlines()
    assert len(told) == 2
    assert "Exported step-0000000" in told[0]
    auto_class = AutoModelForCausalLM if kind == "language_model" else AutoModelForMaskedLM
    call = f"{auto_class.__name__}.from_pretrained('{out}', trust_remote_code=True)"
    assert told[1] == f"Next, in Python: {call}; {out}/README.md has the whole example."
    model = auto_class.from_pretrained(out, trust_remote_code=True)
    saved = weights(run_dir)
    assert {name.removeprefix("model.") for name, _ in model.named_parameters()} == set(saved)
    assert all(torch.equal(p, saved[name.removeprefix("model.")]) for name, p in model.named_parameters())
    source = open_model(run_dir, device="cpu")
    ids = torch.randint(8, 300, (1, 20))
    with torch.no_grad():
        assert (source.model(ids) - model.eval()(ids).logits).abs().max() <= 1e-4


def test_the_model_card_says_what_the_run_was(language_model, dataset, tmp_path, capsys):
    """Losses and tokens as of the step that is exported; of the data its name, not where it lay."""
    assert main(["export", str(language_model), "--out", str(tmp_path), "--step", "2", "--license", "apache-2.0"]) == 0
    card = (tmp_path / "README.md").read_text()
    training = [record for record in records(language_model) if record["step"] <= 2][-1]
    validation = [record for record in records(language_model, "validation") if record["step"] <= 2]
    config = RunDirectory(language_model).read_config()
    assert f"| data | {Path(dataset).name} |" in card
    assert str(Path(dataset).parent) not in card
    assert f"| tokens seen | {2 * config.global_batch_size * config.data.seqlen:,} |" in card
    assert f"| loss (training, step {training['step']}) | {training['loss']:.4f} nats per token |" in card
    assert ("loss (validation" in card) == bool(validation)
    assert f"{count_parameters(config.model):,} parameters" in card
    assert "license: apache-2.0" in card
    capsys.readouterr()
    assert main(["export", str(language_model), "--out", str(tmp_path / "no"), "--license", "my own: ask me"]) == 2
    assert "give its short name, such as apache-2.0" in capsys.readouterr().err


def test_the_model_card_puts_controls_beside_the_loss(language_model, encoder, dataset, tmp_path, capsys):
    """A run that is named, or that a comparison trained beside it, trivial models, and otherwise that none is known."""
    card = (export_run(language_model, tmp_path / "alone") / "README.md").read_text()
    assert "No run of a control is known" in card
    last = records(language_model, "validation")[-1]
    manifest = Manifest.load(Path(dataset))
    assert f"| **this model** | {last['loss']:.4f} |" in card
    whole = last["loss_without_mixing"] - last["mixing_gain"]
    without = f"where it has {whole:.4f} as it is | {last['loss_without_mixing']:.4f} |"
    assert f"replaced by its mean, in the first 1 global batch of the validation split, {without}" in card
    assert (
        f"| every token alike: ln {manifest.tokenizer.vocab_size:,} | {math.log(manifest.tokenizer.vocab_size):.4f} |"
        in card
    )
    assert f"| frequencies of single tokens: their entropy | {manifest.unigram_entropy:.4f} |" in card
    train = manifest.splits["train"]
    assert f"| documents | train {train.documents:,} with {train.tokens:,} tokens; validation " in card

    control = tmp_path / "compared" / "no-mixer" / "seed-0"
    run_recipe("debug_mru", dataset, control, "--steps", "2", "--model.layers", "none")
    known = (
        f"no mixer ({count_parameters(RunDirectory(control).read_config().model):,} parameters, 2 steps of 8, seed 0)"
    )
    line = f"| control: {known} | {records(control, 'validation')[-1]['loss']:.4f} |"
    capsys.readouterr()
    assert main(["export", str(language_model), "--out", str(tmp_path / "named"), "--control", str(control)]) == 0
    card = (tmp_path / "named" / "README.md").read_text()
    assert line in card
    assert "No run of a control" not in card

    compared = tmp_path / "compared" / "MRU" / "seed-0"
    shutil.copytree(language_model, compared)
    (tmp_path / "compared" / "comparison.toml").touch()
    assert line in (export_run(compared, tmp_path / "found") / "README.md").read_text()
    with pytest.raises(ValueError, match="is no control of"):
        export_run(language_model, tmp_path / "other", controls=[str(encoder)])


def test_the_model_card_is_what_the_hub_reads(language_model, tmp_path):
    """Its front matter is valid; what is not known is said, and the licence of the code is beside it."""
    card = ModelCard.load(export_run(language_model, tmp_path / "out") / "README.md")
    assert card.data.to_dict() == {
        "library_name": "transformers",
        "license": "unknown",
        "pipeline_tag": "text-generation",
        "tags": ["matmix", "language_model", "mru"],
    }
    assert "Language of the texts: unknown." in card.text
    assert f"Written by matmix {version('matmix')}." in card.text
    assert (tmp_path / "out" / "LICENSE").read_text() == (Path(__file__).parents[2] / "LICENSE").read_text()
    assert ModelCard.load(
        export_run(language_model, tmp_path / "en", languages=["en"]) / "README.md"
    ).data.language == ["en"]
    with pytest.raises(ValueError, match="give its ISO code, such as en"):
        export_run(language_model, tmp_path / "no", languages=["plain English"])


def test_the_tokenizer_cuts_texts_at_the_length_of_the_training(encoder, tmp_path):
    config = RunDirectory(encoder).read_config()
    assert config.data.seqlen != config.model.max_seqlen
    out = export_run(encoder, tmp_path / "out")
    assert AutoTokenizer.from_pretrained(out).model_max_length == config.data.seqlen
    assert json.loads((out / "sentence_bert_config.json").read_text())["max_seq_length"] == config.data.seqlen
    assert json.loads((out / "config.json").read_text())["max_position_embeddings"] == config.data.seqlen
    assert open_model(out).seqlen == open_model(encoder).seqlen == config.data.seqlen
    positions = dataclasses.replace(config.model, position_embeddings=True)
    assert longest_text(positions, config.data.seqlen) == config.model.max_seqlen


def test_exports_put_the_special_tokens_of_the_training_around_text(language_model, encoder, tmp_path):
    special = Tokenizer.load(export_run(encoder, tmp_path / "encoder")).special
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "encoder")
    plain = tokenizer("the king", add_special_tokens=False)["input_ids"]
    assert tokenizer("the king")["input_ids"] == [special["cls"], *plain, special["sep"]]
    pair = tokenizer("the king", "the king")
    assert pair["input_ids"] == [special["cls"], *plain, special["sep"], *plain, special["sep"]]
    assert pair["token_type_ids"] == [0] * (len(plain) + 2) + [1] * (len(plain) + 1)
    assert (tokenizer.padding_side, tokenizer.mask_token_id) == ("right", special["mask"])
    # The language model was trained on documents that start with <s> and end with </s>.
    export_run(language_model, tmp_path / "lm")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "lm")
    assert tokenizer("the king")["input_ids"] == [special["bos"], *plain]
    assert (tokenizer.padding_side, tokenizer.eos_token_id) == ("left", special["eos"])
    defaults = json.loads((tmp_path / "lm" / "generation_config.json").read_text())
    assert defaults == {
        "pad_token_id": special["pad"],
        "bos_token_id": special["bos"],
        "eos_token_id": special["eos"],
    }


def test_a_step_can_be_chosen(language_model, tmp_path):
    early = load_file(export_run(language_model, tmp_path / "2", step=2) / "model.safetensors")
    late = load_file(export_run(language_model, tmp_path / "4") / "model.safetensors")
    assert any(not torch.equal(early[name], late[name]) for name in late)
    assert "4 steps" in (tmp_path / "4" / "README.md").read_text()
    with pytest.raises(ValueError, match="no checkpoint of step 3; there are: 2, 4"):
        export_run(language_model, tmp_path / "3", step=3)


def test_bfloat16(language_model, tmp_path):
    out = export_run(language_model, tmp_path / "out", dtype="bfloat16")
    tensors = load_file(out / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    model = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True, dtype="auto")
    ids = torch.arange(10, 20).unsqueeze(0)
    assert model(ids).logits.dtype == torch.bfloat16
    text = {len(ids[0]) for ids in [model.generate(ids, max_new_tokens=5, eos_token_id=None)]}
    assert text == {15}


def test_export_mistakes(language_model, tmp_path):
    with pytest.raises(FileNotFoundError, match="no run or export at"):
        export_run(tmp_path / "absent", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="is neither a run"):
        export_run(tmp_path / "empty", tmp_path / "out")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "config.toml").write_text((language_model / "config.toml").read_text())
    with pytest.raises(ValueError, match="has no checkpoint yet; train it first"):
        export_run(tmp_path / "new", tmp_path / "out")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("mine")
    with pytest.raises(ValueError, match="not an empty directory"):
        export_run(language_model, tmp_path / "taken")
    assert not (tmp_path / "out").exists()


# ---- import


def read_golden(name: str) -> tuple[dict, dict, dict]:
    with safe_open(GOLDEN / f"{name}.safetensors", "pt") as file:
        metadata = file.metadata()
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    state = {key.removeprefix("state."): value for key, value in tensors.items() if key.startswith("state.")}
    return state, tensors, metadata


@pytest.mark.parametrize(("kind", "golden"), [("hydra", "hydra_mlm_postnorm"), ("mru-lm", "mru_lm_a")])
def test_other_projects_checkpoints_become_exports(kind, golden, tmp_path):
    state, tensors, metadata = read_golden(golden)
    save_file({key: value.contiguous() for key, value in state.items()}, tmp_path / "theirs.safetensors", metadata)
    out = import_reference(kind, tmp_path / "theirs.safetensors", tmp_path / "out")
    auto_class = AutoModelForMaskedLM if kind == "hydra" else AutoModelForCausalLM
    model, info = auto_class.from_pretrained(out, trust_remote_code=True, output_loading_info=True)
    assert not any(info.values())
    logits = model.eval()(tensors["input_ids"]).logits
    assert (logits - tensors["logits"]).abs().max() <= 1e-4
    with pytest.raises(ValueError, match="has no tokenizer to turn a prompt into tokens"):
        output_of(out, prompt="x")


def test_an_imported_checkpoint_brings_its_tokenizer(tmp_path, tokenizer):
    state, _, metadata = read_golden("mru_lm_a")
    import tokenizers

    names = ["<pad>", "<unk>", "</s>", *"abcdefghijklmnopqrstuvwxyz "]
    theirs = tokenizers.Tokenizer(
        tokenizers.models.BPE({name: index for index, name in enumerate(names)}, [], unk_token="<unk>")
    )
    theirs.add_special_tokens(names[:3])
    theirs.save(str(tmp_path / "tokenizer.json"))
    save_file({key: value.contiguous() for key, value in state.items()}, tmp_path / "model.safetensors", metadata)
    out = import_reference("mru-lm", tmp_path, tmp_path / "out")
    assert AutoTokenizer.from_pretrained(out)("a cat").input_ids == theirs.encode("a cat").ids
    assert output_of(out, prompt="a cat", max_new_tokens=4, temperature=0.0).startswith("a cat")


def test_import_mistakes(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file"):
        import_reference("hydra", tmp_path / "absent", tmp_path / "out")
    with pytest.raises(ValueError, match="cannot import from 'bert'"):
        import_reference("bert", GOLDEN / "mru_lm_a.safetensors", tmp_path / "out")
    with pytest.raises(ValueError, match="hydra-mlm"):
        import_reference("hydra", GOLDEN / "mru_lm_a.safetensors", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


# ---- generate


def test_generation_carries_state_and_is_that_of_the_whole_text(language_model):
    source = open_model(language_model, device="cpu")
    ids = source.reader.marking.encode("the king").ids
    (found,) = generate(source, ["the king"], max_new_tokens=12, sampling=GREEDY)
    expected, logprob = list(ids), 0.0
    for _ in range(12):
        with torch.no_grad():
            logits = source.model(torch.tensor([expected]))[0, -1]
        shares = logits.log_softmax(0)
        logits[
            [index for index in source.reader.special.values() if index != source.reader.special["eos"]]
        ] = -torch.inf
        token = int(logits[: source.reader.marking.get_vocab_size()].argmax())
        if token == source.reader.special["eos"]:
            break
        logprob += float(shares[token])
        expected.append(token)
    assert source.reader.marking.decode(expected) == "the king" + found.text
    assert found.tokens == expected[len(ids) :]
    assert found.logprob == pytest.approx(logprob, abs=1e-4)


def test_runs_and_their_exports_generate_the_same(language_model, encoder, tmp_path):
    export_run(language_model, tmp_path / "lm")
    options = {"prompt": "the king\n", "max_new_tokens": 20, "seed": 3}
    text = output_of(language_model, **options)
    assert text.startswith("the king\n")
    assert text == output_of(tmp_path / "lm", **options)
    assert text != output_of(language_model, **{**options, "seed": 4})
    assert text == output_of(language_model, **options)
    export_run(encoder, tmp_path / "encoder")
    options = {"prompt": "the <mask> speaks to <mask> crown"}
    assert output_of(encoder, **options) == output_of(tmp_path / "encoder", **options)


def test_generation_starts_without_a_prompt(language_model):
    assert output_of(language_model, max_new_tokens=5).endswith("\n")
    assert output_of(language_model, prompt="the", max_new_tokens=0) == "the\n"


def parts_of(printed: str) -> dict[str, str]:
    """What is printed for each of several prompts, by the line above it."""
    _, *parts = re.split(r"^(--- .*)\n", printed, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.parametrize("temperature", ["0", "1.3"])
def test_several_prompts_get_what_each_gets_alone(language_model, tmp_path, temperature, capsys):
    """Of different lengths, some of them in a file, one twice, one empty, one with white space that matters."""
    start = ["generate", str(language_model), "--max-new-tokens", "15", "--temperature", temperature, "--seed", "3"]
    given, in_file = ["the king", "the", ""], ["  a crown for the queen of a land far away and the boy: ", "the king"]
    (tmp_path / "prompts.txt").write_text(f"{in_file[0]}\n\n{in_file[1]}\n")
    alone = []
    for prompt in (*given, *in_file):
        capsys.readouterr()
        assert main([*start, "--prompt", prompt]) == 0
        alone.append(capsys.readouterr().out)
    words = [word for prompt in given for word in ("--prompt", prompt)]
    assert main([*start, *words, "--prompt-file", str(tmp_path / "prompts.txt")]) == 0
    found = parts_of(capsys.readouterr().out)
    assert list(found) == [
        "--- 1 of 5: the king",
        "--- 2 of 5: the",
        "--- 3 of 5: (no prompt)",
        "--- 4 of 5: a crown for the queen of a land far away and the boy:",
        "--- 5 of 5: the king",
    ]
    assert list(found.values()) == alone
    assert len(set(alone)) == 4
    (tmp_path / "one.jsonl").write_text(json.dumps({"text": "the"}))
    assert main([*start, "--prompt-file", str(tmp_path / "one.jsonl")]) == 0
    assert capsys.readouterr().out == alone[1]


def test_several_prompts_of_an_encoder(encoder, capsys):
    prompts = ["the <mask> speaks", "a <mask> of <mask>"]
    assert main(["generate", str(encoder), "--prompt", prompts[0], "--prompt", prompts[1]]) == 0
    found = parts_of(capsys.readouterr().out)
    assert list(found) == [f"--- {number} of 2: {prompt}" for number, prompt in enumerate(prompts, 1)]
    assert list(found.values()) == [output_of(encoder, prompt=prompt) for prompt in prompts]


def test_samples_of_a_prompt_are_those_of_the_next_seeds(language_model, capsys):
    """However many are drawn at once."""
    options = {"prompt": ["the king", "the"], "max_new_tokens": 12, "temperature": 1.3}
    each = [{**options, "prompt": prompt, "seed": seed} for prompt in options["prompt"] for seed in (3, 4, 5)]
    alone = [output_of(language_model, **one) for one in each]
    for batch_size in (64, 4):
        found = parts_of(output_of(language_model, **options, seed=3, num_samples=3, batch_size=batch_size))
        assert list(found)[3] == "--- 4 of 6: the"
        assert list(found.values()) == alone
    assert len(set(alone)) == 6


def test_a_text_ends_before_a_stop_string(language_model, capsys):
    options = {"prompt": "the king", "max_new_tokens": 30, "temperature": 0.0}
    whole = output_of(language_model, **options).removesuffix("\n")
    continuation = whole.removeprefix("the king")
    stop = continuation[3:6]
    capsys.readouterr()
    cut = output_of(language_model, **options, stop=("not there", stop))
    assert cut == "the king" + continuation[: continuation.index(stop)] + "\n"
    assert f"(stopped at {stop!r}, after " in capsys.readouterr().err
    both = parts_of(output_of(language_model, **{**options, "prompt": ["a", "the king"]}, stop=(stop,)))
    assert list(both.values())[1] == cut


def test_the_end_token_is_told_beside_the_text(language_model, monkeypatch, capsys):
    """Here every token is the end token."""
    end = open_model(language_model, device="cpu").reader.special["eos"]
    monkeypatch.setattr(Sampling, "draw", lambda *_: end)
    assert main(["generate", str(language_model), "--prompt", "the"]) == 0
    assert capsys.readouterr() == ("the\n", "(ended at the end token, after 0 tokens)\n")
    assert main(["generate", str(language_model), "--prompt", "the", "--num-samples", "2", "--json"]) == 0
    out, err = capsys.readouterr()
    assert [json.loads(line)["finish_reason"] for line in out.splitlines()] == ["eos_token"] * 2
    assert err == ""


def test_texts_as_json(language_model, encoder, monkeypatch, capsys):
    """One object a line, for prompts that come by standard input."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("\ufeffthé\n\n king\r\n".encode())))
    assert main(["generate", str(language_model), "--prompt-file", "-", "--max-new-tokens", "7", "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["prompt"] for one in found] == ["thé", " king"]
    for one in found:
        assert output_of(language_model, prompt=one["prompt"], max_new_tokens=7) == f"{one['prompt']}{one['text']}\n"
        assert (len(one["tokens"]), one["finish_reason"], one["stop"], one["sample"]) == (7, "length", None, 0)
        assert one["logprob"] < 0
    assert main(["generate", str(encoder), "--prompt", "the <mask> of <mask>", "--json"]) == 0
    (one,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(one["masks"]) == 2
    assert f"{one['masks'][1][0]['token']!r}" in output_of(encoder, prompt=one["prompt"])
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"the\ncaf\xe9\n")))
    assert main(["generate", str(language_model), "--prompt-file", "-"]) == 2
    assert "standard input is not UTF-8: line 2, byte 4 of the line is 0xe9" in capsys.readouterr().err


@each(
    "name, content, message",
    [
        ("empty.txt", b"", "holds no prompt; write one on each line"),
        ("blank.txt", b"\n  \n\t\n", "holds no prompt; write one on each line"),
        ("latin.txt", b"caf\xe9\n", "latin.txt is not UTF-8: line 1, byte 4 of the line is 0xe9"),
        ("other.jsonl", b'{"prompt": "a"}\n', "no field 'text' (its fields: prompt)"),
        ("absent.txt", None, "absent.txt does not exist"),
    ],
)
def test_mistakes_in_a_file_of_prompts_are_one_line(language_model, tmp_path, name, content, message, capsys):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    capsys.readouterr()
    assert main(["generate", str(language_model), "--prompt", "the", "--prompt-file", str(tmp_path / name)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
    assert len(printed.err.strip().splitlines()) == 1


def test_a_special_tokens_name_in_a_prompt_is_text(language_model):
    source = open_model(language_model, device="cpu")
    ids = source.reader.ids("a </s> b")
    assert ids == [*source.reader.before, *source.reader.tokenizer.encode("a </s> b")]
    assert source.reader.special["eos"] not in ids[1:]
    assert source.reader.marking.decode(ids) == "a </s> b"


def test_encoders_fill_in_masks(encoder):
    source = open_model(encoder, device="cpu")
    lines = str(fill_masks(source, "the <mask> speaks to <mask> crown")).splitlines()
    assert lines[0] == "<mask> 1 of 2:"
    assert lines[6] == "<mask> 2 of 2:"
    shares = [float(line.split("%")[0]) for line in lines[1:6]]
    assert shares == sorted(shares, reverse=True)
    assert "<mask>" not in "\n".join(lines[12:])
    assert "speaks to" in "\n".join(lines[12:])
    best = lines[1].split("  ")[-1]
    ids = [source.reader.special["cls"], *source.reader.marking.encode("the <mask> speaks to <mask> crown").ids[1:]]
    with torch.no_grad():
        logits = source.model(torch.tensor([ids]))[0, ids.index(source.reader.special["mask"])]
    logits[:7] = -torch.inf
    assert best == repr(source.reader.marking.decode([int(logits[: source.reader.marking.get_vocab_size()].argmax())]))


def test_generate_mistakes(language_model, encoder, head_exports, tmp_path):
    with pytest.raises(ValueError, match="is a text_embedder, which writes no text"):
        output_of(head_exports / "embedder" / "export", prompt="the <mask>")
    with pytest.raises(FileNotFoundError, match="no run or export at"):
        output_of(tmp_path / "absent")
    with pytest.raises(ValueError, match="is neither a run"):
        output_of(tmp_path)
    with pytest.raises(ValueError, match="is an encoder, which fills in words: put <mask>"):
        output_of(encoder, prompt="the king")
    for temperature in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match=f"temperature must be 0 or more and finite, got {temperature}"):
            output_of(language_model, temperature=temperature)
    with pytest.raises(ValueError, match="seed must be a number of at most 64 bits"):
        output_of(language_model, seed=10**20)
    with pytest.raises(ValueError, match="top_p must be above 0"):
        output_of(language_model, top_p=0.0)
    with pytest.raises(ValueError, match="top_k must be 0 or more"):
        output_of(language_model, top_k=-1)
    with pytest.raises(ValueError, match="max_new_tokens must be 0 or more"):
        output_of(language_model, max_new_tokens=-1)
    with pytest.raises(ValueError, match="num_samples must be 1 or more"):
        output_of(language_model, num_samples=0)
    with pytest.raises(ValueError, match="at temperature 0 all samples of a prompt are the same"):
        output_of(language_model, num_samples=2, temperature=0.0)
    with pytest.raises(ValueError, match="--stop is empty"):
        output_of(language_model, stop=("",))
    with pytest.raises(ValueError, match="is an encoder, which fills in words: leave --num-samples and --stop out"):
        output_of(encoder, prompt="the <mask>", stop=(".",))
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ValueError, match="is no run, no export, and no known checkpoint"):
        output_of(tmp_path)
    out = export_run(language_model, tmp_path / "out")
    with pytest.raises(ValueError, match="is an export, which has no steps"):
        output_of(out, step=2)
    (out / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"is not complete: it lacks model\.safetensors"):
        output_of(out, prompt="x")

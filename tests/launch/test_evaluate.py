"""`matmix evaluate RUN FILE`: scores of any text, against the definition and against lm_eval."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from failures import each
from runs import run_recipe

from matmix.launch.cli import main
from matmix.use.exporting import export_run
from matmix.use.generation import Sampling, generate
from matmix.use.opening import TrainedModel, open_model
from matmix.use.scoring import score_texts, score_with_state, windows_of

LM_EVAL_PYTHON = os.environ.get("MATMIX_LM_EVAL_PYTHON")
TEXTS = ["the king speaks to the queen under the night " * 3, "soft", "but death rises over the crown"]


@pytest.fixture(scope="module")
def run(dataset, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "mru"
    run_recipe("debug_mru", dataset, run_dir, "--steps", "4")
    return run_dir


@pytest.fixture(scope="module")
def source(run) -> TrainedModel:
    return open_model(run, device="cpu")


def ids_of(source: TrainedModel, text: str) -> list[int]:
    return [source.reader.start, *source.reader.marking.encode(text, add_special_tokens=False).ids]


def nats_of(source: TrainedModel, read: list[int], wanted: list[int]) -> float:
    """Of the last tokens that follow those that are read, in one plain forward pass."""
    with torch.no_grad():
        logits = source.model(torch.tensor([read]))[0, -len(wanted) :].double()
    return -logits.log_softmax(-1)[range(len(wanted)), wanted].sum().item()


@each("stride", [1, 3, 8])
@each("count", [0, 1, 2, 7, 8, 9, 23])
def test_windows_predict_each_token_once_from_as_many_as_they_may(count, stride):
    ids, predicted = list(range(count + 1)), []
    for tokens, new in windows_of(ids, 8, stride):
        assert len(tokens) - 1 <= 8
        assert 1 <= new <= (stride if predicted else 8)
        assert tokens[0] == max(0, tokens[-1] - 8), "reads as much as fits"
        predicted += tokens[-new:]
    assert predicted == ids[1:]


def test_short_texts_have_the_likelihood_of_one_forward_pass(source):
    """Packed with others, and with the state carried."""
    wanted = 0.0
    for text in TEXTS:
        ids = ids_of(source, text)
        wanted += nats_of(source, ids[:-1], ids[1:])
    for score in (score_texts(source, TEXTS, window=500, stride=500), score_with_state(source, TEXTS)):
        assert score.nats == pytest.approx(wanted, rel=1e-5)
        assert score.tokens == sum(len(ids_of(source, text)) - 1 for text in TEXTS)
        assert score.bytes == sum(map(len, TEXTS))
        assert score.bits_per_byte == pytest.approx(wanted / math.log(2) / score.bytes, rel=1e-5)
        assert score.perplexity == pytest.approx(math.exp(wanted / score.tokens), rel=1e-5)


def test_sliding_windows_are_those_of_the_definition(source):
    ids = ids_of(source, TEXTS[0])
    wanted = nats_of(source, ids[:10], ids[1:11])
    for end in range(14, len(ids) + 4, 4):
        begin, end = end - 3, min(end, len(ids) - 1)
        if begin <= end:
            wanted += nats_of(source, ids[max(0, end - 10) : end], ids[begin : end + 1])
    assert score_texts(source, TEXTS[:1], window=10, stride=4).nats == pytest.approx(wanted, rel=1e-5)


def test_carried_state_goes_beyond_one_step(source, monkeypatch):
    monkeypatch.setattr("matmix.use.scoring._CARRIED", 7)
    whole = score_texts(source, TEXTS, window=500, stride=500)
    assert score_with_state(source, TEXTS).nats == pytest.approx(whole.nats, rel=1e-5)


def test_the_command_prints_and_writes_what_it_finds(run, source, tmp_path, capsys):
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    words = ["evaluate", str(run), str(tmp_path / "texts.jsonl"), "--window", "16", "--stride", "16"]
    assert main([*words, "--out", str(tmp_path / "score.json")]) == 0
    score = score_texts(source, TEXTS, window=16, stride=16)
    found = json.loads((tmp_path / "score.json").read_text())
    assert found["bits_per_byte"] == pytest.approx(score.bits_per_byte, rel=1e-5)
    assert (found["documents"], found["tokens"], found["bytes"]) == (3, score.tokens, score.bytes)
    assert found["xz_bits_per_byte"] > 0
    said = capsys.readouterr().out
    assert f"3 documents, {score.tokens:,} tokens, {score.bytes} bytes" in said
    assert f"{score.bits_per_byte:.4f}  bits per byte" in said


@each(
    "words, why",
    [
        ([], "name the files with the text"),
        (["nowhere.txt"], r"nowhere.txt does not exist"),
        (["FILE", "--window", "8", "--stride", "9"], "--stride must lie between 1 and the window of 8 tokens, got 9"),
        (["FILE", "--carry-state", "--window", "8"], "carried state has no windows"),
        (["FILE", "--text-field", "body"], r"line 1: no field 'body' \(its fields: text\)"),
        (["EMPTY"], "there is no text to score"),
    ],
)
def test_what_cannot_be_scored_is_said_in_one_line(run, tmp_path, capsys, words, why):
    files = {"FILE": tmp_path / "a.jsonl", "EMPTY": tmp_path / "b.txt"}
    files["FILE"].write_text('{"text": "the king"}\n')
    files["EMPTY"].write_text(" \n")
    assert main(["evaluate", str(run), *(str(files.get(word, word)) for word in words)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(why, error)


def test_encoders_are_refused(dataset, tmp_path, capsys):
    run_recipe("debug_hydra", dataset, tmp_path / "run", "--steps", "1", "--evaluation.batches", "1")
    (tmp_path / "a.txt").write_text("the king\n")
    assert main(["evaluate", str(tmp_path / "run"), str(tmp_path / "a.txt")]) == 2
    assert "is an encoder, which gives no text a probability: name a task" in capsys.readouterr().err


TASK = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: {kind}
target_delimiter: ""
"""
TASKS = {
    "whole": TASK + 'doc_to_text: ""\ndoc_to_target: "{{{{text}}}}"\nmetric_list: [{{metric: bits_per_byte}}]\n',
    "choice": TASK + 'doc_to_text: "{{{{text}}}}"\ndoc_to_choice: [" king", " xqz xqz"]\ndoc_to_target: 0\n'
    "metric_list: [{{metric: acc}}]\n",
    "go_on": TASK + 'doc_to_text: "{{{{text}}}}"\ndoc_to_target: " the"\nmetric_list: [{{metric: exact_match}}]\n'
    'generation_kwargs: {{until: ["xqz"], max_gen_toks: 12, do_sample: false}}\n',
}
KINDS = {"whole": "loglikelihood_rolling", "choice": "multiple_choice", "go_on": "generate_until"}


def run_lm_eval(export: Path, work: Path, tasks: list[str], *more: str) -> tuple[dict, dict[str, list[dict]]]:
    """Results, and the samples of each task on TEXTS; more: arguments of the model besides those that all need."""
    work.mkdir()
    file = work / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    for name in tasks:
        (work / f"{name}.yaml").write_text(TASKS[name].format(name=name, file=file, kind=KINDS[name]))
    command = [LM_EVAL_PYTHON, "-P", "-m", "lm_eval", "--model", "hf"]
    command += ["--model_args", ",".join([f"pretrained={export}", "trust_remote_code=True", *more])]
    command += ["--tasks", ",".join(tasks), "--include_path", str(work), "--device", "cpu", "--batch_size", "2"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(work / "hub")}
    done = subprocess.run(
        [*command, "--log_samples", "--output_path", str(work / "out")],
        env=os.environ | offline,
        cwd=work,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (results,) = (work / "out").rglob("results_*.json")
    samples = {}
    for name in tasks:
        (lines,) = (work / "out").rglob(f"samples_{name}_*.jsonl")
        samples[name] = [json.loads(line) for line in lines.read_text().splitlines()]
    return json.loads(results.read_text())["results"], samples


def check_choices(source: TrainedModel, samples: list[dict], window: int, *, special: bool) -> None:
    """Log-likelihoods of the choices after each text; window: as many tokens as the model reads; special: whether the
    tokenizer's own token stands before them."""
    assert len(samples) == len(TEXTS)
    for sample in samples:
        text = sample["doc"]["text"]
        # There, spaces at the end of a text belong to the choice.
        read = source.reader.marking.encode(text.rstrip(), add_special_tokens=special).ids
        for choice, (value, _) in zip((" king", " xqz xqz"), sample["filtered_resps"], strict=True):
            both = source.reader.marking.encode(text + choice, add_special_tokens=special).ids
            wanted = -nats_of(source, both[-window - 1 : -1], both[len(read) :])
            assert float(value) == pytest.approx(wanted, abs=1e-4), (text, choice)


def check_continuations(source: TrainedModel, samples: list[dict]) -> None:
    """The likeliest tokens, one after the other."""
    assert len(samples) == len(TEXTS)
    for sample in samples:
        prompt, greedy = sample["doc"]["text"], Sampling(temperature=0)
        wanted = generate(source, [prompt], max_new_tokens=12, sampling=greedy)[0].text
        assert sample["resps"][0][0] == wanted, prompt


@pytest.mark.parametrize("sampling", [Sampling(temperature=0), Sampling(temperature=1.5)])
def test_several_prompts_are_continued_as_each_alone(source, sampling):
    """With the seed of each; the empty one starts as documents do."""
    prompts, options = [*TEXTS, "", "soft"], {"max_new_tokens": 12, "sampling": sampling}
    alone = [generate(source, [prompt], seeds=[3], **options)[0].tokens for prompt in prompts]
    found = generate(source, prompts, seeds=[3] * len(prompts), **options)
    assert [one.tokens for one in found] == alone
    assert len(set(map(tuple, alone))) > 1


needs_lm_eval = pytest.mark.skipif(not LM_EVAL_PYTHON, reason="MATMIX_LM_EVAL_PYTHON names no Python with lm_eval")


@pytest.mark.slow
@needs_lm_eval
def test_lm_eval_loads_an_export_as_it_is_and_finds_the_same(run, source, tmp_path):
    """Of choices and of cached generation."""
    export_run(run, tmp_path / "export")
    _, samples = run_lm_eval(tmp_path / "export", tmp_path / "work", ["choice", "go_on"])
    check_choices(source, samples["choice"], 500, special=True)
    check_continuations(source, samples["go_on"])


@pytest.mark.slow
@needs_lm_eval
def test_lm_eval_finds_the_same_of_whole_texts_in_windows(run, source, tmp_path):
    export_run(run, tmp_path / "export")
    work, more = tmp_path / "work", ("max_length=32", "add_bos_token=False")
    results, samples = run_lm_eval(tmp_path / "export", work, ["whole", "choice"], *more)
    wanted = score_texts(source, TEXTS, window=32, stride=32)
    assert results["whole"]["bits_per_byte,none"] == pytest.approx(wanted.bits_per_byte, abs=1e-4)
    check_choices(source, samples["choice"], 32, special=False)

"""What pretraining buys: the rates that are tried, what goes on after a stop, and the table. Nothing is trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from example_scripts import example_script

script = example_script("pretraining_gain")


@pytest.fixture
def made(tmp_path, monkeypatch):
    """The commands that were run; a run is the better, the nearer its rate is to 0.009."""
    rows = [{"text": f"{word} {word}", "label": word} for word in ("ship", "sword")] * 3
    for name in ("hundredth", "validation", "test"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    commands = []

    def matmix(verb, run, *words):
        commands.append([verb, str(run), *map(str, words)])
        if verb == "evaluate":
            Path(words[-1]).write_text(json.dumps({"accuracy": 0.5 + 0.1 * int(run.name[-1])}))
            return
        run, rate = Path(words[words.index("--run-dir") + 1]), float(words[words.index("--optimizer.lr") + 1])
        run.mkdir(parents=True)
        (run / "summary.json").write_text(json.dumps({"validation": {"accuracy": 1 - abs(rate - 0.009)}}))

    monkeypatch.setattr(script, "_matmix", matmix)
    monkeypatch.setattr(script.Gain, "_read", lambda self, text: text)
    return commands


def arguments(folder, *more):
    words = [str(folder), "newsgroups", "--out", str(folder / "out"), "--runs", "pretrained", "runs/x"]
    return [*words, "--epochs", "hundredth", "2", "--seeds", "1", "2", *more]


def test_rates_go_on_beyond_an_end_and_the_table_has_fresh_seeds(tmp_path, made, capsys):
    assert script.main(arguments(tmp_path, "--only", "pretrained")) == 0
    trained = [words for words in made if words[0] == "finetune"]
    rates = [words[words.index("--optimizer.lr") + 1] for words in trained]
    assert rates == ["0.001", "0.003", "0.009", "0.027", "0.009", "0.009"]
    assert [words[words.index("--seed") + 1] for words in trained] == ["0", "0", "0", "0", "1", "2"]
    assert all("--from-scratch" not in words for words in trained)
    table = capsys.readouterr().out
    assert "| pretrained | 65.0 ± 7.1 |" in table
    assert "| from scratch | - |" in table
    assert "| TF-IDF, whole texts | 100.0 |" in table
    assert "| most frequent label | 50.0 |" in table
    assert "100.0 at 0.009" in table
    assert (tmp_path / "out" / "table.md").read_text() == table


def test_texts_without_words_are_told_apart_by_their_letters():
    rows = [{"text": text, "label": text[0]} for text in ("AACGT" * 9, "CCAGT" * 9, "AACTG" * 9, "CCATG" * 9)]
    assert script._tf_idf(rows, rows, str) == 100.0


def test_what_is_there_is_not_trained_again(tmp_path, made):
    assert script.main(arguments(tmp_path)) == 0
    assert sum("--from-scratch" in words for words in made) == 6
    count = len(made)
    assert script.main(arguments(tmp_path)) == 0
    assert script.main(arguments(tmp_path, "--report", "True", "--seeds", "3")) == 0
    assert len(made) == count


def test_a_grid_that_was_stopped_goes_on_where_it_was(tmp_path, made):
    assert script.main(arguments(tmp_path, "--only", "pretrained")) == 0
    shutil.rmtree(tmp_path / "out" / "hundredth" / "pretrained" / "0.027")  # 0.009, beyond the end, stays
    made.clear()
    assert script.main(arguments(tmp_path, "--only", "pretrained")) == 0
    assert [words[words.index("--optimizer.lr") + 1] for words in made] == ["0.027"]


def test_seeds_at_other_rates_are_not_averaged(tmp_path, made, capsys):
    """A grid that has another best value: its seeds are trained anew."""
    assert script.main(arguments(tmp_path, "--only", "pretrained", "--rates", "0.001", "0.004")) == 0
    made.clear()
    assert script.main(arguments(tmp_path, "--only", "pretrained", "--rates", "0.003", "0.009")) == 0
    trained = [words for words in made if words[0] == "finetune"]
    tried = [(words[words.index("--optimizer.lr") + 1], words[words.index("--seed") + 1]) for words in trained]
    assert tried == [("0.003", "0"), ("0.009", "0"), ("0.009", "1"), ("0.009", "2")]
    assert "| pretrained | 65.0 ± 7.1 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--epochs", "hundredth", "3"], "holds runs with hundredth = 2.0, not 3.0: name another --out"),
        (["--runs", "pretrained", "runs/y"], "holds runs with pretrained = runs/x, not runs/y"),
        (["--settings", "data.seqlen", "64"], "holds runs with settings = {}, not {'data.seqlen': '64'}"),
    ],
)
def test_runs_with_other_settings_are_not_taken_for_these(tmp_path, made, capsys, more, words):
    assert script.main(arguments(tmp_path, "--report", "True")) == 0
    assert (
        script.main(arguments(tmp_path, "--runs", "pretrained", "runs/x", "other", "runs/z", "--report", "True")) == 0
    )
    assert script.main(arguments(tmp_path, *more)) == 2
    assert words in capsys.readouterr().err
    assert not made


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--only", "other"], "--only other: there are pretrained"),
        (["--rates", "1e-3"], "give two or more"),
        (["--tune-seed", "2"], "--tune-seed 2 is among the seeds"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(tmp_path, made, capsys, more, words):
    assert script.main(arguments(tmp_path, *more)) == 2
    assert words in capsys.readouterr().err
    assert not made

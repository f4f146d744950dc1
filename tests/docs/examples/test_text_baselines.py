"""Simple models beside fine-tuned ones."""

from __future__ import annotations

import json

from example_scripts import example_script

main = example_script("text_baselines").main


def write(folder, split, rows):
    (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_words_tell_topics_that_the_most_frequent_label_does_not(tmp_path, capsys):
    topics = {"sea": "ship whale wave", "war": "sword crown battle"}
    rows = [{"text": f"the {words} {n % 5}", "label": label} for n in range(10) for label, words in topics.items()]
    write(tmp_path, "train", [*rows, rows[0]])
    write(tmp_path, "test", rows)
    assert main([str(tmp_path)]) == 0
    frequent, learned = capsys.readouterr().out.splitlines()
    assert "most frequent label" in frequent
    assert "50.00%" in frequent
    assert learned.count("100.00%") == 2


def test_words_with_capitals_are_others_where_that_is_wanted(tmp_path, capsys):
    rows = [{"text": "And so" if n % 2 else "and so", "label": "verse" if n % 2 else "prose"} for n in range(8)]
    write(tmp_path, "train", rows)
    write(tmp_path, "test", rows)
    for words, wanted in (([], "50.00%"), (["--capitals", "True"], "100.00%")):
        assert main([str(tmp_path), *words]) == 0
        assert f"accuracy {wanted}" in capsys.readouterr().out.splitlines()[1].replace("  ", " ")


def test_letters_tell_texts_without_spaces_apart(tmp_path, capsys):
    rows = [
        {"text": "ACCA" * n + ("TATA" if n % 2 else "TAAT"), "label": "box" if n % 2 else "none"} for n in range(20)
    ]
    write(tmp_path, "train", rows)
    write(tmp_path, "test", rows)
    assert main([str(tmp_path)]) == 0
    assert "accuracy 100.00%" in capsys.readouterr().out.splitlines()[1].replace("  ", " ")


def test_fewer_examples_to_learn_from(tmp_path, capsys):
    write(tmp_path, "train", [{"text": "a ship", "label": "sea"}, {"text": "a sword", "label": "war"}] * 2)
    write(tmp_path, "tenth", [{"words": ["run"], "tags": ["nn"]}])
    write(tmp_path, "test", [{"words": ["run", "run"], "tags": ["nn", "vb"]}])
    assert main([str(tmp_path), "--train", "tenth.jsonl"]) == 0
    assert "accuracy 50.00%" in capsys.readouterr().out


def test_tags_of_known_and_unknown_words(tmp_path, capsys):
    write(tmp_path, "train", [{"words": ["the", "run", "run", "a"], "tags": ["at", "nn", "nn", "at"]}] * 2)
    write(tmp_path, "test", [{"words": ["the", "run", "new", "run"], "tags": ["at", "nn", "at", "vb"]}])
    assert main([str(tmp_path)]) == 0
    frequent, by_word = capsys.readouterr().out.splitlines()
    assert "accuracy 50.00%" in frequent
    assert "accuracy 75.00%" in by_word


def test_missing_examples_are_said_in_one_line(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "needs train.jsonl and test.jsonl with examples in them" in capsys.readouterr().err

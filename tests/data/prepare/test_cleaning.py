"""Cleaning leaves out what it should and nothing else, and the same in any number of parts, processes and starts."""

from __future__ import annotations

import dataclasses
import gzip
import io
import itertools
import json
import lzma
import re
import tarfile
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from failures import each
from folders import Interruption, contents, interrupt_at
from foreign import write_mds, write_tar
from hypothesis import given, settings
from hypothesis import strategies as st
from nightly import nightly

from matmix.data.corpora import bundled_path
from matmix.data.manifest import Manifest
from matmix.data.prepare import command
from matmix.data.prepare.base import find_cuts, read_chunks
from matmix.data.prepare.cleaning import CleanOptions, plan, rules
from matmix.data.prepare.cleaning.duplicates import Stacked, first_equal, first_similar, signature
from matmix.data.prepare.cleaning.evaluations import is_contaminated, read_evaluations
from matmix.data.prepare.cleaning.words import hashed_words
from matmix.data.prepare.command import prepare
from matmix.data.prepare.merge import merge
from matmix.data.prepare.text import PrepareConfig, sources, texts
from matmix.data.prepare.text.documents import documents_of, split_text
from matmix.data.prepare.text.preparation import TextPreparation
from matmix.data.prepare.text.readers import find_sources
from matmix.data.prepare.workspace import locked
from matmix.data.splits.reader import open_dataset
from matmix.data.storage.remote import SCRATCH_VARIABLE
from matmix.data.tokenizer import Tokenizer


def pieces(count, characters):
    """Distinct texts of a real language."""
    with lzma.open(bundled_path("shakespeare"), "rt", encoding="utf-8") as file:
        return split_text(file.read(400_000), characters)[:count]


def edited(text, rng, share=0.05):
    """A text with a share of its words replaced."""
    words = text.split()
    for place in rng.choice(len(words), max(1, int(share * len(words))), replace=False):
        words[place] = f"changed{rng.integers(1000)}"
    return " ".join(words)


def options(inputs, out, **changes):
    chosen = {"tokenizer": "bytes", "validation_fraction": 0.2, "processes": 1, "shard_megabytes": 0.01}
    return PrepareConfig(**{**chosen, "inputs": (str(inputs),), "out": str(out), **changes})


def documents(folder, split="train"):
    tokenizer, shards = Tokenizer.load(folder), open_dataset(str(folder), split)
    found = (shards.read(s, i) for s in range(shards.n_shards) for i in range(len(shards.lengths(s))))
    return [tokenizer.decode(ids.tolist()) for ids in found]


@pytest.fixture(autouse=True)
def scratch(tmp_path, monkeypatch):
    monkeypatch.setenv(SCRATCH_VARIABLE, str(tmp_path / "scratch"))
    return tmp_path / "scratch"


@pytest.fixture
def prepared(tmp_path):
    """Prepares texts, a line of .jsonl each; gives the folder."""

    def make(texts, **changes):
        (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        prepare(options(tmp_path / "in.jsonl", tmp_path / "out", validation_fraction=0.0, **changes))
        return tmp_path / "out"

    return make


def test_texts_with_five_words_in_a_hundred_changed_are_found_and_distinct_ones_kept():
    rng = np.random.default_rng(0)
    distinct = pieces(200, 700)
    families = [*range(200), *range(0, 200, 3), *range(0, 200, 9)]
    copies = [edited(distinct[number], rng) for number in families[200:]]
    order = rng.permutation(len(families))
    texts, families = [[*distinct, *copies][n] for n in order], np.array(families)[order]
    signatures = Stacked([np.array([signature(hashed_words(text)) for text in texts])])
    found = first_similar(signatures, np.arange(len(texts)), 0.6)
    assert np.array_equal(found, first_equal(families))


def runs_of(text):
    words = re.findall(r"[^\W_]+", text.lower())
    length = min(3, len(words))
    return {tuple(words[at : at + length]) for at in range(len(words) - length + 1)} if words else {text}


def plain_survivors(texts, similarity):
    """The first of each group of texts that share so many of their runs of three words with one of the group."""
    texts = [text for text in texts if text.strip()]
    group, found = list(range(len(texts))), list(map(runs_of, texts))
    for one, other in itertools.combinations(range(len(texts)), 2):
        if len(found[one] & found[other]) >= similarity * len(found[one] | found[other]):
            low, high = sorted((group[one], group[other]))
            group = [low if number == high else number for number in group]
    return [text for number, text in enumerate(texts) if group[number] == number]


def look_at(texts, parts, folder):
    """A look at texts that was not begun, its arguments, and a function that gives the texts that are left."""
    (folder / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    found, _ = find_sources([str(folder / "in.jsonl")])
    cleaner = plan.Cleaner(documents_of, CleanOptions(dedup="minhash", dedup_similarity=0.7))
    look = plan.Look(cleaner, found, lambda start, stop, entry: read_chunks(found, start, stop), {}, processes=1)

    def left():
        chosen = dataclasses.replace(cleaner, removed=look.decide()[0])
        return [text for chunk in read_chunks(found) for text in chosen(chunk) if text]

    return look, (folder / "findings", find_cuts(found, parts)), left


@st.composite
def corpora(draw):
    """Short texts of which many are equal, up to case and punctuation; and long ones that change step by step."""
    short = st.lists(st.sampled_from(["a", "A", "b", "c.", "-"]), max_size=4).map(" ".join)
    texts = draw(st.lists(short, max_size=12))
    for family in range(draw(st.integers(0, 2))):
        words = [f"word{family}x{number}" for number in range(200)]
        for step in range(draw(st.integers(1, 12))):
            texts.append(" ".join([f"new{family}x{number}" for number in range(5 * step)] + words[5 * step :]))
    return draw(st.permutations(texts))


@settings(max_examples=25)
@given(texts=corpora(), parts=st.integers(1, 5), data=st.data())
def test_what_is_left_is_what_the_plain_definition_says(texts, parts, data):
    with tempfile.TemporaryDirectory() as folder:
        look, arguments, left = look_at(texts, parts, Path(folder))
        look.run(*arguments, data.draw(st.integers(1, parts)), bool)
        assert left() == plain_survivors(texts, 0.7)


def test_shares_of_other_processes_are_waited_for_or_taken_over(tmp_path):
    texts = pieces(60, 300) * 2
    look, (folder, cuts), left = look_at(texts, 3, tmp_path)
    look.run(folder, cuts, 1, lambda: True)  # others have decided
    assert not folder.exists()
    (folder / "00002").mkdir(parents=True)
    with ThreadPoolExecutor(1) as threads:
        with locked(folder / "00002", "another process is at work on it"):
            ended = threads.submit(look.run, folder, cuts, 2, lambda: False)
            while not (folder / "00001/complete.json").exists():
                time.sleep(0.001)
            assert (folder / "00003/complete.json").exists()
            assert not ended.done()
        ended.result()
    assert left() == texts[:60]


@pytest.fixture
def inputs(tmp_path, monkeypatch):
    """Files of five kinds that repeat each other's texts, read in small chunks; and a file of an evaluation."""
    monkeypatch.setattr(sources, "CHUNK_BYTES", 1500)
    monkeypatch.setattr(texts, "REMEMBERED_BYTES", 1)
    folder, rng, plays = tmp_path / "in", np.random.default_rng(0), pieces(60, 400)
    folder.mkdir()
    lines = [json.dumps({"text": text}) for text in [*plays[:20], *plays[5:10]]]
    (folder / "a.jsonl").write_text("\n\n".join([*lines[:7], "not JSON", *lines[7:]]), encoding="utf-8-sig")
    again = [edited(text, rng) for text in plays[:20:2]]
    (folder / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(json.dumps({"text": t}) for t in again).encode()))
    rows = [*plays[20:35], plays[3], *plays[25:30], None]
    pq.write_table(pa.table({"text": rows}), folder / "c.parquet", row_group_size=4)
    (folder / "d.txt").write_text("\n\n".join([*plays[35:50], plays[20], *plays[50:], *plays[35:38]]))
    with tarfile.open(folder / "e.tar", "w") as tar:
        for number, text in enumerate([*plays[12:16], "a text of its own, in a tar file", *plays[12:16]]):
            member = tarfile.TarInfo(f"{number}.txt")
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
    (tmp_path / "eval.jsonl").write_text(json.dumps({"question": plays[11].upper(), "answers": ["no", plays[40]]}))
    chosen = {"dedup": "minhash", "decontaminate": (str(tmp_path / "eval.jsonl"),), "max_document_chars": 500}
    return folder, {**chosen, "text_documents": "paragraph", "max_malformed": 0.2}


def stop_at(monkeypatch, stop):
    """Stops cleaning at the chunk of that number; gives where the chunks began."""
    examine, examined = plan._examine, []

    def stopping(cleaner, evaluations, chunk):
        examined.append((chunk.start.source, chunk.start.offset))
        if len(examined) == stop:
            raise Interruption
        return examine(cleaner, evaluations, chunk)

    monkeypatch.setattr(plan, "_examine", stopping)
    monkeypatch.setattr(plan, "SAVE_SECONDS", 0)
    monkeypatch.setattr(plan, "SAVE_SHARE", float("inf"))
    return examined


@pytest.mark.parametrize(("parts", "processes"), [(3, 1), nightly(7, 2), nightly(1, 3)])
def test_parts_and_processes_change_nothing(tmp_path, inputs, monkeypatch, parts, processes):
    folder, chosen = inputs
    whole = prepare(options(folder, tmp_path / "whole", **chosen))
    if processes == 1:
        examined = stop_at(monkeypatch, 12)
        with pytest.raises(Interruption):
            prepare(options(folder, tmp_path / "out", part=f"2/{parts}", **chosen))
    for number in range(parts, 0, -1):
        prepare(options(folder, tmp_path / "out", part=f"{number}/{parts}", **{**chosen, "processes": processes}))
    if processes == 1:
        assert len(examined) == len(set(examined)) + 1
    joined = merge(str(tmp_path / "out"), TextPreparation, most_broken=0.2)
    for split in ("train", "validation"):
        assert documents(tmp_path / "out", split) == documents(tmp_path / "whole", split)
    for name in ("removed.npy", "report.json"):
        assert (tmp_path / "out/cleaning" / name).read_bytes() == (tmp_path / "whole/cleaning" / name).read_bytes()
    assert joined.cleaning == whole.cleaning
    assert joined.options == whole.options
    removed = whole.cleaning["removed"]
    assert removed["similar to another"] >= 10
    assert removed["equal to another"] > 18
    assert removed["shared with an evaluation"] >= 2
    kept = documents(tmp_path / "whole") + documents(tmp_path / "whole", "validation")
    assert len(set(kept)) == len(kept) == whole.cleaning["kept"]
    assert whole.cleaning["documents"] == whole.cleaning["kept"] + sum(removed.values())


def test_a_stopped_preparation_goes_on_with_what_was_decided(tmp_path, inputs, monkeypatch):
    folder, chosen = inputs
    monkeypatch.setattr(command, "STATE_SECONDS", 0)
    monkeypatch.setattr(command, "STATE_SHARE", float("inf"))
    with monkeypatch.context() as patch:
        count = interrupt_at(patch, 0)
        prepare(options(folder, tmp_path / "out", **chosen))
    expected = contents(tmp_path / "out")
    for number in (1, 4, 9, count()):
        out = tmp_path / f"stopped-{number}"
        with monkeypatch.context() as patch:
            interrupt_at(patch, number)
            with pytest.raises(Interruption):
                prepare(options(folder, out, **chosen))
        with monkeypatch.context() as patch:
            if (out / "cleaning/report.json").exists():
                patch.setattr(plan, "_examine", None)
            prepare(options(folder, out, **chosen))
        assert contents(out) == expected
    assert not set(Manifest.load(tmp_path / "out").options) & {"language", "quality"}


def test_a_stopped_look_goes_on(tmp_path, inputs, scratch, monkeypatch, told):
    folder, chosen = inputs
    prepare(options(folder, tmp_path / "whole", **chosen))
    examined = stop_at(monkeypatch, 9)
    with pytest.raises(Interruption):
        prepare(options(folder, tmp_path / "out", **chosen))
    assert not (tmp_path / "out").exists()
    prepare(options(folder, tmp_path / "out", **chosen))
    assert examined[9] == examined[8]
    assert len(examined) == len(set(examined)) + 1
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert list((scratch / "clean").iterdir()) == []
    assert "cleaning goes on after" in "\n".join(told)


def windows(text, length):
    words = re.sub("[^a-z0-9]", " ", text.lower()).split()
    return {tuple(words[at : at + length]) for at in range(len(words) - length + 1)}


def test_no_run_of_thirteen_words_of_an_evaluation_is_left(prepared, tmp_path):
    rng = np.random.default_rng(1)
    words = [f"word{number}" for number in range(300)]
    evaluation = [" ".join(rng.choice(words, 40)) for _ in range(10)]
    short = " ".join(rng.choice(words, 9))
    (tmp_path / "eval.txt").write_text("\n".join([*evaluation, short, "word1 word2"]))
    texts, planted = [], {}
    for number in range(60):
        text = rng.choice(words, 60).tolist()
        length = int(rng.integers(9, 20))
        planted[number] = length if number % 2 else 0
        if number % 2:
            at = int(rng.integers(0, 40 - length + 1))
            shared = evaluation[number % 10].split()[at : at + length]
            text[10:10] = [word.title() + rng.choice(["", ",", "...", " -"]) for word in shared]
        texts.append(" ".join(text))
    texts += [f"before {short} after", "word1 word2 word3"]
    kept = documents(prepared(texts, decontaminate=(str(tmp_path / "eval.txt"),)))
    known = windows((tmp_path / "eval.txt").read_text(), 13)
    assert not any(windows(text, 13) & known for text in kept)
    assert [text in kept for text in texts] == [*(length < 13 for length in planted.values()), False, True]


def test_evaluations_of_every_kind_that_is_prepared(tmp_path):
    question, answers = (" ".join(f"{name}{number}" for number in range(15)) for name in ("question", "answer"))
    table = pa.table({"q": pa.array([question]).dictionary_encode(), "n": [1], "a": [[{"text": [None, answers]}]]})
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved/state.json").write_text(json.dumps({"_data_files": [{"filename": "a.arrow"}]}))
    with pa.ipc.new_stream(tmp_path / "saved/a.arrow", table.schema) as stream:
        stream.write_table(table)
    pq.write_table(table, tmp_path / "a.parquet")
    line = json.dumps(table.to_pylist()[0])
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(line.encode()))
    (tmp_path / "a.txt.xz").write_bytes(lzma.compress(f"{question}\n\n{answers}".encode()))
    write_tar(tmp_path / "a.tar", {"1.txt": question, "1.cls": "1", "2.json": line})
    write_mds(
        tmp_path / "mds", [{"q": question, "n": 1, "a": answers.encode()}], {"q": "str", "n": "int", "a": "bytes"}
    )
    for name in ("saved", "a.parquet", "a.jsonl.gz", "a.txt.xz", "a.tar", "mds"):
        known = read_evaluations({name: find_sources([str(tmp_path / name)])[0]})
        assert is_contaminated(hashed_words(f"a {answers.upper()} b"), known), name
        assert is_contaminated(hashed_words(question), known), name
        assert not is_contaminated(hashed_words(f"{question[:80]} {answers[:80]}"), known), name


SENTENCES = (
    "The harbour was quiet when the last of the boats came in.",
    "Men who had worked all night went home to sleep, and nobody spoke.",
    "A dog that belonged to no one walked slowly along the wall with its head down.",
    "Somewhere behind the market a window opened and a woman called her son.",
    "He did not answer, because he was already running towards the sea.",
    "By noon the sun stood high above the roofs, white and without mercy.",
    "Nobody could have guessed what would happen before evening.",
    "Old nets lay drying between two poles near the church.",
)
GOOD = "\n".join(SENTENCES)
GERMAN = (
    "Der Hafen war still, als die letzten Boote kamen. Die Fischer gingen nach Hause, schliefen lange und sprachen mit "
    "niemandem. Ein Hund lief langsam an der Mauer entlang, den Kopf gesenkt, ohne Eile. Hinter dem Markt ging noch "
    "ein Fenster auf, eine Frau rief ihren Sohn. Er antwortete nicht, denn er lief schon zum Meer hinunter. Mittags "
    "stand die Sonne hoch über den weißen Dächern."
)


@each(
    "rule, text",
    [
        ("", GOOD),
        ("number of words", " ".join(SENTENCES[:2])),
        ("length of words", "to be or so it is at a " * 10),
        ("symbols", GOOD + " #tag" * 20),
        ("bullets", "\n".join(f"- {sentence}" for sentence in SENTENCES)),
        ("ellipses", "\n".join(sentence[:-1] + "..." for sentence in SENTENCES)),
        ("words without letters", GOOD + " " + " ".join(str(n) for n in range(1000, 1040))),
        ("stop words", GERMAN),
        ("repeated lines", GOOD + "\n" + GOOD),
        ("repeated paragraphs", GOOD + "\n\nNext page" * 4),
        ("one run of 2 words", GOOD + " left right" * 30),
        ("repeated runs of 5 words", " ".join([*SENTENCES, *[SENTENCES[2]] * 3])),
    ],
)
def test_rules_of_gopher(rule, text):
    assert rules.broken_rule_of_gopher(text) == rule


def test_rules_of_c4():
    noise = ["Home | About", "Please enable JavaScript to see this page.", "Two words.", "We were going to...", ""]
    text = "\n".join([noise[0], *SENTENCES[:5], *noise[1:], SENTENCES[5] + "[12]"])
    cleaned = rules.sentences_of_c4(text)
    assert cleaned.splitlines() == list(SENTENCES[:6])
    assert rules.broken_rule_of_c4(cleaned) == ""
    assert rules.broken_rule_of_c4("\n".join(SENTENCES[:4])) == "few sentences"
    assert rules.broken_rule_of_c4(GOOD + "\nif (x) { y; }.") == "curly brackets"
    assert rules.broken_rule_of_c4(GOOD + "\nLorem ipsum dolor sit.") == "lorem ipsum"


def test_rules_and_languages_in_a_preparation(prepared):
    folder = prepared([GERMAN, GOOD, f"Menu\n{GOOD}", "Menu"], quality=("c4",), language=("en",), dedup="exact")
    assert documents(folder) == [GOOD]  # the menu is no sentence
    counts = {"c4: few sentences": 1, "equal to another": 1, "in another language (de)": 1}
    assert Manifest.load(folder).cleaning == {"documents": 4, "kept": 1, "removed": counts}
    examples = json.loads((folder / "cleaning/report.json").read_text())["examples"]
    assert examples["in another language (de)"][0]["text"] == GERMAN[:100]
    (equal,) = examples["equal to another"]
    assert (equal["line"], equal["other"]["line"]) == (3, 2)


@each(
    "message, changes",
    [
        ("dedup_similarity must be left out without --dedup minhash, got 0.8", {"dedup_similarity": 0.8}),
        ("must be gopher, c4 or both", {"quality": ("gofer",)}),
        (r"in \[0.5, 1\]", {"dedup": "minhash", "dedup_similarity": 0.2}),
        ("--language xx is not known; known are ", {"language": ("xx",)}),
        ("cleaning leaves none of the 2 documents: . in another language", {"language": ("zh",)}),
        ("nowhere.txt does not exist", {"decontaminate": ("nowhere.txt",)}),
        ("suffix that cannot be read", {"decontaminate": (__file__,)}),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing_behind(tmp_path, message, changes):
    (tmp_path / "in.txt").write_text(f"{SENTENCES[0]}\n{SENTENCES[1]}\n")
    with pytest.raises((ValueError, FileNotFoundError), match=message) as raised:
        prepare(options(tmp_path / "in.txt", tmp_path / "out", text_documents="line", **changes))
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_another_evaluation_is_another_preparation(prepared, tmp_path):
    evaluation = tmp_path / "eval.jsonl"
    evaluation.write_text(json.dumps({"q": SENTENCES[1]}))
    chosen = {"decontaminate": (str(evaluation),)}
    folder = prepared([GERMAN, *SENTENCES], **chosen)
    assert SENTENCES[1] not in documents(folder)
    assert len(documents(folder)) == len(SENTENCES)
    prepared([GERMAN, *SENTENCES], **chosen)  # the same: nothing to do
    evaluation.write_text(json.dumps({"q": SENTENCES[2]}))
    with pytest.raises(ValueError, match="holds another preparation"):
        prepared([GERMAN, *SENTENCES], **chosen)
    evaluation.write_text('{"q": "yes"}\nnot JSON')
    with pytest.raises(ValueError, match=r"line 2 of .*eval.jsonl is damaged"):
        prepare(options(tmp_path / "in.jsonl", tmp_path / "other", **chosen))

"""English that is at hand, as plain words."""

from __future__ import annotations

import gzip
import json

from example_scripts import example_script

script = example_script("plain_english")


def test_texts_become_words_of_small_letters_once_each(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(script, "bundled", lambda: iter(["Call me Ishmael. " * 150]))
    library, manuals = tmp_path / "lib", tmp_path / "man"
    (library / "test").mkdir(parents=True)
    words = " ".join(["The module's", *(["thing"] * 20)])
    (library / "a.py").write_text(f'"""{words}"""\n')
    (library / "b.py").write_text(f'def f():\n    """{words}"""\n')
    (library / "broken.py").write_text("def")
    (library / "test" / "c.py").write_text(f'"""{"left out " * 20}"""')
    (manuals / "man1").mkdir(parents=True)
    with gzip.open(manuals / "man1" / "ls.1.gz", "wt") as page:
        page.write('.\\" nothing of this\n.SH NAME\n.B ls\n\\fBlists\\fR the files\\-' + " of folders" * 10)
    more = tmp_path / "more.jsonl"
    more.write_text(json.dumps({"text": "too short"}) + "\n")
    out = tmp_path / "out" / "plain.jsonl"
    words = ["--out", str(out), "--library", str(library), "--manuals", str(manuals)]
    assert script.main([str(more), *words]) == 0
    texts = [json.loads(line)["text"] for line in out.read_text().splitlines()]
    whale, rest, module, page = texts
    assert (len(whale.split()), len(rest.split())) == (400, 50)
    assert whale.startswith("call me ishmael call")
    assert module.startswith("the module s thing")
    assert page.startswith("name ls lists the files of folders")
    assert "4 texts of at most 400 words" in capsys.readouterr().out

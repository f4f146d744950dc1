"""Names of files that come from an artifact stay inside of it."""

from __future__ import annotations

import functools

import pytest
from failures import each

from matmix.data.artifacts import artifact_name, artifact_path, fits, parse_json

HOSTILE = [
    "", ".", "..", "/etc/passwd", "../x", "a/../../x", "a//b", "a/", "./a", "..\\x", "C:\\x", "a\x00b", "a\nb",
    "a\x1b[2J", "a\u202eb", "a\u2028b", "\ud800", "x" * 256, 5, None, ["a"], True,
]  # fmt: skip


@each("name", HOSTILE)
@each("nested", [False, True])
def test_hostile_names_are_refused_in_one_line(name, nested, tmp_path) -> None:
    for check in (artifact_name, functools.partial(artifact_path, tmp_path)):
        with pytest.raises(ValueError, match=r"^m\.json names the file ") as raised:
            check(name, "m.json", nested=nested)
        assert "\n" not in str(raised.value)
        assert str(raised.value).isascii()


def test_folders_only_where_they_may_be(tmp_path) -> None:
    assert artifact_path(tmp_path, "a/b.txt", "m", nested=True) == tmp_path / "a" / "b.txt"
    with pytest.raises(ValueError, match="separator"):
        artifact_name("a/b.txt", "m")


def test_links_are_refused_below_the_root_only(tmp_path) -> None:
    real = tmp_path / "real"
    (real / "folder").mkdir(parents=True)
    (tmp_path / "root").symlink_to(real)
    assert artifact_path(tmp_path / "root", "file", "m") == tmp_path / "root" / "file"
    (real / "file").symlink_to("/etc/passwd")
    (real / "way").symlink_to(tmp_path)
    for name in ("file", "way/x"):
        with pytest.raises(ValueError, match="is a link"):
            artifact_path(tmp_path / "root", name, "m", nested=True)


@each("text", ["[" * 100_000, '{"a":' * 100_000, "", "{", b"\xff\xfe", "nul"])
def test_json_that_is_none_is_one_line(text) -> None:
    with pytest.raises(ValueError, match=r"^m\.json is damaged") as raised:
        parse_json(text, "m.json")
    assert "\n" not in str(raised.value)


@each(
    "value, form, fine",
    [
        ([1, 2], (int, int), True), ([[1, 2], [3, 4]], [(int, int)], True),
        ({"a": [{"b": "c"}]}, {"a": [{"b": str}]}, True), ([], [str], True),
        (None, int | None, True), ([1, 2, 3], (int, int), False), ("ab", [str], False),
        ("ab", (str, str), False), ([-1], [int], False), ([True], [int], False), ({"a": 1}, {"b": int}, False),
        ([["a"]], [str], False), (None, {"a": int}, False),
    ],
)  # fmt: skip
def test_forms_of_json(value, form, fine) -> None:
    assert fits(value, form) == fine

"""Reads file names and JSON that others may have written, and refuses unsafe ones. Names become paths of this machine,
so each passes `artifact_name` or `artifact_path`."""

import contextlib
import json
import os
import re
import shlex
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_LONGEST_NAME = 255  # bytes of one part of a path, on every file system in use
_LONGEST_PATH = 1024
_LONGEST_LINE = 2000
_LARGEST_COUNT = 1 << 62
_HEX = re.compile(r"[0-9a-f]{64}")
_INVISIBLE = ("Cc", "Cf", "Cs", "Zl", "Zp")


def artifact_name(name: object, where: object, *, nested: bool = False) -> str:
    """Returns `name` where it is the plain name of a file inside of an artifact; nested: or lies in folders of it,
    after "/". where: names the file that has it. Raises ValueError (one line) for what is no text or empty, separators,
    "..", absolute paths, control and invisible characters."""
    problem = _problem(name, nested)
    if problem is not None:
        raise ValueError(f"{where} names the file {_shown(name)}, which {problem}: it is damaged or not to be trusted")
    assert isinstance(name, str)
    return name


def artifact_path(root: str | Path, name: object, where: object, *, nested: bool = False) -> Path:
    """Returns the path of a file, which need not exist, in the folder `root` of an artifact; refuses links below
    `root`, which would lead out of it (`root` may be one). Arguments and errors as of `artifact_name`."""
    path = Path(root)
    for part in artifact_name(name, where, nested=nested).split("/"):
        path = path / part
        if path.is_symlink():
            raise ValueError(f"{where} names {_shown(name)}, but {path} is a link: put the file itself there")
    return path


def check_utf8(text: str, what: str, advice: str) -> None:
    """Raises ValueError (one line) for a text that Python made of bytes which are no UTF-8: no file of ours could hold
    it. what: how to call it; "{}" stands for the text itself. advice: what to do."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        shown = ascii(os.fsencode(text))[2:-1] if "{}" in what else ""
        raise ValueError(f"{what.format(shown)} is not UTF-8 (character {error.start + 1}); {advice}") from None


def parse_json(text: str | bytes, where: object) -> Any:
    """Returns the value that a JSON text holds. Raises ValueError (one line) for what is none, or nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(f"{where} is damaged (nested too deeply)") from None
    except ValueError as error:  # of decoding, too
        raise ValueError(f"{where} is damaged ({error})") from None


def read_json(path: str | Path) -> Any:
    """Returns the value in a JSON file. Raises OSError as `open` does, ValueError as `parse_json`."""
    return parse_json(Path(path).read_bytes(), path)


def read_json_lines(path: str | Path) -> list[dict[str, Any]]:
    """Returns the objects in a file of one a line, [] where there is none; lines that hold none are left out."""
    try:
        lines = Path(path).read_bytes().splitlines()
    except FileNotFoundError:
        return []
    values = []
    for line in lines:
        try:
            values.append(parse_json(line, path))
        except ValueError:  # cut off by a kill or a full disk
            continue
    return [value for value in values if isinstance(value, dict)]


def one_line(text: object) -> str:
    """Returns a text that an artifact may have put together, without what would break a line or command a terminal."""
    letters = str(text)[:_LONGEST_LINE]
    return "".join(c if unicodedata.category(c) not in _INVISIBLE else ascii(c)[1:-1] for c in letters)


@contextlib.contextmanager
def errors_in_one_line(*kinds: type[Exception]) -> Iterator[None]:
    """Makes the text of a ValueError one line, whatever of an artifact it repeats; other errors of these kinds become
    such ValueErrors. Also a decorator."""
    try:
        yield
    except (ValueError, *kinds) as error:
        text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        if isinstance(error, ValueError) and one_line(text) == text:
            raise
        raise ValueError(one_line(text)) from None


@contextlib.contextmanager
def from_extra(extra: str, needs: str) -> Iterator[None]:
    """Raises ValueError (one line) for an ImportError within the context: that of a package of an extra of matmix.
    needs: who needs which package, such as "pictures need Pillow"."""
    try:
        yield
    except ImportError as error:
        raise ValueError(f"{needs} ({error}): in the clone of matmix, pip install -e '.[{extra}]'") from None


@contextlib.contextmanager
def panics_as_errors() -> Iterator[None]:
    """Makes the PanicException of a library written in Rust that gives up a ValueError of one line. Also a decorator.
    It is no Exception, cannot be imported, and cannot be sent to another process."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException" or isinstance(error, Exception):
            raise
        raise ValueError(f"a library written in Rust gave up: {one_line(error)}") from error


def require(fine: bool, name: str, value: object) -> None:
    """Raises ValueError (one line) unless `fine`: what an artifact calls `name` cannot be `value`."""
    if not fine:
        raise ValueError(f"{ascii(name)[1:-1]:.100} cannot be {ascii(value)[:60]}")


def is_count(value: object) -> bool:
    """Returns whether a value of JSON can be a number of things."""
    return type(value) is int and 0 <= value < _LARGEST_COUNT


def fits(value: Any, form: Any) -> bool:
    """Returns whether a value of JSON has a form: a type (int: a count), [form] for a list of any length, a tuple of
    forms for a list of so many, or a dict of the forms that keys must have."""
    if isinstance(form, dict):
        return isinstance(value, dict) and all(key in value and fits(value[key], of) for key, of in form.items())
    if isinstance(form, list | tuple):
        forms = form * len(value) if isinstance(form, list) and isinstance(value, list) else form
        return isinstance(value, list) and len(value) == len(forms) and all(map(fits, value, forms))
    return is_count(value) if form is int else isinstance(value, form)


def is_digest(value: object) -> bool:
    """Returns whether a value of JSON is a SHA-256 in hexadecimal."""
    return isinstance(value, str) and _HEX.fullmatch(value) is not None


def _problem(name: object, nested: bool) -> str | None:
    if not isinstance(name, str):
        return "is no text"
    if any(unicodedata.category(letter) in _INVISIBLE for letter in name):
        return "has control or invisible characters"
    if "\\" in name or (not nested and "/" in name):
        return "has a separator"
    if name.startswith("/"):
        return "is an absolute path"
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts):
        return 'climbs or is empty ("..", "." or nothing)'
    if len(name.encode()) > _LONGEST_PATH or any(len(part.encode()) > _LONGEST_NAME for part in parts):
        return "is longer than a file's name can be"
    return None


def _shown(name: object) -> str:
    text = ascii(name)
    return text if len(text) <= 100 else f"{text[:100]}..."


def shell_line(*words: object) -> str:
    """Returns `words` as one line that a POSIX shell reads as these words. Placeholders such as RUN stay plain."""
    return shlex.join(map(str, words))

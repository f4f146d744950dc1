"""URLs that hold a password or a key are refused, without being repeated: URLs are written into configs, job scripts,
names of folders and logs, which others may read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

# scheme://user:secret@..., where a secret may hold slashes as those of S3 do; host:8020/a@b is a port.
_USER = re.compile(r"://[^/@]*:[^/@]*@|://[^/@]*:(?!\d*(?:/|$))[^@]*@")
_QUERY = re.compile(
    r"://.*[?&;](?:[^=&;]*(?:token|signature|secret|passw|credential|api[-_]?key|access[-_]?key|account[-_]?key)[^=&;]*"
    r"|sig|key)=",
    re.IGNORECASE,
)
_QUICK = "://"


def has_secret(text: str) -> bool:
    """Whether a text holds a URL with a password, a key or a signature in it."""
    return _QUICK in text and (_USER.search(text) is not None or _QUERY.search(text) is not None)


def refuse_secrets(value: Any, what: str) -> None:
    """Raises ValueError (one line, without the secret) for a URL with a password, wherever it stands in nested values.

    what: the option or the file, for the message.
    """
    if any(has_secret(text) for text in _texts(value)):
        raise ValueError(
            f"{what}: a URL may not hold a password, key or signature, as URLs are written into runs, job scripts and "
            "logs: give it by the environment or the client's own files"
        )


def _texts(value: Any) -> Iterable[str]:
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            waiting += value

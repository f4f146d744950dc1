"""Commands as a person can paste them into a shell: whatever prints one, or an option to add to one, writes it here."""

from __future__ import annotations

import shlex


def shell_line(*words: object) -> str:
    """`words` as one line for a POSIX shell, which reads it back as these words: those with spaces or other characters
    that mean something to the shell are quoted. Placeholders that a person is to replace, such as RUN, stay plain."""
    return shlex.join(map(str, words))

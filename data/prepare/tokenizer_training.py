"""Trains a tokenizer in a process of its own, so that whoever waits for it sees that it works, and can end it.

    python -m matmix.data.prepare.tokenizer_training FOLDER PARENT

sentencepiece trains in C++, which does not look for signals: in the process itself Ctrl-C would wait until it is done.
FOLDER holds texts.jsonl (a string on each line) and options.json; the model is written into it, or what is wrong with
the text. PARENT is the number of the process that waits.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matmix.data.processes import end_with
from matmix.data.progress import WaitingReport
from matmix.data.tokenizer import Tokenizer, train_sentencepiece

_MODEL, _TEXTS, _OPTIONS, _ERROR = "tokenizer.model", "texts.jsonl", "options.json", "error.txt"
# Bytes of text that take a second or two: starting a process and sending them there would take as long.
_FEW = 4_000_000
_SECONDS_BETWEEN_LOOKS = 0.2


def train_in(folder: Path, texts: Sequence[str], options: dict[str, Any]) -> Tokenizer:
    """What `train_sentencepiece` makes of texts with these options, written into `folder`, a scratch folder.

    Raises ValueError as it does, RuntimeError if the training was killed.
    """
    if sum(len(text) for text in texts) <= _FEW:
        return train_sentencepiece(texts, folder / _MODEL, **options)
    with open(folder / _TEXTS, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(text) + "\n" for text in texts)
    (folder / _OPTIONS).write_text(json.dumps(options))
    command = [sys.executable, "-P", "-m", __name__, str(folder), str(os.getpid())]
    # Ctrl-C goes to the group of this process, which ends the other one.
    with WaitingReport("training the tokenizer") as report, subprocess.Popen(command, process_group=0) as process:
        try:
            while (code := _code(process)) is None:
                report.update()
        except BaseException:
            process.kill()
            raise
    if (folder / _ERROR).is_file():
        raise ValueError((folder / _ERROR).read_text())
    if code < 0:
        raise RuntimeError(
            f"the training of the tokenizer was killed by {signal.Signals(-code).name} (out of memory?); a smaller "
            "--sample-megabytes needs less"
        )
    if code:
        raise RuntimeError(f"the training of the tokenizer ended with code {code} (see above)")
    return Tokenizer.load(folder / _MODEL)


def _code(process: subprocess.Popen) -> int | None:
    try:
        return process.wait(_SECONDS_BETWEEN_LOOKS)
    except subprocess.TimeoutExpired:
        return None


def _main(folder: Path, parent: int) -> None:
    if not end_with(parent, signal.SIGKILL):
        return
    with open(folder / _TEXTS, encoding="utf-8") as file:
        (folder / _TEXTS).unlink()  # whatever ends the two processes, the text does not stay on the disk
        try:
            train_sentencepiece(map(json.loads, file), folder / _MODEL, **json.loads((folder / _OPTIONS).read_text()))
        except ValueError as error:
            (folder / _ERROR).write_text(str(error))


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]))

"""The text that a tokenizer is trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from matmix.data.prepare.documents import Malformed, ReadOptions, documents_of
from matmix.data.prepare.readers import Position, read_chunks
from matmix.data.prepare.sources import Source


@dataclass
class Sample:
    """Documents from the beginning of every source."""

    texts: list[str] = field(default_factory=list)
    bytes: int = 0
    """UTF-8 bytes of the texts."""
    malformed: int = 0
    examples: list[dict[str, object]] = field(default_factory=list)
    """File, line and reason of the first malformed records."""


def take_sample(sources: Sequence[Source], options: ReadOptions, budget: int) -> Sample:
    """At most `budget` bytes of text: each source gives from its beginning what its size on the disk is of
    all; what a short one leaves over goes to the later ones. The last document is cut to fit.
    """
    sample = Sample()
    bytes_left = sum(s.bytes for s in sources)
    for index, source in enumerate(sources):
        share = (budget - sample.bytes) * source.bytes // max(1, bytes_left)
        bytes_left -= source.bytes
        _take(sources[: index + 1], Position(source=index), options, share, sample)
    return sample


def _take(sources: Sequence[Source], start: Position, options: ReadOptions, share: int, sample: Sample) -> None:
    for chunk in read_chunks(sources, options, start):
        for found in documents_of(chunk, options):
            if isinstance(found, Malformed):
                sample.malformed += 1
                if len(sample.examples) < 5:
                    example = {"file": chunk.source.name, "line": found.line, "reason": found.reason}
                    sample.examples.append(example)
                continue
            if share <= 0:
                return
            raw = found.encode("utf-8")
            if len(raw) > share:
                found = raw[:share].decode("utf-8", errors="ignore")
                raw = raw[:share]
            if found:
                sample.texts.append(found)
            sample.bytes += len(raw)
            share -= len(raw)

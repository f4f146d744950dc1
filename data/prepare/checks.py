"""When a preparation cannot be used although everything was read: too much is malformed, or a split is empty."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matmix.data.prepare.sources import Source


class MalformedError(ValueError):
    """Too large a share of the input is malformed. The work done is kept: a larger share may be allowed."""


def check_malformed(malformed: int, records: int, examples: Sequence[dict[str, Any]], most: float) -> None:
    """Raises MalformedError if more than the share `most` of the records is malformed."""
    if malformed > most * records:
        raise MalformedError(malformed_sentence(malformed, records, examples))


def check_splits(documents: Mapping[str, int], sources: Sequence[Source], validation_fraction: float) -> None:
    """Raises ValueError if a split has no documents. documents: their number in each split."""
    total = sum(documents.values())
    if not total:
        raise ValueError(empty_sentence(sources))
    for name, count in documents.items():
        if not count:
            raise ValueError(
                f"the {name} split got none of the {total:,} documents at a validation fraction of "
                f"{validation_fraction}; change the fraction, or cut documents with "
                "--max-document-chars"
            )


def empty_sentence(sources: Sequence[Source]) -> str:
    where = sources[0].name if len(sources) == 1 else f"{len(sources)} files"
    return f"the corpus is empty: there is no text in {where}"


def malformed_sentence(malformed: int, records: int, examples: Sequence[dict[str, Any]]) -> str:
    shown = "; ".join(f"{e['file']}, line {e['line']}: {e['reason']}" for e in examples[:3])
    return (
        f"{malformed:,} of {records:,} lines are malformed ({shown}); mend them, or allow a larger share "
        f"with --max-malformed"
    )

"""Whether both splits get a document, found before the work on a text begins."""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
from collections.abc import Sequence

from matmix.data.prepare.config import PrepareConfig
from matmix.data.prepare.documents import Malformed, documents_of
from matmix.data.prepare.readers import read_chunks
from matmix.data.prepare.report import empty_split
from matmix.data.prepare.sources import Source

logger = logging.getLogger(__name__)

# Chunks that are looked at, of about 1 MiB each. A longer text has both splits, or a fraction that gives it none.
_CHUNKS = 64
_HASHES = 2**64


def hash_of(raw: bytes) -> int:
    """What decides the split of a document (or a picture), from 0 to 2**64 - 1."""
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "big")


def in_validation(raw: bytes, fraction: float) -> bool:
    """Whether a document belongs to the validation split, a share `fraction` of all, by a hash of its bytes."""
    return hash_of(raw) < int(fraction * _HASHES)


def usable_fraction(config: PrepareConfig, sources: Sequence[Source]) -> float:
    """The validation fraction, or, of a text so short that its hashes give the validation split nothing, one that gives
    it the document of the smallest hash. It depends on the text and the options only.

    Reads until both splits have a document. Raises ValueError (one line) where one of them would get none.
    """
    fraction = config.validation_fraction
    if not fraction:
        return fraction
    chunks = itertools.islice(read_chunks(sources, config), _CHUNKS + 1)
    smallest, largest, documents = _HASHES, -1, 0
    for number, chunk in enumerate(chunks):
        if number == _CHUNKS:
            return fraction
        for found in documents_of(chunk, config):
            if isinstance(found, Malformed) or not found:
                continue
            documents, value = documents + 1, hash_of(found.encode("utf-8"))
            smallest, largest = min(smallest, value), max(largest, value)
        if smallest < int(fraction * _HASHES) <= largest:
            return fraction
    if not documents:
        return fraction  # said elsewhere, with what was malformed
    if smallest == largest:
        one = "one document" if documents == 1 else f"{documents:,} equal documents"
        where = sources[0].name if len(sources) == 1 else f"the text of {len(sources)} files"
        raise ValueError(
            f"{where} is {one}, of which training and validation cannot both have some: cut it into documents with "
            "--max-document-chars 4000 or --text-documents paragraph, or do without a validation split "
            "(--validation-fraction 0)"
        )
    if largest < int(fraction * _HASHES):
        raise empty_split("train", documents, fraction)
    logger.info(
        f"a validation fraction of {fraction:g} gives the validation split none of the {documents:,} documents: it "
        "gets the one of the smallest hash"
    )
    return math.nextafter((smallest + 1) / _HASHES, 2.0)

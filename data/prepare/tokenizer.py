"""The tokenizer of a preparation: the one that is in its folder already, or one that is trained on the text."""

from __future__ import annotations

import itertools
import logging
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from matmix.data.prepare.config import OF_TRAINING, PrepareConfig
from matmix.data.prepare.documents import Malformed, documents_of
from matmix.data.prepare.readers import read_chunks
from matmix.data.prepare.report import check_malformed, empty_sentence
from matmix.data.prepare.sources import Source
from matmix.data.prepare.tokenizer_training import train_in
from matmix.data.prepare.workspace import Progress
from matmix.data.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


def copied_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer that a preparation in this folder has put there; None if it has not yet."""
    for name in ("tokenizer.model", "tokenizer.json"):
        if (path := folder / "tokenizer" / name).is_file():
            return Tokenizer.load(path)
    return None


def train_tokenizer(config: PrepareConfig, sources: Sequence[Source]) -> Tokenizer:
    """Train one on the beginning of every source. Raises ValueError if there is no text."""
    met = Progress()
    if not (texts := list(_sample(config, sources, met))):
        check_malformed(met, 0)
        raise ValueError(empty_sentence(sources))
    most = "at most " if config.model_type == "char" else ""
    logger.info(
        f"training a {config.model_type} tokenizer of {most}{config.vocab_size:,} ids on "
        f"{sum(len(text.encode()) for text in texts) / 1e6:.1f} MB of text from {len(sources)} "
        f"{'file' if len(sources) == 1 else 'files'}"
    )
    with tempfile.TemporaryDirectory() as scratch:
        options = {name: getattr(config, name) for name in OF_TRAINING}
        return train_in(Path(scratch), texts, options)


def _sample(config: PrepareConfig, sources: Sequence[Source], met: Progress) -> Iterator[str]:
    """Text of at most `sample_megabytes`: each source gives from its beginning what its size on the disk is of all;
    what a short one leaves over goes to the later ones. The last document is cut to fit. What is malformed is
    counted in `met`."""
    budget, bytes_left = int(config.sample_megabytes * 1e6), sum(s.bytes for s in sources)
    for source in sources:
        share = budget * source.bytes // max(1, bytes_left)
        bytes_left -= source.bytes
        chunks = read_chunks([source], config)
        for found in itertools.chain.from_iterable(documents_of(chunk, config) for chunk in chunks):
            if isinstance(found, Malformed):
                met.add_malformed(source.name, [found], 1)
                met.records += 1
                continue
            if share <= 0:
                break
            raw = found.encode("utf-8")[:share]
            share, budget = share - len(raw), budget - len(raw)
            if kept := raw.decode("utf-8", errors="ignore"):
                yield kept

"""Prepares text: from files to documents of tokens, with a tokenizer that is given or trained on the text."""

from __future__ import annotations

import functools
import itertools
import logging
import math
import multiprocessing
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from matmix.data.arrays import write_vector
from matmix.data.manifest import Manifest, SplitInfo, TokenizerInfo, unigram_entropy
from matmix.data.prepare.base import (
    HASHES,
    KEPT_EXAMPLES,
    Chunk,
    Documents,
    Malformed,
    Position,
    Preparation,
    Progress,
    hash_of,
    in_validation,
)
from matmix.data.prepare.pool import start_process, without_interrupts
from matmix.data.prepare.progress import WaitingReport
from matmix.data.prepare.report import check_broken, empty_input, empty_split
from matmix.data.prepare.text import OF_TRAINING, PrepareConfig, ReadOptions
from matmix.data.prepare.text.documents import documents_of
from matmix.data.prepare.text.readers import find_cuts, read_chunks
from matmix.data.prepare.text.sources import TextFile, find_sources
from matmix.data.tokenizer import Tokenizer, train_sentencepiece

logger = logging.getLogger(__name__)

HISTOGRAM_NAME = "token_histogram.npy"
_ERROR = "error.txt"
# Bytes of text on which a tokenizer is trained within a second or two: starting a process would take as long.
_FEW = 4_000_000
_SECONDS_BETWEEN_LOOKS = 0.2
# Number of chunks, of about 1 MiB each, in which documents for both splits are looked for. A longer text has them, or a
# fraction that gives one split nothing.
_CHUNKS = 64


class TextPreparation(Preparation):
    """Text files on their way to shards of tokens. The sums are the tokens' counts in the training split."""

    name = "text"
    verb = PrepareConfig.verb
    doing = "tokenising"
    counted = "tokens"
    bytes_a_process = 1 << 20
    most_broken = "max_malformed"
    content = "text"
    split_advice = ", or cut documents with --max-document-chars"
    files = ("tokenizer", HISTOGRAM_NAME)
    config: PrepareConfig
    sources: list[TextFile]

    def __init__(self, config: PrepareConfig) -> None:
        sources, ignored = find_sources(config.inputs)
        if ignored:
            logger.info(f"passed over {len(ignored)} files that are no .txt, .jsonl or .parquet, such as {ignored[0]}")
        self.given = Tokenizer.load(config.tokenizer) if config.tokenizer else None
        self.tokenizer: Tokenizer | None = None
        super().__init__(config, sources, tokenizer=self.given.sha256 if self.given else "trained")

    def ready(self, folder: Path, *, is_part: bool) -> None:
        # A part may have one split only.
        self.fraction = self.config.validation_fraction if is_part else usable_fraction(self.config, self.sources)
        paths = (folder / "tokenizer" / name for name in ("tokenizer.model", "tokenizer.json"))
        path = next((path for path in paths if path.is_file()), None)
        self.tokenizer = Tokenizer.load(path) if path else self.given or train_tokenizer(self.config, self.sources)
        self.shared = {f"tokenizer/{self.tokenizer.file_name}": self.tokenizer.raw}

    @classmethod
    def changed_input(cls, facts: Mapping[str, Any]) -> str:
        for path, (_, size, digest) in zip(facts["paths"], facts["options"]["inputs"], strict=True):
            try:
                (source,), _ = find_sources([path])
            except (FileNotFoundError, ValueError):
                return f"{path} has gone"
            if (source.bytes, source.digest()) != (size, digest):
                return f"{path} has changed"
        return ""

    def dtype(self) -> str:
        return "uint16" if self.tokenizer.vocab_size <= 1 << 16 else "uint32"

    def worker(self, folder: Path) -> Callable[[], Callable[[Chunk], Documents]]:
        return functools.partial(_begin, folder, self.dtype(), self.config, self.fraction)

    def new_sums(self) -> np.ndarray:
        return np.zeros(self.tokenizer.vocab_size, np.int64)

    def chunks(self, start: Position, stop: Position, entry: Position) -> Iterator[Chunk]:
        sources, first = list(self.sources), entry.source
        if entry.offset and sources[first].kind != "parquet":
            # A part that enters a text in the middle counts lines from there, and says so.
            sources[first] = replace(sources[first], name=f"{sources[first].name} from byte {entry.offset:,}")
        return read_chunks(sources, self.config, start, stop)

    def cuts(self, parts: int) -> list[Position]:
        return find_cuts(self.sources, self.config, parts)

    @classmethod
    def finish(cls, out: Path, options: Mapping[str, Any], splits: Sequence[str], sums: np.ndarray) -> dict[str, Any]:
        tokenizer = Tokenizer.load(out)
        if len(sums) != tokenizer.vocab_size:
            raise ValueError(f"{out}: {len(sums):,} sums do not fit a vocabulary of {tokenizer.vocab_size:,}")
        write_vector(out / HISTOGRAM_NAME, "int64", len(sums), [sums.tobytes()])
        info = TokenizerInfo(
            kind=tokenizer.kind,
            file=f"tokenizer/{tokenizer.file_name}",
            sha256=tokenizer.sha256,
            vocab_size=tokenizer.vocab_size,
            special=tokenizer.special,
        )
        return {"tokenizer": info, "token_histogram": HISTOGRAM_NAME, "unigram_entropy": unigram_entropy(sums)}

    @classmethod
    def amount(cls, split: SplitInfo) -> str:
        return f"{split.tokens:,} tokens"

    @classmethod
    def summary(cls, manifest: Manifest) -> list[tuple[str, str]]:
        tokenizer, train = manifest.tokenizer, manifest.splits["train"]
        text = f"{tokenizer.kind}, {tokenizer.vocab_size:,} ids, {train.bytes / max(1, train.tokens):.2f} bytes a token"
        return [("tokenizer", f"{text}; entropy of single tokens {manifest.unigram_entropy:.3f} nats")]

    @classmethod
    def advice(cls, met: Progress) -> str:
        reasons = [example["reason"] for example in met.examples[:3]]
        if any(reason.startswith("no field") for reason in reasons):
            return "name the field of the text with --text-field, "
        if met.malformed == met.records and any(reason.startswith("not ") for reason in reasons):
            return "give one object a line (jq -c '.[]' FILE makes them of a JSON array), "
        return ""


def _begin(folder: Path, dtype: str, options: ReadOptions, fraction: float) -> Callable[[Chunk], Documents]:
    """Returns the function that tokenises a chunk. fraction: share of the documents for the validation split."""
    tokenizer = Tokenizer.load(folder)

    def tokenize(chunk: Chunk) -> Documents:
        pieces = list(documents_of(chunk, options))
        malformed = [piece for piece in pieces if isinstance(piece, Malformed)]
        texts = [piece for piece in pieces if isinstance(piece, str) and piece]
        # A normalising tokenizer may leave nothing of a document.
        encoded = zip(texts, tokenizer.encode_batch(texts), strict=True)
        kept = [(text.encode("utf-8"), tokens) for text, tokens in encoded if tokens]
        elements = np.fromiter((token for _, tokens in kept for token in tokens), dtype)
        lengths = np.fromiter((len(tokens) for _, tokens in kept), np.int64, len(kept))
        validation = np.fromiter((in_validation(raw, fraction) for raw, _ in kept), bool, len(kept))
        return Documents(
            elements=elements,
            lengths=lengths,
            sizes=np.fromiter((len(raw) for raw, _ in kept), np.int64, len(kept)),
            validation=validation,
            sums=np.bincount(elements[~np.repeat(validation, lengths)], minlength=tokenizer.vocab_size),
            # Blank lines of .jsonl files are no records.
            records=sum(not isinstance(r, bytes) or bool(r.strip()) for r in chunk.records),
            malformed=len(malformed),
            examples=malformed[:KEPT_EXAMPLES],
            empty=len(pieces) - len(malformed) - len(kept),
        )

    return tokenize


def usable_fraction(config: PrepareConfig, sources: Sequence[TextFile]) -> float:
    """Returns the validation fraction, or, for a text so short that its hashes give the validation split nothing, one
    that gives it the document of the smallest hash. The result depends on the text and the options only.

    Reads until both splits have a document. Raises ValueError (one line) where one of them would get none.
    """
    fraction = config.validation_fraction
    if not fraction:
        return fraction
    chunks = itertools.islice(read_chunks(sources, config), _CHUNKS + 1)
    smallest, largest, documents = HASHES, -1, 0
    for number, chunk in enumerate(chunks):
        if number == _CHUNKS:
            return fraction
        for document in documents_of(chunk, config):
            if isinstance(document, Malformed) or not document:
                continue
            documents, value = documents + 1, hash_of(document.encode("utf-8"))
            smallest, largest = min(smallest, value), max(largest, value)
        if smallest < int(fraction * HASHES) <= largest:
            return fraction
    if not documents:
        return fraction  # refused elsewhere, with the malformed records
    if smallest == largest:
        one = "one document" if documents == 1 else f"{documents:,} equal documents"
        where = sources[0].name if len(sources) == 1 else f"the text of {len(sources)} files"
        raise ValueError(
            f"{where} is {one}, of which training and validation cannot both have some: cut it into documents with "
            "--max-document-chars 4000 or --text-documents paragraph, or do without a validation split "
            "(--validation-fraction 0)"
        )
    if largest < int(fraction * HASHES):
        raise empty_split(TextPreparation, "train", documents, fraction)
    logger.info(
        f"a validation fraction of {fraction:g} gives the validation split none of the {documents:,} documents: it "
        "gets the one of the smallest hash"
    )
    return math.nextafter((smallest + 1) / HASHES, 2.0)


def train_tokenizer(config: PrepareConfig, sources: Sequence[TextFile]) -> Tokenizer:
    """Returns a tokenizer trained on the beginning of every source. Raises ValueError (one line) without text."""
    met = Progress()
    if not (texts := list(_sample(config, sources, met))):
        check_broken(TextPreparation, met, 0)
        raise empty_input(TextPreparation, [source.name for source in sources])
    most = "at most " if config.model_type == "char" else ""
    logger.info(
        f"training a {config.model_type} tokenizer of {most}{config.vocab_size:,} ids on "
        f"{sum(len(text.encode()) for text in texts) / 1e6:.1f} MB of text from {len(sources)} "
        f"{'file' if len(sources) == 1 else 'files'}"
    )
    with tempfile.TemporaryDirectory() as scratch:
        return train_in(Path(scratch), texts, {name: getattr(config, name) for name in OF_TRAINING})


def _sample(config: PrepareConfig, sources: Sequence[TextFile], met: Progress) -> Iterator[str]:
    """Yields at most `sample_megabytes` of text, and counts malformed records in `met`.

    Each source gives from its beginning a share by its size on the disk; what a short one leaves over goes to the later
    ones. The last document is cut to fit.
    """
    budget, bytes_left = int(config.sample_megabytes * 1e6), sum(s.bytes for s in sources)
    for source in sources:
        share = budget * source.bytes // max(1, bytes_left)
        bytes_left -= source.bytes
        chunks = read_chunks([source], config)
        for document in itertools.chain.from_iterable(documents_of(chunk, config) for chunk in chunks):
            if isinstance(document, Malformed):
                met.add_malformed(source.name, [document], 1)
                met.records += 1
                continue
            if share <= 0:
                break
            raw = document.encode("utf-8")[:share]
            share, budget = share - len(raw), budget - len(raw)
            if kept := raw.decode("utf-8", errors="ignore"):
                yield kept


def train_in(folder: Path, texts: Sequence[str], options: dict[str, Any]) -> Tokenizer:
    """Returns the tokenizer that `train_sentencepiece` makes of texts with these options. folder: for scratch files.

    A long training has a process of its own, so that whoever waits for it sees that it works, and can end it:
    sentencepiece trains in C++, which does not look for signals.
    Raises ValueError as `train_sentencepiece` does, RuntimeError if the training was killed.
    """
    model = folder / "tokenizer.model"
    if sum(len(text) for text in texts) <= _FEW:
        return train_sentencepiece(texts, model, **options)
    process = multiprocessing.get_context("spawn").Process(target=_train, args=(folder, list(texts), options))
    with WaitingReport("training the tokenizer") as report:
        try:
            with without_interrupts():
                process.start()
            while process.is_alive():
                report.update()
                process.join(_SECONDS_BETWEEN_LOOKS)
        except BaseException:
            process.kill()
            process.join()
            raise
    if (folder / _ERROR).is_file():
        raise ValueError((folder / _ERROR).read_text())
    if process.exitcode < 0:
        raise RuntimeError(
            f"the training of the tokenizer was killed by {signal.Signals(-process.exitcode).name} (out of memory?); a "
            "smaller --sample-megabytes needs less"
        )
    if process.exitcode:
        raise RuntimeError(f"the training of the tokenizer ended with code {process.exitcode} (see above)")
    return Tokenizer.load(model)


def _train(folder: Path, texts: list[str], options: dict[str, Any]) -> None:
    start_process()
    try:
        train_sentencepiece(texts, folder / "tokenizer.model", **options)
    except ValueError as error:
        (folder / _ERROR).write_text(str(error))

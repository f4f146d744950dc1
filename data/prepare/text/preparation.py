"""Prepares text: from files to documents of tokens, with a tokenizer that is given or trained on the text."""

import dataclasses
import functools
import itertools
import logging
import math
import multiprocessing
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from matmix.data.arrays import write_vector
from matmix.data.foreign_tokenizer import local_or_hub
from matmix.data.manifest import Manifest, SplitInfo, TokenizerInfo, unigram_entropy
from matmix.data.prepare import base
from matmix.data.prepare.base import Chunk, Document, Documents, Malformed, Position, Progress
from matmix.data.prepare.cleaning import CLEANING, CleanOptions
from matmix.data.prepare.cleaning import plan as cleaning
from matmix.data.prepare.pool import start_process, without_interrupts
from matmix.data.prepare.report import Report, check_broken, empty_input, empty_split
from matmix.data.prepare.streams import is_stream
from matmix.data.prepare.text import OF_TRAINING, PrepareConfig, ReadOptions
from matmix.data.prepare.text.documents import documents_of
from matmix.data.prepare.text.hub import FILES_AT_HUB, pinned
from matmix.data.prepare.text.readers import check_options, find_sources
from matmix.data.prepare.text.sequences import check_intervals
from matmix.data.prepare.text.sources import TextSource
from matmix.data.prepare.text.texts import TextFile
from matmix.data.storage.files import sha256_of
from matmix.data.storage.remote import scratch_folder
from matmix.data.tokenizer import Tokenizer, train_sentencepiece

logger = logging.getLogger(__name__)

HISTOGRAM_NAME = "token_histogram.npy"
_ERROR = "error.txt"
# Bytes of text on which a tokenizer is trained within a second or two: starting a process would take as long.
_FEW = 4_000_000
_SECONDS_BETWEEN_LOOKS = 0.2
# Of larger inputs, one document in so many is turned back into text: for all, that would take up to half as long as
# tokenising them.
_SMALL, _ONE_IN = 1 << 26, 16
# What the sums count behind the tokens, of documents that were turned back into text.
_ROUND_TRIP = ("texts", "changed", "unknown")
# Number of chunks, of about 1 MiB each, in which documents for both splits are looked for. A longer text has them, or a
# fraction that gives one split nothing.
_CHUNKS = 64

Reader = Callable[[Chunk], Iterator[str | Malformed]]
"""Gives the documents of a chunk, as `documents_of` does."""


class TextPreparation(base.Preparation):
    """Text files on their way to shards of tokens. The sums are the tokens' counts in the training split, then those of
    `_ROUND_TRIP`."""

    name = "text"
    verb = PrepareConfig.verb
    doing = "tokenising"
    counted = "tokens"
    bytes_a_process = 1 << 20
    most_broken = "max_malformed"
    content = "text"
    split_advice = ", or cut documents with --max-document-chars"
    files = ("tokenizer", HISTOGRAM_NAME, cleaning.FOLDER)
    config: PrepareConfig
    sources: list[TextSource]

    def __init__(self, config: PrepareConfig) -> None:
        # Each chunk goes to another process with these, and not with a list of all inputs.
        options = ReadOptions(**{field.name: getattr(config, field.name) for field in dataclasses.fields(ReadOptions)})
        inputs, evaluations = ([pinned(one, config.out) for one in of] for of in (config.inputs, config.decontaminate))
        config = dataclasses.replace(config, inputs=tuple(inputs), decontaminate=tuple(evaluations))
        sources, ignored = find_sources(config.inputs, options)
        if ignored:
            logger.info(f"passed over {len(ignored)} files of other suffixes, such as {ignored[0]}")
        check_options(sources, options)
        self.given = Tokenizer.load(local_or_hub(config.tokenizer)) if config.tokenizer else None
        if config.intervals:
            check_intervals(sources, config.intervals, disjoint=config.validation_fraction > 0)
        chosen = CleanOptions(**{name: getattr(config, name) for name in CLEANING})
        self.read = cleaning.Cleaner(documents_of, chosen)
        self.look: cleaning.Look | None = None
        self.evaluations = {item: find_sources([item])[0] for item in config.decontaminate}
        facts = {"tokenizer": self.given.sha256 if self.given else "trained"}
        if self.evaluations:
            files = itertools.chain.from_iterable(self.evaluations.values())
            facts["decontaminate"] = sorted(f.digest() if is_stream(f.path) else sha256_of(Path(f.path)) for f in files)
        super().__init__(config, sources, **facts)

    def examination(self, folder: Path) -> base.Examination | None:
        if not self.read.options.cleans or cleaning.is_decided(folder):
            return None
        self.look = cleaning.Look(self.read, self.sources, self.chunks, self.evaluations, self.config.processes)
        return self.look.run

    def ready(self, folder: Path, *, is_part: bool) -> None:
        # A part may have one split only.
        self.fraction, files, scratch = self.config.validation_fraction, {}, None
        if self.read.options.cleans:
            if not is_part and (look := self.examination(folder)):
                scratch = scratch_folder("clean", self.digest)
                look(scratch, [Position(), Position(len(self.sources))], 1, lambda: False)
            self.read, files = cleaning.decided(self.read, folder, self.look)
        if not is_part:
            self.fraction = usable_fraction(self.fraction, self.sources, self.read, self.config.max_malformed)
        paths = (folder / "tokenizer" / name for name in ("tokenizer.model", "tokenizer.json"))
        path = next((path for path in paths if path.is_file()), None)
        known = Tokenizer.load(path) if path else self.given
        self.tokenizer = known or train_tokenizer(self.config, self.sources, self.read)
        self.dtype = "uint16" if self.tokenizer.vocab_size <= 1 << 16 else "uint32"
        self.shared = {f"tokenizer/{self.tokenizer.file_name}": self.tokenizer.raw, **files}
        if scratch:
            shutil.rmtree(scratch, ignore_errors=True)

    @classmethod
    def changed_input(cls, facts: Mapping[str, Any]) -> str:
        options = ReadOptions(raw_bytes="raw_bytes" in facts["options"])
        for path, (_, size, digest) in zip(facts["paths"], facts["options"]["inputs"], strict=True):
            if path.startswith(FILES_AT_HUB):  # at a commit
                continue
            try:
                (source,), _ = find_sources([path], options)
            except (FileNotFoundError, ValueError):
                return f"{path} has gone"
            if (source.bytes, source.digest()) != (size, digest):
                return f"{path} has changed"
        return ""

    def worker(self) -> Callable[[Chunk], Documents]:
        one_in = 1 if sum(source.bytes for source in self.sources) <= _SMALL else _ONE_IN
        return functools.partial(tokenize, self.tokenizer, self.dtype, self.fraction, one_in, self.read)

    def new_sums(self) -> np.ndarray:
        return np.zeros(self.tokenizer.vocab_size + len(_ROUND_TRIP), np.int64)

    def chunks(self, start: Position, stop: Position, entry: Position) -> Iterator[Chunk]:
        sources, first = list(self.sources), entry.source
        if entry.offset and isinstance(sources[first], TextFile):
            # A part that enters a text in the middle counts lines from there, and says so.
            name = f"{sources[first].name} from byte {entry.offset:,}"
            sources[first] = dataclasses.replace(sources[first], name=name)
        return base.read_chunks(sources, start, stop)

    @classmethod
    def finish(cls, out: Path, options: Mapping[str, Any], splits: Sequence[str], sums: np.ndarray) -> dict[str, Any]:
        tokenizer = Tokenizer.load(out)
        if len(sums) != tokenizer.vocab_size + len(_ROUND_TRIP):
            raise ValueError(f"{out}: {len(sums):,} sums do not fit a vocabulary of {tokenizer.vocab_size:,}")
        counts, texts = np.split(sums, [tokenizer.vocab_size])
        own = write_counts(out, tokenizer, counts, dict(zip(_ROUND_TRIP, texts.tolist(), strict=True)))
        return {**own, "cleaning": cleaning.read_report(out)}

    @classmethod
    def amount(cls, split: SplitInfo) -> str:
        return f"{split.tokens:,} tokens"

    @classmethod
    def summary(cls, manifest: Manifest) -> list[tuple[str, str]]:
        tokenizer, train = manifest.tokenizer, manifest.splits["train"]
        text = f"{tokenizer.kind}, {tokenizer.vocab_size:,} ids, {train.bytes / max(1, train.tokens):.2f} bytes a token"
        lines = [("tokenizer", f"{text}; entropy of single tokens {manifest.unigram_entropy:.3f} nats")]
        found = ", ".join(f"{role} {index}" for role, index in tokenizer.special.items() if index is not None)
        lacking = ", ".join(role for role, index in tokenizer.special.items() if index is None)
        lines.append(("special", "; ".join(filter(None, [found, lacking and f"no {lacking}"]))))
        if (met := tokenizer.round_trip) is not None and met["texts"]:
            lines.append(("round trip", _said(**met)))
        if (report := manifest.cleaning) is not None:
            left_out = f"{report['documents'] - report['kept']:,} of {report['documents']:,} documents of the input"
            lines.append(("cleaned", f"{left_out} were left out: {cleaning.in_words(report)}"))
        return lines

    @classmethod
    def advice(cls, met: Progress) -> str:
        reasons = [example["reason"] for example in met.examples[:3]]
        if any(reason.startswith("no field") or " has no member or field " in reason for reason in reasons):
            return "name the field of the text with --text-field, "
        if met.malformed == met.records and any(reason.startswith("not ") for reason in reasons):
            return "give one object a line (jq -c '.[]' FILE makes them of a JSON array), "
        return ""


def write_counts(
    out: Path, tokenizer: Tokenizer, counts: np.ndarray, round_trip: dict[str, int] | None = None
) -> dict[str, Any]:
    """Writes the histogram of a dataset; returns the members of the manifest that describe tokens. counts: int64
    (vocab_size,), how often each occurs in the training split. round_trip: that of `TokenizerInfo`."""
    write_vector(out / HISTOGRAM_NAME, "int64", len(counts), [counts.tobytes()])
    facts = {name: getattr(tokenizer, name) for name in ("kind", "sha256", "vocab_size", "special")}
    info = TokenizerInfo(file=f"tokenizer/{tokenizer.file_name}", round_trip=round_trip, **facts)
    return {"tokenizer": info, "token_histogram": HISTOGRAM_NAME, "unigram_entropy": unigram_entropy(counts)}


def _said(texts: int, changed: int, unknown: int) -> str:
    """Returns what came of turning so many texts back into text."""
    if not changed:
        return f"all of {texts:,} texts come back from their tokens"
    lacking = f"; {unknown:,} hold what the vocabulary lacks" if unknown else ""
    share = f"{100 * changed / max(1, texts):.2f} %"
    return f"{changed:,} of {texts:,} texts ({share}) come back from their tokens as another text{lacking}"


def tokenize(tokenizer: Tokenizer, dtype: str, fraction: float, one_in: int, read: Reader, chunk: Chunk) -> Documents:
    """Returns the documents of a chunk. fraction: share of them for the validation split. one_in: of so many documents,
    one is turned back into text; a hash of each decides."""
    pieces = list(read(chunk))
    tokens = iter(tokenizer.encode_batch([piece for piece in pieces if isinstance(piece, str) and piece]))
    made: list[Document | Malformed | None] = []
    texts = changed = unknown = 0
    for piece in pieces:
        if isinstance(piece, str):
            # A normalising tokenizer may leave nothing of a document.
            ids, raw = next(tokens) if piece else [], piece.encode("utf-8")
            if ids and (one_in == 1 or base.hash_of(raw) % one_in == 0):
                texts += 1
                changed += tokenizer.decode(ids) != piece
                unknown += tokenizer.unknown_id in ids
            made.append(Document(ids, raw, len(raw)) if ids else None)
        elif isinstance(piece, bytearray):
            made.append(Document(np.frombuffer(piece, np.uint8), bytes(piece), len(piece)))
        else:
            made.append(piece)
    documents = Documents.of(chunk, made, dtype, fraction)
    # Blank lines of .jsonl files are no records.
    documents.records = sum(not isinstance(r, bytes) or bool(r.strip()) for r in chunk.records)
    trained_on = documents.elements[~np.repeat(documents.validation, documents.lengths)]
    counts = np.bincount(trained_on, minlength=tokenizer.vocab_size)
    documents.sums = np.append(counts, [texts, changed, unknown])
    return documents


def usable_fraction(fraction: float, sources: Sequence[TextSource], read: Reader, max_malformed: float = 0.0) -> float:
    """Returns the validation fraction, or, for a text so short that its hashes give the validation split nothing, one
    that gives it the document of the smallest hash. Reads until both splits have a document. Raises ValueError (one
    line) where one of them would get none, which is told of more than this share of malformed records first."""
    if not fraction:
        return fraction
    smallest, largest, documents, met = base.HASHES, -1, 0, Progress()
    for number, chunk in enumerate(base.read_chunks(sources)):
        if number == _CHUNKS:
            return fraction
        for document in read(chunk):
            met.records += 1
            if isinstance(document, Malformed):
                met.add_malformed(chunk.source.name, [document])
            elif document:
                raw = document.encode("utf-8") if isinstance(document, str) else bytes(document)
                documents, value = documents + 1, base.hash_of(raw)
                smallest, largest = min(smallest, value), max(largest, value)
        if smallest < int(fraction * base.HASHES) <= largest:
            return fraction
    if not documents:
        return fraction  # refused elsewhere, with the malformed records
    check_broken(TextPreparation, met, max_malformed)
    if smallest == largest:
        one = "one document" if documents == 1 else f"{documents:,} equal documents"
        takes_units = any("text_documents" in source.takes for source in sources)
        paragraphs = " or --text-documents paragraph" if takes_units else ""
        where = sources[0].name if len(sources) == 1 else f"the text of {len(sources)} files"
        raise ValueError(
            f"{where} is {one}, of which training and validation cannot both have some: cut it into documents with "
            f"--max-document-chars 4000{paragraphs}, or do without a validation split (--validation-fraction 0)"
        )
    if largest < int(fraction * base.HASHES):
        raise empty_split(TextPreparation, "train", documents, fraction)
    logger.info(
        f"a validation fraction of {fraction:g} gives the validation split none of the {documents:,} documents: it "
        "gets the one of the smallest hash"
    )
    return math.nextafter((smallest + 1) / base.HASHES, 2.0)


def train_tokenizer(config: PrepareConfig, sources: Sequence[TextSource], read: Reader) -> Tokenizer:
    """Returns a tokenizer trained on the beginning of every source. Raises ValueError (one line) without text."""
    met = Progress()
    if not (texts := list(_sample(config.sample_megabytes, sources, met, read))):
        check_broken(TextPreparation, met, 0)
        raise empty_input(TextPreparation, [source.name for source in sources])
    most = "at most " if config.model_type == "char" else ""
    size = f"{sum(len(text.encode()) for text in texts) / 1e6:.1f} MB"
    files = "1 file" if len(sources) == 1 else f"{len(sources)} files"
    wanted = f"a {config.model_type} tokenizer of {most}{config.vocab_size:,} ids"
    logger.info(f"training {wanted} on {size} of text from {files}")
    with tempfile.TemporaryDirectory() as scratch:
        return train_in(Path(scratch), texts, {name: getattr(config, name) for name in OF_TRAINING})


def _sample(megabytes: float, sources: Sequence[TextSource], met: Progress, read: Reader) -> Iterator[str]:
    """Yields at most so much text, and counts malformed records in `met`. Each source gives from its beginning a share
    by its size on the disk; what a short one leaves over goes to the later ones."""
    budget, bytes_left = int(megabytes * 1e6), sum(s.bytes for s in sources)
    for number, source in enumerate(sources):
        share = budget * source.bytes // max(1, bytes_left)
        bytes_left -= source.bytes
        chunks = base.read_chunks(sources, Position(number), Position(number + 1))
        for document in itertools.chain.from_iterable(map(read, chunks)):
            if isinstance(document, Malformed):
                met.add_malformed(source.name, [document])
                met.records += 1
                continue
            if share <= 0:
                break
            raw = document.encode("utf-8")[:share]
            share, budget = share - len(raw), budget - len(raw)
            if kept := raw.decode("utf-8", errors="ignore"):
                yield kept


def train_in(folder: Path, texts: Sequence[str], options: dict[str, Any]) -> Tokenizer:
    """Returns the tokenizer that `train_sentencepiece` makes of texts. folder: for scratch files. A long training has a
    process of its own, so that whoever waits for it can end it: sentencepiece trains in C++, which does not look for
    signals. Raises ValueError as `train_sentencepiece` does, RuntimeError if it was killed."""
    model = folder / "tokenizer.model"
    if sum(len(text) for text in texts) <= _FEW:
        return train_sentencepiece(texts, model, **options)
    process = multiprocessing.get_context("spawn").Process(target=_train, args=(folder, list(texts), options))
    with Report("training the tokenizer") as report:
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
    if code := process.exitcode:
        ended = f"ended with code {code} (see above)"
        if code < 0:
            name = signal.Signals(-code).name
            ended = f"was killed by {name} (out of memory?); a smaller --sample-megabytes needs less"
        raise RuntimeError(f"the training of the tokenizer {ended}")
    return Tokenizer.load(model)


def _train(folder: Path, texts: list[str], options: dict[str, Any]) -> None:
    start_process()
    try:
        train_sentencepiece(texts, folder / "tokenizer.model", **options)
    except ValueError as error:
        (folder / _ERROR).write_text(str(error))

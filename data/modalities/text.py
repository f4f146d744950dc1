"""Text: prepared datasets of tokens, cut into sequences by `matmix.data.loading.packing`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from matmix.data.arrays import read_vector
from matmix.data.config import DataConfig, datasets_of
from matmix.data.foreign.finding import is_foreign
from matmix.data.foreign.opening import ForeignFacts, open_text
from matmix.data.formats.base import DamagedShard
from matmix.data.loading.masking import IGNORED, Masker, MaskingConfig, Stretch
from matmix.data.loading.order import Mixture, Streams
from matmix.data.loading.packing import ConcatPacking, DocumentPacking, Packing
from matmix.data.loading.rows import WHOLE, Facts, Failure, Opened, Reading, errors_as_failures
from matmix.data.loading.strands import Strands
from matmix.data.manifest import Manifest, SplitInfo
from matmix.data.modalities.base import Modality, contents_digest, shard_options, streams
from matmix.data.prepare.text import PrepareConfig
from matmix.data.splits.reader import TokenShards, open_dataset
from matmix.data.storage.files import sha256_of

if TYPE_CHECKING:
    from matmix.data.loading.batch import Batch
    from matmix.data.tokenizer import Tokenizer


class TextFacts(Facts):
    """Facts about prepared texts (all of a mixture), from their manifests."""

    def __init__(self, manifests: Sequence[Manifest], shards: Sequence[TokenShards] = (), around: int = 0) -> None:
        """around: number of special tokens that are put around a document."""
        self.shards, self.around = shards, around
        self.vocab_size = manifests[0].tokenizer.vocab_size

    @property
    def bytes_per_target(self) -> float:
        """Bits per byte = loss in nats per token / ln 2 / this. Special tokens around a document are predicted, its
        very first token is not."""
        targets = sum(one.info.tokens + (self.around - 1) * one.info.documents for one in self.shards)
        return sum(one.info.bytes for one in self.shards) / max(1, targets)

    @property
    def bytes_per_token(self) -> float:
        return sum(one.info.bytes for one in self.shards) / max(1, sum(one.info.tokens for one in self.shards))

    @property
    def token_histogram(self) -> np.ndarray:
        counts = []
        for one in self.shards:
            name, path = one.manifest.token_histogram, one.storage.path
            where, length = f"{path}: {name}", one.manifest.tokenizer.vocab_size
            counts.append(read_vector(one.storage.file(name), "int64", where, length=length))
            if counts[-1].min(initial=0) < 0:
                raise ValueError(f"{where} has negative counts")
        return np.sum(counts, axis=0)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return _load_tokenizer(self.shards[0])


class Text(Modality):
    """Each sample is a sequence of data.seqlen tokens, for causal models with the token behind it."""

    prepared_by = PrepareConfig
    cuts_rows = True

    def split_size(self, split: SplitInfo) -> int:
        return split.tokens

    def split_words(self, split: SplitInfo) -> str:
        return f"{split.documents:,} with {split.tokens:,} tokens"

    def manifest_facts(self, data: DataConfig, manifests: Sequence[Manifest]) -> Facts:
        return TextFacts(manifests) if manifests[0].tokenizer else Facts()

    def facts(self, data: DataConfig, **asked: Any) -> Facts:
        if is_foreign(data.path, data.reader):
            return ForeignFacts(data, data.path)
        return super().facts(data, **asked)

    def open(self, data: DataConfig, reading: Reading, *, masking: MaskingConfig | None = None) -> Opened:
        """Opens the shards. masking: makes masked-LM batches; None = causal ones."""
        sources = self.datasets(data, reading.split)
        if not sources:
            raise ValueError(
                "no data given: set data.path to a prepared dataset, or data.mixture, or data.synthetic.task"
            )
        if is_foreign(path := next(iter(sources)), data.reader):
            return open_text(data, path, reading, masking)
        options = {"tokenizer_sha256": reading.tokenizer_sha256, **shard_options(data)}
        options["keep_open"] += data.carry * reading.global_batch_size
        shards = [open_dataset(path, reading.split, **options) for path in sources]
        for other in shards[1:]:
            if other.manifest.tokenizer.sha256 != shards[0].manifest.tokenizer.sha256:
                raise ValueError(
                    f"the datasets of a mixture need one tokenizer, but {shards[0].storage.path} and "
                    f"{other.storage.path} were prepared with different ones"
                )
        read, reader = streams(shards, data, reading)
        rows = TokenRows(read, data, reading, masking)
        fingerprint = {
            "data": [contents_digest(one, one.manifest.tokenizer.sha256) for one in shards],
            # What else decides batches or metrics, whatever path a dataset lies at.
            "manifest": [
                {
                    "bytes": one.info.bytes,
                    "dtype": one.manifest.dtype,
                    "special": dict(one.manifest.tokenizer.special),
                    "token_histogram": sha256_of(one.storage.file(one.manifest.token_histogram)),
                    "vocab_size": one.manifest.tokenizer.vocab_size,
                }
                for one in shards
            ],
            "weights": list(sources.values()),
            "split": reading.split,
            **{name: getattr(data, name) for name in ("seqlen", "packing", "prefix", "suffix")},
            "shuffle": reading.shuffles(data),
            "shuffle_block": data.shuffle_block,
            "seed": reading.seed,
            "objective": "causal" if masking is None else "masked",
            **({"window": data.window} if data.window else {}),
            **({"reverse_complement": data.reverse_complement} if data.reverse_complement else {}),
            **reader,
            # The rows of a global batch are the lanes.
            **({"carry": True, "global_batch_size": reading.global_batch_size} if data.carry else {}),
        }
        around = (data.prefix != "none") + (data.suffix != "none")
        return Opened(rows, TextFacts([one.manifest for one in shards], shards, around), fingerprint)


class TokenRows:
    """`Rows` of prepared text. With `data.skip_damaged`, samples that need a damaged shard are rows of padding, too."""

    def __init__(
        self, shards: Sequence[TokenShards], data: DataConfig, reading: Reading, masking: MaskingConfig | None
    ) -> None:
        self.packings = [_make_packing(one, data, reading, masking is None) for one in shards]
        weights = None if reading.one_pass else list(datasets_of(data, reading.split).values())
        sizes = [len(packing) for packing in self.packings]
        streaming = data.streams(one_pass=reading.one_pass)
        self.mixture = Streams(sizes, reading) if streaming else Mixture(sizes, weights)
        special, self.masker = shards[0].manifest.tokenizer.special, None
        if masking is not None:
            if special.get("mask") is None:
                raise ValueError(
                    f"masked-LM batches need a mask token, and the tokenizer of {shards[0].storage.path} has none; "
                    "prepare the data with a tokenizer that has one ([MASK] or <mask>)"
                )
            self.masker = Masker(masking, _load_tokenizer(shards[0]), reading.seed)
        self.strands = None
        if data.reverse_complement and not reading.one_pass:
            if reading.part != WHOLE:
                raise ValueError("data.reverse_complement turns whole rows, which engine.context cuts: set one of them")
            self.strands = Strands(data.reverse_complement, _load_tokenizer(shards[0]), reading.seed)
        self.seqlen, self.part, self.causal = data.seqlen, reading.part, masking is None
        self.packing, self.skip_damaged = data.packing, data.skip_damaged
        self.pad_id = special.get("pad") or 0
        self.limit = self.mixture.samples_per_epoch if reading.one_pass else None

    @property
    def samples_per_epoch(self) -> int:
        return self.mixture.samples_per_epoch

    @errors_as_failures
    def __getitems__(self, samples: list[int]) -> Batch | Failure:
        return self.batch(np.asarray(samples, dtype=np.int64))

    def batch(self, samples: np.ndarray) -> Batch:
        """Returns the micro-batch of sample numbers int64 (B,), or this rank's part of it."""
        from torch import from_numpy

        from matmix.data.loading.batch import packed_batch, part_batch, selecting

        pieces, room = list(self.part.pieces(len(samples), self.seqlen)), int(self.causal)
        continues = np.zeros(len(samples), dtype=bool)
        first, samples = pieces[0][1], samples[pieces[0][0] : pieces[-1][0] + 1]
        # Behind each piece there is room for its last target.
        tokens = np.full(sum(stop - start + room for _, start, stop in pieces), self.pad_id, dtype=np.int64)
        hidden = np.ones(len(tokens), dtype=bool)  # what is no target: padding, and the first token of a document
        begins = np.zeros((len(pieces), self.seqlen + room), dtype=bool)
        counts = np.zeros(len(pieces), dtype=np.int64)
        read: list[Stretch] = []
        ends, n_damaged, damaged = [0], 0, {}
        columns = samples, self.mixture.epoch(samples), *self.mixture.locate(samples)
        names = zip(*(column.tolist() for column in columns), strict=True)
        for number, ((_, start, stop), (sample, epoch, dataset, *slot)) in enumerate(zip(pieces, names, strict=True)):
            at, end = ends[-1], ends[-1] + stop - start + room
            ends.append(end)
            if self.limit is not None and sample >= self.limit:
                continue
            packing = self.packings[dataset]
            row = packing.row(*slot)
            try:
                if self.skip_damaged:
                    packing.check(row)  # a row is left out as a whole, whoever reads which part
                count = packing.read(row, start, tokens[at:end])
            except DamagedShard as error:
                if not self.skip_damaged:
                    raise
                tokens[at:end] = self.pad_id
                n_damaged += start == 0
                damaged.setdefault(error.where, str(error))
                continue
            if self.strands is not None:
                self.strands.turn(tokens[at : at + count], row.begins, epoch, sample)
            counts[number] = row.count
            continues[pieces[number][0]] = row.skipped > 0 and slot[1] >= packing.lanes
            for begin in row.begins:
                begins[number, begin] = True
            hidden[at : at + count] = begins[number, start : start + count]
            if self.masker is not None:
                read.append(Stretch(slice(at, at + count), epoch, sample, start, row.begins))
        if self.masker is not None:
            inputs, labels = self.masker.apply(tokens, read)
            weights = self.masker.weights(tokens, read) if self.masker.config.weighted else None
        else:
            inputs, labels = tokens, np.where(hidden, IGNORED, tokens)
        begins, counts = begins[:, : self.seqlen], np.minimum(counts, self.seqlen)
        if self.part.parts == 1:
            inputs, labels = inputs.reshape(len(samples), -1), labels.reshape(len(samples), -1)
            if room:
                inputs, labels = np.ascontiguousarray(inputs[:, :-1]), np.ascontiguousarray(labels[:, 1:])
            batch = packed_batch(inputs, labels, begins, counts, self.packing)
        else:
            if room:
                inputs, labels = np.delete(inputs, np.array(ends[1:]) - 1), np.delete(labels, ends[:-1])
            here = [
                max(min(count, stop) - start, 0)
                for (_, start, stop), count in zip(pieces, counts.tolist(), strict=True)
            ]
            batch = part_batch(inputs, labels, begins, counts, self.packing, first=first, n_tokens=sum(here))
        if self.masker is not None and weights is not None:
            batch.weights = from_numpy(weights.reshape(batch.labels.shape))
        if self.packings[0].lanes:
            batch.continues = from_numpy(continues)
        batch.n_damaged, batch.damaged = n_damaged, damaged
        return batch if self.causal else selecting(batch)


def _make_packing(shards: TokenShards, data: DataConfig, reading: Reading, causal: bool) -> Packing:
    kind = DocumentPacking if data.packing == "document" else ConcatPacking
    around = tuple(_special_id(shards, which, getattr(data, which)) for which in ("prefix", "suffix"))
    packing = kind(shards, data, reading, causal, around)
    where = f"the {shards.split} split of {shards.storage.path}"
    if len(packing) == 0 and kind is DocumentPacking:
        raise ValueError(f"{where} holds no documents")
    if len(packing) == 0:
        need = 2 if reading.one_pass else max(packing.lanes, 1) * max(data.window, data.seqlen) + causal
        each = f" in each of {packing.lanes} lanes (data.carry)" if packing.lanes else ""
        raise ValueError(
            f"{where} holds {packing.order.total_tokens} tokens (special ones included), fewer than the {need} of one "
            f"sequence{each} (data.seqlen = {data.seqlen}); take a smaller data.seqlen or more text"
        )
    return packing


def _special_id(shards: TokenShards, which: str, name: str) -> int | None:
    if name == "none":
        return None
    token = shards.manifest.tokenizer.special.get(name)
    if token is None:
        raise ValueError(
            f"data.{which} = {name!r}, but the tokenizer of {shards.storage.path} has no {name} token; "
            f'set data.{which} = "none" or prepare the data with a tokenizer that has it'
        )
    return token


def _load_tokenizer(shards: TokenShards) -> Tokenizer:
    from matmix.data.tokenizer import Tokenizer

    return Tokenizer.load(shards.storage.file(shards.manifest.tokenizer.file))
